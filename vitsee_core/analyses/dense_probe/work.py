"""The images of a store that train or test, the labels of their pixels, their patch tokens, and
what is summed over them.

Labels come from class maps or depth maps, placed as the transform of the store placed its images.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.dense_probe import pixels
from vitsee_core.analyses.dense_probe.metrics import Segmentation, Task
from vitsee_core.analyses.dense_probe.pixels import (
    Head,
    Labels,
    Pixels,
    PlaceSums,
    nothing,
)
from vitsee_core.features import SiteFeatures, check_alike, choose_features
from vitsee_core.images.errors import DataError
from vitsee_core.images.placement import place
from vitsee_core.runtime.lanes import n_lanes, one_blas_thread
from vitsee_core.runtime.streaming import A, Rows
from vitsee_core.truth.masks.class_maps import IGNORED, ClassMaps
from vitsee_core.truth.masks.depth_maps import DepthMaps
from vitsee_core.truth.masks.mask_truth import cut_to_image, match_rows
from vitsee_core.truth.masks.orientation import oriented_as
from vitsee_core.types import Float32, Integers, Mask
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, SiteError, VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import SiteSpec, Slab
    from vitsee_stores.layout import TokenLayout

CHOOSING = 0.1  # of the training images
EIGEN_SIZE = 480, 640
EIGEN_PART = np.s_[45:471, 41:601]

Images = tuple[Store, Rows]

log = logging.getLogger(__name__)
_LAST = re.compile(r"last([1-9]\d*)")
W = TypeVar("W")


def drawn(store: Store, among: Mask, share: float, seed: tuple[int, ...]) -> Mask:
    """A mask (images,) of this share of some images, one at least and not all, drawn over the data
    set's own order, so that a shuffled store gives the same ones."""
    places = np.flatnonzero(among & store.valid)
    found = np.zeros(len(among), bool)
    if len(places) < 2:
        return found
    places = places[np.argsort(store.samples.index[places], kind="stable")]
    n = min(max(1, round(share * len(places))), len(places) - 1)
    found[np.random.default_rng(seed).permutation(places)[:n]] = True
    return found


@dataclass(frozen=True)
class Truth:
    """The labels of a store's images.

    Attributes:
        maps: the class maps or depth maps.
        mask: (images,) which rows of the store have a map.
        numbers: row -> the number of its map.
        layouts: the grids of tokens, by a key that sites share.
        resolution: one of `pixels.RESOLUTIONS`.
        eigen: only pixels in the crop of Eigen et al. 2014 count.
    """

    store: Store
    maps: ClassMaps | DepthMaps
    mask: Mask
    numbers: Mapping[int, int]
    layouts: Mapping[str, TokenLayout]
    resolution: str
    eigen: bool = False

    @classmethod
    def find(
        cls,
        store: Store,
        maps: ClassMaps | DepthMaps,
        rows: Rows,
        layouts: Mapping[str, TokenLayout],
        resolution: str,
        eigen: bool = False,
    ) -> tuple[Truth, dict[str, int]]:
        """Find the maps of these images; images without one are left out, counted and logged.

        Raises:
            MissingInput: the store does not say how its images were resized, or their sizes.
            VitseeError: no image has a map, or the transform does more than resize and crop.
        """
        transform = store.manifest.transform
        if not transform:
            raise MissingInput(
                f"{store.label} does not say how its images were resized; extract anew"
            )
        wanted = int((rows.mask & store.valid).sum())
        maps = oriented_as(transform, maps)
        matched, numbers = match_rows(store, maps, rows)
        try:
            place(transform, store.sizes[matched[0]].tolist())
        except DataError as error:
            raise VitseeError(f"{store.label}: {error}") from None
        mask = np.zeros(store.n_images, bool)
        mask[matched] = True
        if left := wanted - len(matched):
            log.info(
                "%s: %d of %d images are left out: without a map",
                store.label,
                left,
                wanted,
            )
        of_row = dict(zip(matched.tolist(), numbers.tolist(), strict=True))
        counts = {"with_mask": len(matched), "left_out_without_mask": left}
        return cls(store, maps, mask, of_row, layouts, resolution, eigen), counts

    @property
    def rows(self) -> Rows:
        """The images that have a map."""
        return Rows(self.mask, 0, "with a map")

    def labels(self, row: int) -> Labels:
        """The labels of an original image, (height, width).

        Raises:
            VitseeError: it cannot be read, or is not of its image's size.
        """
        number = self.numbers[row]
        where = self.maps.where(number)
        found: Labels = self.maps.read(number)
        if self.eigen:
            found = eigen_crop(where, found)
        box = self.store.samples.box
        name, (height, width) = (
            str(self.store.samples.file[row]),
            self.store.sizes[row].tolist(),
        )
        part = None if box is None else box[row]
        return cut_to_image(where, found, name, (height, width), part)

    def pixels(self, row: int) -> dict[str, Pixels]:
        """The labelled pixels of an image for each grid; raises as `labels`."""
        truth = self.labels(row)
        transform = self.store.manifest.transform
        placement = place(transform, truth.shape)
        size = tuple(transform["input_size"][1:])
        return {
            key: pixels.labelled_pixels(truth, placement, layout, size, self.resolution)
            for key, layout in self.layouts.items()
        }

    def cells(self, row: int) -> dict[str, Labels]:
        """The labels (cells, pixels) of each cell's pixels of the model's input, for each grid;
        none of cells whose middle is beside the image.

        Raises:
            VitseeError: cells are not whole pixels; see `labels`.
        """
        truth = self.labels(row)
        transform = self.store.manifest.transform
        height, width = transform["input_size"][1:]
        placement = place(transform, truth.shape)
        seen = pixels.on_input(truth, placement, (height, width))
        found = {}
        for key, layout in self.layouts.items():
            cells = pixels.cell_pixels(seen, layout)
            if cells is None:
                raise VitseeError(
                    f"{self.store.label}: cells of the grid {key} px are not of equal whole pixels "
                    "of the input; expected such for this --solver (ridge takes any grid)"
                )
            inside = placement.on_image(layout).reshape(-1, 1)
            found[key] = np.where(inside, cells, cells.dtype.type(nothing(cells)))
        return found


def eigen_crop(where: str, depths: Labels) -> Labels:
    """Keep the depths of a map (480, 640) in rows 45 to 470 and columns 41 to 600 alone.

    Raises:
        VitseeError: a map of another size.
    """
    if depths.shape != EIGEN_SIZE:
        raise VitseeError(
            f"{where} is {depths.shape[1]} x {depths.shape[0]} pixels; --eigen-crop expects NYU's "
            f"{EIGEN_SIZE[1]} x {EIGEN_SIZE[0]}"
        )
    found = np.full_like(depths, nothing(depths))
    found[EIGEN_PART] = depths[EIGEN_PART]
    return found


def parse_concat(text: str) -> int:
    """The number of last sites: 4 of `last4`. Raises VitseeError: another word."""
    if (found := _LAST.fullmatch(text)) is None:
        raise VitseeError(f"{text!r}; expected lastN, like last4")
    return int(found[1])


@dataclass(frozen=True)
class Patches:
    """The patch tokens that one probe reads: of a site, or of several with their channels side by
    side. The place in the model is that of the last one, see `tables.columns.Measured`."""

    sites: tuple[SiteSpec, ...]
    parts: tuple[SiteFeatures, ...]

    @classmethod
    def of(cls, store: Store, sites: Sequence[SiteSpec]) -> Patches:
        """The patch tokens of the sites with these names in a store.

        Raises:
            SiteError: no such site.
            MissingInput: a site is stored pooled only.
        """
        parts = [choose_features(store, site, "patches", partial=True) for site in sites]
        return cls(tuple(sites), tuple(parts))

    @property
    def name(self) -> str:
        return "+".join(site.name for site in self.sites)

    @property
    def block(self) -> str | None:
        return self.sites[-1].block

    @property
    def depth(self) -> int:
        return self.sites[-1].depth

    @property
    def rel_depth(self) -> float:
        return self.sites[-1].rel_depth

    @property
    def layout(self) -> TokenLayout:
        layout = self.parts[-1].layout
        assert layout is not None
        return layout

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of cells."""
        assert self.layout.grid is not None
        return self.layout.grid

    @cached_property
    def dim(self) -> int:
        return sum(part.dim for part in self.parts)

    @property
    def slab_bytes(self) -> int:
        """The bytes that a slab takes while it is read."""
        return sum(part.slab_bytes for part in self.parts)

    def of_slab(self, slab: Slab) -> Float32:
        """The tokens (images, cells, dim) of a slab's images that count.

        Raises:
            VitseeError: a number is not finite.
        """
        found = [part.of_slab(slab, slice(0, len(part.tokens))) for part in self.parts]
        if len(found) == 1:
            return found[0]
        return np.concatenate(found, axis=-1)

    def load(self, row: int) -> NDArray[Any]:
        """Read the (cells, dim) tokens of a row of the store, in the stored type."""
        rows = slice(row, row + 1)
        found = [part.load(rows, slice(0, len(part.tokens)))[0] for part in self.parts]
        return np.concatenate(found, axis=-1)

    def check_alike(self, others: Patches) -> None:
        """Refuse other tokens or channels in the test store: raises StoreMismatch."""
        for ours, theirs in zip(self.parts, others.parts, strict=True):
            check_alike(ours, theirs)


def probed(store: Store, sites: Sequence[SiteSpec], concat: int | None) -> list[Patches]:
    """The patches of each site alone, or of the last `concat` together.

    Raises:
        SiteError: there are fewer, or their grids differ.
        MissingInput: a site is stored pooled only.
    """
    if concat is None:
        return [Patches.of(store, [site]) for site in sites]
    if len(sites) < concat:
        raise SiteError(
            f"--concat last{concat}: {store.label} has {len(sites)} of the chosen sites with a "
            "grid; expected as many at least (see --sites)"
        )
    last = sites[-concat:]
    for site in last:
        if _place(site.layout) != _place(last[-1].layout):
            raise SiteError(
                f"--concat last{concat}: the grids of {site.name} and {last[-1].name} differ "
                f"({_place(site.layout)} and {_place(last[-1].layout)}); expected one grid, "
                "choose with --sites"
            )
    return [Patches.of(store, last)]


def _place(layout: TokenLayout | None) -> str:
    assert layout is not None
    return f"{layout.grid} every {layout.stride_px} px"


@dataclass(frozen=True)
class SplitImages:
    """The images of one store that train, or that test.

    Attributes:
        features: name of what is probed -> its patches.
        grids: the same name -> key of its grid in `truth.layouts`.
        truth: the labels.
        counts: how many images have a map, for a sidecar.
    """

    store: Store
    task: Task
    features: dict[str, Patches]
    grids: dict[str, str]
    truth: Truth
    counts: dict[str, int]

    @classmethod
    def of(
        cls,
        store: Store,
        rows: Rows,
        chosen: Sequence[Patches],
        task: Task,
        resolution: str,
        eigen: bool = False,
    ) -> SplitImages:
        """Find the labels of some images of a store.

        Raises:
            VitseeError: no image has a map.
        """
        # Equal for grids that lie alike on the input.
        grids = {
            one.name: f"{one.layout.grid} every {one.layout.stride_px} from {one.layout.offset_px}"
            for one in chosen
        }
        layouts = {grids[one.name]: one.layout for one in chosen}
        truth, counts = Truth.find(store, task.maps, rows, layouts, resolution, eigen)
        return cls(store, task, {one.name: one for one in chosen}, grids, truth, counts)

    @property
    def n_images(self) -> int:
        """The number of images with a map."""
        return int(self.truth.mask.sum())

    @property
    def slab_bytes(self) -> int:
        """The bytes that one slab takes while it is worked on."""
        return max((own.slab_bytes for own in self.features.values()), default=1)

    def fold(
        self, make: Callable[[], A], execution: Execution, size: int | None = None
    ) -> A:
        """Fold the part's images on threads of one BLAS thread each; size: bytes of one's work."""
        size = self.slab_bytes if size is None else size
        with lanes(size, execution) as wider:
            return wider.fold(self.store, make, self.truth.rows, slab_bytes=size).result()

    def no_pixel(self, use: str) -> VitseeError:
        """The error that there is nothing to train or to test with."""
        return VitseeError(
            f"no pixel of the {self.n_images} {use} images of {self.store.label} has a "
            f"{self.task.label} in {self.truth.maps.name} (all are ignored, or were cropped)"
        )

    def require_classes(self, classes: Integers, use: str) -> None:
        """Check that there is something to tell apart. classes: those that occur. Raises
        VitseeError: fewer than two."""
        if len(classes) > 1:
            return
        names = self.task.maps.classes if isinstance(self.task, Segmentation) else ()
        number = int(classes[0])
        name = names[number] if number < len(names) else str(number)
        raise VitseeError(
            f"all pixels of the {self.n_images} {use} images of {self.store.label} that have a "
            f"class in {self.truth.maps.name} are of the class {name}; expected two classes at "
            f"least ({IGNORED} is never one: give such pixels another value)"
        )


def counted_rows(slab: Slab) -> list[int]:
    """The store's rows of a slab's images that count."""
    return np.arange(slab.rows.start, slab.rows.stop)[slab.valid].tolist()


@contextmanager
def lanes(size: int, execution: Execution) -> Iterator[Execution]:
    """An execution with as many threads as cores and memory allow, each with one BLAS thread; size:
    bytes of one's work."""
    if execution.map is None:
        width = n_lanes(execution.budget // (2 * size))
        execution = replace(execution, jobs=max(execution.jobs, width))
    with one_blas_thread():
        yield execution


@dataclass
class Sums(Generic[W]):
    """An accumulator, see `streaming.Accumulator`: its fields but `work`, which says what is done,
    are dicts of what adds up. Another process returns these alone."""

    work: W | None

    def __getstate__(self) -> dict[str, Any]:
        filled = any(found for name, found in vars(self).items() if name != "work")
        return self.__dict__ | ({"work": None} if filled else {})

    def merge(self, other: Self) -> None:
        """Add the sums of later slabs."""
        for name, own in vars(self).items():
            if name != "work":
                for key, value in getattr(other, name).items():
                    own[key] = own[key] + value if key in own else value

    def result(self) -> Self:
        """The sums themselves."""
        return self


@dataclass(frozen=True)
class HeadKey:
    """Identifies a head: that of a site at an l2 or with k neighbours, or a baseline on a grid."""

    of: str
    l2: float | None = None
    k: int | None = None
    baseline: str = ""


@dataclass(frozen=True)
class Trained:
    """The trained probes of a pair of stores, and notes on the training for a sidecar."""

    heads: dict[HeadKey, Head]
    notes: dict[str, object]


def blind_heads(task: Task, places: Mapping[str, PlaceSums]) -> dict[HeadKey, Head]:
    """The head of each baseline of every grid."""
    found = {}
    for grid, own in places.items():
        classes, *both = own.scores()
        for name, scores in zip(task.baselines, both, strict=True):
            found[HeadKey(grid, baseline=name)] = task.head(classes, scores)
    return found
