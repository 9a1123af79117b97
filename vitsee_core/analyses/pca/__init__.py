"""Principal components of patches: which patches have like features, layer by layer?

The axes of a layer are the principal components of its patch tokens over all chosen images together
(Pearson 1901), of the tokens as they are or normalised to length 1. One pass over the tokens makes
their covariance, a second one the scores of some of the images. All conventions are in the sidecar:

- sign: an axis' entry of largest magnitude is positive (as in scikit-learn's PCA from 1.5 on);
- `score`: coordinates along the axes, about the mean;
- colours: red, green and blue are the first three scores, rotated to be nearest to those of one
  reference layer (orthogonal Procrustes), so that the same things have like colours in all layers
  and models; dark to bright over median -+ 3 MAD of each layer (`patch_maps.colours`);
- foreground, if asked for: the patches on one side of the first axis, and new axes of these alone
  (Oquab et al. 2024, DINOv2, Fig. 1, where the threshold was set by hand; here it is the mean);
- cells whose middle lies beside the image (padding) do not count.

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
from vitsee_core.tables.columns import SITE, cell_columns, site_columns, with_frame_column
from vitsee_core.tables.glances import most_varied, select_evenly
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
# So many images decide ranges and rotations of colours.
MAX_SAMPLE_IMAGES = 256


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
            "Leave out patches on one side of the first component and compute those of "
            "the others anew; centre: keep the side that the middle of the images is on.",
            choices=FOREGROUND,
        ),
    ] = "none",
    fit_shown: Annotated[
        bool, Option("Components of the images shown alone.  [default: of all images]")
    ] = False,
    align: Annotated[
        bool,
        Option(
            "Turn the scores of every layer and model to be nearest to the reference's, "
            "so that colours compare.",
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
    """Return a table of the axes of each site, and of the scores of the patches that are shown.

    The columns are `COLUMNS`; `component` 1 is the first axis. `explained_variance` has the 95 %
    interval over images by the jackknife, and in `half_a` and `half_b` its value on every second
    block of images and on the others; `n_examples` counts the patches. `score` has `image`, `row`
    and `col`; patches that do not count have no row. A value is NaN if all patches are alike. The
    notes hold the photographs (PNG in base64) and where maps lie on them (`sheet`), and each site's
    rotation and range of colours (`colours`).

    Memory: a D x D matrix in float64 for each of 20 blocks of images, and the scores of the images
    shown and of at most `MAX_SAMPLE_IMAGES` others; nothing grows with the number of images. Time:
    n D^2 for n patches, twice with a foreground, and once more for the sample.

    Args:
        stores: stores with all tokens of sites with a grid; every one has the images shown.
        image: names of the images shown; by default the first ones.
        sites: patterns of the sites.
        components: the number of axes in the table, 3 or more.
        normalise: bring every token to length 1 first.
        foreground: one of `FOREGROUND`, the patches that are kept.
        fit_shown: axes of the images shown alone.
        align: turn the colours of all sites to be nearest to the reference's.
        reference: the site of the first store that the others are turned to; by default the last.
        origin: where the data is now, for the photographs.
        execution: images, seed and parallel work.

    Raises:
        MissingInput: a site is stored pooled only.
        SiteError: no site matches, none has a grid, or more components than channels.
        VitseeError: a store does not have an image; the foreground is unknown or empty; or the
            work does not fit the memory.
    """
    if foreground not in FOREGROUND:
        raise VitseeError(
            f"no foreground {foreground!r}; expected one of: {', '.join(FOREGROUND)}"
        )
    if components < CHANNELS:
        raise VitseeError(
            f"{components} components were asked for; expected 3 or more, as three make "
            "the colours"
        )
    if reference is not None and not align:
        raise VitseeError("a reference is for aligned colours: leave it out, or align")
    selected = select_each(stores, sites, grid_sites)
    options = ComponentOptions(components, normalise, foreground, fit_shown)
    works: list[StoreComponents] = []
    for store, store_sites in selected.members:
        # All stores show the images of the first one.
        first_sheet = works[0].shown if works else None
        image_rows = shown_rows(store, image, first_sheet, execution)
        works.append(StoreComponents(store, store_sites, image_rows, options, execution))
    first = works[0]
    guide_site = _reference_site(first, reference)
    passes = 2 if foreground != "none" else 1
    n_images = passes * sum(work.rows.n * len(work.sites) for work in works)
    products = {work.store.label: passes * work.say_cost() for work in works}
    rows: list[dict[str, Any]] = []
    colours: dict[str, dict[str, Any]] = {}
    with counting(execution.progress, n_images, SITE_IMAGES):
        # The guide comes first, as all other sites are turned to it.
        guide = first.measure(guide_site)
        for work in works:
            colours[work.store.label] = {}
            for site in work.sites:
                measured = guide
                if (work, site) != (first, guide_site):
                    measured = work.measure(site)
                if align:
                    measured.align(guide)
                rows += measured.parts()
                colours[work.store.label][site.name] = measured.describe()
    data = None if origin is None else origin.data
    aligned_to = None
    if align:
        aligned_to = {"store": first.store.label, "site": guide_site.name}
    notes = {
        "interval": METHODS["jackknife"],
        "std": METHODS["std"],
        "halves": "half_a, half_b: of the blocks of images 0, 2, 4, ... and 1, 3, 5, ...",
        "sign": "the entry of largest magnitude of each axis is positive",
        "normalise": normalise,
        "foreground": foreground,
        "fitted_on": "the images shown" if fit_shown else "all images",
        "aligned_to": aligned_to,
        "colours": colours,
        "colour_range": "median -+ 3 MAD of each turned score",
        "multiply_adds": products,
        "seed": execution.seed,
        "images": {work.store.label: work.rows.describe() for work in works},
        "sheet": describe_sheet([work.shown for work in works], data),
        **selected.notes(),
    }
    layouts = [features.layout for work in works for features in work.features.values()]
    return Table.concat(rows, with_frame_column(COLUMNS, layouts), notes)


def _reference_site(store_work: StoreComponents, name: str | None) -> SiteSpec:
    """Return the site whose colours are the reference: the named one, or the last of the store.

    Raises:
        SiteError: the name does not match exactly one of the store's chosen sites.
    """
    if name is None:
        return store_work.sites[-1]
    matches = [
        site for site in grid_sites(store_work.store, [name]) if site in store_work.sites
    ]
    if len(matches) != 1:
        raise SiteError(
            f"the reference {name!r} is {len(matches)} of the sites mapped of "
            f"{store_work.store.label}; expected one of them"
        )
    return matches[0]


@dataclass(frozen=True)
class ComponentOptions:
    """How axes are fitted: the options of `run` that each site needs."""

    components: int
    normalise: bool
    foreground: str
    fit_shown: bool


class StoreComponents:
    """The work on one store: fits axes for each of its sites.

    Attributes:
        rows: the images that axes are fitted on.
        blocks: the blocks of images that the jackknife leaves out one by one.
        shown: the images shown, with where their patches lie.
        features: site -> its patches.
        sample: rows of the images whose scores decide the colours, and of those shown; ascending.
    """

    def __init__(
        self,
        store: Store,
        sites: list[SiteSpec],
        shown: list[int],
        options: ComponentOptions,
        execution: Execution,
    ) -> None:
        self.store = store
        self.sites = sites
        self.options = options
        self.execution = execution
        self.rows = execution.rows(store)
        if options.fit_shown:
            mask = np.zeros(store.n_images, bool)
            mask[shown] = True
            self.rows = Rows(mask, 0, "those shown")
        is_counted = self.rows.mask & store.valid
        self.blocks = Blocks.of(store, is_counted, execution.seed)
        self.shown = SheetImages(store, View.of(store, sites), shown, sites)
        self.features = {
            site.name: choose_features(store, site, "patches", partial=True)
            for site in sites
        }
        for features in self.features.values():
            self._require_possible(features)
        row_indices = np.flatnonzero(is_counted)
        # Images in the order of their classes would make a sample of the first classes alone.
        if not store.shuffled:
            rng = np.random.default_rng(execution.seed)
            row_indices = row_indices[rng.permutation(len(row_indices))]
        self.sample: Integers = np.union1d(
            row_indices[:MAX_SAMPLE_IMAGES], np.array(shown, np.int64)
        )

    def _require_possible(self, features: SiteFeatures) -> None:
        """Refuse, before any work, more components than channels and more than fits the memory.

        Raises:
            SiteError: the site has fewer channels than components were asked for.
            VitseeError: the second moments do not fit the memory.
        """
        label = self.store.label
        dim = features.dim
        name = features.site.name
        if self.options.components > dim:
            raise SiteError(
                f"{name} of {label} has {dim} channels and so no more components; "
                f"{self.options.components} were asked for"
            )
        # A float64 matrix per block, their sum, and what the eigendecomposition takes.
        need = 8 * dim**2 * (self.blocks.n + 4)
        if need > self.execution.budget:
            raise VitseeError(
                f"the axes of {name} of {label} ({dim} channels) take "
                f"{human_bytes(need)} of memory; --memory is "
                f"{human_bytes(self.execution.budget)}"
            )

    def say_cost(self) -> float:
        """Log what a pass over all sites costs; return its multiply-adds."""
        return say_cost(list(self.features.values()), self.rows.n)

    def measure(self, site: SiteSpec) -> SiteComponents:
        """Return the axes of a site and the scores of the sample."""
        features = self.features[site.name]
        view = self.shown.view
        layout = self.store.site(site.name).layout
        assert layout is not None
        k = self.options.components
        patches = Patches(view, layout, self.options.normalise)
        sums = self._second_moments(features, patches)
        axes = principal_axes(total(sums), k)
        projected = project(features, patches, axes, self.sample, self.execution)
        side = None
        if self.options.foreground != "none":
            # DINOv2, Fig. 1: the first axis of all patches tells the object from the background,
            # and the axes of the object's patches alone are then computed anew.
            side = SIDES.get(self.options.foreground)
            if side is None:
                side = centre_side(projected, view, layout)
            patches = replace(patches, on=axes, side=side)
            sums = self._second_moments(features, patches)
            axes = principal_axes(total(sums), k)
            projected = project(features, patches, axes, self.sample, self.execution)
        return SiteComponents(self, site, layout, axes, projected, sums=sums, side=side)

    def _second_moments(
        self, features: SiteFeatures, patches: Patches
    ) -> list[CovarianceSums]:
        """Return the sums of each block of images, over the patches that count.

        Raises:
            VitseeError: fewer than two patches count.
        """
        sums = block_sums(
            features, self.rows, self.blocks.of_rows, self.execution, patches
        )
        n = sum(block.n for block in sums)
        if n < 2:
            raise VitseeError(
                f"{features.site.name} of {self.store.label} has {n} patches that count: "
                "no axes"
            )
        return sums


class SiteComponents:
    """The axes of one site, the scores of the sample, and their colours.

    Args:
        work: the site's store.
        site: the site.
        layout: where its tokens lie.
        axes: the axes of all patches that count.
        projected: the scores of the sample.
        sums: second moments of each block of images.
        side: the sign of the foreground's first scores, None without a foreground.
    """

    def __init__(
        self,
        work: StoreComponents,
        site: SiteSpec,
        layout: TokenLayout,
        axes: PrincipalAxes,
        projected: Projected,
        *,
        sums: Sequence[CovarianceSums],
        side: int | None,
    ) -> None:
        self.work = work
        self.site = site
        self.layout = layout
        self.axes = axes
        self.projected = projected
        self.side = side
        # Now, so that no site's second moments outlive it.
        n_images = int((work.rows.mask & work.store.valid).sum())
        self.axis_rows = axis_rows(sums, axes, n_images, work.execution.jobs)
        self.colours = Colours.of(projected.counted[:, :CHANNELS])

    @cached_property
    def ids(self) -> list[str]:
        """The names of the sample's images."""
        return [str(name) for name in self.work.store.samples.id[self.projected.rows]]

    def align(self, guide: SiteComponents) -> None:
        """Rotate the colours to those of another site, by the patches of images in both samples."""
        if guide is self:
            return
        view = self.work.shown.view
        guide_view = guide.work.shown.view
        rows = dict(zip(self.ids, self.projected.rows.tolist(), strict=True))
        matched_scores = []
        guide_rows = guide.projected.rows.tolist()
        for name, guide_row in zip(guide.ids, guide_rows, strict=True):
            if name not in rows:
                continue
            row = rows[name]
            # The guide's patches that lie where this site's patches lie on the photograph.
            cells = view.cells_like(self.layout, row, guide_view, guide.layout, guide_row)
            scores = self.projected.of(row)[:, :CHANNELS]
            guide_scores = guide.projected.of(guide_row)[:, :CHANNELS]
            is_counted = ~np.isnan(scores[:, 0])
            matched_scores.append(matched(scores, is_counted, cells, guide_scores))
        own_scores = np.concatenate([pair[0] for pair in matched_scores])
        target_scores = np.concatenate([pair[1] for pair in matched_scores])
        n_matched = len(own_scores)
        if n_matched < FEWEST:
            log.warning(
                "%s: colours of %s are not aligned: %d patches in common with the "
                "reference",
                self.work.store.label,
                self.site.name,
                n_matched,
            )
            return
        rotation = rotation_to(own_scores, target_scores)
        counted = self.projected.counted[:, :CHANNELS]
        self.colours = Colours.of(counted, rotation, n_matched)

    def describe(self) -> dict[str, Any]:
        """Return rotation and range of the colours, and the side of the foreground, as a note."""
        note = self.colours.describe()
        if self.side is not None:
            note["foreground_side"] = self.side
        return note

    def parts(self) -> list[dict[str, Any]]:
        """Return rows about the axes, then for each image shown a block of rows: a score per
        component and patch."""
        about_site = site_columns(self.work.store, self.site)
        blocks = [{**about_site, **row} for row in self.axis_rows]
        for image_row in self.work.shown.rows:
            # (cells, k)
            scores = self.projected.of(image_row)
            cells = np.flatnonzero(~np.isnan(scores[:, 0]))
            k = scores.shape[1]
            blocks.append(
                {
                    **about_site,
                    "image": str(self.work.store.samples.id[image_row]),
                    # Component by component, as `scores.T` is laid out.
                    **cell_columns(self.layout, np.tile(cells, k)),
                    "component": np.repeat(np.arange(1, k + 1), len(cells)),
                    "metric": METRICS[-1],
                    "value": scores[cells].T.ravel(),
                }
            )
        return blocks


def at_a_glance(table: Table) -> Table:
    """Return the photograph whose patches differ most at the first model's last layer, in the
    colours of three layers of each model."""
    scores = table.frame.filter(metric="score", component=1)
    first_store = scores.filter(pl.col("store") == scores["store"][0])
    last_site = first_store.filter(pl.col("site") == first_store["site"][-1])
    image = most_varied(last_site, "image")["image"][0]
    is_kept = pl.col("image").is_null() | (pl.col("image") == image)
    return select_evenly(table.filter(is_kept), site=3)


def headline(table: Table) -> list[Answer]:
    """Return per store the first component's share at the first and at the last site."""
    return [
        (store, f"share of the first component: {first_and_last(rows)}")
        for store, rows in by_store(table, metric="explained_variance", component=1)
    ]


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Show patch tokens as colours: their principal components.

    The first three principal components of each layer's patches, over all images, as
    red, green and blue: patches of like colours have like features. Layers and models
    on one sheet beside the photographs, in colours that compare (orthogonal
    Procrustes), laid on what each model saw.

      $ vitsee pca b16.zarr --png pca.png > pca.csv
      $ vitsee pca mae=a.zarr dino=b.zarr --sites depth:0.5 --sites last --png both.png > both.csv
      $ vitsee pca b16.zarr --image cat.jpg --foreground centre --png cat.png > cat.csv

    One pass over all patches (n D^2 multiply-adds a site) and one over some images;
    memory does not grow with the images. --fit-shown: as in demonstrations of DINOv2,
    of a few images only.

    Metrics: explained_variance; axis_agreement: absolute cosine of the halves' axes;
    score. What makes colours of scores is in the sidecar. Of clips scores have a column
    frame, the patch's place in time.
    """,
    needs=("grid",),
    reading=(
        "The first three principal components of each layer's patches as red, green and "
        "blue beside the photographs: like colours are like features, in a layer and, as "
        "layers are turned to one reference, roughly across layers and models. The "
        "percentage is the variance that these three explain: where it is low, patches "
        "of one colour may still differ."
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
