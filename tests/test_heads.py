"""The heads that a store knows: their places in the model, and uniform attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stores import attention_group, write_attention
from vitsee_core.attention.head_maps import per_query, query_coverage, uniform_map
from vitsee_core.attention.heads import attention_blocks, uniform_distance
from vitsee_stores import Store, TokenLayout
from vitsee_stores.errors import MissingInput, SiteError

BLOCKS = ("blocks.0", "blocks.1")


def make_store(path: Path, **kwargs: Any) -> Store:
    given: dict[str, Any] = {"n_images": 3, "model_blocks": BLOCKS} | kwargs
    return write_attention(path, [attention_group(BLOCKS, (3, 2))], {}, **given)


@pytest.mark.parametrize(
    ("model_blocks", "places"),
    [
        (BLOCKS, [(0, 0.0), (1, 1.0)]),
        (None, [(0, 0.0), (1, 1.0)]),  # they need no block outputs
        (("conv", "blocks.0", "pool", "blocks.1", "end"), [(1, 0.25), (3, 0.75)]),
    ],
)
def test_places_in_the_model(tmp_path: Path, model_blocks: Any, places: Any) -> None:
    found = attention_blocks(make_store(tmp_path / "a.zarr", model_blocks=model_blocks))
    assert [(b.depth, b.rel_depth) for b in found] == places
    assert [(b.site, b.row, b.n_heads) for b in found] == [
        ("blocks.0", 0, 3),
        ("blocks.1", 1, 2),
    ]


def test_patterns_choose_blocks(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.zarr")

    def sites(*patterns: str) -> list[str]:
        return [block.site for block in attention_blocks(store, patterns)]

    assert sites("blocks.-1") == ["blocks.1"]
    assert sites("blocks.1", "blocks.0") == list(BLOCKS)
    assert sites("blocks.?") == list(BLOCKS)
    with pytest.raises(
        SiteError, match=r"no site matches 'blocks\.7'.*blocks\.0, blocks\.1"
    ):
        sites("blocks.7")


def test_no_attention(tmp_path: Path) -> None:
    plain = write_attention(tmp_path / "plain.zarr", [], {}, n_images=3)
    with pytest.raises(MissingInput, match="it was extracted with --attention none"):
        attention_blocks(plain)


def layout(grid: tuple[int, int], stride: tuple[float, float]) -> TokenLayout:
    return TokenLayout((), grid, stride_px=stride)


@pytest.mark.parametrize(
    ("cells", "stride", "expected"),
    # definitions of the papers' models, checked numerically elsewhere, to a tenth of a pixel
    [(7, 32, 115.5), (14, 16, 116.5), (16, 14, 116.6), (28, 8, 116.7)],
)
def test_uniform_attention_in_pixels(cells: int, stride: float, expected: float) -> None:
    found = uniform_distance(layout((cells, cells), (stride, stride)))
    assert found == pytest.approx(expected, abs=0.05)


@given(st.integers(1, 5), st.integers(1, 5), st.floats(0.5, 40), st.floats(0.5, 40))
def test_uniform_attention_is_the_mean_over_all_pairs(
    rows: int, cols: int, step_y: float, step_x: float
) -> None:
    cells = [(y * step_y, x * step_x) for y in range(rows) for x in range(cols)]
    mean = math.fsum(math.dist(p, q) for p in cells for q in cells) / len(cells) ** 2
    assert uniform_distance(layout((rows, cols), (step_y, step_x))) == pytest.approx(
        mean, rel=1e-13
    )


def test_uniform_attention_within_windows_by_hand() -> None:
    """Two windows of 2 x 2 cells: four pairs at 0, eight at 1, four on the diagonal."""
    by_hand = (8 + 4 * math.sqrt(2)) / 16
    assert uniform_distance(layout((2, 4), (1, 1)), (2, 2)) == pytest.approx(by_hand)
    assert uniform_distance(layout((2, 4), (3, 3)), (2, 2)) == pytest.approx(3 * by_hand)
    coverage = query_coverage((2, 4), (2, 2))
    assert coverage.tolist() == [
        [0, 0, 0.25, 0.5, 0.25, 0, 0],
        [0, 0, 0.5, 1, 0.5, 0, 0],
        [0, 0, 0.25, 0.5, 0.25, 0, 0],
    ]
    assert uniform_map((2, 4), (2, 2)) == pytest.approx(coverage / 4)
    each = per_query(uniform_map((2, 4), (2, 2)), (2, 2))
    assert (
        each[:, 2:5] == pytest.approx(np.full((3, 3), 0.25))
        and np.isnan(each[:, :2]).all()
    )


@given(*[st.integers(1, 6)] * 4)
def test_uniform_attention_within_windows_by_loops(
    rows: int, cols: int, a: int, b: int
) -> None:
    window = min(a, rows), min(b, cols)
    cells = [(y, x) for y in range(rows) for x in range(cols)]
    total, aligned = 0.0, np.zeros((2 * rows - 1, 2 * cols - 1))
    for y, x in cells:
        own = y // window[0], x // window[1]
        keys = [(i, j) for i, j in cells if (i // window[0], j // window[1]) == own]
        for i, j in keys:
            total += math.dist((y, x), (i, j)) / len(keys)
            aligned[rows - 1 + i - y, cols - 1 + j - x] += 1 / len(keys) / len(cells)
    found = uniform_distance(layout((rows, cols), (1, 1)), window)
    assert found == pytest.approx(total / len(cells), rel=1e-12)
    assert uniform_map((rows, cols), window) == pytest.approx(aligned, rel=1e-12)
