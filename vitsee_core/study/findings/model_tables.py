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

SITES = ("blocks", "norms", "hidden")  # groups whose layers CKA compares
# Images of `equal_places`, which holds a Gram matrix of them for each location.
MAX_LOCATION_IMAGES = 1000


class ModelTables:
    """Tables of models, under the names that findings use for them. What several findings read is
    computed once."""

    def __init__(
        self,
        stores: Mapping[str, Store],
        training: Mapping[str, Store],
        execution: Execution = DEFAULT,
    ) -> None:
        """Prepare the tables; none is computed yet.

        Args:
            stores: model, by the findings' name for it -> its store.
            training: model -> its store over training images, where there is one.
            execution: how the tables are computed.
        """
        self._stores = stores
        self._training = training
        self._execution = execution
        self._tables: dict[tuple[str, ...], Table] = {}

    def store(self, model: str) -> Store:
        """Return the store of a model: all layers, over the images."""
        return self._stores[model]

    def train(self, model: str) -> Store:
        """Return the store of a model's block outputs over the training images.

        Raises:
            MissingInput: there is no such store.
        """
        if model not in self._training:
            label = self.store(model).label
            raise MissingInput(f"there is no store {label}-train of images to learn from")
        return self._training[model]

    def fields(self, model: str) -> Store:
        """Return the store with a model's receptive fields; its slabs are the blocks of images of
        their intervals."""
        return self.store(model)

    def keypoints(self, model: str) -> Table:
        """Return PCK at 0.1 of every block, where a subclass has it.

        Raises:
            MissingInput: there are no keypoints for these stores.
        """
        raise MissingInput(
            f"{self.store(model).label}: it takes keypoints: vitsee keypoints"
        )

    def replaced(self, model: str, values: str) -> Table:
        """Return the effect on the outputs of replacing the class token halfway, where a subclass
        has it.

        Args:
            model: the model.
            values: what the token is replaced by: "zero", "mean" or "shuffle".

        Raises:
            MissingInput: these stores are of unchanged models.
        """
        raise MissingInput(
            f"{self.store(model).label}: it takes stores with the class token replaced: "
            "vitsee study registers"
        )

    def importance(self, model: str) -> Table:
        """Return the importance of every head, where a subclass has it.

        Raises:
            MissingInput: these stores do not say it.
        """
        raise MissingInput(
            f"{self.store(model).label}: it takes a pass for each head: vitsee "
            "head-importance"
        )

    def _computed_once(self, key: tuple[str, ...], compute: Callable[[], Table]) -> Table:
        """Return the table of a key, which is computed on its first use."""
        if key not in self._tables:
            self._tables[key] = compute()
        return self._tables[key]

    def cka(self, a: str, b: str | None = None, pairs: str = "all") -> Table:
        """Return CKA of layers of one model, or of two.

        Args:
            a: the model.
            b: the other model, if any.
            pairs: "all" pairs of all layers; "same-depth" for those of blocks alone.
        """

        def compute() -> Table:
            """Run the analysis."""
            store = self.store(a)
            stores = [store] if b is None else [store, self.store(b)]
            sites: dict[str, Any] = {}
            if pairs != "all":
                sites = {"sites": ("blocks",), "pairs": pairs}
            elif b is None:
                sites = {"sites": layers(store)}
            else:
                # The models may have other groups of layers.
                sites = {"sites_a": layers(store), "sites_b": layers(self.store(b))}
            return cka.run(*stores, **sites, execution=self._execution)

        return self._computed_once(("cka", a, b or "", pairs), compute)

    def last_cls(self, a: str, b: str) -> Estimate:
        """Return CKA of the class tokens of the last blocks of two models."""
        table = cka.run(
            self.store(a),
            self.store(b),
            sites=("blocks.-1.out",),
            tokens="cls",
            execution=self._execution,
        )
        return mean(table, pl.col("value").is_not_null())

    def heads(self, model: str) -> Table:
        """Return the scores of every head."""
        return self._computed_once(
            ("heads", model),
            lambda: head_types.run(self.store(model), execution=self._execution),
        )

    def cnn_like(self, model: str, cnn: str) -> Table:
        """Return CKA of groups of heads of the first block with the lower layers of a CNN."""
        return cka_heads.run(
            self.store(model), self.store(cnn), execution=self._execution
        )

    def distances(self, model: str) -> Table:
        """Return the mean attention distance of every head over that of uniform attention, with
        replicates."""

        def compute() -> Table:
            """Run attn-dist, and add replicates from the distances that the store keeps."""
            store = self.store(model)
            execution = self._execution
            table = attn_dist.run(store, metrics="distance_relative", execution=execution)
            used = execution.rows(store).mask & store.valid
            # (images, blocks, heads)
            distance_px = np.asarray(store.attention("distance_px")[:], np.float64)[used]
            blocks = Blocks.of(store, used, execution.seed)
            sums = blocks.sums(distance_px)
            counts = blocks.sums(np.ones(len(distance_px)))
            mean_px = distance_px.mean(0).reshape(-1)
            # (blocks x heads, blocks of images)
            without_px = means_without(sums, counts).reshape(len(mean_px), -1)
            # Uniform attention's distance is one number for each head, the same in all images.
            scale = table["value"] / mean_px
            replicates = build_column(REPLICATES, without_px * scale[:, None])
            return table.with_frame(table.frame.with_columns(replicates))

        return self._computed_once(("distances", model), compute)

    def ratios(self, model: str, tokens: str) -> Table:
        """Return the geometric mean norm ratio of every sublayer. tokens: "cls" or "patches"."""
        return normratio.run(
            self.store(model),
            metrics="norm_ratio_geomean",
            tokens=tokens,
            execution=self._execution,
        )

    def localised(self, model: str, site: str) -> Table:
        """Return CKA of every token of a site with every patch of the input."""
        return localize.run(self.store(model), sites=site, execution=self._execution)

    def equal_places(self, model: str, cnn: str) -> Estimate:
        """Return how much more a model's last tokens resemble the pixels at their location than a
        CNN's do, both at the CNN's locations.

        Of the CNN the last block with several locations is taken, of the model the mean of the
        tokens of its last block in each location. The number of each is that of
        `estimates.own_contrast`, over at most `MAX_LOCATION_IMAGES` images. Memory: locations x
        images^2 numbers.

        Raises:
            MissingInput: no pixels, or a grid that is not several of the CNN's tokens each way.
        """
        cnn_grids = [
            (site, site.layout.grid)
            for site in self.store(cnn).select(["blocks"])
            if site.layout is not None and site.layout.grid not in (None, (1, 1))
        ]
        if not cnn_grids:
            raise MissingInput(
                f"{self.store(cnn).label} has no block with several locations"
            )
        cnn_site, grid = cnn_grids[-1]
        assert grid is not None
        site = self.store(model).select(["blocks"])[-1]
        contrast = self._location_contrast(model, site, grid)
        return contrast - self._location_contrast(cnn, cnn_site, grid)

    def _location_contrast(
        self, model: str, site: SiteSpec, grid: tuple[int, int]
    ) -> Estimate:
        """Return the mean CKA of a site's tokens with the pixels at their location, less that with
        those at other locations.

        Args:
            model: the model.
            site: a site that lies on the image.
            grid: rows and columns of the locations; tokens are averaged in each.

        Raises:
            MissingInput: no pixels, or tokens that do not fill the grid evenly.
        """
        store = self.store(model)
        rows = np.flatnonzero(self._execution.rows(store).mask & store.valid)
        rows = rows[:MAX_LOCATION_IMAGES]
        used = np.zeros(store.n_images, bool)
        used[rows] = True
        # Reading stops at the last image that is used.
        n_read = rows[-1] + 1
        acts = store.acts(site.name, "patches")[:n_read][used[:n_read]]
        pixels = input_pixels(store, rows)[:n_read][used[:n_read]]
        tokens = cells(acts, grid)
        squares = cells(pixels.transpose(0, 2, 3, 1), grid)
        if tokens is None or squares is None:
            raise MissingInput(
                f"{store.label}: the tokens of {site.name} do not fill {grid[0]} x "
                f"{grid[1]} places"
            )
        token_means = np.asarray(tokens, np.float64).mean(2)
        squares = np.asarray(squares, np.float64)
        token_grams = place_grams(token_means)
        pixel_grams = place_grams(squares.reshape(*squares.shape[:2], -1))
        labels = Blocks.of(store, used, self._execution.seed).labels
        all_images = np.ones(len(labels), bool)
        value = place_contrast(token_grams, pixel_grams, all_images)
        without = [
            place_contrast(token_grams, pixel_grams, labels != block)
            for block in range(labels.max() + 1)
        ]
        return Estimate(value, np.array(without))

    def radii(self, model: str, sites: str) -> Table:
        """Return the radius that holds half of each site's effective receptive field, in pixels."""
        return erf.run(
            self.fields(model),
            metrics="radius50_px",
            sites=sites,
            execution=self._execution,
        )

    def single_tokens(self, model: str) -> Table:
        """Return the mean accuracy of 10-shot probes of single patch tokens of the last block."""
        table = probe.run(
            self.train(model),
            self.store(model),
            sites="blocks.-1.out",
            tokens="each",
            shots=(10,),
            execution=self._execution,
        )
        return table.filter(metric="top1", token="each")

    def neighbours(self, model: str) -> Table:
        """Return the k-NN accuracy of every block."""
        table = knn.run(self.train(model), self.store(model), execution=self._execution)
        return table.filter(metric="top1")


def cells(maps: NDArray[Any], grid: tuple[int, int]) -> NDArray[Any] | None:
    """Group the positions of maps by the cells of a coarser grid.

    Args:
        maps: (images, rows, cols, channels).
        grid: rows and columns of cells.

    Returns:
        (images, cells, positions in a cell, channels); None if the grids do not divide evenly.
    """
    n_images, n_rows, n_cols, channels = maps.shape
    rows_per_cell = n_rows // grid[0]
    cols_per_cell = n_cols // grid[1]
    if (rows_per_cell * grid[0], cols_per_cell * grid[1]) != (n_rows, n_cols):
        return None
    split = maps.reshape(
        n_images, grid[0], rows_per_cell, grid[1], cols_per_cell, channels
    )
    # (images, cell rows, cell cols, rows in a cell, cols in a cell, channels)
    split = split.swapaxes(2, 3)
    n_positions = rows_per_cell * cols_per_cell
    return split.reshape(n_images, grid[0] * grid[1], n_positions, channels)


def place_grams(x: Float) -> Float:
    """Return Gram matrices over images, one for each location.

    Args:
        x: (images, locations, features); features are centred here.

    Returns:
        (locations, images, images), with diagonals of 0, as the unbiased HSIC takes them.
    """
    centred = (x - x.mean(0)).swapaxes(0, 1)
    grams: Float = centred @ centred.swapaxes(1, 2)
    grams[:, np.arange(len(x)), np.arange(len(x))] = 0
    return grams


def place_contrast(row_grams: Float, col_grams: Float, keep: Mask) -> float:
    """Return the mean CKA of each location with itself, less that with the others.

    Args:
        row_grams: (locations, images, images) of tokens.
        col_grams: the same of pixels.
        keep: (images,) the images to use.
    """
    a = row_grams[:, keep][:, :, keep]
    b = col_grams[:, keep][:, :, keep]
    zero_diagonals = np.zeros(a.shape[:2])
    # (locations, locations) sums over pairs of images.
    hsic = PairSums(
        products=np.tensordot(a, b, ((1, 2), (1, 2))),
        self_rows=(a**2).sum((1, 2)),
        self_cols=(b**2).sum((1, 2)),
        sums_rows=a.sum(2),
        sums_cols=b.sum(2),
        diag_rows=zero_diagonals,
        diag_cols=zero_diagonals,
        n_images=int(keep.sum()),
    ).unbiased()
    similarities = centred_alignment(hsic.cross, hsic.rows, hsic.cols)
    is_same = np.eye(len(a), dtype=bool)
    # NaN: a location that is equal in all images.
    return float(np.nanmean(similarities[is_same]) - np.nanmean(similarities[~is_same]))


def layers(store: Store) -> tuple[str, ...]:
    """Return the groups of sites that CKA compares, those that a store has."""
    groups = {group for site in store.sites.values() for group in site.groups}
    return tuple(group for group in SITES if group in groups)
