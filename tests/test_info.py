"""vitsee info: what a user and a script learn about a store."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import vitsee_stores
from tests.command_line import invoke, one_line
from tests.extractions import extracted
from tests.manifests import edited
from vitsee_cli import console
from vitsee_cli.commands.info import MAX_LABELS, _labels_text
from vitsee_stores import describe
from vitsee_stores.folder import Folder

MakeStore = Callable[..., Path]


def info(*args: object) -> Result:
    return invoke("info", *args)


def test_for_people(make_store: MakeStore) -> None:
    result = info(make_store())
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    for part in (
        *("tiny", "10 images", "3 of 3 slabs", "complete", "blocks.1.out", "7x4", "2x3"),
        *(
            "= blocks.0.out",
            "attention",
            "2 blocks",
            "residual",
            "1 sublayer",
        ),  # = : the alias
        "vitsee extract tiny",
    ):
        assert part in result.stdout, part


@pytest.mark.parametrize(
    ("file", "unread"), [("checksums/c.1.0", "n_valid"), ("samples/label/c.0", "labels")]
)
def test_what_cannot_be_read_is_said(
    make_store: MakeStore, file: str, unread: str
) -> None:
    store = make_store()
    assert "damaged" not in info(store).stdout
    (store / file).write_bytes((store / file).read_bytes()[:-9])
    result = info(store)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert f"damaged {unread} (run: vitsee validate --deep {store})" in said


def test_a_large_store_shows_how_far_it_is(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "SHOW_AFTER", 0.0)
    store = make_store()
    assert info(store, "-f", "n_valid").stderr.startswith(f"info {store}: 3/3 slabs, ")
    seen: list[tuple[int, int]] = []
    assert describe(store, lambda *slabs: seen.append(slabs)) == describe(store)
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_for_scripts(make_store: MakeStore) -> None:
    store = make_store()
    everything = json.loads(info(store, "--json").stdout)
    assert everything["complete"] is True
    assert info(store, "-f", "complete").stdout == "true\n"
    assert info(store, "-f", "model.name").stdout == "tiny\n"
    assert info(store, "-f", "store_id").stdout == everything["store_id"] + "\n"
    assert json.loads(info(store, "-f", "model").stdout) == everything["model"]
    assert info(store, "-f", "class_names.1").stdout == "odd\n"


def test_labels_and_their_counts(make_store: MakeStore) -> None:
    store = make_store()
    counted = [
        {"label": 0, "name": "even", "n_images": 5},
        {"label": 1, "name": "odd", "n_images": 5},
    ]
    assert json.loads(info(store, "-f", "labels").stdout) == counted
    assert "labels     even 5, odd 5\n" in info(store).stdout


@pytest.mark.parametrize(
    ("each", "said"), [((3, 3), "3 images"), ((1, 4), "1 to 4 images")]
)
def test_many_labels_are_counted(each: tuple[int, int], said: str) -> None:
    labels = [
        {"label": i, "name": str(i), "n_images": each[i % 2]}
        for i in range(MAX_LABELS + 1)
    ]
    assert (
        _labels_text(labels, "images")
        == f"{MAX_LABELS + 1} labels, {said} each (-f labels)"
    )


def test_a_long_field_has_lines(make_store: MakeStore) -> None:
    """Short ones stay on one, for scripts."""
    store = make_store()
    assert info(store, "-f", "sites.embed.shape").stdout == "[7, 4]\n"
    lines = info(store, "-f", "sites").stdout.splitlines()
    assert len(lines) > 20 and max(map(len, lines)) < 100
    hint = info(store, "-f", "nothing").stderr
    assert len(hint) < 600


def test_several_stores(make_store: MakeStore) -> None:
    a, b = make_store("a.zarr"), make_store("b.zarr", slabs=[0])
    lines = info(a, b).stdout.splitlines()
    about = ["store", "model", "weights", "data", "attention", "classes"]
    assert lines[0].split() == [*about, "images", "slabs", "sites", "sublayers", "size"]
    assert lines[1].split()[:7] == [str(a), "tiny", "summary", "2", "10", "3/3", "5"]
    assert "1/3, unfinished" in lines[2]
    assert len(lines) == 3
    assert [r["path"] for r in json.loads(info(a, b, "--json").stdout)] == [
        str(a),
        str(b),
    ]
    assert info(a, b, "-f", "n_committed").stdout == f"{a}\t3\n{b}\t1\n"
    for args in ([], ["--json"], ["-f", "complete"]):
        one_line("info", a, a.parent / "none.zarr", *args)
    assert info().exit_code == info(a, "--json", "-f", "model").exit_code == 2


def test_a_strangers_store_steers_no_terminal(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = vitsee_stores.describe(make_store())
    record["model"] = {"name": "\x1b]0;owned\x07\nstatus     forged"}
    record["sites"]["\x1b[2J"] = record["sites"].pop("embed")
    monkeypatch.setattr(vitsee_stores, "describe", lambda path: record)
    for args in ([], ["b.zarr"], ["-f", "model"], ["-f", "model.name"], ["--json"]):
        shown = info("a.zarr", *args).stdout
        assert all(c.isprintable() or c == "\n" for c in shown)
        assert "\nstatus     forged" not in info("a.zarr").stdout


def test_a_store_that_does_not_say_its_data(make_store: MakeStore) -> None:
    path = make_store()
    with edited(path) as manifest:
        manifest["info"]["data"] = None
    result = info(path)
    assert result.exit_code == 0, result.stderr
    assert "\nimages " in result.stdout and "\ndata " not in result.stdout


def test_unknown_field(make_store: MakeStore) -> None:
    store = make_store()
    for field in ("modle", "model.nam", "class_names.7", "model.name.x", ""):
        assert f"no field {field!r}" in one_line("info", store, "-f", field)
    assert "there is: model" in one_line("info", store, "-f", "modle")


def test_unfinished_store(make_store: MakeStore) -> None:
    store = make_store(slabs=[0, 2])
    assert "unfinished: 2 of 3 slabs" in info(store).stdout
    assert info(store, "-f", "complete").stdout == "false\n"
    assert "0 of 3 slabs" in info(make_store("none.zarr", slabs=[])).stdout


@pytest.mark.slow
def test_what_an_unfinished_store_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that began it, less its shard and --force, makes the rest."""
    monkeypatch.chdir(tmp_path)
    words = [
        "demo:vit",
        "--data",
        "demo:test",
        "--images",
        "24",
        "--slab",
        "2",
        "--tokens",
    ]
    words += ["pooled", "--sites", "embed", "--attention", "none", "--no-residual"]
    extracted(*words, "-o", "s.zarr", "--shard", "1/3")
    record = json.loads(info("s.zarr", "--json").stdout)
    assert record["missing"] == [[0, 0], [2, 3], [5, 6], [8, 9], [11, 11]]
    facts = dict(
        line.split(None, 1) for line in info("s.zarr").stdout.splitlines() if line
    )
    assert facts["missing"] == "slabs 0, 2 to 3, 5 to 6, 8 to 9, 11"
    line = info("s.zarr").stdout.partition("resumed by ")[2].splitlines()[0]
    assert shlex.split(line) == ["vitsee", "extract", *words, "-o", "s.zarr"]
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    shown = info(tmp_path / "s.zarr").stdout
    assert f"resumed by cd {tmp_path} && vitsee extract" in shown
    assert f"-o {tmp_path / 's.zarr'}\n" in shown
    monkeypatch.chdir(tmp_path)
    extracted(*shlex.split(line)[2:])
    record = json.loads(info("s.zarr", "--json").stdout)
    assert (record["complete"], record["missing"]) == (True, [])
    assert (
        "missing" not in info("s.zarr").stdout
        and "resumed by" not in info("s.zarr").stdout
    )


def test_many_holes_are_counted(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = vitsee_stores.describe(make_store(slabs=[0]))
    record["missing"] = [[3 * i, 3 * i + 1] for i in range(20)]
    monkeypatch.setattr(vitsee_stores, "describe", lambda path, report: record)
    shown = info("x.zarr").stdout
    assert ", 21 to 22 and 24 more (-f missing)\n" in shown


def test_no_store(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.zarr").write_text("x")
    for name in ("missing.zarr", "folder", "file.zarr"):
        for more in ([], ["--json"], ["-f", "complete"]):
            assert name in one_line("info", tmp_path / name, *more)


@pytest.mark.slow
def test_imports_no_models_and_no_pictures(make_store: MakeStore) -> None:
    code = (
        "import sys\n"
        "from vitsee_cli.main import main\n"
        f"main(['info', {str(make_store())!r}], standalone_mode=False)\n"
        "print([m for m in ('torch', 'timm', 'matplotlib', 'zarr') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_reads_each_slab_s_marker_once(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a million images there are thousands of them."""
    names: list[str] = []
    read, read_chunk = Folder.read, Folder.read_chunk

    def count(self: Folder, name: str, limit: int) -> bytes:
        names.append(name)
        return read(self, name, limit)

    def count_chunk(
        self: Folder, name: str, check: Callable[[int], None]
    ) -> memoryview[int]:
        names.append(name)
        return read_chunk(self, name, check)

    store = make_store()
    monkeypatch.setattr(Folder, "read", count)
    monkeypatch.setattr(Folder, "read_chunk", count_chunk)
    assert describe(store)["n_slabs"] == 3
    of_slabs = [
        f"{array}/c.{k}"
        for array in ("commits", "checksums", "n_valid")
        for k in range(3)
    ]
    expected = sorted(name if "n_valid" in name else f"{name}.0" for name in of_slabs)
    assert sorted(names) == sorted([*expected, "samples/label/c.0", "zarr.json"])
