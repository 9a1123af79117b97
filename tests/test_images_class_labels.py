"""Labels as data sets write them: taken right, or refused by name; what is left out is said."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
from pyarrow import parquet

from tests.image_files import encoded, plant, refused
from tests.shards import write_tar
from vitsee_core.images import DataError, ImageSource, open_source
from vitsee_core.images.class_labels import class_labels, label_text
from vitsee_core.images.folders import classify


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_zip(path: Path, names: Sequence[str]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for k, name in enumerate(names):
            file.writestr(name, encoded(k))
    return path


def classes_of(source: ImageSource) -> dict[str, str | None]:
    """Id -> name of its class."""
    names = source.class_names or []
    return {
        sample: names[label] if label >= 0 else None
        for sample, label in zip(source.ids, source.labels.tolist(), strict=True)
    }


# ------------------------------------------------------------------------------------- folders

LAYOUTS: dict[str, tuple[list[str], list[str | None], list[str]]] = {
    "classes": (["cat/1.png", "dog/2.png"], ["cat", "dog"], ["", ""]),
    "one top folder": (["pets/cat/1.png", "pets/dog/2.png"], ["cat", "dog"], ["", ""]),
    "two top folders": (["a/b/cat/1.png", "a/b/dog/2.png"], ["cat", "dog"], ["", ""]),
    "a cover beside classes": (
        ["pets/cat/1.png", "pets/cover.png", "pets/dog/2.png"],
        ["cat", None, "dog"],
        ["", "", ""],
    ),
    "splits below one folder": (
        ["pets/train/cat/1.png", "pets/train/dog/2.png", "pets/val/cat/3.png"],
        ["cat", "dog", "cat"],
        ["train", "train", "val"],
    ),
    "one folder below splits": (
        ["train/images/cat/1.png", "val/images/dog/2.png"],
        ["cat", "dog"],
        ["train", "val"],
    ),
    "one split": (
        ["train/cat/1.png", "train/dog/2.png"],
        ["cat", "dog"],
        ["train", "train"],
    ),
    "one class": (["cat/1.png", "cat/2.png"], ["cat", "cat"], ["", ""]),
    "folders in classes": (["cat/a/1.png", "dog/2.png"], ["cat", "dog"], ["", ""]),
    "flat": (["1.png", "2.png"], [None, None], ["", ""]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["folder", "zip", "tar", "tar ./"])
def test_the_first_folders_that_differ_are_the_classes(
    tmp_path: Path, layout: str, kind: str
) -> None:
    paths, classes, splits = LAYOUTS[layout]
    if kind == "folder":
        data = plant(tmp_path / "data", *paths)
    elif kind == "zip":
        data = write_zip(tmp_path / "data.zip", paths)
    else:
        prefix = kind.removeprefix("tar").strip()
        members = [(f"{prefix}{path}", encoded(k)) for k, path in enumerate(paths)]
        data = write_tar(tmp_path / "data.tar", members)
    source = open_source(str(data))
    assert list(source.ids) == paths
    assert list(classes_of(source).values()) == classes
    assert source.splits == splits
    assert source.read(0)[0].getpixel((0, 0)) == (0, 0, 255)


def test_backslashes_of_windows_and_folders_of_macos(tmp_path: Path) -> None:
    names = [
        "pets\\cat\\1.png",
        "pets\\dog\\2.png",
        "__MACOSX/cat/x.png",
        "__MACOSX/pets/._1.png",
    ]
    source = open_source(str(write_zip(tmp_path / "a.zip", names)))
    assert classes_of(source) == {"pets/cat/1.png": "cat", "pets/dog/2.png": "dog"}
    assert source.read(1)[0].getpixel((0, 0)) == (1, 0, 254)
    hidden = [".cache/cat/1.png", "cat/2.png", "dog/.hidden/3.png", "./dog//4.png"]
    for data in (
        write_zip(tmp_path / "b.zip", hidden),
        write_tar(
            tmp_path / "b.tar", [(name, encoded(k)) for k, name in enumerate(hidden)]
        ),
    ):
        source = open_source(str(data))
        assert classes_of(source) == {"cat/2.png": "cat", "dog/4.png": "dog"}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_path_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["cat/1.png", "dog/2.png", "./cat/1.png", "dog/3.png"]
    archives = [
        write_zip(tmp_path / "a.zip", names),
        write_tar(
            tmp_path / "a.tar", [(name, encoded(k)) for k, name in enumerate(names)]
        ),
    ]
    for data in archives:
        caplog.clear()
        source = open_source(str(data))
        assert list(source.ids) == ["cat/1.png", "dog/2.png", "dog/3.png"]
        assert source.read(0)[0].getpixel((0, 0)) == (2, 0, 253)  # the later one
        assert caplog.messages == [
            f"of members of one path in {data} the last is taken, and 1 before it left out: "
            "cat/1.png"
        ]


# --------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("texts", "labels", "names"),
    [
        (["3", "0", ""], [3, 0, -1], None),
        (["3.0", "0.0", ""], [3, 0, -1], None),
        (["1e1", "2"], [10, 2], None),
        (["cat", "dog", "cat"], [0, 1, 0], ["cat", "dog"]),
        (["cat", "nan", "dog"], [0, -1, 1], ["cat", "dog"]),
        (["1.0", "NaN", "0.0"], [1, -1, 0], None),
        (["1", "<NA>"], [1, -1], None),
        (["tench, Tinca tinca", "cat"], [1, 0], ["cat", "tench, Tinca tinca"]),
        (["0.37", "cat"], [0, 1], ["0.37", "cat"]),
        (["-5", "3"], [1, 0], ["3", "-5"]),
        (["1_0", "10", "2"], [0, 2, 1], ["1_0", "2", "10"]),
        (["\u0663", "3"], [1, 0], ["3", "\u0663"]),  # an Arabic digit
        (["007", "010"], [7, 10], None),
        (["+1", "0"], [1, 0], None),
        (["7", "007", "8"], [1, 0, 2], ["007", "7", "8"]),
        (["+1", "1"], [1, 0], ["1", "+1"]),
        (["1", "1.0", "2"], [1, 1, 2], None),
        (["9007199254740993", "1.0"], [9007199254740993, 1], None),
        (["9" * 5000, "a"], [0, 1], ["9" * 5000, "a"]),
        (["(cat)", "(a, b)"], [1, 0], ["(a, b)", "(cat)"]),
    ],
)
def test_texts_that_are_classes(
    texts: list[str], labels: list[int], names: list[str] | None
) -> None:
    found, class_names = class_labels(texts)
    assert found.tolist() == labels
    assert class_names == names


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["0.37", "1", "2"], r"the label 0\.37 is a number and no class.*--response"),
        (["inf", "1.0"], "the label inf is a number and no class"),
        (["cat;dog", "cat", "dog"], "the label 'cat;dog' holds several classes"),
        (["cat|dog", "bird"], "holds several classes; expected one class an image"),
        (["cat,dog", "cat", "dog"], "the label 'cat,dog' holds several classes"),
        (["1,3", "2"], "the label '1,3' holds several classes"),
        (["1;3", "2"], "the label '1;3' holds several classes"),
        (["tench, 3", "tench", "3"], "write names without ','"),
        (["cat|dog", "bird"], r"write names without '\|'"),
        (
            ["[1, 3]", "[2]"],
            r"the label '\[1, 3\]' is a list; expected one class number or",
        ),
        (["[0]", "1"], r"the label '\[0\]' is a list"),
        (["['cat']", "dog"], "is a list; expected one class number or name an image"),
        (["(1, 2)", "3"], r"the label '\(1, 2\)' is a list"),
        (["('cat',)", "dog"], "is a list"),
        (['{"a":1}', "3"], "is a record; expected one class number or name"),
        (["1e400", "3"], "the label 1e400 is a number and no class"),
    ],
)
def test_texts_that_are_no_classes_are_refused(texts: list[str], why: str) -> None:
    with pytest.raises(DataError, match=why):
        class_labels(texts)


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (
            ["7", "8", "007"],
            "the labels '7' and '007' are one number in two writings: all labels are taken for "
            "names, and these two for different classes",
        ),
        (
            ["1", "cat", "1.0"],
            "the labels '1' and '1.0' are one number in two writings, and different classes, since "
            "other labels are names",
        ),
        (
            ["0.5", "cat"],
            "the label 0.5 is a number and no class, and is taken for a name, since other labels "
            "are names",
        ),
        (["1_0", "10"], None),
        (["1", "1.0"], None),
        (["4", "cat"], None),
    ],
)
def test_numbers_that_are_taken_for_names_are_said(
    texts: list[str], line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    class_labels(texts)
    assert caplog.messages == ([] if line is None else [line])


def test_missing_labels_of_a_list_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plant(tmp_path, "1.png", "2.png", "3.png")
    (tmp_path / "l.csv").write_text("path,label\n1.png,cat\n2.png,nan\n3.png,dog\n")
    source = open_source(str(tmp_path / "l.csv"))
    assert source.labels.tolist() == [0, -1, 1] and source.class_names == ["cat", "dog"]
    assert caplog.messages == ["labels that are nan (1 of 3) are taken for none"]
    (tmp_path / "l.csv").write_text("path,label\n1.png,0.5\n2.png,0.37\n3.png,1\n")
    assert refused(tmp_path / "l.csv").startswith(
        f"{tmp_path}/l.csv: the label 0.5 is a number"
    )


def test_values_that_are_labels() -> None:
    assert [
        label_text(value) for value in (None, float("nan"), 3, 3.0, True, " cat ")
    ] == [*("", "nan", "3", "3.0", "True", "cat")]
    for value in ([1], {"a": 1}, b"x"):
        with pytest.raises(
            DataError, match=f"is a {type(value).__name__}; expected one class"
        ):
            label_text(value)


# ------------------------------------------------------------------------------------- parquet

COLUMNS: dict[str, tuple[Any, list[int], list[str] | None]] = {
    "int": (pyarrow.array([2, 0, None]), [2, 0, -1], None),
    "names": (pyarrow.array(["dog", None, "cat"]), [1, -1, 0], ["cat", "dog"]),
    "floats": (pyarrow.array([2.0, 0.0, float("nan")]), [2, 0, -1], None),
    "half floats": (pyarrow.array(np.array([2, 0, 1], np.float16)), [2, 0, 1], None),
    "bools": (pyarrow.array([True, False, None]), [1, 0, -1], ["False", "True"]),
    "nulls": (pyarrow.array([None, None, None]), [-1, -1, -1], None),
    "views": (
        pyarrow.array(["b", None, "a"], pyarrow.string_view()),
        [1, -1, 0],
        ["a", "b"],
    ),
    **{
        f"dictionary by {kind}": (
            pyarrow.DictionaryArray.from_arrays(
                pyarrow.array([1, None, 0], kind), pyarrow.array(["a", "b"])
            ),
            [1, -1, 0],
            ["a", "b"],
        )
        for kind in (
            pyarrow.int8(),
            pyarrow.int16(),
            pyarrow.int32(),
            pyarrow.int64(),
            pyarrow.uint8(),
            pyarrow.uint16(),
            pyarrow.uint32(),
            pyarrow.uint64(),
        )
    },
}
NO_CLASSES: dict[str, tuple[Any, str]] = {
    "lists": (
        pyarrow.array([[1], [0, 2], []]),
        "has no labels in the column 'label', which is",
    ),
    "structs": (
        pyarrow.array([{"a": 1}] * 3),
        "has no labels in the column 'label', which is",
    ),
    "numbers": (
        pyarrow.array([0.37, 0.5, 1.0]),
        "the column 'label' of .*: the label 0.37 is a",
    ),
    "tags": (pyarrow.array(["cat;dog", "cat", "dog"]), "'cat;dog' holds several classes"),
    "dates": (pyarrow.array([1, 2, 3], pyarrow.date32()), "which is date32"),
}


def write_column(path: Path, values: Any) -> Path:
    images = pyarrow.array([encoded(k) for k in range(3)])
    parquet.write_table(pyarrow.table({"image": images, "label": values}), path)
    return path


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_labels(tmp_path: Path, kind: str) -> None:
    values, labels, names = COLUMNS[kind]
    source = open_source(str(write_column(tmp_path / "a.parquet", values)))
    assert source.labels.tolist() == labels
    assert source.class_names == names


def test_images_in_views(tmp_path: Path) -> None:
    views = pyarrow.array([encoded(k) for k in range(3)], pyarrow.binary_view())
    bare = pyarrow.table({"image": views})
    parquet.write_table(bare, tmp_path / "bare.parquet")
    paths = pyarrow.array(["c.png", "b.png", "a.png"])
    struct = pyarrow.StructArray.from_arrays([views, paths], ["bytes", "path"])
    parquet.write_table(pyarrow.table({"image": struct}), tmp_path / "struct.parquet")
    for name, ids in (
        ("bare", ["bare/0", "bare/1", "bare/2"]),
        ("struct", ["c.png", "b.png", "a.png"]),
    ):
        source = open_source(str(tmp_path / f"{name}.parquet"))
        assert list(source.ids) == ids
        assert source.read(1)[0].getpixel((0, 0)) == (1, 0, 254)


def test_missing_labels_of_a_column_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """NaN is, whoever wrote it, and pandas' missing values, which it writes as null."""
    floats = pyarrow.array([2.0, float("nan"), float("nan")])
    source = open_source(str(write_column(tmp_path / "a.parquet", floats)))
    assert source.labels.tolist() == [2, -1, -1]
    assert caplog.messages == ["labels that are nan (2 of 3) are taken for none"]
    images = [encoded(k) for k in range(3)]
    for labels in (
        pandas.Series([None, 0.0, None]),
        pandas.Series([None, 0, None], dtype="Int64"),
        pandas.Series([None, "cat", None], dtype="category"),
    ):
        caplog.clear()
        frame = pandas.DataFrame({"image": images, "label": labels})
        frame.to_parquet(tmp_path / "pandas.parquet")
        source = open_source(str(tmp_path / "pandas.parquet"))
        assert source.labels.tolist() == [-1, 0, -1]
        # A test before may have asked for information, too: here, that one class is left.
        warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert warned == ["labels that are nan (2 of 3) are taken for none"]


@pytest.mark.parametrize("kind", NO_CLASSES)
@pytest.mark.parametrize("column", [None, "label"])
def test_columns_of_anything_else_are_refused_or_left_out(
    tmp_path: Path, kind: str, column: str | None
) -> None:
    values, why = NO_CLASSES[kind]
    data = str(write_column(tmp_path / "a.parquet", values))
    with pytest.raises(DataError, match=why):
        open_source(data, label_column=column)
    source = open_source(data, label_column="none")
    assert source.labels.tolist() == [-1] * 3


# ------------------------------------------------------------------------------- JSON in a tar


def write_json(path: Path, values: Sequence[Any]) -> str:
    members = []
    for k, value in enumerate(values):
        members += [
            (f"{k}.png", encoded(k)),
            (f"{k}.json", json.dumps({"label": value}).encode()),
        ]
    return str(write_tar(path, members))


@pytest.mark.parametrize(
    ("values", "labels", "names"),
    [
        ([1, 0, None], [1, 0, -1], None),
        ([1.0, 0.0, 2.0], [1, 0, 2], None),
        ([True, False, True], [1, 0, 1], ["False", "True"]),
        (["cat", "dog", "cat"], [0, 1, 0], ["cat", "dog"]),
    ],
)
def test_labels_in_json(
    tmp_path: Path, values: list[Any], labels: list[int], names: list[str] | None
) -> None:
    source = open_source(write_json(tmp_path / "a.tar", values))
    assert source.labels.tolist() == labels
    assert source.class_names == names


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (
            [[1, 2], [0]],
            r"0\.json: the label \[1, 2\] is a list; expected one class number",
        ),
        ([{"id": 3}, 1], r"0\.json: the label \{'id': 3\} is a dict"),
        ([0.37, 0.5], r"a\.tar: the label 0\.37 is a number and no class"),
    ],
)
def test_json_without_classes_is_refused_or_left_out(
    tmp_path: Path, values: list[Any], why: str
) -> None:
    data = write_json(tmp_path / "a.tar", values)
    with pytest.raises(DataError, match=why):
        open_source(data)
    assert open_source(data, label_key="none").labels.tolist() == [-1, -1]


@pytest.mark.parametrize("text", [b"\xff\xd8\xff", "caf\xe9".encode("latin-1")])
def test_a_txt_that_is_no_text_in_utf_8_is_no_label(tmp_path: Path, text: bytes) -> None:
    members = [("0.png", encoded(0)), ("0.cls", b"3"), ("0.txt", text)]
    data = str(write_tar(tmp_path / "a.tar", members))
    assert open_source(data).labels.tolist() == [3]
    why = r"0\.txt, which is no text in UTF-8 \(--label-key KEY names another label, or none\)"
    with pytest.raises(DataError, match=why):
        open_source(data, label_key="txt")


# ------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_files_left_out_by_their_ending_are_counted_and_named(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a/1.heic", "a/2.HEIC", "a/3.jxl", "a/4", "a/5.jfif", "b/6.png", "b/7.tiff"]
    beside = ["README", "LICENSE.txt", "a/notes.json", "labels.csv", "a/.hidden", "x.npy"]
    if kind == "folder":
        data = plant(tmp_path / "d", *names, *beside)
    elif kind == "zip":
        data = write_zip(tmp_path / "d.zip", [*names, *beside])
    else:
        data = write_tar(
            tmp_path / "d.tar", [(name, encoded(1)) for name in [*names, "README"]]
        )
    for _ in range(2):  # the second time of an index that was kept, where there is one
        caplog.clear()
        source = open_source(str(data))
        assert list(source.ids) == ["a/5.jfif", "b/6.png", "b/7.tiff"]
        assert [message for message in caplog.messages if "ending" in message] == [
            f"4 files are left out of {data} by the ending: 2 .heic, 1 .jxl, 1 without an ending"
        ]


def test_a_place_with_nothing_but_other_endings_says_which(tmp_path: Path) -> None:
    plant(tmp_path / "d", "1.heic", "2.heic")
    assert refused(tmp_path / "d") == (
        f"no images below {tmp_path}/d; expected .jpg, .png or other image files (2 files are left "
        f"out of {tmp_path}/d by the ending: 2 .heic)"
    )
    assert "(1 file is left out of" in refused(write_zip(tmp_path / "d.zip", ["1.jxl"]))


def test_classes_of_no_paths() -> None:
    labels, splits, names = classify([])
    assert labels.tolist() == [] and splits == [] and names is None
