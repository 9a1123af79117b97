"""How images and clips reach the model.

--short-side  images in their own proportions, on one canvas; the model sees the whole canvas if
              all images fill it, else (`--tiles`) tiles of its own input size
--native      each image at the size that the model's own image processor gives it, on one
              canvas; where they differ in size the model sees each alone
--frames      frames of clips, together or one by one
"""

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
from vitsee_core.extraction.native import (
    OWN_GRIDS,
    table_on_canvas,
    without_dangling_aliases,
)
from vitsee_core.extraction.options import (
    CLIP_OPTIONS,
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
from vitsee_core.models.sources.native_sizes import canvas_transform
from vitsee_core.models.tokens.clips import frames_of
from vitsee_core.models.tokens.towers import PART, packing_of
from vitsee_core.runtime.machine import plural
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import SiteSpec, StorePlan, TokenLayout
from vitsee_stores.plan import Canvas, Clip, Size

log = logging.getLogger(__name__)

PROCESSOR_BOUND = " (the image processor's own where it is not given)"
HEADER_THREADS = 8  # threads that read the headers of images
# Entries of a transform that hold whatever the size of the images.
TRANSFORM_KEYS = ("input_size", "interpolation", "mean", "std")


@dataclass(frozen=True)
class ImageLayout:
    """How images reach the model.

    Attributes:
        model: the model as it runs.
        table: its sites as it runs.
        storable: the sites that a store can have, with their layout in the store.
        canvas: None if every image is resized to the model's input.
        left_out: site or summary that tiles or grids of different sizes exclude -> reason.
        notes: remarks for the user.
        clip: how frames are sampled from clips, None for images.
    """

    model: LoadedModel
    table: SiteTable
    storable: SiteTable
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
    request: Request, selection: Selection, stored_plan: StorePlan | None = None
) -> ImageLayout:
    """Load the model, and decide the canvas or the frames that its images need.

    Args:
        request: the model, and the options of the canvas and of clips.
        selection: the images, whose headers are read for a canvas.
        stored_plan: the plan of an existing store, whose canvas and clips are reused.

    Raises:
        OptionError: options that exclude each other.
        VitseeError: the model has no grid, or one that does not fit; images that would not fill the
            canvas, without tiles.
    """
    _check_options(request)
    options = request.model
    data = request.data
    stored_clip = None if stored_plan is None else stored_plan.clip
    frames = data.frames
    if frames is None and stored_clip is not None:
        frames = stored_clip.frames
    if isinstance(options, LoadedModel):
        model = options
    else:
        model = load_model(**vars(options), frames=frames, native=data.native)
    # The survey runs on the CPU; the model moves once its small weights are collected.
    model.module.cpu()
    if data.native:
        return _lay_out_native(model, request, selection, stored_plan)

    try:
        table = site_table(model)
    except ModelError as error:
        # A caller's module or file may be a model of clips, which runs on no single image.
        is_custom = isinstance(options, LoadedModel) or model.origin.get("kind") == "file"
        if frames is None and is_custom and not isinstance(error, ChangingModelError):
            option = "frames=N" if isinstance(options, LoadedModel) else "--frames N"
            raise ModelError(f"{error}; if it takes clips, give {option}") from error
        raise
    clip = _choose_clip(data, model, stored_clip)
    if clip is not None:
        seed = selection.identity["seed"]
        return _lay_out_clips(request, model, table, clip, seed)
    if data.short_side is None:
        return ImageLayout(model=model, table=table, storable=table)
    return _lay_out_short_side(model, table, request, selection, stored_plan)


def _lay_out_short_side(
    model: LoadedModel,
    table: SiteTable,
    request: Request,
    selection: Selection,
    stored_plan: StorePlan | None,
) -> ImageLayout:
    """Lay images out in their own proportions, by the length of their short side.

    Without tiles the model is loaded again for the canvas as its input.

    Args:
        model: the model, for its default input.
        table: its sites there.
        request: the options, `short_side` among them.
        selection: the images, whose headers say the size of the canvas.
        stored_plan: the plan of an existing store, whose canvas is reused.

    Raises:
        VitseeError: a size that the model's grid does not divide, or images of several sizes
            without tiles.
    """
    options = request.model
    data = request.data
    assert data.short_side is not None
    # The options are checked against the grid before the headers of all images are read.
    step = _required_multiple(model, table)
    multiple = step if data.multiple is None else data.multiple
    tiles = model.input_size[1:] if data.tiles else None
    _check_sides(model, data.short_side, multiple, step=step, tiles=tiles)
    canvas = Canvas((0, 0), data.short_side, multiple, tiles)
    notes: tuple[str, ...] = ()
    if stored_plan is not None and stored_plan.canvas is not None:
        canvas = dataclasses.replace(canvas, size=stored_plan.canvas.size)
    else:
        canvas, notes = _fit_canvas(canvas, image_sizes(selection), selection)

    # With tiles the model keeps its own input; without them the canvas is its input.
    if tiles is None and canvas.size != model.input_size[1:]:
        assert isinstance(options, ModelOptions)
        model = load_model(**{**vars(options), "img_size": canvas.size})
        table = site_table(model)
    # Settings of cropping do not hold any more: nothing is cropped on a canvas.
    transform = {key: model.transform[key] for key in TRANSFORM_KEYS} | {
        "input_size": (model.input_size[0], *canvas.size),
        "crop_mode": canvas.crop_mode,
        "short_side": canvas.short_side,
        "multiple": canvas.multiple,
    }
    model = dataclasses.replace(model, transform=transform)
    storable = table
    left_out: dict[str, str] = {}
    if tiles is not None:
        storable, left_out = _tiled_table(table, canvas, tiles, step)
    return ImageLayout(
        model=model,
        table=table,
        storable=storable,
        canvas=canvas,
        left_out=left_out,
        notes=notes,
    )


def _lay_out_native(
    model: LoadedModel,
    request: Request,
    selection: Selection,
    stored_plan: StorePlan | None,
) -> ImageLayout:
    """Lay images out at the sizes that the model's image processor gives them.

    Where they differ in size the model's sites are found on images of its default size, or of the
    canvas' where that is smaller.

    Raises:
        VitseeError: bounds that are missing or invalid, or no image that can be brought to them.
    """
    canvas = _bounded_canvas(model, request.data)
    notes: tuple[str, ...] = ()
    if stored_plan is not None and stored_plan.canvas is not None:
        canvas = dataclasses.replace(
            canvas,
            size=stored_plan.canvas.size,
            own_grids=stored_plan.canvas.own_grids,
        )
    else:
        canvas, notes = _fit_canvas(canvas, image_sizes(selection), selection)
    channels, height, width = model.input_size
    examined_size = canvas.size
    if canvas.own_grids:
        for name in ("grams", "erf"):
            if getattr(request.keep, name):
                raise VitseeError(f"--{name} is not supported: {OWN_GRIDS}")
        if request.keep.attention in ("rows", "full"):
            raise VitseeError(
                f"--attention {request.keep.attention} is not supported: {OWN_GRIDS}; expected "
                "--attention summary"
            )
        # The whole canvas can be larger than any image: do not examine the model on it.
        examined_size = min(height, canvas.size[0]), min(width, canvas.size[1])
    transform = {
        key: model.transform[key]
        for key in (*TRANSFORM_KEYS, "processor")
        if key in model.transform
    }
    transform |= {"input_size": (channels, *canvas.size), **canvas_transform(canvas)}
    model = dataclasses.replace(
        model, input_size=(channels, *examined_size), transform=transform
    )
    table = site_table(model)
    storable = table
    left_out: dict[str, str] = {}
    if canvas.own_grids:
        storable, left_out = table_on_canvas(table, canvas)
    return ImageLayout(
        model=model,
        table=table,
        storable=storable,
        canvas=canvas,
        left_out=left_out,
        notes=notes,
    )


def _flag(field_name: str) -> str:
    """Return the option of the command line for a field: `short_side` -> `--short-side`."""
    return f"--{field_name.replace('_', '-')}"


def _bounded_canvas(model: LoadedModel, data: DataOptions) -> Canvas:
    """Return the canvas of images at native resolution with its bounds, still without a size.

    Raises:
        VitseeError: neither processor nor options give the bounds, or they do not fit the model.
    """
    canvas = model.native
    assert canvas is not None
    if canvas.crop_mode == "patches" and data.min_pixels is not None:
        raise VitseeError(
            f"--min-pixels is not supported: {model.name} gets as many patches of every image as "
            "--max-pixels hold"
        )
    bound_names = ["min_pixels", "max_pixels"]
    if canvas.crop_mode == "patches":
        bound_names = ["max_pixels"]
    canvas = dataclasses.replace(
        canvas,
        min_pixels=data.min_pixels or canvas.min_pixels,
        max_pixels=data.max_pixels or canvas.max_pixels,
    )
    unknown = [_flag(name) for name in bound_names if getattr(canvas, name) is None]
    if unknown:
        raise VitseeError(
            f"{model.name} has no image processor, which would say {' and '.join(unknown)}: give "
            f"--native {' '.join(f'{option} N' for option in unknown)}"
        )
    # The processor's own bounds are not checked: the model was trained with them.
    explicit_names = [name for name in bound_names if getattr(data, name) is not None]
    least = canvas.multiple**2
    for name in explicit_names:
        n_pixels = getattr(canvas, name)
        if n_pixels < least:
            raise VitseeError(
                f"{_flag(name)} is {n_pixels}, less than the {canvas.multiple} x "
                f"{canvas.multiple} pixels of one group of patches of {model.name}; expected at "
                f"least {least}"
            )
    if (canvas.min_pixels or 0) > (canvas.max_pixels or 0):
        origin = "" if len(explicit_names) == 2 else PROCESSOR_BOUND
        raise VitseeError(
            f"--min-pixels {canvas.min_pixels} is more than --max-pixels {canvas.max_pixels}"
            f"{origin}; expected at most as many"
        )
    return canvas


def _choose_clip(
    data: DataOptions, model: LoadedModel, stored_clip: Clip | None
) -> Clip | None:
    """Return how frames are sampled, None for images.

    Options come first, then an existing store, then the number of frames that the model takes.

    Raises:
        OptionError: options of clips without a number of frames.
        VitseeError: another number of frames than the model takes.
    """
    model_frames = frames_of(model.module)
    defaults = stored_clip or Clip(model_frames or 1)
    frames = data.frames
    if frames is None:
        frames = model_frames if stored_clip is None else stored_clip.frames
    if model_frames is not None and frames != model_frames:
        raise VitseeError(
            f"{model.name} takes clips of {model_frames} frames: --frames {frames} is not it"
        )
    if frames is None:
        if data.has_clip_options:
            name = "--every" if data.every is not None else "--time"
            raise OptionError(f"{name} is about frames of clips: give --frames N too")
        return None
    every = defaults.every if data.every is None else data.every
    time = data.time or defaults.time
    # An image model sees the frames one by one, a model of clips all of them together.
    return Clip(frames, every, time, by_frame=model_frames is None)


def _lay_out_clips(
    request: Request, model: LoadedModel, table: SiteTable, clip: Clip, seed: int
) -> ImageLayout:
    """Return the layout of a model on clips, whose sampling becomes part of its transform.

    Raises:
        VitseeError: options that clips do not have.
    """
    if request.data.short_side:
        raise VitseeError("--short-side is not supported with clips (--frames)")
    if request.keep.erf:
        raise VitseeError("--erf is not supported with clips (--frames)")
    sampling: dict[str, Any] = {
        "frames": clip.frames,
        "every": clip.every,
        "time": clip.time,
    }
    # The seed decides the order of frames, so it belongs to the transform's identity.
    if clip.time == SHUFFLED:
        sampling["seed"] = seed
    model = dataclasses.replace(model, transform={**model.transform, "clip": sampling})
    if not clip.by_frame:
        return ImageLayout(model=model, table=table, storable=table, clip=clip)
    check_by_frame(request.keep.attention, model.interventions)
    storable = clip_table(table, clip.frames)
    return ImageLayout(model=model, table=table, storable=storable, clip=clip)


def describe_canvas(canvas: Canvas | None) -> str:
    """Describe a canvas in a line for the user; "" if there is none."""
    if canvas is None:
        return ""
    height, width = canvas.size
    line = f"canvas of {width} x {height} pixels"
    if canvas.own_grids:
        return f"{line}, each image alone on a grid of its own"
    if canvas.tiles is None:
        return line
    max_tiles = n_tiles(canvas.size, canvas.tiles)
    tile_height, tile_width = canvas.tiles
    return f"{line}, up to {max_tiles} tiles of {tile_width} x {tile_height} an image"


def image_sizes(selection: Selection) -> NDArray[np.int64]:
    """Return (images, 2) height and width from the images' headers, 0 if one cannot be read."""
    log.info("reading the sizes of %s", plural(len(selection), "images"))

    # Reported with the image's name when it is read.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

    def read_size(index: int) -> Size:
        """(height, width) of an image, (0, 0) if it cannot be read."""
        try:
            return selection.source.size(index)
        except ImageError:
            return 0, 0

    # Headers wait for the disk or the network, not for the interpreter.
    with ThreadPoolExecutor(HEADER_THREADS) as pool:
        sizes = list(pool.map(read_size, selection.samples.index.tolist()))
    return np.array(sizes, np.int64).reshape(-1, 2)


def _check_options(request: Request) -> None:
    """Refuse options of a canvas that exclude each other or that have no effect.

    Raises:
        OptionError: names the options.
        VitseeError: --grams or --erf with tiles.
    """
    options = request.model
    data = request.data
    if data.native:
        _check_native(options, data)
        return
    for name in ("min_pixels", "max_pixels"):
        if getattr(data, name) is not None:
            raise OptionError(
                f"{_flag(name)} is about images at native resolution: give --native too"
            )
    if data.short_side is None:
        if data.tiles or data.multiple is not None:
            option = "--tiles" if data.tiles else "--multiple"
            raise OptionError(
                f"{option} is about images on a canvas: give --short-side N too"
            )
        return
    if isinstance(options, ModelOptions):
        for name in ("crop_mode", "crop_pct", "fill", "processor"):
            if getattr(options, name) is not None:
                raise OptionError(
                    f"{_flag(name)} and --short-side exclude each other: with "
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
            if getattr(request.keep, name):
                raise VitseeError(f"--{name} is not supported with --tiles: {TILED}")


def _check_native(options: ModelOptions | LoadedModel, data: DataOptions) -> None:
    """Refuse options that decide a size which with --native the image processor decides.

    Raises:
        OptionError: names the option, or a model without a name.
    """
    if not isinstance(options, ModelOptions):
        raise OptionError("native needs the model's image processor: give a model's name")
    data_names = ["short_side", "multiple", "tiles", *CLIP_OPTIONS]
    model_names = ["img_size", "crop_mode", "crop_pct", "fill", "transform"]
    excluded = [name for name in data_names if getattr(data, name)]
    excluded += [name for name in model_names if getattr(options, name)]
    if excluded:
        raise OptionError(
            f"{_flag(excluded[0])} and --native exclude each other: with --native "
            "the model's image processor says the size of each image"
        )


def _required_multiple(model: LoadedModel, table: SiteTable) -> int:
    """Return the pixels of which every side of an image must be a multiple.

    It is the least common multiple of the steps between cells of all block outputs whose grids
    cover the input exactly, and of the patches that a language model receives.

    Raises:
        VitseeError: the model has no grid of whole patches.
    """
    size = model.input_size[1:]
    grid_sites = [
        site
        for site in table.sites
        if site.layout is not None and _covers(site.layout, size)
    ]
    # Stages with other strides count as well (Swin): hence the least common multiple.
    block_sites = [
        site for site in grid_sites if "blocks" in site.groups or site.name == PART
    ]
    steps: set[int] = set()
    for site in block_sites or grid_sites:
        steps.update(round(stride) for stride in site.stride_px or ())
    packing = packing_of(model.module)
    if packing is not None:
        steps.add(packing.step)
    if not steps:
        raise VitseeError(
            f"--short-side is not supported: {model.name} has no grid of whole patches over its "
            f"input of {model.input_size[2]} x {model.input_size[1]} pixels"
        )
    return math.lcm(*steps)


def _covers(layout: TokenLayout, size: Size, step: int | None = None) -> bool:
    """Return whether the cells of a grid cover an input of this size exactly.

    With `step`, the pixels between cells must be whole and divide it, too.
    """
    if layout.grid is None or layout.stride_px is None or layout.offset_px != (0, 0):
        return False
    return all(
        # Exactly: a border, or a rest that no cell covers, would shift cells between
        # tiles.
        n_cells * stride == side and stride == int(stride) and not (step or 0) % stride
        for n_cells, stride, side in zip(layout.grid, layout.stride_px, size, strict=True)
    )


def _check_sides(
    model: LoadedModel, short_side: int, multiple: int, *, step: int, tiles: Size | None
) -> None:
    """Refuse sides that the model's cells do not divide, or that are smaller than a tile.

    Args:
        model: the model.
        short_side: pixels of each image's short side.
        multiple: pixels of which its long side becomes a multiple.
        step: pixels of which both must be a multiple.
        tiles: (height, width) of a tile.

    Raises:
        VitseeError: names the option.
    """
    for option, n_pixels in {"--short-side": short_side, "--multiple": multiple}.items():
        if n_pixels % step:
            # The two nearest multiples, as a suggestion.
            below = max(step, n_pixels // step * step)
            raise VitseeError(
                f"{option} is {n_pixels}, no multiple of the {step} pixels between cells of "
                f"{model.name}; expected {below} or {below + step}"
            )
    if multiple > short_side:
        raise VitseeError(
            f"--multiple is {multiple}; expected at most --short-side, {short_side}"
        )
    # A square image's second side is rounded down, so that no side is shorter than this.
    shortest = short_side // multiple * multiple
    if tiles is not None and shortest < max(tiles):
        raise VitseeError(
            f"--short-side {short_side} gives sides of {shortest} pixels and more, a tile has "
            f"{tiles[1]} x {tiles[0]}; expected at least {max(tiles)} (--img-size makes tiles "
            "smaller)"
        )


def _fit_canvas(
    canvas: Canvas, sizes: NDArray[np.int64], selection: Selection
) -> tuple[Canvas, tuple[str, ...]]:
    """Make a canvas as large as its largest images need.

    Args:
        canvas: the canvas, whose size is not used.
        sizes: (images, 2) height and width of the original images, 0 for unreadable ones.
        selection: the images.

    Returns:
        The canvas, and remarks for the user.

    Raises:
        VitseeError: no image can be read, or images of several sizes for a model without tiles.
    """
    n_by_size: Counter[Size] = Counter()
    example_by_size: dict[Size, str] = {}  # name of the first image of each size
    why = "expected image files that Pillow opens"
    for name, (height, width) in zip(selection.samples.ids, sizes.tolist(), strict=True):
        if height <= 0 or width <= 0:
            continue
        # What is too long or too large is skipped here and reported as unreadable when it is read.
        try:
            size_on_canvas = canvas.image((height, width))
        except ValueError as error:
            why = f"{name}: {error}"
            continue
        if math.prod(size_on_canvas) > MAX_PIXELS:
            continue
        n_by_size[size_on_canvas] += 1
        example_by_size.setdefault(size_on_canvas, name)
    if not n_by_size:
        raise VitseeError(f"no image of {selection.source.name} can be read; {why}")
    own_grids = None
    if len(n_by_size) > 1:
        if canvas.is_native:
            own_grids = True
        elif canvas.tiles is None:
            raise VitseeError(_several_sizes(canvas, n_by_size, example_by_size))

    height = max(height for height, _ in n_by_size)
    width = max(width for _, width in n_by_size)
    area = height * width
    # In pixels on the canvas, each image once.
    mean_area = sum(n * h * w for (h, w), n in n_by_size.items()) / n_by_size.total()
    notes: tuple[str, ...] = ()
    # Less than half of the canvas is used on average.
    if area > 2 * mean_area:
        notes = (
            f"images cover {mean_area / area:.0%} of the canvas of {width} x {height} pixels: "
            "leave the few large ones out with --only, or give --codec zstd, which the empty part "
            "costs nothing",
        )
    fitted = dataclasses.replace(canvas, size=(height, width), own_grids=own_grids)
    return fitted, notes


def _several_sizes(
    canvas: Canvas, n_by_size: Counter[Size], example_by_size: dict[Size, str]
) -> str:
    """Return the error line for images that have no common size: two sizes and a way out."""
    examples = [
        f"{width} x {height} ({name})"
        for (height, width), name in list(example_by_size.items())[:2]
    ]
    more = " ..." if len(n_by_size) > 2 else ""
    (common_height, common_width), _ = n_by_size.most_common(1)[0]
    return (
        f"--short-side {canvas.short_side} brings the images to {len(n_by_size)} sizes: "
        f"{' and '.join(examples)}{more}; give --tiles, or bring all "
        f"to one with --img-size {common_height}x{common_width} --crop-mode squash"
    )


def _tiled_table(
    table: SiteTable, canvas: Canvas, tiles: Size, step: int
) -> tuple[SiteTable, dict[str, str]]:
    """Find the sites that can be assembled from tiles.

    Args:
        table: the model's sites on one tile.
        canvas: the canvas, with its size.
        tiles: (height, width) of a tile.
        step: pixels of which every side is a multiple.

    Returns:
        The sites with their grids on the whole canvas; and site -> reason for those left out.
    """
    left_out: dict[str, str] = {}
    tiled: list[SiteSpec] = []
    has_prefix = False
    for site in table.sites:
        layout = site.layout
        if (
            layout is not None
            and layout.stride_px is not None
            and _covers(layout, tiles, step)
        ):
            # Whole: the sides of the canvas are multiples of the step, which the stride
            # divides.
            rows = canvas.size[0] // round(layout.stride_px[0])
            cols = canvas.size[1] // round(layout.stride_px[1])
            has_prefix |= layout.n_prefix > 0
            # Each tile has prefix tokens of its own, which do not stand for the image.
            layout = dataclasses.replace(layout, prefix=(), grid=(rows, cols))
            shape = (rows * cols, site.dim)
            tiled.append(dataclasses.replace(site, layout=layout, shape=shape))
        elif {"blocks", "head"} & set(site.groups):
            lack = "no whole patches"
            if layout is None or layout.grid is None:
                lack = "no grid"
            left_out[site.name] = f"{lack}, and {TILED}"
    if has_prefix:
        left_out["prefix tokens"] = TILED
    # Whatever mixes tokens of an image is left out: tiles do not attend to each other.
    tiled_table = dataclasses.replace(
        table,
        sites=without_dangling_aliases(tiled),
        sublayers=(),
        attention=(),
        attention_refusal=TILED,
        residual_refusal=TILED,
        rollout_refusal=None,
    )
    return tiled_table, left_out
