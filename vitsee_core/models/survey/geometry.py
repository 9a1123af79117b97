"""The tokens of a model: which dimensions of an activation are the image's rows and columns, how
many prefix tokens there are, and how far cells are apart in pixels.

Dimensions are read from shapes; where two readings are possible, the indices that respond to a
change in one corner of the image decide. The distance of cells is the product of the strides on the
path from the image to their grid. Where a model does not say how many prefix tokens it has, they
are its tokens less the cells of the grid of patches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import View
from vitsee_core.models.survey.patches import Patches
from vitsee_core.models.survey.strides import Steps
from vitsee_core.models.survey.tracing import N_CORNERS, Seen, Trace
from vitsee_core.models.tokens.towers import Grid
from vitsee_stores.layout import TokenLayout

MAX_PREFIX = 32
# Names of the parameters of prefix tokens, by kind; a token without such a parameter is a register.
_KIND_PATTERNS = {
    "cls": r"(^|_)(cls|class)",
    "dist": r"(^|_)dist",
    "camera": r"(^|_)(camera|pose)_token",
}
# Parameters with these in their names are not tokens.
_NOT_TOKENS = r"pos|mask|query|bias|scale|head|norm|weight"
# Responses that exceed an even spread by less are not concentrated.
_MIN_CONCENTRATION = 0.15


@dataclass(frozen=True)
class ModelGeometry:
    """The tokens of a model, and the size of its input images in pixels.

    Attributes:
        image: (rows, cols) of the input in pixels.
        prefix: kinds of the prefix tokens, in their order.
        grid: (rows, cols) of the model's patches, None where no such grid is known.
        steps: distances of cells; None to take them from the sizes of grids.
        patches: the grids whose patches were measured.
        added: kinds of further prefix tokens, which the blocks alone work on.
        frames: frames of a clip, None for images.
    """

    image: Grid
    prefix: tuple[str, ...] = ()
    grid: Grid | None = None
    steps: Steps | None = None
    patches: tuple[Patches, ...] = ()
    added: tuple[str, ...] = ()
    frames: int | None = None

    def layout(self, grid: Sequence[int], prefix: tuple[str, ...] = ()) -> TokenLayout:
        """Return the layout of a grid with prefix tokens before it.

        The strides are those of its measured patches, else the product of the strides before it,
        with offset 0. Cells of a grid with times divide the clip.

        grid: (rows, cols), or (times, rows, cols).
        """
        if len(grid) == 3:
            assert self.frames is not None
            times, rows, cols = grid
            stride = self.image[0] / rows, self.image[1] / cols
            layout = TokenLayout(prefix, (rows, cols), stride_px=stride)
            return replace(layout, frames=times, stride_frames=self.frames / times)
        grid = grid[0], grid[1]
        for measured in self.patches:
            if measured.grid == grid:
                return TokenLayout(
                    prefix, grid, 0, measured.stride_px, measured.offset_px
                )
        steps = self.steps or Steps(self.image)
        return TokenLayout(prefix, grid, stride_px=steps.of(grid).stride_px)

    def exact(self, grid: Grid) -> bool:
        """Return whether a grid reduces both axes of the image alike, to the cell."""
        is_alike = grid[0] * self.image[1] == grid[1] * self.image[0]
        return is_alike and self._is_within_image(grid)

    def near(self, grid: Grid) -> bool:
        """Return whether a grid reduces both axes alike up to one cell of padding or cropping."""
        exact_rows = grid[1] * self.image[0] / self.image[1]
        is_alike = abs(grid[0] - exact_rows) <= 1
        return is_alike and self._is_within_image(grid) and min(grid) > 1

    def _is_within_image(self, grid: Grid) -> bool:
        """Return whether a grid has no more cells along an axis than the image has pixels."""
        return grid[0] <= self.image[0] and grid[1] <= self.image[1]

    def grid_of(self, n_cells: int) -> Grid | None:
        """Return the grid of so many cells that reduces both axes alike, None without one."""
        if self.grid and math.prod(self.grid) == n_cells:
            return self.grid
        if n_cells < 1:
            return None
        is_square = self.image[0] == self.image[1]
        nearest_rows = round(math.sqrt(n_cells * self.image[0] / self.image[1]))
        for rows in (nearest_rows, nearest_rows - 1, nearest_rows + 1):
            if rows < 1 or n_cells % rows:
                continue
            grid = (rows, n_cells // rows)
            if self.exact(grid) or (not is_square and self.near(grid)):
                return grid
        return None

    def token_layout(self, n_tokens: int) -> TokenLayout | None:
        """Return prefix and grid of a sequence of this length, None where no grid is left.

        It is read with the model's prefix tokens if that leaves a grid, else without; with the
        added ones if that leaves the model's own grid.
        """
        all_prefix = self.prefix + self.added
        n_all_prefix = len(all_prefix)
        if self.added and self.grid and n_tokens == n_all_prefix + math.prod(self.grid):
            return self.layout(self.grid, all_prefix)
        for prefix in dict.fromkeys((self.prefix, ())):
            grid = self.grid_of(n_tokens - len(prefix))
            if grid:
                return self.layout(grid, prefix)
        return None


def model_geometry(module: nn.Module, image: Grid) -> ModelGeometry:
    """Return prefix tokens and patch grid by the model's own attributes.

    Prefix kinds are in the order in which timm concatenates them: class, distillation, registers.

    image: (rows, cols) of the input in pixels.
    """
    n_prefix = getattr(module, "num_prefix_tokens", None)
    cls_token = getattr(module, "cls_token", None)
    has_cls = isinstance(cls_token, Tensor)
    n_cls = 1
    if isinstance(cls_token, Tensor) and cls_token.ndim == 3:
        n_cls = cls_token.shape[1]
    has_dist = isinstance(getattr(module, "dist_token", None), Tensor)
    # PiT keeps its distillation token in the tensor of the class token: (1, 2, dim).
    if n_cls > 1 and isinstance(getattr(module, "head_dist", None), nn.Module):
        has_dist = True
        n_cls = n_cls - 1
    if not isinstance(n_prefix, int):
        # Models with a class token for each stage number them.
        has_numbered = any(
            name.startswith("cls_token") for name, _ in module.named_parameters()
        )
        has_cls = has_cls or has_numbered
        n_prefix = (n_cls if has_cls else 0) + has_dist
    kinds = []
    if has_cls:
        kinds.append("cls")
    if has_dist:
        kinds.append("dist")
    kinds += _register_kinds(n_prefix - len(kinds))
    embed = getattr(module, "patch_embed", None) or getattr(module, "stem", None)
    grid = getattr(embed, "grid_size", None)
    if hasattr(embed, "dynamic_feat_size") and grid:
        grid = embed.dynamic_feat_size(image)  # type: ignore[union-attr]
    if not (isinstance(grid, tuple | list) and len(grid) == 2):
        grid = None
    return ModelGeometry(
        image, tuple(kinds[:n_prefix]), (int(grid[0]), int(grid[1])) if grid else None
    )


def _register_kinds(n: int) -> list[str]:
    """Return the kinds of so many registers, none below 1."""
    return [f"reg{i}" for i in range(n)]


def read_map(seen: Seen, geometry: ModelGeometry) -> View | None:
    """Return a four-dimensional activation as channels-first or channels-last map, None if neither.

    A reading in which both axes are reduced exactly alike wins over one that is off by a cell;
    where both are possible the axes that respond to changes in the image decide.
    """
    _, first, second, third = seen.shape
    for fits in (geometry.exact, geometry.near):
        may_be_first = fits((second, third))
        may_be_last = fits((first, second))
        if not may_be_first and not may_be_last:
            continue
        is_channels_first = may_be_first
        if may_be_first and may_be_last and len(seen.response) == 3:
            shift_first = _response_shift(seen, row_axis=2, col_axis=3)
            shift_last = _response_shift(seen, row_axis=1, col_axis=2)
            is_channels_first = shift_first >= shift_last
        if is_channels_first:
            return View("nchw", geometry.layout((second, third)))
        return View("nhwc", geometry.layout((first, second)))
    return None


def _response_shift(seen: Seen, row_axis: int, col_axis: int) -> float:
    """Return how far the response moves along two axes when the changed corner moves, as fractions
    of their lengths."""
    # Corners are 0: top left, 1: top right, 2: bottom left, 3: bottom right.
    by_row = seen.response[row_axis - 1]  # (corners, rows)
    by_col = seen.response[col_axis - 1]
    vertical = _mean_position(by_row, (2, 3)) - _mean_position(by_row, (0, 1))
    horizontal = _mean_position(by_col, (1, 3)) - _mean_position(by_col, (0, 2))
    return vertical + horizontal


def _mean_position(response: Tensor, corners: Sequence[int]) -> float:
    """Return the mean position, from 0 to 1 along an axis, of the response to changes of some
    corners; 0.5 without any response.

    response: (corners, length).
    """
    energy = response[list(corners)].double().sum(0)
    position = torch.linspace(0, 1, len(energy), dtype=torch.float64)
    total = float(energy.sum())
    if total > 0 and math.isfinite(total):
        return float((energy * position).sum()) / total
    return 0.5


def in_raster_order(seen: Seen, layout: TokenLayout) -> bool:
    """Return whether tokens that respond to a change in a corner lie in that corner of the grid.

    False only on evidence: the strongest responses are concentrated, and elsewhere. A response
    spread evenly over all tokens (global mixing) is not evidence.
    """
    if not seen.response or layout.grid is None or min(layout.grid) < 2:
        return True
    energy = seen.response[0][:, layout.n_prefix :].double().cpu()
    total = energy.sum(1, keepdim=True)
    if not bool(torch.isfinite(total).all()) or bool((total <= 0).any()):
        return True
    share = (energy / total).unflatten(1, layout.grid)  # (corners, rows, cols)
    # With the middle row and column of odd grids: a quadrant of the image reaches into them.
    n_rows, n_cols = layout.grid
    rows = -(-n_rows // 2)
    cols = -(-n_cols // 2)
    # Means over corners: the share of the response in the corner, and in as many cells anywhere.
    inside = 0.0
    strongest = 0.0
    for corner in range(N_CORNERS):
        top = slice(0, rows) if corner < 2 else slice(n_rows - rows, None)
        left = slice(0, cols) if corner % 2 == 0 else slice(n_cols - cols, None)
        inside += float(share[corner, top, left].sum()) / N_CORNERS
        top_shares = share[corner].flatten().topk(rows * cols).values
        strongest += float(top_shares.sum()) / N_CORNERS
    even = rows * cols / math.prod(layout.grid)
    concentration = strongest - even
    return concentration < _MIN_CONCENTRATION or inside - even >= 0.5 * concentration


def count_prefix_tokens(
    geometry: ModelGeometry, module: nn.Module, trace: Trace, blocks: Sequence[str]
) -> ModelGeometry:
    """Return the geometry with prefix and grid counted, where the model states neither.

    The grid is that of the last map before the blocks with no more cells than there are tokens, or
    else that of the patches whose size the model states, or else the one that leaves as few tokens
    over as possible.

    Args:
        geometry: the tokens as the model states them.
        module: the model.
        trace: a forward pass of it.
        blocks: paths of its blocks.
    """
    states_prefix = isinstance(getattr(module, "num_prefix_tokens", None), int)
    if states_prefix or geometry.grid is not None or not blocks:
        return geometry
    entered = trace.by_image(trace.entered(blocks[0]))
    if entered is None:
        entered = trace.by_image(trace.left(blocks[0]))
    if entered is None or len(entered.shape) != 3:
        return geometry
    n_tokens = entered.shape[1]
    grid = (
        _grid_of_last_map(trace, entered.key, n_tokens)
        or _grid_of_patch_size(module, geometry, n_tokens)
        or _grid_of_most_tokens(geometry, n_tokens)
    )
    if grid is None:
        return geometry
    n_prefix = n_tokens - math.prod(grid)
    if geometry.prefix and len(geometry.prefix) == n_prefix:
        return replace(geometry, grid=grid)
    return replace(
        geometry, grid=grid, prefix=kinds_of(module, n_prefix, entered.shape[2])
    )


def _grid_of_last_map(
    trace: Trace, before: tuple[int, int], n_tokens: int
) -> Grid | None:
    """Return (rows, cols) of the last channels-first map before a tensor whose cells leave few
    tokens over.

    before: the tensor's key; keys count up during the forward pass.
    """
    keys_and_grids = []
    for calls in trace.calls.values():
        for call in calls:
            seen = call.left
            if seen is None or len(seen.shape) != 4 or seen.key >= before:
                continue
            n_images, _, rows, cols = seen.shape
            n_left_over = n_tokens - rows * cols
            if n_images == trace.n_images and 0 <= n_left_over <= MAX_PREFIX:
                keys_and_grids.append((seen.key, (rows, cols)))
    return max(keys_and_grids)[1] if keys_and_grids else None


def _grid_of_patch_size(
    module: nn.Module, geometry: ModelGeometry, n_tokens: int
) -> Grid | None:
    """Return the grid of patches of the size that a model's configuration, or the model, states."""
    for settings in (getattr(module, "config", None), module):
        side = getattr(settings, "patch_size", None)
        if isinstance(side, int) and side > 0:
            grid = geometry.image[0] // side, geometry.image[1] // side
            if 0 <= n_tokens - math.prod(grid) <= MAX_PREFIX and min(grid) > 1:
                return grid
    return None


def _grid_of_most_tokens(geometry: ModelGeometry, n_tokens: int) -> Grid | None:
    """Return the grid that reduces both axes alike and leaves the fewest tokens over."""
    for n_left_over in range(min(MAX_PREFIX, n_tokens - 1) + 1):
        grid = geometry.grid_of(n_tokens - n_left_over)
        if grid is not None and min(grid) > 1:
            return grid
    return None


def kinds_of(module: nn.Module, n_prefix: int, dim: int) -> tuple[str, ...]:
    """Return the kinds of the prefix tokens, one of each kind that a parameter is named after;
    registers for the rest.

    Args:
        module: the model.
        n_prefix: number of prefix tokens.
        dim: width of the tokens, which is that of their parameters.
    """
    names = []
    for path, parameter in module.named_parameters():
        name = path.rpartition(".")[2].lower()
        has_width = parameter.shape[-1:] == (dim,)
        is_small = parameter.numel() <= dim * MAX_PREFIX
        if has_width and is_small and not re.search(_NOT_TOKENS, name):
            names.append(name)
    kinds = []
    for kind, pattern in _KIND_PATTERNS.items():
        if any(re.search(pattern, name) for name in names):
            kinds.append(kind)
    if "cls" in kinds and "camera" in kinds:
        # Of two transformers, one behind the other: each has one of them, at the same position.
        kinds.remove("camera")
    kinds += _register_kinds(n_prefix - len(kinds))
    return tuple(kinds[:n_prefix])


def view_kind(kind: str) -> str:
    """Return the kind of a prefix token that each view of a clip has for itself.

    It is not `cls`: a clip has one such token, or one for each frame that the model saw alone.
    """
    return "class" if kind == "cls" else kind
