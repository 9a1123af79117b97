"""The segments of a store's images: the user's choice, their labels and their tokens' weights."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.placement import place
from vitsee_core.runtime.machine import plural
from vitsee_core.runtime.options import Option, PythonOnly
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.streaming import Rows, choose_rows
from vitsee_core.statistics.jackknife import METHOD, Blocks
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.truth.labels.labelled_rows import LabelledRows, in_split
from vitsee_core.truth.masks import MaskSource, open_masks
from vitsee_core.truth.masks.mask_truth import cut_to_image, match_rows
from vitsee_core.truth.masks.orientation import oriented_as
from vitsee_core.truth.masks.png_maps import VOC_FOLDERS, VOC_OBJECTS
from vitsee_core.truth.masks.segments.vectors import (
    SegmentFeatures,
    SegmentWeights,
    Sparse,
    Weights,
)
from vitsee_core.truth.masks.sources import (
    BACKGROUND_OPTION,
    PANOPTIC,
    SEGMENTS,
    VOID_OPTION,
    lost_annotations,
)
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import MissingInput, VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Store
    from vitsee_stores.layout import TokenLayout

WEIGHTS = ("area", "any", "vit_analysis")


@dataclass(frozen=True)
class Segmentation:
    """The choice of segments of images, which are then examples in place of the images.

    Attributes:
        masks: files or folders of masks, see `open_masks`.
        panoptic: the folder of panoptic PNGs, see `open_masks`.
        background: category numbers that are not segments.
        void: the value of pixels without a category.
        weights: how much each token counts for a segment, one of `WEIGHTS`; `area` by default.
        crowd: whether groups of objects that nobody told apart are segments; by default they are
            not.
        segments: the largest number of segments, those of images drawn with the seed.
        first: only segments of so many first images of the masks (of COCO files by their ids).

    Examples:
        >>> import vitsee
        >>> masks = vitsee.Segmentation("scenes/annotations/instances_val2017.json", weights="any")
        >>> table = vitsee.cluster("scenes.zarr", masks=masks, sites="last", metrics="purity")
        >>> sorted(set(table["baseline"]))
        ['', 'image', 'random', 'shuffled']
    """

    masks: Annotated[Path | str | Sequence[Path | str], SEGMENTS]
    panoptic: Annotated[Path | str | None, PANOPTIC] = None
    background: Annotated[Sequence[int], BACKGROUND_OPTION] = ()
    void: Annotated[int | str | None, VOID_OPTION] = None
    weights: Annotated[
        str | None,
        Option(
            "How much each patch counts for a segment: by the area in its cell, all that it "
            "touches alike, or as in the code of Walmer et al. (bicubic).",
            choices=WEIGHTS,
            default="area",
            only_with=("masks",),
        ),
    ] = None
    crowd: Annotated[
        bool | None,
        Option(
            "Whether crowds (iscrowd 1) are segments.",
            "--crowd/--no-crowd",
            default="no-crowd",
            only_with=("masks",),
        ),
    ] = None
    segments: Annotated[
        int | None,
        Option(
            "At most N segments, those of images drawn with the seed.",
            least=1,
            default="all",
            only_with=("masks",),
        ),
    ] = None
    first: Annotated[
        int | None, PythonOnly("studies of papers take some images alone")
    ] = None

    def filled(self, **values: Any) -> Segmentation:
        """Return a copy with these values in fields that are None."""
        unset = {
            name: value for name, value in values.items() if getattr(self, name) is None
        }
        return replace(self, **unset)

    def open(self) -> MaskSource:
        """Return the masks.

        Raises:
            VitseeError: an unknown choice, or masks that `open_masks` refuses.
        """
        if self.weights not in (None, *WEIGHTS):
            raise VitseeError(
                f"no weights {self.weights!r}; expected {', '.join(WEIGHTS)}"
            )
        for noun, n in (("segments", self.segments), ("images", self.first)):
            if n is not None and n < 1:
                raise VitseeError(
                    f"{n} {noun} were asked for; expected a positive number"
                )
        masks = self.masks
        paths = [masks] if isinstance(masks, (str, os.PathLike)) else list(masks)
        for path in map(Path, paths):
            if path.absolute().name == VOC_OBJECTS:
                raise VitseeError(
                    f"{path} numbers the objects of each image, which are no categories; expected "
                    f"the folder {VOC_FOLDERS[0]} beside it"
                )
        panoptic = None if self.panoptic is None else Path(self.panoptic)
        return open_masks(
            [Path(path) for path in paths], self.background, self.void, panoptic
        )


def as_segmentation(
    masks: Segmentation | Path | str | Sequence[Path | str] | None,
) -> Segmentation | None:
    """Return masks that may be given as paths alone as a `Segmentation`."""
    if masks is None or isinstance(masks, Segmentation):
        return masks
    return Segmentation(masks)


log = logging.getLogger(__name__)

# The noun and the reason of each count of `find_segments`, in the order of the counts.
_LEFT_OUT = (
    ("images", "without a mask"),
    ("segments", "crowds"),
    ("segments", "without a pixel"),
    ("segments", "outside of what the model saw"),
)
INTERVAL = (
    "95 % interval over images, as segments of one image are not independent: from the standard "
    f"error of a delete-a-block jackknife ({METHOD}), what was fitted held fixed. Of nmi and ari "
    f"value -+ t(0.975, blocks - 1) * error, cut where no value can be; of accuracies and purity: "
    f"{SHARES}"
)


@dataclass(frozen=True)
class LabelledSegments(LabelledRows):
    """Segments as examples in place of images.

    `rows`, `labels`, `index` and `hashes` have an entry for each segment, in the order of the
    store's rows and then of the masks.

    Attributes:
        numbers: (n,) the segments' positions in `weights`, ascending.
        weights: layout of tokens -> weights of the tokens for all segments that were found.
        counts: numbers of images and segments that were left out, for a result's sidecar.
        source: the masks and how they were used, for the sidecar.
    """

    numbers: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    weights: Mapping[TokenLayout, Weights] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)

    WHAT: ClassVar[str] = "segments"
    NOUN: ClassVar[str] = "segment"
    INTERVAL: ClassVar[str] = INTERVAL

    @property
    def n_images(self) -> int:
        """The number of images that have a segment."""
        return len(np.unique(self.rows))

    def describe(self) -> dict[str, Any]:
        """Return what a result's sidecar says of the segments."""
        description: dict[str, Any] = {
            "images": self.n_images,
            "segments": len(self),
            "chosen": self.how,
            **self.counts,
            **self.source,
        }
        if self.remarks:
            description["remarks"] = list(self.remarks)
        return description

    def jackknife(self, seed: int) -> Blocks:
        """Return blocks of images; all segments of an image are in the same block."""
        images = Blocks.of(self.store, self.mask, seed)
        # Block of each image -> block of each segment.
        return Blocks(images.of_rows[self.rows], images.of_rows, images.digest)

    def read(
        self, features: Any, examples: Integers, tokens: slice, *, jobs: int, memory: int
    ) -> Iterator[tuple[Integers, Float32]]:
        """Yield (m,) segments and their (m, 1, dim) weighted means of tokens, slab by slab."""
        assert isinstance(features, SegmentFeatures)
        del tokens  # a segment has a single vector
        rows = self.rows[examples]
        numbers = self.numbers[examples]
        n_read = 0
        for x in features.of_segments(rows, numbers, jobs=jobs, memory=memory):
            yield examples[n_read : n_read + len(x)], x[:, np.newaxis]
            n_read += len(x)

    def ends(
        self, value: float, n: int, right: int | None, replicates: Float | None
    ) -> tuple[float, float]:
        """Return the ends of the 95 % interval over images, NaN without replicates."""
        del n, right
        if replicates is None:
            return np.nan, np.nan
        return jackknife_share(value, replicates, self.n_images)

    def counted(self, among: Mask | None = None) -> dict[str, int]:
        """Return the count columns of a table, for all segments or those in a mask (n,)."""
        rows = self.rows if among is None else self.rows[among]
        return {"n_images": len(np.unique(rows)), "n_segments": len(rows)}

    def subset(self, keep: Mask, how: str) -> Self:
        """Return the segments in a mask (n,); `how` says in words how they were chosen."""
        return replace(super().subset(keep, how), numbers=self.numbers[keep])

    def held_out(self, fraction: float, rng: np.random.Generator) -> Mask:
        """Return (n,) the segments of a fraction of the images, drawn at random.

        The segments of an image stay together, since they are not independent.
        """
        # By the number in the data set, so that stores of one data set hold out the same
        # images.
        images, image_of_segment = np.unique(self.index, return_inverse=True)
        n = len(images)
        # At least one image is held out, and at least one is not.
        n_held_out = min(max(1, round(fraction * n)), n - 1)
        held_out_images = rng.permutation(n)[:n_held_out]
        mask: Mask = np.isin(image_of_segment, held_out_images)
        return mask


def find_segments(
    store: Store,
    source: MaskSource,
    choice: Segmentation,
    layouts: Sequence[TokenLayout],
    execution: Execution,
    split: str | None = None,
) -> LabelledSegments:
    """Return the segments of a store's images; the classes are the categories that occur.

    Args:
        store: the store; its transform is applied to the masks too.
        source: the masks; `match_names` says which image each belongs to.
        choice: which segments, and how tokens are weighted.
        layouts: the layouts of the sites that are read, without prefix tokens.
        execution: which images, and the seed.
        split: only images of this split of the data.

    Raises:
        MissingInput: no such split, or a store that does not say how its images were resized.
        VitseeError: no image has a mask or a segment that can be seen, or a mask is damaged or not
            of its image's size.
    """
    if not store.manifest.transform:
        raise MissingInput(
            f"{store.label} does not say how its images were resized; extract anew"
        )
    chosen = choose_rows(store, execution.images, execution.seed)
    mask = chosen.mask & store.valid
    if split is not None:
        mask &= in_split(store, split)
    source = oriented_as(store.manifest.transform, source)
    # matched: rows with a mask; numbers: the number of each one's image in the mask source.
    matched, numbers = match_rows(store, source, Rows(mask, chosen.n_invalid, chosen.how))
    n_without_mask = int(mask.sum()) - len(matched)
    how = chosen.how if split is None else f"{chosen.how}, of split {split}"
    if choice.first is not None:
        is_first = numbers < choice.first
        if not is_first.any():
            raise VitseeError(
                f"none of the first {choice.first} images of {source.name} is in {store.label}"
            )
        matched = matched[is_first]
        numbers = numbers[is_first]
        how = f"{how}, of the first {choice.first} images of the masks"
    finder = _SegmentFinder(
        store=store,
        source=source,
        choice=choice,
        layouts=list(dict.fromkeys(layouts)),
        sizes=store.sizes,
        boxes=store.samples.box,
    )
    # An order that does not depend on the store's: stores of one data set draw the same images.
    order = np.argsort(store.samples.index[matched], kind="stable")
    if choice.segments is not None:
        # A stream of its own (3), apart from those that draw images with this seed.
        order = np.random.default_rng((execution.seed, 3)).permutation(order)
    limit = choice.segments
    segments_of_row: dict[int, list[FoundSegment]] = {}
    n_left_out: Counter[str] = Counter()
    n = 0
    pairs = [(int(matched[k]), int(numbers[k])) for k in order]
    with counting(execution.progress, len(pairs), "masks") as progress:
        # Not strict: the loop ends early once there are enough segments.
        results = zip(pairs, execution.each(finder, pairs), strict=False)
        for (row, _), (segments, image_left_out) in results:
            if limit is not None:
                # The last image is cut, so that the number is exact.
                segments = segments[: limit - n]
            segments_of_row[row] = segments
            n += len(segments)
            n_left_out += image_left_out
            progress.advance(1)
            if limit is not None and n >= limit:
                how = f"{how}, {n} segments of images drawn with seed {execution.seed}"
                break
    if not n:
        crowds = " but crowds (--crowd takes them)" if n_left_out["crowds"] else ""
        # The value of PNG files; of COCO files, words.
        void = source.rules.get("void", "")
        hint = ""
        if void.isdigit():
            hint = f" (pixels of value {void} are left out; --void none makes them a segment)"
        raise VitseeError(
            f"no segment{crowds} can be seen in any of the {len(matched)} images of {store.label} "
            f"that have a mask in {source.name}{hint}"
        )
    counts = {
        "left_out_images_without_mask": n_without_mask,
        "left_out_crowds": n_left_out["crowds"],
        "left_out_empty": n_left_out["empty"],
        "left_out_not_visible": n_left_out["not_visible"],
    }
    for (noun, reason), count in zip(_LEFT_OUT, counts.values(), strict=True):
        if count:
            log.info("%s: %s are left out: %s", store.label, plural(count, noun), reason)
    # From the order in which images were drawn back to the store's.
    ordered_rows = sorted(segments_of_row)
    n_segments = [len(segments_of_row[row]) for row in ordered_rows]
    rows = np.repeat(ordered_rows, n_segments)
    segments = [segment for row in ordered_rows for segment in segments_of_row[row]]
    # Numbered by their first segment in the store's order.
    classes = list(dict.fromkeys(segment.category for segment in segments))
    class_number = {name: number for number, name in enumerate(classes)}
    mask = np.zeros(store.n_images, bool)
    mask[rows] = True
    weights = {}
    for k, layout in enumerate(finder.layouts):
        weights[layout] = Weights.of([segment.weights[k] for segment in segments])
    return LabelledSegments(
        store=store,
        mask=mask,
        rows=rows,
        labels=np.array(
            [class_number[segment.category] for segment in segments], np.int64
        ),
        classes=classes,
        index=store.samples.index[rows].astype(np.int64),
        hashes=store.samples.hash[rows],
        n_invalid=chosen.n_invalid,
        n_unlabelled=n_without_mask,
        how=how,
        remarks=chosen.remarks,
        numbers=np.arange(len(rows)),
        counts=counts,
        source={
            "masks": source.name,
            "weights": choice.weights,
            "crowd": choice.crowd,
            **lost_annotations(source),
        },
        weights=weights,
    )


class FoundSegment(NamedTuple):
    """A segment's category, and the weights of tokens for it in each layout."""

    category: str
    weights: list[Sparse]


@dataclass(frozen=True)
class _SegmentFinder:
    """Finds the segments of an image, and the weights of tokens for them in each layout.

    A callable object rather than a closure, so that it can be sent to worker processes.
    """

    store: Store
    source: MaskSource
    choice: Segmentation
    layouts: list[TokenLayout]
    sizes: NDArray[np.int32]
    boxes: NDArray[np.float32] | None

    def __call__(self, pair: tuple[int, int]) -> tuple[list[FoundSegment], Counter[str]]:
        """Return an image's segments, and the numbers of those that are left out, by reason.

        Args:
            pair: the image's row in the store, and its number in the mask source.
        """
        row, number = pair
        size = (int(self.sizes[row, 0]), int(self.sizes[row, 1]))
        where = self.source.where(number)
        transform = self.store.manifest.transform
        name = self.store.samples.id[row]
        box = None if self.boxes is None else self.boxes[row]
        segments = []
        left_out = Counter[str]()
        weighers: list[SegmentWeights] = []
        for segment in self.source.segments(number):
            pixels = cut_to_image(where, segment.mask, name, size, box)
            if segment.crowd and not self.choice.crowd:
                left_out["crowds"] += 1
                continue
            if not weighers:  # made once, and only for images with a segment
                input_size = tuple(transform["input_size"][1:])
                placement = place(transform, size)
                weighers = [
                    SegmentWeights(size, placement, layout, input_size)
                    for layout in self.layouts
                ]
            weights = []
            for weigher in weighers:
                sparse = weigher.of(pixels, self.choice.weights or "area")
                if sparse is not None:
                    weights.append(sparse)
            # A segment counts if every layout sees it: all sites then have the same
            # examples.
            if len(weights) == len(weighers):
                segments.append(FoundSegment(segment.category, weights))
            else:
                left_out["not_visible" if pixels.any() else "empty"] += 1
        return segments, left_out
