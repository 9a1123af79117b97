"""The heads that a store knows: their places in the model, and uniform attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stores import attention_group, write_attention
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
    assert [(b.site, b.row, b.n_heads) for b in found] == [("blocks.0", 0, 3), ("blocks.1", 1, 2)]


def test_patterns_choose_blocks(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.zarr")

    def sites(*patterns: str) -> list[str]:
        return [block.site for block in attention_blocks(store, patterns)]

    assert sites("blocks.-1") == ["blocks.1"]
    assert sites("blocks.1", "blocks.0") == list(BLOCKS)
    assert sites("blocks.?") == list(BLOCKS)
    with pytest.raises(SiteError, match=r"no site matches 'blocks\.7'.*blocks\.0, blocks\.1"):
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
