"""How images and clips reach the model. `--short-side`: images in their own proportions, on one
canvas; the model sees the whole canvas if all images fill it, else (`--tiles`) tiles of its own
input size. `--native`: each image at the size that the model's own image processor gives it, on one
canvas; where they differ in size the model sees each alone. `--frames`: frames of clips, together
or one by one."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.extraction.by_frame import check_by_frame, clip_table
from vitsee_core.extraction.native import OWN_GRIDS, table_on_canvas
from vitsee_core.extraction.options import (
    OF_CLIPS,
    DataOptions,
    ModelOptions,
    OptionError,
    Request,
)
from vitsee_core.extraction.tiles import TILED, n_tiles
from vitsee_core.images import ImageError, Selection
from vitsee_core.images.transform import MAX_PIXELS
from vitsee_core.images.videos import SHUFFLED
from vitsee_core.models.batch_independence import ChangingModelError
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.sources.processors import canvas_transform
from vitsee_core.models.tokens.clips import frames_of
from vitsee_core.models.tokens.towers import PART, packing_of
from vitsee_core.runtime.machine import plural
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import SiteSpec, StorePlan, TokenLayout
from vitsee_stores.plan import Canvas, Clip, Size

log = logging.getLogger(__name__)

OWN_BOUND = " (the image processor's own where it is not given)"
READERS = 8  # threads that read the headers of images
TRANSFORM = ("input_size", "interpolation", "mean", "std")


@dataclass(frozen=True)
class ImageLayout:
    """How images reach the model.

    Attributes:
        model, table: as they run.
        kept: the sites that a store can keep, with their layout in the store.
        canvas: None if every image is resized to the model's input.
        clip: how frames are taken of clips, None of images.
        left_out: what tiles do not support -> reason.
    """

    model: LoadedModel
    table: SiteTable
    kept: SiteTable
    canvas: Canvas | None = None
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    clip: Clip | None = None

    @property
    def input_size(self) -> tuple[int, int, int]:
        """(channels, height, width) of the pixels that are loaded."""
        channels, height, width = self.model.transform["input_size"]
        return channels, height, width


def lay_out(
    asked: Request, selection: Selection, stored: StorePlan | None = None
) -> ImageLayout:
    """The model, and the canvas or the frames if some are requested.

    Args:
        asked: the model, and the options of the canvas and of clips.
        selection: the images, whose headers are read for a canvas.
        stored: the plan of an existing store, whose canvas and clips are kept.

    Raises:
        OptionError: options that exclude each other.
        VitseeError: the model has no grid, or one that does not fit; images that would not fill the
            canvas, without tiles.
    """
    _check_options(asked)
    options = asked.model
    data = asked.data
    before = None if stored is None else stored.clip
    frames = data.frames or (None if before is None else before.frames)
    if isinstance(options, LoadedModel):
        model = options
    else:
        model = load_model(**vars(options), frames=frames, native=data.native)
    model.module.cpu()
    if data.native:
        return _at_native(model, asked, selection, stored)
    try:
        table = site_table(model)
    except ModelError as error:
        own = isinstance(options, LoadedModel) or model.origin.get("kind") == "file"
        if frames is None and own and not isinstance(error, ChangingModelError):
            option = "frames=N" if isinstance(options, LoadedModel) else "--frames N"
            raise ModelError(f"{error}; if it takes clips, give {option}") from error
        raise
    clip = _clip(data, model, before)
    if clip is not None:
        return _of_clips(asked, model, table, clip, selection.identity["seed"])
    if data.short_side is None:
        return ImageLayout(model, table, table)
    step = _step(model, table)
    multiple = step if data.multiple is None else data.multiple
    tiles = model.input_size[1:] if data.tiles else None
    _check_numbers(model, data.short_side, multiple, step, tiles)
    canvas = Canvas((0, 0), data.short_side, multiple, tiles)
    notes = tuple[str, ...]()
    if stored is not None and stored.canvas is not None:
        canvas = dataclasses.replace(canvas, size=stored.canvas.size)
    else:
        canvas, notes = _around(canvas, image_sizes(selection), selection)
    if tiles is None and canvas.size != model.input_size[1:]:
        assert isinstance(options, ModelOptions)
        model = load_model(**{**vars(options), "img_size": canvas.size})
        table = site_table(model)
    transform = {key: model.transform[key] for key in TRANSFORM} | {
        "input_size": (model.input_size[0], *canvas.size),
        "crop_mode": canvas.crop_mode,
        "short_side": canvas.short_side,
        "multiple": canvas.multiple,
    }
    model = dataclasses.replace(model, transform=transform)
    if tiles is None:
        return ImageLayout(model, table, table, canvas, {}, notes)
    kept, left_out = _tiled(table, canvas, tiles, step)
    return ImageLayout(model, table, kept, canvas, left_out, notes)


def _at_native(
    model: LoadedModel, asked: Request, selection: Selection, stored: StorePlan | None
) -> ImageLayout:
    """A tower on images at native resolution. Where they differ in size its sites are found on
    images of its own size, or of the canvas' where that is smaller. Raises VitseeError: bounds that
    are missing, or are none; no image that can be brought to them."""
    canvas = _bounded(model, asked.data)
    notes = tuple[str, ...]()
    if stored is not None and stored.canvas is not None:
        own = stored.canvas.own_grids
        canvas = dataclasses.replace(canvas, size=stored.canvas.size, own_grids=own)
    else:
        canvas, notes = _around(canvas, image_sizes(selection), selection)
    channels, *size = model.input_size
    seen = canvas.size
    if canvas.own_grids:
        for name in ("grams", "erf"):
            if getattr(asked.keep, name):
                raise VitseeError(f"--{name} is not supported: {OWN_GRIDS}")
        if asked.keep.attention in ("rows", "full"):
            raise VitseeError(
                f"--attention {asked.keep.attention} is not supported: {OWN_GRIDS}; expected "
                "--attention summary"
            )
        seen = min(size[0], seen[0]), min(size[1], seen[1])
    names = (*TRANSFORM, "processor")
    transform = {key: model.transform[key] for key in names if key in model.transform}
    transform |= {"input_size": (channels, *canvas.size), **canvas_transform(canvas)}
    model = dataclasses.replace(model, input_size=(channels, *seen), transform=transform)
    table = site_table(model)
    if not canvas.own_grids:
        return ImageLayout(model, table, table, canvas, {}, notes)
    kept, left_out = table_on_canvas(table, canvas)
    return ImageLayout(model, table, kept, canvas, left_out, notes)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _bounded(model: LoadedModel, data: DataOptions) -> Canvas:
    """The canvas, still without a size, with the bounds that are asked for. Raises VitseeError:
    neither processor nor options say them, or they do not fit the model."""
    canvas = model.native
    assert canvas is not None
    given = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
    if canvas.crop_mode == "patches" and data.min_pixels is not None:
        raise VitseeError(
            f"--min-pixels is not supported: {model.name} gets as many patches of every image as "
            "--max-pixels hold"
        )
    wanted = (
        ("max_pixels",) if canvas.crop_mode == "patches" else ("min_pixels", "max_pixels")
    )
    changed = {name for name, number in given.items() if number is not None}
    canvas = dataclasses.replace(
        canvas,
        min_pixels=data.min_pixels or canvas.min_pixels,
        max_pixels=data.max_pixels or canvas.max_pixels,
    )
    unknown = [_flag(name) for name in wanted if getattr(canvas, name) is None]
    if unknown:
        raise VitseeError(
            f"{model.name} has no image processor, which would say {' and '.join(unknown)}: give "
            f"--native {' '.join(f'{option} N' for option in unknown)}"
        )
    for name in wanted:
        option = _flag(name)
        number = getattr(canvas, name)
        if name in changed and number < canvas.multiple**2:
            raise VitseeError(
                f"{option} is {number}, less than the {canvas.multiple} x {canvas.multiple} pixels "
                f"of one group of patches of {model.name}; expected at least {canvas.multiple**2}"
            )
    if (canvas.min_pixels or 0) > (canvas.max_pixels or 0):
        raise VitseeError(
            f"--min-pixels {canvas.min_pixels} is more than --max-pixels {canvas.max_pixels}"
            f"{'' if len(changed) == 2 else OWN_BOUND}; expected at most as many"
        )
    return canvas


def _clip(data: DataOptions, model: LoadedModel, stored: Clip | None) -> Clip | None:
    """How frames are taken: as asked, else as in an existing store, else as the model has them;
    None of images. Raises OptionError: options of clips without a number of frames; VitseeError:
    another number of frames than the model takes."""
    own = frames_of(model.module)
    kept = stored or Clip(own or 1)
    frames = data.frames or (own if stored is None else stored.frames)
    if own is not None and frames != own:
        raise VitseeError(
            f"{model.name} takes clips of {own} frames: --frames {frames} is not it"
        )
    if frames is None:
        if data.of_clips:
            name = "--every" if data.every is not None else "--time"
            raise OptionError(f"{name} is about frames of clips: give --frames N too")
        return None
    every = kept.every if data.every is None else data.every
    return Clip(frames, every, data.time or kept.time, by_frame=own is None)


def _of_clips(
    asked: Request, model: LoadedModel, table: SiteTable, clip: Clip, seed: int
) -> ImageLayout:
    """A model on clips. Raises VitseeError: options that clips do not have."""
    for option, given in (("short-side", asked.data.short_side), ("erf", asked.keep.erf)):
        if given:
            raise VitseeError(f"--{option} is not supported with clips (--frames)")
    about: dict[str, Any] = {
        "frames": clip.frames,
        "every": clip.every,
        "time": clip.time,
    }
    if clip.time == SHUFFLED:
        about["seed"] = seed
    model = dataclasses.replace(model, transform={**model.transform, "clip": about})
    if not clip.by_frame:
        return ImageLayout(model, table, table, clip=clip)
    check_by_frame(asked.keep.attention, model.interventions)
    return ImageLayout(model, table, clip_table(table, clip.frames), clip=clip)


def describe(canvas: Canvas | None) -> str:
    if canvas is None:
        return ""
    height, width = canvas.size
    line = f"canvas of {width} x {height} pixels"
    if canvas.own_grids:
        return f"{line}, each image alone on a grid of its own"
    if canvas.tiles is None:
        return line
    most = n_tiles(canvas.size, canvas.tiles)
    return f"{line}, up to {most} tiles of {canvas.tiles[1]} x {canvas.tiles[0]} an image"


def image_sizes(selection: Selection) -> NDArray[np.int64]:
    """(images, 2) height and width from the images' headers, 0 if one cannot be read."""
    log.info("reading the sizes of %s", plural(len(selection), "images"))

    # Reported with the image's name when it is read.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

    def size(index: int) -> Size:
        try:
            return selection.source.size(index)
        except ImageError:
            return 0, 0

    with ThreadPoolExecutor(READERS) as pool:
        sizes = list(pool.map(size, selection.samples.index.tolist()))
    return np.array(sizes, np.int64).reshape(-1, 2)


def _check_options(asked: Request) -> None:
    options = asked.model
    data = asked.data
    if data.native:
        _check_native(options, data)
        return
    for name in ("min_pixels", "max_pixels"):
        if getattr(data, name) is not None:
            option = name.replace("_", "-")
            raise OptionError(
                f"--{option} is about images at native resolution: give --native too"
            )
    if data.short_side is None:
        if data.tiles or data.multiple is not None:
            name = "--tiles" if data.tiles else "--multiple"
            raise OptionError(
                f"{name} is about images on a canvas: give --short-side N too"
            )
        return
    if isinstance(options, ModelOptions):
        for name in ("crop_mode", "crop_pct", "fill", "processor"):
            if getattr(options, name) is not None:
                raise OptionError(
                    f"--{name.replace('_', '-')} and --short-side exclude each other: with "
                    "--short-side vitsee resizes, and nothing is cropped or filled up"
                )
        if options.img_size is not None and not data.tiles:
            raise OptionError(
                "--img-size and --short-side exclude each other, but with --tiles, whose size "
                "--img-size is: the input is as large as the images are"
            )
    elif not data.tiles:
        raise OptionError(
            "short_side without tiles loads the model for another input: give a model's name"
        )
    if data.tiles:
        for name in ("grams", "erf"):
            if getattr(asked.keep, name):
                raise VitseeError(f"--{name} is not supported with --tiles: {TILED}")


def _check_native(options: ModelOptions | LoadedModel, data: DataOptions) -> None:
    if not isinstance(options, ModelOptions):
        raise OptionError("native needs the model's image processor: give a model's name")
    of_data = ("short_side", "multiple", "tiles", *OF_CLIPS)
    of_model = ("img_size", "crop_mode", "crop_pct", "fill", "transform")
    for of, names in ((data, of_data), (options, of_model)):
        for name in names:
            if getattr(of, name):
                raise OptionError(
                    f"--{name.replace('_', '-')} and --native exclude each other: with --native "
                    "the model's image processor says the size of each image"
                )


def _step(model: LoadedModel, table: SiteTable) -> int:
    """Required multiple, in pixels, of every image side: the steps between the cells of all block
    outputs whose grids cover the input exactly, and of what a language model receives."""
    grids = [
        s for s in table.sites if s.layout and _divides(s.layout, model.input_size[1:])
    ]
    blocks = [
        site for site in grids if "blocks" in site.groups or site.name == PART
    ] or grids
    steps = {round(stride) for site in blocks for stride in site.stride_px or ()}
    if (packing := packing_of(model.module)) is not None:
        steps.add(packing.step)
    if not steps:
        raise VitseeError(
            f"--short-side is not supported: {model.name} has no grid of whole patches over its "
            f"input of {model.input_size[2]} x {model.input_size[1]} pixels"
        )
    return math.lcm(*steps)


def _divides(layout: TokenLayout, size: Size, step: int | None = None) -> bool:
    """Whether the cells of a grid cover an input exactly, with a step that divides `step` if
    given."""
    if layout.grid is None or layout.stride_px is None or layout.offset_px != (0, 0):
        return False
    return all(
        cells * stride == side and stride == int(stride) and not (step or 0) % stride
        for cells, stride, side in zip(layout.grid, layout.stride_px, size, strict=True)
    )


def _check_numbers(
    model: LoadedModel, short: int, multiple: int, step: int, tiles: Size | None
) -> None:
    for name, number in (("--short-side", short), ("--multiple", multiple)):
        if number % step:
            near = max(step, number // step * step)
            raise VitseeError(
                f"{name} is {number}, no multiple of the {step} pixels between cells of "
                f"{model.name}; expected {near} or {near + step}"
            )
    if multiple > short:
        raise VitseeError(
            f"--multiple is {multiple}; expected at most --short-side, {short}"
        )
    least = short // multiple * multiple  # of a square image's second side
    if tiles is not None and least < max(tiles):
        raise VitseeError(
            f"--short-side {short} gives sides of {least} pixels and more, a tile has "
            f"{tiles[1]} x {tiles[0]}; expected at least {max(tiles)} (--img-size makes tiles "
            "smaller)"
        )


def _around(
    asked: Canvas, sizes: NDArray[np.int64], selection: Selection
) -> tuple[Canvas, tuple[str, ...]]:
    """The canvas that the largest images need, and remarks about it."""
    needed: Counter[Size] = Counter()
    names: dict[Size, str] = {}
    why = "expected image files that Pillow opens"
    for name, (height, width) in zip(selection.samples.ids, sizes.tolist(), strict=True):
        if height > 0 and width > 0:
            try:
                image = asked.image((height, width))
            except ValueError as error:  # refused on reading, as unreadable
                why = f"{name}: {error}"
                continue
            if math.prod(image) > MAX_PIXELS:
                continue  # refused on reading, as unreadable
            needed[image] += 1
            names.setdefault(image, name)
    if not needed:
        raise VitseeError(f"no image of {selection.source.name} can be read; {why}")
    size = max(h for h, _ in needed), max(w for _, w in needed)
    own_grids = True if asked.is_native and len(needed) > 1 else None
    if asked.tiles is None and not asked.is_native and len(needed) > 1:
        shown = [f"{w} x {h} ({names[h, w]})" for h, w in list(needed)[:2]]
        height, width = needed.most_common(1)[0][0]
        raise VitseeError(
            f"--short-side {asked.short_side} brings the images to {len(needed)} sizes: "
            f"{' and '.join(shown)}{' ...' if len(needed) > 2 else ''}; give --tiles, or bring all "
            f"to one with --img-size {height}x{width} --crop-mode squash"
        )
    mean = sum(n * h * w for (h, w), n in needed.items()) / needed.total()
    notes: tuple[str, ...] = ()
    if size[0] * size[1] > 2 * mean:
        share = mean / (size[0] * size[1])
        notes = (
            f"images cover {share:.0%} of the canvas of {size[1]} x {size[0]} pixels: leave the "
            "few large ones out with --only, or give --codec zstd, which the empty part costs "
            "nothing",
        )
    return dataclasses.replace(asked, size=size, own_grids=own_grids), notes


def _tiled(
    table: SiteTable, canvas: Canvas, tiles: Size, step: int
) -> tuple[SiteTable, dict[str, str]]:
    """The sites that can be assembled from tiles, on the canvas; and why others cannot."""
    left_out: dict[str, str] = {}
    kept: dict[str, SiteSpec] = {}
    prefix = False
    for site in table.sites:
        layout = site.layout
        if (
            layout is not None
            and layout.stride_px is not None
            and _divides(layout, tiles, step)
        ):
            strides = (round(stride) for stride in layout.stride_px)
            rows, cols = (
                n // stride for n, stride in zip(canvas.size, strides, strict=True)
            )
            prefix |= layout.n_prefix > 0
            whole = dataclasses.replace(layout, prefix=(), grid=(rows, cols))
            shape = (rows * cols, site.dim)
            kept[site.name] = dataclasses.replace(site, layout=whole, shape=shape)
        elif {"blocks", "head"} & set(site.groups):
            what = (
                "no grid" if layout is None or layout.grid is None else "no whole patches"
            )
            left_out[site.name] = f"{what}, and {TILED}"
    sites = tuple(s for s in kept.values() if s.alias_of is None or s.alias_of in kept)
    if prefix:
        left_out["prefix tokens"] = TILED
    return dataclasses.replace(
        table,
        sites=sites,
        sublayers=(),
        attention=(),
        attention_refusal=TILED,
        residual_refusal=TILED,
        rollout_refusal=None,
    ), left_out
