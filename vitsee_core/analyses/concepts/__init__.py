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

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.concepts.fitting import (
    METHODS,
    Choice,
    ConceptSums,
    Fitted,
    Task,
    fit,
    halves_of,
    matched_cosine,
)
from vitsee_core.declaration import Analysis
from vitsee_core.features import choose_features
from vitsee_core.figures.patch_maps.photos import (
    Photograph,
    SheetImages,
    clip_frames,
    photographs,
)
from vitsee_core.figures.patch_maps.views import Edges, View, grid_sites
from vitsee_core.figures.patch_sheets import WHOLE, Map, Sheet, SheetLine, layer_name
from vitsee_core.figures.plotting import styled
from vitsee_core.images.embedded_pictures import decode, encode
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
from vitsee_core.sae.dictionary import save_dictionary
from vitsee_core.statistics.jackknife import Blocks, jackknife_cells
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.tables.columns import SITE, cell_columns, in_time, site_columns
from vitsee_core.tables.files import check_new_files
from vitsee_core.tables.glances import some_of
from vitsee_core.tables.headlines import Answer, by_store, measured, picked
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.types import Integers, pl
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_core.features import SiteFeatures
    from vitsee_stores import SiteSpec


COLUMNS = (
    *(*SITE, "row", "col", "image", "method", "k", "concept"),
    *("metric", "value", "std", "low", "high", "n_images", "n_examples", "baseline"),
)
METRICS = ("r2", "stability", "purity")  # of a whole dictionary
SHUFFLED = "shuffled"
GLANCED = 4  # concepts on a card of the report
MAX_SEED = 2**32 - 1  # scikit-learn's


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
            "What is measured of a dictionary, beside its concepts' shares and patches; purity "
            "needs labels.",
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
    """Rows about each site's dictionary, its concepts, and their strongest patches.

    Columns: see `COLUMNS`. `r2`, `stability`, and `purity` where there are labels, the latter two
    with `baseline` `shuffled` too; `share` of each `concept`; `activation` of its `top` patches,
    with `image`, `row` and `col`. The intervals of r2 and purity are over images (jackknife, the
    dictionary held fixed); stability is one number of one pair of halves and has none. NaN: patches
    are all alike. The notes hold crops of the photographs (pictures in base64), under `crops`.

    Memory: slabs of one site, and at most 2 x 4,096 patches (32 per concept if that is more) of
    each of three fits. Time: K D per patch and pass, for nmf times its iterations.

    Args:
        stores: with all tokens of sites with a grid.
        force: `save` may replace a file.
        origin: where the data is now, for the photographs.

    Raises:
        MissingInput: a site is stored pooled only.
        SiteError: no such site, none with a grid, or more axes than channels.
        VitseeError: negative numbers in nmf without `clamp`, fewer patches than concepts, a
            dictionary of several sites to save, or a file that exists, without `force`.
    """
    if method not in METHODS:
        raise VitseeError(f"no method {method!r}; expected {', '.join(METHODS)}")
    if min(k, epochs, top) < 1:
        raise VitseeError(
            f"k is {k}, epochs {epochs}, top {top}; expected 1 or more of each"
        )
    if execution.seed > MAX_SEED:
        raise VitseeError(
            f"the seed is {execution.seed}; scikit-learn takes 0 to {MAX_SEED}"
        )
    wanted = {*asked_for(metrics or METRICS, METRICS, "concepts"), "share", "activation"}
    choice = Choice(method, k, epochs, clamp, execution.seed)
    choose = grid_sites if sites else _last_with_patches
    selected = select_each(stores, sites or ("blocks",), choose)
    work = [
        (store, site, _features(store, site, choice))
        for store, chosen in selected.members
        for site in chosen
    ]
    if save is not None:
        if len(work) != 1:
            raise VitseeError(
                f"--save takes the dictionary of one site; {len(work)} are chosen"
            )
        if Path(save).suffix != ".safetensors":
            raise VitseeError(f"--save {save}; expected a name that ends in .safetensors")
        check_new_files([Path(save)], force=force)
    data = None if origin is None else origin.data
    rows: list[dict[str, Any]] = []
    pictures: dict[str, Any] = {}
    blocks = {store.label: _blocks(store, execution) for store, _ in selected.members}
    images = sum(int((blocks[store.label].of_rows >= 0).sum()) for store, _, _ in work)
    with counting(execution.progress, images * (choice.passes + 1)):
        for store, site, features in work:
            own = blocks[store.label]
            with one_blas_thread():  # batches are small
                fitted = fit(features, halves_of(own.of_rows), choice, execution.progress)
            task = Task(
                features, fitted.whole, own.of_rows, _labels(store, choice.seed), top
            )
            found = execution.fold(
                store, task, execution.rows(store), slab_bytes=features.slab_bytes
            ).result()
            place = site_columns(store, site) | {"method": method, "k": k}
            place |= {"n_examples": int(found.n.sum())}
            measured_rows = _rows(store, features, fitted, found, choice)
            rows += [place | row for row in measured_rows if row["metric"] in wanted]
            cut = crops(store, site, found.top.rows, found.top.cells, data)
            pictures.setdefault(store.label, {})[site.name] = {
                str(concept): line for concept, line in enumerate(cut)
            }
            if save is not None:
                save_dictionary(fitted.whole, Path(save), force=force)
    notes = {
        "method": method,
        "clamp": clamp,
        "epochs": choice.passes,
        "seed": execution.seed,
        "interval": "jackknife over blocks of images, the dictionary held fixed",
        "halves": "every second block of images of the jackknife",
        WORD: {label: one.describe() for label, one in blocks.items()},
        "images": {
            store.label: execution.rows(store).describe() for store in selected.stores
        },
        "crops": pictures,
        **selected.notes(),
    }
    columns = in_time(COLUMNS, [features.layout for _, _, features in work])
    return Table.concat(rows, columns, notes)


def at_a_glance(table: Table) -> Table:
    """The patches of the first store's most frequent concepts."""
    one = some_of(table, store=1, site=1)
    first = one.frame.filter(metric="share").sort(
        "value", descending=True, maintain_order=True
    )
    return one.filter(pl.col("concept").is_in(first["concept"][:GLANCED].implode()))


def headline(table: Table) -> list[Answer]:
    """The share that the concepts explain at the last site, and how stable they are."""
    answers = []
    for store, rows in by_store(table, metric="r2"):
        last = len(rows) - 1
        site = str(rows["site"][last])
        stable = picked(table, store=store, site=site, metric="stability", baseline=None)
        text = f"{rows['k'][last]} concepts of {site}: r2 {measured(rows, last)}"
        text += f", stability {measured(stable)}" if len(stable) else ""
        answers.append((store, text))
    return answers


def _last_with_patches(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    return grid_sites(store, patterns)[-1:]


def _features(store: Store, site: SiteSpec, choice: Choice) -> SiteFeatures:
    features = choose_features(store, site, "patches")
    if choice.method == "pca" and choice.k > features.dim:
        raise SiteError(
            f"{site.name} of {store.label} has {features.dim} channels and so no more axes; "
            f"--k {choice.k} were asked for"
        )
    return features


def _blocks(store: Store, execution: Execution) -> Blocks:
    found = Blocks.of(store, execution.rows(store).mask & store.valid, execution.seed)
    if found.n < 2:
        raise VitseeError(
            f"{store.label} has one image that counts; expected 2 or more, for halves"
        )
    return found


def _labels(store: Store, seed: int) -> Integers:
    """(2, images) classes and shuffled ones; (0, images) where there are fewer than two classes."""
    labels = np.asarray(store.samples.label, np.int64)
    known = labels >= 0
    if len(np.unique(labels[known])) < 2:
        return np.empty((0, len(labels)), np.int64)
    shuffled = labels.copy()
    shuffled[known] = np.random.default_rng((seed, 1)).permutation(labels[known])
    return np.stack([labels, shuffled])


def _rows(
    store: Store,
    features: SiteFeatures,
    fitted: Fitted,
    found: ConceptSums,
    choice: Choice,
) -> list[dict[str, Any]]:
    n = int((found.task.blocks >= 0).sum())
    blocks = range(len(found.n))
    r2 = np.array([found.r2(block) for block in blocks])
    rows: list[dict[str, Any]] = [
        {
            "metric": "r2",
            **jackknife_cells(found.r2(), r2, n, (-np.inf, 1.0)),
            "baseline": "",
        }
    ]
    generator = np.random.default_rng((choice.seed, 2))
    for name, shuffled in (("", None), (SHUFFLED, generator)):
        value = matched_cosine(fitted, shuffled)
        rows.append(
            {"metric": "stability", "value": value, "n_images": n, "baseline": name}
        )
    for draw in range(len(found.classes)):
        value = found.purity(draw)
        without = np.array([found.purity(draw, block) for block in blocks])
        low, high = jackknife_share(value, without, n)
        rows.append(
            {
                "metric": "purity",
                "value": value,
                "low": low,
                "high": high,
                WORD: without,
                "n_images": n,
                "baseline": SHUFFLED if draw else "",
            }
        )
    assigned = max(1, int(found.counts.sum()))
    concepts = np.arange(len(found.counts))
    rows.append(
        {
            "metric": "share",
            "concept": concepts,
            "value": found.counts / assigned,
            "n_images": n,
            "baseline": "",
        }
    )
    layout = features.layout
    top = found.top
    assert layout is not None
    rows.append(
        {
            "metric": "activation",
            "image": store.samples.id[top.rows.ravel()],
            **cell_columns(layout, top.cells.ravel()),
            "concept": np.repeat(concepts, top.cells.shape[1]),
            "value": top.values.ravel(),
            "n_images": n,
            "baseline": "",
        }
    )
    return rows


AROUND = 1.0  # cells of neighbours on each side
CONCEPTS = 12  # most that are drawn
SMALLEST = 48  # pixels of a crop's shorter side, enlarged from fewer


def crops(
    store: Store, site: SiteSpec, rows: Integers, cells: Integers, data: str | None
) -> list[list[str]]:
    """A picture, as `encode` gives it, of each patch with its neighbours, of clips in the frame in
    the middle of the patch's time; "" where it cannot be had. rows, cells: (concepts, n) of the
    store, and of the site's grid, time by time and row by row; data: where the images are now, by
    default where extract read them."""
    layout = store.site(site.name).layout
    clip = store.plan.clip
    assert layout is not None and layout.grid is not None
    view = View.of(store, [site])
    photos = {}
    grid = layout.grid
    places = grid[0] * grid[1]
    if clip is None:
        frames = np.zeros_like(cells)
        shown = SheetImages(
            store, view, sorted({int(row) for row in rows.ravel()}), [site]
        )
        of_rows = photographs(shown, [view.seen(row) for row in shown.rows], data)
        photos = {(row, 0): photo for row, photo in of_rows.items()}
    else:
        frames = (2 * (cells // places) + 1) * clip.frames // (2 * (layout.frames or 1))
        wanted = {*zip(rows.ravel().tolist(), frames.ravel().tolist(), strict=True)}
        for (row, frame), pixels in clip_frames(store, wanted, data).items():
            photos[row, frame] = Photograph(pixels, view.input_edges(row))

    @cache  # concepts share patches
    def cut(row: int, frame: int, cell: int) -> str:
        edges = _around(view.grid_edges(layout, row), grid, divmod(cell, grid[1]))
        photo = photos.get((row, frame))
        return "" if photo is None else encode(_crop(photo, edges))

    each = zip(rows.tolist(), frames.tolist(), (cells % places).tolist(), strict=True)
    return [[cut(*one) for one in zip(*line, strict=True)] for line in each]


def _around(grid: Edges, shape: Sequence[int], cell: tuple[int, int]) -> Edges:
    """The edges of a cell with its neighbours, as shares of the image."""
    top, left, bottom, right = grid
    tall = (bottom - top) / shape[0]
    wide = (right - left) / shape[1]
    y = top + cell[0] * tall
    x = left + cell[1] * wide
    return (
        y - AROUND * tall,
        x - AROUND * wide,
        y + (1 + AROUND) * tall,
        x + (1 + AROUND) * wide,
    )


def _crop(photo: Photograph, edges: Edges) -> NDArray[np.uint8]:
    """These edges of a photograph, white beyond it."""
    pixels = photo.pixels if photo.pixels.ndim == 3 else np.stack([photo.pixels] * 3, -1)
    top, left, bottom, right = photo.edges
    tall = pixels.shape[0] / (bottom - top)
    wide = pixels.shape[1] / (right - left)
    y0, y1 = (round((edge - top) * tall) for edge in (edges[0], edges[2]))
    x0, x1 = (round((edge - left) * wide) for edge in (edges[1], edges[3]))
    y1 = max(y1, y0 + 1)
    x1 = max(x1, x0 + 1)
    whole = np.full((y1 - y0, x1 - x0, 3), 255, np.uint8)
    ys, xs = (
        slice(max(a, 0), min(b, n))
        for a, b, n in ((y0, y1, pixels.shape[0]), (x0, x1, pixels.shape[1]))
    )
    if ys.start < ys.stop and xs.start < xs.stop:
        whole[ys.start - y0 : ys.stop - y0, xs.start - x0 : xs.stop - x0] = pixels[ys, xs]
    scale = math.ceil(SMALLEST / min(whole.shape[:2]))
    return whole.repeat(scale, 0).repeat(scale, 1)


@styled
def plot(table: Table) -> Figure:
    """A line per concept, the most frequent first, of each store and site: the patches with the
    highest activation, of an image each, with their neighbours."""
    lines: list[SheetLine] = []
    pictures: Mapping[str, Any] = table.notes.get("crops", {})
    shares = table.frame.filter(metric="share")
    pairs = shares.partition_by("store", "site", maintain_order=True)
    most = max(1, CONCEPTS // max(1, len(pairs)))
    for own in pairs:
        ranked = own.sort("value", descending=True, nulls_last=True, maintain_order=True)
        for store, site, concept, value in (
            ranked.head(most).select("store", "site", "concept", "value").iter_rows()
        ):
            of_concept = pictures.get(store, {}).get(site, {}).get(str(concept), [])
            name = f"{concept}: {100 * value:.0f} %"
            if len(pairs) > 1:  # in the same room
                of_one = layer_name(site) if shares["store"].n_unique() == 1 else store
                name = f"{shorten(of_one, 8)} {concept}"
            tiles = [Map("", _pixels(text), WHOLE) for text in of_concept] or [_NOTHING]
            lines.append(SheetLine(str(len(lines)), "", [(name, tiles)]))
    share = ", with its share of the patches" if len(pairs) == 1 else ""
    caption = [
        f"a line per concept{share}: those with the highest",
        "activation, one per image, each in the middle",
        "of its neighbours; white is outside of the image",
    ]
    if len(shares) > len(lines):
        caption.append("the most frequent concepts; the table has all")
    return Sheet(lines, {}, caption, photos=False).draw()


_NOTHING = Map("no picture", np.ones((1, 1, 3)), WHOLE)


def _pixels(text: str) -> Any:
    if text:
        return decode(text).astype(np.float64) / 255
    return _NOTHING.values


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Find the concepts that patches are made of.

    A dictionary of K directions of each site's patch tokens, by k-means, non-negative matrix
    factorisation or principal components, out of core: how much of the patches it explains,
    whether two halves of the images give the same concepts, whether these know the classes, and
    a figure of each concept's strongest patches. --save writes it for vitsee encode.

      $ vitsee concepts b16.zarr -o concepts.csv --png concepts.png
      $ vitsee concepts b16.zarr --sites blocks.8.out --k 64 --save blocks8.safetensors
      $ vitsee concepts resnet50.zarr --method nmf --sites stage:2
      $ vitsee concepts b16.zarr --method nmf --clamp --png nmf.png
    """,
    needs=("grid",),
    reading=(
        "Each line is a concept, with its share of the patches where one site is drawn: the "
        "patches of different images in which it is strongest, each in the middle of its "
        "neighbours. Those of a line should have something in common; whether that is more than "
        "position or colour, and whether other images would give the same concept (stability), "
        "the picture does not say."
    ),
    source="Fel et al. 2023 (CRAFT); Lee and Seung 1999; Sculley 2010; Kuhn 1955",
    columns=COLUMNS,
    meanings={
        "concept": "from 0, in the dictionary's order",
        "std": "",
        "n_examples": "patches",
    },
    metrics=(*METRICS, "share", "activation"),
    run=run,
    plot=plot,
    headline=headline,
    at_a_glance=at_a_glance,
    glance_metric="",
)
