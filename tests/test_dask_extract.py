"""`extract --dask`, and the whole way of an image on a cluster that loses a worker, on s3://."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import vitsee
from tests import s3
from tests.clusters import two_workers
from tests.extractions import VIT, array_bytes, extract, extracted, plant_images
from tests.tables import equal
from vitsee_core.analyses import attn_dist, cka, localize, probe
from vitsee_core.extraction.by_workers import by_absolute_paths, extract_by_workers
from vitsee_core.extraction.options import (
    DataOptions,
    KeepOptions,
    ModelOptions,
    OptionError,
    Request,
    RunOptions,
)
from vitsee_core.extraction.outcome import Interrupted, Outcome
from vitsee_core.runtime.dask_map import DaskMap
from vitsee_core.runtime.dask_worker import DaskError
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.progress import Tally
from vitsee_core.tables.results import Table
from vitsee_stores import Store, describe, open_store, validate
from vitsee_stores.folder import Folder
from vitsee_stores.leases import Claims
from vitsee_stores.url import parse_place

distributed = pytest.importorskip("distributed")

pytestmark = pytest.mark.slow  # workers are processes

N, SLAB = 12, 2
MODEL = ModelOptions(
    "test_vit", random_init=0, img_size=(32, 48), model_args={"patch_size": 8}
)
KEEP = KeepOptions(slab=SLAB, inputs=True)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket that this process and its children reach."""
    with s3.server() as port, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment(port).items():
            patch.setenv(name, value)
        s3.make_bucket(port, "runs")
        yield "s3://runs"


@pytest.fixture(scope="module")
def two(bucket: str) -> Iterator[DaskMap]:
    with two_workers() as made:
        yield made


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("photos"), N)


class Killing:
    """A map that kills one of its workers between the second result and the third."""

    def __init__(self, inner: DaskMap) -> None:
        self.inner, self.killed = inner, 0

    def n_threads(self) -> int:
        return 2

    def __call__(
        self, function: Callable[[Any], Any], items: Iterable[Any], /
    ) -> Iterator[Any]:
        for k, result in enumerate(self.inner(function, items)):
            if k == 1:
                pids = list(self.inner.client.run(os.getpid).values())
                os.kill(pids[0], signal.SIGKILL)
                self.killed += 1
            yield result


def run_by_workers(
    output: str | Path, photos: Path, map: Any, progress: Any = None
) -> Outcome:
    data, run = DataOptions(str(photos)), RunOptions(parse_place(output), device="cpu")
    return extract_by_workers(Request(MODEL, data, KEEP, run), map, progress or Tally())


def plain(output: str | Path, photos: Path) -> None:
    how = ["--slab", SLAB, "--inputs", "--device", "cpu"]
    extracted(*VIT, "--data", photos, *how, "-o", output)


@pytest.mark.fault("a Dask worker killed in extract, cka, probe, ...")
def test_the_whole_way_with_a_worker_killed(
    two: DaskMap, bucket: str, photos: Path, tmp_path: Path
) -> None:
    """extract, cka, attn-dist, probe and localize on s3:// give one process's numbers."""
    killing = Killing(two)
    progress = Tally()
    outcome = run_by_workers(f"{bucket}/a.zarr", photos, killing, progress)
    assert killing.killed == 1 and outcome.complete
    plain(tmp_path / "here.zarr", photos)
    s3.download(f"{bucket}/a.zarr", tmp_path / "there.zarr")
    assert array_bytes(tmp_path / "there.zarr") == array_bytes(tmp_path / "here.zarr")
    assert validate(f"{bucket}/a.zarr", deep=True) == []
    assert not list((tmp_path / "there.zarr").rglob(".claim*"))
    # Slabs of the worker that was killed may have been counted twice, or not at all.
    assert N / 2 < progress.count <= N + 4 * SLAB

    store = open_store(f"{bucket}/a.zarr")
    caches = iter((tmp_path / "one", tmp_path / "two"))
    runs: list[tuple[Callable[..., Table], bool]] = [
        (lambda **more: attn_dist.run(store, **more), True),
        (lambda **more: cka.run(store, cache=next(caches), **more), False),
        (lambda **more: probe.run(store, holdout=0.25, **more), False),
        (lambda **more: localize.run(store, summary="site", **more), False),
    ]
    for run, kill in runs:
        killing = Killing(two)
        here, there = run(), run(map=killing if kill else two)
        assert killing.killed == kill
        close(here, there)


def close(here: Table, there: Table) -> None:
    """To the bit; localize multiplies several sites together here, one by one there."""
    if equal(here, there):
        return
    numbers = [name for name in here.written.columns if here[name].dtype.kind == "f"]
    assert "own_cka" in here["metric"] and equal(here, there, *numbers)
    for name in numbers:
        assert there[name] == pytest.approx(here[name], abs=1e-5, nan_ok=True)


def test_the_command(two: DaskMap, photos: Path, tmp_path: Path) -> None:
    """A relative path of data, of a worker with another working folder; then a complete store."""
    address = two.client.scheduler.address
    how = ["--slab", SLAB, "--device", "cpu", "--tokens", "pooled", "--dask", address]
    for _ in range(2):
        result = extract(*VIT, "--data", photos, *how, "-o", tmp_path / "a.zarr")
        assert result.exit_code == 0 and result.stdout == ""
    assert f"is complete ({N} images): nothing to do" in result.stderr
    assert describe(tmp_path / "a.zarr")["complete"]
    markers = describe(tmp_path / "a.zarr")
    assert markers["n_committed"] == N // SLAB


def test_in_python(two: DaskMap, photos: Path, tmp_path: Path) -> None:
    """As by one process; a torch module and a shard are refused."""
    own: dict[str, Any] = {
        "random_init": 0,
        "img_size": (32, 48),
        "model_args": {"patch_size": 8},
    }
    own |= {"slab": SLAB, "device": "cpu", "tokens": "pooled"}
    stores = [
        vitsee.extract("test_vit", photos, tmp_path / f"{name}.zarr", map=map, **own)
        for name, map in (("here", None), ("there", two))
    ]
    assert stores[1].complete
    assert array_bytes(tmp_path / "there.zarr") == array_bytes(tmp_path / "here.zarr")
    with pytest.raises(OptionError, match="no torch module"):
        vitsee.extract(
            torch.nn.Identity(), photos, tmp_path / "m.zarr", map=two, name="m"
        )
    with pytest.raises(OptionError, match="leave out shard"):
        vitsee.extract("test_vit", photos, tmp_path / "s.zarr", map=two, shard="0/2")
    assert not list(tmp_path.glob("[ms].zarr"))


def test_options_mean_the_same_elsewhere(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    model = ModelOptions("local-dir:m", checkpoint=Path("c.pth"))
    data, run = (
        DataOptions(photos.name, only=Path("l")),
        RunOptions(Path("s.zarr"), force=True),
    )
    work = by_absolute_paths(Request(model, data, KEEP, run))
    asked, placed = work.request, work.request.model
    assert (
        isinstance(placed, ModelOptions) and placed.checkpoint == photos.parent / "c.pth"
    )
    assert placed.name == f"local-dir:{photos.parent / 'm'}"
    assert asked.data.data == str(photos) and asked.data.only == photos.parent / "l"
    assert asked.run.output == photos.parent / "s.zarr"
    demo = by_absolute_paths(
        Request(ModelOptions("demo:vit"), DataOptions("demo:test"), KEEP, run)
    )
    assert (demo.request.model.name, demo.request.data.data) == ("demo:vit", "demo:test")


@pytest.mark.parametrize("more", [["--shard", "0/2"], ["--dry-run"], ["--plan", "slurm"]])
def test_options_that_exclude_it(photos: Path, tmp_path: Path, more: list[str]) -> None:
    result = extract(
        *VIT, "--data", photos, "-o", tmp_path / "a", "--dask", "local:2", *more
    )
    assert result.exit_code == 2 and "leave out" in result.stderr
    assert not (tmp_path / "a").exists()


def test_a_users_mistake_in_a_worker(two: DaskMap, photos: Path, tmp_path: Path) -> None:
    """An image that only a worker reads, with --on-error fail."""
    data = plant_images(tmp_path / "data", 80, damaged="class0/070.png")
    how = ["--slab", 8, "--device", "cpu", "--tokens", "pooled", "--order", "dataset"]
    how += ["--on-error", "fail", "--dask", two.client.scheduler.address]
    result = extract(*VIT, "--data", data, *how, "-o", tmp_path / "a.zarr")
    assert result.exit_code == 1
    assert "class0/070.png" in result.stderr.rstrip("\n").splitlines()[-1]


@pytest.mark.parametrize("lost", ["store", "images"])
def test_a_worker_without_the_files(photos: Path, tmp_path: Path, lost: str) -> None:
    out, data = tmp_path / "a.zarr", tmp_path / "data"
    if lost == "images":
        plain(out, photos)
    work = by_absolute_paths(
        Request(MODEL, DataOptions(str(data)), KEEP, RunOptions(out))
    )
    line = rf"^on the Dask worker at .*: .*{out if lost == 'store' else data}.* \(workers need"
    with pytest.raises(DaskError, match=line):
        work(Execution(), [0])


def test_claims_of_the_same_run_are_taken_over_at_once(tmp_path: Path) -> None:
    (tmp_path / "commits").mkdir()
    files = Folder(tmp_path, durable=False)
    lost, again, other = (
        Claims(files, about) for about in ({"run": "a"}, {"run": "a"}, {})
    )
    assert lost.take([0, 1], 2) == [0, 1]
    assert other.take([0, 1], 2) == []
    assert again.take([0, 1], 2) == [0, 1]
    assert Claims(files, {"run": "b"}).take([0, 1], 2) == []


@pytest.mark.parametrize(
    ("local", "said"), [(2, "committed; "), (0, "(workers finish what they ")]
)
def test_who_goes_on_when_the_driver_is_stopped(
    photos: Path, tmp_path: Path, local: int, said: str
) -> None:
    class Interrupting:
        def __init__(self) -> None:
            self.local = local

        def n_threads(self) -> int:
            return 1

        def __call__(self, function: Any, items: Any, /) -> Iterator[Any]:
            os.kill(os.getpid(), signal.SIGINT)
            yield from ()

    with pytest.raises(
        Interrupted, match=rf"by SIGINT with 0 of 6 slabs .*{re.escape(said)}"
    ):
        run_by_workers(tmp_path / "a.zarr", photos, Interrupting())


def test_ctrl_c(tmp_path: Path) -> None:
    """The driver ends with 75, its workers with it; the same command resumes."""
    out, photos = tmp_path / "a.zarr", plant_images(tmp_path / "data", 80)
    command = [sys.executable, "-m", "vitsee_cli", "extract", *VIT, "--data", str(photos)]
    command += ["--slab", "1", "--device", "cpu", "--dask", "local:1", "-o", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(out.glob("commits/c.*.0")) and process.poll() is None:
        time.sleep(0.05)
    children = subprocess.run(
        ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True
    ).stdout.split()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 75, said
    assert "stopped by SIGINT with" in said and "repeat the command to resume" in said
    assert "Traceback" not in said
    for pid in children:
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists():
                break
            time.sleep(0.1)
        assert not Path(f"/proc/{pid}").exists(), "a worker outlived its cluster"
    assert not open_partial(out).complete


def open_partial(path: Path) -> Store:
    return open_store(path, allow_partial=True)
