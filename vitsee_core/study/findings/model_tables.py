"""The tables behind findings, each computed on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses import (
    attn_dist,
    cka,
    cka_heads,
    erf,
    head_types,
    knn,
    localize,
    normratio,
    probe,
)
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.similarity.hsic_sums import PairSums, centred_alignment
from vitsee_core.similarity.stacks import input_pixels
from vitsee_core.statistics.jackknife import Blocks, means_without
from vitsee_core.study.findings.estimates import Estimate, mean
from vitsee_core.tables.columns import REPLICATES, build_column
from vitsee_core.tables.results import Table
from vitsee_core.types import Float, Mask, pl
from vitsee_stores import SiteSpec, Store
from vitsee_stores.errors import MissingInput

SITES = ("blocks", "norms", "hidden")
MOST_PLACED = 1000


class ModelTables:
    """Tables of models, under the names that findings use for them."""

    def __init__(
        self,
        stores: Mapping[str, Store],
        training: Mapping[str, Store],
        execution: Execution = DEFAULT,
    ) -> None:
        """stores: of each model; training: of the same models, over training images."""
        self._stores = stores
        self._training = training
        self._execution = execution
        self._kept: dict[tuple[str, ...], Table] = {}

    def store(self, model: str) -> Store:
        """All layers, over the images."""
        return self._stores[model]

    def train(self, model: str) -> Store:
        """Block outputs of the training images. Raises MissingInput: there is no such store."""
        if model not in self._training:
            label = self.store(model).label
            raise MissingInput(f"there is no store {label}-train of images to learn from")
        return self._training[model]

    def fields(self, model: str) -> Store:
        """Receptive fields; slabs are the blocks of images of their intervals."""
        return self.store(model)

    def keypoints(self, model: str) -> Table:
        """PCK at 0.1 of every block. Raises MissingInput: there are no keypoints for these
        stores."""
        raise MissingInput(
            f"{self.store(model).label}: it takes keypoints: vitsee keypoints"
        )

    def replaced(self, model: str, values: str) -> Table:
        """`effect` on the outputs of the class token being replaced halfway, by "zero", "mean" or
        "shuffle". Raises MissingInput: these stores are of whole models."""
        raise MissingInput(
            f"{self.store(model).label}: it takes stores with the class token replaced: vitsee "
            "study registers"
        )

    def importance(self, model: str) -> Table:
        """The table of every head's importance. Raises MissingInput: these stores do not say it."""
        raise MissingInput(
            f"{self.store(model).label}: it takes a pass for each head: vitsee head-importance"
        )

    def _keep(self, key: tuple[str, ...], make: Callable[[], Table]) -> Table:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def cka(self, a: str, b: str | None = None, pairs: str = "all") -> Table:
        """CKA of all layers (of blocks alone: same-depth) of one model, or of two."""
        return self._keep(("cka", a, b or "", pairs), lambda: self._cka(a, b, pairs))

    def _cka(self, a: str, b: str | None, pairs: str) -> Table:
        stores = [self.store(a)] if b is None else [self.store(a), self.store(b)]
        if pairs != "all":
            return cka.run(
                *stores, sites=("blocks",), pairs=pairs, execution=self._execution
            )
        both = {"sites_a": layers(self.store(a)), "sites_b": layers(self.store(b or a))}
        if b is None:
            return cka.run(
                *stores, sites=layers(self.store(a)), execution=self._execution
            )
        return cka.run(*stores, **both, execution=self._execution)

    def last_cls(self, a: str, b: str) -> Estimate:
        """CKA of the class tokens of the last blocks of two models."""
        found = cka.run(
            self.store(a),
            self.store(b),
            sites=("blocks.-1.out",),
            tokens="cls",
            execution=self._execution,
        )
        return mean(found, pl.col("value").is_not_null())

    def heads(self, model: str) -> Table:
        """Scores of every head."""
        return self._keep(
            ("heads", model),
            lambda: head_types.run(self.store(model), execution=self._execution),
        )

    def cnn_like(self, model: str, cnn: str) -> Table:
        """Groups of heads of the first block against the lower layers of a CNN."""
        return cka_heads.run(
            self.store(model), self.store(cnn), execution=self._execution
        )

    def distances(self, model: str) -> Table:
        """Mean attention distance of every head over that of uniform attention, with replicates."""
        return self._keep(("distances", model), lambda: self._distances(model))

    def _distances(self, model: str) -> Table:
        store = self.store(model)
        how = self._execution
        found = attn_dist.run(store, metrics="distance_relative", execution=how)
        used = how.rows(store).mask & store.valid
        distance = np.asarray(store.attention("distance_px")[:], np.float64)[used]
        blocks = Blocks.of(store, used, how.seed)
        sums = blocks.sums(distance)
        counts = blocks.sums(np.ones(len(distance)))
        of_heads = distance.mean(0).reshape(-1)
        without = means_without(sums, counts).reshape(len(of_heads), -1)
        scale = found["value"] / of_heads
        each = build_column(REPLICATES, without * scale[:, None])
        return found.with_frame(found.frame.with_columns(each))

    def ratios(self, model: str, tokens: str) -> Table:
        """Geometric mean norm ratios of a kind of token, every sublayer."""
        return normratio.run(
            self.store(model),
            metrics="norm_ratio_geomean",
            tokens=tokens,
            execution=self._execution,
        )

    def localised(self, model: str, site: str) -> Table:
        """CKA of every token of a site with every patch of the input."""
        return localize.run(self.store(model), sites=site, execution=self._execution)

    def equal_places(self, model: str, cnn: str) -> Estimate:
        """`own_contrast` of the last block of a model less that of a CNN's last block with several
        locations, both at the CNN's locations: the mean of the model's tokens in each. Of at most
        `MOST_PLACED` images; memory: places x images^2 numbers. Raises MissingInput: no pixels, or
        a grid that is not several of the CNN's tokens each way."""
        coarse = [
            site
            for site in self.store(cnn).select(["blocks"])
            if site.layout is not None and (site.layout.grid or (1, 1)) != (1, 1)
        ]
        if not coarse or coarse[-1].layout is None or coarse[-1].layout.grid is None:
            raise MissingInput(
                f"{self.store(cnn).label} has no block with several locations"
            )
        grid = coarse[-1].layout.grid
        fine = self.store(model).select(["blocks"])[-1]
        found = [self._places(model, fine, grid), self._places(cnn, coarse[-1], grid)]
        return found[0] - found[1]

    def _places(self, model: str, site: SiteSpec, grid: tuple[int, int]) -> Estimate:
        store = self.store(model)
        rows = np.flatnonzero(self._execution.rows(store).mask & store.valid)[
            :MOST_PLACED
        ]
        used = np.zeros(store.n_images, bool)
        used[rows] = True
        acts = store.acts(site.name, "patches")[: rows[-1] + 1][used[: rows[-1] + 1]]
        pixels = input_pixels(store, rows)[: rows[-1] + 1][used[: rows[-1] + 1]]
        sides = [cells(acts, grid), cells(pixels.transpose(0, 2, 3, 1), grid)]
        if any(side is None for side in sides):
            raise MissingInput(
                f"{store.label}: the tokens of {site.name} do not fill {grid[0]} x {grid[1]} places"
            )
        tokens, squares = (np.asarray(side, np.float64) for side in sides)
        of_tokens = place_grams(tokens.mean(2))
        of_squares = place_grams(squares.reshape(*squares.shape[:2], -1))
        labels = Blocks.of(store, used, self._execution.seed).labels
        blocks = (-1, *range(labels.max() + 1))
        found = [place_contrast(of_tokens, of_squares, labels != b) for b in blocks]
        return Estimate(found[0], np.array(found[1:]))

    def radii(self, model: str, sites: str) -> Table:
        """Radius of half of the effective receptive field."""
        return erf.run(
            self.fields(model),
            metrics="radius50_px",
            sites=sites,
            execution=self._execution,
        )

    def single_tokens(self, model: str) -> Table:
        """Accuracy of 10-shot probes of single patch tokens of the last block, their mean."""
        found = probe.run(
            self.train(model),
            self.store(model),
            sites="blocks.-1.out",
            tokens="each",
            shots=(10,),
            execution=self._execution,
        )
        return found.filter(metric="top1", token="each")

    def neighbours(self, model: str) -> Table:
        """k-NN accuracy of every block."""
        found = knn.run(self.train(model), self.store(model), execution=self._execution)
        return found.filter(metric="top1")


def cells(maps: NDArray[Any], grid: tuple[int, int]) -> NDArray[Any] | None:
    """(images, places, positions, channels) of maps (images, rows, cols, channels), grouped by
    place of a coarser grid; None if the grids do not divide evenly."""
    n, *size, channels = maps.shape
    rows, cols = (length // of for length, of in zip(size, grid, strict=True))
    if (rows * grid[0], cols * grid[1]) != tuple(size):
        return None
    cut = maps.reshape(n, grid[0], rows, grid[1], cols, channels).swapaxes(2, 3)
    return cut.reshape(n, grid[0] * grid[1], rows * cols, channels)


def place_grams(x: Float) -> Float:
    """(places, n, n) Gram matrices of (n, places, features) less their mean, diagonals 0."""
    centred = (x - x.mean(0)).swapaxes(0, 1)
    grams: Float = centred @ centred.swapaxes(1, 2)
    grams[:, np.arange(len(x)), np.arange(len(x))] = 0
    return grams


def place_contrast(rows: Float, cols: Float, keep: Mask) -> float:
    """Mean CKA of each place with its own less that with the others, over the images to keep."""
    a, b = (grams[:, keep][:, :, keep] for grams in (rows, cols))
    nothing = np.zeros(a.shape[:2])
    h = PairSums(
        products=np.tensordot(a, b, ((1, 2), (1, 2))),
        self_rows=(a**2).sum((1, 2)),
        self_cols=(b**2).sum((1, 2)),
        sums_rows=a.sum(2),
        sums_cols=b.sum(2),
        diag_rows=nothing,
        diag_cols=nothing,
        n_images=int(keep.sum()),
    ).unbiased()
    cka = centred_alignment(h.cross, h.rows, h.cols)
    same = np.eye(len(a), dtype=bool)
    return float(np.nanmean(cka[same]) - np.nanmean(cka[~same]))


def layers(store: Store) -> tuple[str, ...]:
    """The sites compared by CKA, those of these groups that a store has."""
    there = {group for site in store.sites.values() for group in site.groups}
    return tuple(group for group in SITES if group in there)
