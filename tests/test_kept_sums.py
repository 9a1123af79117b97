"""Half of long work on disk: kept, continued to the bit, and read without running code."""

from __future__ import annotations

import io
import pickle
import shutil
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import Result

from tests.command_line import invoke
from tests.every_command import TABLES
from vitsee_core.analyses.retrieve import SiteScores
from vitsee_core.runtime import kept_sums
from vitsee_core.runtime.kept_sums import FoldCheckpoints, KeptSum, state_of
from vitsee_core.runtime.plain_values import (
    CHECKSUM,
    MAGIC,
    SIZE,
    NotPlain,
    read_plain,
    write_plain,
)
from vitsee_core.statistics.moments import Moments, SlabMoments
from vitsee_stores import Slab

# Commands whose work adds up over slabs, or is spread over sites.
SUMS = ("attn-dist", "cka-heads", "dense-probe", "effect", "saliency", "spectrum")
SPREAD = ("cluster", "knn", "localize", "probe", "retrieve")
OTHERS = (
    "attn-map",
    "cosine-map",
    "keypoints",
    "lens",
    "norms",
    "pca",
    "propagate",
    "spatial",
)


def read_nothing(slab: Slab) -> dict[str, Any]:
    return {}


def read_again(slab: Slab) -> dict[str, Any]:
    return {}


def written(value: Any) -> bytes:
    file = io.BytesIO()
    write_plain(file, value)
    return file.getvalue()


def test_plain_data_comes_back_as_it_was() -> None:
    moments = Moments()
    moments.add(np.random.default_rng(0).normal(size=(5, 3)))
    value: dict[Any, Any] = {
        ("blocks.0", True): [
            1,
            2.5,
            None,
            "t\xe9xt",
            float("inf"),
            -0.0,
            10**30,
            "\udcff/a",
            2**63,
        ],
        "arrays": (
            np.arange(6.0).reshape(2, 3).T,
            np.float32(0.1),
            np.array(["a", "bc"]),
        ),
        3: {"set": {1, 2}, "frozen": frozenset({"x"}), "slice": slice(1, None)},
        "objects": np.array([["a", None], [1, 2.0]], object),
        "nested": np.array([None, (1, [2])], object),
        "moments": moments,
        "named": SiteScores({}, {}, "few"),
    }
    back = read_plain(io.BytesIO(written(value)))
    assert list(back) == list(value) and back["blocks.0", True] == value["blocks.0", True]
    assert str(back["blocks.0", True][5]) == "-0.0"
    for one, other in zip(back["arrays"], value["arrays"], strict=True):
        assert type(one) is type(other) and np.array_equal(one, other)
        assert one.dtype == other.dtype
    assert back["arrays"][0].flags.f_contiguous  # products of it have the same bits
    assert back[3] == value[3]
    assert back["objects"].tolist() == value["objects"].tolist()
    assert back["nested"][1] == (1, [2])
    assert type(back["moments"]) is Moments
    assert type(back["named"]) is SiteScores and back["named"] == value["named"]
    assert np.array_equal(back["moments"].summary().low, moments.summary().low)


@pytest.mark.parametrize(
    "value",
    [
        len,
        lambda: 0,
        object(),
        b"x",
        SlabMoments(read_nothing),
        io.BytesIO(),
        KeyError("x"),
    ],
)
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(NotPlain):
        written(["before", value])


def test_large_states_are_refused_before_they_are_written() -> None:
    file = io.BytesIO()
    with pytest.raises(NotPlain, match=r"8\.0 kB, of 4\.0 kB at most"):
        write_plain(file, np.zeros(1000), max_bytes=4000)
    assert not file.getvalue()


def made_by_hand(tree: Any, *arrays: bytes) -> bytes:
    """A file with any tree: `{"type": "Items", "kind": "list", "items": []}`."""
    tree = tree if isinstance(tree, bytes) else msgspec.msgpack.encode(tree)
    pieces = [piece + CHECKSUM.pack(zlib.crc32(piece)) for piece in (tree, *arrays)]
    return MAGIC + SIZE.pack(len(tree)) + b"".join(pieces)


def node(struct: str, **fields: Any) -> dict[str, Any]:
    return {"type": struct, **fields}


def array(dtype: str, shape: list[int]) -> dict[str, Any]:
    return node("Array", dtype=dtype, shape=shape, fortran=False, scalar=False)


ran: list[str] = []


class Trap:
    """Runs code when a pickle of it is read."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return ran.append, ("pickle",)


def hostile() -> dict[str, bytes]:
    whole = written([1, np.arange(1000.0)])
    flipped = bytearray(whole)
    flipped[-1000] ^= 1
    earlier = io.BytesIO()
    np.savez(earlier, tree=np.frombuffer(b"1", np.uint8))
    deep = b"\x83\xa4type\xa5Items\xa4kind\xa4list\xa5items\x91" * 20_000 + b"\x01"
    return {
        "a function": made_by_hand(node("Instance", name="os:system", state={})),
        "a class of others": made_by_hand(
            node("Instance", name="subprocess:Popen", state={})
        ),
        "a function of ours": made_by_hand(
            node("Instance", name="vitsee_core.runtime.streaming:fold", state={})
        ),
        "a module that is not loaded": made_by_hand(
            node("Instance", name="vitsee_core.x:Y", state={})
        ),
        "another word": made_by_hand(node("Items", kind="call", items=["os:system"])),
        "another struct": made_by_hand(node("Call", name="os:system")),
        "a pickle in an array": made_by_hand(array("|O", [1]), pickle.dumps([Trap()])),
        "a pickle": pickle.dumps(Trap()),
        "no such array": made_by_hand(array("<f8", [7])),
        "an array beyond memory": made_by_hand(array("<f8", [1 << 20, 1 << 30]), b"x"),
        "an empty array beyond memory": made_by_hand(
            array("<f8", [1 << 62, 1 << 62, 0]), b""
        ),
        "an array of arrays": made_by_hand(array("(9,)f8", [1]), b"x" * 72),
        "a list as a key": made_by_hand(
            node("Pairs", items=[[node("Items", kind="list", items=[]), 1]])
        ),
        "an empty integer": made_by_hand(node("Items", kind="int", items=[])),
        "digits": made_by_hand(node("Items", kind="int", items=["9" * 100_000])),
        "a shape that does not fit": made_by_hand(node("Objects", shape=[7], items=[1])),
        "deep": made_by_hand(deep),
        "a list of 2^32": made_by_hand(b"\xdd\xff\xff\xff\xff"),
        "a tree of 2^60 bytes": MAGIC + SIZE.pack(1 << 60),
        "more behind it": whole + b"x",
        "of an earlier version": earlier.getvalue(),
        "cut": whole[:-100],
        "a flipped bit": bytes(flipped),
        "empty": b"",
    }


@pytest.mark.parametrize("what", hostile())
def test_no_code_runs_when_a_file_is_read(what: str) -> None:
    with pytest.raises(NotPlain):
        read_plain(io.BytesIO(hostile()[what]))
    assert not ran


def test_changed_bytes_are_refused_or_read() -> None:
    """300 files with bytes of their tree changed, and its checksum made anew."""
    rng = np.random.default_rng(0)
    values = [np.arange(3), {"a": (1, 2.0)}, "text", {1}, slice(3), Moments(), None]
    whole = written(values)
    begin = len(MAGIC) + SIZE.size
    size = SIZE.unpack(whole[len(MAGIC) : begin])[0]
    for _ in range(300):
        tree = bytearray(whole[begin : begin + size])
        for _ in range(rng.integers(1, 4)):
            tree[rng.integers(size)] = rng.integers(256)
        body = made_by_hand(bytes(tree)) + whole[begin + size + CHECKSUM.size :]
        with suppress(NotPlain):
            read_plain(io.BytesIO(body))


def test_what_all_accumulators_share_is_not_kept() -> None:
    """Two empty ones share the function; what each made itself is the sum."""
    made = [SlabMoments(read_nothing) for _ in range(3)]
    made[0]._moments["x"] = Moments()
    assert list(state_of(*made)) == ["_moments"]
    made[0]._read = read_again  # as another process gives it back: not the same object
    assert list(state_of(*made)) == ["_moments"]


def sums_in(folder: Path) -> FoldCheckpoints:
    return FoldCheckpoints(folder / "r.csv.partial", lambda: ["command"])


def test_nothing_is_written_before_the_first_interval(tmp_path: Path) -> None:
    kept = sums_in(tmp_path).next_sum(["about"], "slabs", 3)
    assert kept.resume() is None
    for done in (1, 2, 3):
        kept.offer(done, lambda: pytest.fail("made"), last=done == 3)
    assert not list(tmp_path.iterdir())


def test_the_interval_grows_with_what_writing_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writing of 2 s follows 200 s of work, one of a moment 30 s."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    kept = sums_in(tmp_path).next_sum([], "slabs", 1000)
    kept.resume()
    found, takes = [], 2.0

    def state() -> list[int]:
        found.append(now[0])
        now[0] += takes
        return [1]

    for done in range(1, 600):
        now[0] += 1
        kept.offer(done, state)
    assert found[0] == 30.0 and np.allclose(np.diff(found), 202, atol=1.5)


def test_another_key_is_replaced_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept_sums, "EVERY", 0.0)
    kept = sums_in(tmp_path).next_sum(["one"], "slabs", 3)
    kept.resume()
    kept.offer(1, lambda: [1])
    assert sums_in(tmp_path).next_sum(["one"], "slabs", 3).resume() == (1, [1])
    assert (tmp_path / "r.csv.partial" / "1.sum").exists()
    for about, total in ((["two"], 3), (["one"], 4)):
        kept.offer(1, lambda: [1])
        assert sums_in(tmp_path).next_sum(about, "slabs", total).resume() is None
        assert (
            "another command, store, setting or version; the work begins anew"
            in caplog.text
        )
        assert not (tmp_path / "r.csv.partial").exists()
        caplog.clear()
        kept._next = 0.0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("1.sum", "it is no sum of this version"),
        ("1.npz", "it is of another command, store, setting or version"),
    ],
)
def test_a_file_that_cannot_be_read_is_replaced_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, why: str
) -> None:
    folder = tmp_path / "r.csv.partial"
    folder.mkdir()
    (folder / name).write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    assert sums_in(tmp_path).next_sum([], "slabs", 3).resume() is None
    assert why in caplog.text
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_full_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept_sums, "EVERY", 0.0)
    monkeypatch.setattr(kept_sums, "COST", float("inf"))

    def full(file: Any, value: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_sums, "write_plain", full)
    kept = sums_in(tmp_path).next_sum([], "slabs", 3)
    kept.resume()
    for done in (1, 2, 3):
        kept.offer(done, lambda: [1])
    assert (
        caplog.text.count("half of the work is not kept (no space left on device)") == 1
    )
    assert not list((tmp_path / "r.csv.partial").iterdir())


# ---------------------------------------------------------------- commands


class Kept:
    """Commands that write after every slab, and are stopped after a number of writings."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(kept_sums, "EVERY", 0.0)
        monkeypatch.setattr(kept_sums, "COST", float("inf"))
        self.left, offer = 10**9, KeptSum.offer

        def stopping(kept: KeptSum, *args: Any, **kwargs: Any) -> None:
            before = kept.sums.root.status
            offer(kept, *args, **kwargs)
            if kept.sums.root.status != before:
                self.left -= 1
                if self.left <= 0:
                    raise KeyboardInterrupt("SIGTERM")

        monkeypatch.setattr(KeptSum, "offer", stopping)

    def run(self, *words: object, writings: int = 10**9) -> Result:
        self.left = writings
        return invoke(*words)

    def check(self, words: tuple[object, ...], table: Path, most: int = 60) -> int:
        """The bytes of a command stopped after each of its writings are those of one that ran
        through; how often it was stopped."""
        partial = table.with_name(f"{table.name}.partial")
        whole = table.with_name("whole.csv")
        done = self.run(*words, "-o", whole, "--force")
        assert done.exit_code == 0, done.output
        assert not whole.with_name("whole.csv.partial").exists()
        for stops in range(most):
            ended = self.run(*words, "-o", table, writings=1)
            assert ("goes on after" in ended.stderr) == (stops > 0), ended.output
            if ended.exit_code == 0:
                break
            assert ended.exit_code == 75, ended.output
            assert "is kept; repeat the command to go on" in ended.stderr
            assert partial.is_dir() and not table.exists()
        assert table.read_bytes() == whole.read_bytes()
        assert not partial.exists()
        return stops


@pytest.fixture
def kept(everything: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(everything, monkeypatch)


@pytest.mark.slow
def test_a_dense_probe_goes_on_to_the_bit(kept: Kept, tmp_path: Path) -> None:
    """In its training pass, in its test pass, and after it."""
    words = (
        "dense-probe",
        "vit.zarr",
        "--masks",
        "maps",
        "--holdout",
        "0.4",
        "--per-class",
    )
    assert kept.check(words, tmp_path / "r.csv") == 4  # two passes over two slabs


@pytest.mark.slow
def test_others_begin_anew(kept: Kept, tmp_path: Path, everything: Path) -> None:
    """Another option, a changed file, --force: nothing of the old sum is used."""
    table, partial = tmp_path / "r.csv", tmp_path / "r.csv.partial"
    maps = shutil.copytree(everything / "maps", tmp_path / "maps")
    words = ["dense-probe", "vit.zarr", "--masks", maps, "--holdout", "0.4", "-o", table]
    assert kept.run(*words, writings=2).exit_code == 75
    again = kept.run(*words, "--l2-relative", "1", writings=1)
    assert (
        again.exit_code == 75 and "is not used: it is of another command" in again.stderr
    )
    assert kept.run(*words, writings=1).exit_code == 75
    mask = next(maps.rglob("*.png"))
    mask.write_bytes(mask.read_bytes() + b"\0")
    changed = kept.run(*words, writings=1)
    assert changed.exit_code == 75 and "is not used: it is of another" in changed.stderr
    forced = kept.run(*words, "--force", writings=1)
    assert forced.exit_code == 75 and "goes on" not in forced.stderr
    assert kept.run(*words).exit_code == 0 and not partial.exists()


def test_short_commands_write_nothing(
    everything: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(everything)
    monkeypatch.setattr(FoldCheckpoints, "write", lambda *args: pytest.fail("written"))
    done = invoke("attn-dist", "vit.zarr", "-o", tmp_path / "r.csv")
    assert done.exit_code == 0, done.output


@pytest.mark.slow
@pytest.mark.parametrize("command", [*SUMS, *SPREAD, *OTHERS])
def test_every_command_goes_on_to_the_bit(
    kept: Kept, tmp_path: Path, command: str
) -> None:
    stops = [
        kept.check((command, *words), tmp_path / f"{number}.csv")
        for number, words in enumerate(TABLES[command])
    ]
    assert sum(stops) or command in OTHERS


@pytest.mark.slow
@pytest.mark.parametrize("command", ["dense-probe", "spectrum", "cluster"])
def test_work_of_dasks_workers_goes_on_to_the_bit(
    kept: Kept, tmp_path: Path, command: str
) -> None:
    pytest.importorskip("distributed")
    words = (command, *TABLES[command][0], "--dask", "local:1")
    assert kept.check(words, tmp_path / "r.csv") > 1
