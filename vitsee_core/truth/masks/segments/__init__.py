"""Objects and parts of images as examples: one vector per segment, from the tokens it lies on.

The examples of an analysis against labels are images with their labels, or segments of images with
their categories.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.runtime.execution import Execution
from vitsee_core.truth.labels.labelled_rows import (
    LabelledRows,
    check_label_spaces,
    labelled_rows,
)
from vitsee_core.truth.masks.segments.rows import (
    WEIGHTS,
    LabelledSegments,
    Segmentation,
    as_segmentation,
    find_segments,
)
from vitsee_core.truth.masks.segments.vectors import SegmentFeatures, patches_of
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store

__all__ = [
    "WEIGHTS",
    "Examples",
    "LabelledSegments",
    "SegmentFeatures",
    "Segmentation",
    "as_segmentation",
    "examples_of",
]

Key = tuple[str, str, str | None]

NO_TOKENS = "--tokens chooses one vector per image; with --masks there is one per segment"


@dataclass(frozen=True)
class Examples:
    """Images with their labels.

    Attributes:
        execution: which images.
        training: which of the stores named in it, by store_id, where others count there.
    """

    execution: Execution
    training: dict[str, Execution] = field(default_factory=dict)

    def rows(self, store: Store, split: str | None = None) -> LabelledRows:
        """The examples of a store; see `labelled_rows`."""
        execution = self.training.get(store.manifest.store_id, self.execution)
        return labelled_rows(store, execution.images, execution.seed, split)

    def features(
        self,
        data: LabelledRows,
        site: SiteSpec,
        tokens: str | None = None,
        **options: Any,
    ) -> SiteFeatures:
        """The examples' vectors at a site; see `choose_features`."""
        return choose_features(data.store, site, tokens, **options)

    def check_classes(self, train: LabelledRows, test: LabelledRows) -> list[str]:
        """Refuse examples of other classes; see `check_label_spaces`."""
        return check_label_spaces(train, test)


@dataclass(frozen=True)
class SegmentExamples(Examples):
    """Segments with their categories. found: of each store (and split), in one space of classes."""

    found: dict[Key, LabelledSegments] = field(default_factory=dict)

    def rows(self, store: Store, split: str | None = None) -> LabelledRows:
        return self.found[_key(store, split)]

    def features(
        self,
        data: LabelledRows,
        site: SiteSpec,
        tokens: str | None = None,
        **options: Any,
    ) -> Any:
        """The segments' vectors at a site: a `SegmentFeatures`. Raises VitseeError: tokens are
        asked for."""
        if tokens is not None or options.get("match_last_stage"):
            raise VitseeError(NO_TOKENS)
        assert isinstance(data, LabelledSegments)
        patches = patches_of(data.store, site)
        assert patches.site.layout is not None
        return SegmentFeatures(patches, data.weights[patches.site.layout])

    def check_classes(self, train: LabelledRows, test: LabelledRows) -> list[str]:
        del train, test
        return []  # the segments of all stores have one space of classes


def examples_of(
    masks: Segmentation | None,
    stores: Sequence[tuple[Store, Sequence[SiteSpec]]],
    execution: Execution,
    test_split: str | None = None,
    training: dict[str, Execution] | None = None,
) -> Examples:
    """The images of some stores, or where there are masks their segments.

    The classes of segments are the same in all stores: the categories in the masks' order (numbers
    in theirs), all that a file names and those that occur in a folder.

    Args:
        masks: None for images.
        stores: with the sites that are read; of each the segments are found now.
        execution: which images.
        training: which of these stores, by store_id, where others count there.
        test_split: of the data, for which examples are asked beside those of all.

    Raises:
        VitseeError: see `Segmentation.open` and `find_segments`; a site without a grid.
    """
    if masks is None:
        return Examples(execution, training or {})
    masks = masks.filled(weights=WEIGHTS[0], crowd=False)
    source = masks.open()
    found: dict[Key, LabelledSegments] = {}
    training = training or {}
    for store, sites in stores:
        own = training.get(store.manifest.store_id, execution)
        layouts = [patches_of(store, site).site.layout for site in sites]
        known = [layout for layout in layouts if layout is not None]
        for split in dict.fromkeys((None, test_split)):
            found[_key(store, split)] = find_segments(
                store, source, masks, known, own, split
            )
    occurring = dict.fromkeys(name for data in found.values() for name in data.classes)
    classes = source.categories or sorted(occurring, key=_in_order)
    where = {name: number for number, name in enumerate(classes)}
    for key, data in found.items():  # in the space of classes of all
        numbers = np.array([where[name] for name in data.classes], np.int64)
        found[key] = replace(data, labels=numbers[data.labels], classes=list(classes))
    return SegmentExamples(execution, training, found)


def _in_order(name: str) -> tuple[int, str]:
    if name.isdecimal():
        return (int(name), "")
    return (sys.maxsize, name)


def _key(store: Store, split: str | None) -> Key:
    return store.label, store.manifest.store_id, split
