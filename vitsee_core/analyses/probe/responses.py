"""Measured responses to images, of neurons, voxels or people: a column each, matched by image ids;
and how predictions compare with them.

    r = corr(y, p)        r2 = 1 - sum (y - p)^2 / sum (y - mean y)^2

of a column's responses y, the mean over repeats, and predictions p, over the images of a test set;
with several test sets (cross-validation) the mean over them. A prediction that is the same for all
images has r = 0.

The noise ceiling is the reliability of y: the correlation over images between the means of two
halves of the repeats, averaged over random halves, and corrected from h repeats per half to all R
by Spearman and Brown's formula (1910),

    reliability = k c / (1 + (k - 1) c),   k = R / h

which for halves is 2 c / (1 + c), as in Schrimpf et al. 2018. It is the share of the variance of y
that a repetition of the measurement explains, so that the noise-free response would have r2 equal
to it and r equal to its square root; `r_normalised` is r over that root, `r2_normalised` r2 over
the reliability (the share of the explainable variance that is explained; Cadena et al. 2019 take
the noise's variance from the repeats instead). Other work divides r by the reliability itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.features.imports import read_arrays, read_ids
from vitsee_core.runtime.options import Option
from vitsee_core.statistics.jackknife import block_sums
from vitsee_core.types import Float, Integers
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import abbreviate
from vitsee_stores.url import Url

if TYPE_CHECKING:
    from vitsee_stores import Store

RESPONSE = Option(
    "Predict these responses in place of classes: a store that `vitsee import` made, or a file "
    "(.csv, .tsv or .parquet with a column id; .npy, .npz, .pt, .safetensors) of a row per image "
    "and a column per neuron, voxel or rating. Repeats: several rows with one id, or an array "
    "(repeats, images, columns).",
    metavar="FILE|STORE",
    default="none: classes",
)
RESPONSE_IDS = Option(
    "Whose rows the responses are: an id per line, or a table with a column id.",
    metavar="FILE",
    default="the file's column id, else the images of TRAIN in its order",
    only_with=("response",),
)
FOLDS = Option(
    "--response without TEST, --test-split and --holdout: cross-validate, each image tested once.",
    metavar="N",
    least=2,
    default="5",
    only_with=("response",),
)
BY_COLUMN = Option(
    "--response: also a row per column of the responses.", only_with=("response",)
)


@dataclass(frozen=True)
class Responses:
    """Measured responses to images.

    Attributes:
        ids: id of each image; None if there are no ids and rows are in the order of a store.
        repeats: (repeats, images, columns), NaN for a repeat that is missing.
        columns: name of each column.
        source: name of the file or store, for messages.
    """

    ids: list[str] | None
    repeats: Float
    columns: list[str]
    source: str

    @property
    def mean(self) -> Float:
        """The mean over the finite repeats, (images, columns); NaN where none is finite."""
        return mean_of_repeats(self.repeats)

    def rows_of(self, store: Store) -> Integers:
        """Return the row of each image of a store in these responses, (images,); -1 for none.

        Raises:
            VitseeError: none of the store's images has responses; or there are no ids and the
                number of images differs.
        """
        n_rows = self.repeats.shape[1]
        if self.ids is None:
            if n_rows != store.n_images:
                raise VitseeError(
                    f"{self.source} has responses to {n_rows} images, without ids, and "
                    f"{store.label} has {store.n_images} images; expected one row per image in its "
                    "order, or say whose rows they are with --response-ids FILE"
                )
            return np.arange(n_rows)
        row_of_id = {image_id: row for row, image_id in enumerate(self.ids)}
        store_ids = store.samples.id.tolist()
        rows = np.array([row_of_id.get(image_id, -1) for image_id in store_ids], np.int64)
        if (rows < 0).all():
            raise VitseeError(
                f"no image of {store.label} has an id of {self.source}: {abbreviate(self.ids[:3])} "
                f"against {abbreviate(store_ids[:3])} (vitsee export --samples lists them)"
            )
        return rows

    def check(self, rows: Integers, label: str) -> None:
        """Refuse columns that cannot be predicted from some of the images.

        Args:
            rows: rows of these images in the responses.
            label: the store of the images, for messages.

        Raises:
            VitseeError: a column without a number for some image, or the same for all of them.
        """
        values = self.mean[rows]
        incomplete = np.flatnonzero(~np.isfinite(values).all(0))
        if len(incomplete):
            column = incomplete[0]
            n_missing = int((~np.isfinite(values[:, column])).sum())
            raise VitseeError(
                f"{self.source}: column {self.columns[column]} has no number for {n_missing} of "
                f"the {len(rows)} images of {label} ({len(incomplete)} such columns); expected one "
                "repeat at least: leave these columns, or these images, out"
            )
        constant = np.flatnonzero(np.ptp(values, axis=0) == 0)
        if len(constant):
            column = constant[0]
            raise VitseeError(
                f"{self.source}: column {self.columns[column]} is {values[0, column]:g} for all "
                f"{len(rows)} images of {label} ({len(constant)} such columns): there is nothing "
                "to predict; leave them out"
            )


def read_responses(path: Path | Url, ids: Path | None) -> Responses:
    """Read the responses of a file or a store.

    Args:
        path: a store that `vitsee import` made; or a table or array with a row per image and a
            column per neuron, voxel or rating, or (repeats, images, columns).
        ids: file with the image id of each row; None: the file's column id, if it has one.

    Raises:
        VitseeError: no responses, several arrays, or ids that do not fit them.
        OSError: it cannot be opened.
    """
    if isinstance(path, Url) or path.is_dir():
        if ids is not None:
            raise VitseeError(
                f"{path} is a store, which has ids; leave --response-ids out"
            )
        return _responses_of_store(open_store(path))
    arrays = read_arrays(path)
    if len(arrays.values) != 1:
        raise VitseeError(
            f"{path} holds {len(arrays.values)} arrays ({abbreviate(list(arrays.values))}); "
            "expected one"
        )
    ((name, array),) = arrays.values.items()
    if array.ndim > 3:
        raise VitseeError(
            f"{path} has {array.ndim} axes; expected (images, columns), or (repeats, images, "
            "columns)"
        )
    columns = arrays.columns.get(name) or [str(i) for i in range(array.shape[-1])]
    image_ids = arrays.ids if ids is None else read_ids(ids)[0]
    values = np.asarray(array, np.float64)
    n_rows = values.shape[-2]
    if image_ids is not None and len(image_ids) != n_rows:
        raise VitseeError(
            f"{ids or path} has {len(image_ids)} ids for responses to {n_rows} images; expected as "
            "many"
        )
    if values.ndim == 3:
        if image_ids is not None:
            twice = [name for name, count in Counter(image_ids).items() if count > 1]
            if twice:
                raise VitseeError(
                    f"{path} has an axis of repeats, and {twice[0]!r} twice; expected one or the "
                    "other"
                )
        return Responses(image_ids, values, columns, path.name)
    if image_ids is None:
        return Responses(None, values[np.newaxis], columns, path.name)
    distinct_ids, repeats = _group_repeats(image_ids, values)
    return Responses(distinct_ids, repeats, columns, path.name)


def _group_repeats(ids: list[str], values: Float) -> tuple[list[str], Float]:
    """Return each id once, and its rows as repeats of one image, (repeats, images, columns).

    Images with fewer repeats than others have NaN in the last ones.

    Args:
        ids: image id of each row.
        values: (rows, columns).
    """
    row_of_id = {image_id: row for row, image_id in enumerate(dict.fromkeys(ids))}
    n_repeats = max(Counter(ids).values())
    repeats = np.full((n_repeats, len(row_of_id), values.shape[1]), np.nan)
    counts: Counter[str] = Counter()
    for image_id, row_values in zip(ids, values, strict=True):
        repeats[counts[image_id], row_of_id[image_id]] = row_values
        counts[image_id] += 1
    return list(row_of_id), repeats


def _responses_of_store(store: Store) -> Responses:
    """Return the vectors of all sites of a store, side by side, as responses without repeats."""
    sites = [site for site in store.sites.values() if site.kind == "vector"]
    if not sites:
        raise VitseeError(
            f"{store.label} has no vectors; expected responses that vitsee import made"
        )
    columns_of_sites: dict[str, Any] = store.manifest.info.get("columns") or {}
    names: list[str] = []
    for site in sites:
        site_columns = columns_of_sites.get(site.name) or []
        if len(site_columns) != site.dim:
            site_columns = [str(i) for i in range(site.dim)]
        if len(sites) > 1:
            site_columns = [f"{site.name}:{column}" for column in site_columns]
        names += site_columns
    values = np.concatenate([store.vectors(site.name)[:] for site in sites], axis=1)
    valid_values = values[store.valid].astype(np.float64)
    ids = store.samples.id[store.valid].tolist()
    return Responses(ids, valid_values[np.newaxis], names, store.label)


N_SPLITS = 100  # random halves of the repeats
# A variance below this share of the mean square is rounding.
VARIANCE_ROUNDING = 1e-12


@dataclass(frozen=True)
class Sums:
    """Sums over images, (..., columns), from which r and r2 follow.

    Measured responses y and predictions p are both taken minus the same number, so that a large
    mean costs no digits.

    Attributes:
        n: number of images.
        y: sum of y.
        p: sum of p.
        yy: sum of y^2.
        pp: sum of p^2.
        yp: sum of y p.
    """

    n: Float
    y: Float
    p: Float
    yy: Float
    pp: Float
    yp: Float

    @classmethod
    def by_block(cls, y: Float, p: Float, labels: Integers, n_blocks: int) -> Sums:
        """Return the sums over each block of images, (blocks, columns).

        Args:
            y: (images, columns) measured responses.
            p: (images, columns) predicted responses.
            labels: (images,) block of each image.
            n_blocks: number of blocks.
        """

        def sums(values: Float) -> Float:
            """Return the sums (blocks, columns) of values (images, columns)."""
            return block_sums(values, labels, n_blocks).swapaxes(-1, -2)

        return cls(
            n=sums(np.ones_like(y)),
            y=sums(y),
            p=sums(p),
            yy=sums(y * y),
            pp=sums(p * p),
            yp=sums(y * p),
        )

    def total(self) -> Sums:
        """Return the sums over all blocks, (columns,)."""
        return Sums(**{name: sums.sum(0) for name, sums in vars(self).items()})

    def without(self) -> Sums:
        """Return the sums over all blocks but one, for each left-out block, (blocks, columns)."""
        return Sums(**{name: sums.sum(0) - sums for name, sums in vars(self).items()})

    @property
    def r(self) -> Float:
        """Pearson's correlation; 0 where the prediction has no variance, NaN where y has none."""
        n = np.maximum(self.n, 1)
        variance_y = self.yy - self.y**2 / n
        variance_p = self.pp - self.p**2 / n
        covariance = self.yp - self.y * self.p / n
        p_is_constant = variance_p <= VARIANCE_ROUNDING * self.pp
        with np.errstate(invalid="ignore", divide="ignore"):
            r = np.where(
                p_is_constant, 0.0, covariance / np.sqrt(variance_y * variance_p)
            )
        # Rounding can exceed 1 by a digit.
        r = np.clip(r, -1, 1)
        return np.where(variance_y > VARIANCE_ROUNDING * self.yy, r, np.nan)

    @property
    def r2(self) -> Float:
        """The explained variance: 1 less the squared error over the variance; NaN where y has
        none."""
        variance_y = self.yy - self.y**2 / np.maximum(self.n, 1)
        squared_error = self.yy - 2 * self.yp + self.pp
        with np.errstate(invalid="ignore", divide="ignore"):
            r2: Float = 1 - squared_error / variance_y
        return np.where(variance_y > VARIANCE_ROUNDING * self.yy, r2, np.nan)


def reliability(repeats: Float, seed: int) -> Float | None:
    """Return the reliability of the mean over repeats, (columns,).

    It is the split-half correlation, averaged over random halves and corrected for their length
    (Spearman and Brown 1910; Schrimpf et al. 2018). NaN for a column whose halves have no variance.

    Args:
        repeats: (repeats, images, columns).
        seed: seed of the random halves.

    Returns:
        The reliability; None with a single repeat.
    """
    n_repeats = len(repeats)
    if n_repeats < 2:
        return None
    # Of an odd number one repeat is left out of each split, another one every time.
    n_half = n_repeats // 2
    # Two repeats have one split only.
    n_splits = 1 if n_repeats == 2 else N_SPLITS
    rng = np.random.default_rng((seed, 4))
    correlations = []
    for _ in range(n_splits):
        order = rng.permutation(n_repeats)
        first_half = mean_of_repeats(repeats[order[:n_half]])
        second_half = mean_of_repeats(repeats[order[n_half : 2 * n_half]])
        correlations.append(_correlation(first_half, second_half))
    c = np.mean(correlations, axis=0)
    k = n_repeats / n_half
    with np.errstate(invalid="ignore", divide="ignore"):
        corrected: Float = k * c / (1 + (k - 1) * c)  # Spearman-Brown
    return corrected


def mean_of_repeats(repeats: Float) -> Float:
    """Return the mean over the finite repeats, (images, columns); NaN where none is finite."""
    is_finite = np.isfinite(repeats)
    n_finite = is_finite.sum(0)
    sums = np.where(is_finite, repeats, 0).sum(0)
    return np.where(n_finite > 0, sums / np.maximum(n_finite, 1), np.nan)


def _correlation(a: Float, b: Float) -> Float:
    """Return Pearson's correlation of a and b (images, columns) over images that have both."""
    has_both = np.isfinite(a) & np.isfinite(b)
    n = np.maximum(has_both.sum(0), 1)
    mean_a = np.where(has_both, a, 0).sum(0) / n
    mean_b = np.where(has_both, b, 0).sum(0) / n
    a = np.where(has_both, a - mean_a, 0)
    b = np.where(has_both, b - mean_b, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        r: Float = (a * b).sum(0) / np.sqrt((a * a).sum(0) * (b * b).sum(0))
    return r
