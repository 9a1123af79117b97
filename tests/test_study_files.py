"""A study replaces files that it wrote, and refuses before any work where others are in the way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.command_line import invoke as vitsee
from tests.studies import study
from vitsee_core.study.record import Record, check_outputs, make_folders
from vitsee_core.study.running import Outcome, Stopped, carry_out
from vitsee_core.study.steps import Step
from vitsee_stores.errors import VitseeError


def test_only_the_studys_own_files_are_replaced(tmp_path: Path) -> None:
    """Its own also where it was stopped while it wrote them, or the folder was moved since."""
    asked = study(tmp_path / "out")
    (tmp_path / "out").mkdir()
    table = asked.result("a")
    a = Step("a", ("a",), (), (table, table.with_suffix(".png"), asked.store("vit")))
    make_folders(asked)
    asked.store("vit").mkdir()
    record = Record(asked.folder / "study.json")
    check_outputs(asked, [a], record)  # a store is extract's to refuse
    for other in ("a.csv", "a.png", "a.csv.json", "a.replicates.csv"):
        (table.parent / other).write_text("mine")
        with pytest.raises(
            VitseeError, match=f"results/{other} would be replaced, and .*study.j"
        ):
            check_outputs(asked, [a], record)
        (table.parent / other).unlink()

    def write(step: Step, code: int = 0) -> Outcome:
        for path in step.outputs[:2]:
            path.write_text("made")
        return Outcome(code)

    table.write_text("mine")
    carry_out([replace(a, outputs=())], record, lambda step: Outcome(1), print)
    with pytest.raises(
        VitseeError, match="would be replaced"
    ):  # a step that failed wrote nothing
        check_outputs(asked, [a], record)
    table.unlink()
    with pytest.raises(Stopped):
        carry_out([a], record, partial(write, code=130), print)
    check_outputs(asked, [a], Record.read(asked.folder))
    carry_out([a], record, write, print)
    asked.folder.rename(tmp_path / "moved")
    moved = study(tmp_path / "moved")
    b = Step("a", ("a",), (), (moved.result("a"),))
    check_outputs(moved, [b], Record.read(moved.folder))


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    """What a link names would be replaced, wherever it is; folders may be links to other disks."""
    asked = study(tmp_path / "out")
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results").symlink_to(tmp_path / "disk")
    table = asked.result("a")
    step = Step("a", ("a",), (), (table, table.with_suffix(".png")))
    record = Record(asked.folder / "study.json")
    check_outputs(asked, [step], record)
    (tmp_path / "mine.txt").write_text("mine")
    for link in (
        table,
        table.with_suffix(".png"),
        table.with_name("a.csv.json"),
        record.path,
    ):
        link.symlink_to(tmp_path / "mine.txt")
        with pytest.raises(
            VitseeError, match=r"is a link to .*mine\.txt, outside of the study"
        ):
            check_outputs(asked, [step], record)
        link.unlink()


@pytest.mark.slow
def test_files_of_others_are_refused_before_any_work(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (folder / "results").mkdir(parents=True)
    words = ["study", "demo:vit", "--data", "demo:test", "--images", "4", "-o", str(folder),
             "--analyses", "spectrum"]  # fmt: skip
    for mine in (folder / "results" / "spectrum.csv", folder / "report.html"):
        mine.write_text("mine")
        done = vitsee(*words)
        assert done.exit_code == 1 and done.stdout == "" and done.stderr.count("\n") == 1
        assert f"{mine} would be replaced" in done.stderr and mine.read_text() == "mine"
        assert not (folder / "stores").exists() and not (folder / "study.json").exists()
        mine.unlink()
    assert vitsee(*words).exit_code == 0
    (folder / "results" / "spectrum.csv").write_text("its own, changed")
    assert vitsee(*words).exit_code == 0
    assert (folder / "results" / "spectrum.csv").read_text() != "its own, changed"
