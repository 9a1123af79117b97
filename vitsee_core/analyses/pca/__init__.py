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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from vitsee_core.analyses.pca.colour_sheets import draw_colours
from vitsee_core.analyses.pca.projection import FOREGROUND
from vitsee_core.analyses.pca.site_components import (
    METRICS,
    ComponentOptions,
    StoreComponents,
)
from vitsee_core.declaration import Analysis
from vitsee_core.figures.patch_maps.colours import CHANNELS
from vitsee_core.figures.patch_maps.photos import SHOWN, describe_sheet, shown_rows
from vitsee_core.figures.patch_maps.views import grid_sites
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
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
from vitsee_core.statistics.image_statistics import METHODS
from vitsee_core.tables.columns import SITE, with_frame_column
from vitsee_core.tables.glances import most_varied, select_evenly
from vitsee_core.tables.headlines import Answer, by_store, first_and_last
from vitsee_core.tables.results import Table
from vitsee_core.types import pl
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec

COLUMNS = (
    *SITE,
    "row",
    "col",
    "image",
    "component",
    "half_a",
    "half_b",
    "metric",
    "value",
    "std",
    "low",
    "high",
    "n_images",
    "n_examples",
)
plot = draw_colours


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
    """Return the axes of each site, and the scores of the patches of some images.

    The columns are `COLUMNS`; `component` 1 is the first axis. `explained_variance` has the 95 %
    interval over images by the jackknife, and in `half_a` and `half_b` its value on every second
    block of images and on the others; `n_examples` counts the patches. `score` has `image`, `row`
    and `col`; patches that do not count have no row. A value is NaN if all patches are alike. The
    notes hold the photographs (PNG in base64) and where maps lie on them (`sheet`), and each site's
    rotation and range of colours (`colours`).

    Memory: a D x D matrix in float64 for each of 20 blocks of images, and the scores of the images
    shown and of at most 256 others; nothing grows with the number of images. Time:
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
        execution: images, seed and parallel fit.

    Raises:
        MissingInput: a site is stored pooled only.
        SiteError: no site matches, none has a grid, or more components than channels.
        VitseeError: a store does not have an image; the foreground is unknown or empty; or the
            work does not fit the memory.

    Examples:
        >>> import vitsee
        >>> table = vitsee.pca("vit.zarr", sites="blocks.-1.out")
        >>> sorted(set(table["metric"]))
        ['axis_agreement', 'explained_variance', 'score']
        >>> table.plot().savefig("pca.png")
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
    fits: list[StoreComponents] = []
    for store, store_sites in selected.members:
        # All stores show the images of the first one.
        first_sheet = fits[0].sheet if fits else None
        image_rows = shown_rows(store, image, first_sheet, execution)
        fits.append(StoreComponents(store, store_sites, image_rows, options, execution))
    first = fits[0]
    guide_site = _reference_site(first, reference)
    # With a foreground there are two passes: axes of all patches say which patches are the
    # foreground's, whose axes are then computed anew.
    n_passes = 2 if foreground != "none" else 1
    n_reads = n_passes * sum(fit.rows.n * len(fit.sites) for fit in fits)
    products = {fit.store.label: n_passes * fit.say_cost() for fit in fits}
    # Blocks of columns: an image has a row per component and patch.
    rows: list[dict[str, Any]] = []
    colours: dict[str, dict[str, Any]] = {}
    with counting(execution.progress, n_reads, SITE_IMAGES):
        # The guide comes first, as all other sites are turned to it.
        guide = first.measure(guide_site)
        for fit in fits:
            colours[fit.store.label] = {}
            for site in fit.sites:
                measured = guide
                if (fit, site) != (first, guide_site):
                    measured = fit.measure(site)
                if align:
                    measured.align(guide)
                rows += measured.table_rows()
                colours[fit.store.label][site.name] = measured.describe()
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
        "images": {fit.store.label: fit.rows.describe() for fit in fits},
        "sheet": describe_sheet([fit.sheet for fit in fits], data),
        **selected.notes(),
    }
    layouts = [features.layout for fit in fits for features in fit.features.values()]
    return Table.concat(rows, with_frame_column(COLUMNS, layouts), notes)


def _reference_site(components: StoreComponents, name: str | None) -> SiteSpec:
    """Return the site whose colours are the reference: the named one, or the last of the store.

    Raises:
        SiteError: the name does not match exactly one of the store's chosen sites.
    """
    if name is None:
        return components.sites[-1]
    # Only sites that are mapped have axes.
    matches = [
        site for site in grid_sites(components.store, [name]) if site in components.sites
    ]
    if len(matches) != 1:
        raise SiteError(
            f"the reference {name!r} is {len(matches)} of the sites mapped of "
            f"{components.store.label}; expected one of them"
        )
    return matches[0]


def at_a_glance(table: Table) -> Table:
    """Return the rows of one photograph, in three layers of each model.

    It is the one whose patches differ most at the first model's last layer.
    """
    scores = table.frame.filter(metric="score", component=1)
    first_store = scores.filter(pl.col("store") == scores["store"][0])
    last_site = first_store.filter(pl.col("site") == first_store["site"][-1])
    image = most_varied(last_site, "image")["image"][0]
    # Rows about axes have no image.
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
