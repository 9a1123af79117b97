"""The first weights that an image meets: the filters that a model applies to the pixels, and the
position embedding that it adds to its tokens.

The filters are those of the first convolution or linear layer, found by running the model on an
image of numbered pixels and reading the input of the first weights.

The position embedding is a tensor whose share in the tokens is the same for every image. Which
tensor it is, how it is resampled to the input size, and whether prefix tokens get a part of it
differs between architectures. So it is measured: the model's tokens with the tensor as it is, minus
its tokens with zeros in its place, where they first differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitsee_core.models.hook_points import ForwardEnded, hooked, input_tensor
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.survey import tokens_of
from vitsee_core.models.survey.structure import CONTAINERS, is_leaf

_LAYERS = (torch.conv2d, nn.functional.linear)
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation")
SINE_COSINE = "sine-cosine"
_SINE_COSINE_TOLERANCE = 5e-3  # float16 checkpoints
LEARNED = "learned"
FIXED = "fixed"
COMPUTED = "computed"


@dataclass(frozen=True)
class InputArray:
    """Filters or positions of a model.

    Attributes:
        site: the name of the layer, of the tensor, of several tensors that add up, or of the module
            that computes it.
        values: float32. Filters are (filters, channels, height, width), a weight for each pixel as
            the layer uses it (standardised where the layer standardises its weights). Positions are
            (rows, cols, dim), what each patch gets, on the grid of the model's input.
        kind: of positions "learned", "fixed" (a buffer), "sine-cosine" (a parameter with the values
            of that formula, so not learned) or "computed" (by a module).
    """

    site: str
    values: NDArray[np.float32]
    kind: str = ""


def find_filters(model: LoadedModel) -> InputArray | str:
    """Return the filters of the model's first layer, or why it has none over single pixels.

    A convolution over the image, a linear layer over cut patches, and either of them over pixels
    in another order (space to depth) alike: which pixel each weight meets is read from an image
    whose pixels are numbered. Cost: the forward pass up to that layer.
    """
    channels, height, width = model.input_size
    # Each pixel is its own number; float32 holds whole numbers up to 2^24, 2364 x 2364 in
    # colour.
    numbers = torch.arange(channels * height * width, dtype=torch.float32)
    inside: list[str] = []
    first = _FirstLayers(inside, model.input_size)

    def enter(name: str, *_: Any) -> None:
        inside.append(name)

    def leave(*_: Any) -> None:
        inside.pop()

    hooks = hooked(model.module, enter, leave)
    with hooks, torch.no_grad(), suppress(ForwardEnded), first:
        model.module(numbers.reshape(1, *model.input_size))
    if not first.layers:
        if first.refused:
            return f"its first layer, {first.refused}, does not work on single pixels"
        return "no convolution or linear layer works on its pixels"
    # Of parallel branches (RepVGG) the one that sees most.
    return max(first.layers, key=lambda filters: filters.values[0].size)


class _FirstLayers(TorchFunctionMode):
    """A mode that keeps the filters of layers whose input is the pixels, and ends the forward pass
    at the first other layer."""

    def __init__(self, inside: list[str], size: tuple[int, int, int]) -> None:
        super().__init__()
        self.layers: list[InputArray] = []
        self.refused = ""
        self._inside = inside
        self._size = size

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LAYERS:
            arguments = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
            weight = arguments["weight"]
            dilation = arguments.get("dilation", 1)
            if isinstance(dilation, int):
                dilation = (dilation, dilation)
            # Values are numbers only as long as nothing but copying happened to them
            # before.
            pixels = _receptive_field(arguments["input"], weight.shape, dilation)
            values = _over_pixels(weight.flatten(1), pixels, self._size)
            if values is None:
                self.refused = self._inside[-1]
                raise ForwardEnded
            self.layers.append(InputArray(self._inside[-1], values))
        return func(*args, **kwargs)


def _receptive_field(
    x: Tensor, weight_shape: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return the numbers of a layer's input that one of its outputs depends on, (inputs,).

    The output is one in the middle: at the border a convolution has padding.

    Args:
        x: the layer's input.
        weight_shape: (outputs, inputs) of a linear layer, or a convolution's.
        dilation: the convolution's, for rows and columns.
    """
    if len(weight_shape) == 2:
        tokens = x.reshape(-1, x.shape[-1])
        return tokens[len(tokens) // 2]
    windows = []
    for n, kernel, step in zip(x.shape[2:], weight_shape[2:], dilation, strict=True):
        # The middle window of n - (kernel - 1) * step possible ones.
        start = max(n - (kernel - 1) * step - 1, 0) // 2
        windows.append(slice(start, start + kernel * step, step))
    rows, cols = windows
    return x[0, :, rows, cols].flatten()


def _over_pixels(
    weight: Tensor, pixels: Tensor, size: tuple[int, int, int]
) -> NDArray[np.float32] | None:
    """Return the weights as filters, (filters, channels, height, width), each weight where its
    input's pixel is; None unless the inputs are the pixels of a rectangle, each once.

    Args:
        weight: (filters, inputs).
        pixels: (inputs,), the number of each input's pixel in the image, if it is a pixel.
        size: (channels, rows, cols) of the image.
    """
    numbers = pixels.double().numpy()
    # Normalised, padded or averaged pixels are no numbers of pixels, and 0 twice is
    # padding.
    are_integers = np.isfinite(numbers).all() and (numbers == np.round(numbers)).all()
    if not are_integers or len(numbers) != weight.shape[1]:
        return None
    if len(np.unique(numbers)) != len(numbers):
        return None
    if numbers.min() < 0 or numbers.max() >= np.prod(size):
        return None
    channel, row, col = np.unravel_index(numbers.astype(np.int64), size)
    # Within the window, whatever part of the image it was read from.
    row = row - row.min()
    col = col - col.min()
    shape = (size[0], int(row.max()) + 1, int(col.max()) + 1)
    # A rectangle of all channels with a hole is no filter.
    if np.prod(shape) != len(numbers):
        return None
    values = np.empty((len(weight), *shape), np.float32)
    values[:, channel, row, col] = weight.float().cpu().numpy()
    return values


def find_positions(model: LoadedModel) -> InputArray | str:
    """Return the position embedding of the model's patches, or why it has none.

    The parts of prefix tokens are left out. Of several that are added at different depths it is
    the first. A float32 forward pass of two images, and for each tensor that may be it the part
    up to where it counts. Rounding: 1e-7 of the tokens' size.
    """
    channels, rows, cols = model.input_size
    generator = torch.Generator().manual_seed(0)
    # What is added to any image alike is an embedding: zeros and noise.
    images = torch.zeros(2, channels, rows, cols)
    images[1] = torch.randn(channels, rows, cols, generator=generator)
    runner = PerturbationRunner(model.module, images)
    found: dict[int, list[Candidate]] = {}
    refused: list[str] = []
    for candidate in runner.candidates():
        effect = runner.effect(candidate)
        if effect is None:
            continue
        call, change = effect
        # The change must not depend on the image; 1e-3 is float32 after a few layers.
        if len(change) != 2 or not torch.allclose(
            change[0], change[1], rtol=0, atol=1e-3
        ):
            continue  # not a sum, or seen only where attention has used it
        grid = _on_grid(change[0], model)
        if grid is not None and not grid.any():
            continue  # a class token or registers
        if grid is not None and _in_order(runner, call, grid.shape, model):
            found.setdefault(call, []).append(candidate)
        else:
            shape = " x ".join(map(str, change.shape[1:]))
            where = f"features ({shape}) that do not lie as in the image"
            refused.append(f"{candidate.name} is added to {where}")
    # The earliest call first; several tensors there (rows and columns) add up.
    for call, chosen in sorted(found.items()):
        values = _on_grid(runner.share(chosen, call), model)
        if values is None or (values.any() and np.ptp(values, axis=(0, 1)).max() <= 1e-6):
            continue  # the same for every patch: positions within a patch
        kind = chosen[0].kind
        if kind == LEARNED and is_sine_cosine(values):
            kind = SINE_COSINE
        return InputArray(" + ".join(c.name for c in chosen), values, kind)
    return refused[0] if refused else _why_none(model.module)


def is_sine_cosine(values: NDArray[np.floating[Any]]) -> bool:
    """Return whether a table (rows, cols, dim) is the two-dimensional sine-cosine embedding of MAE
    and MoCo v3 (temperature 10,000), in any order of its channels.

    Products of its vectors are sums of cosines of the distances: sum_i cos(w_i dy) + cos(w_i dx),
    w_i = 10000^(-4 i / dim), i < dim / 4 (He et al. 2022; Chen et al. 2021). A resampled table is
    not recognised.
    """
    rows, cols, dim = values.shape
    if dim % 4:
        return False
    frequencies = 10000.0 ** (-np.arange(dim // 4) / (dim // 4))  # w_i
    # (rows, rows) and (cols, cols): the sum of cosines for each pair of rows, and of columns
    row_products = _cosine_sums(rows, frequencies)
    col_products = _cosine_sums(cols, frequencies)
    expected = row_products[:, None, :, None] + col_products[None, :, None, :]
    flat = values.reshape(-1, dim).astype(np.float64)
    products = (flat @ flat.T).reshape(rows, cols, rows, cols)
    # dim / 2 is the squared length of each vector.
    return bool(np.abs(products - expected).max() <= _SINE_COSINE_TOLERANCE * dim / 2)


def _cosine_sums(n: int, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sum_i cos(w_i |a - b|) for each pair of n positions, (n, n)."""
    by_distance = np.cos(np.multiply.outer(np.arange(n), frequencies)).sum(-1)
    distances = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    sums: NDArray[np.float64] = by_distance[distances]
    return sums


def _on_grid(values: Tensor, model: LoadedModel) -> NDArray[np.float32] | None:
    """Return one image's features as (rows, cols, dim) without prefix tokens; None if they do not
    lie on a grid."""
    geometry = tokens_of(model.module, model.input_size)
    if values.ndim == 2:
        layout = geometry.token_layout(len(values))
        if layout is None or layout.grid is None:
            return None
        values = values[layout.n_prefix :].unflatten(0, layout.grid)
    elif values.ndim == 3:
        a, b, c = values.shape
        # Channels first or last: which pair of axes is a grid of the model, exactly or
        # nearly; both or none leaves it open.
        for fits in (geometry.exact, geometry.near):
            if fits((b, c)) != fits((a, b)):
                values = values.permute(1, 2, 0) if fits((b, c)) else values
                break
        else:
            return None
    else:
        return None
    return values.float().contiguous().numpy()


def _in_order(
    runner: PerturbationRunner, call: int, shape: tuple[int, ...], model: LoadedModel
) -> bool:
    """Return whether the input of a call lies on the grid as in the image: a change in the top
    right patch, and one in the bottom left patch, are largest in those quarters."""
    channels, height, width = model.input_size
    rows, cols = shape[:2]
    down = max(height // rows, 1)
    across = max(width // cols, 1)
    # A change in one patch each, of which tokens in raster order respond most in its
    # quarter.
    images = torch.zeros(2, channels, height, width)
    before = runner.entering(call, images)
    noise = torch.randn(
        channels, down, across, generator=torch.Generator().manual_seed(1)
    )
    images[0, :, :down, -across:] = noise
    images[1, :, -down:, :across] = noise
    change = runner.entering(call, images) - before
    for part, top in zip(change, (True, False), strict=True):
        grid = _on_grid(part, model)
        if grid is None or not grid.any():
            return False
        # (images, rows, cols, dim) -> the strongest token by its sum over channels
        row, col = np.unravel_index(np.abs(grid).sum(-1).argmax(), shape[:2])
        if (rows > 1 and (row < rows / 2) != top) or (
            cols > 1 and (col < cols / 2) == top
        ):
            return False
    return True


def _why_none(module: nn.Module) -> str:
    none = "no position embedding is added to its features"
    for name, child in module.named_modules():
        if "rotary" in type(child).__name__.lower():
            return f"{none}: its attention turns queries and keys by position ({name})"
    tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    for word in ("relative_position", "rel_pos", "attention_bias"):
        for name in tensors:
            if word in name:
                return f"{none}: its attention has relative position biases ({name})"
    return none


@dataclass(frozen=True)
class Candidate:
    """Something that may be added to the tokens. changed(a, b): a context in which it is a times
    itself plus b."""

    name: str
    kind: str
    changed: Callable[[float, float], AbstractContextManager[None]]


class PerturbationRunner:
    """Runs a model repeatedly on the same images and captures the inputs of its modules."""

    def __init__(self, module: nn.Module, images: Tensor) -> None:
        self.module = module
        self.images = images
        self.plain: list[tuple[Any, ...]] = []

    def candidates(self) -> Iterator[Candidate]:
        """Tensors that belong to no layer and to no block, with several positions; and modules
        that return a tensor and take none."""
        found = []
        makers = {}
        for path, child in self.module.named_modules():
            if is_leaf(child) or any(part in CONTAINERS for part in path.split(".")):
                continue
            makers[path] = child
            for kind, tensors in (
                (LEARNED, child.named_parameters(recurse=False)),
                (FIXED, child.named_buffers(recurse=False)),
            ):
                for name, tensor in tensors:
                    if (
                        tensor.is_floating_point()
                        and sum(n > 1 for n in tensor.shape) > 1
                    ):
                        full = f"{path}.{name}" if path else name
                        found.append(Candidate(full, kind, _changed_tensor(tensor)))
        made = self._first_run(makers)
        yield from found
        for path in made:
            yield Candidate(path, COMPUTED, _changed_output(makers[path]))

    def effect(self, candidate: Candidate) -> tuple[int, Tensor] | None:
        """The first call of a module whose input changes when the candidate does, by its number,
        and that change; None where no input does."""

        def differs(call: int, x: Tensor) -> bool:
            return call >= len(self.plain) or _fingerprint(x) != self.plain[call]

        with candidate.changed(1.0, 1.0):
            seen = self._until(differs)
        if seen is None:
            return None
        before = self.entering(seen[0])
        if before.shape != seen[1].shape:
            return None
        return (seen[0], seen[1] - before)

    def share(self, candidates: Sequence[Candidate], call: int) -> Tensor:
        """The share that candidates have in the input of a call, for an image of zeros."""
        whole = self.entering(call)
        with ExitStack() as stack:
            for candidate in candidates:
                stack.enter_context(candidate.changed(0.0, 0.0))
            rest = self.entering(call)
        return whole[0] - rest[0]

    def _first_run(self, makers: dict[str, nn.Module]) -> list[str]:
        """Fill `plain`; the modules called without a tensor that give one."""
        made = []

        def left(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = (*args, *kwargs.values())
            fed = any(isinstance(value, Tensor | list | tuple | dict) for value in given)
            if isinstance(output, Tensor) and not fed:
                made.append(name)

        with ExitStack() as stack:
            for name, child in makers.items():
                see = partial(left, name)
                stack.enter_context(child.register_forward_hook(see, with_kwargs=True))
            self._until(lambda _, x: self.plain.append(_fingerprint(x)))
        return made

    def entering(self, wanted: int, images: Tensor | None = None) -> Tensor:
        """The input of a module at this call, for these images or the usual ones."""
        seen = self._until(lambda call, _: call == wanted, images)
        assert seen is not None
        return seen[1]

    def _until(
        self, stop: Callable[[int, Tensor], bool | None], images: Tensor | None = None
    ) -> tuple[int, Tensor] | None:
        """Run until `stop` is true of the input of a module: the call's number, and that input.
        None if it is true of none before the first block."""
        seen: list[tuple[int, Tensor]] = []
        calls = 0

        def enter(path: str, args: Any, kwargs: dict[str, Any]) -> None:
            nonlocal calls
            last = path.split(".")[0] in CONTAINERS
            x = input_tensor(args, kwargs)
            if x is not None and stop(calls, x):
                seen.append((calls, x.clone()))
            if seen or last:
                raise ForwardEnded
            calls += x is not None

        with hooked(self.module, enter), torch.no_grad(), suppress(ForwardEnded):
            self.module(self.images if images is None else images)
        return seen[0] if seen else None


def _fingerprint(x: Tensor) -> tuple[Any, ...]:
    wide = x.double()
    return tuple(x.shape), float(wide.sum()), float(wide.abs().sum())


def _changed_tensor(
    tensor: Tensor,
) -> Callable[[float, float], AbstractContextManager[None]]:
    @contextmanager
    def changed(a: float, b: float) -> Iterator[None]:
        with torch.no_grad():
            kept = tensor.clone()
            tensor.mul_(a).add_(b)
            try:
                yield
            finally:
                tensor.copy_(kept)

    return changed


def _changed_output(
    module: nn.Module,
) -> Callable[[float, float], AbstractContextManager[None]]:
    @contextmanager
    def changed(a: float, b: float) -> Iterator[None]:
        with module.register_forward_hook(lambda _m, _i, output: output * a + b):
            yield

    return changed
