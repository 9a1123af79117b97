"""The fold: one accumulator a slab, merged in order, whoever does the work."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stores import attention_group, write_attention
from vitsee_core.runtime.progress import Silent
from vitsee_core.runtime.streaming import choose_rows, each_slab, fold
from vitsee_stores import Store
from vitsee_stores.errors import StoreMismatch, VitseeError

N = 22
VALUES = np.random.default_rng(0).normal(size=(N, 1, 2)).astype(np.float32)
KEY = "attention/distance_px"


def make_store(path: Path, values: Any = VALUES, **kwargs: Any) -> Store:
    given: dict[str, Any] = {"n_images": len(values), "slab": 4} | kwargs
    return write_attention(
        path, [attention_group(["blocks.0"], [2])], {KEY: values}, **given
    )


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    """Two worker processes; spawned, as a fork may hang beside other tests' threads."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


class Sum:
    """A float32 sum: the order of its additions shows in the last bits."""

    def __init__(self, log: bool = False) -> None:
        self.total = np.zeros(2, np.float32)
        self.rows: list[int] = []
        self.slabs: list[int] = []

    def update(self, slab: Any) -> None:
        assert not self.slabs, "an accumulator was given two slabs"
        self.slabs.append(slab.k)
        kept = slab.attention("distance_px")[slab.valid]
        self.rows += (np.arange(slab.rows.start, slab.rows.stop)[slab.valid]).tolist()
        for row in kept[:, 0]:
            self.total = self.total + row

    def merge(self, other: Sum) -> None:
        self.total = self.total + other.total
        self.rows += other.rows
        self.slabs += other.slabs

    def result(self) -> list[float]:
        return [float(v) for v in self.total]


class Products:
    """Sum over images of a product of two stores' values."""

    def __init__(self) -> None:
        self.total = 0.0
        self.rows: list[int] = []

    def update(self, a: Any, b: Any) -> None:
        assert a.rows == b.rows
        assert a.valid.tolist() == b.valid.tolist()
        x, y = (s.attention("distance_px")[s.valid].astype(float) for s in (a, b))
        self.total += float((x * y).sum())
        self.rows += (np.arange(a.rows.start, a.rows.stop)[a.valid]).tolist()

    def merge(self, other: Products) -> None:
        self.total += other.total
        self.rows += other.rows

    def result(self) -> float:
        return self.total


def test_every_slab_once_and_in_order(tmp_path: Path) -> None:
    done = fold(make_store(tmp_path / "a.zarr"), Sum)
    assert done.slabs == [0, 1, 2, 3, 4, 5]
    assert done.rows == list(range(N))


@pytest.mark.slow
def test_the_same_bits_whoever_does_the_work(
    tmp_path: Path, processes: ProcessPoolExecutor
) -> None:
    store = make_store(tmp_path / "a.zarr")
    expected = fold(store, Sum).result()
    assert expected != [float(v) for v in VALUES[::-1, 0].sum(0, dtype=np.float32)]
    assert fold(store, Sum, jobs=3).result() == expected
    assert fold(store, Sum, map=map).result() == expected
    with ThreadPoolExecutor(3) as threads:
        assert fold(store, Sum, map=threads.map).result() == expected
    assert fold(store, partial(Sum, log=True), map=processes.map).result() == expected


def test_a_pair_in_step(tmp_path: Path, processes: ProcessPoolExecutor) -> None:
    a = make_store(tmp_path / "a.zarr", valid=[i != 3 for i in range(N)])
    b = make_store(tmp_path / "b.zarr", 2 * VALUES, valid=[i != 9 for i in range(N)])
    done = fold((a, b), Products)
    kept = [i for i in range(N) if i not in (3, 9)]
    assert done.rows == kept
    x = VALUES[kept].astype(float)
    assert done.result() == pytest.approx(2 * (x * x).sum(), rel=1e-13)
    assert fold((a, b), Products, map=processes.map).result() == done.result()
    assert fold((a, b), Products, jobs=2).result() == done.result()


def test_stores_that_do_not_pair(tmp_path: Path) -> None:
    a = make_store(tmp_path / "a.zarr")
    other_images = make_store(tmp_path / "b.zarr", name="other")
    other_bytes = make_store(tmp_path / "c.zarr", hash_offset=1)
    for b in (other_images, other_bytes):
        with pytest.raises(StoreMismatch):
            fold((a, b), Products)


def test_a_pair_of_unfinished_stores_uses_what_both_have(
    tmp_path: Path, processes: ProcessPoolExecutor
) -> None:
    a = make_partial(tmp_path / "a.zarr", [0, 1, 2])
    b = make_partial(tmp_path / "b.zarr", [1, 2, 4])
    assert fold((a, b), Products).rows == list(range(4, 12))
    assert fold((a, b), Products, map=processes.map).rows == list(range(4, 12))


def make_partial(path: Path, slabs: list[int]) -> Store:
    groups = [attention_group(["blocks.0"], [2])]
    return write_attention(path, groups, {KEY: VALUES}, n_images=N, slabs=slabs)


@pytest.mark.slow
def test_a_pair_cut_into_other_slabs(tmp_path: Path) -> None:
    a = make_store(tmp_path / "a.zarr", slab=3)
    b = make_store(tmp_path / "b.zarr", 2 * VALUES, slab=8)
    same = fold((a, make_store(tmp_path / "c.zarr", 2 * VALUES, slab=3)), Products)
    for pair in ((a, b), (b, a)):
        done = fold(pair, Products)
        assert done.rows == same.rows == list(range(N))
        assert done.result() == pytest.approx(same.result(), rel=1e-13)


def test_slab_sums_are_read_from_their_own_slabs_only(tmp_path: Path) -> None:
    a = make_store(tmp_path / "a.zarr", slab=4)
    b = make_store(tmp_path / "b.zarr", slab=8)

    def shapes(*slabs: Any) -> list[tuple[int, ...]]:
        return [slab.attention_sums("aligned").shape for slab in slabs]

    assert list(each_slab(a, shapes, rows=choose_rows(a))) == [[(1, 2, 3, 5)]] * 6
    with pytest.raises(ValueError, match="part of a slab"):
        list(each_slab(a, shapes, rows=choose_rows(a, 6)))
    whole = choose_rows(a, 6, whole_slabs=True)
    assert list(each_slab(a, shapes, rows=whole)) == [[(1, 2, 3, 5)]] * 2
    with pytest.raises(
        StoreMismatch, match="a holds aligned as sums over slabs of 4 images"
    ):
        list(each_slab((a, b), shapes, rows=choose_rows(a)))


def test_a_store_replaced_meanwhile_is_noticed(
    tmp_path: Path, processes: ProcessPoolExecutor
) -> None:
    store = make_store(tmp_path / "a.zarr")
    shutil.rmtree(tmp_path / "a.zarr")
    make_store(tmp_path / "a.zarr")
    with pytest.raises(StoreMismatch, match="was replaced"):
        fold(store, Sum, map=processes.map)


def test_chosen_rows_and_their_slabs_only(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.zarr", valid=[i != 2 for i in range(N)])
    done = fold(store, Sum, rows=choose_rows(store, 6))
    assert done.rows == [0, 1, 3, 4, 5]
    assert done.slabs == [0, 1]


def test_choosing_rows(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.zarr", valid=[i != 2 for i in range(N)])
    everything = choose_rows(store)
    assert (everything.n, everything.n_invalid, everything.how) == (N, 1, "all")
    first = choose_rows(store, 6)
    assert np.flatnonzero(first.mask).tolist() == [0, 1, 2, 3, 4, 5]
    assert (first.n_invalid, first.remarks) == (1, ())
    whole = choose_rows(store, 6, whole_slabs=True)
    assert np.flatnonzero(whole.mask).tolist() == list(range(8))
    assert "rounded up to 2 whole slabs" in whole.remarks[0]
    assert choose_rows(store, 8, whole_slabs=True).remarks == ()
    assert choose_rows(store, N).remarks == ()
    more = choose_rows(store, N + 1)
    assert more.n == N
    assert more.remarks == (f"a holds {N} images: {N + 1} were asked for, all are used",)
    with pytest.raises(VitseeError, match="positive"):
        choose_rows(store, 0)


def test_choosing_rows_of_an_ordered_store(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.zarr", order="dataset")
    samples = [choose_rows(store, 6, seed) for seed in range(50)]
    assert {sample.n for sample in samples} == {6}
    assert np.array_equal(samples[3].mask, choose_rows(store, 6, 3).mask)
    # each row is in 6/22 of the samples: 13.6 of 50, sd 3.1
    counts = np.sum([sample.mask for sample in samples], axis=0)
    assert counts.min() > 0 and counts.max() < 30
    whole = choose_rows(store, 6, 1, whole_slabs=True)
    assert whole.n in (6, 8)
    assert all(
        whole.mask[i : i + 4].all() or not whole.mask[i : i + 4].any()
        for i in range(0, N, 4)
    )


def test_no_readable_image(tmp_path: Path) -> None:
    with pytest.raises(VitseeError, match="a holds no readable image"):
        fold(make_store(tmp_path / "a.zarr", valid=[0] * N), Sum)


def test_progress_counts_images(tmp_path: Path) -> None:
    counted: list[int] = []

    class Counting(Silent):
        def advance(self, count: int, size_bytes: int = 0) -> None:
            counted.append(count)

    store = make_store(tmp_path / "a.zarr")
    fold(store, Sum, rows=choose_rows(store, 10), jobs=2, progress=Counting())
    assert counted == [4, 4, 2]


@pytest.mark.slow
def test_errors_come_through_and_stop_the_work(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.zarr", slab=1)
    started: list[int] = []

    def work(slab: Any) -> int:
        started.append(slab.k)
        if slab.k == 2:
            raise RuntimeError("broken")
        return int(slab.k)

    with pytest.raises(RuntimeError, match="broken"):
        list(each_slab(store, work, rows=choose_rows(store), jobs=2))
    assert len(started) < N


def test_results_do_not_pile_up(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.zarr", slab=1)
    lock = threading.Lock()
    ahead: list[int] = []
    finished = 0

    def work(slab: Any) -> int:
        nonlocal finished
        with lock:
            finished += 1
        return int(slab.k)

    for taken, k in enumerate(each_slab(store, work, rows=choose_rows(store), jobs=2)):
        assert k == taken
        with lock:
            ahead.append(finished - taken)
    assert max(ahead) <= 2 * 2 + 1


def test_memory_limits_the_threads(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.zarr", slab=1)
    names: set[str] = set()

    class Named(Sum):
        def update(self, slab: Any) -> None:
            names.add(threading.current_thread().name)
            super().update(slab)

    fold(store, Named, jobs=4, memory=100, slab_bytes=90)
    assert names == {threading.current_thread().name}


def test_a_map_of_the_callers_own(tmp_path: Path) -> None:
    seen: list[Any] = []

    def cluster(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        items = list(items)
        seen.extend(items)
        # last first, as a cluster may; handed back in order
        return iter([function(item) for item in reversed(items)][::-1])

    store = make_store(tmp_path / "a.zarr")
    assert fold(store, Sum, map=cluster).result() == fold(store, Sum).result()
    assert len(seen) == 6
