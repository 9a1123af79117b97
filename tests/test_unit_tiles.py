"""Tiles of Gram matrices on the matrix unit: runs of pairs, and their sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.test_halves import UNITS
from vitsee_core.grams import amx_parts
from vitsee_core.grams.halves import InPanels
from vitsee_core.similarity import pair_sums, pieces, unit_tiles
from vitsee_core.similarity.exact import leave_one_out
from vitsee_core.similarity.hsic import centred_alignment
from vitsee_core.similarity.pair_runs import take_runs
from vitsee_core.similarity.patch_pixels import cut_patches
from vitsee_core.similarity.pieces import Partition

Array = NDArray[Any]
BEHIND = 32


@dataclass
class Made:
    """A Gram matrix that lies in memory, as the unit makes its blocks."""

    gram: Array

    @property
    def n(self) -> int:
        return len(self.gram)

    def product(self, i: slice, j: slice, memory: Array) -> Array:
        return blocks_of(self.gram[i, j], memory)

    def block(self, i: slice, j: slice) -> Array:
        return self.gram[i, j].copy()


def blocks_of(x: Array, memory: Array) -> Array:
    n, m = (-(-k // 32) for k in x.shape)
    padded = np.full((n * 32, m * 32), np.nan, np.float32)  # nothing there may count
    padded[: x.shape[0], : x.shape[1]] = x
    found = memory[: n * m * 1024].reshape(m, n, 32, 32)
    found[...] = padded.reshape(n, 32, m, 32).transpose(2, 0, 1, 3)
    return found


def symmetric(n: int, seed: int) -> Array:
    x = np.random.default_rng(seed).normal(size=(n, 9))
    return (x @ x.T).astype(np.float32)


def to_parts(x: Array) -> Array:
    """To 8 bits and 8 of what is left."""
    left, found = x.astype(np.float64), np.zeros(x.shape)
    for _ in range(2):
        fraction, exponent = np.frexp(left)
        part = np.ldexp(np.round(fraction * 256) / 256, exponent)
        found, left = found + part, left - part
    return found


def test_runs_by_hand() -> None:
    # the parts of 1 + 2^-8 + 2^-20 are 1 (half to even) and 2^-8
    x = np.array([[9, 9, 9], [2, 9, 9], [1 + 2**-8 + 2**-20, -5, 9]], np.float32)
    blocks = blocks_of(x, np.empty(1024 + BEHIND, np.float32))
    cuts = np.array([[0, 3, 0, 3, 1, 0, 0, 0], [1, 2, 1, 3, 0, 32, 3, 3]])
    pairs, squares = np.full(96, np.nan, np.float32), np.empty(2)
    over_cols, over_rows = (np.full(n + BEHIND, np.nan, np.float32) for n in (4, 5))
    take_runs(blocks, cuts, pairs, over_cols, over_rows, squares)
    assert pairs[:32].tolist() == [2, 1 + 2**-8, -5] + [0] * 29  # below the diagonal, row by row
    assert pairs[32:64].tolist() == [9, 9] + [0] * 30
    assert over_cols[:4].tolist() == [0, 2, -4 + 2**-8, 18]
    assert over_rows[:5].tolist() == [3 + 2**-8, -5, 0, 9, 9]
    assert squares.tolist() == [30 + 2**-7 + 2**-16, 162]


@pytest.mark.parametrize("square", [True, False])
def test_runs_hold_every_pair(square: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "TERMS", 700)
    n, m = 150, 150 if square else 97
    x = np.random.default_rng(0).normal(size=(n, m)).astype(np.float32)
    labels = np.arange(n + m) * 5 // (n + m)
    i, j = (slice(0, n), slice(0, n)) if square else (slice(0, n), slice(n, n + m))
    cut = list(pieces.pieces(Partition(labels, 5, crossing=True), i, j))
    cuts, ends = unit_tiles._cuts(cut)
    n_pairs, n_rows, n_cols = ends[-1]
    blocks = blocks_of(x, np.empty(5 * 5 * 1024 + BEHIND, np.float32))
    pairs, squares = np.full(n_pairs + BEHIND, np.nan, np.float32), np.empty(len(cut))
    over_cols, over_rows = (np.full(k + BEHIND, np.nan, np.float32) for k in (n_rows, n_cols))
    take_runs(blocks, cuts, pairs, over_cols, over_rows, squares)
    counted, parts = np.zeros((n, m), bool), to_parts(x)
    for piece, own, (first, row, col), (end, *_) in zip(
        cut, squares, ends[:-1], ends[1:], strict=True
    ):
        inside = np.zeros((n, m), bool)
        inside[np.ix_(piece.rows, piece.cols)] = True
        if square:
            inside &= np.tri(n, k=-1, dtype=bool)
        assert not (counted & inside).any()
        counted |= inside
        values = np.where(inside, parts, 0)
        found = pairs[first:end].astype(np.float64)
        assert np.array_equal(np.sort(found[found != 0]), np.sort(parts[inside]))
        assert own == pytest.approx((values**2).sum(), rel=1e-5)
        sums = over_cols[row : row + len(piece.rows)], over_rows[col : col + len(piece.cols)]
        assert sums[0] == pytest.approx(values.sum(1)[piece.rows], abs=1e-5)
        assert sums[1] == pytest.approx(values.sum(0)[piece.cols], abs=1e-5)
    assert np.array_equal(counted, np.tri(n, k=-1, dtype=bool) if square else np.ones((n, m)))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("n", "tile"), [(90, 100), (131, 50), (30, 8)])
@pytest.mark.parametrize("crossing", [True, False])
def test_totals(
    unit: Any, n: int, tile: int, crossing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of tiles that lie whole in memory, and as of float64."""
    monkeypatch.setattr(pieces, "TERMS", 300)
    monkeypatch.setattr(unit_tiles, "AT_ONCE", 96)
    monkeypatch.setattr(pair_sums, "FEW", 0)
    grams = [symmetric(n, k) for k in range(5)]
    matrices: Sequence[Any] = [Made(gram) for gram in grams]
    rows, cols = matrices[:3], matrices[2:]  # one is in both
    partition = Partition(np.arange(n) * 7 // n, 7, crossing)
    how: dict[str, Any] = {"device": "cpu", "tile": tile}
    (plain,), diagonals = pair_sums.pair_totals(rows, cols, [partition], **how)
    backend = InPanels(unit, 2)
    (found,), same = pair_sums.pair_totals(rows, cols, [partition], **how, unit=backend)
    assert all(np.array_equal(a, b) for a, b in zip(diagonals, same, strict=True))
    names = ("products", "own_rows", "own_cols", "rows", "cols")
    pairs = [(getattr(found, name), getattr(plain, name)) for name in names]
    for a, b in (*pairs, *zip(found.touching, plain.touching, strict=True)):
        assert a == pytest.approx(b, rel=2e-6, abs=2e-6 * n**2)
    exact = np.array([to_parts(gram) * (1 - np.eye(n)) for gram in grams])
    if not crossing:
        exact *= partition.labels[:, None] == partition.labels
    want = np.einsum("aij,bij->ab", exact[:3], exact[2:])
    assert found.products == pytest.approx(want, rel=1e-6, abs=1e-6 * want.max())
    assert found.rows.sum(2) == pytest.approx(exact[:3].sum(2), abs=1e-4)
    assert found.products[2, 0] == pytest.approx(found.own_rows[2], rel=1e-6)


@pytest.mark.parametrize("unit", UNITS)
def test_equal_matrices_have_a_cka_of_one(unit: Any) -> None:
    """Also where their entries are few numbers, all of which are rounded to one side."""
    labels = np.arange(60) % 3 == 0
    gram = np.where(labels[:, None] == labels, 1.0029984, 1 / 3).astype(np.float32)
    assert (to_parts(gram) < gram * (1 - 3e-6)).all()
    partition = Partition(np.arange(60) * 4 // 60, 4, crossing=True)
    found = leave_one_out(
        [Made(gram)],  # type: ignore[list-item]
        [Made(gram), Made(symmetric(60, 1))],  # type: ignore[list-item]
        tile=64,
        partition=partition,
        biased=False,
        device="cpu",
        unit=InPanels(unit, 2),
    )
    for h in found:
        assert centred_alignment(h.cross, h.rows, h.cols)[0, 0] == pytest.approx(1, abs=2e-6)


def test_memory_that_is_planned() -> None:
    """Not less than what the arrays of a tile take, and not far above."""
    for n, tile in ((1024, 1024), (3000, 1000), (40, 16)):
        partition = Partition(np.arange(n) * 20 // n, 20, crossing=True)
        planned, _ = unit_tiles.unit_bytes(n, [partition], tile, 10)
        most = 0
        for i, j in pair_sums._tiles(n, tile):
            _, ends = unit_tiles._cuts(list(pieces.pieces(partition, i, j)))
            n_pairs, rows, cols = ends[-1].tolist()
            wide = unit_tiles.UnitTiles(InPanels(amx_parts, 2), [], 0)._shaped(1, n_pairs + 32)
            most = max(most, 4 * (wide.strides[0] // 4 + rows + cols + 2 * 32))
        assert most <= planned <= 1.2 * most + 80_000


def test_patches_from_parts_of_the_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3, 38, 38), dtype=np.uint8)
    bounds = [(0, 17), (17, 34), (34, 38)]
    edges = np.array([(y, x) for y in bounds for x in bounds])
    found = np.zeros((9, 20, 3, 17, 17), np.uint8)
    for images in (slice(0, 9), slice(9, 20)):
        for channels in (slice(0, 1), slice(1, 3)):
            for rows in (slice(0, 5), slice(5, 38)):
                for cols in (slice(0, 30), slice(30, 38)):
                    part = pixels[images, channels, rows, cols]
                    begin = np.array([x.start for x in (images, channels, rows, cols)])
                    cut_patches(np.ascontiguousarray(part), begin, edges, found)
    for ((top, bottom), (left, right)), patch in zip(edges, found, strict=True):
        want = np.zeros((20, 3, 17, 17), np.uint8)
        want[:, :, : bottom - top, : right - left] = pixels[:, :, top:bottom, left:right]
        assert np.array_equal(patch, want)
