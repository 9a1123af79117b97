"""The segments of a store's images: the user's choice, their labels and their tokens' weights."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

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
    """Segments of images in place of the images.

    masks, panoptic, background, void: see `masks.open_masks`. weights: of tokens, see
    `segments.weights`; `area` by default. crowd: whether groups of objects that nobody told apart
    are segments; by default they are not. segments: so many at most, of images drawn with the seed.
    first: only of the first so many images of the masks (of COCO files by their ids).
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
        """The same with these values where none was chosen."""
        return replace(
            self, **{name: v for name, v in values.items() if getattr(self, name) is None}
        )

    def open(self) -> MaskSource:
        """The masks. Raises VitseeError: see `open_masks`; or an unknown choice."""
        if self.weights not in (None, *WEIGHTS):
            raise VitseeError(
                f"no weights {self.weights!r}; expected {', '.join(WEIGHTS)}"
            )
        for what, n in (("segments", self.segments), ("images", self.first)):
            if n is not None and n < 1:
                raise VitseeError(
                    f"{n} {what} were asked for; expected a positive number"
                )
        masks = self.masks
        paths = [masks] if isinstance(masks, (str, os.PathLike)) else list(masks)
        panoptic = None if self.panoptic is None else Path(self.panoptic)
        return open_masks(
            [Path(path) for path in paths], self.background, self.void, panoptic
        )


def as_segmentation(
    masks: Segmentation | Path | str | Sequence[Path | str] | None,
) -> Segmentation | None:
    """The choices that go with masks given as such, or as paths alone."""
    if masks is None or isinstance(masks, Segmentation):
        return masks
    return Segmentation(masks)


log = logging.getLogger(__name__)

# Of the counts of `find_segments`, in their order: what is left out, and why.
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
    """Segments in place of images: `rows`, `labels`, `index`, `hashes` have an entry per segment,
    in the order of the store's rows and then of the masks.

    numbers: (n,) their places in `weights`, ascending. weights: layout -> of all segments that were
    found. counts: what became of images and segments; source: the masks, and how they were taken;
    both for a sidecar.
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
        return len(np.unique(self.rows))

    def describe(self) -> dict[str, Any]:
        about = {"images": self.n_images, "segments": len(self), "chosen": self.how}
        remarks = {"remarks": list(self.remarks)} if self.remarks else {}
        return {**about, **self.counts, **self.source, **remarks}

    def jackknife(self, seed: int) -> Blocks:
        """Blocks of images: the segments of an image are in one block."""
        images = Blocks.of(self.store, self.mask, seed)
        return Blocks(images.of_rows[self.rows], images.of_rows, images.digest)

    def read(
        self, features: Any, places: Integers, part: slice, *, jobs: int, memory: int
    ) -> Iterator[tuple[Integers, Float32]]:
        """(places, vectors (segments, 1, dim)) of these segments, slab by slab."""
        assert isinstance(features, SegmentFeatures)
        del part
        rows = self.rows[places]
        numbers = self.numbers[places]
        done = 0
        for x in features.of_segments(rows, numbers, jobs=jobs, memory=memory):
            yield places[done : done + len(x)], x[:, np.newaxis]
            done += len(x)

    def ends(
        self, value: float, n: int, right: int | None, replicates: Float | None
    ) -> tuple[float, float]:
        del n, right
        if replicates is None:
            return np.nan, np.nan
        return jackknife_share(value, replicates, self.n_images)

    def counted(self, among: Mask | None = None) -> dict[str, int]:
        rows = self.rows if among is None else self.rows[among]
        return {"n_images": len(np.unique(rows)), "n_segments": len(rows)}

    def subset(self, keep: Mask, how: str) -> Self:
        return replace(super().subset(keep, how), numbers=self.numbers[keep])

    def held_out(self, share: float, rng: np.random.Generator) -> Mask:
        """(n,) the segments of this share of the images: those of one image stay together."""
        _, first, image = np.unique(self.index, return_index=True, return_inverse=True)
        n = len(first)
        some = rng.permutation(n)[: min(max(1, round(share * n)), n - 1)]
        found: Mask = np.isin(image, some)
        return found


def find_segments(
    store: Store,
    source: MaskSource,
    choice: Segmentation,
    layouts: Sequence[TokenLayout],
    execution: Execution,
    split: str | None = None,
) -> LabelledSegments:
    """The segments of a store's images; the classes are the categories that occur.

    Args:
        store: its transform is the masks' too.
        source: of the masks; see `match_names` for which image each belongs to.
        choice: which segments, and their weights.
        layouts: of the sites that are read, without prefix tokens.
        execution: which images.
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
    matched, numbers = match_rows(store, source, Rows(mask, chosen.n_invalid, chosen.how))
    without = int(mask.sum()) - len(matched)
    how = chosen.how if split is None else f"{chosen.how}, of split {split}"
    if choice.first is not None:
        kept = numbers < choice.first
        if not kept.any():
            raise VitseeError(
                f"none of the first {choice.first} images of {source.name} is in {store.label}"
            )
        matched = matched[kept]
        numbers = numbers[kept]
        how = f"{how}, of the first {choice.first} images of the masks"
    found = _SegmentFinder(
        store,
        source,
        choice,
        list(dict.fromkeys(layouts)),
        store.sizes,
        store.samples.box,
    )
    # An order that does not depend on the store's: stores of one data set draw the same images.
    order = np.argsort(store.samples.index[matched], kind="stable")
    if choice.segments is not None:
        order = np.random.default_rng((execution.seed, 3)).permutation(order)
    limit = choice.segments
    of_image: dict[int, list[tuple[str, list[Sparse]]]] = {}
    tally: Counter[str] = Counter()
    n = 0
    pairs = [(int(matched[k]), int(numbers[k])) for k in order]
    with counting(execution.progress, len(pairs), "masks") as progress:
        for (row, _), (some, left) in zip(
            pairs, execution.each(found, pairs), strict=False
        ):
            of_image[row] = some if limit is None else some[: limit - n]
            n += len(of_image[row])
            tally += left
            progress.advance(1)
            if limit is not None and n >= limit:
                how = f"{how}, {n} segments of images drawn with seed {execution.seed}"
                break
    if not n:
        crowds = " but crowds (--crowd takes them)" if tally["crowds"] else ""
        raise VitseeError(
            f"no segment{crowds} can be seen in any of the {len(matched)} images of {store.label} "
            f"that have a mask in {source.name}"
        )
    counts = {
        "left_out_images_without_mask": without,
        **{
            f"left_out_{what}": tally[what] for what in ("crowds", "empty", "not_visible")
        },
    }
    about = {"masks": source.name, "weights": choice.weights, "crowd": choice.crowd}
    for (what, why), n_left in zip(_LEFT_OUT, counts.values(), strict=True):
        if n_left:
            log.info("%s: %s are left out: %s", store.label, plural(n_left, what), why)
    rows = np.repeat(sorted(of_image), [len(of_image[row]) for row in sorted(of_image)])
    flat = [one for row in sorted(of_image) for one in of_image[row]]
    names = [name for name, _ in flat]
    classes = list(dict.fromkeys(names))
    where = {name: number for number, name in enumerate(classes)}
    used = np.zeros(store.n_images, bool)
    used[rows] = True
    return LabelledSegments(
        store=store,
        mask=used,
        rows=rows,
        labels=np.array([where[name] for name in names], np.int64),
        classes=classes,
        index=store.samples.index[rows].astype(np.int64),
        hashes=store.samples.hash[rows],
        n_invalid=chosen.n_invalid,
        n_unlabelled=without,
        how=how,
        remarks=chosen.remarks,
        numbers=np.arange(len(rows)),
        counts=counts,
        source=about,
        weights={
            layout: Weights.of([sparse[at] for _, sparse in flat])
            for at, layout in enumerate(found.layouts)
        },
    )


@dataclass(frozen=True)
class _SegmentFinder:
    """The segments of one image, with their weights in each layout."""

    store: Store
    source: MaskSource
    choice: Segmentation
    layouts: list[TokenLayout]
    sizes: NDArray[np.int32]
    boxes: NDArray[np.float32] | None

    def __call__(
        self, pair: tuple[int, int]
    ) -> tuple[list[tuple[str, list[Sparse]]], Counter[str]]:
        row, number = pair
        size = (int(self.sizes[row, 0]), int(self.sizes[row, 1]))
        where = self.source.where(number)
        transform = self.store.manifest.transform
        name = self.store.samples.id[row]
        box = None if self.boxes is None else self.boxes[row]
        found = []
        left = Counter[str]()
        weighers: list[SegmentWeights] = []
        for one in self.source.segments(number):
            pixels = cut_to_image(where, one.mask, name, size, box)
            if one.crowd and not self.choice.crowd:
                left["crowds"] += 1
                continue
            if not weighers:
                seen = tuple(transform["input_size"][1:])
                placed = place(transform, size)
                weighers = [
                    SegmentWeights(size, placed, layout, seen) for layout in self.layouts
                ]
            sparse = [
                weigher.of(pixels, self.choice.weights or "area") for weigher in weighers
            ]
            known = [some for some in sparse if some is not None]
            if len(known) == len(sparse):
                found.append((one.category, known))
            else:
                left["not_visible" if pixels.any() else "empty"] += 1
        return found, left
