"""The images of a store that train or test: which they are, their labels and their patch
tokens.

`SplitImages` is what solvers learn from; `Sums` is what they accumulate over its slabs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.dense_probe.metrics import Segmentation, Task
from vitsee_core.analyses.dense_probe.pixels import Truth
from vitsee_core.features import (
    SiteFeatures,
    check_alike,
    choose_features,
    require_comparable,
)
from vitsee_core.images.errors import DataError
from vitsee_core.images.selection import named_only
from vitsee_core.runtime.lanes import n_lanes, one_blas_thread
from vitsee_core.runtime.streaming import A, Rows
from vitsee_core.truth.labels.labelled_rows import in_split
from vitsee_core.truth.masks.png_maps import IGNORED, PLAIN
from vitsee_core.types import Float32, Integers, Mask
from vitsee_stores import Store, open_store
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import SiteSpec, Slab
    from vitsee_stores.layout import TokenLayout


W = TypeVar("W")


class ImagePair(NamedTuple):
    """The images that train and those that test; both may be of one store."""

    train: Store
    train_rows: Rows
    test: Store
    test_rows: Rows


def image_pairs(
    train: Store,
    tests: Sequence[Store],
    *,
    split: str | None,
    holdout: float | None,
    execution: Execution,
    train_execution: Execution,
) -> list[ImagePair]:
    """Return the images that train and those that test, for each store that tests.

    Args:
        train: store that trains.
        tests: stores that test; () if a part of `train` does.
        split: name of that part, or a file that lists its images.
        holdout: share of the images that is that part.
        execution: how many images of each test store are used.
        train_execution: how many images of the training store are used beside them.
    """
    if not tests:
        train_rows, test_rows = split_images(train, execution, split, holdout)
        return [ImagePair(train, train_rows, train, test_rows)]
    require_comparable(train, tests, trains="dense-probe")
    train_rows = train_execution.rows(train)
    return [ImagePair(train, train_rows, test, execution.rows(test)) for test in tests]


def open_untrained(paths: Sequence[Path], n_tests: int) -> list[Store]:
    """Open the stores of an untrained model: the training store, then the test stores.

    Raises:
        VitseeError: their number differs from that of the trained model's stores.
    """
    if len(paths) != 1 + n_tests:
        stores = "TRAIN and each TEST" if n_tests else "the store"
        raise VitseeError(
            f"--untrained was given {len(paths)} times; expected {1 + n_tests}: the "
            f"stores of a model with random weights for {stores}, in this order"
        )
    return [open_store(path) for path in paths]


def split_images(
    store: Store, execution: Execution, split: str | None, holdout: float | None
) -> tuple[Rows, Rows]:
    """Return the images of one store that train, and those that test.

    Those of a split of its data test, or those in the list of a file; or a share that is
    held out, drawn over the data set's own order.

    Raises:
        VitseeError: no such split, or nothing is left to train or to test.
    """
    rows = execution.rows(store)
    if split is not None:
        is_tested = _mask_of_split(store, split)
        how = f"of split {split}"
    else:
        assert holdout is not None
        is_tested = draw_images(store, rows.mask, holdout, (execution.seed, 2))
        how = f"{holdout:g} held out with seed {execution.seed}"
    train_mask = rows.mask & ~is_tested
    test_mask = rows.mask & is_tested
    _require_images(store, train_mask, "train", f"{rows.how}, {how}")
    _require_images(store, test_mask, "test", f"{rows.how}, {how}")
    train_rows = _subset(store, rows, train_mask, f"not {how}")
    test_rows = _subset(store, rows, test_mask, f"those {how}")
    return train_rows, test_rows


def _require_images(store: Store, mask: Mask, use: str, how: str) -> None:
    """Refuse a selection without an image. use: "train" or "test"; how: they were
    selected."""
    if not (mask & store.valid).any():
        raise VitseeError(f"{store.label}: no image is left to {use} ({how})")


def _subset(store: Store, rows: Rows, mask: Mask, how: str) -> Rows:
    """Return the selected rows of a mask (images,)."""
    n_invalid = int((mask & ~store.valid).sum())
    return replace(rows, mask=mask, n_invalid=n_invalid, how=how)


def _mask_of_split(store: Store, split: str) -> Mask:
    """Return a mask (images,) of those in a split, or in the list of a file."""
    if not Path(split).is_file():
        return in_split(store, split)
    try:
        return named_only(Path(split), store.samples.id.tolist(), store.label)
    except DataError as error:
        raise VitseeError(str(error)) from None


def draw_images(store: Store, among: Mask, share: float, seed: tuple[int, ...]) -> Mask:
    """Draw a share of some images, at least one and not all; return their mask (images,).

    They are drawn over the data set's own order, so that a shuffled store gives the same
    ones.

    Args:
        store: the store.
        among: (images,) which may be drawn.
        share: between 0 and 1.
        seed: seed of the draw.
    """
    mask = np.zeros(len(among), bool)
    rows = np.flatnonzero(among & store.valid)
    if len(rows) < 2:
        return mask  # a single image cannot be drawn and left
    rows = rows[np.argsort(store.samples.index[rows], kind="stable")]
    n_drawn = min(max(1, round(share * len(rows))), len(rows) - 1)
    mask[np.random.default_rng(seed).permutation(rows)[:n_drawn]] = True
    return mask


@dataclass(frozen=True)
class Patches:
    """The patch tokens that one probe reads.

    They are those of a site, or of several sites with their channels side by side. Block
    and depth are those of the last site.

    Attributes:
        sites: the sites.
        site_features: the features of each site.
    """

    sites: tuple[SiteSpec, ...]
    site_features: tuple[SiteFeatures, ...]

    @classmethod
    def of(cls, store: Store, sites: Sequence[SiteSpec]) -> Patches:
        """Return the patch tokens of the sites with these names in a store.

        Raises:
            SiteError: no such site.
            MissingInput: a site is stored pooled only.
        """
        site_features = [
            choose_features(store, site, "patches", partial=True) for site in sites
        ]
        return cls(tuple(sites), tuple(site_features))

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
        layout = self.site_features[-1].layout
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
        return sum(features.dim for features in self.site_features)

    @property
    def slab_bytes(self) -> int:
        """The bytes that a slab takes while it is read."""
        return sum(features.slab_bytes for features in self.site_features)

    def of_slab(self, slab: Slab) -> Float32:
        """Return the tokens (images, cells, dim) of a slab's images that count.

        Raises:
            VitseeError: a number is not finite.
        """
        tokens = []
        for features in self.site_features:
            all_tokens = slice(0, len(features.tokens))
            tokens.append(features.of_slab(slab, all_tokens))
        if len(tokens) == 1:
            return tokens[0]  # without a copy
        return np.concatenate(tokens, axis=-1)

    def load(self, row: int) -> NDArray[Any]:
        """Return the tokens (cells, dim) of a row of the store, in the stored type."""
        rows = slice(row, row + 1)
        tokens = []
        for features in self.site_features:
            all_tokens = slice(0, len(features.tokens))
            tokens.append(features.load(rows, all_tokens)[0])
        return np.concatenate(tokens, axis=-1)

    def check_alike(self, test_patches: Patches) -> None:
        """Refuse other tokens or channels in the test store.

        Raises:
            StoreMismatch: they differ.
        """
        for train_features, test_features in zip(
            self.site_features, test_patches.site_features, strict=True
        ):
            check_alike(train_features, test_features)


def probed_patches(
    store: Store, sites: Sequence[SiteSpec], concat: int | None
) -> list[Patches]:
    """Return the patches that each probe reads: of a site alone, or of the last `concat`
    together.

    Raises:
        SiteError: there are fewer, or their grids differ.
        MissingInput: a site is stored pooled only.
    """
    if concat is None:
        return [Patches.of(store, [site]) for site in sites]
    if len(sites) < concat:
        raise SiteError(
            f"--concat last{concat}: {store.label} has {len(sites)} of the chosen sites "
            "with a grid; expected as many at least (see --sites)"
        )
    last = sites[-concat:]
    # Channels are joined cell by cell, so the grids have to be the same.
    last_grid = _grid_in_words(last[-1].layout)
    for site in last:
        grid = _grid_in_words(site.layout)
        if grid != last_grid:
            raise SiteError(
                f"--concat last{concat}: the grids of {site.name} and {last[-1].name} "
                f"differ ({grid} and {last_grid}); expected one grid, choose with --sites"
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
        for site_patches in patches:
            layout = site_patches.layout
            # Equal for grids that lie alike on the input, which share their labels.
            key = f"{layout.grid} every {layout.stride_px} from {layout.offset_px}"
            grids[site_patches.name] = key
            layouts[key] = layout
        truth, counts = Truth.find(
            store, task.maps, rows, layouts, resolution, eigen_crop
        )
        features = {site_patches.name: site_patches for site_patches in patches}
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
            f"{self.task.label} in {self.truth.maps.name} (all are ignored, or were "
            "cropped)"
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
        # In a plain folder 255 is left out by default, and may be a class.
        if PLAIN in self.truth.maps.rules["layout"] and str(IGNORED) in ignored_values:
            hint = (
                f" (pixels of value {IGNORED} are left out; --void none makes them a "
                "class)"
            )
        raise VitseeError(
            f"all pixels of the {self.n_images} {use} images of {self.store.label} that "
            f"have a class in {self.truth.maps.name} are of the class {name}; expected "
            f"two classes at least{hint}"
        )


def counted_rows(slab: Slab) -> list[int]:
    """Return the store's rows of a slab's images that count."""
    return np.arange(slab.rows.start, slab.rows.stop)[slab.valid].tolist()


@contextmanager
def lanes(size: int, execution: Execution) -> Iterator[Execution]:
    """Yield an execution with as many threads as cores and memory allow, of one BLAS
    thread each.

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
        """Return the fields to pickle: with `work` on the way to another process, and
        without it on the way back, as it may be large (a bank of patches)."""
        state = dict(self.__dict__)
        # Sums are empty on the way to a process, and not on the way back.
        if any(sums for name, sums in state.items() if name != "work"):
            state["work"] = None
        return state

    def merge(self, later: Self) -> None:
        """Add the sums of later slabs."""
        for name, sums in vars(self).items():
            if name == "work":
                continue
            for key, value in getattr(later, name).items():
                sums[key] = sums[key] + value if key in sums else value

    def result(self) -> Self:
        """Return the sums themselves."""
        return self
