"""Position tables of weights for another grid of patches than the model's.

A table (1, prefix tokens + rows * cols, channels) does not say its grid. Libraries resample it
where the number of tokens differs, take any number of positions for a square, and 4 x 4 positions
for 2 x 8 as they are. Here it is resampled where the grid differs: that of the user's
`--weights-size`, else a square one where the number of positions is a square, which is said. Other
numbers need `--weights-size`, unless they are the model's own grid.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.weights.origins import Origins

log = logging.getLogger(__name__)

POSITION_NAMES = (
    "pos_embed",
    "patch_pos",
    "position_embedding",
    "positional_embedding",
    "pos_embedding",
)
MAX_PREFIX_TOKENS = 64
# Names of the module that cuts images into patches, in timm and in transformers.
_PATCH_EMBEDDINGS = ("patch_embed", "patch_embeddings", "patch_embedding", "pixel_embed")
# Images that most models were published for, where a model does not state its own.
_USUAL_SIZE = (224, 224)


@dataclass(frozen=True)
class Resampling:
    """How tensors of other sizes may be fitted.

    Attributes:
        patches: whether filters of the patch embedding may be resampled to another patch size.
        size: (rows, cols) in pixels of the images that the weights' position table is for, where
            the user says it.
        stated_size: the same where a configuration beside the weights says it, which is believed
            as far as the number of positions agrees.
    """

    patches: bool = False
    size: tuple[int, int] | None = None
    stated_size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Conversion:
    """The tensors of a file after conversion, and which of them were resampled.

    Attributes:
        stored: the file's tensors, by names without prefix.
        tensors: the model's tensors.
        sources: name in `tensors` -> names in `stored` that it was made of.
        origins: whether a tensor was interpolated, or is a view.
    """

    stored: dict[str, Tensor]
    tensors: dict[str, Tensor]
    sources: Mapping[str, frozenset[str]]
    origins: Origins

    def only_source(self, name: str) -> Tensor | None:
        """Return the stored tensor that one of the model's was made of; None where it was made of
        several or of none."""
        names = list(self.sources.get(name, ()))
        if len(names) != 1:
            return None
        return self.stored[names[0]]


@dataclass(frozen=True)
class _Patches:
    """The patches of a model's input, as it states them.

    Attributes:
        grid: rows and columns of patches.
        size: rows and columns of a patch in pixels; None where it is not stated.
    """

    grid: tuple[int, int]
    size: tuple[int, int] | None


class PositionFit(NamedTuple):
    """What became of the position tables of weights.

    Attributes:
        resampled: lines "NAME ROWS x COLS to ROWS x COLS".
        notes: lines about the grids that were assumed.
        unknown_grids: the model's name of a table whose grid nothing says -> its number of
            positions.
    """

    resampled: list[str]
    notes: list[str]
    unknown_grids: dict[str, int]


@contextmanager
def no_guessed_grids() -> Iterator[None]:
    """Return a context in which conversions of timm's leave position tables as they are stored,
    where timm would take a number of positions that is not a square for one.

    `fit_positions` resamples these tables from the grid that the user says.
    """
    layers = sys.modules.get("timm.layers")
    if layers is None:  # no conversion of timm's has been imported
        yield
        return
    resample = layers.resample_abs_pos_embed
    signature = inspect.signature(resample)

    def resample_known(table: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(table, *args, **kwargs)
        call.apply_defaults()
        n_positions = table.shape[1] - call.arguments["num_prefix_tokens"]
        if call.arguments["old_size"] is None and not _square_side(n_positions):
            return table
        return resample(table, *args, **kwargs)

    with ExitStack() as patches:
        # Conversions look the function up in their own module, each time that they are called.
        for module_name, module in list(sys.modules.items()):
            if not module_name.startswith("timm.models."):
                continue
            if vars(module).get("resample_abs_pos_embed") is resample:
                patch = mock.patch.object(
                    module, "resample_abs_pos_embed", resample_known
                )
                patches.enter_context(patch)
        yield


def fit_positions(
    model: nn.Module, conversion: Conversion, resampling: Resampling, who: str
) -> PositionFit:
    """Resample the position tables whose grid differs from the model's, in place in the conversion.

    Args:
        model: the model, whose grid of patches counts.
        conversion: its tensors are changed.
        resampling: what the user or a configuration says of the weights' grid.
        who: the file or the model, in messages.

    Raises:
        ModelError: a table has another number of positions than images of the size that the user
            says have patches.
    """
    resampled: list[str] = []
    notes: list[str] = []
    unknown_grids: dict[str, int] = {}
    for name, parameter in model.state_dict().items():
        table = conversion.tensors.get(name)
        patches = None if table is None else _patches_below(model, name)
        if table is None or patches is None:
            continue
        if not _is_position_table(name, table, parameter, patches.grid):
            continue
        grid = patches.grid
        n_prefix = parameter.shape[-2] - math.prod(grid)
        interpolated = conversion.origins.is_interpolated(table)
        if resampling.size is not None:
            stored_grid = _stated_grid(conversion, resampling.size, patches)
            stored = conversion.only_source(name)
            if interpolated and stored is not None and stored.ndim == table.ndim:
                # The library's conversion took the table for square: start from the file's.
                table = stored.float()
            n_positions = table.shape[-2] - n_prefix
            if math.prod(stored_grid) != n_positions:
                raise ModelError(
                    f"{who}: {name} has {n_positions} positions, and images of --weights-size have "
                    f"{stored_grid[0]} x {stored_grid[1]} patches; expected the size in pixels "
                    "that the weights were trained with"
                )
        elif interpolated:  # by the library's own conversion
            resampled.append(f"{name} to {grid[0]} x {grid[1]}")
            continue
        else:
            n_positions = table.shape[-2] - n_prefix
            is_same_size = n_positions == math.prod(grid)
            if is_same_size and grid[0] == grid[1]:
                if resampling.stated_size is None:
                    _say_square(model, name, patches, who)
                continue
            likely_grid = _likely_grid(
                conversion, resampling.stated_size, patches, n_positions
            )
            if likely_grid is None:
                unknown_grids[name] = n_positions
                continue  # `fit` refuses its size
            stored_grid = likely_grid
            if resampling.stated_size is None:
                notes.append(
                    f"{name} does not say its grid, assumed is {stored_grid[0]} x {stored_grid[1]} "
                    "(for others: --weights-size)"
                )
        conversion.tensors[name] = table
        if stored_grid != grid:
            conversion.tensors[name] = _resampled_table(
                table, stored_grid, grid, n_prefix
            )
            sizes = f"{stored_grid[0]} x {stored_grid[1]} to {grid[0]} x {grid[1]}"
            resampled.append(f"{name} {sizes}")
    return PositionFit(resampled, notes, unknown_grids)


def _say_square(model: nn.Module, name: str, patches: _Patches, who: str) -> None:
    """Log that a table was taken for a square grid, where it could be of another.

    Nothing is said of a prime number of rows, and of a model whose images have their usual size:
    published weights are square.

    Args:
        model: the model.
        name: name of a table with as many positions as the model's square grid.
        patches: the model's patches.
        who: the file or the model, in the message.
    """
    side = patches.grid[0]
    has_other_grid = any(side % divisor == 0 for divisor in range(2, side))
    rows, cols = patches.size or (1, 1)
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    usual_size = tuple(config.get("input_size") or _USUAL_SIZE)[-2:]
    if has_other_grid and (side * rows, side * cols) != usual_size:
        log.info(
            "%s: %s does not say its grid, assumed is %d x %d (for others: --weights-size)",
            who,
            name,
            side,
            side,
        )


def require_same_grid(module: nn.Module, trained: nn.Module, who: str) -> None:
    """Refuse position tables that were taken as they are for another grid of as many patches.

    Args:
        module: the model with its weights.
        trained: the model as the configuration beside the weights says it, without values.
        who: the model, as the message calls it.

    Raises:
        ModelError: names the table and both grids.
    """
    trained_state = trained.state_dict()
    for name, table in module.state_dict().items():
        patches = _patches_below(module, name)
        if patches is None or name not in trained_state:
            continue
        if not _is_position_table(name, table, table, patches.grid):
            continue
        stated = _patches_below(trained, name)
        if stated is not None and stated.grid != patches.grid:
            rows, cols = stated.grid
            raise ModelError(
                f"{who}: {name} has positions of {rows} x {cols} patches, as the configuration "
                f"beside it says, the model has {patches.grid[0]} x {patches.grid[1]}; expected "
                "--img-size in place of the argument, or --checkpoint FILE, which resamples them"
            )


def _is_position_table(
    name: str, table: Tensor, parameter: Tensor, grid: tuple[int, int]
) -> bool:
    """Return whether a tensor has a row for every patch, ([1,] prefix tokens + patches, channels).

    Args:
        name: the tensor's name in the model.
        table: the tensor of the weights.
        parameter: the model's tensor of this name.
        grid: rows and columns of the model's patches.
    """
    if not any(word in name for word in POSITION_NAMES):
        return False
    if table.ndim != parameter.ndim or table.ndim not in (2, 3):
        return False
    if table.ndim == 3 and table.shape[0] != 1:
        return False
    n_prefix = parameter.shape[-2] - math.prod(grid)
    has_prefix = 0 <= n_prefix <= MAX_PREFIX_TOKENS
    return has_prefix and table.shape[-1] == parameter.shape[-1]


def _resampled_table(
    table: Tensor, old: tuple[int, int], new: tuple[int, int], n_prefix: int
) -> Tensor:
    """Return a table, ([1,] prefix tokens + positions, channels), interpolated to another grid;
    timm's function, as timm's models are resampled by it."""
    from timm.layers.pos_embed import resample_abs_pos_embed

    batched = table if table.ndim == 3 else table[None]
    resampled: Tensor = resample_abs_pos_embed(
        batched, new_size=list(new), old_size=list(old), num_prefix_tokens=n_prefix
    )
    return resampled if table.ndim == 3 else resampled[0]


def _patches_below(model: nn.Module, name: str) -> _Patches | None:
    """Return the patches that a table has positions of: those stated by the nearest module around
    the table; None where none states them.

    Libraries state them in the patch embedding beside the table (timm, transformers) or in the
    module that holds the table (open_clip, torchvision).
    """
    words = name.split(".")[:-1]
    for n in range(len(words), -1, -1):
        holder = model.get_submodule(".".join(words[:n]))
        for child in _PATCH_EMBEDDINGS:
            patches = _stated_patches(getattr(holder, child, None))
            if patches is not None:
                return patches
        patches = _stated_patches(holder)
        if patches is not None:
            return patches
    return None


def _stated_patches(module: Any) -> _Patches | None:
    """Return the patches that a module states, as `grid_size` or as the sizes of images and
    patches; None where it states neither."""
    patch = _pair(getattr(module, "patch_size", None))
    ratio = _pair(getattr(module, "feature_ratio", None))
    if patch is not None and ratio is not None:
        # timm's HybridEmbed cuts feature maps, whose positions are `ratio` pixels apart.
        patch = patch[0] * ratio[0], patch[1] * ratio[1]
    grid = getattr(module, "grid_size", None)
    if isinstance(grid, tuple | list):  # a number may count something else
        sides = _pair(grid)
        return None if sides is None else _Patches(sides, patch)
    image = _pair(getattr(module, "image_size", None))
    if image is None or patch is None:
        return None
    return _Patches((image[0] // patch[0], image[1] // patch[1]), patch)


def _pair(value: Any) -> tuple[int, int] | None:
    """Return two positive numbers, rows and columns, of one number or two; None for anything
    else."""
    sides = (value, value) if isinstance(value, int) else value
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        return None
    rows, cols = sides
    if not isinstance(rows, int) or not isinstance(cols, int) or min(rows, cols) < 1:
        return None
    return rows, cols


def _likely_grid(
    conversion: Conversion,
    stated_size: tuple[int, int] | None,
    patches: _Patches,
    n_positions: int,
) -> tuple[int, int] | None:
    """Return the grid of a table with this many positions: the stated one, a square one, or the
    model's; None where none of them has as many positions."""
    if stated_size is not None:
        stated_grid = _stated_grid(conversion, stated_size, patches)
        if math.prod(stated_grid) == n_positions:
            return stated_grid
    side = _square_side(n_positions)
    if side:
        return side, side
    return patches.grid if math.prod(patches.grid) == n_positions else None


def _square_side(n_positions: int) -> int:
    """Return the rows of a square grid with this many positions, 0 where there is none."""
    side = math.isqrt(max(n_positions, 0))
    return side if side * side == n_positions else 0


def _stated_grid(
    conversion: Conversion, size: tuple[int, int], patches: _Patches
) -> tuple[int, int]:
    """Return rows and columns of patches in images of this size, with the weights' patch size, or
    the model's where the weights do not show it."""
    for name, model_filters in conversion.tensors.items():
        filters = conversion.only_source(name)
        if "patch_embed" not in name or filters is None or filters.ndim != 4:
            continue
        # Filters of a stem in front of the patches have other sizes than patches.
        if patches.size is None or tuple(model_filters.shape[2:]) == patches.size:
            return size[0] // filters.shape[2], size[1] // filters.shape[3]
    rows, cols = patches.size or (1, 1)
    return size[0] // rows, size[1] // cols


def resized(conversion: Conversion, *, patches: bool, who: str) -> list[str]:
    """Return the model's tensors that have another size in the file, as "NAME (shape) to (shape)".

    Views of a stored tensor (a table without its class token) are not counted: their values are the
    file's.

    Raises:
        ModelError: filters of another patch size, unless `patches` allows it.
    """
    texts = []
    for name, x in conversion.tensors.items():
        stored = conversion.only_source(name)
        if stored is None or stored.numel() == x.numel() or conversion.origins.is_part(x):
            continue
        before = tuple(stored.shape)
        after = tuple(x.shape)
        are_filters = len(before) == len(after) == 4 and before[:2] == after[:2]
        if are_filters and not patches:
            raise ModelError(
                f"{who}: {name} has filters of {before[2]} x {before[3]} pixels, the model's have "
                f"{after[2]} x {after[3]}; expected the same (--resample-patches if they shall be "
                "resampled)"
            )
        texts.append(f"{name} {before} to {after}")
    return texts
