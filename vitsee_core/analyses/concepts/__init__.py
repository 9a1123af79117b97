"""Concepts: into which recurring patterns do a layer's patches fall?

A dictionary of K directions is fitted to the patch tokens of all chosen images, by scikit-learn's
minibatch solvers, and every patch is encoded by it (see `vitsee_core.sae`):

    kmeans   MiniBatchKMeans from k-means on the first batch; a patch is its nearest centre
    nmf      MiniBatchNMF, x ~ z W with z, W >= 0; patches must be >= 0, as CRAFT's are, which come
             from a ReLU (Fel et al. 2023); `clamp` applies that ReLU, and all below is of max(x, 0)
    pca      IncrementalPCA, about the mean

    r2          1 - |x - x'|^2 / |x - mean|^2, summed over patches and channels
    stability   mean cosine of the concepts of two halves of the images, fitted apart and matched
                one to one (Hungarian assignment); k-means' centres about the mean of the patches,
                principal axes up to their sign
    purity      (1 / n) sum over concepts of the most patches of images of one class, each patch
                counted at its concept with the largest code (in magnitude)
    share       a concept's share of the patches that have a code
    activation  of a concept's strongest patches: the code, of kmeans minus the squared distance

Halves are every second block of images of the jackknife. Chance is beside it: `shuffled` stability
permutes the channels of one half's concepts, `shuffled` purity the images' labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.concepts.figure import make_crops, plot
from vitsee_core.analyses.concepts.fitting import (
    METHODS,
    ConceptSums,
    ConceptTask,
    FittedDictionaries,
    SolverOptions,
    assign_halves,
    fit,
    matched_cosine,
)
from vitsee_core.declaration import Analysis
from vitsee_core.features import choose_features
from vitsee_core.figures.patch_maps.views import grid_sites
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.lanes import one_blas_thread
from vitsee_core.runtime.options import (
    KNOWLEDGE,
    Gather,
    Offers,
    Option,
    PythonOnly,
    metrics_option,
    sites_option,
)
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.sae.dictionary_files import save_dictionary
from vitsee_core.statistics.jackknife import Blocks, jackknife_cells
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.tables.columns import (
    REPLICATES,
    SITE,
    cell_columns,
    site_columns,
    with_frame_column,
)
from vitsee_core.tables.files import check_new_files
from vitsee_core.tables.glances import select_evenly
from vitsee_core.tables.headlines import Answer, by_store, measured, picked
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.types import Integers, pl
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from vitsee_core.features import SiteFeatures
    from vitsee_stores import SiteSpec

__all__ = ["COLUMNS", "METRICS", "plot", "run"]

COLUMNS = (
    *(*SITE, "row", "col", "image", "method", "k", "concept"),
    *("metric", "value", "std", "low", "high", "n_images", "n_examples", "baseline"),
)
METRICS = ("r2", "stability", "purity")  # one value for each dictionary
CONCEPT_METRICS = ("share", "activation")  # of each concept, always in the table
SHUFFLED = "shuffled"
N_AT_A_GLANCE = 4  # concepts on a card of the report
MAX_SEED = 2**32 - 1  # scikit-learn's random_state is 32 bits


@analysis
def run(
    *stores: Store,
    method: Annotated[str, Option("The dictionary.", choices=METHODS)] = "kmeans",
    k: Annotated[int, Option("Number of concepts.", metavar="K", least=1)] = 16,
    sites: Annotated[
        Sequence[str], sites_option("the last of blocks with several patches")
    ] = (),
    epochs: Annotated[
        int, Option("Passes over the patches, of kmeans and nmf; pca takes one.", least=1)
    ] = 2,
    clamp: Annotated[
        bool, Option("Take negative numbers as 0 first, as a ReLU does.  [default: no]")
    ] = False,
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            METRICS,
            "all that can be had",
            "What is measured of a dictionary, beside its concepts' shares and "
            "patches; purity needs labels.",
        ),
    ] = (),
    top: Annotated[
        int, Option("Patches shown of each concept.", metavar="N", least=1)
    ] = 6,
    save: Annotated[
        Path | None,
        Option(
            "Write the dictionary, for vitsee encode; of one store and site.",
            metavar="FILE.safetensors",
            default="none",
        ),
    ] = None,
    force: Annotated[bool, PythonOnly("the command has --force of all files")] = False,
    origin: Annotated[Provenance | None, Gather(Provenance, ("data",))] = None,
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs")
    ] = DEFAULT,
) -> Table:
    """Return rows about each site's dictionary, its concepts and their strongest patches.

    Columns: see `COLUMNS`. `r2`, `stability`, and `purity` where there are labels, the latter two
    with `baseline` `shuffled` too; `share` of each `concept`; `activation` of its `top` patches,
    with `image`, `row` and `col`. The intervals of r2 and purity are over images (jackknife, the
    dictionary held fixed); stability is one number of one pair of halves and has none. NaN: patches
    are all alike. The notes hold crops of the photographs (pictures in base64), under `crops`.

    Memory: slabs of one site, and at most 2 x 4,096 patches (32 per concept if that is more) of
    each of three fits. Time: K D per patch and pass, for nmf times its iterations.

    Args:
        stores: with all tokens of sites with a grid.
        force: whether `save` may replace a file.
        origin: where the data is now, for the photographs.

    Raises:
        MissingInput: a site is stored pooled only.
        SiteError: no such site, none with a grid, or more axes than channels.
        VitseeError: negative numbers in nmf without `clamp`, fewer patches than concepts, a
            dictionary of several sites to save, or a file that exists, without `force`.

    Examples:
        >>> import vitsee
        >>> table = vitsee.concepts("vit.zarr", sites="blocks.-1.out", k=4)
        >>> sorted(set(table["metric"]))
        ['activation', 'purity', 'r2', 'share', 'stability']
    """
    _check_options(method, k, epochs, top, execution.seed)
    # Rows about concepts are always in the table: the figure is made of them.
    row_metrics = {
        *select_metrics(metrics or METRICS, METRICS, "concepts"),
        *CONCEPT_METRICS,
    }
    options = SolverOptions(method, k, epochs, clamp, execution.seed)
    select = grid_sites if sites else _select_last_grid_site
    selection = select_each(stores, sites or ("blocks",), select)
    all_features = [
        _choose_patches(store, site, options)
        for store, store_sites in selection.members
        for site in store_sites
    ]
    if save is not None:
        _check_save(save, n_sites=len(all_features), force=force)
    data = None if origin is None else origin.data
    # One choice of blocks for all sites of a store, so that their intervals compare.
    blocks = {store.label: _make_blocks(store, execution) for store in selection.stores}
    n_images = sum(
        int((blocks[features.store.label].of_rows >= 0).sum())
        for features in all_features
    )
    rows: list[dict[str, Any]] = []
    crops: dict[str, Any] = {}  # store -> site -> concept -> encoded pictures
    # Each pass of the fit and the one that measures go over all images.
    with counting(execution.progress, n_images * (options.n_passes + 1)):
        for features in all_features:
            store = features.store
            site = features.site
            fitted, sums = _fit_and_measure(
                features, blocks[store.label], options, top, execution
            )
            cells = site_columns(store, site)
            cells |= {"method": method, "k": k, "n_examples": int(sums.n.sum())}
            for row in _site_rows(features, fitted, sums, options.seed):
                if row["metric"] in row_metrics:
                    rows.append(cells | row)
            site_crops = make_crops(store, site, sums.top.rows, sums.top.cells, data)
            crops.setdefault(store.label, {})[site.name] = {
                str(concept): pictures for concept, pictures in enumerate(site_crops)
            }
            if save is not None:
                save_dictionary(fitted.full, Path(save), force=force)
    notes = {
        "method": method,
        "clamp": clamp,
        "epochs": options.n_passes,
        "seed": execution.seed,
        "interval": "jackknife over blocks of images, the dictionary held fixed",
        "halves": "every second block of images of the jackknife",
        REPLICATES: {label: blocks[label].describe() for label in blocks},
        "images": {
            store.label: execution.rows(store).describe() for store in selection.stores
        },
        "crops": crops,
        **selection.notes(),
    }
    columns = with_frame_column(COLUMNS, [features.layout for features in all_features])
    return Table.concat(rows, columns, notes)


def at_a_glance(table: Table) -> Table:
    """Return the rows about the most frequent concepts of the first store and site."""
    site_table = select_evenly(table, store=1, site=1)
    shares = site_table.frame.filter(metric="share").sort(
        "value", descending=True, maintain_order=True
    )
    # Their strongest patches, beside their shares.
    frequent = shares["concept"][:N_AT_A_GLANCE]
    return site_table.filter(pl.col("concept").is_in(frequent.implode()))


def headline(table: Table) -> list[Answer]:
    """Return, for each store, what the last site's concepts explain and how stable they are."""
    answers = []
    for store, r2_rows in by_store(table, metric="r2"):
        last = len(r2_rows) - 1
        site = str(r2_rows["site"][last])
        k = r2_rows["k"][last]
        text = f"{k} concepts of {site}: r2 {measured(r2_rows, last)}"
        stability = picked(
            table, store=store, site=site, metric="stability", baseline=None
        )
        if len(stability):
            text += f", stability {measured(stability)}"
        answers.append((store, text))
    return answers


def _check_options(method: str, k: int, epochs: int, top: int, seed: int) -> None:
    """Raise VitseeError for an unknown method, a number below 1, or a seed above MAX_SEED."""
    if method not in METHODS:
        raise VitseeError(f"no method {method!r}; expected {', '.join(METHODS)}")
    if min(k, epochs, top) < 1:
        raise VitseeError(
            f"k is {k}, epochs {epochs}, top {top}; expected 1 or more of each"
        )
    if seed > MAX_SEED:
        raise VitseeError(f"the seed is {seed}; scikit-learn takes 0 to {MAX_SEED}")


def _check_save(path: Path, n_sites: int, *, force: bool) -> None:
    """Raise VitseeError if the dictionary cannot be saved there, before any work."""
    if n_sites != 1:
        raise VitseeError(
            f"--save takes the dictionary of one site; {n_sites} are chosen"
        )
    if Path(path).suffix != ".safetensors":
        raise VitseeError(f"--save {path}; expected a name that ends in .safetensors")
    check_new_files([Path(path)], force=force)


def _select_last_grid_site(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """Select the deepest of the sites with several patches."""
    return grid_sites(store, patterns)[-1:]


def _choose_patches(store: Store, site: SiteSpec, options: SolverOptions) -> SiteFeatures:
    """Return the reader of a site's patch tokens.

    Raises:
        SiteError: more principal components than channels.
    """
    features = choose_features(store, site, "patches")
    if options.method == "pca" and options.k > features.dim:
        raise SiteError(
            f"{site.name} of {store.label} has {features.dim} channels and so "
            f"no more axes; --k {options.k} were asked for"
        )
    return features


def _make_blocks(store: Store, execution: Execution) -> Blocks:
    """Return the jackknife's blocks of a store's images, at least two.

    Raises:
        VitseeError: one image, so that there are no two halves.
    """
    mask = execution.rows(store).mask & store.valid
    blocks = Blocks.of(store, mask, execution.seed)
    if blocks.n < 2:
        raise VitseeError(
            f"{store.label} has one image that counts; expected 2 or more, for halves"
        )
    return blocks


def _fit_and_measure(
    features: SiteFeatures,
    blocks: Blocks,
    options: SolverOptions,
    top: int,
    execution: Execution,
) -> tuple[FittedDictionaries, ConceptSums]:
    """Return a site's dictionaries, and the sums that measure the one of all images.

    Args:
        features: reads the site's patch tokens.
        blocks: the jackknife's blocks of the store's images.
        options: how dictionaries are fitted.
        top: number of patches kept for each concept.
        execution: images, threads and progress.
    """
    with one_blas_thread():  # on small batches threads cost more than they save
        fitted = fit(features, assign_halves(blocks.of_rows), options, execution.progress)
    task = ConceptTask(
        features=features,
        dictionary=fitted.full,
        blocks=blocks.of_rows,
        labels=_labels_and_shuffled(features.store, options.seed),
        n_top=top,
    )
    sums = execution.fold(
        features.store,
        task,
        execution.rows(features.store),
        slab_bytes=features.slab_bytes,
    ).result()
    return fitted, sums


def _labels_and_shuffled(store: Store, seed: int) -> Integers:
    """Return the images' labels and, as a baseline, the same labels permuted over images.

    Returns:
        (2, images) classes, -1 for an image without a label; (0, images) if there are fewer than
        two classes.
    """
    labels = np.asarray(store.samples.label, np.int64)
    has_label = labels >= 0
    if len(np.unique(labels[has_label])) < 2:
        return np.empty((0, len(labels)), np.int64)
    shuffled = labels.copy()
    # 1 and 2 after the seed keep the permutations of labels and channels independent.
    rng = np.random.default_rng((seed, 1))
    shuffled[has_label] = rng.permutation(labels[has_label])
    return np.stack([labels, shuffled])


def _site_rows(
    features: SiteFeatures, fitted: FittedDictionaries, sums: ConceptSums, seed: int
) -> list[dict[str, Any]]:
    """Return the rows about one dictionary: r2, stability, purity, share, activation.

    The last two are one dictionary of columns each, with an entry per concept, or per patch.
    """
    layout = features.layout
    assert layout is not None
    n_images = int((sums.task.blocks >= 0).sum())
    blocks = range(len(sums.n))
    r2_without = np.array([sums.r2(block) for block in blocks])
    r2_cells = jackknife_cells(sums.r2(), r2_without, n_images, limits=(-np.inf, 1.0))
    rows: list[dict[str, Any]] = [{"metric": "r2", **r2_cells, "baseline": ""}]

    channel_rng = np.random.default_rng((seed, 2))
    for baseline, shuffle_rng in (("", None), (SHUFFLED, channel_rng)):
        rows.append(
            {
                "metric": "stability",
                "value": matched_cosine(fitted, shuffle_rng),
                "n_images": n_images,
                "baseline": baseline,
            }
        )

    # Draw 0 has the images' labels, draw 1 the shuffled ones; none without classes.
    for draw in range(len(sums.classes)):
        purity = sums.purity(draw)
        purity_without = np.array([sums.purity(draw, block) for block in blocks])
        low, high = jackknife_share(purity, purity_without, n_images)
        rows.append(
            {
                "metric": "purity",
                "value": purity,
                "low": low,
                "high": high,
                REPLICATES: purity_without,
                "n_images": n_images,
                "baseline": SHUFFLED if draw else "",
            }
        )

    concepts = np.arange(len(sums.counts))
    n_assigned = max(1, int(sums.counts.sum()))  # all codes may be 0: shares of 0
    rows.append(
        {
            "metric": "share",
            "concept": concepts,
            "value": sums.counts / n_assigned,
            "n_images": n_images,
            "baseline": "",
        }
    )

    top = sums.top  # (concepts, patches) each
    rows.append(
        {
            "metric": "activation",
            "image": features.store.samples.id[top.rows.ravel()],
            **cell_columns(layout, top.cells.ravel()),
            "concept": np.repeat(concepts, top.cells.shape[1]),
            "value": top.values.ravel(),
            "n_images": n_images,
            "baseline": "",
        }
    )
    return rows


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Find the concepts that patches are made of.

    A dictionary of K directions of each site's patch tokens, by k-means, non-negative
    matrix factorisation or principal components, out of core: how much of the patches it
    explains, whether two halves of the images give the same concepts, whether these know
    the classes, and a figure of each concept's strongest patches. --save writes it for
    vitsee encode.

      $ vitsee concepts b16.zarr -o concepts.csv --png concepts.png
      $ vitsee concepts b16.zarr --sites blocks.8.out --k 64 --save blocks8.safetensors
      $ vitsee concepts resnet50.zarr --method nmf --sites stage:2
      $ vitsee concepts b16.zarr --method nmf --clamp --png nmf.png
    """,
    needs=("grid",),
    reading=(
        "Each line is a concept, with its share of the patches where one site is "
        "drawn: the patches of different images in which it is strongest, each in the "
        "middle of its neighbours. Those of a line should have something in common; "
        "whether that is more than position or colour, and whether other images would "
        "give the same concept (stability), the picture does not say."
    ),
    source="Fel et al. 2023 (CRAFT); Lee and Seung 1999; Sculley 2010; Kuhn 1955",
    columns=COLUMNS,
    meanings={
        "concept": "from 0, in the dictionary's order",
        "std": "",
        "n_examples": "patches",
    },
    metrics=(*METRICS, *CONCEPT_METRICS),
    run=run,
    plot=plot,
    headline=headline,
    at_a_glance=at_a_glance,
    glance_metric="",
)
