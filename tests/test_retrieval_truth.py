"""Ground-truth files of retrieval: what is read, what is refused, and that nothing in them runs."""

from __future__ import annotations

import copy
import datetime
import io
import json
import os
import pickle
import pickletools
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitsee_core.analyses.retrieve import plain_pickle
from vitsee_core.analyses.retrieve.exports import export, truth_to_json
from vitsee_core.analyses.retrieve.plain_pickle import load_plain
from vitsee_core.analyses.retrieve.truth import (
    JUNK,
    LANDMARKS,
    OXFORD,
    RELEVANT_ONLY,
    REVISITED,
    RetrievalTruth,
    read_truth,
)
from vitsee_core.demo.revisited import write_revisited
from vitsee_core.images import open_source
from vitsee_stores.errors import VitseeError

RAN = Path("ran")


def plain() -> dict[str, Any]:
    return {
        "imlist": ["a", "b", "c", "d"],
        "qimlist": ["q", "r"],
        "gnd": [
            {"bbx": [1.0, 2.0, 30.5, 40.0], "easy": [2], "hard": [0, 1], "junk": []},
            {"bbx": [0, 0, 10, 10], "easy": [], "hard": [3], "junk": [0]},
        ],
    }


def arrays() -> dict[str, Any]:
    """The same as numpy has it."""
    found = plain()
    found["imlist"] = np.array(found["imlist"])
    for entry in found["gnd"]:
        for name in ("easy", "hard", "junk"):
            entry[name] = np.array(entry[name], np.int64)
        entry["bbx"] = np.array(entry["bbx"], np.float32)
    return found


def scalars() -> dict[str, Any]:
    found = plain()
    found["imlist"] = np.array(found["imlist"], object)
    found["gnd"][0]["hard"] = [np.int32(0), np.int64(1)]
    found["gnd"][1]["bbx"] = [np.float64(x) for x in (0, 0, 10, 10)]
    found["gnd"][0]["easy"] = np.array([2], ">i4")
    return found


def write(path: Path, value: Any, protocol: int = 2) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


# ---------------------------------------------------------------- pickles


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("make", [plain, arrays, scalars])
def test_every_protocol_of_lists_and_arrays(
    tmp_path: Path, protocol: int, make: Callable[[], Any]
) -> None:
    truth = read_truth(write(tmp_path / "gnd.pkl", make(), protocol))
    assert truth_to_json(truth) == truth_to_json(
        read_truth(_json(tmp_path / "gnd.json", plain()))
    )
    assert truth.images == ("a", "b", "c", "d") and truth.settings == REVISITED
    assert truth.form == "trapezoid" and truth.has_boxes and not truth.searches_unlisted
    first = truth.queries[0]
    assert (first.name, first.box) == ("q", (1.0, 2.0, 30.5, 40.0))
    assert first.lists == {"easy": (2,), "hard": (0, 1), JUNK: ()}


def test_bytes_of_python_2(tmp_path: Path) -> None:
    """As python 2 wrote texts: they are bytes to python 3, read as latin-1."""
    data = b"(dp0\nS'imlist'\np1\n(lp2\nS'caf\\xe9'\np3\nasS'qimlist'\n(lp4\nS'q'\nasS'gnd'\n(lp5\n"
    data += b"(dp6\nS'bbx'\n(lp7\nF0.0\naF0.0\naI5\naL6L\nasS'ok'\n(lp8\nI0\nasS'junk'\n(lp9\nsas."
    (tmp_path / "gnd.pkl").write_bytes(data)
    truth = read_truth(tmp_path / "gnd.pkl")
    assert truth.images == ("café",) and truth.settings == OXFORD
    assert truth.queries[0].lists == {"ok": (0,), JUNK: ()}


def test_protocol_5_of_arrays_names_json(tmp_path: Path) -> None:
    with pytest.raises(
        VitseeError, match=r"_frombuffer \(an array of protocol 5: give the same"
    ):
        read_truth(write(tmp_path / "gnd.pkl", arrays(), 5))
    assert len(read_truth(write(tmp_path / "gnd.pkl", plain(), 5)).queries) == 2


class Calls:
    """What pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def _touch() -> str:
    return f"open({str(RAN)!r}, 'w')"


HOSTILE: dict[str, Any] = {
    "os.system": lambda: Calls(__import__("os").system, f"touch {RAN}"),
    "eval": lambda: Calls(eval, _touch()),
    "exec": lambda: Calls(exec, _touch()),
    "subprocess": lambda: Calls(subprocess.Popen, [sys.executable, "-c", _touch()]),
    "np.load": lambda: Calls(np.load, str(RAN)),
    "np.zeros": lambda: Calls(np.zeros, 10**12),
    "bytes": lambda: Calls(bytes, 10**12),
    "bytearray": lambda: Calls(bytearray, 10**12),
    "ndarray": lambda: Calls(np.ndarray, (10**12,)),
    "getattr": lambda: Calls(getattr, "x", "__class__"),
    "import": lambda: Calls(__import__, "antigravity"),
    "object": lambda: Path("x"),
    "date": lambda: datetime.date(2020, 1, 1),
    "set": lambda: {1, 2},
    "2-d": lambda: np.zeros((2, 2)),
    "structured": lambda: np.zeros(2, [("a", "i4")]),
    "function": lambda: print,
}


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    value = plain()
    value["gnd"][0]["easy"] = [HOSTILE[name]()]
    with pytest.raises(VitseeError, match=r"gnd\.pkl"):
        read_truth(write(tmp_path / "gnd.pkl", value, protocol))
    assert not RAN.exists()


HAND_MADE = {
    "dotted name": b"cbuiltins\nbytes.fromhex\n.",
    "dotted name by stack": b"\x80\x04\x8c\x08builtins\x8c\x0dbytes.fromhex\x93.",
    "name with a line": b"\x80\x04\x8c\x02a\n\x8c\x02b\n\x93.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02X\x01\x00\x00\x00xQ.",
    "instance": b"(i__builtin__\nbytes\n.",
    "new object": b"\x80\x02c_codecs\nencode\n)\x81.",
    "object": b"(c__builtin__\nbytes\no.",
    "reserved": b"\x80\x05\x96\x00\x00\x00\x00\x00\x00\x00\x40.",
    "buffer": b"\x80\x05\x97.",
    "state of a function": b"c_codecs\nencode\n(dS'_work'\nI1\nsb.",
    "attributes of a function": b"c_codecs\nencode\n(N(dS'_work'\nI1\nst\x86b.",
    "attribute of a list": b"](dS'append'\nI1\nsb.",
    "calls a number": b"\x80\x02K\x01)R.",
    "empty": b"",
    "no pickle": b"\x89PNG\r\n",
    "cut short": pickle.dumps(plain(), 2)[:-9],
    "no such memory": b"\x80\x02h\x07.",
    "many digits": b"I" + b"9" * 10_000 + b"\n.",
    "text without end": b"\x80\x04X\xff\xff\xff\x7fabc.",
    "contains itself": b"\x80\x02]q\x00h\x00a.",
    "deep": b"]" * 50_000 + b"a" * 49_999 + b".",
    "bytes of no latin-1": b"c_codecs\nencode\n(S'x'\nS'utf-8'\ntR.",
    "type of all": b"\x80\x02cnumpy\ndtype\nX\x0a\x00\x00\x00i4,(9999)i4K\x00K\x01\x87R.",
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_pickles_are_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "gnd.pkl"
    path.write_bytes(HAND_MADE[name])
    with pytest.raises(VitseeError) as caught:
        read_truth(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_place_in_memory_reserves_none(tmp_path: Path) -> None:
    """The compiled interpreter makes a table of 2^31 places for this one."""
    path = tmp_path / "gnd.pkl"
    path.write_bytes(b"\x80\x02]r\xff\xff\xff\x7f" + b"]r\xfe\xff\xff\x7fa.")
    tracemalloc.start()
    with pytest.raises(VitseeError, match="expected imlist"):
        read_truth(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 26  # the file's own limit, and more
    tracemalloc.stop()


def test_references_do_not_multiply(tmp_path: Path) -> None:
    """A list of n references to a list of n references is n^2 entries to who walks it."""
    one = [*range(30_000)]
    value = {
        "imlist": [str(i) for i in range(30_000)],
        "qimlist": [f"q{i}" for i in range(30_000)],
    }
    value["gnd"] = [{"bbx": [0, 0, 1, 1], "easy": one, "hard": [], "junk": []}] * 30_000  # type: ignore[assignment,list-item]
    with pytest.raises(
        VitseeError, match="has 900120000 places in its lists, expected at most"
    ):
        read_truth(write(tmp_path / "gnd.pkl", value))


def test_only_known_instructions_and_names() -> None:
    """What a new release of Python adds is refused until it is looked at."""
    refused = {op.name for op in pickletools.opcodes} - {*plain_pickle._INSTRUCTIONS}
    assert refused == {
        *(
            "PERSID",
            "BINPERSID",
            "INST",
            "OBJ",
            "NEWOBJ",
            "NEWOBJ_EX",
            "EXT1",
            "EXT2",
            "EXT4",
        ),
        *("BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"),
        *("EMPTY_SET", "ADDITEMS", "FROZENSET"),
    }
    names = {
        (module, name) for module, own in plain_pickle._KNOWN.items() for name in own
    }
    assert {name for _, name in names} == {
        *("_reconstruct", "scalar", "ndarray", "dtype", "encode", "bytes"),
    }


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_pickles_are_refused_or_read(tmp_path_factory: Any, data: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pkl"
    raw = bytearray(
        pickle.dumps(data.draw(st.sampled_from([plain(), arrays(), scalars()])), 2)
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(raw))
    try:
        found = read_truth(path)
    except VitseeError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(found, RetrievalTruth)


def test_too_large_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MAX_BYTES", 1 << 20)
    (tmp_path / "gnd.pkl").write_bytes(b"\x00" * ((1 << 20) + 1))
    with pytest.raises(VitseeError, match=r"larger than 1 MiB.*as JSON"):
        load_plain(tmp_path / "gnd.pkl")


# ---------------------------------------------------------------- JSON, and what holds of both


def _json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def changed(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    value = plain()
    change(value)
    return value


REFUSED: list[tuple[Any, str]] = [
    ([], "has a list; expected imlist and qimlist"),
    ({}, "has nothing; expected"),
    (changed(lambda v: v.pop("gnd")), "has imlist, qimlist; expected"),
    (changed(lambda v: v.update(more=1)), "has gnd, imlist, more, qimlist; expected"),
    (changed(lambda v: v.update(imlist="abcd")), "has a str without names as imlist"),
    (changed(lambda v: v["imlist"].append(5)), "entry 4 of imlist is no name"),
    (changed(lambda v: v["imlist"].append(" ")), "entry 4 of imlist is no name"),
    (changed(lambda v: v["imlist"].append("a")), "has 'a' twice in imlist"),
    (changed(lambda v: v["qimlist"].append("s")), "has 2 entries in gnd for 3 queries"),
    (changed(lambda v: v["gnd"].__setitem__(0, 5)), "query 'q' has a int; expected"),
    (
        changed(lambda v: v["gnd"][0].pop("junk")),
        "query 'q' has bbx, easy, hard; expected",
    ),
    (changed(lambda v: v["gnd"][1].update(easy=3)), "query 'r', easy is a int; expected"),
    (
        changed(lambda v: v["gnd"][1]["easy"].append(4)),
        r"easy has 4, which is no place.*0 to 3",
    ),
    (
        changed(lambda v: v["gnd"][1]["easy"].append(-1)),
        r"easy has -1, which is no place",
    ),
    (
        changed(lambda v: v["gnd"][1]["easy"].append(10**400)),
        "easy has a number, which is no",
    ),
    (
        changed(lambda v: v["gnd"][1]["easy"].append(1.0)),
        "easy has a float where a place",
    ),
    (
        changed(lambda v: v["gnd"][1]["easy"].append(True)),
        "easy has a bool where a place",
    ),
    (changed(lambda v: v["gnd"][1]["easy"].append("1")), "easy has a str where a place"),
    (changed(lambda v: v["gnd"][0]["hard"].append(0)), "hard has a place twice"),
    (
        changed(lambda v: v["gnd"][0]["junk"].append(2)),
        r"image 2 \(c\) in both easy and junk",
    ),
    (
        changed(lambda v: v["gnd"][0].update(bbx=[1, 2, 3])),
        "a bbx that is no 4 finite numbers",
    ),
    (
        changed(lambda v: v["gnd"][0].update(bbx=[1, 2, 3, float("nan")])),
        "no 4 finite numbers",
    ),
    (changed(lambda v: v["gnd"][0].update(bbx=[1, 2, 3, 1e300])), "no 4 finite numbers"),
    (changed(lambda v: v["gnd"][0].update(bbx=[5, 2, 3, 9])), "has an empty bbx 5 2 3 9"),
    (
        changed(lambda v: v["qimlist"].__setitem__(0, "b")),
        "the query 'b' is among the images",
    ),
    (
        changed(
            lambda v: v["gnd"].__setitem__(0, {"bbx": [0, 0, 1, 1], "ok": [], "junk": []})
        ),
        "query 'r' has bbx, easy, hard, junk; expected",
    ),
]


@pytest.mark.parametrize(("value", "phrase"), REFUSED)
def test_refused_ground_truths(tmp_path: Path, value: Any, phrase: str) -> None:
    with pytest.raises(VitseeError, match=phrase) as caught:
        read_truth(_json(tmp_path / "gnd.json", value))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    with pytest.raises(VitseeError, match=phrase):
        read_truth(write(tmp_path / "gnd.pkl", value))


def test_a_query_may_be_its_own_junk(tmp_path: Path) -> None:
    value = plain()
    value["qimlist"][1] = "a"
    assert read_truth(_json(tmp_path / "gnd.json", value)).queries[1].lists[JUNK] == (0,)


def test_files_that_are_none(tmp_path: Path) -> None:
    for name, data, phrase in (
        ("gnd.json", b"{", "is not JSON"),
        ("gnd.json", b"[" * 200_000, "is not JSON"),
        ("gnd.json", b"\xff\xfe", "is no text in UTF-8"),
        ("gnd.json", b'{"imlist": NaN}', "has imlist; expected"),
        ("gnd.csv", b"", "begins with ''; expected id,images"),
        ("gnd.csv", b"name,images\n", "begins with 'name,images'; expected id,images"),
        ("gnd.csv", b"id,images\n", "has a header and no queries below"),
        (
            "gnd.csv",
            b"id,images\nq,a b,x\n",
            "line 2 of .* has 3 cells; expected id,images",
        ),
        ("gnd.csv", b"id,images\n,a b\n", "line 2 of .* has 2 cells"),
        ("gnd.csv", b"id,images\nq,a\nq,b\n", "line 3 of .* has the query 'q' again"),
        ("gnd.csv", b"id,images\nq,a a\n", "line 2 of .* names an image twice"),
        ("gnd.csv", b"id,images\nq,a\nr,q\n", "the query 'q' is among the images"),
        (
            "gnd.csv",
            b"id,images,Usage\nq,a,Test\n",
            "has the Usage 'Test'; expected Public",
        ),
        (
            "gnd.txt",
            b"x",
            r"is no ground truth by its ending; expected \.pkl, \.json, \.csv",
        ),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(VitseeError, match=phrase) as caught:
            read_truth(tmp_path / name)
        assert "\n" not in str(caught.value)
    for name in ("none.pkl", "none.json", "none.csv"):
        with pytest.raises(VitseeError, match=r"cannot read .*: no such file"):
            read_truth(tmp_path / name)


@pytest.mark.parametrize("ending", [".pkl", ".json", ".csv"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, ending: str) -> None:
    os.mkfifo(tmp_path / f"gnd{ending}")
    with pytest.raises(VitseeError, match=r"cannot read .*: not a regular file"):
        read_truth(tmp_path / f"gnd{ending}")


def test_landmarks(tmp_path: Path) -> None:
    path = tmp_path / "solution.csv"
    path.write_text(
        '\ufeffid,images,Usage\nq,"b a",Public\nr,None,Ignored\ns,c b,Private\n\n'
    )
    truth = read_truth(path)
    assert (
        truth.images == ("b", "a", "c")
        and truth.searches_unlisted
        and truth.form == "plain"
    )
    assert [q.lists["relevant"] for q in truth.queries] == [(0, 1), (), (0, 2)]
    assert [q.use for q in truth.queries] == ["public", "ignored", "private"]
    assert truth.settings == LANDMARKS
    assert [s.map_name for s in truth.settings] == [
        "map@100",
        "map@100_public",
        "map@100_private",
    ]
    path.write_text("id,images,Usage\nq,a,Public\n")
    assert [s.map_name for s in read_truth(path).settings] == [
        "map@100",
        "map@100_public",
    ]
    path.write_text("id,images\nq,a b\n")
    assert (
        read_truth(path).settings == RELEVANT_ONLY and RELEVANT_ONLY[0].map_name == "map"
    )


# ---------------------------------------------------------------- what is written


def test_export_and_back(tmp_path: Path) -> None:
    write_revisited(tmp_path / "ox", n_queries=3, n_each=2, n_others=2)
    source = tmp_path / "ox/gnd_roxford5k.pkl"
    queries, truth = tmp_path / "q.csv", tmp_path / "t.json"
    export(source, queries, truth)
    again = read_truth(truth)
    first = read_truth(source)
    assert (again.images, again.queries) == (first.images, first.queries)
    lines = queries.read_text().splitlines()
    assert lines[0] == "path,id,box" and len(lines) == 4
    path, name, box = lines[1].split(",")
    assert (tmp_path / path).is_file() and name == first.queries[0].name
    assert tuple(map(float, box.split())) == first.queries[0].box
    with pytest.raises(VitseeError, match="exists"):
        export(source, queries, truth)
    export(source, queries, truth, force=True)


def test_export_refuses(tmp_path: Path) -> None:
    source = _json(tmp_path / "gnd.json", plain())
    out = tmp_path / "q.csv"
    with pytest.raises(VitseeError, match="the image of the query 'q' is not beside"):
        export(source, out)
    for name in ("../q", "/etc/q"):
        value = plain()
        value["qimlist"][0] = name
        with pytest.raises(VitseeError, match="is no name below its folder"):
            export(_json(tmp_path / "evil.json", value), out)
    (tmp_path / "jpg").mkdir()
    (tmp_path / "jpg/q.jpg").write_bytes(b"no picture")
    with pytest.raises(
        VitseeError, match=r"cannot read .*q\.jpg: UnidentifiedImageError"
    ):
        export(source, out)
    (tmp_path / "s.csv").write_text("id,images\nq,a\n")
    with pytest.raises(VitseeError, match="has no boxes of its queries"):
        export(tmp_path / "s.csv", out)
    with pytest.raises(VitseeError, match="is no ground truth of the form of ROxford"):
        export(tmp_path / "s.csv", None, tmp_path / "t.json")
    with pytest.raises(VitseeError, match="labels are no ground truth in a file"):
        export(Path("labels"), out)
    assert not out.exists() and not (tmp_path / "t.json").exists()


def test_boxes_are_cut_to_their_images(tmp_path: Path) -> None:
    """A published box may end a fraction of a pixel beyond its image, where extract refuses it."""
    from PIL import Image

    (tmp_path / "jpg").mkdir()
    for name in ("q", "r"):
        Image.new("RGB", (20, 15)).save(tmp_path / f"jpg/{name}.jpg")
    value = copy.deepcopy(plain())
    value["gnd"][0]["bbx"] = [-0.5, 3, 20.6, 15.7]
    export(_json(tmp_path / "gnd.json", value), tmp_path / "q.csv")
    assert (tmp_path / "q.csv").read_text().splitlines()[1] == "jpg/q.jpg,q,0 3 20 15"
    value["gnd"][0]["bbx"] = [30, 3, 40, 15]
    with pytest.raises(VitseeError, match="the box"):
        export(_json(tmp_path / "far.json", value), tmp_path / "far.csv")


@pytest.mark.parametrize(
    ("box", "expected", "line"),
    [
        # Of 20 x 15 pixels as stored, and 15 x 20 upright.
        (
            [2, 3, 20.6, 15.7],
            "2 3 20 15",
            "as they are stored: extract .* without --exif",
        ),
        ([2, 3, 14, 14], "2 3 14 14", "as they are stored: extract .* without --exif"),
        ([2, 3, 15.6, 19.5], "2 3 15 19.5", "upright: extract the list with --exif"),
    ],
)
def test_boxes_of_images_with_an_orientation(
    tmp_path: Path,
    box: list[float],
    expected: str,
    line: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Boxes of upright images were cut to the stored width and height."""
    from PIL import Image

    oriented_image(tmp_path / "jpg/q.jpg")
    Image.new("RGB", (20, 15)).save(tmp_path / "jpg/r.jpg")
    value = copy.deepcopy(plain())
    value["gnd"][0]["bbx"] = box
    export(_json(tmp_path / "gnd.json", value), tmp_path / "q.csv")
    assert (tmp_path / "q.csv").read_text().splitlines()[1] == f"jpg/q.jpg,q,{expected}"
    (record,) = caplog.records
    assert re.search(f"1 of 2 images of queries .* {line}", record.getMessage())
    source = open_source(str(tmp_path / "q.csv"), exif="upright" in line)
    x0, y0, x1, y1 = (round(float(number)) for number in expected.split())
    image, _ = source.opener.load(source.locations[0])
    assert abs(image.width - (x1 - x0)) <= 1 and abs(image.height - (y1 - y0)) <= 1


def test_boxes_of_upright_and_of_stored_images_are_refused(tmp_path: Path) -> None:
    for name in "qr":
        oriented_image(tmp_path / f"jpg/{name}.jpg")
    value = copy.deepcopy(plain())
    value["qimlist"] = ["q", "r"]
    value["gnd"] = [
        value["gnd"][0] | {"bbx": box} for box in ([0, 0, 20, 9], [0, 0, 9, 20])
    ]
    with pytest.raises(
        VitseeError, match=r"boxes of 1 queries fit .* expected all of one"
    ):
        export(_json(tmp_path / "gnd.json", value), tmp_path / "q.csv")
    assert not (tmp_path / "q.csv").exists()


def oriented_image(path: Path) -> None:
    """A JPEG of 20 x 15 pixels that is upright when it is turned by a quarter."""
    from PIL import Image

    path.parent.mkdir(exist_ok=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 15)).save(path, exif=exif)


def test_miniature_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_revisited(tmp_path / name, n_queries=2, n_each=2, n_others=3)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 1 + 2 + 2 * 4 + 3
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (
            tmp_path / "b" / file
        ).read_bytes()
    raw = (tmp_path / "a/gnd_roxford5k.pkl").read_bytes()
    assert next(pickletools.genops(io.BytesIO(raw)))[1] == 2
