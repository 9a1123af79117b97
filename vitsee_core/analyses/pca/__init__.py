"""Principal components of patches: which patches have like features, layer by layer?

The axes of a layer are those of its patch tokens over all chosen images together (Pearson 1901): as
they are, or normalised to length 1 each. One pass over the tokens makes their covariance, a second
one the scores of some of the images. Conventions, all of them in the sidecar:

- sign: an axis' entry of largest magnitude is positive (as scikit-learn's PCA from 1.5 on);
- `score`: coordinates along the axes, about the mean;
- colours: red, green, blue are the first three scores, turned to be nearest to those of one
  reference layer (orthogonal Procrustes), so that the same things have like colours in all layers
  and models; dark to bright over median -+ 3 MAD of each layer; see `patch_maps.colours`;
- foreground, if asked for: patches on one side of the first axis, and new axes of these alone
  (Oquab et al. 2024, DINOv2, Fig. 1, where the threshold was set by hand; here it is the mean);
- cells whose middle is beside the image (padding) do not count.

`explained_variance` is an axis' share of the variance of the patches; `axis_agreement` the absolute
cosine of an axis between two halves of the images: low where two axes explain about equally much
and so mix, or where there are too few images.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.pca.colour_sheets import draw_colours
from vitsee_core.analyses.pca.projection import (
    FOREGROUND,
    OF_AXES,
    SIDES,
    Patches,
    Projected,
    axis_rows,
    centre_side,
    project,
)
from vitsee_core.declaration import Analysis
from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.figures.patch_maps.colours import (
    CHANNELS,
    FEWEST,
    Colours,
    matched,
    rotation_to,
)
from vitsee_core.figures.patch_maps.photos import (
    SHOWN,
    SheetImages,
    describe_sheet,
    shown_rows,
)
from vitsee_core.figures.patch_maps.views import View, grid_sites
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.options import (
    KNOWLEDGE,
    SITES,
    Gather,
    Offers,
    Option,
    image_option,
)
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.covariance import (
    CovarianceSums,
    PrincipalAxes,
    block_sums,
    principal_axes,
    say_cost,
    total,
)
from vitsee_core.statistics.image_statistics import METHODS
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.tables.columns import SITE, cell_columns, in_time, site_columns
from vitsee_core.tables.glances import most_varied, some_of
from vitsee_core.tables.headlines import Answer, by_store, first_and_last
from vitsee_core.tables.results import Table
from vitsee_core.types import Integers, pl
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)


METRICS = (*OF_AXES, "score")
COLUMNS = (
    *(*SITE, "row", "col", "image", "component", "half_a", "half_b"),
    *("metric", "value", "std", "low", "high", "n_images", "n_examples"),
)
plot = draw_colours
SAMPLE = 256  # images whose scores decide ranges and rotations of colours


@analysis
def run(
    *stores: Store,
    image: Annotated[Sequence[str], image_option("Show", f"the first {SHOWN}")] = (),
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    components: Annotated[
        int,
        Option(
            "How many components the table has; the picture shows the first three.",
            metavar="K",
            least=3,
        ),
    ] = CHANNELS,
    normalise: Annotated[bool, Option("Bring every token to length 1 first.")] = False,
    foreground: Annotated[
        str,
        Option(
            "Leave out patches on one side of the first component and compute those of the others "
            "anew; centre: keep the side that the middle of the images is on.",
            choices=FOREGROUND,
        ),
    ] = "none",
    fit_shown: Annotated[
        bool, Option("Components of the images shown alone.  [default: of all images]")
    ] = False,
    align: Annotated[
        bool,
        Option(
            "Turn the scores of every layer and model to be nearest to the reference's, so that "
            "colours compare.",
            "--align/--no-align",
        ),
    ] = True,
    reference: Annotated[
        str | None,
        Option(
            "The site of the first store that the others are turned to.",
            metavar="SITE",
            default="the last one",
        ),
    ] = None,
    origin: Annotated[Provenance | None, Gather(Provenance, ("data",))] = None,
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs")
    ] = DEFAULT,
) -> Table:
    """Rows about the axes of each site, and about each patch of the images that are shown.

    Columns: see `COLUMNS`; `component`: 1 the first axis.
    `explained_variance` with `half_a`, `half_b` (the value of every second block of images, and of
    the others) and the 95 % interval over images by the jackknife; `n_examples` the patches.
    `score` has `image`, `row`, `col`; patches that do not count have no row.
    NaN: all patches alike. The notes hold the photographs (PNG in base64) and where maps lie on
    them, each site's rotation and range of colours, under `sheet`, `colours`.

    Memory: a D x D matrix in float64 for each of 20 blocks of images, and the scores of at most
    `SAMPLE` images and those shown; nothing grows with the number of images. Time: n D^2 for n
    patches, twice with a foreground, once more for `SAMPLE` images each.

    Args:
        stores: with all tokens of sites with a grid; every one has the images that are shown.
        origin: where the data is now, for the photographs.

    Raises:
        MissingInput: a site is stored pooled only.
        SiteError: no such site, none with a grid, more components than channels.
        VitseeError: no such image, in one of the stores; unknown foreground, or none found; or
            more than fits the memory.
    """
    if foreground not in FOREGROUND:
        raise VitseeError(
            f"no foreground {foreground!r}; expected one of: {', '.join(FOREGROUND)}"
        )
    if components < CHANNELS:
        raise VitseeError(
            f"{components} components were asked for; expected 3 or more, as three make the colours"
        )
    if reference is not None and not align:
        raise VitseeError("a reference is for aligned colours: leave it out, or align")
    selected = select_each(stores, sites, grid_sites)
    choice = _Choice(components, normalise, foreground, fit_shown)
    parts: list[_Store] = []
    for store, chosen in selected.members:
        first = parts[0] if parts else None
        shown = shown_rows(
            store, image, None if first is None else first.shown, execution
        )
        parts.append(_Store(store, chosen, shown, choice, execution))
    first = parts[0]
    lead = _reference(first, reference)
    passes = 2 if foreground != "none" else 1
    count = passes * sum(part.rows.n * len(part.sites) for part in parts)
    products = {p.store.label: passes * p.say_cost() for p in parts}
    with counting(execution.progress, count, SITE_IMAGES):
        guide = first.measure(lead)
        rows: list[dict[str, Any]] = []
        colours: dict[str, dict[str, Any]] = {}
        for part in parts:
            own = colours[part.store.label] = {}
            for site in part.sites:
                of_site = guide if (part, site) == (first, lead) else part.measure(site)
                if align:
                    of_site.align(guide)
                rows += of_site.parts()
                own[site.name] = of_site.describe()
    data = None if origin is None else origin.data
    notes = {
        "interval": METHODS["jackknife"],
        "std": METHODS["std"],
        "halves": "half_a, half_b: of the blocks of images 0, 2, 4, ... and 1, 3, 5, ...",
        "sign": "the entry of largest magnitude of each axis is positive",
        "normalise": normalise,
        "foreground": foreground,
        "fitted_on": "the images shown" if fit_shown else "all images",
        "aligned_to": {"store": first.store.label, "site": lead.name} if align else None,
        "colours": colours,
        "colour_range": "median -+ 3 MAD of each turned score",
        "multiply_adds": products,
        "seed": execution.seed,
        "images": {part.store.label: part.rows.describe() for part in parts},
        "sheet": describe_sheet([part.shown for part in parts], data),
        **selected.notes(),
    }
    layouts = [features.layout for part in parts for features in part.features.values()]
    return Table.concat(rows, in_time(COLUMNS, layouts), notes)


def _reference(first: _Store, name: str | None) -> SiteSpec:
    """The site whose colours are the reference. Raises SiteError: not exactly one site of the first
    store."""
    if name is None:
        return first.sites[-1]
    found = [site for site in grid_sites(first.store, [name]) if site in first.sites]
    if len(found) != 1:
        raise SiteError(
            f"the reference {name!r} is {len(found)} of the sites mapped of {first.store.label}; "
            "expected one of them"
        )
    return found[0]


@dataclass(frozen=True)
class _Choice:
    components: int
    normalise: bool
    foreground: str
    fit_shown: bool


class _Store:
    """The sites of one store, as they are fitted."""

    def __init__(
        self,
        store: Store,
        sites: list[SiteSpec],
        shown: list[int],
        choice: _Choice,
        execution: Execution,
    ) -> None:
        self.store = store
        self.sites = sites
        self.choice = choice
        self.execution = execution
        self.rows = execution.rows(store)
        if choice.fit_shown:
            mask = np.zeros(store.n_images, bool)
            mask[shown] = True
            self.rows = Rows(mask, 0, "those shown")
        counted = self.rows.mask & store.valid
        self.blocks = Blocks.of(store, counted, execution.seed)
        self.shown = SheetImages(store, View.of(store, sites), shown, sites)
        self.features = {
            site.name: choose_features(store, site, "patches", partial=True)
            for site in sites
        }
        for features in self.features.values():
            self._check(features)
        own = np.flatnonzero(counted)
        if not store.shuffled:
            own = own[np.random.default_rng(execution.seed).permutation(len(own))]
        self.sample: Integers = np.union1d(own[:SAMPLE], np.array(shown, np.int64))

    def _check(self, features: SiteFeatures) -> None:
        """Refuse, before any work, what is not available."""
        label = self.store.label
        dim = features.dim
        name = features.site.name
        if self.choice.components > dim:
            raise SiteError(
                f"{name} of {label} has {dim} channels and so no more components; "
                f"{self.choice.components} were asked for"
            )
        need = 8 * dim**2 * (self.blocks.n + 4)
        if need > self.execution.budget:
            raise VitseeError(
                f"the axes of {name} of {label} ({dim} channels) take {human_bytes(need)} of "
                f"memory; --memory is {human_bytes(self.execution.budget)}"
            )

    def say_cost(self) -> float:
        return say_cost(list(self.features.values()), self.rows.n)

    def measure(self, site: SiteSpec) -> _Site:
        """The axes of a site and the scores of the sample."""
        features = self.features[site.name]
        use = self.execution
        view = self.shown.view
        layout = self.store.site(site.name).layout
        assert layout is not None
        patches = Patches(view, layout, self.choice.normalise)
        sums = self._sums(features, patches)
        axes = principal_axes(total(sums), self.choice.components)
        found = project(features, patches, axes, self.sample, use)
        side = None
        if self.choice.foreground != "none":
            side = SIDES.get(self.choice.foreground) or centre_side(found, view, layout)
            patches = replace(patches, on=axes, side=side)
            sums = self._sums(features, patches)
            axes = principal_axes(total(sums), self.choice.components)
            found = project(features, patches, axes, self.sample, use)
        return _Site(self, site, layout, sums, axes, found, side)

    def _sums(self, features: SiteFeatures, patches: Patches) -> list[CovarianceSums]:
        found = block_sums(
            features, self.rows, self.blocks.of_rows, self.execution, patches
        )
        n = sum(part.n for part in found)
        if n < 2:
            raise VitseeError(
                f"{features.site.name} of {self.store.label} has {n} patches that count: no axes"
            )
        return found


class _Site:
    """Measurements of one site. side: of the foreground, if there is one."""

    def __init__(
        self,
        part: _Store,
        site: SiteSpec,
        layout: TokenLayout,
        sums: Sequence[CovarianceSums],
        axes: PrincipalAxes,
        found: Projected,
        side: int | None,
    ) -> None:
        self.part = part
        self.site = site
        self.layout = layout
        self.axes = axes
        self.found = found
        self.side = side
        # Now, so that no site's second moments outlive it.
        counted = part.rows.mask & part.store.valid
        self.of_axes = axis_rows(sums, axes, int(counted.sum()), part.execution.jobs)
        self.colours = Colours.of(found.counted[:, :CHANNELS])

    @cached_property
    def ids(self) -> list[str]:
        return [str(name) for name in self.part.store.samples.id[self.found.rows]]

    def align(self, guide: _Site) -> None:
        """Rotate the colours to those of another site, by the patches of the images of both."""
        if guide is self:
            return
        rows = dict(zip(self.ids, self.found.rows.tolist(), strict=True))
        pairs = []
        for name, other in zip(guide.ids, guide.found.rows.tolist(), strict=True):
            if name not in rows:
                continue
            view = self.part.shown.view
            guides = guide.part.shown.view
            at = view.cells_like(self.layout, rows[name], guides, guide.layout, other)
            own = self.found.of(rows[name])[:, :CHANNELS]
            keep = ~np.isnan(own[:, 0])
            pairs.append(matched(own, keep, at, guide.found.of(other)[:, :CHANNELS]))
        own, lead = (np.concatenate(some) for some in zip(*pairs, strict=True))
        if len(own) < FEWEST:
            log.warning(
                "%s: colours of %s are not aligned: %d patches in common with the reference",
                *(self.part.store.label, self.site.name, len(own)),
            )
            return
        scores = self.found.counted[:, :CHANNELS]
        self.colours = Colours.of(scores, rotation_to(own, lead), len(own))

    def describe(self) -> dict[str, Any]:
        side = {} if self.side is None else {"foreground_side": self.side}
        return self.colours.describe() | side

    def parts(self) -> list[dict[str, Any]]:
        """Rows about the axes, and a row per component and patch of each image that is shown."""
        place = site_columns(self.part.store, self.site)
        parts = [place | row for row in self.of_axes]
        for image in self.part.shown.rows:
            scores = self.found.of(image)
            cells = np.flatnonzero(~np.isnan(scores[:, 0]))
            n = len(cells)
            k = scores.shape[1]
            about: dict[str, Any] = {"image": str(self.part.store.samples.id[image])}
            about |= cell_columns(self.layout, np.tile(cells, k))
            component = np.repeat(np.arange(1, k + 1), n)
            of_patches = {"component": component, "metric": METRICS[-1]}
            parts.append(
                {**place, **about, **of_patches, "value": scores[cells].T.ravel()}
            )
        return parts


def at_a_glance(table: Table) -> Table:
    """The photograph whose patches differ most at the first model's last layer, in the colours of
    three layers of each model."""
    scores = table.frame.filter(metric="score", component=1)
    first = scores.filter(pl.col("store") == scores["store"][0])
    image = most_varied(first.filter(pl.col("site") == first["site"][-1]), "image")[
        "image"
    ][0]
    return some_of(
        table.filter(pl.col("image").is_null() | (pl.col("image") == image)), site=3
    )


def headline(table: Table) -> list[Answer]:
    """The first component's share at the first and at the last site."""
    return [
        (store, f"share of the first component: {first_and_last(rows)}")
        for store, rows in by_store(table, metric="explained_variance", component=1)
    ]


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Show patch tokens as colours: their principal components.

    The first three principal components of each layer's patches, over all images, as red, green
    and blue: patches of like colours have like features. Layers and models on one sheet beside
    the photographs, in colours that compare (orthogonal Procrustes), laid on what each model
    saw.

      $ vitsee pca b16.zarr --png pca.png > pca.csv
      $ vitsee pca mae=a.zarr dino=b.zarr --sites depth:0.5 --sites last --png both.png > both.csv
      $ vitsee pca b16.zarr --image cat.jpg --foreground centre --png cat.png > cat.csv

    One pass over all patches (n D^2 multiply-adds a site) and one over some images; memory does
    not grow with the images. --fit-shown: as in demonstrations of DINOv2, of a few images only.

    Metrics: explained_variance; axis_agreement: absolute cosine of the halves' axes; score.
    What makes colours of scores is in the sidecar. Of clips scores have a column frame, the
    patch's place in time.
    """,
    needs=("grid",),
    reading=(
        "The first three principal components of each layer's patches as red, green and blue "
        "beside the photographs: like colours are like features, in a layer and, as layers are "
        "turned to one reference, roughly across layers and models. The percentage is the "
        "variance that these three explain: where it is low, patches of one colour may still "
        "differ."
    ),
    source="Oquab et al. 2024 (DINOv2), Fig. 1; Pearson 1901; Schönemann 1966",
    columns=COLUMNS,
    meanings={"half_b": "explained variance of two halves of the images"},
    metrics=METRICS,
    run=run,
    plot=plot,
    headline=headline,
    at_a_glance=at_a_glance,
    glance_metric="",
)
