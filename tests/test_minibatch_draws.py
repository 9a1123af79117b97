"""Batches of many images: random, without replacement, and read from few slabs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.stores import VIT, write_model
from vitsee_core.similarity import (
    Estimator,
    GramOptions,
    Representation,
    estimators,
    hsic,
    products,
)
from vitsee_core.similarity.estimators import draw_batches
from vitsee_stores.folder import Folder


def test_each_repeat_draws_every_image_once() -> None:
    drawn = draw_batches(20_000, 1024, 19_456, 3, 0, shuffled=True)
    assert [len(cells) for cells in drawn] == [19] * 3
    for cells in drawn:
        assert all(
            len(places) == 1024 and (np.diff(places) > 0).all() for places in cells
        )
        places = np.concatenate(cells)
        assert len(np.unique(places)) == 19_456
        assert places.min() >= 0 and places.max() < 20_000
    assert not np.array_equal(drawn[0][0], drawn[1][0])


@pytest.mark.parametrize(("n", "shuffled"), [(16_384, True), (20_000, False)])
def test_few_images_and_those_in_order_are_drawn_one_by_one(
    n: int, shuffled: bool
) -> None:
    (cells,) = draw_batches(n, 1024, 2048, 1, 7, shuffled)
    order = np.random.default_rng(7).permutation(n)
    np.testing.assert_array_equal(
        cells, [np.sort(order[:1024]), np.sort(order[1024:2048])]
    )


def test_batches_of_a_window_lie_in_its_slabs() -> None:
    (cells,) = draw_batches(200_000, 1024, 199_680, 1, 0, shuffled=True)
    window = np.concatenate(cells[:16])
    # 16 runs of 1024 images, that is 64 slabs of 256; drawn one by one, nearly all 782.
    assert len(np.unique(window // 256)) == 64
    assert (
        len(np.unique(cells[0] // 1024)) == 16
    )  # and one batch has images of all of them


def test_every_image_is_as_likely_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("MANY", 8), ("RUN", 2), ("WINDOW", 6)):
        monkeypatch.setattr(estimators, name, size)
    draws, n, batch = 4000, 13, 3
    counts = np.zeros((3, n))
    for seed in range(draws):
        (cells,) = draw_batches(n, batch, 9, 1, seed, shuffled=True)
        for g, places in enumerate(cells):
            counts[g, places] += 1
    chance = batch / n
    # 5 standard errors; the last run, of one image, comes as often as an image of the others
    assert (
        np.abs(counts / draws - chance).max()
        < 5 * np.sqrt(chance * (1 - chance) / draws) + 0.02
    )


@pytest.mark.parametrize("n", [64, 128])
def test_reading_grows_with_the_images(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("MANY", 8), ("RUN", 4), ("WINDOW", 16)):
        monkeypatch.setattr(estimators, name, size)
    # two batches' Gram matrices fit the memory
    plan = products.StripPlan.within_memory
    monkeypatch.setattr(
        products.StripPlan,
        "within_memory",
        lambda **a: products.StripPlan(2, plan(**a).columns, 1),
    )
    names: Counter[str] = Counter()
    read = Folder.read_chunk

    def count(self: Folder, name: str, check: Callable[[int], None]) -> memoryview[int]:
        names[name] += 1
        return read(self, name, check)

    x = np.random.default_rng(0).standard_normal((n, VIT.n_tokens, 2))
    store = write_model(tmp_path / "a.zarr", {"blocks.0.out": x}, slab=4)
    monkeypatch.setattr(Folder, "read_chunk", count)
    h = hsic(
        [Representation(store, store.site("blocks.0.out"), "patches")],
        estimator=Estimator("minibatch", 8, n, 1),
        options=GramOptions(use_cache=False),
    )
    assert h.n_images == n
    of_grid = {name: times for name, times in names.items() if "/grid/" in name}
    # Each slab once; drawn one by one every group of two batches has images in most of them.
    # The first one is read once more, for the features' order of magnitude.
    first = of_grid.pop("acts/blocks.0.out/grid/c.0.0.0.0")
    assert first == 2
    assert len(of_grid) == n // 4 - 1 and set(of_grid.values()) == {1}
