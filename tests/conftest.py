"""Fixtures that several test files share."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.every_command import TABLES, vitsee, write_everything
from tests.processes import Server, server
from tests.recipes import make_first_look
from vitsee_cli import console
from vitsee_core.runtime import progress, registry
from vitsee_stores import StoreWriter
from vitsee_stores.layout import AttentionGroup, SiteSpec, StorePlan, TokenLayout, arrays
from vitsee_stores.manifest import new_manifest
from vitsee_stores.samples import Samples

# Workers of one test run share the cores; set before the first import of torch or numpy's BLAS
# by a test file, and inherited by the processes that tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Guests that happen to be installed beside vitsee are hidden from this process: tests are about
# vitsee's own analyses, and about the guests that they install themselves. Already while tests are
# collected, as some are parametrised by all analyses. Processes that tests start see them.
INSTALLED_GUESTS = {(entry.name, entry.value) for entry in registry._entry_points()}
_all_entry_points = registry._entry_points


def _entry_points_of_tests() -> list[EntryPoint]:
    """Return the entry points of guests, without those that are installed."""
    entries = _all_entry_points()
    return [e for e in entries if (e.name, e.value) not in INSTALLED_GUESTS]


registry._entry_points = _entry_points_of_tests
registry._guests_and_refusals.cache_clear()

MEMORY = Path("/dev/shm")  # where Linux has a file system in memory

N_IMAGES, SLAB = 10, 4  # the last of three slabs is not full
LAYOUT = TokenLayout(prefix=("cls",), grid=(2, 3), stride_px=(16.0, 16.0))


def pytest_configure(config: pytest.Config) -> None:
    """The fast tests' many thousand small files are in memory, where there is plenty: making and
    removing them on a disk took a tenth of the time. The slow tests have the disk."""
    fast = config.getoption("markexpr") == "not slow"
    if fast and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    gc.disable()  # until all tests are imported


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage looks through a million objects again."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        two_workers = "two" in getattr(
            item, "fixturenames", ()
        )  # processes that start slowly
        if two_workers or item.get_closest_marker("fault"):
            item.add_marker("slow")


@pytest.fixture(autouse=True, scope="session")
def disk_without_waiting() -> Iterator[None]:
    """No test cuts the power, and waiting for the disk was half of the suite's time. Which fsyncs
    are asked for, and when, is tested in test_store_writer.py; processes that tests start wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and processes inherit
    that: a test that interrupts one would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def nothing_said_of_slow_starts() -> Iterator[None]:
    """What a command says on stderr does not depend on the machine's load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "SILENT_SECONDS", 3600.0)
        yield


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Every command sets up logging for its process; tests that read records (caplog) follow."""
    loggers = [logging.getLogger(name) for name in console.PACKAGES]
    before = [
        (logger.level, list(logger.handlers), logger.propagate) for logger in loggers
    ]
    yield
    for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
        logger.level, logger.handlers, logger.propagate = level, handlers, propagate


def tiny_site(name: str, depth: int, *, kind: str = "tokens", **more: Any) -> SiteSpec:
    """A site of the tiny model: 7 tokens (CLS and a 2 x 3 grid) of 4 channels, or a vector."""
    block, _, part = name.rpartition(".")
    tokens = kind == "tokens"
    return SiteSpec(
        name=name,
        part=part,
        block=block or None,
        groups=("blocks", "all") if tokens else ("head", "all"),
        kind=kind,
        dim=4,
        shape=(LAYOUT.n_tokens, 4) if tokens else (4,),
        layout=LAYOUT if tokens else None,
        depth=depth,
        rel_depth=depth / 2,
        **more,
    )


def tiny_plan() -> StorePlan:
    """Two blocks of two heads, their attention and one residual sublayer."""
    return StorePlan(
        n_images=N_IMAGES,
        slab=SLAB,
        codec="none",
        sites=(
            tiny_site("embed", 0),
            tiny_site("blocks.0.out", 1),
            tiny_site("blocks.1.in", 1, alias_of="blocks.0.out"),
            tiny_site("blocks.1.out", 2),
            tiny_site("pooled", 2, kind="vector", dtype="float32"),
        ),
        attention=(AttentionGroup("", ("blocks.0", "blocks.1"), (2, 2), LAYOUT),),
        attention_level="summary",
        rollout=True,
        sublayers=(("blocks.0.attn", LAYOUT),),
        places=(("blocks.0", 0, 0.0), ("blocks.1", 1, 1.0), ("blocks.0.attn", 0, 0.0)),
        inputs=None,
    )


def slab_arrays(plan: StorePlan, k: int) -> dict[str, NDArray[Any]]:
    """Random rows of slab `k` for every array that is written by slabs; all images valid."""
    rng = np.random.default_rng(k)
    n_rows = plan.rows(k).stop - plan.rows(k).start
    rows = {}
    for path, spec in arrays(plan).items():
        if spec.per in ("once", "commit"):
            continue
        shape = (n_rows, *spec.shape[1:]) if spec.per == "image" else spec.shape[1:]
        rows[path] = rng.random(shape).astype(spec.dtype)
    rows["valid"] = np.ones(n_rows, np.uint8)
    rows["hash"] = np.arange(n_rows, dtype=np.uint64) + k * plan.slab
    rows["n_valid"] = np.array(n_rows, np.int64)
    return rows


def write_tiny_store(path: Path, slabs: Iterable[int]) -> None:
    """A tiny store with these slabs committed."""
    plan = tiny_plan()
    index = np.arange(N_IMAGES, dtype=np.int64)
    samples = Samples(
        index=index,
        ids=[f"c{i % 2}/{i}.png" for i in index],
        labels=index % 2,
        splits=["test"] * N_IMAGES,
    )
    manifest = new_manifest(
        {"model": {"name": "tiny"}, "seed": 0},
        plan,
        samples,
        model={"name": "tiny"},
        class_names=["even", "odd"],
    )
    writer = StoreWriter.create_or_join(path, manifest, samples, durable=False)
    for k in slabs:
        writer.write_slab(k, slab_arrays(plan, k), {"command": "vitsee extract tiny"})
    writer.finish()


@pytest.fixture(scope="session")
def tiny_stores(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[tuple[int, ...]], Path]:
    """Tiny stores, each written once and then copied."""
    folder = tmp_path_factory.mktemp("tiny")

    @functools.cache
    def written(slabs: tuple[int, ...]) -> Path:
        path = folder / f"{'-'.join(map(str, slabs)) or 'none'}.zarr"
        write_tiny_store(path, slabs)
        return path

    return written


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts commands as processes."""
    with server(tmp_path_factory.mktemp("processes")) as made:
        yield made


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `every_command.write_everything`, to read from."""
    folder = tmp_path_factory.mktemp("everything")
    write_everything(folder)
    return folder


@pytest.fixture(scope="session")
def tables_of(
    everything: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[Path]]:
    """`tables_of("cka")`: the tables of a command's runs in `TABLES`, each made once."""
    folder = tmp_path_factory.mktemp("tables")

    @functools.cache
    def made(command: str) -> list[Path]:
        paths = [folder / f"{command}-{i}.csv" for i in range(len(TABLES[command]))]
        with contextlib.chdir(everything):  # so that sidecars name inputs as a user would
            for path, words in zip(paths, TABLES[command], strict=True):
                vitsee(command, *words, "-o", path)
        return paths

    return made


@pytest.fixture
def make_store(
    tmp_path: Path, tiny_stores: Callable[[tuple[int, ...]], Path]
) -> Callable[..., Path]:
    """`make_store("a.zarr", slabs=[0, 1])`: a tiny store with these slabs committed (all)."""

    def make(name: str = "tiny.zarr", slabs: Iterable[int] | None = None) -> Path:
        chosen = range(tiny_plan().n_slabs) if slabs is None else slabs
        shutil.copytree(tiny_stores(tuple(chosen)), tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture(scope="session")
def first_look(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what README's own blocks leave."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    return make_first_look(base)
