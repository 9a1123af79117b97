"""vitsee validate: a sound store is said to be sound, damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from vitsee_cli import console
from vitsee_cli.main import main

MakeStore = Callable[..., Path]


def validate(*args: object) -> Result:
    return CliRunner().invoke(main, ["validate", *map(str, args)])


def a_chunk(store: Path, array: str) -> Path:
    return sorted((store / array).glob("c*"))[0]


def test_sound(make_store: MakeStore) -> None:
    store = make_store()
    for more in ([], ["--deep"]):
        result = validate(store, *more)
        assert result.exit_code == 0, result.output
        assert result.stdout == f"ok: {store}: 3 of 3 slabs\n"
        assert result.stderr == ""


def test_long_checks_show_how_far_they_are(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "SHOW_AFTER", 0.0)
    store, other = make_store(), make_store("other.zarr", slabs=[1])
    shown = validate(store, other, "--deep").stderr.splitlines()
    assert [line.split(",")[0] for line in shown] == [
        f"validate {store}: 3/3 slabs",
        f"validate {other}: 1/1 slab",
    ]
    assert validate(store, "-q").stderr == ""


def test_unfinished_is_no_damage_but_said(make_store: MakeStore) -> None:
    result = validate(make_store(slabs=[1]), "--deep")
    assert result.exit_code == 0, result.output
    assert "1 of 3 slabs" in result.stdout
    assert "unfinished" in result.stdout


def test_as_json(make_store: MakeStore, tmp_path: Path) -> None:
    whole, part, cut = make_store(), make_store("p.zarr", slabs=[1]), make_store("c.zarr")
    a_chunk(cut, "pooled/embed/cls").unlink()
    places = (whole, part, cut, tmp_path / "none")
    done = validate(*places, "--json")
    assert done.exit_code == 1 and len(done.stderr.splitlines()) == 1
    records = json.loads(done.stdout)
    assert [record["store"] for record in records] == [str(place) for place in places]
    assert [record["ok"] for record in records] == [True, True, False, False]
    assert [record["complete"] for record in records] == [True, False, None, None]
    assert [len(record["damage"]) for record in records] == [0, 0, 1, 1]
    assert "pooled/embed/cls" in records[2]["damage"][0]
    assert validate(whole, "--json").exit_code == 0


def test_flipped_bit(make_store: MakeStore) -> None:
    store = make_store()
    chunk = a_chunk(store, "acts/blocks.1.out/grid")
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.write_bytes(data)
    result = validate(store, "--deep")
    assert result.exit_code == 1
    assert "acts/blocks.1.out/grid" in result.stdout
    assert len(result.stderr.splitlines()) == 1
    assert "is damaged" in result.stderr
    assert "acts/blocks.1.out/grid" in result.stderr
    assert result.stderr.endswith(
        " (delete commits/c.0.0, then repeat the vitsee extract command: it makes that slab "
        "again)\n"
    )


def test_what_to_do_is_said_of_slabs_only(make_store: MakeStore) -> None:
    store = make_store()
    a_chunk(store, "pooled/embed/cls").unlink()
    (store / "commits" / "c.2.0").write_bytes(b"")
    said = validate(store).stderr
    assert (
        "(delete commits/c.0.0, commits/c.2.0, then repeat the vitsee extract command"
        in said
    )
    (store / "valid" / "zarr.json").unlink()
    assert "delete" not in validate(store).stderr


def test_several_stores(make_store: MakeStore, tmp_path: Path) -> None:
    sound, cut, part = (
        make_store("a.zarr"),
        make_store("b.zarr"),
        make_store("c.zarr", slabs=[0]),
    )
    result = validate(sound, part)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        f"ok: {sound}: 3 of 3 slabs",
        f"ok: {part}: 1 of 3 slabs, unfinished",
    ]
    a_chunk(cut, "pooled/embed/cls").unlink()
    result = validate(tmp_path / "lost.zarr", sound, cut)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "lost.zarr" in lines[0] and "nothing is there" in lines[0]
    assert lines[1] == f"ok: {sound}: 3 of 3 slabs"
    assert lines[2].startswith(f"{cut}: pooled/embed/cls, slab 0: ")
    assert len(lines) == 3
    assert len(result.stderr.splitlines()) == 1
    assert "2 of 3 stores are damaged" in result.stderr
    assert validate().exit_code == 2


def test_a_store_s_name_without_its_ending_is_near(tmp_path: Path) -> None:
    (tmp_path / "a.zarr").mkdir()
    result = CliRunner().invoke(main, ["norms", str(tmp_path / "a")])
    assert result.exit_code == 1
    assert "nothing is there; near names: a.zarr (run: vitsee extract" in result.stderr
