"""Batches: the same rows whoever loads them, bad images in place, workers that always end."""

from __future__ import annotations

import io
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitsee_core.images import Batch, DataError, ImageError, batches, open_source, select
from vitsee_core.images.decoding import hash64
from vitsee_core.images.selection import Selection

TRANSFORM: dict[str, Any] = {
    "input_size": (3, 24, 24), "interpolation": "bicubic", "crop_pct": 0.9,
    "crop_mode": "center", "mean": (0.5,) * 3, "std": (0.5,) * 3,
}  # fmt: skip
N = 23
RANGES: list[slice | tuple[int, int]] = [slice(0, 8), (8, 16), slice(16, 23)]


def jpeg(k: int) -> bytes:
    rng = np.random.default_rng(k)
    file = io.BytesIO()
    pixels = rng.integers(0, 256, (40, 30 + k, 3), np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def bomb() -> bytes:
    """A PNG of a few bytes that claims 30000 x 30000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", 30000, 30000, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", b"")
        + chunk(b"IEND", b"")
    )


def break_some(folder: Path) -> dict[str, str]:
    """Damage five images in five ways; the reasons expected, by id."""
    (folder / "03.jpg").write_bytes(b"")
    (folder / "07.jpg").write_bytes(jpeg(7)[:-300])
    (folder / "11.jpg").write_text("no image at all")
    (folder / "15.jpg").write_bytes(bomb())
    (folder / "19.jpg").unlink()
    return {
        "03.jpg": "the file is empty",
        "07.jpg": "truncated",
        "11.jpg": "not an image",
        "15.jpg": "too many pixels",
        "19.jpg": "no such file",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for k in range(N):
        (tmp_path / f"{k:02d}.jpg").write_bytes(jpeg(k))
    return tmp_path


def load(selection: Selection, workers: int, **options: Any) -> list[Batch]:
    options = {"on_error": "nan"} | options
    return list(batches(selection, TRANSFORM, RANGES, workers=workers, **options))


def assert_equal(some: list[Batch], others: list[Batch]) -> None:
    for a, b in zip(some, others, strict=True):
        assert a.rows == b.rows
        assert torch.equal(a.pixels, b.pixels)
        np.testing.assert_array_equal(a.valid, b.valid)
        np.testing.assert_array_equal(a.hash, b.hash)
        np.testing.assert_array_equal(a.size, b.size)
        assert a.errors == b.errors


@pytest.mark.slow
def test_rows_never_shift_and_workers_do_not_matter(folder: Path) -> None:
    source = open_source(str(folder))
    selection = select(source, seed=3)
    good = load(selection, 0)
    reasons = break_some(folder)
    results = {workers: load(selection, workers) for workers in (0, 1, 2)}
    assert [b.rows for b in results[0]] == [slice(0, 8), slice(8, 16), slice(16, 23)]
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])
    found: dict[str, str] = {}
    for batch, whole in zip(results[0], good, strict=True):
        assert whole.valid.all() and not whole.errors
        assert batch.pixels.dtype == torch.uint8 and batch.pixels.shape[1:] == (3, 24, 24)
        for k, row in enumerate(range(batch.rows.start, batch.rows.stop)):
            name = selection.samples.ids[row]
            assert batch.valid[k] == (name not in reasons)
            assert torch.equal(batch.pixels[k], whole.pixels[k] * int(batch.valid[k]))
            assert batch.hash[k] == (whole.hash[k] if batch.valid[k] else 0)
            size = (40, 30 + int(name[:2])) if batch.valid[k] else (0, 0)
            assert batch.size.dtype == np.int32 and tuple(batch.size[k]) == size
        found |= {name: reason for _, name, reason in batch.errors}
        assert all(selection.samples.ids[row] == name for row, name, _ in batch.errors)
    assert found.keys() == reasons.keys()
    assert all(reasons[name] in found[name] for name in reasons), found
    assert all("\n" not in reason for reason in found.values())
    first = selection.samples.ids[0]
    assert good[0].hash[0] == hash64((folder / first).read_bytes()) or first in reasons


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_fail_names_the_first_bad_row(folder: Path, workers: int) -> None:
    selection = select(open_source(str(folder)), order="dataset")
    break_some(folder)
    with pytest.raises(ImageError, match=r"^cannot read 03\.jpg: the file is empty$"):
        load(selection, workers, on_error="fail")


@pytest.mark.slow
def test_arrays_reach_the_workers(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (N, 20, 22, 3), np.uint8)
    np.savez(
        tmp_path / "d.npz", images=images, splits=np.array(["a"] * 9 + ["b"] * (N - 9))
    )
    selection = select(open_source(str(tmp_path / "d.npz"), split="b+a"))
    results = load(selection, 2)
    assert_equal(load(selection, 0), results)
    assert all(batch.valid.all() for batch in results)
    image, value = selection.source.read(int(selection.samples.index[0]))
    assert value == results[0].hash[0]
    assert image.size == (22, 20)
    assert all((batch.size == (20, 22)).all() for batch in results)


def test_sizes_are_those_of_the_file_before_any_turn(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg", exif=turned)
    (batch,) = batches(select(open_source(str(tmp_path))), TRANSFORM, [slice(0, 1)])
    assert batch.size.tolist() == [[4, 6]]


@pytest.mark.slow
def test_any_batch_size_gives_the_same_rows(folder: Path) -> None:
    selection = select(open_source(str(folder)))
    whole = torch.cat([batch.pixels for batch in load(selection, 0)])
    for size, workers in ((1, 2), (5, 0), (N, 3)):
        ranges = [slice(i, min(i + size, N)) for i in range(0, N, size)]
        parts = list(batches(selection, TRANSFORM, ranges, workers=workers))
        assert torch.equal(torch.cat([part.pixels for part in parts]), whole)


@pytest.mark.slow
def test_batches_own_their_memory(folder: Path) -> None:
    selection = select(open_source(str(folder)))
    kept = load(selection, 1)
    copies = [batch.pixels.clone() for batch in kept]
    load(selection, 1)[0].pixels.zero_()
    assert all(torch.equal(a.pixels, b) for a, b in zip(kept, copies, strict=True))


def test_order_and_repetition_of_the_ranges_are_kept(folder: Path) -> None:
    selection = select(open_source(str(folder)))
    ranges = [slice(20, 23), slice(0, 2), slice(20, 23)]
    found = list(batches(selection, TRANSFORM, ranges, workers=2))
    assert [batch.rows for batch in found] == ranges
    assert torch.equal(found[0].pixels, found[2].pixels)
    assert list(batches(selection, TRANSFORM, [], workers=2)) == []


def children(of: int | str = "self") -> set[int]:
    """Living children of a process."""
    tasks = Path(f"/proc/{of}/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def loading_threads() -> int:
    return sum(thread.name == "vitsee-loading" for thread in threading.enumerate())


needs_proc = pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(),
    reason="needs Linux's /proc",
)


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("workers", [0, 2])
def test_stopping_early_leaves_nothing_behind(folder: Path, workers: int) -> None:
    selection = select(open_source(str(folder)))
    before, files = children(), len(os.listdir("/proc/self/fd"))
    for stop in (lambda found: found.close(), lambda found: None):
        ranges = [slice(k, k + 1) for k in range(N)] * 20
        found: Any = batches(selection, TRANSFORM, ranges, workers=workers)
        next(found)
        stop(found)
        del found
        assert children() == before and loading_threads() == 0
    assert len(os.listdir("/proc/self/fd")) == files


@needs_proc
def test_reading_ahead_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selection = select(open_source(str(folder)))
    opener = type(selection.source.opener)
    loaded: list[Any] = []
    load_one = opener._load

    def counted(self: Any, location: Any) -> Any:
        loaded.append(location)
        return load_one(self, location)

    monkeypatch.setattr(opener, "_load", counted)
    found: Any = batches(
        selection, TRANSFORM, [slice(k, k + 1) for k in range(N)], workers=0
    )
    next(found)
    deadline = time.monotonic() + 20
    while len(loaded) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    # One taken, two waiting, one held by the thread.
    assert len(loaded) == 4
    found.close()


SCRIPT = """
from vitsee_core.images import batches, open_source, select
selection = select(open_source({folder!r}))
found = batches(selection, {transform!r}, [slice(0, 4)] * 100000, workers=2)
for k, batch in enumerate(found):
    if k == 2:
        print("running", flush=True)
"""


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_an_interrupted_process(
    folder: Path, how: signal.Signals
) -> None:
    """The signal reaches the process group, as Ctrl-C and job schedulers send it."""
    script = SCRIPT.format(transform=TRANSFORM, folder=str(folder))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment, start_new_session=True, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        workers = children(process.pid)
        assert len(workers) == 2
        if how == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, how)
        _, errors = process.communicate(timeout=60)
    except BaseException:  # else it would load its 100000 batches
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in workers)
    # Only the parent says that it was interrupted.
    assert errors.count("Traceback") == (how == signal.SIGINT)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@needs_proc
def test_a_killed_worker_is_said(folder: Path) -> None:
    selection = select(open_source(str(folder)))
    before = children()
    found = batches(selection, TRANSFORM, [slice(0, N)] * 2000, workers=1)
    next(found)
    (worker,) = children() - before
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(DataError, match=r"killed by signal 9.*fewer --workers"):
        for _ in found:
            pass
    assert children() == before


def test_workers_import_neither_torch_nor_timm() -> None:
    code = (
        "import sys, vitsee_core.images.loading; print({'torch', 'timm', 'zarr'} & "
        "{*sys.modules})"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert result.stdout == "set()\n"


def test_what_is_refused(folder: Path) -> None:
    selection = select(open_source(str(folder)))
    with pytest.raises(DataError, match="rows 20:24 are outside the 23 samples"):
        batches(selection, TRANSFORM, [slice(20, 24)])
    with pytest.raises(DataError, match="unknown on_error 'skip'"):
        load(selection, 0, on_error="skip")
    with pytest.raises(DataError, match="-1 workers"):
        load(selection, -1)
