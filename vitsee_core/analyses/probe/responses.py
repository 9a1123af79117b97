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
    """Responses to images.

    Attributes:
        ids: of the images; None where rows are those of a store in its order.
        repeats: (repeats, images, columns), NaN for a repeat that is missing.
        columns: their names.
        source: file or store, for messages.
    """

    ids: list[str] | None
    repeats: Float
    columns: list[str]
    source: str

    @property
    def mean(self) -> Float:
        """The mean (images, columns) over the repeats that are there; NaN where none is."""
        return mean_of_repeats(self.repeats)

    def rows_of(self, store: Store) -> Integers:
        """The row of the responses of each image of a store, (images,), -1 for none.

        Raises:
            VitseeError: none of its images, or other images where there are no ids.
        """
        n = self.repeats.shape[1]
        if self.ids is None:
            if n != store.n_images:
                raise VitseeError(
                    f"{self.source} has responses to {n} images, without ids, and {store.label} "
                    f"has {store.n_images} images; expected one row per image in its order, or "
                    "say whose rows they are with --response-ids FILE"
                )
            return np.arange(n)
        place = {name: row for row, name in enumerate(self.ids)}
        rows = np.array(
            [place.get(name, -1) for name in store.samples.id.tolist()], np.int64
        )
        if (rows < 0).all():
            raise VitseeError(
                f"no image of {store.label} has an id of {self.source}: {abbreviate(self.ids[:3])} "
                f"against {abbreviate(store.samples.id[:3].tolist())} (vitsee export "
                "--samples lists "
                "them)"
            )
        return rows

    def check(self, rows: Integers, label: str) -> None:
        """Refuse columns that cannot be predicted from these rows.

        Raises:
            VitseeError: a column without a number, or with the same for all images.
        """
        values = self.mean[rows]
        if len(bad := np.flatnonzero(~np.isfinite(values).all(0))):
            n = int((~np.isfinite(values[:, bad[0]])).sum())
            raise VitseeError(
                f"{self.source}: column {self.columns[bad[0]]} has no number for {n} of the "
                f"{len(rows)} images of {label} ({len(bad)} such columns); expected one repeat at "
                "least: leave these columns, or these images, out"
            )
        if len(bad := np.flatnonzero(np.ptp(values, axis=0) == 0)):
            raise VitseeError(
                f"{self.source}: column {self.columns[bad[0]]} is {values[0, bad[0]]:g} for all "
                f"{len(rows)} images of {label} ({len(bad)} such columns): there is nothing to "
                "predict; leave them out"
            )


def read_responses(path: Path | Url, ids: Path | None) -> Responses:
    """The responses of a file or a store; see `RESPONSE` and `RESPONSE_IDS`.

    Raises:
        VitseeError: no responses, several arrays, or ids that do not fit them.
        OSError: it cannot be opened.
    """
    if isinstance(path, Url) or path.is_dir():
        if ids is not None:
            raise VitseeError(
                f"{path} is a store, which has ids; leave --response-ids out"
            )
        return _of_store(open_store(path))
    found = read_arrays(path)
    if len(found.values) != 1:
        raise VitseeError(
            f"{path} holds {len(found.values)} arrays ({abbreviate(list(found.values))}); "
            "expected one"
        )
    ((name, array),) = found.values.items()
    if array.ndim > 3:
        raise VitseeError(
            f"{path} has {array.ndim} axes; expected (images, columns), or (repeats, images, "
            "columns)"
        )
    named = found.columns.get(name) or [str(i) for i in range(array.shape[-1])]
    own = found.ids if ids is None else read_ids(ids)[0]
    values = np.asarray(array, np.float64)
    n_rows = values.shape[-2]
    if own is not None and len(own) != n_rows:
        raise VitseeError(
            f"{ids or path} has {len(own)} ids for responses to {n_rows} images; expected as many"
        )
    if values.ndim == 3:
        if own is not None and (twice := [n for n, k in Counter(own).items() if k > 1]):
            raise VitseeError(
                f"{path} has an axis of repeats, and {twice[0]!r} twice; expected one or the other"
            )
        return Responses(own, values, named, path.name)
    if own is None:
        return Responses(None, values[np.newaxis], named, path.name)
    return Responses(*_by_id(own, values), named, path.name)


def _by_id(ids: list[str], values: Float) -> tuple[list[str], Float]:
    """Each id once, and the rows with the same id as repeats of one image."""
    place = {name: row for row, name in enumerate(dict.fromkeys(ids))}
    counts: Counter[str] = Counter()
    repeats = np.full((max(Counter(ids).values()), len(place), values.shape[1]), np.nan)
    for name, own in zip(ids, values, strict=True):
        repeats[counts[name], place[name]] = own
        counts[name] += 1
    return list(place), repeats


def _of_store(store: Store) -> Responses:
    sites = [site for site in store.sites.values() if site.kind == "vector"]
    if not sites:
        raise VitseeError(
            f"{store.label} has no vectors; expected responses that vitsee import made"
        )
    listed: dict[str, Any] = store.manifest.info.get("columns") or {}
    names: list[str] = []
    for site in sites:
        own = listed.get(site.name) or []
        own = own if len(own) == site.dim else [str(i) for i in range(site.dim)]
        names += own if len(sites) == 1 else [f"{site.name}:{name}" for name in own]
    values = np.concatenate([store.vectors(site.name)[:] for site in sites], axis=1)
    whole = values[store.valid].astype(np.float64)
    return Responses(
        store.samples.id[store.valid].tolist(), whole[np.newaxis], names, store.label
    )


SPLITS = 100  # random halves of the repeats


@dataclass(frozen=True)
class Sums:
    """Sums over images, (..., columns): their number, y, p, y^2, p^2 and y p. Both y and p are
    about the same number, so that a large mean costs no digits."""

    n: Float
    y: Float
    p: Float
    yy: Float
    pp: Float
    yp: Float

    @classmethod
    def by_block(cls, y: Float, p: Float, labels: Integers, n_blocks: int) -> Sums:
        """The sums of each block, (blocks, columns), of measured and predicted responses (images,
        columns); labels: (images,) each one's block."""
        parts = (np.ones_like(y), y, p, y * y, p * p, y * p)
        return cls(
            *(block_sums(part, labels, n_blocks).swapaxes(-1, -2) for part in parts)
        )

    def total(self) -> Sums:
        """The sums over all blocks, (columns,)."""
        return Sums(*(part.sum(0) for part in vars(self).values()))

    def without(self) -> Sums:
        """The sums over all blocks but one, for each block, (blocks, columns)."""
        return Sums(*(part.sum(0) - part for part in vars(self).values()))

    @property
    def r(self) -> Float:
        """Pearson's correlation; 0 where the prediction has no variance, NaN where y has none."""
        n = np.maximum(self.n, 1)
        of_y = self.yy - self.y**2 / n
        of_p = self.pp - self.p**2 / n
        both = self.yp - self.y * self.p / n
        flat = of_p <= 1e-12 * self.pp
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.where(flat, 0.0, both / np.sqrt(of_y * of_p))
        return np.where(of_y > 1e-12 * self.yy, np.clip(found, -1, 1), np.nan)

    @property
    def r2(self) -> Float:
        """The explained variance: 1 less the squared error over the variance; NaN where y has
        none."""
        of_y = self.yy - self.y**2 / np.maximum(self.n, 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            found: Float = 1 - (self.yy - 2 * self.yp + self.pp) / of_y
        return np.where(of_y > 1e-12 * self.yy, found, np.nan)


def reliability(repeats: Float, seed: int) -> Float | None:
    """The reliability (columns,) of the mean over repeats (repeats, images, columns), see the
    module's text; None with one repeat, NaN for a column whose halves have no variance."""
    n_repeats = len(repeats)
    if n_repeats < 2:
        return None
    half = n_repeats // 2
    rng = np.random.default_rng((seed, 4))
    n_splits = 1 if n_repeats == 2 else SPLITS
    found = []
    for _ in range(n_splits):
        order = rng.permutation(n_repeats)
        halves = (repeats[order[:half]], repeats[order[half : 2 * half]])
        found.append(_correlation(*map(mean_of_repeats, halves)))
    c = np.mean(found, axis=0)
    k = n_repeats / half
    with np.errstate(invalid="ignore", divide="ignore"):
        corrected: Float = k * c / (1 + (k - 1) * c)
    return corrected


def mean_of_repeats(repeats: Float) -> Float:
    """The mean (images, columns) over the repeats that are there; NaN where none is."""
    there = np.isfinite(repeats)
    n = there.sum(0)
    return np.where(n > 0, np.where(there, repeats, 0).sum(0) / np.maximum(n, 1), np.nan)


def _correlation(a: Float, b: Float) -> Float:
    """Pearson's correlation (columns,) over the images that both a and b (images, columns) have."""
    both = np.isfinite(a) & np.isfinite(b)
    n = np.maximum(both.sum(0), 1)
    means = [np.where(both, v, 0).sum(0) / n for v in (a, b)]
    a, b = (np.where(both, v - mean, 0) for v, mean in zip((a, b), means, strict=True))
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Float = (a * b).sum(0) / np.sqrt((a * a).sum(0) * (b * b).sum(0))
    return found
