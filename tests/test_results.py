"""Tables, and files that exist only when they are whole."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tests.tables import groups_of, having, unique
from vitsee_core.pages.report.outputs import Outputs, check_outputs, write_results
from vitsee_core.tables.files import check_new_files, rename_at_end, write_files
from vitsee_core.tables.results import Table, read_result
from vitsee_core.tables.sidecars import describe_run
from vitsee_stores.disk import tag
from vitsee_stores.errors import VitseeError


def table() -> Table:
    rows = [
        {"store": "a", "head": 0, "row": None, "value": 0.1},
        {"store": "b", "head": 1, "row": 3, "value": None},
        {"store": "a", "head": 2, "row": 4, "value": 1 / 3},
    ]
    return Table.from_rows(rows, notes={"seed": 7})


def csv_of(result: Table) -> str:
    file = io.StringIO()
    result.to_csv(file)
    return file.getvalue()


def test_csv_cells() -> None:
    assert csv_of(Table.from_rows([], ["store", "value"])) == "store,value\n"
    assert csv_of(table()) == (
        "store,head,row,value\na,0,,0.1\nb,1,3,\na,2,4,0.3333333333333333\n"
    )


@pytest.mark.slow
@given(st.floats())
def test_csv_floats_come_back(value: float) -> None:
    text = csv_of(Table({"value": np.array([value])})).splitlines()[1]
    read = float(text) if text not in ("", '""') else float("nan")
    assert read == value or (np.isnan(read) and np.isnan(value))


def test_columns_keep_their_types() -> None:
    columns = table()
    assert columns["head"].dtype.kind == "i"
    assert columns["value"].dtype == np.float64
    assert np.isnan(columns["value"][1])
    assert columns["row"].tolist() == [None, 3, 4]


def test_no_value_is_one_thing_in_frames_of_any_origin() -> None:
    """NaN, null and empty text are null, and an empty cell of the file."""
    given = {
        "site": ["a", "", None],
        "value": [float("nan"), 0.5, None],
        "n_images": [1, None, 3],
    }
    result = Table(pl.DataFrame(given, strict=False))
    assert result.frame.null_count().row(0) == (2, 2, 1)
    assert result.frame["value"].mean() == 0.5
    text = io.StringIO()
    result.to_csv(text)
    assert text.getvalue().splitlines() == ["site,value,n_images", "a,,1", ",0.5,", ",,3"]


def test_where_unique_groups_concat() -> None:
    result = table()
    assert result.filter(store="a")["head"].tolist() == [0, 2]
    assert having(result, store="a", head=[1, 2])["head"].tolist() == [2]
    assert len(result.filter(store="nobody")) == 0
    assert unique(result, "store") == ["a", "b"]
    assert [(label, len(rows)) for label, rows in groups_of(result, "store")] == [
        ("a", 2),
        ("b", 1),
    ]
    twice = Table.concat([result, result.filter(store="b")])
    assert twice["head"].tolist() == [0, 1, 2, 1]
    assert result.filter(store="a").notes == {"seed": 7}


def test_columns_of_two_lengths_are_a_bug() -> None:
    with pytest.raises(ValueError, match="one length"):
        Table({"a": np.zeros(2), "b": np.zeros(3)})


def picture() -> Figure:
    return Figure(figsize=(1, 1))


def write(outputs: Outputs, **kwargs: Any) -> str:
    stdout = io.StringIO()
    given: dict[str, Any] = {
        "figure": picture,
        "sidecar": {"command": ["vitsee"]},
        **kwargs,
    }
    write_results(table(), outputs, stdout=stdout, **given)
    return stdout.getvalue()


def test_without_files_the_csv_alone_goes_to_stdout() -> None:
    def never() -> Figure:
        raise AssertionError("nobody asked for a picture")

    assert write(Outputs(), figure=never) == csv_of(table())


def test_files_and_nothing_on_stdout(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path / "r.csv", tmp_path / "r.png")
    assert write(outputs) == ""
    assert (tmp_path / "r.csv").read_text() == csv_of(table())
    assert (tmp_path / "r.png").read_bytes()[1:4] == b"PNG"
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    assert {*sidecar["columns"]} == {*table().written.columns}
    assert (
        sidecar["sha256"] == hashlib.sha256((tmp_path / "r.csv").read_bytes()).hexdigest()
    )
    digest = sidecar.pop("digest")
    assert read_result(tmp_path / "r.csv").as_written
    for edited in ({**sidecar, "rows": 4, "digest": digest}, {**sidecar, "digest": "x"}):
        (tmp_path / "r.csv.json").write_text(json.dumps(edited))
        assert read_result(tmp_path / "r.csv").changed
    del sidecar["columns"], sidecar["sha256"]
    assert sidecar == {"command": ["vitsee"], "rows": 3, "notes": {"seed": 7}}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.csv", "r.csv.json", "r.png"]


def test_a_sidecar_is_strict_json(tmp_path: Path) -> None:
    write(
        Outputs(tmp_path / "r.csv"),
        sidecar={"lr": float("inf"), "parts": [float("nan"), 1]},
    )
    text = (tmp_path / "r.csv.json").read_text()
    sidecar = json.loads(
        text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    assert (sidecar["lr"], sidecar["parts"]) == (None, [None, 1])


def test_picture_beside_stdout(tmp_path: Path) -> None:
    assert write(Outputs(png=tmp_path / "r.png")) == csv_of(table())
    assert (tmp_path / "r.png").is_file()


def test_failing_picture_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Figure:
        raise RuntimeError("cannot draw")

    with pytest.raises(RuntimeError):
        write(Outputs(tmp_path / "r.csv", tmp_path / "r.png"), figure=broken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("existing", ["r.csv", "r.csv.json", "r.png"])
def test_existing_outputs_are_refused_unless_forced(
    tmp_path: Path, existing: str
) -> None:
    (tmp_path / existing).write_text("mine")
    outputs = Outputs(tmp_path / "r.csv", tmp_path / "r.png")
    with pytest.raises(VitseeError, match=rf"{existing} exists; .*--force"):
        check_outputs(outputs)
    with pytest.raises(VitseeError, match="exists"):
        write(outputs)
    assert (tmp_path / existing).read_text() == "mine"
    forced = Outputs(outputs.csv, outputs.png, force=True)
    check_outputs(forced)
    write(forced)
    assert (tmp_path / existing).read_bytes() != b"mine"


def test_places_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d.csv").mkdir()
    (tmp_path / "null.csv").symlink_to(os.devnull)
    (tmp_path / "file").write_text("")
    for outputs, line in (
        (Outputs(tmp_path / "d.csv", force=True), "no ordinary file"),
        (Outputs(tmp_path / "null.csv", force=True), "no ordinary file"),
        (Outputs(tmp_path / "missing" / "r.csv"), "there is no folder"),
        (Outputs(tmp_path / "file" / "r.csv"), "there is no folder"),
        (
            Outputs(png=tmp_path / "r.jpg"),
            r"--png .*r\.jpg is refused: .*ends in \.png, \.svg or",
        ),
    ):
        with pytest.raises(VitseeError, match=line):
            check_outputs(outputs)
    with pytest.raises(VitseeError, match="two outputs"):
        check_new_files([tmp_path / "r.csv", tmp_path / "." / "r.csv"])
    # Asked through os.access, as root may write anywhere.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(VitseeError, match="not writable"):
        check_outputs(Outputs(tmp_path / "r.csv"))


def test_names_as_long_as_they_can_be(tmp_path: Path) -> None:
    """No temporary name is longer, and none is shown."""
    longest = tmp_path / ("x" * 251 + ".csv")
    write_files({longest: b"whole"})
    assert longest.read_bytes() == b"whole"
    longer = tmp_path / ("x" * 252 + ".csv")
    with pytest.raises(OSError, match="name too long") as error:
        check_new_files([longer])
    assert error.value.filename == str(longer)
    assert [path.name for path in tmp_path.iterdir()] == [longest.name]


def test_what_a_killed_process_was_writing_goes_with_the_next_file(
    tmp_path: Path,
) -> None:
    """Not what a living one writes, nor folders of other machines, whose age tells nothing; of
    these only old files."""
    process = subprocess.Popen(["true"])
    process.wait()
    ended, elsewhere = f"{tag().partition('-')[0]}-{process.pid}", "0123abcd-1"

    def name(maker: str, n: int) -> Path:
        return tmp_path / f".vitsee.{maker}.{n}a.partial"

    for n, maker in enumerate((ended, tag(), elsewhere)):
        name(maker, n).touch()
        (name(maker, n + 10) / "below").mkdir(parents=True)
        name(maker, n + 20).touch()
        for old in (n + 10, n + 20):
            os.utime(name(maker, old), (0, 0))
    write_files({tmp_path / "r.csv": b"1"})
    stays = [(tag(), 1), (tag(), 11), (tag(), 21), (elsewhere, 2), (elsewhere, 12)]
    assert set(tmp_path.iterdir()) == {tmp_path / "r.csv", *(name(*one) for one in stays)}


def test_what_must_not_be_removed_does_not_keep_a_file_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder such as /tmp, others' files may be seen but not removed."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == theirs:
            raise PermissionError(1, "Operation not permitted")

    (theirs := tmp_path / ".vitsee.0123abcd-1.0a.partial").touch()
    os.utime(theirs, (0, 0))
    monkeypatch.setattr(Path, "unlink", refuse)
    write_files({tmp_path / "r.csv": b"1"})
    assert (tmp_path / "r.csv").read_bytes() == b"1" and theirs.exists()


def test_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "old").write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(VitseeError, match="no space left"):
        write_files({tmp_path / "new": b"1", tmp_path / "old": b"2"}, force=True)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("old", "old")]


def test_links_are_followed_and_modes_are_the_users(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "r.csv"
    link.symlink_to(tmp_path / "there" / "real.csv")
    write_files({link: b"1"})
    assert link.is_symlink()
    assert (tmp_path / "there" / "real.csv").read_bytes() == b"1"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(link.stat().st_mode) == 0o666 & ~umask


def test_files_are_renamed_at_the_end_or_dropped(tmp_path: Path) -> None:
    places = {
        tmp_path / "a.partial": tmp_path / "a",
        tmp_path / "b.partial": tmp_path / "b",
    }

    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    def write() -> None:
        for temporary in places:
            temporary.write_text(temporary.name)

    with rename_at_end(dict(places)):
        write()
        assert names() == ["a.partial", "b.partial"]
    assert names() == ["a", "b"]
    assert (tmp_path / "b").read_text() == "b.partial"
    for path in places.values():
        path.unlink()
    with pytest.raises(KeyboardInterrupt), rename_at_end(dict(places)):
        write()
        raise KeyboardInterrupt
    assert names() == []
    with rename_at_end(emptied := dict(places)):
        write()
        emptied.clear()
    assert names() == [], "the caller changed his mind"
    with pytest.raises(FileNotFoundError), rename_at_end(dict(places)):
        (tmp_path / "a.partial").touch()
    assert names() == ["a"], "those before the one that was not written"


def test_describe_run(make_store: Any) -> None:
    from vitsee_stores import open_store

    store = open_store(make_store("tiny.zarr"), label="mine")
    given = {"metrics": ("a", "b"), "seed": 3, "out": Path("x.csv")}
    record = describe_run([store], command=["vitsee", "x"], parameters=given)
    assert json.loads(json.dumps(record)) == record
    assert record["parameters"] == {"metrics": ["a", "b"], "seed": 3, "out": "x.csv"}
    assert record["stores"][0]["label"] == "mine"
    assert record["stores"][0]["store_id"] == store.manifest.store_id
    assert record["versions"]["numpy"] == np.__version__


def test_the_sidecar_says_what_columns_hold(tmp_path: Path) -> None:
    """An analysis' own columns need no list of names: text that looks like numbers stays text."""
    rows: list[dict[str, Any]] = [
        {"store": "5", "type": "7", "k": 3, "row": None, "l2": None, "empty": None},
        {"store": "6", "type": "8", "k": None, "row": None, "l2": 0.5, "empty": None},
    ]
    table = Table.from_rows(rows)
    out = tmp_path / "r.csv"
    write_results(
        table, Outputs(csv=out), figure=Figure, sidecar={}, stdout=io.StringIO()
    )
    found = Table.read(out)
    assert found["type"].tolist() == ["7", "8"]
    assert found["store"].tolist() == ["5", "6"]
    assert found["k"].tolist() == [3, None]
    assert np.isnan(found["l2"][0]) and found["l2"][1] == 0.5
    kinds = json.loads((tmp_path / "r.csv.json").read_text())["columns"]
    assert (
        kinds["k"] == "integer" and kinds["l2"] == "number" and kinds["empty"] == "empty"
    )
    assert found["empty"].tolist() == [None, None]
    (tmp_path / "r.csv.json").unlink()
    assert Table.read(out)["type"].tolist() == ["7", "8"]  # declared
    assert Table.read(out)["l2"].tolist()[1] == 0.5  # inferred
    assert Table.read(out)["store"].tolist() == ["5", "6"]


@pytest.mark.parametrize("rest", ["", "5"])
def test_whole_numbers_beyond_64_bits_are_floats(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(f"store,k\na,{10**30}\nb,{rest}\n")
    found = read_result(path).table["k"]
    assert found.dtype == np.float64 and found[0] == 1e30
    assert np.isnan(found[1]) if not rest else found[1] == 5


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("rows", "shown"), [(2000, 2000), (2001, 50)])
def test_a_terminal_is_not_flooded(
    rows: int, shown: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Pipes and files get the whole table."""
    table = Table({"n": np.arange(rows)})
    for stdout, expected in ((Terminal(), shown), (io.StringIO(), rows)):
        caplog.clear()
        write_results(table, Outputs(), figure=Figure, sidecar={}, stdout=stdout)
        assert stdout.getvalue() == "\n".join(["n", *map(str, range(expected))]) + "\n"
        said = f"the first 50 of {rows:,} rows, as this is a terminal; -o FILE keeps them all"
        assert (said in caplog.text) == (expected < rows)
