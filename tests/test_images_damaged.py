"""Files that are damaged, or other than their names say: refused by name, or unreadable by name,
and nothing of them is run."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import av
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from tests.clip_files import grey, write_video
from tests.image_files import encoded, plant
from vitsee_core.images import DataError, ImageError, open_source
from vitsee_core.images.decoding import decode, header_size
from vitsee_core.images.formats import FORMAT_OF_ENDING, readable_formats
from vitsee_core.images.transform import make_recipe
from vitsee_core.images.videos import Video
from vitsee_core.pages.report.pictures import pack_png

POSTSCRIPT = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
)
SQUARE = {
    "input_size": (3, 4, 4),
    "crop_pct": 1.0,
    "crop_mode": "center",
    "interpolation": "bilinear",
}


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program on the path under Ghostscript's name; where it was started, this file exists."""
    trace, program = tmp_path / "trace", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {trace}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None, raising=False)
    return trace


def of_kind(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), (9, 8, 7)).save(file, kind)
    return file.getvalue()


def test_postscript_under_the_name_of_a_picture_starts_nothing(
    tmp_path: Path, ghostscript: Path
) -> None:
    data = tmp_path / "data"
    plant(data, "a.png")
    (data / "b.png").write_bytes(POSTSCRIPT)
    source = open_source(str(data))
    assert source.size(0) == (4, 6)
    for read in (source.read, source.size):
        with pytest.raises(
            ImageError, match="not an image, or of a format other than AVIF"
        ):
            read(1)
    assert not ghostscript.exists()
    # Without the list of formats the program is started: the trace shows it.
    with pytest.raises(OSError), Image.open(io.BytesIO(POSTSCRIPT)) as image:
        image.load()  # which fails: this Ghostscript draws nothing
    assert ghostscript.exists()


@pytest.mark.parametrize("kind", ["EPS", "PCX", "TGA", "ICO", "SGI", "DDS", "ICNS"])
def test_formats_that_are_not_in_the_list_are_not_opened(kind: str) -> None:
    data = of_kind(kind)
    for read in (
        lambda: decode("x.png", data),
        lambda: header_size("x.png", io.BytesIO(data)),
    ):
        with pytest.raises(ImageError, match="not an image, or of a format other than"):
            read()


def test_each_ending_in_the_list_has_a_format_that_is_opened() -> None:
    for ending, kind in FORMAT_OF_ENDING.items():
        assert kind in readable_formats(), ending
        image, _ = decode(f"x{ending}", of_kind(kind))
        assert image.size == (6, 4) and image.format == kind


def test_postscript_in_a_report_is_not_opened(ghostscript: Path) -> None:
    assert pack_png(POSTSCRIPT) == (POSTSCRIPT, "image/png")
    assert not ghostscript.exists()


def test_an_image_that_asks_for_too_much_memory_is_an_unreadable_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(_image: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
    with pytest.raises(
        ImageError, match=r"x\.png: it asks for more memory than there is"
    ):
        decode("x.png", encoded(1))


def test_colours_that_pillow_does_not_convert_are_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    Image.new("LAB", (6, 4)).save(path)
    image, _ = decode("a.tif", path.read_bytes())
    assert make_recipe(SQUARE).apply(image).shape == (3, 4, 4)
    grey_model = make_recipe({**SQUARE, "input_size": (1, 4, 4)})
    with pytest.raises(ImageError, match="mode LAB, which Pillow does not convert to L"):
        grey_model.apply(image)


# ------------------------------------------------------------------------------------- parquet


def bytes_table(n: int) -> pyarrow.Table:
    return pyarrow.table({"image": pyarrow.array([encoded(k) for k in range(n)])})


def promise_rows(path: Path, n: int) -> None:
    """Make a file of one row group say that it has n rows, in its metadata alone."""
    data = bytearray(path.read_bytes())
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    n_rows = parquet.ParquetFile(path).metadata.num_rows
    number = bytes(
        [0x16, 2 * n_rows]
    )  # an i64 of Thrift's compact protocol, one field further
    places = [at for at in range(begin, len(data) - 8) if data[at : at + 2] == number]
    for at in (
        places[0],
        places[-1],
    ):  # of the file, and of the group; between them of columns
        data[at + 1] = 2 * n
    path.write_bytes(data)
    assert parquet.ParquetFile(path).metadata.row_group(0).num_rows == n


def test_rows_that_a_row_group_lacks_are_unreadable_images(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(bytes_table(5), path, store_schema=False)
    promise_rows(path, 7)
    source = open_source(str(path))
    assert len(source) == 7
    assert source.read(4)[0].size == (6, 4)
    for row in (5, 6):
        with pytest.raises(ImageError, match="the group has 5 rows, fewer than it says"):
            source.read(row)


def test_labels_or_paths_of_fewer_rows_than_the_file_says_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.parquet"
    table = bytes_table(5).append_column("label", pyarrow.array([0, 1, 0, 1, 0]))
    parquet.write_table(table, path, store_schema=False)
    promise_rows(path, 7)
    with pytest.raises(
        DataError, match=r"a\.parquet is damaged: 7 rows, and 5 in one of its"
    ):
        open_source(str(path))


def test_a_damaged_page_is_a_reason_in_one_line(tmp_path: Path) -> None:
    """pyarrow's error about a damaged header of a page has two lines, and is an OSError."""
    path = tmp_path / "a.parquet"
    parquet.write_table(bytes_table(5), path, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[4:12] = b"\xff" * 8  # behind the letters PAR1
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        open_source(str(path))
    assert "\n" not in str(caught.value)
    assert "damaged" in str(caught.value) or "deserialize" in str(caught.value)


def test_metadata_nested_without_end_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = bytes_table(3).append_column("label", pyarrow.array([0, 1, 0]))
    nested = b'{"info": ' + b"[" * 100_000
    parquet.write_table(table.replace_schema_metadata({"huggingface": nested}), path)
    source = open_source(str(path))
    assert source.class_names is None
    assert source.labels.tolist() == [0, 1, 0]


def test_a_damaged_column_of_the_metadata_ends_no_process(tmp_path: Path) -> None:
    """pyarrow's record of a single column ends the process where its histogram is damaged."""
    path = tmp_path / "a.parquet"
    rows = [{"bytes": encoded(k), "path": f"{k}.png"} for k in range(4)]
    parquet.write_table(pyarrow.table({"image": rows}), path)
    data = bytearray(path.read_bytes())
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for at in range(begin, begin + 64):  # the schema
        damaged = bytearray(data)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        try:
            source = open_source(str(path))
        except DataError:
            continue
        for row in range(len(source)):
            try:
                source.size(row)
            except ImageError:
                continue


def test_names_of_columns_may_have_dots(tmp_path: Path) -> None:
    for image_name, images in {
        "my.image": [encoded(k) for k in range(3)],
        "my.struct": [{"bytes": encoded(k), "path": f"{k}.png"} for k in range(3)],
    }.items():
        path = tmp_path / f"{image_name}.parquet"
        table = pyarrow.table({image_name: images, "my.label": ["cat", "dog", "cat"]})
        parquet.write_table(table, path)
        source = open_source(str(path), label_column="my.label")
        assert source.labels.tolist() == [0, 1, 0]
        image, _ = source.read(2)
        assert image.getpixel((0, 0)) == (2, 0, 253)


def test_a_column_is_not_taken_for_a_field_of_its_path(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    other = [{"b": encoded(9)} for _ in range(2)]
    table = pyarrow.table({"a": other, "a.b": [encoded(0), encoded(1)]})
    parquet.write_table(table, path)
    image, _ = open_source(str(path)).read(1)
    assert image.getpixel((0, 0)) == (1, 0, 254)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = [pyarrow.array([encoded(k)]) for k in range(2)]
    parquet.write_table(pyarrow.table(columns, names=["image", "image"]), path)
    with pytest.raises(DataError, match=r"a\.parquet has two columns called 'image'"):
        open_source(str(path))


def write_labelled(path: Path, labels: Any) -> None:
    images = [encoded(k) for k in range(len(labels))]
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table({"image": images, "label": labels}), path)


def test_labels_that_are_numbers_in_one_file_and_names_in_another_are_refused(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    write_labelled(data / "0.parquet", [0, 1])
    write_labelled(data / "1.parquet", ["cat", "dog"])
    with pytest.raises(
        DataError, match=r"'label' has numbers in .*0\.parquet and names in .*1\.parquet"
    ):
        open_source(str(data))
    # Digits may be either, and nulls are no labels.
    write_labelled(data / "1.parquet", ["1", "0"])
    write_labelled(data / "2.parquet", pyarrow.nulls(2))
    assert open_source(str(data)).labels.tolist() == [0, 1, 1, 0, -1, -1]


# -------------------------------------------------------------------------------------- videos


def flip(path: Path, box: bytes, offset: int, bit: int) -> Path:
    """The file with one bit of a box flipped, counted from the first letter of its name."""
    data = bytearray(path.read_bytes())
    data[data.index(box) + offset] ^= 1 << bit
    path.write_bytes(data)
    return path


def test_a_size_that_no_machine_has_is_a_damaged_video(tmp_path: Path) -> None:
    """A table of 268,435,457 times in place of one: FFmpeg's answer is that of a machine without
    memory."""
    path = flip(write_video(tmp_path / "a.mp4"), b"stts", 8, 4)
    with pytest.raises(MemoryError), av.open(str(path)) as container:
        list(container.demux())
    with pytest.raises(
        ImageError, match=r"a\.mp4: not a video that FFmpeg reads \(cannot alloc"
    ):
        Video("a.mp4", path.open("rb"))


def test_a_title_that_is_not_utf8_is_no_reason_to_refuse_a_video(tmp_path: Path) -> None:
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "Zweiundzwanzig"
        stream: Any = container.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for k in range(3):
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(grey(k), format="rgb24"))
            )
        container.mux(stream.encode(None))
    data = path.read_bytes()
    assert data.count(b"Zweiundzwanzig") == 1
    path.write_bytes(data.replace(b"Zweiundzwanzig", b"\xff" * 14))
    assert len(Video("a.mkv", path.open("rb")).line) == 3


def write_streams(path: Path, sizes: list[tuple[int, int]], n_frames: list[int]) -> Path:
    with av.open(str(path), "w") as container:
        streams: list[Any] = []
        for height, width in sizes:
            stream: Any = container.add_stream("libx264", rate=10)
            stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
            streams.append(stream)
        for stream, size, n in zip(streams, sizes, n_frames, strict=True):
            for k in range(n):
                picture = av.VideoFrame.from_ndarray(grey(k, size), format="rgb24")
                container.mux(stream.encode(picture))
            container.mux(stream.encode(None))
    return path


def test_of_several_video_streams_the_best_is_taken(tmp_path: Path) -> None:
    path = write_streams(tmp_path / "a.mkv", [(48, 64), (96, 128)], [2, 24])
    with av.open(str(path)) as container:
        best: Any = container.streams.best("video")
        assert best.width == 128
    video = Video("a.mkv", path.open("rb"))
    (frame,) = video.frames([20])
    assert frame.size == (128, 96)
    assert len(video.line) == 24
