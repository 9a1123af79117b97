"""CSV and TSV lists: paths, labels, splits, ids, and one line for every bad list."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from tests.image_files import plant, refused
from vitsee_core.images import ImageError, open_source


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


def test_list_with_row_keys_may_repeat_a_path(tmp_path: Path) -> None:
    plant(tmp_path, "a.png")
    rows = [["id", "file"], ["one", "a.png"], ["two", "a.png"]]
    source = open_source(str(write_list(tmp_path / "list.csv", rows)))
    assert source.ids == ["one", "two"]
    assert source.read(0)[1] == source.read(1)[1]


def test_missing_file_of_a_list_is_a_bad_image_not_a_bad_list(tmp_path: Path) -> None:
    plant(tmp_path, "a.png")
    source = open_source(str(write_list(tmp_path / "l.csv", [["gone.png"], ["a.png"]])))
    with pytest.raises(ImageError, match=r"cannot read gone\.png: no such file"):
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
