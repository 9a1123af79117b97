"""Labelled images: which rows of a store have a label, whether two stores fit together, and the
baselines and intervals of scores against labels.

Labels are class numbers, -1 for none. The space of classes is that of the data set (the store's
class names), not the classes that occur among the rows used. If one store trains and another tests,
the results' rows bear the label of the test store.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.options import Option
from vitsee_core.runtime.streaming import choose_rows
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.statistics.shares import wilson
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import MissingInput, StoreMismatch, VitseeError

if TYPE_CHECKING:
    from vitsee_core.features import SiteFeatures
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Store

INTERVAL_METHOD = (
    "95 % Wilson score interval of the share of test images that are right (training images, "
    "features and seeds held fixed); std is the standard deviation of right (1) and wrong (0) over "
    "test images"
)
SHOWN = 4
DRAWN_AT_ONCE = 1024
TESTS = Option("", default="none")
RANDOM_BASELINE = Option(
    "Add the rows of Gaussian features of the same shape.",
    "--baseline",
    choices=("random",),
    default="none",
)
PER_CLASS = Option("Add top1_class of each class.")
TRAIN_IMAGES = Option(
    "Number of images of TRAIN to learn from; --images counts those of TEST.",
    metavar="N",
    least=1,
    default="all",
)
ALLOW_SHARED = Option("Go on where the same image trains and tests.  [default: refuse]")


@dataclass(frozen=True)
class LabelledRows:
    """The selected, readable, labelled rows of a store, in its order.

    Attributes:
        mask: (images,) over all rows of the store.
        rows: (n,) their numbers.
        labels: (n,) classes.
        classes: names of all classes of the data set ("0", "1", ... if it has no names).
        index: (n,) positions in the data set's own order.
        hashes: (n,) of the images' encoded bytes.
        n_invalid, n_unlabelled: selected rows that are left out.
        how: in words.
    """

    store: Store
    mask: Mask
    rows: Integers
    labels: Integers
    classes: list[str]
    index: Integers
    hashes: NDArray[np.uint64]
    n_invalid: int
    n_unlabelled: int
    how: str
    remarks: tuple[str, ...] = ()

    WHAT: ClassVar[str] = "labelled images"
    NOUN: ClassVar[str] = "image"
    INTERVAL: ClassVar[str] = INTERVAL_METHOD

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    def describe(self) -> dict[str, Any]:
        counts = {"invalid": self.n_invalid, "unlabelled": self.n_unlabelled}
        remarks = {"remarks": list(self.remarks)} if self.remarks else {}
        return {"rows": len(self), "left_out": counts, "chosen": self.how, **remarks}

    @property
    def n_images(self) -> int:
        """Number of images; if examples are not images, see `segments`, of images with one."""
        return len(self)

    def counted(self, among: Mask | None = None) -> dict[str, int]:
        """The count columns of a table, for all or for some (n,)."""
        return {"n_images": len(self) if among is None else int(among.sum())}

    def jackknife(self, seed: int) -> Blocks:
        return Blocks.of(self.store, self.mask, seed)

    def ends(
        self, value: float, n: int, right: int | None, replicates: Float | None
    ) -> tuple[float, float]:
        """Low and high of the 95 % interval of an accuracy; see `INTERVAL`.

        Args:
            value: the accuracy.
            n: number of examples.
            right: how many of them are right; None if that is not an integer.
            replicates: (blocks,) the accuracy without each block.
        """
        del value, replicates
        assert right is not None
        _, _, low, high = accuracy_interval(np.arange(n) < right)
        return low, high

    def read(
        self,
        features: SiteFeatures,
        places: Integers,
        part: slice,
        *,
        jobs: int,
        memory: int,
    ) -> Iterator[tuple[Integers, Float32]]:
        """(places, features (m, tokens of the part, dim)) of these, slab by slab.

        Args:
            features: of a site of the store.
            places: which of the n, ascending.
            part: of the features' tokens.
            jobs: slabs read at a time.
            memory: bytes to stay within.
        """
        mask = np.zeros(self.store.n_images, bool)
        mask[self.rows[places]] = True
        done = 0
        for x in features.blocks(mask, part, jobs=jobs, memory=memory):
            yield places[done : done + len(x)], x
            done += len(x)

    def vectors(
        self, features: SiteFeatures, *, jobs: int, memory: int
    ) -> Iterator[Float32]:
        """(m, dim): `read` of features with one vector per example, for all examples."""
        every = np.arange(len(self))
        for _, x in self.read(features, every, slice(0, 1), jobs=jobs, memory=memory):
            yield x[:, 0]

    def subset(self, keep: Mask, how: str) -> Self:
        """The rows in `keep` (n,); how: in words."""
        mask = np.zeros_like(self.mask)
        mask[self.rows[keep]] = True
        return replace(
            self,
            mask=mask,
            rows=self.rows[keep],
            labels=self.labels[keep],
            index=self.index[keep],
            hashes=self.hashes[keep],
            how=how,
        )

    def held_out(self, share: float, rng: np.random.Generator) -> Mask | None:
        """(n,) the examples to hold out if images have several, keeping images whole; None if each
        example is an image, of which this share of each class is held out."""
        del share, rng
        return None


def labelled_rows(
    store: Store, images: int | None = None, seed: int = 0, split: str | None = None
) -> LabelledRows:
    """The rows of a store that have a label.

    Args:
        store: the store.
        images: start from this many rows, see `choose_rows`, before others are left out.
        seed: of a sample, if one is drawn.
        split: only rows of this split of the data.

    Raises:
        MissingInput: none of the rows has a label, or there is no such split.
    """
    chosen = choose_rows(store, images, seed)
    samples = store.samples
    wanted = chosen.mask
    how = chosen.how
    if split is not None:
        wanted = wanted & in_split(store, split)
        how = f"{how}, of split {split}"
    readable = wanted & samples.valid
    mask = readable & (samples.label >= 0)
    if not mask.any():
        raise MissingInput(
            f"{store.label} has no label for any of its {int(readable.sum())} readable images"
            f"{f' of split {split}' if split else ''}; extract it from data with classes (one "
            "folder per class, or a list with labels)"
        )
    rows = np.flatnonzero(mask)
    names = list(store.class_names or ())
    names += [str(i) for i in range(len(names), int(samples.label.max()) + 1)]
    return LabelledRows(
        store=store,
        mask=mask,
        rows=rows,
        labels=samples.label[rows].astype(np.int64),
        classes=names,
        index=samples.index[rows].astype(np.int64),
        hashes=samples.hash[rows],
        n_invalid=int((wanted & ~samples.valid).sum()),
        n_unlabelled=int((readable & ~mask).sum()),
        how=how,
        remarks=chosen.remarks,
    )


def training_execution(
    execution: Execution, tests: Sequence[Store], train_images: int | None
) -> Execution:
    """How TRAIN is read: `train_images` of its images, or all. Without TEST stores, whose images
    `execution.images` counts, the one store trains and tests, and has as many.

    Raises:
        VitseeError: `train_images` without TEST.
    """
    if tests:
        return replace(execution, images=train_images)
    if train_images is not None:
        raise VitseeError(
            "--train-images counts images of TRAIN beside those of TEST; without TEST give --images"
        )
    return execution


def in_split(store: Store, split: str) -> Mask:
    """(images,) which rows are in a split of the data. Raises MissingInput: the data has no such
    split."""
    of_row = store.samples.split
    names = [name for name in dict.fromkeys(of_row.tolist()) if name]
    if split not in names:
        has = f"splits {', '.join(names)}" if names else "no splits"
        raise MissingInput(f"{store.label} has no split {split!r}; its data has {has}")
    return of_row == split


def check_label_spaces(train: LabelledRows, test: LabelledRows) -> list[str]:
    """Refuse rows whose class numbers do not mean the same classes.

    If a store has no class names, its labels only have to stay within the other's: they are then
    matched by number, which the returned remarks say. Raises StoreMismatch: names what differs.
    """
    a = train.store
    b = test.store
    named = a.class_names is not None and b.class_names is not None
    first = next(
        (
            f"class {i} is {x!r} against {y!r}"
            for i, (x, y) in enumerate(zip(train.classes, test.classes, strict=False))
            if x != y
        ),
        "",
    )
    if named and train.classes != test.classes:
        counts = f"{train.n_classes} classes against {test.n_classes}"
        what = counts if train.n_classes != test.n_classes else ""
        what = "; ".join(part for part in (what, first) if part)
    elif not named and test.labels.max() >= train.n_classes:
        what = f"{b.label} has label {test.labels.max()}, {a.label} {train.n_classes} classes"
    elif (a.class_names is None) != (b.class_names is None):
        bare, other = (a, b) if a.class_names is None else (b, a)
        return [
            f"{bare.label} names no classes: its labels are matched with those of {other.label} by "
            "number"
        ]
    else:
        return []
    raise StoreMismatch(
        f"{a.label} and {b.label} have different labels: {what} (extract both from data with the "
        "same classes)"
    )


def check_disjoint(
    train: LabelledRows, test: LabelledRows, allow_shared: bool = False
) -> int:
    """The number of test rows that hold an image that is in train too; see `shared_images`."""
    return shared_images(train.store, train.rows, test.store, test.rows, allow_shared)


def shared_images(
    train: Store,
    train_rows: Integers,
    test: Store,
    test_rows: Integers,
    allow_shared: bool = False,
) -> int:
    """The number of images of the test rows that are among the training rows: equal encoded bytes,
    or equal pixels as the model saw them, where both stores keep hashes of these. Raises
    StoreMismatch: there are any, and `allow_shared` is not set."""
    rows = np.unique(test_rows)
    same_bytes, same_pixels = _in_train(train, train_rows, test, rows)
    shared = rows[same_bytes | same_pixels]
    n_shared = len(shared)
    if n_shared and not allow_shared:
        names = test.samples.id[shared[:SHOWN]].tolist()
        more = ", ..." if n_shared > len(names) else ""
        n_saved_anew = int((same_pixels & ~same_bytes).sum())
        anew = (
            f"; {n_saved_anew} in other files with equal pixels" if n_saved_anew else ""
        )
        raise StoreMismatch(
            f"{n_shared} of the {len(rows)} test images of {test.label} are in "
            f"{train.label} too ({', '.join(names)}{more}{anew}); give other data, or count them "
            "with --allow-shared"
        )
    return n_shared


def _in_train(
    train: Store, train_rows: Integers, test: Store, rows: Integers
) -> tuple[Mask, Mask]:
    """(rows,) which test images have the bytes, and which the pixels, of a training image."""
    same_bytes = np.isin(test.samples.hash[rows], train.samples.hash[train_rows])
    ours = train.samples.pixel_hash
    theirs = test.samples.pixel_hash
    if ours is None or theirs is None:
        return same_bytes, np.zeros(len(rows), np.bool_)
    return same_bytes, np.isin(theirs[rows], ours[train_rows])


def shared_ids(
    train: Store, train_rows: Integers, test: Store, test_rows: Integers
) -> list[str]:
    """A remark on test images that have the id of a training image, and neither its bytes nor its
    pixels: another picture of the same name, or one picture saved anew with loss."""
    if train.manifest.store_id == test.manifest.store_id:
        return []
    rows = np.unique(test_rows)
    same_bytes, same_pixels = _in_train(train, train_rows, test, rows)
    known = _id_bytes(train)[np.unique(train_rows)]
    alike = np.isin(_id_bytes(test)[rows], known) & ~same_bytes & ~same_pixels
    if not alike.any():
        return []
    names = test.samples.id[rows[alike][:SHOWN]].tolist()
    more = ", ..." if alike.sum() > len(names) else ""
    return [
        f"{int(alike.sum())} of the {len(rows)} test images of {test.label} have ids of images of "
        f"{train.label} ({', '.join(names)}{more}) but other bytes and pixels: other pictures of "
        "the same names, or the same ones saved anew with loss"
    ]


def _id_bytes(store: Store) -> NDArray[np.bytes_]:
    """(images,) the ids as bytes, which take a quarter of their memory as text."""
    encoded = np.ascontiguousarray(store.samples.encoded_id)
    return encoded.view(f"S{encoded.shape[1]}")[:, 0]


def random_features(n: int, dim: int, seed: int | Sequence[int]) -> NDArray[np.float32]:
    """(n, dim) independent standard normal numbers: uninformative features."""
    return np.random.default_rng(seed).standard_normal((n, dim), np.float32)


def accuracy_interval(correct: Mask) -> tuple[float, float, float, float]:
    """Value, std, low and high of an accuracy; see `INTERVAL_METHOD` (Wilson 1927).

    Unlike mean -+ t std / sqrt(n) it stays within 0 and 1, and keeps a width if all test images are
    right. NaN without a test image; std NaN with one.

    Args:
        correct: (n,) whether each test image is right.
    """
    n = len(correct)
    if n == 0:
        return (math.nan,) * 4
    p = float(np.count_nonzero(correct)) / n
    std = math.sqrt(p * (1 - p) * n / (n - 1)) if n > 1 else math.nan
    low, high = wilson(p, n)
    return p, std, float(low), float(high)


def random_pieces(n: int, dim: int, seed: Sequence[int]) -> Iterator[NDArray[np.float32]]:
    """`random_features` in pieces, each drawn separately: memory does not grow with n."""
    for i, start in enumerate(range(0, n, DRAWN_AT_ONCE)):
        yield random_features(min(DRAWN_AT_ONCE, n - start), dim, (*seed, i))


def why_not_own(store: Store, mask: Mask, n_classes: int) -> str:
    """Why the labels of these images say nothing about the head's classes, "" if they do. Only the
    number of classes can be compared: their order is taken to be the same.

    Args:
        store: of the images.
        mask: (images,) over all its rows.
        n_classes: of the head.
    """
    labels = store.samples.label[mask]
    n = len(store.class_names or ()) or int(labels.max(initial=-1)) + 1
    if not (labels >= 0).any():
        return f"{store.label} has no labels"
    if n != n_classes:
        return (
            f"{store.label} has labels of {n} classes, its classifier {n_classes}: not the same "
            "classes"
        )
    return ""


def word_or_number(text: str, words: Sequence[str], expected: str) -> str | float:
    """One of the words, or a finite number above 0. Raises VitseeError: neither."""
    if text in words:
        return text
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise VitseeError(f"{text!r}; expected {expected}")
    return value
