"""The planned contents of a store: token layouts, sites, attention groups, canvas, clips.

These dataclasses are the schema of the manifest's `plan`: their field names are those of the
JSON on disk, and `vitsee_stores/schema.py` converts the JSON to them. The limits in their
annotations are far above what extraction makes, and low enough that a manifest from a
stranger costs neither time nor memory by its numbers alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

CODECS = ("none", "zstd", "lz4")
LEVELS = ("none", "summary", "rows", "full")
TIMES = ("ordered", "shuffled", "still")
NATIVE = ("pixels", "patches")  # crop modes at native resolution
CLIPS = "clips"  # the word for a store's examples where they are not images


def one_of(*words: str) -> Meta:
    """Return the msgspec limit of a text that must be one of these words."""
    return Meta(pattern=rf"\A({'|'.join(words)})\Z")


Length = Annotated[int, Meta(ge=1, le=1 << 31)]
Side = Annotated[int, Meta(ge=1, le=1 << 20)]
Size = tuple[Side, Side]
Shape = Annotated[tuple[Length, ...], Meta(min_length=1, max_length=8)]
Depth = Annotated[int, Meta(ge=-1, le=1 << 20)]
RelDepth = Annotated[float, Meta(ge=-1e6, le=1e6)]
Stride = Annotated[float, Meta(ge=1e-6, le=1e9)]
Offset = Annotated[float, Meta(ge=-1e9, le=1e9)]
Images = Annotated[int, Meta(ge=1, le=1 << 27)]
Window = Annotated[tuple[Side, ...], Meta(min_length=2, max_length=3)]


@dataclass(frozen=True)
class TokenLayout:
    """Order and geometry of a site's tokens: prefix tokens, then a grid or plain rows.

    A clip's grid has an axis of time before rows and columns: its tokens are in the order
    (time, row, col).

    Attributes:
        prefix: kinds of the prefix tokens ("cls", "dist", "reg0", ...) in the model's order; of
            frames that the model saw one by one "cls.0", "cls.1", ..., a number for each frame.
        grid: (rows, cols) in image geometry; None if the tokens form no image grid.
        rows: number of tokens after the prefix if there is no grid.
        stride_px: input pixels between neighbouring cells, (y, x).
        offset_px: input pixel (y, x) of the top left corner of cell (0, 0): negative where the
            model pads there, positive where it crops.
        frames: cells of the grid in time; None for images.
        stride_frames: sampled frames between neighbouring cells in time.
    """

    prefix: tuple[str, ...]
    grid: Size | None
    rows: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    stride_px: tuple[Stride, Stride] | None = None
    offset_px: tuple[Offset, Offset] = (0.0, 0.0)
    frames: Side | None = None
    stride_frames: Stride | None = None

    @property
    def n_prefix(self) -> int:
        """Number of prefix tokens."""
        return len(self.prefix)

    @property
    def n_body(self) -> int:
        """Number of grid cells, or of rows if there is no grid."""
        return math.prod(self.body)

    @property
    def body(self) -> tuple[int, ...]:
        """Shape of the tokens after the prefix: (rows, cols), of clips (time, rows, cols); (rows,)
        if there is no grid."""
        if self.grid is None:
            return (self.rows,)
        if self.frames is None:
            return self.grid
        return (self.frames, *self.grid)

    @property
    def n_tokens(self) -> int:
        """Number of all tokens."""
        return self.n_prefix + self.n_body

    @property
    def cls(self) -> int | None:
        """Index of the class token, None without one, or with one a frame."""
        return self.prefix.index("cls") if "cls" in self.prefix else None

    @property
    def cls_tokens(self) -> range:
        """Indices of the class tokens: one, none, or one of each frame, which stand together."""
        if self.cls is not None:
            return range(self.cls, self.cls + 1)
        indices = [i for i, name in enumerate(self.prefix) if name.startswith("cls.")]
        if not indices:
            return range(0)
        return range(indices[0], indices[-1] + 1)


@dataclass(frozen=True)
class SiteSpec:
    """One site of a store.

    Attributes:
        kind: "tokens" (prefix and grid), "rows" (no image grid), "vector", or "raw".
        shape: per image: tokens (T, D), rows (R, D), vector (D,), raw as the module returns it.
        dim: channels; for raw the flattened size.
        dtype: of `acts/`; pooled values and vectors are always float32.
        alias_of: the stored site with an equal tensor, which is read in place of this one.
        tokens: "all", or "pooled" if `acts/` does not hold the site.
        site_path: where the tensor comes from in the model's own names: a module's path for its
            output, with `.in` appended for its input, `A - B` for a difference; None if that is
            the name.
    """

    name: str
    part: str
    block: str | None
    groups: tuple[str, ...]
    kind: Annotated[str, one_of("tokens", "rows", "vector", "raw")]
    dim: Annotated[int, Meta(ge=1, le=1 << 40)]
    shape: Shape
    layout: TokenLayout | None
    depth: Depth
    rel_depth: RelDepth
    alias_of: str | None = None
    tokens: Annotated[str, one_of("all", "pooled")] = "all"
    dtype: Annotated[str, one_of("float16", "float32")] = "float16"
    site_path: str | None = None

    @property
    def stride_px(self) -> tuple[float, float] | None:
        """Input pixels between neighbouring cells (y, x); None without a grid."""
        return None if self.layout is None else self.layout.stride_px


@dataclass(frozen=True)
class AttentionGroup:
    """Blocks whose heads share a token layout; `prefix` is their folder below `attention/`, "" for
    the first group.

    Attributes:
        window: (rows, cols) of cells of the windows, of clips (time, rows, cols), tiling the grid
            from its first cell, in which queries see keys; None where they see all.
    """

    prefix: str
    blocks: tuple[str, ...]
    n_heads: tuple[Side, ...]
    layout: TokenLayout
    window: Window | None = None

    @property
    def folder(self) -> str:
        """Path of its arrays below the store, with a slash at the end."""
        if self.prefix:
            return f"attention/{self.prefix}/"
        return "attention/"


@dataclass(frozen=True)
class ErfPlan:
    """The effective receptive fields that a store has.

    Attributes:
        n_images: number of leading rows whose images have them.
        sites: names of the stored sites with receptive fields.
        size: (rows, cols) of the model's input in pixels.
    """

    n_images: Images
    sites: tuple[str, ...]
    size: Size


# The three ways in which an image gets its size on a canvas. Each must give the sizes that the
# processors of the models give, to the pixel: stored grids depend on it.

# The largest aspect ratio that Qwen-VL's image processors accept.
MAX_ASPECT = 200
# SigLIP 2's image processors search the scale between these bounds, to this tolerance.
_MIN_SCALE = 1e-6
_MAX_SCALE = 100.0
_SCALE_TOLERANCE = 1e-5


def corner_size(size: Size, short_side: int, multiple: int) -> Size:
    """Return the size to which an image is resized in a canvas of mode "corner".

    The short side becomes `short_side`; the long side keeps the proportions and is rounded
    down to a multiple of `multiple`.

    Args:
        size: (height, width) of the image in pixels.

    Returns:
        (height, width) in pixels.
    """
    height, width = size
    # Integer arithmetic gives the same result on every machine.
    proportional = max(size) * short_side // min(size)
    long_side = proportional // multiple * multiple
    if height <= width:
        return (short_side, long_side)
    return (long_side, short_side)


def pixels_size(size: Size, multiple: int, min_pixels: int, max_pixels: int) -> Size:
    """Return the size to which Qwen-VL's image processors resize an image ("smart resize").

    Both sides are rounded to `multiple`. Where the result has more than `max_pixels` or fewer
    than `min_pixels`, the image is scaled to that number in its own proportions, and the
    sides are rounded down or up to `multiple`.

    Args:
        size: (height, width) of the image in pixels.

    Returns:
        (height, width) in pixels.

    Raises:
        ValueError: a side is smaller than `multiple`, or more than `MAX_ASPECT` times the
            other.
    """
    if min(size) < multiple:
        raise ValueError(
            f"{size[1]} x {size[0]} pixels are smaller than the {multiple} x {multiple} "
            "of one group of patches"
        )
    if max(size) > MAX_ASPECT * min(size):
        raise ValueError(
            f"of {size[1]} x {size[0]} pixels one side is more than {MAX_ASPECT} times "
            "the other"
        )
    height, width = (round(side / multiple) * multiple for side in size)
    if height * width > max_pixels:
        shrink = math.sqrt(size[0] * size[1] / max_pixels)
        height, width = (
            max(multiple, math.floor(side / shrink / multiple) * multiple)
            for side in size
        )
    elif height * width < min_pixels:
        grow = math.sqrt(min_pixels / (size[0] * size[1]))
        height, width = (math.ceil(side * grow / multiple) * multiple for side in size)
    return height, width


def patches_size(size: Size, patch: int, max_pixels: int) -> Size:
    """Return the size to which the image processors of SigLIP 2 NaFlex resize an image.

    It is the largest size in the image's proportions, with sides rounded up to multiples of
    `patch`, that has at most `max_pixels` pixels.

    Args:
        size: (height, width) of the image in pixels.

    Returns:
        (height, width) in pixels.
    """

    def scaled_size(scale: float) -> Size:
        """Return the (height, width) at a scale, rounded up to whole patches."""
        height, width = (
            max(patch, math.ceil(side * scale / patch) * patch) for side in size
        )
        return height, width

    # Bisection with the processors' own bounds: a closed formula would differ in rare cases.
    low = _MIN_SCALE
    high = _MAX_SCALE
    while high - low >= _SCALE_TOLERANCE:
        scale = (low + high) / 2
        if math.prod(scaled_size(scale)) <= max_pixels:
            low = scale
        else:
            high = scale
    return scaled_size(low)


@dataclass(frozen=True)
class Canvas:
    """A fixed-size input for images of several sizes.

    Attributes:
        size: (height, width) of the canvas in pixels, the same for all images.
        short_side: length of an image's short side in pixels; None at native resolution.
        multiple: number of pixels that both sides of a resized image are a multiple of.
        tiles: (height, width) of the input that the model saw at once; None where it saw each
            image whole.
        crop_mode: function that gives an image its size on the canvas: "corner" for
            `corner_size`; at native resolution "pixels" for `pixels_size` and "patches" for
            `patches_size`.
        min_pixels: least number of pixels of an image in mode "pixels", else None.
        max_pixels: largest number of pixels of an image at native resolution, else None.
        own_grids: True where images at native resolution do not all fill the canvas: the
            model then saw each image alone, on a grid of the image's own. None where they do.
    """

    size: Size
    short_side: Side | None = None
    multiple: Side = 1
    tiles: Size | None = None
    crop_mode: Annotated[str, one_of("corner", *NATIVE)] = "corner"
    min_pixels: Length | None = None
    max_pixels: Length | None = None
    own_grids: bool | None = None

    @property
    def is_native(self) -> bool:
        """Whether images have native resolution."""
        return self.crop_mode in NATIVE

    @property
    def in_parts(self) -> bool:
        """Whether the model saw tiles, or images with grids of their own.

        The store then has no array that needs one grid for all images.
        """
        return self.tiles is not None or bool(self.own_grids)

    def image(self, size: Size) -> Size:
        """Return the (height, width) that an original image of this size has on the canvas.

        Raises:
            ValueError: `pixels_size` refuses the size.
        """
        return canvas_size(
            size,
            crop_mode=self.crop_mode,
            multiple=self.multiple,
            short_side=self.short_side,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )

    def filled(self, sizes: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which images cover the whole canvas.

        Args:
            sizes: (images, 2) height and width of the original images. A size of 0, from an
                image that could not be read, counts as covering the canvas.

        Returns:
            (images,) boolean.
        """
        covers = np.ones(len(sizes), np.bool_)
        # Data sets have few distinct sizes: each is computed once.
        distinct, distinct_index = np.unique(sizes, axis=0, return_inverse=True)
        distinct_index = distinct_index.ravel()  # some numpy versions return (images, 1)
        for k, (height, width) in enumerate(distinct.tolist()):
            if height > 0 and width > 0:
                try:
                    fills = self.image((height, width)) == self.size
                except ValueError:  # no image of a canvas has this size
                    fills = False
                covers[distinct_index == k] = fills
        return covers


def canvas_size(
    size: Size,
    crop_mode: str,
    multiple: int,
    short_side: int | None,
    min_pixels: int | None,
    max_pixels: int | None,
) -> Size:
    """Return the (height, width) that an image of this size has on a canvas.

    Args:
        size: (height, width) of the original image in pixels. The other arguments are those
            of a `Canvas`.

    Raises:
        ValueError: `pixels_size` refuses the size.
    """
    if crop_mode == "corner":
        assert short_side is not None
        return corner_size(size, short_side, multiple)
    assert max_pixels is not None
    if crop_mode == "patches":
        return patches_size(size, multiple, max_pixels)
    return pixels_size(size, multiple, min_pixels or 1, max_pixels)


@dataclass(frozen=True)
class Clip:
    """How frames are sampled from the clips of a store whose examples are clips.

    Attributes:
        frames: number of sampled frames.
        every: step between sampled frames, counted in frames of the clip, taken around its
            middle; None where they are the middles of equal parts of the clip.
        time: "ordered"; "shuffled" within the clip; or "still", the middle sampled frame in
            place of all of them.
        by_frame: whether the model saw each frame by itself, as an image.
    """

    frames: Side
    every: Side | None = None
    time: Annotated[str, one_of(*TIMES)] = "ordered"
    by_frame: bool = False


@dataclass(frozen=True)
class StorePlan:
    """Everything that determines a store's arrays.

    Attributes:
        sites: the chosen sites in the model's order, aliases included.
        attention_level: "none", "summary", "rows" or "full".
        sublayers: (name, layout) of the residual summaries.
        grams: whether every stored site except vectors has its Gram matrix within each slab.
        erf: the effective receptive fields, None without any.
        inputs: (3, H, W) if pixels are stored, of clips those of a frame.
        weights: (name, shape) of small weight arrays.
        places: (name, depth, rel_depth) of every block with attention and every sublayer: its index
            in the model among blocks or sublayers, and that index over the last one.
        id_bytes: width of `samples/id`; set when a manifest is made.
        boxes: whether images are parts of their files, see `samples/box`; set when a manifest is
            made.
        canvas: the canvas of images of several sizes, None if every image is resized to the model's
            input.
        clip: how frames are taken from clips; None if examples are images.
        pixel_hashes: whether `pixel_hash` tells images with equal pixels; None where it does not.
    """

    n_images: Images
    slab: Annotated[int, Meta(ge=1, le=1 << 24)]
    codec: Annotated[str, one_of(*CODECS)]
    sites: tuple[SiteSpec, ...]
    attention: tuple[AttentionGroup, ...] = ()
    attention_level: Annotated[str, one_of(*LEVELS)] = "none"
    rollout: bool = False
    sublayers: tuple[tuple[str, TokenLayout], ...] = ()
    inputs: tuple[Length, Length, Length] | None = None
    weights: tuple[tuple[str, Shape], ...] = ()
    places: tuple[tuple[str, Depth, RelDepth], ...] = ()
    id_bytes: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    grams: bool = False
    erf: ErfPlan | None = None
    boxes: bool = False
    canvas: Canvas | None = None
    clip: Clip | None = None
    pixel_hashes: bool | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the format extensions that the store uses."""
        windows = any(group.window is not None for group in self.attention)
        used = {
            "box": self.boxes,
            "canvas": self.canvas is not None,
            "window": windows,
            "clips": self.clip is not None,
            "native": self.canvas is not None and self.canvas.is_native,
            "pixel_hash": bool(self.pixel_hashes),
        }
        return tuple(name for name, is_used in used.items() if is_used)

    @property
    def examples(self) -> str:
        """The word for the store's examples: "images" or "clips"."""
        return "images" if self.clip is None else CLIPS

    @property
    def n_slabs(self) -> int:
        """Number of slabs; the last may be short."""
        return math.ceil(self.n_images / self.slab)

    @property
    def stored(self) -> tuple[SiteSpec, ...]:
        """The sites with arrays of their own: all but aliases."""
        return tuple(site for site in self.sites if site.alias_of is None)

    @property
    def gram_sites(self) -> tuple[SiteSpec, ...]:
        """The sites with a Gram matrix within each slab: all stored sites except vectors, whose
        values are stored anyway."""
        if self.grams:
            return tuple(s for s in self.stored if s.kind != "vector")
        return ()

    @property
    def n_erf_slabs(self) -> int:
        """Number of leading slabs with an image whose receptive fields are stored."""
        if self.erf is None:
            return 0
        return math.ceil(self.erf.n_images / self.slab)

    def rows(self, slab: int) -> slice:
        """Return the rows of a slab's images."""
        return slice(slab * self.slab, min((slab + 1) * self.slab, self.n_images))
