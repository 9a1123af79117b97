"""Effective receptive fields: how much of the image does a layer respond to?

Per site, as `vitsee extract --erf N` stores it: the gradient of the sum over channels at the centre
of the grid (even grids: of the mean of the middle cells) with respect to the normalised input, its
absolute value summed over RGB for each image, then averaged over images (Luo et al. 2016; Raghu et
al. 2021, Figs. 6, C.1 to C.4, who leave open the channels, the images and the centre of even
grids). A site after a residual sum (`*.out`, `mid`) includes the skip, which keeps a peak at the
centre; a branch (`*.attn.branch`, `*.mlp.branch`, a CNN's `branch`) does not.

- `radius50_px`, `radius90_px`: radius in input pixels of the circle that contains 50 % and 90 % of
  the mean map's mass (new here), around the centre of mass: which pixel the centre location stands
  for depends on a CNN's padding, and may be half a stride from the middle of the image. A pixel's
  mass is placed at its centre's distance, with interpolation in between. All mass on one pixel
  gives radius 0.
- `offset_px`: how far that centre of mass lies from the middle of the image.
- `gradient`: the mean map itself, in squares of as few pixels as leave 56 along a side: mean over
  the square of |d s / d input|, its first pixel in `row`, `col`.

Right after a layer norm with equal weights (a freshly initialised `norm`) the sum over channels is
a constant: the field there is rounding noise, as its size in `gradient` shows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.erf.field_pictures import draw_fields
from vitsee_core.figures.plotting import styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.machine import counted
from vitsee_core.runtime.options import FLOW, Offers, metrics_option, sites_option
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.statistics.jackknife import standard_error
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.glances import some_of
from vitsee_core.tables.headlines import Answer, by_store, first_and_last
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.types import Float
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.manifest import few

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import Store
    from vitsee_stores.layout import SiteSpec

log = logging.getLogger(__name__)

QUESTION = FLOW
HELP = """
Measure effective receptive fields.

How far the centre of a layer sees: its gradient with respect to the input pixels, in absolute
value, averaged over images (Raghu et al. 2021, Figs. 6, C.1 to C.4). Needs `vitsee extract
--erf 256`; sites after the residual sum (blocks) and before it (the branches of residual) are
just different sites.

  $ vitsee extract vit_base_patch16_224 --data photos --erf 256 --sites residual -o b16.zarr
  $ vitsee erf b16.zarr -o erf.csv --png erf.png
  $ vitsee erf b16.zarr r50.zarr --sites blocks --png both.png > both.csv
  $ vitsee erf b16.zarr --metric radius50_px --sites '*.attn.branch'

--images rounds up to whole slabs, as fields are kept as their sums. The figure shows each site's
field, and the radii against depth.
"""
MEANING = {
    "col": "row, col: of gradient, the first pixel of each square of the field",
    "high": "95 % interval over images, from 10 slabs on",
}
NEEDS = ("grid",)
READING = (
    "Top, which pixels the middle of each feature map responds to: the circle holds half of the "
    "mass, the cross is its centre. Below, that circle's radius against depth. A ViT's field is "
    "wide from the first block on, a CNN's grows; sites after a residual sum keep a peak of their "
    "own place, branches do not."
)
SOURCE = "Luo et al. 2016; Raghu et al. 2021, Figs. 6, C.1 to C.4"
AT_A_GLANCE = ""


RADII = {"radius50_px": 0.5, "radius90_px": 0.9}
METRICS = (*RADII, "offset_px", "gradient")
COLUMNS = (*(*SITE, "row", "col"), *("metric", "value", "std", "low", "high", "n_images"))
MOST_CELLS = 56  # of a map's side in the table
LEAST_SLABS = 10
INTERVAL = (
    "95 % interval over images of radii and offsets: value -+ t(0.975, slabs - 1) * standard "
    f"error, from a delete-a-slab jackknife; empty below {LEAST_SLABS} slabs with images (extract "
    "with a smaller --slab), and for gradient. std: sqrt(n_images) * standard error"
)


@analysis
def run(
    *stores: Store,
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            METRICS,
            "all",
            "radius50_px, radius90_px: circle with half and 90 % of the field's mass, in pixels; "
            "offset_px: its centre from the image's; gradient: the field itself.",
        ),
    ] = METRICS,
    sites: Annotated[Sequence[str], sites_option("every site with a receptive field")] = ("all",),
    execution: Annotated[Execution, Offers("images seed")] = DEFAULT,
) -> Table:
    """One row per store, metric and site; for `gradient` one per square of the map.

    Columns: see `COLUMNS`; `row`, `col` are empty but for `gradient`; `n_images` the images
    averaged over. NaN: the gradient is 0 everywhere (a freshly initialised branch), named on
    stderr; `std`, `low`, `high` as in `INTERVAL`. The stores may have different images.

    Args:
        stores: made with --erf; others are left out where one has receptive fields.

    Raises:
        MissingInput: no store has receptive fields, or those of the sites asked for.
        SiteError: a pattern matches no site.
        VitseeError: unknown metric, or no valid image.
    """
    wanted = asked_for(metrics, METRICS, "erf")
    selected = select_each(stores, sites, _with_fields)
    for store, chosen in selected.members:
        if not chosen:
            choose_sites(store, sites)  # refuses with the reason
    blocks: list[dict[str, Any]] = []
    used: dict[str, Any] = {}
    n_sites = sum(map(len, selected.chosen))
    with counting(execution.progress, n_sites, "sites") as progress:
        for store, chosen in selected.members:
            slabs, used[store.label] = choose_slabs(store, execution.images, execution.seed)
            counts = np.asarray(store.erf_counts())[slabs]
            zero = []
            for site in chosen:
                field = Field(np.asarray(store.erf(site.name))[slabs].astype(np.float64), counts)
                if not field.mean.any():
                    zero.append(site.name)
                about = site_columns(store, site) | {"n_images": int(counts.sum())}
                blocks += [about | {"metric": m} | _values(field, m) for m in wanted]
                progress.advance(1)
            if zero:
                named = few(zero)
                log.warning("%s: the gradient is 0 everywhere at %s: no radius", store.label, named)
    notes = {
        "interval": INTERVAL,
        "radius": "around the centre of mass, pixels at their centres, interpolated",
        "seed": execution.seed,
        "images": used,
        **selected.notes(),
    }
    return Table.concat(blocks, COLUMNS, notes)


def at_a_glance(table: Table) -> Table:
    """The fields of three sites of each model."""
    fields = table.filter(metric="gradient")
    return some_of(fields, site=3) if len(fields) else table


@styled
def plot(table: Table) -> Figure:
    return draw_fields(table)


def choose_sites(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """The selected stored sites with a receptive field, in the model's order.

    Raises:
        MissingInput: there are none.
        SiteError: a pattern that matches no site of the store.
    """
    chosen = _with_fields(store, patterns)
    if not chosen:
        store.erf(min(site.alias_of or site.name for site in store.select(list(patterns))))
    return chosen


def _with_fields(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    if store.plan.erf is None:
        raise MissingInput(
            f"{store.label} holds no receptive fields (extract it with --erf 256 -o NEW.zarr)"
        )
    asked = {site.alias_of or site.name for site in store.select(list(patterns))}
    return [s for s in store.plan.sites if s.name in asked and s.name in store.plan.erf.sites]


def choose_slabs(
    store: Store, images: int | None, seed: int
) -> tuple[NDArray[np.bool_], dict[str, Any]]:
    """(erf slabs,) which are used, and how they were chosen, for the sidecar.

    Raises:
        VitseeError: none of their images is valid, or none was requested.
    """
    if images is not None and images < 1:
        raise VitseeError(f"{images} images were asked for; expected a positive number")
    counts = np.asarray(store.erf_counts())
    order = np.flatnonzero(store.committed[: len(counts)])
    how = "all"
    if images is not None and images < counts.sum():
        if not store.shuffled:
            order = np.random.default_rng(seed).permutation(order)
        order = order[: int(np.searchsorted(np.cumsum(counts[order]), images)) + 1]
        how = f"{images}, rounded up to {counted(len(order), 'whole slabs')}"
        if (used := int(counts[order].sum())) > images:
            log.info("%s: %s (%d images)", store.label, how, used)
    chosen = np.zeros(len(counts), bool)
    chosen[order] = True
    total = int(counts[chosen].sum())
    if not total:
        raise VitseeError(f"{store.label} has no readable image in its receptive fields")
    return chosen, {"images": total, "slabs": int(chosen.sum()), "chosen": how}


@dataclass(frozen=True)
class Field:
    """One site's sums of slabs (slabs, H, W), and the images in each (slabs,)."""

    sums: Float
    counts: NDArray[np.int64]

    @property
    def mean(self) -> Float:
        return self.sums.sum(0) / self.counts.sum()

    def without_each(self) -> list[Float]:
        """The sums of all other slabs, for each slab with images; [] if these are too few."""
        there = self.sums[self.counts > 0]
        if len(there) < LEAST_SLABS:
            return []
        return [np.delete(there, k, axis=0).sum(0) for k in range(len(there))]


def centre_of_mass(field: Float) -> tuple[float, float]:
    """(y, x) in pixels, the centre of the first pixel being 0; NaN without mass."""
    total = field.sum()
    if not total > 0:
        return np.nan, np.nan
    y, x = np.arange(field.shape[0]), np.arange(field.shape[1])
    return float(field.sum(1) @ y / total), float(field.sum(0) @ x / total)


def radius(field: Float, share: float) -> float:
    """Radius in pixels around the centre of mass that holds this share of it; NaN without mass.

    The mass within r counts the pixels whose centres are at most r away; between one pixel's
    distance and the next it grows linearly, from 0 at r = 0.
    """
    y0, x0 = centre_of_mass(field)
    if np.isnan(y0):
        return float("nan")
    y, x = np.arange(field.shape[0]), np.arange(field.shape[1])
    distance = np.hypot(y[:, np.newaxis] - y0, x - x0).ravel()
    order = np.argsort(distance, kind="stable")
    order = order[field.ravel()[order] > 0]
    mass = np.cumsum(field.ravel()[order])
    # Pixels at equal distances are added together.
    last = np.append(np.diff(distance[order]) > 1e-9 * len(y), True)
    return float(np.interp(share * mass[-1], [0, *mass[last]], [0, *distance[order][last]]))


def offset(field: Float) -> float:
    """Distance in pixels of the centre of mass from the middle of the image."""
    y, x = centre_of_mass(field)
    return float(np.hypot(y - (field.shape[0] - 1) / 2, x - (field.shape[1] - 1) / 2))


def squares(field: Float) -> tuple[int, Float]:
    """Pixels along a square's side, and the map's mean in each square; the last may be cut."""
    step = -(-max(field.shape) // MOST_CELLS)
    for axis, length in enumerate(field.shape):
        starts = np.arange(0, length, step)
        size = np.diff(np.append(starts, length))
        field = np.add.reduceat(field, starts, axis) / np.expand_dims(size, 1 - axis)
    return step, field


def _values(field: Field, metric: str) -> dict[str, Any]:
    """value, std, low, high; for `gradient` row, col and value of every square."""
    if metric == "gradient":
        step, cells = squares(field.mean)
        row, col = (step * at.ravel() for at in np.indices(cells.shape))
        return {"row": row, "col": col, "value": cells.ravel()}
    value = _number(field.mean, metric)
    without = np.array([_number(other, metric) for other in field.without_each()])
    if not len(without):
        return {"value": value}
    error = float(standard_error(without))
    half = t_quantile(len(without) - 1) * error
    std = error * float(np.sqrt(field.counts.sum()))
    ends = {"low": value - half, "high": value + half}
    return {"value": value, "std": std, **ends, WORD: without}


def _number(field: Float, metric: str) -> float:
    return offset(field) if metric == "offset_px" else radius(field, RADII[metric])


def headline(table: Table) -> list[Answer]:
    """The radius of half the response at the first and at the last site."""
    return [
        (store, f"half of the response within {first_and_last(rows, 'px')}")
        for store, rows in by_store(table, metric="radius50_px")
    ]
