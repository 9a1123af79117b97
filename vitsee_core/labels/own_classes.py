"""Whether the labels of a store's images are the classes of its model's own head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitsee_core.types import Mask

if TYPE_CHECKING:
    from vitsee_stores import Store


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
