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

from vitsee_core.declaration import Analysis
from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import (
    PanelGrid,
    bars_at_ends,
    evenly,
    map_axes,
    map_title,
    name_part,
    small_maps,
    stack,
)
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.machine import plural
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
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import PARTS, site_words
from vitsee_core.types import Float, pl
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from vitsee_stores.layout import SiteSpec

log = logging.getLogger(__name__)


RADII = {"radius50_px": 0.5, "radius90_px": 0.9}
METRICS = (*RADII, "offset_px", "gradient")
COLUMNS = (*(*SITE, "row", "col"), *("metric", "value", "std", "low", "high", "n_images"))
MAX_CELLS = 56  # of a map's side in the table
MIN_SLABS = 10
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
    """
    requested = asked_for(metrics, METRICS, "erf")
    selected = select_each(stores, sites, _with_fields)
    for store, store_sites in selected.members:
        if not store_sites:
            # Refuses with the reason.
            store.erf(
                min(site.alias_of or site.name for site in store.select(list(sites)))
            )
    rows: list[dict[str, Any]] = []
    used: dict[str, Any] = {}
    n_sites = sum(map(len, selected.chosen))
    with counting(execution.progress, n_sites, "sites") as progress:
        for store, store_sites in selected.members:
            slabs, used[store.label] = choose_slabs(
                store, execution.images, execution.seed
            )
            counts = np.asarray(store.erf_counts())[slabs]
            zero_sites = []
            for site in store_sites:
                field = Field(
                    np.asarray(store.erf(site.name))[slabs].astype(np.float64), counts
                )
                if not field.mean.any():
                    zero_sites.append(site.name)
                about = site_columns(store, site) | {"n_images": int(counts.sum())}
                rows += [about | {"metric": m} | _values(field, m) for m in requested]
                progress.advance(1)
            if zero_sites:
                names = abbreviate(zero_sites)
                log.warning(
                    "%s: the gradient is 0 everywhere at %s: no radius",
                    store.label,
                    names,
                )
    notes = {
        "interval": INTERVAL,
        "radius": "around the centre of mass, pixels at their centres, interpolated",
        "seed": execution.seed,
        "images": used,
        **selected.notes(),
    }
    return Table.concat(rows, COLUMNS, notes)


def at_a_glance(table: Table) -> Table:
    """Return the fields of three sites of each model."""
    fields = table.filter(metric="gradient")
    return some_of(fields, site=3) if len(fields) else table


def _with_fields(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
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


def choose_slabs(
    store: Store, images: int | None, seed: int
) -> tuple[NDArray[np.bool_], dict[str, Any]]:
    """Return which slabs are used, (erf slabs,), and how they were chosen, for the sidecar.

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
        how = f"{images}, rounded up to {plural(len(order), 'whole slabs')}"
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
    """One site's field: sums over each slab's images (slabs, H, W), and their number (slabs,)."""

    sums: Float
    counts: NDArray[np.int64]

    @property
    def mean(self) -> Float:
        """The mean map over all images, (H, W)."""
        return self.sums.sum(0) / self.counts.sum()


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
    order = np.argsort(distance, kind="stable")
    order = order[field.ravel()[order] > 0]
    mass = np.cumsum(field.ravel()[order])
    # Pixels at equal distances are added together.
    last = np.append(np.diff(distance[order]) > 1e-9 * len(y), True)
    return float(
        np.interp(share * mass[-1], [0, *mass[last]], [0, *distance[order][last]])
    )


def offset(field: Float) -> float:
    """Return the distance in pixels of the centre of mass from the middle of the image."""
    y, x = centre_of_mass(field)
    return float(np.hypot(y - (field.shape[0] - 1) / 2, x - (field.shape[1] - 1) / 2))


def squares(field: Float) -> tuple[int, Float]:
    """Return the pixels along a square's side, and the map's mean in each square.

    The last squares of a line may be cut off by the edge of the map.
    """
    step = -(-max(field.shape) // MAX_CELLS)
    for axis, length in enumerate(field.shape):
        starts = np.arange(0, length, step)
        size = np.diff(np.append(starts, length))
        field = np.add.reduceat(field, starts, axis) / np.expand_dims(size, 1 - axis)
    return step, field


def _values(field: Field, metric: str) -> dict[str, Any]:
    """Return value, std, low and high of a metric; for `gradient` row, col and value of squares."""
    if metric == "gradient":
        step, cells = squares(field.mean)
        rows, cols = (step * at.ravel() for at in np.indices(cells.shape))
        return {"row": rows, "col": cols, "value": cells.ravel()}
    value = _number(field.mean, metric)
    with_images = field.sums[field.counts > 0]
    if len(with_images) < MIN_SLABS:
        return {"value": value}
    others = (np.delete(with_images, k, axis=0).sum(0) for k in range(len(with_images)))
    without = np.array([_number(other, metric) for other in others])
    error = float(standard_error(without))
    half = t_quantile(len(without) - 1) * error
    std = error * float(np.sqrt(field.counts.sum()))
    ends = {"low": value - half, "high": value + half}
    return {"value": value, "std": std, **ends, WORD: without}


def _number(field: Float, metric: str) -> float:
    if metric == "offset_px":
        return offset(field)
    return radius(field, RADII[metric])


def headline(table: Table) -> list[Answer]:
    """Return per store the radius of half the response at the first and at the last site."""
    return [
        (store, f"half of the response within {first_and_last(rows, 'px')}")
        for store, rows in by_store(table, metric="radius50_px")
    ]


CURVES = ("radius50_px", "radius90_px", "offset_px")
MAX_LINES = 6
# The lower end of the scale of colours, of a field's largest value.
FLOOR = 1e-3
MARK = "#FF3B30"


@dataclass(frozen=True)
class Picture:
    """A field in squares of `step` pixels, and the radius that holds half of it (NaN: unknown)."""

    cells: Float
    step: int
    radius: float

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.cells.shape[0] * self.step, self.cells.shape[1] * self.step


@dataclass(frozen=True)
class Line:
    """The fields of one store and kind of site, by block (or by site outside blocks)."""

    store: str
    kind: str
    n_images: int
    pictures: dict[str, Picture]


@styled
def plot(table: Table) -> Figure:
    """Draw a line of fields for each kind of site, and curves of radii below.

    Each field is divided by its largest value; all share one logarithmic scale over three decades;
    a field that is 0 everywhere is white, with a 0. A cross marks the centre of mass, a circle the
    radius that holds half of it. Of many sites, evenly chosen blocks are shown; the curves show
    all.
    """
    rows = table.frame
    lines = _lines(rows)
    metrics = [metric for metric in CURVES if metric in rows["metric"]]
    grids = [small_maps(len(_shown(line)), 4) for line in lines]
    curve_grid = CurveGrid.of(max(len(metrics), 1), rows)
    figure, boxes = stack(*grids, *([curve_grid] if metrics else []))
    for line, grid, box in zip(lines, grids, boxes, strict=False):
        _draw_line(line, grid, box)
    if metrics:
        curves = rows.filter(pl.col("metric").is_in(metrics))
        panels = curve_grid.panels(boxes[-1], of_metrics(rows, metrics))
        for axes, _, metric_rows in panels:
            draw_depth_curves(axes, metric_rows, among=curves)
        curve_grid.finish(panels)
        add_curve_legend(figure, [axes for axes, *_ in panels])
    return figure


def _lines(rows: pl.DataFrame) -> list[Line]:
    """Return the lines of fields, store by store, at most `MAX_LINES` of a store."""
    lines = []
    for store_rows in rows.partition_by("store", maintain_order=True):
        store = store_rows["store"][0]
        fields = store_rows.filter(metric="gradient")
        if fields.is_empty():
            continue
        radii = dict(
            store_rows.filter(metric="radius50_px").select("site", "value").iter_rows()
        )
        by_kind: dict[str, dict[str, Picture]] = {}
        for cells in fields.partition_by("site", maintain_order=True):
            site = cells["site"][0]
            kind = site_kind(site)
            block = site.removesuffix(f".{kind}")
            picture = _picture(cells, radii.get(site))
            by_kind.setdefault("out" if kind == "head" else kind, {})[block] = picture
        count = fields["n_images"][0]
        lines += [Line(store, kind, count, of) for kind, of in by_kind.items()][
            :MAX_LINES
        ]
    return lines


def _picture(rows: pl.DataFrame, radius: float | None) -> Picture:
    """Return the field of one site, from its rows of `gradient` and its `radius50_px`."""
    y, x = (rows[name].to_numpy() for name in ("row", "col"))
    steps = np.diff(np.unique(np.concatenate([y, x])))
    step = int(steps[0]) if len(steps) else 1
    cells = np.full((y.max() // step + 1, x.max() // step + 1), np.nan)
    cells[y // step, x // step] = rows["value"].to_numpy()
    return Picture(cells, step, np.nan if radius is None else radius)


def _shown(line: Line) -> list[str]:
    return evenly(list(line.pictures), small_maps(99).across)


def _draw_line(line: Line, grid: PanelGrid, part: Any) -> None:
    shown = _shown(line)
    panels = grid.axes(part)
    for axes, block in zip(panels, shown, strict=True):
        image = _draw(axes, line.pictures[block])
        map_title(axes, grid, site_words(block))
    kind = PARTS.get(line.kind, line.kind)
    n = len(line.pictures)
    some = f"; {len(shown)} of {n} blocks" if len(shown) < n else ""
    about = f"{shorten(line.store, 28)}{kind and ', '}{kind} (n = {line.n_images}{some})"
    name_part(part, f"{about}: gradient as a share of each map's largest")
    bars_at_ends(grid, panels, image, "")  # a label is longer than the bar


def _draw(axes: Axes, picture: Picture) -> AxesImage:
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Circle

    height, width = picture.size
    largest = np.nanmax(picture.cells)
    relative: Any = (
        picture.cells / largest if largest > 0 else np.full_like(picture.cells, np.nan)
    )
    image = axes.imshow(
        np.clip(relative, FLOOR / 2, None),
        norm=LogNorm(FLOOR, 1),
        origin="upper",
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )
    # A circle that reaches beyond the image is clipped.
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    map_axes(axes)
    if not largest > 0:
        axes.text(width / 2, height / 2, "0", ha="center", va="center", color=GREY)
    else:
        whole = np.nan_to_num(picture.cells)  # squares count as whole
        along = [whole.sum(1), whole.sum(0)]
        centre = (np.average(np.arange(len(one)), weights=one) for one in along)
        y, x = ((at + 0.5) * picture.step - 0.5 for at in centre)
        axes.plot(x, y, "+", color=MARK, markersize=4, markeredgewidth=0.7)
        if np.isfinite(picture.radius):
            circle = Circle(
                (x, y), picture.radius, fill=False, edgecolor=MARK, linewidth=0.7
            )
            axes.add_patch(circle)
    return image


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
