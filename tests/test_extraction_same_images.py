"""Joining a store with other images of the same names, with the same ones from elsewhere, and with
another decoder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from tests.extractions import VIT, array_bytes, extract, extracted, plant_images
from vitsee_core.extraction import run
from vitsee_core.extraction.run import prepare
from vitsee_core.images import decoding
from vitsee_core.models import same_origin
from vitsee_core.runtime.versions import store_versions
from vitsee_stores import open_store

N, SLAB = 12, 4


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("clean"), N)


@pytest.fixture(scope="module")
def blurred(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same names, other pixels."""
    folder = tmp_path_factory.mktemp("blurred")
    for file in clean.rglob("*.png"):
        target = folder / file.relative_to(clean)
        target.parent.mkdir(exist_ok=True)
        Image.open(file).filter(ImageFilter.GaussianBlur(3)).save(target)
    return folder


@pytest.fixture(scope="module")
def made(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete store of the clean images; tests copy it."""
    path = tmp_path_factory.mktemp("made") / "store.zarr"
    extracted(*options(clean, path))
    return path


def options(data: Path, path: Path) -> list[object]:
    return [*VIT, "--data", data, "-o", path, "--slab", SLAB, "--sites", "logits"]


# Written out in another command: what made a complete store reads no images when it is repeated.
ANOTHER = "--on-error", "nan"


def refused(data: Path, path: Path, *phrases: str) -> None:
    before = array_bytes(path)
    result = extract(*options(data, path), *ANOTHER)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    line = result.stderr.splitlines()[-1]
    assert line.startswith("vitsee extract: ")
    for phrase in phrases:
        assert phrase in line
    assert array_bytes(path) == before


def test_other_images_do_not_fill_the_rest(
    clean: Path, blurred: Path, tmp_path: Path
) -> None:
    path = tmp_path / "store.zarr"
    extracted(*options(clean, path), "--shard", "0/3")
    first = open_store(path, allow_partial=True).samples.id[0]
    refused(
        blurred,
        path,
        "made from other images of the same names",
        first,
        "4 of 4 compared",
    )


def test_nor_do_they_pass_for_those_of_a_complete_store(
    made: Path, blurred: Path
) -> None:
    refused(
        blurred,
        made,
        "made from other images",
        f"and {N - 3} more",
        f"{N} of {N} compared",
    )


def test_nor_before_the_first_slab(clean: Path, blurred: Path, tmp_path: Path) -> None:
    """Nothing is committed: the check images alone tell."""
    path = tmp_path / "store.zarr"
    extracted(*options(clean, path))
    (path / "commits" / "c.0.0").unlink()
    (path / "commits" / "c.1.0").unlink()
    (path / "commits" / "c.2.0").unlink()
    refused(blurred, path, "made from other images", "4 of 4 compared")


@pytest.mark.slow
def test_two_arrays_of_one_length(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        images = rng.integers(0, 256, (6, 32, 48, 3), dtype=np.uint8)
        np.savez(tmp_path / f"{name}.npz", images=images)
    path = tmp_path / "store.zarr"
    extracted(*options(tmp_path / "a.npz", path))
    refused(tmp_path / "b.npz", path, "made from other images", "6 of 6 compared")


@pytest.mark.slow
def test_the_same_images_in_another_folder_go_on(
    clean: Path, made: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(clean, tmp_path / "moved")
    path = tmp_path / "store.zarr"
    extracted(*options(clean, path), "--shard", "0/2")
    extracted(*options(moved, path))
    assert array_bytes(path) == array_bytes(made)
    assert "is complete" in extracted(*options(moved, path), *ANOTHER).stderr


@pytest.mark.parametrize("how", ["other bytes", "missing"])
def test_one_committed_image_that_changed_is_named(
    how: str, clean: Path, made: Path, tmp_path: Path
) -> None:
    data = shutil.copytree(clean, tmp_path / "data")
    name = open_store(made).samples.id[7]  # none of the check images
    if how == "other bytes":
        with (data / name).open("ab") as file:
            file.write(b"\0")  # decodes to the same pixels
        refused(data, made, f"{name} in ", f"1 of {N} compared")
    else:
        (data / name).unlink()
        (data / name).symlink_to(tmp_path / "nowhere")
        refused(data, made, f"{name} (cannot be read)", f"1 of {N} compared")


@pytest.mark.slow
def test_unreadable_images_are_not_compared(clean: Path, tmp_path: Path) -> None:
    """Neither while they are unreadable nor once they are repaired."""
    data = shutil.copytree(clean, tmp_path / "data")
    path = tmp_path / "store.zarr"
    ids = list(map(str, _order(clean, tmp_path)))
    for name in (ids[1], ids[6]):  # a check image, and another
        (data / name).write_bytes(b"no picture")
    extracted(*options(data, path), "--shard", "0/3")
    assert open_store(path, allow_partial=True).valid[:4].tolist() == [
        True,
        False,
        True,
        True,
    ]
    extracted(*options(data, path), "--shard", "1/3")
    for name in (ids[1], ids[6]):
        shutil.copy(clean / name, data / name)
    extracted(*options(data, path))
    assert open_store(path).valid.tolist() == [row not in (1, 6) for row in range(N)]
    (data / ids[0]).write_bytes(b"no picture")
    refused(data, path, ids[0], f"1 of {N - 2} compared")


def _order(data: Path, tmp_path: Path) -> NDArray[np.str_]:
    extracted(*options(data, tmp_path / "order.zarr"))
    return open_store(tmp_path / "order.zarr").samples.id


def test_another_decoder_is_refused_with_its_version(
    clean: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitsee_core.images import loading

    def brighter(out: NDArray[np.uint8], *args: Any) -> Any:
        result = decoding.load_into(out, *args)
        out += 1
        return result

    monkeypatch.setattr(loading, "load_into", brighter)
    refused(
        clean,
        made,
        "the same image files come out with other pixels here",
        "same versions",
    )
    here = store_versions()
    monkeypatch.setattr(same_origin, "store_versions", lambda: {**here, "pillow": "99.1"})
    refused(clean, made, f"pillow {here['pillow']} then, 99.1 here")


def test_only_what_is_compared_is_read(
    clean: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four images are decoded and as many more read as are compared, whatever the store's size."""
    decoded: list[str] = []
    read: list[str] = []
    decode, of_file = decoding.decode, decoding.FileOpener._bytes

    def counted(name: str, encoded: bytes, exif: bool = False) -> Any:
        decoded.append(name)
        return decode(name, encoded, exif)

    def counted_bytes(opener: decoding.FileOpener, location: str) -> bytes:
        read.append(location)
        return of_file(opener, location)

    monkeypatch.setattr(decoding, "decode", counted)
    monkeypatch.setattr(decoding.FileOpener, "_bytes", counted_bytes)
    monkeypatch.setattr(same_origin, "COMPARED", 3)
    assert "is complete" in extracted(*options(clean, made), *ANOTHER).stderr
    first = open_store(made).samples.id[:4].tolist()
    assert sorted(set(decoded)) == sorted(first)
    assert len(set(read) - set(first)) <= 3 < len(set(read))


@pytest.mark.slow
def test_a_store_that_another_process_made_of_other_images_meanwhile(
    clean: Path, blurred: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.zarr"

    def overtaken(*args: Any) -> Any:
        monkeypatch.setattr(run, "prepare", prepare)
        prepared = prepare(*args)
        extracted(*options(blurred, path), "--shard", "0/3")
        return prepared

    monkeypatch.setattr(run, "prepare", overtaken)
    result = extract(*options(clean, path))
    assert result.exit_code == 1
    assert "made from other images of the same names" in result.stderr
    assert open_store(path, allow_partial=True).committed.tolist() == [True, False, False]


def test_hashes_without_decoding_are_those_with(tmp_path: Path) -> None:
    """Of files, tar members, arrays, shared arrays, and joint sources."""
    from tests.image_files import encoded, plant
    from vitsee_core.images import open_source
    from vitsee_core.images.image_source import join

    folder = open_source(str(plant(tmp_path / "data", "a/1.png", "b/2.png")))
    np.savez(
        tmp_path / "rows.npz", images=np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3)
    )
    rows = open_source(str(tmp_path / "rows.npz"))
    shutil.make_archive(str(tmp_path / "rolled"), "tar", tmp_path / "data")
    tar = open_source(str(tmp_path / "rolled.tar"))
    shared, _ = rows.opener.inherit()
    assert isinstance(shared, decoding.Opener)
    assert shared.hash(1) == rows.opener.hash(1) == rows.read(1)[1]
    for source in (folder, rows, tar, join("both", [rows, rows])):
        for k in range(len(source)):
            assert source.hash(k) == source.read(k)[1]
    assert tar.hash(0) == decoding.hash64(encoded(0))
