"""A data set: identified samples in a fixed order, each readable on its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.images import splits as split_rules
from vitsee_core.images.decoding import JointOpener, Opener
from vitsee_core.images.errors import DataError, ImageError
from vitsee_stores.samples import Samples


@dataclass(frozen=True)
class ImageSource:
    """Samples in the data set's own order, which does not depend on the machine.

    Attributes:
        ids: unique.
        labels: -1 for none.
        splits: "" for none.
        class_names: None if labels are bare numbers or absent.
        split: the expression that selected these samples, if any.
        boxes: (samples, 4) the parts of their files that images are, NaN for whole ones, None if
            all are whole.
    """

    name: str
    opener: Opener
    locations: Sequence[Any]
    ids: Sequence[str]
    labels: NDArray[np.int64]
    splits: list[str]
    class_names: list[str] | None = None
    split: str | None = None
    boxes: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def samples(self) -> Samples:
        return self.samples_at(np.arange(len(self), dtype=np.int64))

    def samples_at(self, index: NDArray[np.int64]) -> Samples:
        """The samples at these positions of the data set's order, in the order given."""
        return Samples(
            index=index,
            ids=[self.ids[i] for i in index],
            labels=self.labels[index],
            splits=[self.splits[i] for i in index],
            boxes=None if self.boxes is None else self.boxes[index],
        )

    def read(self, index: int) -> tuple[Image.Image, int]:
        """One decoded image, in its own mode, and the 64-bit hash of its encoded bytes.

        For arrays the hash is of the image's shape and pixels.

        Raises:
            ImageError: the image is missing, damaged, or not an image.
        """
        with self._named(index):
            return self.opener.load(self.locations[index])

    def hash(self, index: int) -> int:
        """The hash that `read` returns, without decoding the image.

        Raises:
            ImageError: the image is missing or truncated.
        """
        with self._named(index):
            return self.opener.hash(self.locations[index])

    def size(self, index: int) -> tuple[int, int]:
        """Height and width of the result of `read`, from the image's header if possible.

        Raises:
            ImageError: the image is missing, or not an image.
        """
        with self._named(index):
            return self.opener.size(self.locations[index])

    @contextmanager
    def _named(self, index: int) -> Iterator[None]:
        """Errors name the image by its id."""
        try:
            yield
        except ImageError as error:
            raise ImageError(self.ids[index], error.reason) from None

    def part(self, expression: str) -> ImageSource:
        """The samples of a split expression (see `vitsee_core.images.splits`).

        Raises:
            DataError: an unknown split, or a slice that does not fit it.
        """
        positions, names = split_rules.apply(expression, self.splits, self.name)
        return replace(
            self,
            locations=[self.locations[i] for i in positions],
            ids=[self.ids[i] for i in positions],
            labels=self.labels[positions],
            splits=names,
            split=expression,
            boxes=None if self.boxes is None else self.boxes[positions],
        )


def join(name: str, parts: Sequence[ImageSource]) -> ImageSource:
    """Several sources concatenated; they must name the same classes.

    Raises:
        DataError: the parts name different classes.
    """
    first = parts[0]
    if any(part.class_names != first.class_names for part in parts):
        raise DataError(f"the splits of {name} name different classes; extract them one by one")
    return ImageSource(
        name=name,
        opener=JointOpener(tuple(part.opener for part in parts)),
        locations=[(k, place) for k, part in enumerate(parts) for place in part.locations],
        ids=[sample for part in parts for sample in part.ids],
        labels=np.concatenate([part.labels for part in parts]),
        splits=[split for part in parts for split in part.splits],
        class_names=first.class_names,
    )
