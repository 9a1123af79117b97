"""Which tokens of a store's images lie on an object: masks of the original image, brought to the
model's tokens by the image's own transform."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.images import DataError, ImageError
from vitsee_core.images.folders import image_stem
from vitsee_core.images.placement import Edges, box_pixels, cell_edges
from vitsee_core.images.transform import Recipe, make_recipe
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.progress import counting
from vitsee_core.truth.masks.labels import (
    FOREGROUND,
    VOID,
    Labels,
    MaskSource,
    PixelSource,
)
from vitsee_core.truth.masks.orientation import oriented_as
from vitsee_core.types import Mask
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.layout import TokenLayout
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_core.runtime.streaming import Rows
    from vitsee_stores import Store

log = logging.getLogger(__name__)

RULES = ("half", "any")
_NAMES_SHOWN = 2


@dataclass(frozen=True)
class MaskTruth:
    """labels: group of attention blocks -> (images, tokens) over all rows of the store, VOID
    throughout where there is no mask. mask: (images,) which rows have a foreground token in some
    group. counts: what became of the rows, for a sidecar."""

    labels: dict[str, Labels]
    mask: Mask
    counts: dict[str, int]


def ground_truth(
    store: Store,
    masks: MaskSource,
    rows: Rows,
    layouts: Mapping[str, TokenLayout],
    *,
    foreground: str = "half",
    execution: Execution = DEFAULT,
) -> MaskTruth:
    """The labels of the tokens of the images in `rows`.

    Images without a mask, and those without a foreground token, are left out, counted and logged.
    A mask has the size of its original image (`store.sizes`).

    Args:
        store: its transform is the masks' too.
        masks: see `match_names` for which mask belongs to which image.
        rows: the images to look at.
        layouts: group -> layout with a grid.
        foreground: one of `RULES`, see `token_labels`.
        execution: reads the masks; its progress is advanced by each.

    Raises:
        VitseeError: no image has a mask or a foreground token, or a mask is damaged or not of its
            image's size.
    """
    if not store.manifest.transform:
        raise MissingInput(
            f"{store.label} does not say how its images were resized; extract anew"
        )
    ids = store.samples.file.tolist()
    wanted = int((rows.mask & store.valid).sum())
    masks = oriented_as(store.manifest.transform, masks)
    matched, numbers = match_rows(store, masks, rows)
    sizes = store.sizes.tolist()
    boxes = store.samples.box
    labels = {
        group: np.full((store.n_images, layout.n_body), VOID, np.uint8)
        for group, layout in layouts.items()
    }

    read = _TokenLabels(
        masks, mask_recipe(store.manifest.transform), dict(layouts), foreground
    )
    items = [
        (number, ids[row], tuple(sizes[row]), None if boxes is None else boxes[row])
        for row, number in zip(matched.tolist(), numbers.tolist(), strict=True)
    ]
    some_on = some_void = False
    with counting(execution.progress, len(items), "masks") as progress:
        for row, (own, on, void) in zip(
            matched, execution.each(read, items), strict=True
        ):
            for group, values in own.items():
                labels[group][row] = values
            some_on = some_on or on
            some_void = some_void or void
            progress.advance(1)
    mask = np.zeros(store.n_images, bool)
    for values in labels.values():
        mask |= (values == FOREGROUND).any(1)
    if not mask.any():
        only = (
            f": no pixel is, and void are {masks.void}"
            if some_void and not some_on
            else ""
        )
        raise VitseeError(
            f"no token is foreground in any of the {len(matched)} images of {store.label} that "
            f"have a mask in {masks.name}{only}"
        )
    counts = {
        "with_mask": len(matched),
        "left_out_without_mask": wanted - len(matched),
        "left_out_without_foreground": len(matched) - int(mask.sum()),
    }
    for key, what in (
        ("without_mask", "a mask"),
        ("without_foreground", "a foreground token"),
    ):
        if n := counts[f"left_out_{key}"]:
            log.info(
                "%s: %d of %d images are left out: without %s",
                store.label,
                n,
                wanted,
                what,
            )
    return MaskTruth(labels, mask, counts)


@dataclass(frozen=True)
class _TokenLabels:
    """The labels of one image: group -> (tokens,); whether its mask has foreground and void
    pixels. Called with the number of the mask, and the image's name, (height, width), and box."""

    masks: MaskSource
    recipe: Recipe
    layouts: dict[str, TokenLayout]
    foreground: str

    def __call__(self, of: tuple[Any, ...]) -> tuple[dict[str, Labels], bool, bool]:
        number, *image = of
        where = self.masks.where(number)
        pixels = self.masks.read(number)
        pixels = cut_to_image(where, pixels, *image)
        seen = as_seen(pixels, self.recipe, where)
        labels = {
            group: token_labels(seen, layout, self.foreground)
            for group, layout in self.layouts.items()
        }
        return labels, bool((pixels == FOREGROUND).any()), bool((pixels == VOID).any())


def match_rows(
    store: Store, masks: PixelSource, rows: Rows
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows with an image and a mask, ascending, and the number of each one's mask. Raises
    VitseeError: there are none."""
    ids = store.samples.file.tolist()
    found = match_names(ids, masks.keys)
    wanted = np.flatnonzero(rows.mask & store.valid)
    matched = wanted[found[wanted] >= 0]
    if not len(matched):
        raise VitseeError(
            f"no image of {store.label} has a mask in {masks.name}: images are called "
            f"{abbreviate([ids[row] for row in wanted], _NAMES_SHOWN)}; masks "
            f"{abbreviate(masks.keys, _NAMES_SHOWN)}; expected the same names but for the ending"
        )
    return matched, found[matched]


def cut_to_image(
    where: str,
    mask: NDArray[Any],
    image: str,
    size: tuple[int, int],
    box: NDArray[np.float32] | None,
) -> NDArray[Any]:
    """The part of a file's mask that an image is.

    Args:
        where: the file, for a message.
        mask: (height, width).
        image: its name.
        size: (height, width) of the image.
        box: of the file, see `Samples`; None or NaN if the image is all of it.

    Raises:
        VitseeError: the box reaches out of the mask, or the part is not of the image's size.
    """
    if box is not None and np.isfinite(box).all():
        try:
            top, left, bottom, right = box_pixels(
                box.tolist(), (mask.shape[0], mask.shape[1])
            )
        except DataError as error:
            raise VitseeError(f"{where}: {error}") from None
        mask = mask[top:bottom, left:right]
    if mask.shape != size:
        sideways = mask.shape == size[::-1]
        hint = " (one of both is turned by EXIF: see extract --exif)" if sideways else ""
        raise VitseeError(
            f"{where} is {mask.shape[1]} x {mask.shape[0]} pixels, its image {image} is "
            f"{size[1]} x {size[0]}; expected masks of the original images' size{hint}"
        )
    return mask


def match_names(images: Sequence[str], masks: Sequence[str]) -> NDArray[np.int64]:
    """(images,) the number of each image's mask, -1 for none.

    Names are paths; an image's ending is ignored. First the whole paths are compared, then,
    for what is left, the last parts of both (`JPEGImages/7.jpg` and `SegmentationClass/7.png`),
    where these name one image and one mask only.
    """
    whole = [image_stem(name) for name in images]
    by_path = _only([image_stem(name) for name in masks])
    by_file = _only([_last(image_stem(name)) for name in masks])
    single = _only([_last(name) for name in whole])
    found = np.full(len(images), -1, np.int64)
    for i, name in enumerate(whole):
        if name in by_path:
            found[i] = by_path[name]
        elif _last(name) in single:
            found[i] = by_file.get(_last(name), -1)
    return found


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _only(names: Sequence[str]) -> dict[str, int]:
    times = Counter(names)
    return {name: i for i, name in enumerate(names) if times[name] == 1}


_RESIZES = (
    "resize",
    "resize_keep_ratio",
    "corner",
)  # their last argument is the interpolation


def mask_recipe(transform: Mapping[str, Any]) -> Recipe:
    """The steps that a store's images went through, for masks: every resize takes the nearest
    pixel, and what a crop adds around the image is background. Raises VitseeError: the transform
    does more than resize and crop."""
    recipe = make_recipe(transform)
    if recipe.whole is not None:
        raise VitseeError(
            f"masks cannot follow the images' transform: {recipe.whole}; expected only resize and "
            "crop"
        )
    steps = tuple(
        (name, _for_labels(name, arguments)) for name, arguments in recipe.steps
    )
    return Recipe((1, *recipe.shape[1:]), steps)


def _for_labels(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if name in _RESIZES:
        return (*arguments[:-1], "nearest")
    if name == "center_crop":
        return (arguments[0], 0, *arguments[2:])
    return arguments


def as_seen(labels: Labels, recipe: Recipe, where: str) -> Labels:
    """Labels of the original image's pixels as those of the model's input: (height, width). Raises
    VitseeError: the mask cannot be brought to that size."""
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
    """The number of pixels of each cell that are set: differences of cumulative sums."""
    sums = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1), np.int64)
    sums[1:, 1:] = mask.cumsum(0, dtype=np.int64).cumsum(1)
    corners = sums[np.ix_(*edges)]
    return np.diff(np.diff(corners, axis=0), axis=1)
