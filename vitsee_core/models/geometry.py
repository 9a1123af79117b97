"""Which dimensions of an activation are the image's rows and columns: read from shapes, and where
two readings are possible from which indices respond to a change in one corner of the image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import View
from vitsee_core.models.packing import Grid
from vitsee_core.models.patches import Patches
from vitsee_core.models.steps import Steps
from vitsee_core.models.trace import N_CORNERS, Seen
from vitsee_stores.layout import TokenLayout


@dataclass(frozen=True)
class Geometry:
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
                return TokenLayout(prefix, grid, 0, measured.stride_px, measured.offset_px)
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
                if self.exact(grid) or (self.image[0] != self.image[1] and self.near(grid)):
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


def model_geometry(module: nn.Module, image: Grid) -> Geometry:
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
        has_dist, in_one = True, in_one - 1
    if not isinstance(n_prefix, int):
        # Models with a class token for each stage number them.
        numbered = any(name.startswith("cls_token") for name, _ in module.named_parameters())
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
    return Geometry(image, tuple(kinds[:n_prefix]), (int(grid[0]), int(grid[1])) if grid else None)


def read_map(seen: Seen, geometry: Geometry) -> View | None:
    """A four-dimensional activation as channels-first or channels-last map; None if neither.

    A reading in which both axes are reduced exactly alike wins over one that is off by a cell;
    where both are possible the axes that respond to changes in the image decide.
    """
    first, last = seen.shape[2:4], seen.shape[1:3]
    for fits in (geometry.exact, geometry.near):
        forms = [fits((first[0], first[1])), fits((last[0], last[1]))]
        if not any(forms):
            continue
        channels_first = forms[0]
        if all(forms):
            channels_first = len(seen.response) != 3 or _answers(seen, 2, 3) >= _answers(seen, 1, 2)
        grid = first if channels_first else last
        layout = geometry.layout((grid[0], grid[1]))
        return View("nchw" if channels_first else "nhwc", layout)
    return None


def _centre(profile: Tensor, corners: Sequence[int]) -> float:
    energy = profile[list(corners)].double().sum(0)
    place = torch.linspace(0, 1, len(energy), dtype=torch.float64)
    total = float(energy.sum())
    return float((energy * place).sum()) / total if total > 0 and math.isfinite(total) else 0.5


def _answers(seen: Seen, rows: int, cols: int) -> float:
    """How far the response moves along these dimensions when the changed corner moves."""
    down, across = seen.response[rows - 1], seen.response[cols - 1]
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
    inside, strongest = 0.0, 0.0
    for k in range(N_CORNERS):
        top = slice(0, rows) if k < 2 else slice(layout.grid[0] - rows, None)
        left = slice(0, cols) if k % 2 == 0 else slice(layout.grid[1] - cols, None)
        inside += float(share[k, top, left].sum()) / N_CORNERS
        strongest += float(share[k].flatten().topk(rows * cols).values.sum()) / N_CORNERS
    even = rows * cols / math.prod(layout.grid)
    return strongest - even < 0.15 or inside - even >= 0.5 * (strongest - even)
