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
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.erf.figure import plot
from vitsee_core.declaration import Analysis
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.machine import plural
from vitsee_core.runtime.options import FLOW, Offers, metrics_option, sites_option
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.statistics.jackknife import standard_error
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.tables.columns import REPLICATES, SITE, site_columns
from vitsee_core.tables.glances import select_evenly
from vitsee_core.tables.headlines import Answer, by_store, first_and_last
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.types import Float
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_stores.layout import SiteSpec

__all__ = ["COLUMNS", "METRICS", "plot", "run"]

log = logging.getLogger(__name__)

RADII = {"radius50_px": 0.5, "radius90_px": 0.9}  # metric -> share of the mass
METRICS = (*RADII, "offset_px", "gradient")
COLUMNS = (*(*SITE, "row", "col"), *("metric", "value", "std", "low", "high", "n_images"))
MAX_CELLS = 56  # of a map's side in the table
MIN_SLABS = 10  # with images, for an interval
INTERVAL = (
    "95 % interval over images of radii and offsets: value -+ t(0.975, slabs - 1) * "
    f"standard error, from a delete-a-slab jackknife; empty below {MIN_SLABS} slabs "
    "with images (extract with a smaller --slab), and for gradient. std: "
    "sqrt(n_images) * standard error"
)


@analysis
def run(
    *stores: Store,
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            METRICS,
            "all",
            "radius50_px, radius90_px: circle with half and 90 % of the field's mass, "
            "in pixels; offset_px: its centre from the image's; gradient: the field "
            "itself.",
        ),
    ] = METRICS,
    sites: Annotated[Sequence[str], sites_option("every site with a receptive field")] = (
        "all",
    ),
    execution: Annotated[Execution, Offers("images seed")] = DEFAULT,
) -> Table:
    """Return a table with one row per store, metric and site; for `gradient` one per square.

    The columns are `COLUMNS`. `row` and `col` are empty but for `gradient`; `n_images` counts the
    images averaged over. A radius is NaN if the gradient is 0 everywhere (a freshly initialised
    branch), which is also said on stderr. `std`, `low` and `high` are those of `INTERVAL`.

    Args:
        stores: stores made with --erf, perhaps of different images. Others are left out, as long
            as one has receptive fields.
        metrics: names out of `METRICS`.
        sites: patterns of the sites.
        execution: images and seed.

    Raises:
        MissingInput: no store has receptive fields, or none of the sites has them.
        SiteError: a pattern matches no site.
        VitseeError: a metric is unknown, or no image is valid.

    Examples:
        >>> import vitsee
        >>> table = vitsee.erf("seen.zarr", metrics="radius50_px", sites="first,last")
        >>> table["site"].tolist(), table["value"].round().tolist()  # pixels
        (['blocks.0.out', 'blocks.5.out'], [4.0, 9.0])
    """
    row_metrics = select_metrics(metrics, METRICS, "erf")
    selection = select_each(stores, sites, _select_with_fields)
    for store, store_sites in selection.members:
        if not store_sites:
            _refuse_sites(store, sites)
    rows: list[dict[str, Any]] = []
    image_notes: dict[str, Any] = {}
    n_sites = sum(map(len, selection.chosen))
    with counting(execution.progress, n_sites, "sites") as progress:
        for store, store_sites in selection.members:
            slabs, image_notes[store.label] = choose_slabs(
                store, execution.images, execution.seed
            )
            counts = np.asarray(store.erf_counts())[slabs]
            zero_sites = []
            for site in store_sites:
                # (slabs, H, W), the sum over the images of each slab
                sums = np.asarray(store.erf(site.name))[slabs].astype(np.float64)
                if not sums.any():
                    zero_sites.append(site.name)
                site_cells = site_columns(store, site) | {"n_images": int(counts.sum())}
                for metric in row_metrics:
                    cells = {"metric": metric} | _measure(sums, counts, metric)
                    rows.append(site_cells | cells)
                progress.advance(1)
            if zero_sites:
                log.warning(
                    "%s: the gradient is 0 everywhere at %s: no radius",
                    store.label,
                    abbreviate(zero_sites),
                )
    notes = {
        "interval": INTERVAL,
        "radius": "around the centre of mass, pixels at their centres, interpolated",
        "seed": execution.seed,
        "images": image_notes,
        **selection.notes(),
    }
    return Table.concat(rows, COLUMNS, notes)


def at_a_glance(table: Table) -> Table:
    """Return the fields of three sites of each model."""
    fields = table.filter(metric="gradient")
    if len(fields) == 0:
        return table
    return select_evenly(fields, site=3)


def _select_with_fields(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """Return the sites that match a pattern and have a receptive field.

    Raises:
        MissingInput: the store has no receptive fields at all.
    """
    if store.plan.erf is None:
        raise MissingInput(
            f"{store.label} holds no receptive fields (extract it with --erf 256 -o "
            "NEW.zarr)"
        )
    requested = {site.alias_of or site.name for site in store.select(list(patterns))}
    return [
        site
        for site in store.plan.sites
        if site.name in requested and site.name in store.plan.erf.sites
    ]


def _refuse_sites(store: Store, patterns: Sequence[str]) -> None:
    """Raise MissingInput with the reason why the first of these sites has no receptive field."""
    names = [site.alias_of or site.name for site in store.select(list(patterns))]
    store.erf(min(names))


def choose_slabs(
    store: Store, images: int | None, seed: int
) -> tuple[NDArray[np.bool_], dict[str, Any]]:
    """Choose the slabs whose fields are averaged.

    A field is kept as one sum for each slab, so that `images` is rounded up to whole slabs.

    Returns:
        (erf slabs,) whether each is used, and how they were chosen, for the sidecar.

    Raises:
        VitseeError: none of their images is valid, or none was requested.
    """
    if images is not None and images < 1:
        raise VitseeError(f"{images} images were asked for; expected a positive number")
    counts = np.asarray(store.erf_counts())
    order = np.flatnonzero(store.committed[: len(counts)])
    how = "all"
    if images is not None and images < counts.sum():
        # The first slabs of a shuffled store are a random choice already.
        if not store.shuffled:
            order = np.random.default_rng(seed).permutation(order)
        n_slabs = int(np.searchsorted(np.cumsum(counts[order]), images)) + 1
        order = order[:n_slabs]
        how = f"{images}, rounded up to {plural(len(order), 'whole slabs')}"
        n_images = int(counts[order].sum())
        if n_images > images:
            log.info("%s: %s (%d images)", store.label, how, n_images)
    is_used = np.zeros(len(counts), bool)
    is_used[order] = True
    total = int(counts[is_used].sum())
    if not total:
        raise VitseeError(f"{store.label} has no readable image in its receptive fields")
    return is_used, {"images": total, "slabs": int(is_used.sum()), "chosen": how}


def centre_of_mass(field: Float) -> tuple[float, float]:
    """Return (y, x) in pixels from the centre of the first pixel; NaN without mass."""
    total = field.sum()
    if not total > 0:
        return np.nan, np.nan
    y = np.arange(field.shape[0])
    x = np.arange(field.shape[1])
    return float(field.sum(1) @ y / total), float(field.sum(0) @ x / total)


def radius(field: Float, share: float) -> float:
    """Return the radius in pixels around the centre of mass that holds this share of the mass.

    It is NaN without mass.

    The mass within r counts the pixels whose centres are at most r away; between one pixel's
    distance and the next it grows linearly, from 0 at r = 0.
    """
    y0, x0 = centre_of_mass(field)
    if np.isnan(y0):
        return float("nan")
    y = np.arange(field.shape[0])
    x = np.arange(field.shape[1])
    distance = np.hypot(y[:, np.newaxis] - y0, x - x0).ravel()
    # Pixels from the centre outwards, those without mass left out.
    order = np.argsort(distance, kind="stable")
    order = order[field.ravel()[order] > 0]
    mass = np.cumsum(field.ravel()[order])
    # Pixels at equal distances are added together; sums in different order differ by rounding.
    is_last = np.append(np.diff(distance[order]) > 1e-9 * len(y), True)
    masses = [0, *mass[is_last]]
    distances = [0, *distance[order][is_last]]
    return float(np.interp(share * mass[-1], masses, distances))


def offset(field: Float) -> float:
    """Return the distance in pixels of the centre of mass from the middle of the image."""
    y, x = centre_of_mass(field)
    return float(np.hypot(y - (field.shape[0] - 1) / 2, x - (field.shape[1] - 1) / 2))


def squares(field: Float) -> tuple[int, Float]:
    """Return the pixels along a square's side, and (rows, cols) the map's mean in each square.

    The last squares of a line may be cut off by the edge of the map.
    """
    step = math.ceil(max(field.shape) / MAX_CELLS)
    # Rows, then columns: (H, W) -> (rows, W) -> (rows, cols).
    for axis, length in enumerate(field.shape):
        starts = np.arange(0, length, step)
        sizes = np.diff(np.append(starts, length))
        sums = np.add.reduceat(field, starts, axis)
        field = sums / np.expand_dims(sizes, 1 - axis)
    return step, field


def _measure(sums: Float, counts: NDArray[np.int64], metric: str) -> dict[str, Any]:
    """Return the cells of a metric's row: value, std, low, high; of `gradient` columns of squares.

    Args:
        sums: (slabs, H, W) sums of a site's field over the images of each slab.
        counts: (slabs,) the number of these images.
        metric: one of `METRICS`.
    """
    mean = sums.sum(0) / counts.sum()
    if metric == "gradient":
        step, cells = squares(mean)
        rows, cols = np.indices(cells.shape)
        return {
            "row": step * rows.ravel(),
            "col": step * cols.ravel(),
            "value": cells.ravel(),
        }
    value = _summarise(mean, metric)
    slab_sums = sums[counts > 0]
    if len(slab_sums) < MIN_SLABS:
        return {"value": value}
    # A radius does not change with the field's scale: sums stand for means.
    replicates = [
        _summarise(np.delete(slab_sums, k, axis=0).sum(0), metric)
        for k in range(len(slab_sums))
    ]
    without = np.array(replicates)
    error = float(standard_error(without))
    half = t_quantile(len(without) - 1) * error
    return {
        "value": value,
        "std": error * float(np.sqrt(counts.sum())),
        "low": value - half,
        "high": value + half,
        REPLICATES: without,
    }


def _summarise(field: Float, metric: str) -> float:
    """Return a radius or the offset of a field (H, W), in pixels."""
    if metric == "offset_px":
        return offset(field)
    return radius(field, RADII[metric])


def headline(table: Table) -> list[Answer]:
    """Return per store the radius of half the response at the first and at the last site."""
    return [
        (store, f"half of the response within {first_and_last(rows, 'px')}")
        for store, rows in by_store(table, metric="radius50_px")
    ]


ANALYSIS = Analysis(
    module=__name__,
    question=FLOW,
    help="""
    Measure effective receptive fields.

    How far the centre of a layer sees: its gradient with respect to the input pixels, in
    absolute value, averaged over images (Raghu et al. 2021, Figs. 6, C.1 to C.4). Needs
    `vitsee extract --erf 256`; sites after the residual sum (blocks) and before it (the
    branches of residual) are just different sites.

      $ vitsee extract vit_base_patch16_224 --data photos --erf 256 --sites residual -o b16.zarr
      $ vitsee erf b16.zarr -o erf.csv --png erf.png
      $ vitsee erf b16.zarr r50.zarr --sites blocks --png both.png > both.csv
      $ vitsee erf b16.zarr --metric radius50_px --sites '*.attn.branch'

    --images rounds up to whole slabs, as fields are kept as their sums. The figure shows
    each site's field, and the radii against depth.
    """,
    needs=("grid", "images"),
    reading=(
        "Top, which pixels the middle of each feature map responds to: the circle "
        "holds half of the mass, the cross is its centre. Below, that circle's radius "
        "against depth. A ViT's field is wide from the first block on, a CNN's grows; "
        "sites after a residual sum keep a peak of their own place, branches do not."
    ),
    source="Luo et al. 2016; Raghu et al. 2021, Figs. 6, C.1 to C.4",
    columns=COLUMNS,
    meanings={
        "col": "row, col: of gradient, the first pixel of each square of the field",
        "high": "95 % interval over images, from 10 slabs on",
    },
    metrics=METRICS,
    may_lack_values=True,  # a warning names gradients that are 0
    run=run,
    plot=plot,
    headline=headline,
    at_a_glance=at_a_glance,
    glance_metric="",
)
