"""Chunks and markers that are whole but not those that were committed: found and refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd
from numpy.testing import assert_array_equal

from tests.random_stores import PLANS, create, expected, slab_of, write
from vitsee_stores import StoreError, describe, metadata, open_store, validate
from vitsee_stores.layout import StorePlan, arrays

VIT = PLANS["vit"]
GRID = "acts/embed/grid"


def copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


def swap(one: Path, other: Path) -> None:
    first = one.read_bytes()
    copy(other, one)
    other.write_bytes(first)


def move_slab(source: Path, target: Path) -> None:
    for file in source.rglob("c.1*"):
        copy(file, target / file.relative_to(source))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.zarr, and b.zarr of the same shapes and other numbers."""
    folder = tmp_path_factory.mktemp("sealed")
    write(folder / "a.zarr", VIT)
    made = create(folder / "b.zarr", VIT)
    for k in range(VIT.n_slabs):
        slab = dict(slab_of(VIT, expected(VIT), k))
        slab[GRID] = slab[GRID] * np.float16(2)
        made.write_slab(k, slab, {})
    made.finish()
    return folder


@pytest.fixture
def store(stores: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stores / "a.zarr", tmp_path / "a.zarr"))


MOVES: dict[str, Callable[[Path, Path], None]] = {
    "two slabs swapped": lambda a, b: swap(
        a / GRID / "c.0.0.0.0", a / GRID / "c.1.0.0.0"
    ),
    "over another slab": lambda a, b: copy(
        a / GRID / "c.0.0.0.0", a / GRID / "c.1.0.0.0"
    ),
    "from another array": lambda a, b: copy(
        a / "acts/blocks.1.out/grid/c.1.0.0.0", a / GRID / "c.1.0.0.0"
    ),
    "from another store": lambda a, b: copy(
        b / GRID / "c.1.0.0.0", a / GRID / "c.1.0.0.0"
    ),
    "row of another slab": lambda a, b: copy(
        a / "checksums/c.0.0", a / "checksums/c.1.0"
    ),
    "row of another store": lambda a, b: copy(
        b / "checksums/c.1.0", a / "checksums/c.1.0"
    ),
    "no row": lambda a, b: (a / "checksums/c.1.0").unlink(),
    "marker of another slab": lambda a, b: copy(a / "commits/c.0.0", a / "commits/c.1.0"),
    "marker of another store": lambda a, b: copy(
        b / "commits/c.1.0", a / "commits/c.1.0"
    ),
    "a whole slab of another store": lambda a, b: move_slab(b, a),
}


@pytest.mark.parametrize("move", MOVES)
def test_what_is_in_the_wrong_place_is_found_and_refused(
    stores: Path, store: Path, move: str
) -> None:
    MOVES[move](store, stores / "b.zarr")
    assert any("slab 1" in line for line in validate(store)), "without --deep"
    with pytest.raises(
        StoreError, match=r"slab [01]: c\.[01]\..*\(run: vitsee validate"
    ) as error:
        open_store(store).acts("embed")[:]
    assert "\n" not in str(error.value)
    if "swapped" not in move:
        assert open_store(store).acts("embed")[:4].shape == (4, 16, 4)


@pytest.mark.parametrize(
    "array", ["samples/label", "samples/id", "weights/patch_filters"]
)
def test_arrays_written_once_are_those_of_the_manifest(
    stores: Path, store: Path, array: str
) -> None:
    name = next((store / array).glob("c*")).name
    spec = arrays(open_store(store).plan)[array]
    other = (np.zeros(spec.shape, spec.dtype) + 1).tobytes()
    (store / array / name).write_bytes(
        other + google_crc32c.value(other).to_bytes(4, "little")
    )
    assert any(
        line.startswith(f"{array}: {name} is not the chunk") for line in validate(store)
    )
    opened = open_store(store)
    with pytest.raises(StoreError, match="is not the chunk that was committed"):
        opened.samples.index if array.startswith("samples") else opened.array(array)[:]


def test_the_checksums_are_in_the_documented_order(store: Path) -> None:
    """Read with nothing but numpy and crc32c."""
    sound = sorted(
        path for path, spec in arrays(VIT).items() if spec.per not in ("once", "commit")
    )
    for k in range(VIT.n_slabs):
        data = (store / f"checksums/c.{k}.0").read_bytes()
        row = np.frombuffer(data[:-4], "<u4")
        place = 0
        for path in sound:
            names = sorted((store / path).glob("c.0*"))
            for name in names:
                file = name.with_name(name.name.replace("c.0", f"c.{k}", 1))
                body = file.read_bytes()[:-4] if file.exists() else b""
                wanted = (
                    google_crc32c.value(body) if file.exists() else 0
                )  # erf ends early
                assert row[place] == wanted, file
                place += 1
        assert place == len(row)
        marker = json.loads((store / f"commits/c.{k}.0").read_bytes()[:4096])
        assert marker["checksums"] == google_crc32c.value(data[:-4])
        assert marker["slab"] == k
        assert marker["store_id"] == describe(store)["store_id"]


def test_a_slab_made_anew_is_read_by_a_store_that_was_open(store: Path) -> None:
    opened = open_store(store)
    before = opened.acts("embed", "patches")[:]
    (store / "commits/c.1.0").unlink()
    slab = dict(slab_of(VIT, expected(VIT), 1))
    slab[GRID] = slab[GRID] + np.float16(1)
    create(store, VIT).write_slab(1, slab, {})
    assert_array_equal(opened.acts("embed", "patches")[4:8], slab[GRID])
    assert_array_equal(opened.acts("embed", "patches")[:4], before[:4])


def test_a_changed_manifest_is_refused(store: Path) -> None:
    text = (store / "zarr.json").read_text()
    assert text.count('"rel_depth": 0.3333333333333333') == 2
    changes: list[Callable[[str], str]] = [
        lambda t: t.replace('"rel_depth": 0.3333333333333333', '"rel_depth": 2.3', 1),
        lambda t: t.replace('"digest"', '"dijest"'),
        lambda t: t.replace('"class_names"', '"class_manes"'),
        lambda t: t.replace('"complete": true', '"complete": 1'),
        lambda t: t.replace('"complete"', '"cpmplete"'),
    ]
    for change in changes:
        assert change(text) != text
        (store / "zarr.json").write_text(change(text))
        for call in (open_store, validate, describe):
            with pytest.raises(StoreError, match="the manifest is damaged") as error:
                call(store)
            assert "\n" not in str(error.value)
    (store / "zarr.json").write_text(text)
    assert validate(store) == []
    changes = [
        lambda t: t.replace('"zarr_format": 3', '"zarr_format": 2'),
        lambda t: t.replace('"node_type": "group"', '"node_type": "grouq"'),
        lambda t: t.replace('"node_type"', '"mode_type"'),
    ]
    for change in changes:
        assert change(text) != text
        (store / "zarr.json").write_text(change(text))
        assert validate(store)
        assert open_store(store).complete, "readers take nothing from these"


# files that are none ---------------------------------------------------------------------------


def test_a_chunk_that_cannot_be_read_is_damage(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(store / GRID / "c.1.0.0.0")
    real = os.open

    def fails(path: object, *more: int) -> int:
        if os.fspath(path) == file:  # type: ignore[call-overload]
            raise OSError(5, "Input/output error")
        return real(path, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", fails)
    for deep in (False, True):
        said = f"{GRID}, slab 1: c.1.0.0.0 cannot be read: input/output error"
        assert validate(store, deep=deep) == [said]


@pytest.mark.parametrize(
    "place",
    [
        "zarr.json",
        "acts/zarr.json",
        f"{GRID}/c.1.0.0.0",
        "commits/c.1.0",
        "checksums/c.1.0",
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "zeros", "folder"])
def test_pipes_devices_and_folders_are_no_files(
    store: Path, place: str, kind: str
) -> None:
    (store / place).unlink()
    if kind == "pipe":
        os.mkfifo(store / place)
    elif kind == "zeros":
        (store / place).symlink_to("/dev/zero")
    else:
        (store / place).mkdir()
    if place == "zarr.json":
        for call in (open_store, validate, describe):
            with pytest.raises(StoreError, match="not a regular file"):
                call(store)
        return
    assert validate(store)
    if place != "acts/zarr.json":
        with pytest.raises(StoreError, match="slab 1"):
            open_store(store).acts("embed")[:]


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_chunk_that_unpacks_to_more_is_refused_before_it_is_unpacked(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.zarr"
    write(path, StorePlan(**{**vars(VIT), "codec": codec}))
    packer = Zstd(1) if codec == "zstd" else Blosc("lz4", 5, Blosc.SHUFFLE)
    size = (64 << 20) + 5
    body = bytes(packer.encode(np.zeros(size, np.uint8)))
    file = path / GRID / "c.1.0.0.0"
    file.write_bytes(body + google_crc32c.value(body).to_bytes(4, "little"))
    monkeypatch.setattr(np, "empty", refuse_large(np.empty))
    said = (
        f"unpacks to {size} bytes, expected"
        if codec == "zstd"
        else "unpacks|expected at most"
    )
    with pytest.raises(StoreError, match=said):
        open_store(path).acts("embed")[4:8]


def refuse_large(real: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:  # type: ignore[type-arg]
    def empty(shape: object, *more: object) -> np.ndarray:  # type: ignore[type-arg]
        array = real(shape, *more)
        assert array.nbytes < 1 << 20
        return array

    return empty


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 40 + "1" + "}" * 40,
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": ' + "9" * 5000 + "}",
        "\ufeff{}",
        '{"a": 1',
    ],
)
def test_json_that_is_refused(store: Path, text: str) -> None:
    with pytest.raises(ValueError):
        metadata.parse(text.encode())
    (store / "zarr.json").write_text(text)
    with pytest.raises(StoreError, match="is no JSON"):
        open_store(store)


def test_json_that_is_read() -> None:
    assert metadata.parse(b'{"a": [1, 2.5, "x", null, true]}') == {
        "a": [1, 2.5, "x", None, True]
    }
    assert metadata.parse(("[" * 32 + "]" * 32).encode())
