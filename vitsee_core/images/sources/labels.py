"""Labels of many files, from the texts of each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.folders import class_labels

Coded = tuple[NDArray[np.int32], list[str]]  # (images,) index into the texts, -1 for none


def labels_of(files: Iterable[Coded]) -> tuple[NDArray[np.int64], list[str] | None]:
    """(images,) labels of all files, and class names, as `class_labels` has them."""
    coded = list(files)
    known = list(dict.fromkeys(text for _, texts in coded for text in texts))
    numbers, class_names = class_labels(known)
    number = dict(zip(known, numbers.tolist(), strict=True))
    # A code of -1 is the last.
    parts = [
        np.array([*(number[text] for text in texts), -1], np.int64)[codes] for codes, texts in coded
    ]
    return np.concatenate(parts), class_names
