"""Which tokens of a store's images lie on an object.

Masks of the original images are brought to the model's tokens by the images' own transform.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

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
from vitsee_core.truth.masks.orientation import oriented_as, say_orientations
from vitsee_core.types import Mask
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.layout import TokenLayout
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_core.runtime.streaming import Rows
    from vitsee_stores import Store

log = logging.getLogger(__name__)

RULES = ("half", "any")
_MAX_NAMES = 2  # in a message
_CITYSCAPES_FILE = re.compile(r"_gt(Fine|Coarse)_\w+\.png$")


@dataclass(frozen=True)
class MaskTruth:
    """The labels of the tokens of a store's images.

    Attributes:
        labels: group of attention blocks -> (images, tokens) over all rows of the store; all VOID
            for an image without a mask.
        mask: (images,) which rows have a foreground token in some group.
        counts: how many rows were used and left out, for a result's sidecar.
    """

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
    """Return the labels of the tokens of the images in `rows`.

    Images without a mask, and those without a foreground token, are left out, counted and logged.
    A mask has the size of its original image (`store.sizes`).

    Args:
        store: the store; its transform is applied to the masks too.
        masks: the masks; `match_names` says which mask belongs to which image.
        rows: the images to look at.
        layouts: group of attention blocks -> layout with a grid.
        foreground: when a token is foreground, one of `RULES`, see `token_labels`.
        execution: reads the masks; its progress is advanced for each.

    Raises:
        VitseeError: no image has a mask or a foreground token, or a mask is damaged or not of its
            image's size.
    """
    if not store.manifest.transform:
        raise MissingInput(
            f"{store.label} does not say how its images were resized; extract anew"
        )
    ids = store.samples.file.tolist()
    n_selected = int((rows.mask & store.valid).sum())
    masks = oriented_as(store.manifest.transform, masks)
    matched, numbers = match_rows(store, masks, rows)
    sizes = store.sizes.tolist()
    boxes = store.samples.box
    # Void as long as no mask says otherwise: rows without a mask stay so.
    labels = {
        group: np.full((store.n_images, layout.n_body), VOID, np.uint8)
        for group, layout in layouts.items()
    }

    label_mask = _MaskLabeller(
        masks=masks,
        recipe=mask_recipe(store.manifest.transform),
        layouts=dict(layouts),
        foreground=foreground,
    )
    items = []
    for row, number in zip(matched.tolist(), numbers.tolist(), strict=True):
        box = None if boxes is None else boxes[row]
        items.append(MaskOfImage(number, ids[row], tuple(sizes[row]), box))
    any_foreground = False
    any_void = False
    with counting(execution.progress, len(items), "masks") as progress:
        results = zip(matched, execution.each(label_mask, items), strict=True)
        for row, (image_labels, has_foreground, has_void) in results:
            for group, values in image_labels.items():
                labels[group][row] = values
            any_foreground = any_foreground or has_foreground
            any_void = any_void or has_void
            progress.advance(1)
    # A row counts if any of its grids has a foreground token.
    mask = np.zeros(store.n_images, bool)
    for values in labels.values():
        mask |= (values == FOREGROUND).any(1)
    if not mask.any():
        hint = ""
        if any_void and not any_foreground:
            hint = f": no pixel is, and void are {masks.void}"
        raise VitseeError(
            f"no token is foreground in any of the {len(matched)} images of {store.label} that "
            f"have a mask in {masks.name}{hint}"
        )
    counts = {
        "with_mask": len(matched),
        "left_out_without_mask": n_selected - len(matched),
        "left_out_without_foreground": len(matched) - int(mask.sum()),
    }
    for key, noun in (
        ("without_mask", "a mask"),
        ("without_foreground", "a foreground token"),
    ):
        n_left_out = counts[f"left_out_{key}"]
        if n_left_out:
            log.info(
                "%s: %d of %d images are left out: without %s",
                store.label,
                n_left_out,
                n_selected,
                noun,
            )
    return MaskTruth(labels, mask, counts)


class MaskOfImage(NamedTuple):
    """The number of a mask, and its image's name, (height, width) and box in its file, if any."""

    number: int
    image: str
    size: tuple[int, int]
    box: NDArray[np.float32] | None


@dataclass(frozen=True)
class _MaskLabeller:
    """Labels the tokens of an image by its mask.

    A callable object rather than a closure, so that it can be sent to worker processes.
    """

    masks: MaskSource
    recipe: Recipe
    layouts: dict[str, TokenLayout]
    foreground: str

    def __call__(self, item: MaskOfImage) -> tuple[dict[str, Labels], bool, bool]:
        """Return group -> (tokens,) labels, and whether the mask has foreground and void pixels."""
        where = self.masks.where(item.number)
        pixels = self.masks.read(item.number)
        pixels = cut_to_image(where, pixels, item.image, item.size, item.box)
        input_labels = as_seen(pixels, self.recipe, where)
        labels = {
            group: token_labels(input_labels, layout, self.foreground)
            for group, layout in self.layouts.items()
        }
        return labels, bool((pixels == FOREGROUND).any()), bool((pixels == VOID).any())


def match_rows(
    store: Store, masks: PixelSource, rows: Rows
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows with a readable image and a mask, ascending, and the number of each's mask.

    Masks with an EXIF orientation are counted in a remark.

    Raises:
        VitseeError: there are none.
    """
    ids = store.samples.file.tolist()
    mask_numbers = match_names(ids, masks.keys)
    selected = np.flatnonzero(rows.mask & store.valid)
    matched = selected[mask_numbers[selected] >= 0]
    if not len(matched):
        raise VitseeError(
            f"no image of {store.label} has a mask in {masks.name}: images are called "
            f"{abbreviate([ids[row] for row in selected], _MAX_NAMES)}; masks "
            f"{abbreviate(masks.keys, _MAX_NAMES)}; "
            + _advice([ids[row] for row in selected], masks.keys)
        )
    numbers = mask_numbers[matched]
    exif = bool(store.manifest.transform.get("exif"))
    say_orientations(store.label, exif, masks, numbers.tolist())
    return matched, numbers


def _advice(images: Sequence[str], masks: Sequence[str]) -> str:
    """Return what is expected of names, where no image has a mask of its name.

    Args:
        images: names of images.
        masks: names of masks.
    """
    image_files = {_file_name(_path_of(name)) for name in images}
    masks_by_file: dict[str, list[str]] = {}
    for name in masks:
        masks_by_file.setdefault(_file_name(_path_of(name)), []).append(name)
    for file, names in masks_by_file.items():
        if len(names) > 1 and file in image_files:
            return (
                f"{len(names)} masks are called {file} ({abbreviate(names, _MAX_NAMES)}): give "
                "the folder that has one of each image"
            )
    if any(_CITYSCAPES_FILE.search(name) for name in masks):
        return (
            "of Cityscapes' own files dense-probe alone knows whose they are: expected copies of "
            "one kind of them, called as the images are"
        )
    return "expected the same names but for the ending"


def cut_to_image(
    where: str,
    mask: NDArray[Any],
    image: str,
    size: tuple[int, int],
    box: NDArray[np.float32] | None,
) -> NDArray[Any]:
    """Return the part of a file's mask that belongs to an image, which may be a box of the file.

    Args:
        where: the mask's file, for messages.
        mask: (height, width).
        image: the image's name, for messages.
        size: (height, width) of the image.
        box: x0, y0, x1, y1 of the image in its file; None or NaN if it is the whole file.

    Raises:
        VitseeError: the box reaches out of the mask, or the part is not of the image's size.
    """
    # NaN in a store with boxes says that this image is a whole file.
    if box is not None and np.isfinite(box).all():
        try:
            top, left, bottom, right = box_pixels(
                box.tolist(), (mask.shape[0], mask.shape[1])
            )
        except DataError as error:
            raise VitseeError(f"{where}: {error}") from None
        mask = mask[top:bottom, left:right]
    if mask.shape != size:
        hint = ""
        if mask.shape == size[::-1]:
            hint = " (one of both is turned by EXIF: see extract --exif)"
        raise VitseeError(
            f"{where} is {mask.shape[1]} x {mask.shape[0]} pixels, its image {image} is "
            f"{size[1]} x {size[0]}; expected masks of the original images' size{hint}"
        )
    return mask


def match_names(images: Sequence[str], masks: Sequence[str]) -> NDArray[np.int64]:
    """Return (images,) the number of each image's mask, -1 for none.

    Names are paths without the ending of an image, parted by `/`, or by the backslashes of
    annotation files that were written on Windows. Whole paths are compared first. An image whose
    path no mask has is then matched by its file name (`JPEGImages/7.jpg` and
    `SegmentationClass/7.png`), if a single image and a single mask have that name.

    Args:
        images: names of images.
        masks: names of masks.
    """
    paths = [_path_of(name) for name in images]
    mask_paths = [_path_of(name) for name in masks]
    # Names that occur twice match nothing, rather than one of both by chance.
    mask_by_path = _index_of_unique(mask_paths)
    mask_by_file = _index_of_unique([_file_name(path) for path in mask_paths])
    unique_files = _index_of_unique([_file_name(path) for path in paths])
    numbers = np.full(len(images), -1, np.int64)
    for i, path in enumerate(paths):
        if path in mask_by_path:
            numbers[i] = mask_by_path[path]
        elif _file_name(path) in unique_files:
            numbers[i] = mask_by_file.get(_file_name(path), -1)
    return numbers


def _path_of(name: str) -> str:
    """Return a name without its ending, parted by `/`."""
    return image_stem(name.replace("\\", "/"))


def _file_name(path: str) -> str:
    """Return the last part of a path."""
    return path.rpartition("/")[2]


def _index_of_unique(names: Sequence[str]) -> dict[str, int]:
    """Return name -> its index, for names that occur once."""
    n_times = Counter(names)
    return {name: i for i, name in enumerate(names) if n_times[name] == 1}


# Steps whose last argument is the interpolation.
_RESIZING_STEPS = ("resize", "resize_keep_ratio", "corner")


def mask_recipe(transform: Mapping[str, Any]) -> Recipe:
    """Return the steps that a store's images went through, for masks.

    Every resize takes the nearest pixel, as labels cannot be averaged, and what a crop adds around
    the image is background.

    Raises:
        VitseeError: the transform does more than resize and crop.
    """
    recipe = make_recipe(transform)
    if recipe.timm_transform is not None:
        raise VitseeError(
            f"masks cannot follow the images' transform: {recipe.timm_transform}; expected only "
            "resize and crop"
        )
    steps = tuple(
        (name, _arguments_for_labels(name, arguments)) for name, arguments in recipe.steps
    )
    # One channel in place of three.
    return Recipe((1, *recipe.shape[1:]), steps)


def _arguments_for_labels(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a step's arguments with nearest interpolation and a fill of 0."""
    if name in _RESIZING_STEPS:
        return (*arguments[:-1], "nearest")
    if name == "center_crop":
        # The fill, for transforms that pad with the mean colour.
        return (arguments[0], 0, *arguments[2:])
    return arguments


def as_seen(labels: Labels, recipe: Recipe, where: str) -> Labels:
    """Return (height, width) labels of the model's input from those of the original image.

    Raises:
        VitseeError: the mask cannot be brought to that size.
    """
    try:
        return recipe.apply(Image.fromarray(labels))[0]
    except ImageError as error:
        raise VitseeError(f"{where}: the mask {error.reason}") from None


def token_labels(labels: Labels, layout: TokenLayout, foreground: str) -> Labels:
    """Return (tokens,) labels of the grid's tokens, row by row.

    A token has the pixels of its cell, see `cell_edges`. It is void if more of them are void than
    are not, or if it has no pixels. Otherwise, with `half` it is foreground if at least half of the
    pixels that are not void are foreground, and with `any` if any pixel is.

    Args:
        labels: (height, width) labels of the model's input.
        layout: a layout with a grid.
        foreground: `half` or `any`.
    """
    edges = cell_edges(layout, labels.shape)
    row_edges, col_edges = edges
    # (rows, cols) numbers of pixels in each cell
    n_foreground = _count_per_cell(labels == FOREGROUND, edges)
    n_void = _count_per_cell(labels == VOID, edges)
    n_pixels = np.multiply.outer(np.diff(row_edges), np.diff(col_edges))
    n_known = n_pixels - n_void
    is_foreground = n_foreground > 0
    if foreground == "half":
        # Doubled rather than halved: integers. A cell without known pixels stays
        # background by the line above, and becomes void below.
        is_foreground &= 2 * n_foreground >= n_known
    tokens = is_foreground.astype(np.uint8) * np.uint8(FOREGROUND)
    tokens[(n_void > n_known) | (n_pixels == 0)] = VOID
    return tokens.ravel()


def _count_per_cell(
    mask: NDArray[np.bool_], edges: tuple[Edges, Edges]
) -> NDArray[np.int64]:
    """Return (rows, cols) the number of pixels of each cell that are set.

    By a summed-area table: a cell's count is the difference of the sums at its corners.
    """
    # A row and a column of zeros in front, so that cells at the edge need no case of
    # their own.
    sums = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1), np.int64)
    sums[1:, 1:] = mask.cumsum(0, dtype=np.int64).cumsum(1)
    # (rows + 1, cols + 1)
    corners = sums[np.ix_(*edges)]
    return np.diff(np.diff(corners, axis=0), axis=1)
