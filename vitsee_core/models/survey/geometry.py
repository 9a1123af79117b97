"""The tokens of a model: which dimensions of an activation are the image's rows and columns, how
many prefix tokens there are, and how far cells are apart in pixels.

Dimensions are read from shapes, and where two readings are possible from which indices respond to
a change in one corner of the image. The distance of cells is the product of the strides on the path
from the image to their grid. Where a model does not say how many prefix tokens it has, they are its
tokens, less the cells of the grid of patches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import View
from vitsee_core.models.survey.patches import Pair, Patches
from vitsee_core.models.survey.tracing import N_CORNERS, Seen, Trace
from vitsee_core.models.tokens.towers import Grid
from vitsee_stores.layout import TokenLayout

MOST_PREFIX = 32
# What parameters of such tokens are called, by kind; what matches none is a register.
_KINDS = {
    "cls": r"(^|_)(cls|class)",
    "dist": r"(^|_)dist",
    "camera": r"(^|_)(camera|pose)_token",
}
_OTHERS = r"pos|mask|query|bias|scale|head|norm|weight"


@dataclass(frozen=True)
class Step:
    """stride_px: between neighbouring cells, (y, x). reductions: strided layers between image and
    grid; one is a patch embedding."""

    stride_px: Pair
    reductions: int


class Steps:
    """The step of every grid of one model.

    Layers that state their stride say it. Of grids whose path no layer shows, one somewhat larger
    than another is that with a border (DaViT pads maps of odd sizes); else the step is the whole
    number that gives the one from the other on both axes up to padding or cropping (patches merged
    by slicing), else their ratio (images resized first). Where two paths lead to grids of one
    size, the first counts.
    """

    def __init__(
        self, image: Grid, module: nn.Module | None = None, trace: Trace | None = None
    ):
        """Steps are read from a forward pass; without one only from sizes."""
        self.known: dict[Grid, Step] = {image: Step((1.0, 1.0), 0)}
        if module is None or trace is None:
            return
        for entered, left, factor in _strided(module, trace):
            if left not in self.known:
                before = self.of(entered)
                self.known[left] = Step(
                    (before.stride_px[0] * factor[0], before.stride_px[1] * factor[1]),
                    before.reductions + (max(factor) > 1),
                )

    def of(self, grid: Grid) -> Step:
        """The step of a grid, noted for the grids to come."""
        if grid not in self.known:
            self.known[grid] = self._from_sizes(grid)
        return self.known[grid]

    def _from_sizes(self, grid: Grid) -> Step:
        *_, latest = self.known
        larger = [
            known for known in self.known if known[0] >= grid[0] and known[1] >= grid[1]
        ]
        larger.sort(key=math.prod)
        nearest = (larger or [latest])[0]
        factor = None
        for known in larger:
            if factor := whole_stride(known, grid):
                nearest = known
                break
        if _padded(latest, grid) or factor is None:
            for known in (latest, *reversed(self.known)):
                if _padded(known, grid):
                    return self.known[known]
        before = self.known[nearest]
        ratio = factor or (nearest[0] / grid[0], nearest[1] / grid[1])
        px = before.stride_px[0] * ratio[0], before.stride_px[1] * ratio[1]
        return Step(px, before.reductions + (factor is not None and max(factor) > 1))


def _padded(before: Grid, after: Grid) -> bool:
    """Whether one grid may be another with a border: up to a multiple of a window or stride."""
    return all(0 <= a - b < b for b, a in zip(before, after, strict=True))


def whole_stride(before: Grid, after: Grid) -> Pair | None:
    """The whole number of cells of one grid between neighbours of another, the same on both axes
    up to padding or cropping; None if there is none."""
    ratios = [larger / smaller for larger, smaller in zip(before, after, strict=True)]
    mean = math.sqrt(ratios[0] * ratios[1])
    for step in sorted(
        range(1, math.ceil(max(ratios)) + 1), key=lambda step: abs(step - mean)
    ):
        if all(
            cells in (larger // step, -(-larger // step))
            for larger, cells in zip(before, after, strict=True)
        ):
            return float(step), float(step)
    return None


def _strided(module: nn.Module, trace: Trace) -> Iterator[tuple[Grid, Grid, Pair]]:
    """(grid that entered, grid that left, stride) of every layer that states its stride and gives
    another grid, in the order of the forward pass."""
    met = []
    for name, layer in module.named_modules():
        stride = _pair(getattr(layer, "stride", None))
        kernel = _pair(getattr(layer, "kernel_size", None)) or (1, 1)
        if stride is None or any(layer.children()):
            continue
        for call in trace.calls.get(name, ()):
            entered = call.entered
            left = call.left
            if (
                entered is None
                or left is None
                or {len(entered.shape), len(left.shape)} != {4}
            ):
                continue
            before = entered.shape[2:]
            after = left.shape[2:]
            fits = all(
                0 < b <= a and abs(a / s - b) <= 1 + k / s
                for a, b, s, k in zip(before, after, stride, kernel, strict=True)
            )
            if fits and before != after:
                pair = float(stride[0]), float(stride[1])
                edge = (before[0], before[1]), (after[0], after[1]), pair
                met.append((left.key, edge))
    for _, edge in sorted(met, key=lambda item: item[0]):
        yield edge


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    if (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(type(n) is int for n in value)
    ):
        return value[0], value[1]
    return None


@dataclass(frozen=True)
class ModelGeometry:
    """The tokens of a model, and the size of its input images in pixels.

    steps: between the cells of its grids; from sizes alone if not given. patches: the grids whose
    patches were measured. added: further prefix tokens, which the blocks alone work on. frames: of
    a clip, None for images.
    """

    image: Grid
    prefix: tuple[str, ...] = ()
    grid: Grid | None = None
    steps: Steps | None = None
    patches: tuple[Patches, ...] = ()
    added: tuple[str, ...] = ()
    frames: int | None = None

    def layout(self, grid: Sequence[int], prefix: tuple[str, ...] = ()) -> TokenLayout:
        """The layout of a grid: as its patches were measured, else the product of the strides and
        the offset 0; of a grid with times, whose cells divide the clip, by its sizes."""
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
        """Whether both axes are reduced alike, to the cell."""
        return grid[0] * self.image[1] == grid[1] * self.image[0] and self._smaller(grid)

    def near(self, grid: Grid) -> bool:
        """Whether both axes are reduced alike up to one cell of padding or cropping."""
        wanted = grid[1] * self.image[0] / self.image[1]
        return abs(grid[0] - wanted) <= 1 and self._smaller(grid) and min(grid) > 1

    def _smaller(self, grid: Grid) -> bool:
        return grid[0] <= self.image[0] and grid[1] <= self.image[1]

    def grid_of(self, n: int) -> Grid | None:
        """The grid of n cells that is reduced alike on both axes."""
        if self.grid and math.prod(self.grid) == n:
            return self.grid
        if n < 1:
            return None
        rows = round(math.sqrt(n * self.image[0] / self.image[1]))
        for candidate in (rows, rows - 1, rows + 1):
            if candidate > 0 and n % candidate == 0:
                grid = (candidate, n // candidate)
                if self.exact(grid) or (
                    self.image[0] != self.image[1] and self.near(grid)
                ):
                    return grid
        return None

    def token_layout(self, n_tokens: int) -> TokenLayout | None:
        """Prefix and grid of a sequence of this length: with the model's prefix tokens if that
        leaves a grid, else without; with those added if that leaves the model's own grid."""
        whole = self.prefix + self.added
        if self.added and self.grid and n_tokens == len(whole) + math.prod(self.grid):
            return self.layout(self.grid, whole)
        for prefix in dict.fromkeys((self.prefix, ())):
            grid = self.grid_of(n_tokens - len(prefix))
            if grid:
                return self.layout(grid, prefix)
        return None


def model_geometry(module: nn.Module, image: Grid) -> ModelGeometry:
    """Prefix tokens and patch grid by the model's own attributes.

    Prefix kinds in the order in which timm concatenates them: class, distillation, registers.
    """
    n_prefix = getattr(module, "num_prefix_tokens", None)
    token = getattr(module, "cls_token", None)
    has_cls = isinstance(token, Tensor)
    # PiT keeps its distillation token in the tensor of the class token: (1, 2, dim).
    in_one = token.shape[1] if isinstance(token, Tensor) and token.ndim == 3 else 1
    has_dist = isinstance(getattr(module, "dist_token", None), Tensor)
    if in_one > 1 and isinstance(getattr(module, "head_dist", None), nn.Module):
        has_dist = True
        in_one = in_one - 1
    if not isinstance(n_prefix, int):
        # Models with a class token for each stage number them.
        numbered = any(
            name.startswith("cls_token") for name, _ in module.named_parameters()
        )
        has_cls = has_cls or numbered
        n_prefix = (in_one if has_cls else 0) + has_dist
    kinds = ["cls"] * has_cls + ["dist"] * has_dist
    kinds += [f"reg{i}" for i in range(max(n_prefix - len(kinds), 0))]
    embed = getattr(module, "patch_embed", None) or getattr(module, "stem", None)
    grid = getattr(embed, "grid_size", None)
    if hasattr(embed, "dynamic_feat_size") and grid:
        grid = embed.dynamic_feat_size(image)  # type: ignore[union-attr]
    if not (isinstance(grid, tuple | list) and len(grid) == 2):
        grid = None
    return ModelGeometry(
        image, tuple(kinds[:n_prefix]), (int(grid[0]), int(grid[1])) if grid else None
    )


def read_map(seen: Seen, geometry: ModelGeometry) -> View | None:
    """A four-dimensional activation as channels-first or channels-last map; None if neither.

    A reading in which both axes are reduced exactly alike wins over one that is off by a cell;
    where both are possible the axes that respond to changes in the image decide.
    """
    first = seen.shape[2:4]
    last = seen.shape[1:3]
    for fits in (geometry.exact, geometry.near):
        forms = [fits((first[0], first[1])), fits((last[0], last[1]))]
        if not any(forms):
            continue
        channels_first = forms[0]
        if all(forms):
            channels_first = len(seen.response) != 3 or _answers(seen, 2, 3) >= _answers(
                seen, 1, 2
            )
        grid = first if channels_first else last
        layout = geometry.layout((grid[0], grid[1]))
        return View("nchw" if channels_first else "nhwc", layout)
    return None


def _centre(profile: Tensor, corners: Sequence[int]) -> float:
    energy = profile[list(corners)].double().sum(0)
    place = torch.linspace(0, 1, len(energy), dtype=torch.float64)
    total = float(energy.sum())
    if total > 0 and math.isfinite(total):
        return float((energy * place).sum()) / total
    return 0.5


def _answers(seen: Seen, rows: int, cols: int) -> float:
    """How far the response moves along these dimensions when the changed corner moves."""
    down = seen.response[rows - 1]
    across = seen.response[cols - 1]
    vertical = _centre(down, (2, 3)) - _centre(down, (0, 1))
    horizontal = _centre(across, (1, 3)) - _centre(across, (0, 2))
    return vertical + horizontal


def in_raster_order(seen: Seen, layout: TokenLayout) -> bool:
    """Whether tokens that respond to a change in a corner lie in that corner of the grid.

    False only on evidence: the strongest responses are concentrated, and elsewhere. A response
    spread evenly over all tokens (global mixing) is no evidence.
    """
    if not seen.response or layout.grid is None or min(layout.grid) < 2:
        return True
    energy = seen.response[0][:, layout.n_prefix :].double().cpu()
    total = energy.sum(1, keepdim=True)
    if not bool(torch.isfinite(total).all()) or bool((total <= 0).any()):
        return True
    share = (energy / total).unflatten(1, layout.grid)
    # With the middle row and column of odd grids: a quadrant of the image reaches into them.
    rows, cols = (-(-n // 2) for n in layout.grid)
    inside = 0.0
    strongest = 0.0
    for k in range(N_CORNERS):
        top = slice(0, rows) if k < 2 else slice(layout.grid[0] - rows, None)
        left = slice(0, cols) if k % 2 == 0 else slice(layout.grid[1] - cols, None)
        inside += float(share[k, top, left].sum()) / N_CORNERS
        strongest += float(share[k].flatten().topk(rows * cols).values.sum()) / N_CORNERS
    even = rows * cols / math.prod(layout.grid)
    return strongest - even < 0.15 or inside - even >= 0.5 * (strongest - even)


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
        _map_before(trace, entered.key, n_tokens)
        or _of_patches(module, geometry, n_tokens)
        or _of_number(geometry, n_tokens)
    )
    if grid is None:
        return geometry
    n_prefix = n_tokens - math.prod(grid)
    if geometry.prefix and len(geometry.prefix) == n_prefix:
        return replace(geometry, grid=grid)
    return replace(
        geometry, grid=grid, prefix=kinds_of(module, n_prefix, entered.shape[2])
    )


def _map_before(trace: Trace, before: tuple[int, int], n_tokens: int) -> Grid | None:
    """Rows and columns of the last channels-first map that a layer gave before a tensor."""
    maps = [
        (call.left.key, (call.left.shape[2], call.left.shape[3]))
        for calls in trace.calls.values()
        for call in calls
        if call.left and len(call.left.shape) == 4 and call.left.key < before
        if call.left.shape[0] == trace.n_images
        if 0 <= n_tokens - call.left.shape[2] * call.left.shape[3] <= MOST_PREFIX
    ]
    return max(maps)[1] if maps else None


def _of_patches(module: nn.Module, geometry: ModelGeometry, n_tokens: int) -> Grid | None:
    """The grid of patches of the size that a model, or its configuration, states."""
    for stating in (getattr(module, "config", None), module):
        side = getattr(stating, "patch_size", None)
        if isinstance(side, int) and side > 0:
            grid = geometry.image[0] // side, geometry.image[1] // side
            if 0 <= n_tokens - math.prod(grid) <= MOST_PREFIX and min(grid) > 1:
                return grid
    return None


def _of_number(geometry: ModelGeometry, n_tokens: int) -> Grid | None:
    """The grid that is reduced alike on both axes and leaves the fewest tokens over."""
    for n in range(min(MOST_PREFIX, n_tokens - 1) + 1):
        grid = geometry.grid_of(n_tokens - n)
        if grid is not None and min(grid) > 1:
            return grid
    return None


def kinds_of(module: nn.Module, n_prefix: int, dim: int) -> tuple[str, ...]:
    """The kinds of the prefix tokens, one of each kind where a parameter of the tokens' width has
    such a name."""
    kinds = []
    names = [
        name.rpartition(".")[2].lower()
        for name, parameter in module.named_parameters()
        if parameter.shape[-1:] == (dim,) and parameter.numel() <= dim * MOST_PREFIX
    ]
    for kind, pattern in _KINDS.items():
        if any(
            re.search(pattern, name) and not re.search(_OTHERS, name) for name in names
        ):
            kinds.append(kind)
    if "cls" in kinds and "camera" in kinds:
        # Of two transformers, one behind the other: each has one of them, at the same place.
        kinds.remove("camera")
    kinds += [f"reg{i}" for i in range(max(n_prefix - len(kinds), 0))]
    return tuple(kinds[:n_prefix])


def view_kind(kind: str) -> str:
    """The kind of a prefix token of which each view of a clip has its own: not `cls`, of which a
    clip has one, or one for each frame that the model saw alone."""
    return "class" if kind == "cls" else kind
