"""Labelled images: which rows of a store have a label, and whether two stores fit together.

Also the baselines and intervals of scores against labels.

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

from vitsee_core.images.formats import FORMAT_OF_ENDING
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
MAX_IDS_NAMED = 4  # in a message
DRAWN_ROWS = 1024  # of random features at a time
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
        store: the store.
        mask: (images,) which rows of the store these are.
        rows: (n,) their row numbers.
        labels: (n,) class numbers.
        classes: names of all classes of the data set ("0", "1", ... if it has no names).
        index: (n,) positions in the data set's own order.
        hashes: (n,) hashes of the images' encoded bytes.
        n_invalid: the number of selected rows without a readable image, which are left out.
        n_unlabelled: the number of selected, readable rows without a label.
        how: how the rows were chosen, in words.
        remarks: for the user, about the choice.
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
        """The number of classes of the data set."""
        return len(self.classes)

    def describe(self) -> dict[str, Any]:
        """Return what a result's sidecar says of the rows."""
        counts = {"invalid": self.n_invalid, "unlabelled": self.n_unlabelled}
        description = {"rows": len(self), "left_out": counts, "chosen": self.how}
        if self.remarks:
            description["remarks"] = list(self.remarks)
        return description

    @property
    def n_images(self) -> int:
        """The number of images that have an example (a subclass has segments as examples)."""
        return len(self)

    def counted(self, among: Mask | None = None) -> dict[str, int]:
        """Return the count columns of a table, for all examples or those in a mask (n,)."""
        if among is None:
            return {"n_images": len(self)}
        return {"n_images": int(among.sum())}

    def jackknife(self, seed: int) -> Blocks:
        """Return blocks of images, each of which is left out once for a standard error."""
        return Blocks.of(self.store, self.mask, seed)

    def ends(
        self, value: float, n: int, right: int | None, replicates: Float | None
    ) -> tuple[float, float]:
        """Return the low and high end of the 95 % interval of an accuracy, as `INTERVAL` says.

        Args:
            value: the accuracy.
            n: the number of examples.
            right: the number of examples that are right; None if that is not an integer.
            replicates: (blocks,) the accuracy without each block.
        """
        del value, replicates
        # An interval of a share alone needs counts, not replicates (segments need these).
        assert right is not None
        _, _, low, high = accuracy_interval(np.arange(n) < right)
        return low, high

    def read(
        self,
        features: SiteFeatures,
        examples: Integers,
        tokens: slice,
        *,
        jobs: int,
        memory: int,
    ) -> Iterator[tuple[Integers, Float32]]:
        """Yield the features of examples, slab by slab: (m,) examples, (m, tokens, dim) features.

        Args:
            features: the features of a site of the store.
            examples: positions among the n examples, ascending.
            tokens: a range of the features' tokens.
            jobs: the number of slabs that are read at a time.
            memory: bytes to stay within.
        """
        mask = np.zeros(self.store.n_images, bool)
        mask[self.rows[examples]] = True
        n_read = 0
        # Blocks come in the order of the rows, so examples are counted off as they come.
        for x in features.blocks(mask, tokens, jobs=jobs, memory=memory):
            yield examples[n_read : n_read + len(x)], x
            n_read += len(x)

    def vectors(
        self, features: SiteFeatures, *, jobs: int, memory: int
    ) -> Iterator[Float32]:
        """Yield (m, dim) of all examples, for features with a single vector for each of them."""
        examples = np.arange(len(self))
        first_token = slice(0, 1)
        for _, x in self.read(features, examples, first_token, jobs=jobs, memory=memory):
            yield x[:, 0]

    def subset(self, keep: Mask, how: str) -> Self:
        """Return the examples in a mask (n,); `how` says in words how they were chosen."""
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

    def held_out(self, fraction: float, rng: np.random.Generator) -> Mask | None:
        """Return (n,) the examples to hold out, or None if the caller may draw them itself.

        None is returned if each example is an image, of which the caller holds out this fraction
        of each class. A subclass whose images have several examples keeps these together.
        """
        del fraction, rng
        return None


def labelled_rows(
    store: Store, images: int | None = None, seed: int = 0, split: str | None = None
) -> LabelledRows:
    """Return the rows of a store that have a label.

    Args:
        store: the store.
        images: start from this many rows, see `choose_rows`, before others are left out.
        seed: the seed of the sample, if a sample is drawn.
        split: only rows of this split of the data.

    Raises:
        MissingInput: none of the rows has a label, or there is no such split.
    """
    chosen = choose_rows(store, images, seed)
    samples = store.samples
    selected = chosen.mask
    how = chosen.how
    if split is not None:
        selected = selected & in_split(store, split)
        how = f"{how}, of split {split}"
    readable = selected & samples.valid
    mask = readable & (samples.label >= 0)
    if not mask.any():
        raise MissingInput(
            f"{store.label} has no label for any of its {int(readable.sum())} readable images"
            f"{f' of split {split}' if split else ''}; extract it from data with classes (one "
            "folder per class, or a list with labels)"
        )
    rows = np.flatnonzero(mask)
    # Classes that have a number but no name are called by it.
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
        n_invalid=int((selected & ~samples.valid).sum()),
        n_unlabelled=int((readable & ~mask).sum()),
        how=how,
        remarks=chosen.remarks,
    )


def training_execution(
    execution: Execution, tests: Sequence[Store], train_images: int | None
) -> Execution:
    """Return the execution with the number of images of TRAIN.

    `--images` counts the images of the TEST stores, so TRAIN has `train_images`, or all. Without
    TEST stores a single store trains and tests, and `--images` counts its images.

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
    """Return (images,) which rows are in a split of the data.

    Raises:
        MissingInput: the data has no such split.
    """
    split_of_row = store.samples.split
    names = [name for name in dict.fromkeys(split_of_row.tolist()) if name]
    if split not in names:
        has = f"splits {', '.join(names)}" if names else "no splits"
        raise MissingInput(f"{store.label} has no split {split!r}; its data has {has}")
    return split_of_row == split


def check_label_spaces(train: LabelledRows, test: LabelledRows) -> list[str]:
    """Refuse rows whose class numbers do not mean the same classes; return remarks.

    If a store has no class names, its labels only have to stay within the other's. They are then
    matched by number, which a remark says.

    Raises:
        StoreMismatch: the classes differ; the message says how.
    """
    difference = _label_difference(train, test)
    a = train.store
    b = test.store
    if difference:
        raise StoreMismatch(
            f"{a.label} and {b.label} have different labels: {difference} (extract both from data "
            "with the same classes)"
        )
    if (a.class_names is None) == (b.class_names is None):
        return []
    unnamed, named = (a, b) if a.class_names is None else (b, a)
    return [
        f"{unnamed.label} names no classes: its labels are matched with those of {named.label} by "
        "number"
    ]


def _label_difference(train: LabelledRows, test: LabelledRows) -> str:
    """Return in words how the classes of two stores differ, "" if they fit together."""
    a = train.store
    b = test.store
    # Numbers alone: they fit as long as none is beyond the named classes.
    if a.class_names is None or b.class_names is None:
        if test.labels.max() >= train.n_classes:
            return f"{b.label} has label {test.labels.max()}, {a.label} {train.n_classes} classes"
        return ""
    differences = []
    if train.n_classes != test.n_classes:
        differences.append(f"{train.n_classes} classes against {test.n_classes}")
    # Not strict: different numbers of classes were noted above.
    pairs = zip(train.classes, test.classes, strict=False)
    for i, (train_name, test_name) in enumerate(pairs):
        if train_name != test_name:
            differences.append(f"class {i} is {train_name!r} against {test_name!r}")
            break  # the first is enough: all behind it are often shifted
    return "; ".join(differences)


def check_disjoint(
    train: LabelledRows, test: LabelledRows, allow_shared: bool = False
) -> int:
    """Return the number of test images that are training images too, see `shared_images`."""
    return shared_images(train.store, train.rows, test.store, test.rows, allow_shared)


def shared_images(
    train: Store,
    train_rows: Integers,
    test: Store,
    test_rows: Integers,
    allow_shared: bool = False,
) -> int:
    """Return the number of images of the test rows that are among the training rows.

    Images are the same if their encoded bytes are equal, or their pixels as the model saw them, if
    both stores have hashes of these.

    Args:
        train: the store of the training images.
        train_rows: its rows, of which some may occur several times.
        test: the store of the test images.
        test_rows: its rows.
        allow_shared: whether shared images are counted rather than refused.

    Raises:
        StoreMismatch: there are shared images, and `allow_shared` is not set.
    """
    # Each image once, where rows were drawn with repetition.
    rows = np.unique(test_rows)
    same_bytes, same_pixels = _in_train(train, train_rows, test, rows)
    shared = rows[same_bytes | same_pixels]
    n_shared = len(shared)
    if n_shared and not allow_shared:
        names = test.samples.id[shared[:MAX_IDS_NAMED]].tolist()
        more = ", ..." if n_shared > len(names) else ""
        n_saved_anew = int((same_pixels & ~same_bytes).sum())
        anew = ""
        if n_saved_anew:
            anew = f"; {n_saved_anew} in other files with equal pixels"
        raise StoreMismatch(
            f"{n_shared} of the {len(rows)} test images of {test.label} are in "
            f"{train.label} too ({', '.join(names)}{more}{anew}); give other data, or count them "
            "with --allow-shared"
        )
    return n_shared


def _in_train(
    train: Store, train_rows: Integers, test: Store, rows: Integers
) -> tuple[Mask, Mask]:
    """Return (rows,) which test images have the bytes, and which the pixels, of a training image.

    Stores that were made before pixels were hashed have no equal pixels.
    """
    same_bytes = np.isin(test.samples.hash[rows], train.samples.hash[train_rows])
    train_hashes = train.samples.pixel_hash
    test_hashes = test.samples.pixel_hash
    if train_hashes is None or test_hashes is None:
        return same_bytes, np.zeros(len(rows), np.bool_)
    return same_bytes, np.isin(test_hashes[rows], train_hashes[train_rows])


def shared_ids(
    train: Store,
    train_rows: Integers,
    test: Store,
    test_rows: Integers,
    what: str = "test images",
) -> list[str]:
    """Return a remark on test images with the id of a training image but other bytes and pixels.

    They are other pictures of the same name, or the same picture saved anew with loss. Ids are
    compared without the endings of image files: the same picture may be there as PNG and as JPEG.
    The list is empty if there are none, or if both stores are the same.

    Args:
        train: the store of the training images.
        train_rows: its rows, of which some may occur several times.
        test: the store of the test images.
        test_rows: its rows.
        what: the test images in words.
    """
    if train.manifest.store_id == test.manifest.store_id:
        return []
    rows = np.unique(test_rows)
    same_bytes, same_pixels = _in_train(train, train_rows, test, rows)
    # (images,) bytes
    train_ids = _id_bytes(train)[np.unique(train_rows)]
    test_ids = _id_bytes(test)[rows]
    # Equal ids have equal stems: these count as well.
    same_stem = np.isin(_without_endings(test_ids), _without_endings(train_ids))
    same_stem_only = same_stem & ~same_bytes & ~same_pixels
    n_same = int(same_stem_only.sum())
    if not n_same:
        return []
    names = test.samples.id[rows[same_stem_only][:MAX_IDS_NAMED]].tolist()
    more = ", ..." if n_same > len(names) else ""
    n_other_ending = int((same_stem_only & ~np.isin(test_ids, train_ids)).sum())
    ending = f"; {n_other_ending} but for the ending" if n_other_ending else ""
    return [
        f"{n_same} of the {len(rows)} {what} of {test.label} have ids of images of "
        f"{train.label} ({', '.join(names)}{more}{ending}) but other bytes and pixels: other "
        "pictures of the same names, or the same ones saved anew with loss"
    ]


def _id_bytes(store: Store) -> NDArray[np.bytes_]:
    """Return (images,) the ids as bytes, which take a quarter of the memory of NumPy's text."""
    encoded = np.ascontiguousarray(store.samples.encoded_id)
    # Each id padded with NUL to one width, which NumPy's bytes end at.
    return encoded.view(f"S{encoded.shape[1]}")[:, 0]


def _without_endings(ids: NDArray[np.bytes_]) -> NDArray[np.bytes_]:
    """Return (images,) the ids without the endings of image files, as `image_stem` does for one."""
    stems, _, endings = np.strings.rpartition(ids, b".")
    known = [ending[1:].encode() for ending in FORMAT_OF_ENDING]
    is_image = np.isin(np.strings.lower(endings), known)
    # A name that is nothing but an ending, as `.png`, has none.
    is_image &= (stems != b"") & ~np.strings.endswith(stems, b"/")
    return np.where(is_image, stems, ids)


def random_features(n: int, dim: int, seed: int | Sequence[int]) -> NDArray[np.float32]:
    """Return (n, dim) independent standard normal numbers: uninformative features."""
    return np.random.default_rng(seed).standard_normal((n, dim), np.float32)


def accuracy_interval(correct: Mask) -> tuple[float, float, float, float]:
    """Return an accuracy, its std, and the low and high end of its 95 % Wilson score interval.

    Unlike mean -+ t std / sqrt(n), this interval (Wilson 1927) stays within 0 and 1, and keeps a
    width if all test images are right. All are NaN without a test image; std is NaN with a single
    test image.

    Args:
        correct: (n,) whether each test image is right.
    """
    n = len(correct)
    if n == 0:
        return (math.nan,) * 4
    p = float(np.count_nonzero(correct)) / n
    # Of ones and zeros with the divisor n - 1.
    std = math.sqrt(p * (1 - p) * n / (n - 1)) if n > 1 else math.nan
    low, high = wilson(p, n)
    return p, std, float(low), float(high)


def random_pieces(n: int, dim: int, seed: Sequence[int]) -> Iterator[NDArray[np.float32]]:
    """Yield `random_features` in pieces of rows, so that memory does not grow with n.

    Each piece has a seed of its own, as pieces may be drawn in several processes.
    """
    for i, start in enumerate(range(0, n, DRAWN_ROWS)):
        yield random_features(min(DRAWN_ROWS, n - start), dim, (*seed, i))


def why_not_own(store: Store, mask: Mask, n_classes: int) -> str:
    """Return why the labels of images are not of the classes of a model's head, "" if they are.

    Only the number of classes can be compared; their order is assumed to be the same.

    Args:
        store: the store of the images.
        mask: (images,) which rows count.
        n_classes: the number of classes of the head.
    """
    labels = store.samples.label[mask]
    # Without names the largest label is all that is known.
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
    """Return `text` if it is among the words, or else as a finite number above 0.

    Raises:
        VitseeError: it is neither.
    """
    if text in words:
        return text
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # Also refuses NaN.
    if not 0 < value < float("inf"):
        raise VitseeError(f"{text!r}; expected {expected}")
    return value
