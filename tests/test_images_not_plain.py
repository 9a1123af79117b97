"""Images that are not plain RGB: EXIF orientation left alone or applied, what is dropped or changed
counted, and the warnings of Pillow and libtiff heard in place of printed."""

from __future__ import annotations

import io
import struct
import tarfile
import threading
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps
from pyarrow import parquet

import vitsee
from tests.image_files import plant
from vitsee_core.extraction.options import DataOptions
from vitsee_core.images import batches, open_source, select
from vitsee_core.images.clips import ClipRecipe
from vitsee_core.images.decoding import decode, header_size, load_into
from vitsee_core.images.picture_remarks import (
    ALPHA,
    CMYK,
    EXIF_APPLIED,
    EXIF_IGNORED,
    FRAMES,
    SIXTEEN_BITS,
    WARNED,
    remark_lines,
    remarks_on,
)
from vitsee_core.images.pillow_warnings import heard_warnings
from vitsee_core.images.transform import make_recipe
from vitsee_core.images.videos import Sampling
from vitsee_core.models.provenance import Pictures, source_of

RECIPE = make_recipe(
    {
        "input_size": (3, 4, 4),
        "crop_pct": 1.0,
        "crop_mode": "squash",
        "interpolation": "nearest",
    }
)
KINDS = ("JPEG", "PNG", "WEBP")
# Where the pixel in the upright image's first row and first column lies in the file, by EXIF 2.3,
# table of the tag: (row, column) of the file, 0 the first and -1 the last.
FIRST_PIXEL = {
    1: (0, 0),
    2: (0, -1),
    3: (-1, -1),
    4: (-1, 0),
    5: (0, 0),
    6: (-1, 0),
    7: (-1, -1),
    8: (0, -1),
}


def corners() -> NDArray[np.uint8]:
    """(16, 24, 3): four even quarters of different greys."""
    pixels = np.zeros((16, 24, 3), np.uint8)
    pixels[:8, :12], pixels[:8, 12:] = 40, 100
    pixels[8:, :12], pixels[8:, 12:] = 160, 220
    return pixels


def photo(kind: str, orientation: int | None, **options: Any) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
        options["exif"] = exif
    if kind == "WEBP":
        options["lossless"] = True
    Image.fromarray(corners()).save(file, kind, **options)
    return file.getvalue()


def near(a: Any, b: Any) -> bool:
    return abs(int(np.mean(a)) - int(np.mean(b))) < 12  # a JPEG changes less


# ---------------------------------------------------------------------------------- orientation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_each_orientation_is_left_alone_or_turned_upright(
    kind: str, orientation: int
) -> None:
    data, raw = photo(kind, orientation), corners()
    as_it_is, value = decode("x", data)
    assert near(np.asarray(as_it_is)[0, 0], raw[0, 0]) and as_it_is.size == (24, 16)
    upright, same = decode("x", data, exif=True)
    assert value == same
    row, column = FIRST_PIXEL[orientation]
    pixels = np.asarray(upright.convert("RGB"))
    assert near(pixels[0, 0], raw[row, column])
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(np.asarray(upright), np.asarray(expected))
    assert header_size("x", io.BytesIO(data)) == (16, 24)
    assert header_size("x", io.BytesIO(data), exif=True) == pixels.shape[:2]
    assert remarks_on(as_it_is) == (() if orientation == 1 else (EXIF_IGNORED,))
    assert remarks_on(upright) == (() if orientation == 1 else (EXIF_APPLIED,))


@pytest.mark.parametrize("orientation", [0, 9, 65535, None])
def test_orientations_that_are_none_change_nothing(orientation: int | None) -> None:
    image, _ = decode("x", photo("JPEG", orientation), exif=True)
    assert image.size == (24, 16) and remarks_on(image) == ()


def test_tiff_is_turned_by_pillow_itself() -> None:
    for exif in (False, True):
        image, _ = decode("x", photo("TIFF", 6), exif=exif)
        assert image.size == (16, 24) and remarks_on(image) == ()
        assert header_size("x", io.BytesIO(photo("TIFF", 6)), exif=exif) == (24, 16)


def test_damaged_metadata_leaves_an_image_readable() -> None:
    data = photo("JPEG", 6)
    at = data.index(b"Exif\0\0") + 6
    for k in range(24):
        damaged = bytearray(data)
        damaged[at + k] ^= 0xFF
        image, _ = decode("x", bytes(damaged), exif=True)
        assert image.size in ((24, 16), (16, 24))


def test_every_source_of_files_turns_its_images(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jpg").write_bytes(photo("JPEG", 6))
    (tmp_path / "d" / "b.jpg").write_bytes(photo("JPEG", 6))
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as packed:
        packed.write(tmp_path / "d" / "a.jpg", "a.jpg")
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(tmp_path / "d" / "a.jpg", "a.jpg")
    parquet.write_table(
        pyarrow.table({"image": [photo("JPEG", 6)]}), tmp_path / "p.parquet"
    )
    for name in ("d", "z.zip", "t.tar", "p.parquet", "d/*.jpg"):
        source = open_source(f"{tmp_path}/{name}", exif=True)
        assert source.size(0) == (24, 16), name
        assert source.read(0)[0].size == (16, 24), name
        plain = open_source(f"{tmp_path}/{name}")
        assert plain.size(0) == (16, 24) and plain.read(0)[1] == source.read(0)[1]


def test_boxes_are_in_the_pixels_of_the_upright_image(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(
        photo("JPEG", 6)
    )  # 24 x 16 in the file, 16 x 24 upright
    (tmp_path / "l.csv").write_text("path,box\na.jpg,0 12 16 24\n")
    source = open_source(str(tmp_path / "l.csv"), exif=True)
    assert source.size(0) == (12, 16)
    image, _ = source.read(0)
    upright, _ = decode("a.jpg", photo("JPEG", 6), exif=True)
    np.testing.assert_array_equal(np.asarray(image), np.asarray(upright)[12:24, 0:16])
    assert remarks_on(image) == (EXIF_APPLIED,)  # kept by cropping
    with pytest.raises(
        vitsee.VitseeError, match="reaches out of its image, which has 24 x 16"
    ):
        open_source(str(tmp_path / "l.csv"))


def test_frames_in_folders_are_turned_and_remarked_once_a_clip(tmp_path: Path) -> None:
    folder = tmp_path / "d" / "clip"
    folder.mkdir(parents=True)
    for k in range(3):
        (folder / f"{k}.jpg").write_bytes(photo("JPEG", 6))
    for exif, size in ((False, (16, 24)), (True, (24, 16))):
        source = open_source(str(tmp_path / "d"), clips=True, exif=exif)
        out = np.zeros((1, 2, 3, 4, 4), np.uint8)
        recipe = ClipRecipe(RECIPE, Sampling(2))
        facts = load_into(out, source.opener, [source.locations[0]], recipe)
        assert tuple(facts.size[0]) == size
        assert facts.remarks == {EXIF_APPLIED if exif else EXIF_IGNORED: 1}


# -------------------------------------------------------------------------------------- remarks


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_16_bits(n_channels: int) -> bytes:
    """A PNG of 16 bits a channel by hand, as Pillow writes none in colour."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data))
            + name
            + data
            + struct.pack(">I", zlib.crc32(name + data))
        )

    colour = {1: 0, 2: 4, 3: 2, 4: 6}[n_channels]
    rows = b"".join(b"\0" + b"\x12\x34" * n_channels * 6 for _ in range(4))
    head = struct.pack(">IIBBBBB", 6, 4, 16, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(name, data)
        for name, data in (
            (b"IHDR", head),
            (b"IDAT", zlib.compress(rows)),
            (b"IEND", b""),
        )
    )


def palette(transparent: bool) -> bytes:
    image = Image.new("RGB", (6, 4), (9, 8, 7)).quantize(4)
    return saved(image, "PNG", **({"transparency": 0} if transparent else {}))


def frames(kind: str) -> bytes:
    pictures = [Image.new("RGB", (6, 4), (k * 60, 0, 9)) for k in range(3)]
    return saved(pictures[0], kind, save_all=True, append_images=pictures[1:])


PICTURES: dict[str, tuple[bytes, set[str]]] = {
    "RGB": (saved(Image.new("RGB", (6, 4)), "PNG"), set()),
    "grey": (saved(Image.new("L", (6, 4)), "PNG"), set()),
    "1 bit": (saved(Image.new("1", (6, 4)), "PNG"), set()),
    "RGBA": (saved(Image.new("RGBA", (6, 4)), "PNG"), {ALPHA}),
    "LA": (saved(Image.new("LA", (6, 4)), "PNG"), {ALPHA}),
    "RGBA WebP": (saved(Image.new("RGBA", (6, 4)), "WEBP", lossless=True), {ALPHA}),
    "palette": (palette(False), set()),
    "palette with alpha": (palette(True), {ALPHA}),
    "RGB with one transparent colour": (
        saved(Image.new("RGB", (6, 4)), "PNG", transparency=(0, 0, 0)),
        {ALPHA},
    ),
    "CMYK": (saved(Image.new("CMYK", (6, 4)), "JPEG"), {CMYK}),
    "CMYK TIFF": (saved(Image.new("CMYK", (6, 4)), "TIFF"), {CMYK}),
    "16 bits PNG": (saved(Image.new("I;16", (6, 4), 999), "PNG"), {SIXTEEN_BITS}),
    "16 bits TIFF": (saved(Image.new("I;16", (6, 4), 999), "TIFF"), {SIXTEEN_BITS}),
    "16 bits by hand": (png_16_bits(1), {SIXTEEN_BITS}),
    "16 bits LA": (png_16_bits(2), {SIXTEEN_BITS, ALPHA}),
    "16 bits RGB": (png_16_bits(3), {SIXTEEN_BITS}),
    "16 bits RGBA": (png_16_bits(4), {SIXTEEN_BITS, ALPHA}),
    "16 bits PPM": (b"P6 6 4 65535\n" + b"\x12\x34" * 72, {SIXTEEN_BITS}),
    "8 bits PPM": (b"P6 6 4 255\n" + b"\x12" * 72, set()),
    "GIF": (frames("GIF"), {FRAMES}),
    "one GIF": (saved(Image.new("RGB", (6, 4)), "GIF"), set()),
    "WebP": (frames("WEBP"), {FRAMES}),
    "APNG": (frames("PNG"), {FRAMES}),
    "TIFF pages": (frames("TIFF"), {FRAMES}),
    "MPO": (frames("MPO"), {FRAMES}),
    "AVIF": (frames("AVIF"), {FRAMES}),
}


@pytest.mark.parametrize("name", PICTURES)
def test_what_becomes_of_each_kind_of_image_is_counted(name: str) -> None:
    data, expected = PICTURES[name]
    image, _ = decode(name, data)
    assert set(remarks_on(image)) == expected
    # Pixels are those of Pillow's first frame, as before.
    first = Image.open(io.BytesIO(data))
    first.load()
    assert image.mode == first.mode
    np.testing.assert_array_equal(np.asarray(image), np.asarray(first))
    assert RECIPE.apply(image).shape == (3, 4, 4)


def test_the_line_of_each_remark() -> None:
    counts = {ALPHA: 2, EXIF_IGNORED: 3, WARNED: 2, f"{WARNED}: a": 1, f"{WARNED}: b": 2}
    assert remark_lines(counts, "5 images") == [
        "3 of 5 images have an EXIF orientation, which was not applied (--exif turns them upright)",
        "2 of 5 images have an alpha channel, which was dropped",
        "2 of 5 images made Pillow warn, and were read: b; a",
    ]
    assert remark_lines({}, "5 images") == []


# ------------------------------------------------------------------------------------- warnings


def test_warnings_of_pillow_are_heard_for_the_image_alone() -> None:
    with warnings.catch_warnings(record=True) as printed:
        warnings.simplefilter("always")
        with heard_warnings() as outer, heard_warnings() as messages:
            _warn_as_pillow("of the image")
            other = threading.Thread(target=_warn_as_pillow, args=("of another thread",))
            other.start()
            other.join()
        _warn_as_pillow("afterwards")
    assert messages == outer == ["of the image"]
    assert [str(one.message) for one in printed] == ["of another thread", "afterwards"]


def _warn_as_pillow(text: str) -> None:
    warnings.warn_explicit(text, UserWarning, "Image.py", 1, module="PIL.Image")


def test_a_warning_is_a_remark_each_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Pillow warns as it converts a palette with several transparent entries."""
    image = Image.new("P", (6, 4))
    image.putpalette([k for k in range(256) for _ in range(3)])
    for name in ("a.png", "b.png"):
        image.save(tmp_path / name, transparency=bytes([0, 128, 255]))
    plant(tmp_path, "c.png")
    source = open_source(str(tmp_path))
    out = np.zeros((3, 3, 4, 4), np.uint8)
    facts = load_into(out, source.opener, list(source.locations), RECIPE)
    assert facts.valid.all()
    text = "Palette images with Transparency expressed in bytes should be converted to RGBA images"
    assert facts.remarks == {ALPHA: 2, WARNED: 2, f"{WARNED}: {text}": 2}
    assert capfd.readouterr().err == ""


def test_what_pillow_logs_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    """A TIFF that says it has 2051 samples a pixel: Pillow logs an error, which is printed."""
    data = bytearray(saved(Image.fromarray(corners()), "TIFF"))
    entry = data.index(struct.pack("<HHI", 277, 3, 1))
    data[entry + 8 : entry + 10] = struct.pack("<H", 2051)
    with heard_warnings() as messages, pytest.raises(vitsee.VitseeError):
        decode("x.tif", bytes(data))
    assert "More samples per pixel than can be decoded: 2051" in messages
    assert capfd.readouterr().err == ""


def test_libtiff_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    data = saved(Image.fromarray(corners()), "TIFF", compression="tiff_lzw")
    for at in range(8, len(data), 3):
        damaged = bytearray(data)
        damaged[at] ^= 0x55
        try:
            decode("x.tif", bytes(damaged))
        except vitsee.VitseeError:
            continue
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


# ----------------------------------------------------------------------------------- extraction


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six images: two turned, one with alpha, one of three frames."""
    plant(tmp_path / "d", "a.png", "b.png")
    for name, data in (
        ("c.jpg", photo("JPEG", 6)),
        ("d.jpg", photo("JPEG", 3)),
        ("e.png", PICTURES["RGBA"][0]),
        ("f.gif", PICTURES["GIF"][0]),
    ):
        (tmp_path / "d" / name).write_bytes(data)
    return tmp_path / "d"


def test_a_store_says_that_its_images_were_turned(
    tmp_path: Path, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {
        "sites": "head",
        "attention": "none",
        "residual": False,
        "order": "dataset",
    }
    plain = vitsee.extract("demo:vit", photos, tmp_path / "plain.zarr", **options)
    assert [message for message in caplog.messages if " of 6 images have" in message] == [
        "2 of 6 images have an EXIF orientation, which was not applied (--exif turns them upright)",
        "1 of 6 images have an alpha channel, which was dropped",
        "1 of 6 images have several frames or pages, of which the first was taken",
    ]
    assert (
        "exif" not in plain.manifest.transform
        and "exif" not in plain.manifest.info["data"]
    )
    caplog.clear()
    turned = vitsee.extract(
        "demo:vit", photos, tmp_path / "turned.zarr", exif=True, **options
    )
    assert (
        "2 of 6 images have an EXIF orientation and were turned upright"
        in caplog.messages
    )
    assert turned.manifest.transform == {**plain.manifest.transform, "exif": True}
    assert turned.manifest.info["data"]["exif"] is True
    rows = {name: k for k, name in enumerate(turned.samples.id.tolist())}
    assert turned.sizes[rows["c.jpg"]].tolist() == [24, 16]
    assert plain.sizes[rows["c.jpg"]].tolist() == [16, 24]
    differs = [
        not np.array_equal(
            plain.acts("head")[rows[name]], turned.acts("head")[rows[name]]
        )
        for name in ("a.png", "c.jpg", "d.jpg", "e.png")
    ]
    assert differs == [False, True, True, False]
    with pytest.raises(vitsee.VitseeError, match="transform"):
        vitsee.extract("demo:vit", photos, tmp_path / "plain.zarr", exif=True, **options)


def test_whoever_reads_the_images_again_turns_them(tmp_path: Path, photos: Path) -> None:
    store = vitsee.extract(
        "demo:vit",
        photos,
        tmp_path / "turned.zarr",
        exif=True,
        sites="head",
        attention="none",
        residual=False,
        inputs=True,
    )
    source = source_of(store)
    row = store.samples.id.tolist().index("c.jpg")
    assert source.read(source.ids.index("c.jpg"))[0].size == (16, 24)
    stored = Pictures(store)(np.array([row]))
    batch = next(
        batches(select(source, order="dataset"), store.manifest.transform, [(0, 6)])
    )
    np.testing.assert_array_equal(batch.pixels[2].numpy(), stored[0])


def test_options_without_exif_are_recorded_as_before() -> None:
    assert "exif" not in DataOptions("d").record()
    assert "exif" not in DataOptions("d", exif=False).record()
    assert DataOptions("d", exif=True).record()["exif"] is True
