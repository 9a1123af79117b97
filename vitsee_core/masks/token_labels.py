"""The labels of a model's tokens, from a mask of the original image by the image's own
transform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.images import ImageError
from vitsee_core.images.placement import Edges, cell_edges
from vitsee_core.images.transform import Recipe, make_recipe
from vitsee_core.masks.labels import FOREGROUND, VOID, Labels
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

_RESIZES = ("resize", "resize_keep_ratio", "corner")  # their last argument is the interpolation


def mask_recipe(transform: Mapping[str, Any]) -> Recipe:
    """The steps that a store's images went through, for masks: every resize takes the nearest
    pixel, and what a crop adds around the image is background.

    Raises:
        VitseeError: the transform does more than resize and crop.
    """
    recipe = make_recipe(transform)
    if recipe.whole is not None:
        raise VitseeError(
            f"masks cannot follow the images' transform: {recipe.whole}; expected only resize and "
            "crop"
        )
    steps = tuple((name, _for_labels(name, arguments)) for name, arguments in recipe.steps)
    return Recipe((1, *recipe.shape[1:]), steps)


def _for_labels(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if name in _RESIZES:
        return (*arguments[:-1], "nearest")
    return (arguments[0], 0, *arguments[2:]) if name == "center_crop" else arguments


def as_seen(labels: Labels, recipe: Recipe, where: str) -> Labels:
    """Labels of the original image's pixels as those of the model's input: (height, width).

    Raises:
        VitseeError: the mask cannot be brought to that size.
    """
    try:
        return recipe.apply(Image.fromarray(labels))[0]
    except ImageError as error:
        raise VitseeError(f"{where}: the mask {error.reason}") from None


def token_labels(labels: Labels, layout: TokenLayout, foreground: str) -> Labels:
    """Labels of the grid's tokens, (tokens,) row by row.

    A token is the pixels of its cell, see `cell_edges`. With more void pixels than others, or
    none at all, it is void. Of the others it is foreground with `half` where at least half of the
    pixels that are not void are, with `any` where any is.

    Args:
        labels: of the model's input, (height, width).
        layout: with a grid.
        foreground: `half` or `any`.
    """
    edges = cell_edges(layout, labels.shape)
    objects, unknown = (_per_cell(labels == kind, edges) for kind in (FOREGROUND, VOID))
    pixels = np.multiply.outer(*(np.diff(edge) for edge in edges))
    known = pixels - unknown
    on = objects > 0
    if foreground == "half":
        on &= 2 * objects >= known
    tokens = on.astype(np.uint8) * np.uint8(FOREGROUND)
    tokens[(unknown > known) | (pixels == 0)] = VOID
    return tokens.ravel()


def _per_cell(mask: NDArray[np.bool_], edges: tuple[Edges, Edges]) -> NDArray[np.int64]:
    """How many pixels of each cell are set: differences of cumulative sums."""
    sums = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1), np.int64)
    sums[1:, 1:] = mask.cumsum(0, dtype=np.int64).cumsum(1)
    corners = sums[np.ix_(*edges)]
    return np.diff(np.diff(corners, axis=0), axis=1)
