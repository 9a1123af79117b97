"""The filters that a model applies to the pixels: the first convolution or linear layer, found by
running the model on an image of numbered pixels and reading the input of the first weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitsee_core.models.hook_points import ForwardEnded
from vitsee_core.models.loaded import LoadedModel

_LAYERS = (torch.conv2d, nn.functional.linear)
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation")


@dataclass(frozen=True)
class Filters:
    """values: (filters, channels, height, width) float32, a weight for each pixel as the layer
    uses it (standardised where the layer standardises its weights). site: the layer's name."""

    site: str
    values: NDArray[np.float32]


def find_filters(model: LoadedModel) -> Filters | str:
    """The filters of the model's first layer, or why it has none over single pixels.

    A convolution over the image, a linear layer over cut patches, and either of them over pixels
    in another order (space to depth) alike: which pixel each weight meets is read from an image
    whose pixels are numbered. Cost: the forward pass up to that layer.
    """
    channels, height, width = model.input_size
    numbers = torch.arange(channels * height * width, dtype=torch.float32)
    inside: list[str] = []
    first = _FirstLayers(inside, model.input_size)

    def leave(*_: Any) -> None:
        inside.pop()

    with ExitStack() as stack, torch.no_grad(), suppress(ForwardEnded), first:
        for name, child in model.module.named_modules():
            enter = partial(_enter, inside, name)
            stack.enter_context(child.register_forward_pre_hook(enter))
            stack.enter_context(child.register_forward_hook(leave))
        model.module(numbers.reshape(1, *model.input_size))
    if not first.found:
        if first.refused:
            return f"its first layer, {first.refused}, does not work on single pixels"
        return "no convolution or linear layer works on its pixels"
    # Of parallel branches (RepVGG) the one that sees most.
    return max(first.found, key=lambda filters: filters.values[0].size)


def _enter(inside: list[str], name: str, *_: Any) -> None:
    inside.append(name)


class _FirstLayers(TorchFunctionMode):
    """Keeps the filters of layers that are given pixels, and ends the pass at the first other."""

    def __init__(self, inside: list[str], size: tuple[int, int, int]) -> None:
        super().__init__()
        self.found: list[Filters] = []
        self.refused = ""
        self._inside, self._size = inside, size

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _LAYERS:
            named = dict(zip(_ARGUMENTS, args, strict=False)) | given
            weight, dilation = named["weight"], named.get("dilation", 1)
            apart = (dilation, dilation) if isinstance(dilation, int) else tuple(dilation)
            pixels = _cells(named["input"], weight.shape, apart)
            values = _over_pixels(weight.flatten(1), pixels, self._size)
            if values is None:
                self.refused = self._inside[-1]
                raise ForwardEnded
            self.found.append(Filters(self._inside[-1], values))
        return func(*args, **given)


def _cells(x: Tensor, shape: Sequence[int], apart: tuple[int, ...]) -> Tensor:
    """The part of a layer's input `x` that one output depends on: away from the border, where a
    convolution has padding. shape: of the weights. apart: cells between the convolution's weights.
    """
    if len(shape) == 2:
        tokens = x.reshape(-1, x.shape[-1])
        return tokens[len(tokens) // 2]
    windows = []
    for n, k, step in zip(x.shape[2:], shape[2:], apart, strict=True):
        start = max(n - (k - 1) * step - 1, 0) // 2
        windows.append(slice(start, start + k * step, step))
    return x[0, :, windows[0], windows[1]].flatten()


def _over_pixels(
    weight: Tensor, pixels: Tensor, size: tuple[int, int, int]
) -> NDArray[np.float32] | None:
    """(filters, channels, height, width): weights (filters, inputs) put where each input's pixel
    is; None unless the inputs are the numbers of a rectangle's pixels, each once."""
    numbers = pixels.double().numpy()
    whole = np.isfinite(numbers).all() and (numbers == np.round(numbers)).all()
    if not whole or len(numbers) != weight.shape[1] or len(np.unique(numbers)) != len(numbers):
        return None
    if numbers.min() < 0 or numbers.max() >= np.prod(size):
        return None
    channel, row, col = np.unravel_index(numbers.astype(np.int64), size)
    row, col = row - row.min(), col - col.min()
    shape = (size[0], int(row.max()) + 1, int(col.max()) + 1)
    if np.prod(shape) != len(numbers):
        return None
    values = np.empty((len(weight), *shape), np.float32)
    values[:, channel, row, col] = weight.float().cpu().numpy()
    return values
