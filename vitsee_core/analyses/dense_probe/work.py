"""The images of a store that train or test, the labels of their pixels, their patch tokens, and
what is summed over them.

Labels come from class maps or depth maps, placed as the transform of the store placed its images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.dense_probe.metrics import Segmentation, Task
from vitsee_core.analyses.dense_probe.pixels import (
    Head,
    PlaceSums,
)
from vitsee_core.analyses.dense_probe.truth import (
    Truth,
)
from vitsee_core.features import SiteFeatures, check_alike, choose_features
from vitsee_core.runtime.lanes import n_lanes, one_blas_thread
from vitsee_core.runtime.streaming import A, Rows
from vitsee_core.truth.masks.png_maps import IGNORED, PLAIN
from vitsee_core.types import Float32, Integers, Mask
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import SiteSpec, Slab
    from vitsee_stores.layout import TokenLayout

CHOOSING = 0.1  # share of the training images that chooses l2 or k

_LAST_N = re.compile(r"last([1-9]\d*)")
W = TypeVar("W")


def draw_images(store: Store, among: Mask, share: float, seed: tuple[int, ...]) -> Mask:
    """Draw a share of some images, at least one and not all; return their mask (images,).

    They are drawn over the data set's own order, so that a shuffled store gives the same ones.

    Args:
        store: the store.
        among: (images,) which may be drawn.
        share: between 0 and 1.
        seed: seed of the draw.
    """
    mask = np.zeros(len(among), bool)
    rows = np.flatnonzero(among & store.valid)
    if len(rows) < 2:
        return mask
    rows = rows[np.argsort(store.samples.index[rows], kind="stable")]
    n_drawn = min(max(1, round(share * len(rows))), len(rows) - 1)
    mask[np.random.default_rng(seed).permutation(rows)[:n_drawn]] = True
    return mask


def parse_concat(text: str) -> int:
    """Return the number of last sites, e.g. 4 for `last4`.

    Raises:
        VitseeError: another word.
    """
    match = _LAST_N.fullmatch(text)
    if match is None:
        raise VitseeError(f"{text!r}; expected lastN, like last4")
    return int(match[1])


@dataclass(frozen=True)
class Patches:
    """The patch tokens that one probe reads.

    They are those of a site, or of several sites with their channels side by side. Block and depth
    are those of the last site.

    Attributes:
        sites: the sites.
        parts: the features of each site.
    """

    sites: tuple[SiteSpec, ...]
    parts: tuple[SiteFeatures, ...]

    @classmethod
    def of(cls, store: Store, sites: Sequence[SiteSpec]) -> Patches:
        """Return the patch tokens of the sites with these names in a store.

        Raises:
            SiteError: no such site.
            MissingInput: a site is stored pooled only.
        """
        parts = [choose_features(store, site, "patches", partial=True) for site in sites]
        return cls(tuple(sites), tuple(parts))

    @property
    def name(self) -> str:
        """The names of the sites, joined by +."""
        return "+".join(site.name for site in self.sites)

    @property
    def block(self) -> str | None:
        """The block of the last site."""
        return self.sites[-1].block

    @property
    def depth(self) -> int:
        """The depth of the last site."""
        return self.sites[-1].depth

    @property
    def rel_depth(self) -> float:
        """The relative depth of the last site, 0 to 1."""
        return self.sites[-1].rel_depth

    @property
    def layout(self) -> TokenLayout:
        """The layout of the tokens, which all sites share."""
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
        """Channels of all sites together."""
        return sum(part.dim for part in self.parts)

    @property
    def slab_bytes(self) -> int:
        """The bytes that a slab takes while it is read."""
        return sum(part.slab_bytes for part in self.parts)

    def of_slab(self, slab: Slab) -> Float32:
        """Return the tokens (images, cells, dim) of a slab's images that count.

        Raises:
            VitseeError: a number is not finite.
        """
        tokens = [part.of_slab(slab, slice(0, len(part.tokens))) for part in self.parts]
        if len(tokens) == 1:
            return tokens[0]  # without a copy
        return np.concatenate(tokens, axis=-1)

    def load(self, row: int) -> NDArray[Any]:
        """Return the tokens (cells, dim) of a row of the store, in the stored type."""
        rows = slice(row, row + 1)
        tokens = [part.load(rows, slice(0, len(part.tokens)))[0] for part in self.parts]
        return np.concatenate(tokens, axis=-1)

    def check_alike(self, test_patches: Patches) -> None:
        """Refuse other tokens or channels in the test store.

        Raises:
            StoreMismatch: they differ.
        """
        for train_part, test_part in zip(self.parts, test_patches.parts, strict=True):
            check_alike(train_part, test_part)


def probed_patches(
    store: Store, sites: Sequence[SiteSpec], concat: int | None
) -> list[Patches]:
    """Return the patches that each probe reads: of a site alone, or of the last `concat` together.

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
    last_grid = _grid_in_words(last[-1].layout)
    for site in last:
        grid = _grid_in_words(site.layout)
        if grid != last_grid:
            raise SiteError(
                f"--concat last{concat}: the grids of {site.name} and {last[-1].name} differ "
                f"({grid} and {last_grid}); expected one grid, choose with --sites"
            )
    return [Patches.of(store, last)]


def _grid_in_words(layout: TokenLayout | None) -> str:
    """Return the size and the stride of a grid."""
    assert layout is not None
    return f"{layout.grid} every {layout.stride_px} px"


@dataclass(frozen=True)
class SplitImages:
    """The images of one store that train, or that test.

    Attributes:
        store: the store.
        task: what is predicted.
        features: name of what is probed -> its patches.
        grids: the same name -> key of its grid in `truth.layouts`.
        truth: the labels.
        counts: how many images have a map, for a table's notes.
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
        patches: Sequence[Patches],
        *,
        task: Task,
        resolution: str,
        eigen_crop: bool = False,
    ) -> SplitImages:
        """Return some images of a store with their labels.

        Args:
            store: the store.
            rows: which of its images.
            patches: what each probe reads.
            task: what is predicted.
            resolution: where pixels are counted, one of `pixels.RESOLUTIONS`.
            eigen_crop: count only pixels in the crop of Eigen et al. 2014.

        Raises:
            VitseeError: no image has a map.
        """
        grids = {}
        layouts = {}
        for each in patches:
            layout = each.layout
            # Equal for grids that lie alike on the input, which share their labels.
            key = f"{layout.grid} every {layout.stride_px} from {layout.offset_px}"
            grids[each.name] = key
            layouts[key] = layout
        truth, counts = Truth.find(
            store, task.maps, rows, layouts, resolution, eigen_crop
        )
        features = {each.name: each for each in patches}
        return cls(store, task, features, grids, truth, counts)

    @property
    def n_images(self) -> int:
        """The number of images with a map."""
        return int(self.truth.mask.sum())

    @property
    def slab_bytes(self) -> int:
        """The bytes that one slab takes while it is worked on."""
        return max((patches.slab_bytes for patches in self.features.values()), default=1)

    def fold(
        self, make: Callable[[], A], execution: Execution, size: int | None = None
    ) -> A:
        """Fold the images slab by slab, on threads of one BLAS thread each.

        Args:
            make: returns an empty accumulator.
            execution: threads and memory.
            size: bytes that one slab's work takes; None for the tokens alone.
        """
        if size is None:
            size = self.slab_bytes
        with lanes(size, execution) as wider:
            return wider.fold(self.store, make, self.truth.rows, slab_bytes=size).result()

    def no_pixel(self, use: str) -> VitseeError:
        """Return the error that no pixel has a label. use: "training" or "test"."""
        return VitseeError(
            f"no pixel of the {self.n_images} {use} images of {self.store.label} has a "
            f"{self.task.label} in {self.truth.maps.name} (all are ignored, or were cropped)"
        )

    def require_classes(self, classes: Integers, use: str) -> None:
        """Require at least two classes, so that there is something to tell apart.

        Args:
            classes: numbers of the classes that occur.
            use: "training" or "test", for the error.

        Raises:
            VitseeError: there are fewer.
        """
        if len(classes) > 1:
            return
        number = int(classes[0])
        name = str(number)
        if isinstance(self.task, Segmentation) and number < len(self.task.maps.classes):
            name = self.task.maps.classes[number]
        hint = ""
        ignored_values = self.truth.maps.rules.get("ignored values", "").split(", ")
        if PLAIN in self.truth.maps.rules["layout"] and str(IGNORED) in ignored_values:
            hint = f" (pixels of value {IGNORED} are left out; --void none makes them a class)"
        raise VitseeError(
            f"all pixels of the {self.n_images} {use} images of {self.store.label} that have a "
            f"class in {self.truth.maps.name} are of the class {name}; expected two classes at "
            f"least{hint}"
        )


def counted_rows(slab: Slab) -> list[int]:
    """Return the store's rows of a slab's images that count."""
    return np.arange(slab.rows.start, slab.rows.stop)[slab.valid].tolist()


@contextmanager
def lanes(size: int, execution: Execution) -> Iterator[Execution]:
    """Yield an execution with as many threads as cores and memory allow, of one BLAS thread each.

    size: bytes that one thread's work takes.
    """
    if execution.map is None:
        width = n_lanes(execution.budget // (2 * size))
        execution = replace(execution, jobs=max(execution.jobs, width))
    with one_blas_thread():
        yield execution


@dataclass
class Sums(Generic[W]):
    """An accumulator of sums over slabs (a `streaming.Accumulator`).

    `work` says what is done. The other fields are dicts: key -> what adds up.
    """

    work: W | None

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields to pickle: with `work` on the way to another process, and without it on
        the way back, as it may be large (a bank of patches)."""
        state = dict(self.__dict__)
        if any(sums for name, sums in state.items() if name != "work"):
            state["work"] = None
        return state

    def merge(self, other: Self) -> None:
        """Add the sums of later slabs."""
        for name, sums in vars(self).items():
            if name == "work":
                continue
            for key, value in getattr(other, name).items():
                sums[key] = sums[key] + value if key in sums else value

    def result(self) -> Self:
        """Return the sums themselves."""
        return self


@dataclass(frozen=True)
class HeadKey:
    """Identifies a head.

    Attributes:
        of: name of the probed site or sites; for a baseline the key of the grid.
        l2: l2 of the fit; None if the solver has none, and for a baseline.
        k: number of neighbours; None if the solver has none.
        baseline: name of the baseline; "" for a probe.
    """

    of: str
    l2: float | None = None
    k: int | None = None
    baseline: str = ""


@dataclass(frozen=True)
class Trained:
    """The trained probes of a pair of stores, and notes on the training for a table."""

    heads: dict[HeadKey, Head]
    notes: dict[str, object]


def blind_heads(task: Task, places: Mapping[str, PlaceSums]) -> dict[HeadKey, Head]:
    """Return the head of each baseline of every grid; baselines see no tokens.

    places: key of a grid -> sums of labels at each cell.
    """
    heads = {}
    for grid, place_sums in places.items():
        classes, *scores_of_baselines = place_sums.scores()
        for name, scores in zip(task.baselines, scores_of_baselines, strict=True):
            heads[HeadKey(grid, baseline=name)] = task.head(classes, scores)
    return heads
