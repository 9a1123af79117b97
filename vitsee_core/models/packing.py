"""Images as the packed patches that towers of vision-language models take: the patches of all
images of a batch one after another without a batch axis, and the grid of each image beside them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Grid = tuple[int, int]  # rows and columns of cells


# Arguments that say the grid of each image, and how many numbers an image has there; the one that
# says in how large groups patches come.
GRIDS = {"grid_thw": 3, "image_grid_thw": 3, "grid_hws": 2, "grid_hw": 2}
MERGES = ("merge_sizes", "image_merge_sizes")
ATTRIBUTE = "_vitsee_packing"


@dataclass(frozen=True)
class Packing:
    """How images become patches.

    Attributes:
        patch: rows and columns of a patch, in pixels.
        frames: the number of frames to which a still image is repeated.
        merge: patches come in groups of merge x merge, row by row within a group.
        unit: numbers of rows and columns of a grid are multiples of it.
        form: the layout of a patch: "cthw" (one row, channels outermost), "hwc" (one row, channels
            innermost), "image" (channels, rows, cols), or "sequence" (as "image", with a leading
            axis of length 1).
        grids: name of the argument that holds the grids, `grid_thw` or another.
        merges: name of the argument that takes `merge` of each image, "" where there is none.
    """

    patch: int
    frames: int = 1
    merge: int = 1
    unit: int = 1
    form: str = "cthw"
    grids: str = "grid_thw"
    merges: str = ""
    channels: int = 3

    @property
    def step(self) -> int:
        """A size is a multiple of so many pixels."""
        return self.patch * self.unit

    def grid(self, size: tuple[int, int]) -> Grid:
        """Rows and columns of patches of an image of this size.

        Raises:
            ValueError: it is no multiple of `step`.
        """
        if any(n < self.step or n % self.step for n in size):
            raise ValueError(
                f"{self.unit} x {self.unit} patches of {self.patch} pixels are merged, which do "
                f"not divide them (a multiple of {self.step}, as {self.nearest(size[0])})"
            )
        return size[0] // self.patch, size[1] // self.patch

    def nearest(self, length: int) -> int:
        """The multiple of `step` nearest to a length in pixels."""
        return max(round(length / self.step), 1) * self.step

    def pack(self, images: Tensor) -> Tensor:
        """Patches of images (images, channels, rows, cols)."""
        n, channels, *size = images.shape
        (rows, cols), m, p = self.grid((size[0], size[1])), self.merge, self.patch
        cut = images.reshape(n, channels, rows // m, m, p, cols // m, m, p)
        cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)  # image, group, in the group, channel, pixel
        patches = cut.reshape(n * rows * cols, channels, p, p)
        if self.form == "hwc":
            return patches.permute(0, 2, 3, 1).flatten(1)
        if self.form == "cthw":
            return patches.unsqueeze(2).expand(-1, -1, self.frames, -1, -1).flatten(1)
        return patches.unsqueeze(0) if self.form == "sequence" else patches

    def arguments(self, n_images: int, grid: Grid, device: torch.device) -> dict[str, Tensor]:
        """The tower's arguments beside the patches, by name."""
        one = [1, *grid][-GRIDS[self.grids] :]
        found = {self.grids: torch.tensor([one], device=device).expand(n_images, -1).contiguous()}
        if self.merges:
            found[self.merges] = torch.full((n_images,), self.merge, device=device)
        return found


def packing_of(module: nn.Module) -> Packing | None:
    """How a module takes images, where they are packed for it."""
    return getattr(module, ATTRIBUTE, None)


def packed_inputs(module: nn.Module | type) -> list[str] | None:
    """The arguments that a tower of packed patches needs beside these; None for other modules."""
    taken = inspect.signature(module.forward).parameters  # type: ignore[union-attr]
    grids = [name for name in GRIDS if name in taken]
    return [*grids, *(name for name in MERGES if name in taken)] if grids else None
