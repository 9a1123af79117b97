"""Image processors of transformers: read, recorded, and done by vitsee in numbers that are proven
to give the processor's own input. So a store needs neither transformers nor code of a repository to
prepare its images again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import BACKENDS, one_line
from vitsee_core.models.sources.processor_record import (
    config_variants,
    processor_config,
    processor_sizes,
)
from vitsee_core.models.tokens.towers import GRIDS, Packing
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import jsonable

# Share of the largest value of the model's input: float32 summed in another order.
TOLERANCE = 1e-5
THUMBNAIL = (
    "'s image processor cuts images into tiles beside the whole image; without --tiles "
    "(and --short-side N) it gets the whole image alone, as that processor makes it"
)
ROUNDED = (
    "'s image processor resizes floats, which are rounded to 8 bits here: its input "
    "differs by up to half of 1/255 before normalisation"
)
# Entries of a processor's output with the pixels, of a tower of packed patches.
PATCH_KEYS = ("pixel_values", "pixel_values_images")
# What processors raise on images that they do not take.
_IMAGE_ERRORS = (
    AssertionError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Processor:
    """An image processor of transformers.

    Attributes:
        library_object: transformers' own object.
        name: the model, as messages call it.
    """

    library_object: Any
    name: str

    @cached_property
    def record(self) -> dict[str, Any]:
        """The processor's configuration, as transformers writes it."""
        config: dict[str, Any] = jsonable(self.library_object.to_dict())
        return config

    @property
    def takes_videos(self) -> bool:
        """Whether it takes videos alone."""
        call = type(self.library_object).__call__
        return "images" not in inspect.signature(call).parameters

    @cached_property
    def backend(self) -> str:
        """The library that resizes, "pil" or "torchvision"."""
        if self.takes_videos:
            return "torchvision"
        backend = getattr(self.library_object, "backend", None)
        if backend in BACKENDS:
            return str(backend)
        if getattr(self.library_object, "is_fast", None):  # transformers 4
            return "torchvision"
        return "pil"

    @cached_property
    def input_size(self) -> tuple[int, int] | None:
        """(rows, cols) of its output, None where that depends on the image."""
        resized, cropped = processor_sizes(self.record)
        return cropped or resized

    @cached_property
    def cuts_tiles(self) -> bool:
        """Whether it cuts an image into tiles, and puts the whole image at their size beside them:
        before them (LLaVA-NeXT) or behind (InternVL)."""
        if self.input_size is None or self.takes_videos:
            return False
        rows, cols = self.input_size
        image = np.zeros((rows, 2 * cols, 3), np.uint8)  # two tiles wide
        try:
            output = self.library_object(images=image, return_tensors="pt")
            pixels = output["pixel_values"][0]
        except _IMAGE_ERRORS:
            return False
        # One image of four axes is the single frame of a clip.
        return bool(pixels.ndim == 4 and len(pixels) > 1)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The numbers of `processor_config` with `processor`, the way of resizing, whose input for
        random images is the processor's.

        Raises:
            ModelError: no such numbers give the processor's input.
        """
        from vitsee_core.images.torch_transforms import largest_difference

        numbers = processor_config(self.record, self.name)
        # The whole image is the first (LLaVA-NeXT) or the last (InternVL) of the tiles.
        tiles = [0, -1] if self.cuts_tiles else [0]
        differences = []
        for variant in config_variants(self.record):
            for tile in tiles:
                for resizing, rounding in self.resizing_candidates(numbers):
                    config = {**numbers, **variant, "processor": resizing}
                    try:
                        difference, largest = largest_difference(
                            partial(self._pixels, tile=tile), config
                        )
                    except VitseeError as error:
                        raise self._refusal(str(error)) from error
                    if difference <= rounding + TOLERANCE * max(1.0, largest):
                        return config
                    differences.append(difference)
        raise self._refusal(
            f"its input differs by up to {min(differences):.2g} from what it says"
        )

    def prove_packed(self, packing: Packing, config: Mapping[str, Any]) -> None:
        """Prove that a tower's patches of an image are those that this processor makes, in the
        order of its groups and with its mean and deviation.

        Args:
            packing: how the tower takes images.
            config: the transform of the images, whose size is the tower's.

        Raises:
            ModelError: they differ, or the size is beyond the processor's limits.
        """
        channels, rows, cols = config["input_size"]
        rng = np.random.default_rng(0)
        image = rng.integers(0, 256, (rows, cols, channels), np.uint8)
        try:
            output = self.library_object(images=[image], return_tensors="pt")
        except (ValueError, TypeError, AssertionError, RuntimeError) as error:
            raise ModelError(
                f"the image processor of {self.name} refuses an image of {rows} x {cols} "
                f"pixels: {one_line(error)}; expected another --img-size"
            ) from error
        expected_grid = packing.grid((rows, cols))
        grids = next((output[key] for key in GRIDS if key in output), None)
        made = "no grid"
        grid = None
        if grids is not None:
            # A grid may begin with the number of frames.
            grid = tuple(int(n) for n in grids[0][-2:])
            made = f"{grid[0]} x {grid[1]} patches"
        if grid != expected_grid:
            raise ModelError(
                f"the image processor of {self.name} makes {made} of an image of {rows} "
                f"x {cols} pixels, expected {expected_grid[0]} x {expected_grid[1]}: the "
                "size is beyond its limits, give another --img-size"
            )
        patches = next(output[key] for key in PATCH_KEYS if key in output)
        mean = torch.tensor(config["mean"]).view(-1, 1, 1)
        std = torch.tensor(config["std"]).view(-1, 1, 1)
        pixels = (torch.from_numpy(image).permute(2, 0, 1) / 255 - mean) / std
        expected = packing.pack(pixels.unsqueeze(0)).reshape(-1)
        difference = float("inf")
        if patches.numel() == expected.numel():
            difference = float((patches.reshape(-1).float() - expected).abs().max())
        if difference > TOLERANCE * max(1.0, float(expected.abs().max())):
            raise self._refusal(
                f"its patches differ by up to {difference:.2g} from the tower's"
            )

    def origin(self) -> dict[str, Any]:
        """Return the entries of manifests about the processor: its configuration, the backend, and
        the version of the library that resizes."""
        import PIL

        versions = {"Pillow": PIL.__version__}
        if self.backend == "torchvision":
            import torchvision

            versions = {"torchvision": torchvision.__version__}
        return {
            "processor": self.record,
            "backend": self.backend,
            "backend_version": versions,
        }

    def resizing_candidates(
        self, numbers: Mapping[str, Any]
    ) -> Iterator[tuple[str, float]]:
        """Yield ways of resizing that may be the processor's, and the most that rounding to 8 bits
        changes the model's input in each."""
        yield self.backend, 0.0
        if self.backend == "torchvision":
            yield "torchvision-float", 0.5 / 255 / min(numbers["std"])

    def _pixels(self, image: Any, tile: int = 0) -> Any:
        """Return (channels, rows, cols) that the processor makes of an image, or of its tile or a
        clip's frame of this index."""
        if self.takes_videos:
            clip = np.array(image)[None]  # (1 frame, rows, cols, channels)
            output = self.library_object(videos=[clip], return_tensors="pt")
        else:
            output = self.library_object(images=image, return_tensors="pt")
        key = "pixel_values" if "pixel_values" in output else "pixel_values_videos"
        pixels = output[key][0]
        return pixels[tile] if pixels.ndim == 4 else pixels

    def _refusal(self, reason: str) -> ModelError:
        """Return the error for a processor that does more than vitsee's transform can."""
        pil = "--processor pil, or " if self.backend == "torchvision" else ""
        return ModelError(
            f"the image processor of {self.name} does more than resize, crop and "
            f"normalise: {reason}; expected {pil}--transform timm with --img-size, "
            "--img-mean and --img-std where needed"
        )
