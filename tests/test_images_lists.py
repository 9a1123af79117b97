"""CSV and TSV lists: paths, labels, splits, ids, and one line for every bad list."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from tests.extractions import VIT, array_bytes, extract, extracted
from tests.image_files import plant, refused
from vitsee_core.images import ImageError, open_source
from vitsee_core.images.errors import DataError
from vitsee_stores import open_store, validate


def write_list(path: Path, rows: list[list[Any]], delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def test_list_with_header_names_labels_and_splits(tmp_path: Path) -> None:
    plant(tmp_path, "x/a, b.png", "c.png", "d.png")
    rows: list[list[Any]] = [
        ["Label", "path", "split", "width"],
        ["dog", "x/a, b.png", "train", 6],
        ["cat", "c.png", "test", 6],
        ["", str(tmp_path / "d.png"), "train", 6],
    ]
    source = open_source(str(write_list(tmp_path / "list.csv", rows)))
    assert source.ids == ["x/a, b.png", "c.png", str(tmp_path / "d.png")]
    assert source.class_names == ["cat", "dog"]
    assert source.labels.tolist() == [1, 0, -1]
    assert source.splits == ["train", "test", "train"]
    assert all(source.read(k)[0].size == (6, 4) for k in range(3))


def test_list_without_header_tabs_and_numbers(tmp_path: Path) -> None:
    plant(tmp_path, "a.png", "b.png")
    path = write_list(tmp_path / "list.tsv", [["b.png", 7], ["a.png", 3]], "\t")
    source = open_source(str(path))
    assert source.ids == ["b.png", "a.png"]
    assert source.labels.tolist() == [7, 3]
    assert source.class_names is None


def test_list_of_paths_alone_with_byte_order_mark_and_blank_lines(tmp_path: Path) -> None:
    plant(tmp_path, "a.png", "b.png")
    (tmp_path / "list.csv").write_bytes(b"\xef\xbb\xbfa.png\r\n\r\nb.png\r\n")
    source = open_source(str(tmp_path / "list.csv"))
    assert source.ids == ["a.png", "b.png"]
    assert source.labels.tolist() == [-1, -1]


@pytest.mark.parametrize(
    "text",
    [
        "path;label\na.png;dog\nb, c.png;cat\n",
        "sep=;\r\npath;label\r\na.png;dog\r\nb, c.png;cat\r\n",
        "a.png;dog\nb, c.png;cat\n",
        "path\tlabel\na.png\tdog\nb, c.png\tcat\n",
        'path,label\ra.png,dog\r"b, c.png",cat\r',
        'path,label,note\na.png,dog,%s\n"b, c.png",cat,\n' % ("x" * 200_000),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_lists_as_other_programs_write_them(
    tmp_path: Path, text: str, encoding: str
) -> None:
    plant(tmp_path, "a.png", "b, c.png")
    (tmp_path / "list.csv").write_bytes(text.encode(encoding))
    source = open_source(str(tmp_path / "list.csv"))
    assert source.ids == ["a.png", "b, c.png"]
    assert source.class_names == ["cat", "dog"]
    assert source.labels.tolist() == [1, 0]


def test_names_of_files_with_semicolons(tmp_path: Path) -> None:
    plant(tmp_path, "a;1.png", "b;2.png")
    (tmp_path / "list.csv").write_text("a;1.png\nb;2.png\n")
    assert open_source(str(tmp_path / "list.csv")).ids == ["a;1.png", "b;2.png"]


def test_a_list_in_another_encoding_is_a_line(tmp_path: Path) -> None:
    for name in ("list.csv", "list.txt"):
        (tmp_path / name).write_bytes("caf\xe9.png\n".encode("latin-1"))
        assert refused(tmp_path / name) == (
            f"{tmp_path}/{name} cannot be read as a list: it is not text in UTF-8 (byte 3)"
        )


def test_list_with_row_keys_may_repeat_a_path(tmp_path: Path) -> None:
    plant(tmp_path, "a.png")
    rows = [["id", "file"], ["one", "a.png"], ["two", "a.png"]]
    source = open_source(str(write_list(tmp_path / "list.csv", rows)))
    assert source.ids == ["one", "two"]
    assert source.read(0)[1] == source.read(1)[1]


@pytest.mark.parametrize("more", [[], ["0 0 6 4"]])
def test_missing_file_of_a_list_is_a_bad_image_not_a_bad_list(
    tmp_path: Path, more: list[str]
) -> None:
    plant(tmp_path, "a.png")
    rows = [["path", "box"][: 1 + len(more)], ["gone.png", *more], ["a.png", *more]]
    source = open_source(str(write_list(tmp_path / "l.csv", rows)))
    with pytest.raises(ImageError, match=r"cannot read gone\.png.*: no such file"):
        source.read(0)
    assert source.read(1)[0].size == (6, 4)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("", "is empty"),
        ("path,label\n", "no images below it"),
        ("a.png,1\na.png,2\n", "line 2 of .* repeats the id 'a.png' of line 1"),
        ("a.png,1\nb.png\n", "line 2 of .* has 1 fields; expected 2"),
        ("a.png,1,train,9\n", "4 columns and no header"),
        ("path,label\n,1\n", "line 2 of .* has an empty path"),
        ('"a.png,1\n', "cannot be read as a list"),
        ("nowhere/a.png\n", "none of the first paths"),
        ("img,y\na.png,1\n", "looks like a header"),
        ("a\xff.png\n", "cannot be read as a list"),
    ],
)
def test_bad_lists(tmp_path: Path, text: str, phrase: str) -> None:
    plant(tmp_path, "a.png", "b.png")
    (tmp_path / "list.csv").write_bytes(text.encode("latin1"))
    assert re.search(phrase, refused(tmp_path / "list.csv"))


# ---------------------------------------------------------------- text lists, boxes


@pytest.mark.parametrize(
    ("text", "labels", "names"),
    [
        ("\ufeffx/a b.png\r\n\r\nc.png\n", [-1, -1], None),
        ("x/a b.png\t970\nc.png 65\n", [970, 65], None),  # as ImageNet's val.txt
        ("x/a b.png n01978287\nc.png n01440764\n", [1, 0], ["n01440764", "n01978287"]),
    ],
)
def test_text_lists(
    tmp_path: Path, text: str, labels: list[int], names: list[str] | None
) -> None:
    plant(tmp_path, "x/a b.png", "c.png")
    (tmp_path / "l.txt").write_text(text)
    source = open_source(str(tmp_path / "l.txt"))
    assert source.ids == ["x/a b.png", "c.png"]
    assert source.labels.tolist() == labels and source.class_names == names


def test_bad_text_lists(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("\n")
    assert "is empty; expected one image path a line" in refused(tmp_path / "l.txt")
    (tmp_path / "l.txt").write_text("gone.png 1\n")
    assert "none of the first paths" in refused(tmp_path / "l.txt")


def numbered(path: Path) -> Path:
    """9 x 7 pixels, each of a colour of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.arange(63, dtype=np.uint8).reshape(7, 9)
    Image.fromarray(np.stack([values, 2 * values, 3 * values], -1)).save(path)
    return path


def test_boxes_are_cut_out(tmp_path: Path) -> None:
    numbered(tmp_path / "a.png")
    rows = [
        ["path", "box", "id"],
        ["a.png", "1 2 5 7", "a"],
        ["a.png", "", "a"],
        ["a.png", "[0.4, 0, 2.5, 3.6]", "a"],  # to 0, 0, 2, 4: halves to even
        ["a.png", "0,0,9,7", "whole"],
    ]
    source = open_source(str(write_list(tmp_path / "l.csv", rows)))
    assert source.ids == ["a#1,2,5,7", "a", "a#0.4,0,2.5,3.6", "whole#0,0,9,7"]
    whole, value = source.read(1)
    for row, (x0, y0, x1, y1) in (
        (0, (1, 2, 5, 7)),
        (2, (0, 0, 2, 4)),
        (3, (0, 0, 9, 7)),
    ):
        image, same = source.read(row)
        np.testing.assert_array_equal(np.asarray(image), np.asarray(whole)[y0:y1, x0:x1])
        assert same == value == source.hash(row)  # of the file's bytes
        assert source.size(row) == (y1 - y0, x1 - x0)
    expected = [[1, 2, 5, 7], [np.nan] * 4, [0.4, 0, 2.5, 3.6], [0, 0, 9, 7]]
    np.testing.assert_array_equal(source.samples.boxes, np.array(expected, np.float32))


@pytest.mark.parametrize(
    ("box", "phrase"),
    [
        (
            "1 2 1 7",
            r"line 3 of .*l\.csv: the box 1 2 1 7 is empty; expected x0 y0 x1 y1 with",
        ),
        ("5 2 1 7", "is empty"),
        ("1 2 3", "line 3 of .*: the box '1 2 3' is not x0 y0 x1 y1 in pixels"),
        ("a b c d", "is not x0 y0 x1 y1"),
        ("0 0 inf 4", "is not x0 y0 x1 y1"),
        (
            "-1 0 4 4",
            "line 3 of .*: the box -1 0 4 4 reaches out of its image, which has 9 x 7",
        ),
        ("0 0 10 7", "reaches out of its image"),
        ("0.0 0 4 4", "repeats the id 'a.png#0,0,4,4'"),
    ],
)
def test_bad_boxes(tmp_path: Path, box: str, phrase: str) -> None:
    numbered(tmp_path / "a.png")
    rows = [["path", "box"], ["a.png", "0 0 4 4"], ["a.png", box]]
    assert re.search(phrase, refused(write_list(tmp_path / "l.csv", rows)))


@pytest.mark.slow
def test_a_store_of_boxes(tmp_path: Path) -> None:
    """Parts, their sizes and the whole file's hash, by loading processes too; model and pixels
    again from the store."""
    for name in "ab":
        numbered(tmp_path / f"{name}.png")
    rows = [["path", "box"], ["a.png", "1 2 5 7"], ["b.png", ""], ["b.png", "0 0 9 3"]]
    data = write_list(tmp_path / "l.csv", rows)
    options = ["--tokens", "pooled", "--inputs", "--crop-mode", "squash", "--crop-pct", 1]
    extracted(*VIT, "--data", data, "-o", tmp_path / "s.zarr", *options)
    extracted(*VIT, "--data", data, "-o", tmp_path / "w.zarr", *options, "--workers", 1)
    store = open_store(tmp_path / "s.zarr")
    assert array_bytes(tmp_path / "s.zarr") == array_bytes(tmp_path / "w.zarr")
    assert store.manifest.features == ("box", "pixel_hash")
    sizes = dict(zip(store.samples.id.tolist(), store.sizes.tolist(), strict=True))
    assert sizes == {"a.png#1,2,5,7": [5, 4], "b.png": [7, 9], "b.png#0,0,9,3": [3, 9]}
    assert len(set(store.samples.hash)) == 1  # the files have the same bytes
    whole = Image.open(tmp_path / "a.png")
    boxes = store.samples.box
    assert boxes is not None
    for row, box in enumerate(boxes):
        part = whole if np.isnan(box).any() else whole.crop(tuple(box.tolist()))
        seen = np.asarray(part.resize((48, 32), Image.Resampling.BICUBIC)).transpose(
            2, 0, 1
        )
        np.testing.assert_array_equal(store.array("input")[row], seen)
    assert validate(tmp_path / "s.zarr", deep=True) == []
    rows[1][1] = "1 2 5 6"
    other = extract(
        *VIT, "--data", write_list(data, rows), "-o", tmp_path / "s.zarr", *options
    )
    assert other.exit_code == 1 and "samples_fingerprint is" in other.stderr


@pytest.mark.parametrize("inner", ["", "val/", "ILSVRC/Data/CLS-LOC/val/"])
def test_imagenets_labels_of_the_validation_images(tmp_path: Path, inner: str) -> None:
    names = ["ILSVRC2012_val_00000002", "ILSVRC2012_val_00000001"]
    plant(tmp_path, *(f"{inner}{name}.JPEG" for name in names))
    rows = [
        ["ImageId", "PredictionString"],
        [names[0], "n01978287 85 1 272 425 "],
        [names[1], "n01440764 1 2 3 4 n01440764 5 6 7 8 "],
    ]
    source = open_source(str(write_list(tmp_path / "LOC_val_solution.csv", rows)))
    assert source.ids == [f"{name}.JPEG" for name in names]
    assert source.class_names == ["n01440764", "n01978287"]
    assert source.labels.tolist() == [1, 0]
    assert all(source.read(k)[0].size == (6, 4) for k in range(2))


def meta_mat(path: Path, wnids: Sequence[str]) -> None:
    """As the development kit has it: numbers from 1, classes of other levels behind."""
    fields = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object)]
    synsets = np.array([(k, wnid, "tench") for k, wnid in enumerate(wnids, 1)], fields)
    savemat(path, {"synsets": synsets.reshape(-1, 1)})


@pytest.mark.parametrize("inner", ["val", "ILSVRC2012_img_val", "kit/data"])
def test_imagenets_development_kit(tmp_path: Path, inner: str) -> None:
    names = [f"ILSVRC2012_val_{k:08d}.JPEG" for k in (1, 2, 3)]
    plant(tmp_path, *(f"{inner}/{name}" for name in names))
    data = tmp_path / "kit" / "data"
    data.mkdir(parents=True, exist_ok=True)
    meta_mat(data / "meta.mat", ["n02119789", "n01440764", "n01978287"])
    truth = data / "ILSVRC2012_validation_ground_truth.txt"
    truth.write_text("2\n1\n2\n")
    source = open_source(str(truth))
    assert source.ids == names
    assert source.class_names == ["n01440764", "n02119789"]
    assert source.labels.tolist() == [0, 1, 0]
    assert all(source.read(k)[0].size == (6, 4) for k in range(3))
    truth.write_text("2\n7\n")
    with pytest.raises(
        DataError, match=r"has the class 7, which .*meta\.mat does not name"
    ):
        open_source(str(truth))
    (data / "meta.mat").write_bytes(b"no matlab")
    with pytest.raises(DataError, match=r"meta\.mat is not ImageNet's meta\.mat"):
        open_source(str(truth))
