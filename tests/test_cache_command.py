"""`vitsee cache`: Gram matrices listed and removed, and nothing else."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import invoke as vitsee
from tests.command_line import one_line
from tests.stores import write_sites


def listed(*words: object) -> list[dict[str, str]]:
    done = vitsee("cache", "ls", *words)
    assert done.exit_code == 0, done.stderr
    return list(csv.DictReader(done.stdout.splitlines()))


@pytest.mark.slow
def test_what_is_cached_is_listed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    rng = np.random.default_rng(0)
    ids = {}
    for name in "ab":
        acts = {f"blocks.{i}.out": rng.normal(size=(12, 7, 4)) for i in range(3)}
        ids[name] = write_sites(tmp_path / f"{name}.zarr", acts).manifest.store_id
    assert listed() == []
    assert vitsee("-q", "cka", "a.zarr").exit_code == 0
    assert vitsee("-q", "cka", "b.zarr", "--cache", "kept").exit_code == 0
    of_a, of_b = listed()
    assert (of_a["folder"], of_a["store_id"], of_a["n_matrices"]) == (
        "a.zarr.grams",
        ids["a"],
        "3",
    )
    assert (of_b["folder"], of_b["store_id"]) == ("kept", ids["b"])
    size = sum(file.stat().st_size for file in (tmp_path / "a.zarr.grams").iterdir())
    assert int(of_a["size_bytes"]) == size
    assert [row["folder"] for row in listed("a.zarr")] == [str(Path("a.zarr.grams"))]
    assert listed("b.zarr") == [], "its matrices are elsewhere"
    note, other = tmp_path / "kept" / "notes.txt", tmp_path / "kept" / "other.json"
    note.write_text("mine")
    other.write_text("{}")
    done = vitsee("cache", "rm", "a.zarr", "kept")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "removed 6 Gram matrices" in done.stderr and "in 2 folders" in done.stderr
    assert listed() == [] and not (tmp_path / "a.zarr.grams").exists()
    assert sorted((tmp_path / "kept").iterdir()) == [note, other]
    assert vitsee("validate", "--deep", "a.zarr", "b.zarr").exit_code == 0
    assert vitsee("-q", "cka", "a.zarr").exit_code == 0 and len(listed()) == 1


def test_what_is_no_place_of_caches(tmp_path: Path) -> None:
    for words in (("ls", tmp_path / "none"), ("rm", tmp_path / "none")):
        line = one_line("cache", *words)
        assert "none is no store and no folder; expected either" in line
    assert vitsee("cache", "rm").exit_code == 2
