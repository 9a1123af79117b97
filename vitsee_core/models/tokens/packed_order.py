"""The order of a packed tower's tokens, at every place of the forward pass, found on numbers; and
the attention of a batch, joined from calls that hold an image or a window each.

Where each query attends to itself alone, a transformer works on each token alone: what a place
holds for a token then depends on the patches that the token was made of and on no others. So images
of which some rows or columns of patches are changed, each bit of their number once set and once
not, tell for every row of every tensor which cells of the grid it stands for: one after the
embedding, in whatever order windows or merge groups want them, and four behind a 2 x 2 merger.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitsee_core.models.attention_watch import (
    KERNEL,
    KERNEL_ARGS,
    SOFTMAX,
    AttentionEvent,
    KernelCall,
    repeated,
)
from vitsee_core.models.hook_points import ModelError, hooked, input_tensor, output_tensor
from vitsee_core.models.tokens.towers import Grid, Packing

Found = TypeVar("Found")
Place = tuple[str, bool]  # a module, and whether its input is meant
# A token answers if it changes by more than this share of its change with the whole image.
_ANSWERS = 1e-2


@dataclass(frozen=True, eq=False)
class Order:
    """How a tensor without a batch axis becomes (images, cells, dim), row by row.

    grid: rows and cols of cells. index: (cells,) the token of each cell within its image. axis:
    the one along which the tokens of all images lie.
    """

    grid: Grid
    index: Tensor
    axis: int

    @property
    def n_prefix(self) -> int:
        """Number of prefix tokens: packed images have none."""
        return 0

    @property
    def plain(self) -> bool:
        """Whether tokens lie row by row already."""
        return bool((self.index == torch.arange(len(self.index))).all())

    def calls(self, n_images: int) -> JoinedCalls:
        """The object that joins the calls of an attention whose tokens have this order."""
        return JoinedCalls(self, n_images)

    def to_grid_order(self, x: Tensor) -> Tensor:
        """The tokens in the order of the grid, (images, cells, dim)."""
        n = len(self.index)
        images = x.shape[self.axis] // n
        x = x.reshape(images, n, -1)
        if self.plain:
            return x
        return x.index_select(1, self.index.to(x.device))


def same_order(one: object, other: object) -> bool:
    """Whether two places, each with an order of packed tokens, of a clip's, or None, have their
    tokens in one order."""
    if one is None or other is None or type(one) is not type(other):
        return one is other
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


class OwnToken(TorchFunctionMode):
    """Each query attends to its own token alone; to none where keys are other tokens."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is KERNEL:
            given = dict(zip(KERNEL_ARGS, args, strict=False)) | kwargs
            query = given["query"]
            value = given["value"]
            if query.shape[-2] != value.shape[-2]:
                return value.new_zeros(*query.shape[:-1], value.shape[-1])
            if query.ndim == 4:
                return repeated(value, query.shape[1])
            return value
        if func is torch.conv2d and len(args) > 1 and _keeps_size(*args, **kwargs):
            rows, cols = (n // 2 for n in args[1].shape[2:])
            kernel = torch.zeros_like(args[1])
            kernel[:, :, rows, cols] = args[1][:, :, rows, cols]
            args = args[0], kernel, *args[2:]
        result = func(*args, **kwargs)
        if func not in SOFTMAX:
            return result
        own = torch.eye(*result.shape[-2:], dtype=result.dtype, device=result.device)
        return own.expand_as(result) * (result.shape[-1] == result.shape[-2])


def _keeps_size(
    x: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    """Whether a convolution's cells stay where they are: stride 1, as much padding as it needs."""
    if isinstance(padding, str):
        return padding == "same"
    found = zip(weight.shape[2:], *map(_pair, (stride, padding, dilation)), strict=True)
    return all(n % 2 == 1 and s == 1 and p == d * (n // 2) for n, s, p, d in found)


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return (value, value)
    return (value[0], value[-1])


def find_orders(
    module: nn.Module, packing: Packing, size: tuple[int, int, int]
) -> dict[Place, Order]:
    """The order at every place whose tokens stand for cells of the grid of images of this size
    (channels, rows, cols).

    One forward pass of 2 + 4 log2(rows of patches) images or so.

    Raises:
        ModelError: the size is none that the tower takes, or it has no values (meta device).
    """
    try:
        grid = packing.grid((size[1], size[2]))
    except ValueError as error:
        raise ModelError(
            f"the model does not run on images of {size[1]} x {size[2]} pixels: {error}; expected "
            "a size that it takes: try another --img-size"
        ) from error
    codes = Codes(grid)
    return _orders(module, codes, codes.images(packing))


def output_order(
    module: nn.Module, patch: int, size: tuple[int, int, int]
) -> dict[Place, Order]:
    """The order of what the module itself gives for images of this size (channels, rows, cols),
    tokens of all of them one after another, found as `find_orders` finds it; it takes the images as
    a batch.

    Raises:
        ModelError: its tokens are no cells of a grid, or it has no values (meta device).
    """
    channels, rows, cols = size
    codes = Codes((rows // patch, cols // patch))
    images = codes.images(Packing(patch, channels=channels))
    rest = cols - images.shape[3], rows - images.shape[2]
    images = nn.functional.pad(images, (0, rest[0], 0, rest[1]))
    found = _orders(module, codes, images).get(("", False))
    if found is None:
        raise ModelError(
            f"what the language model receives of {type(module).__name__} are no cells of the "
            "image's grid (a resampler's, or weights that are all 0); expected one of its towers"
        )
    return {("", False): found}


def _orders(module: nn.Module, codes: Codes, images: Tensor) -> dict[Place, Order]:
    parameter = next(module.parameters())
    if parameter.is_meta:
        raise ModelError("the order of tokens is for values to show")
    images = images.to(parameter.device)
    return orders_of_places(module, images, lambda _, x: order_of(x, codes))


def orders_of_places(
    module: nn.Module,
    given: Tensor,
    read: Callable[[Place, Tensor], Found | None],
) -> dict[Place, Found]:
    """The order of tokens at every place of a forward pass of `given` in which each query attends
    to itself alone; without the places that have none, or another one at a second call. read: the
    order of a tensor at a place, None where it holds no cells.
    """
    answers: dict[Place, list[Found | None]] = {}

    def note(place: Place, x: Tensor | None) -> None:
        answers.setdefault(place, []).append(None if x is None else read(place, x))

    def enter(name: str, args: Any, kwargs: dict[str, Any]) -> None:
        note((name, True), input_tensor(args, kwargs))

    def leave(name: str, child: nn.Module, output: Any) -> None:
        note((name, False), output_tensor(child, output, len(given)))

    with hooked(module, enter, leave), torch.no_grad(), OwnToken():
        module(given)
    return {
        place: found[0]
        for place, found in answers.items()
        if found[0] is not None and all(same_order(found[0], one) for one in found)
    }


class Codes:
    """Images that tell the cells of a grid of patches apart.

    cells: which cells change in each image, (images, rows, cols): none in the first, all in the
    second, then for each bit of the row's number those where it is set and those where not, then
    of the column's.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        changes = [
            torch.zeros(grid, dtype=torch.bool),
            torch.ones(grid, dtype=torch.bool),
        ]
        for axis, n in enumerate(grid):
            number = torch.arange(n).unsqueeze(1 - axis).expand(grid)
            for bit in range((n - 1).bit_length()):
                is_set = (number >> bit & 1).bool()
                changes += [is_set, ~is_set]
        self.cells = torch.stack(changes)

    def images(self, packing: Packing) -> Tensor:
        """(images, channels, rows, cols) of pixels."""
        p = packing.patch
        pixels = self.cells.repeat_interleave(p, 1).repeat_interleave(p, 2).unsqueeze(1)
        shape = 2, packing.channels, *pixels.shape[2:]
        plain, other = torch.randn(shape, generator=torch.Generator().manual_seed(4))
        return torch.where(pixels, other, plain)


def order_of(x: Tensor, codes: Codes) -> Order | None:
    """The order of a tensor's tokens in a pass of `codes`' images, None where they are no cells."""
    n = len(codes.cells)
    n_cells = math.prod(codes.grid)
    for axis in (0, 1):
        if x.ndim < axis + 2 or (axis and x.shape[0] != 1) or not x.is_floating_point():
            continue
        tokens, left = divmod(x.shape[axis], n)
        if left or tokens < 1 or n_cells % tokens or (tokens == 1 and n_cells > 1):
            continue
        changed = x.reshape(n, tokens, -1).float()
        change = torch.linalg.vector_norm(changed - changed[:1], dim=2)
        whole = change[1]
        if bool((whole > 0).all()):
            found = _read((change > _ANSWERS * whole).cpu(), codes.grid)
            if found is not None:
                return Order(found[0], found[1], axis)
    return None


def _read(answers: Tensor, grid: Grid) -> tuple[Grid, Tensor] | None:
    """Grid, and the token of each of its cells, from which images each token answers to (images,
    tokens): every token must stand for one block of cells, all of one size, and all together for
    the grid."""
    at = 2
    starts = []
    blocks = []
    for n in grid:
        number = torch.arange(n)
        may = torch.ones(answers.shape[1], n, dtype=torch.bool)
        for bit in range((n - 1).bit_length()):
            is_set = (number >> bit & 1).bool()
            may &= torch.where(
                is_set, answers[at].unsqueeze(1), answers[at + 1].unsqueeze(1)
            )
            at += 2
        length = may.sum(1)
        first = may.float().argmax(1)
        last = n - 1 - may.flip(1).float().argmax(1)
        size = int(length[0])
        even = size > 0 and n % size == 0 and bool((length == size).all())
        if (
            not even
            or bool((last - first + 1 != size).any())
            or bool((first % size).any())
        ):
            return None
        starts.append(first // size)
        blocks.append(n // size)
    cell = starts[0] * blocks[1] + starts[1]
    if len(cell) != blocks[0] * blocks[1] or len(cell.unique()) != len(cell):
        return None
    return (blocks[0], blocks[1]), cell.argsort()


class JoinedCalls:
    """Gathers the calls of one attention module until all tokens of all images were queries.

    The calls take the module's tokens in their order, one range after another: `order` says which
    cells these are, and the product with the values proves it (see `proofs.AttentionProof`). Where
    an image takes several calls, a query sees the tokens of its own call alone: those of its
    window, which the joined event names and masks, or groups of tokens of another form, of which
    it has no tensors.
    """

    def __init__(self, order: Order, n_images: int) -> None:
        self.order = order
        self.n_images = n_images
        self.events: list[AttentionEvent] = []  # that are not complete

    def add(self, event: AttentionEvent) -> AttentionEvent | None:
        """The joined event, once it is complete; the event itself where it is no part of one."""
        call = event.call
        parts = isinstance(call, KernelCall) and call.mask is None and not call.causal
        if not parts or event.query[0] != 1 or event.query[2] != event.n_keys:
            return event
        self.events.append(event)
        n_tokens = len(self.order.index)
        if sum(one.n_keys for one in self.events) < self.n_images * n_tokens:
            return None
        events = self.events
        self.events = []
        whole = self.n_images, event.query[1], n_tokens
        if all(one.n_keys == n_tokens for one in events):
            return AttentionEvent(whole, n_tokens, call=self._joined(events, None))
        labels = self._labels([one.n_keys for one in events])
        if labels is None:
            return events[0]
        window = window_of(labels.reshape(self.order.grid))
        if window is None:
            return AttentionEvent(whole, n_tokens, within="groups of tokens")
        seen = labels.unsqueeze(0) == labels.unsqueeze(1)
        return AttentionEvent(
            whole, n_tokens, call=self._joined(events, seen), window=window
        )

    def _labels(self, lengths: list[int]) -> Tensor | None:
        """Which call each cell of an image is in, (cells,) from 0; None where the images differ."""
        n_tokens = len(self.order.index)
        found = []
        start = 0
        for length in lengths:
            if start // n_tokens != (start + length - 1) // n_tokens:
                return None
            found += [start] * length
            start += length
        if start != self.n_images * n_tokens:
            return None
        by_image = torch.tensor(found).reshape(self.n_images, n_tokens)
        by_image = by_image - torch.arange(self.n_images).unsqueeze(1) * n_tokens
        if bool((by_image != by_image[:1]).any()):
            return None
        return by_image[0].unique(return_inverse=True)[1][self.order.index]

    def _joined(self, events: list[AttentionEvent], seen: Tensor | None) -> KernelCall:
        """seen: (queries, keys), which cells each cell sees; None where it sees all."""
        calls = [event.call for event in events if isinstance(event.call, KernelCall)]
        query, key, value, output = (
            self._laid(torch.cat([getattr(call, name) for call in calls], 2))
            for name in ("query", "key", "value", "output")
        )
        arguments = {"query": query, "key": key, "value": value, "scale": calls[0].scale}
        if seen is not None:
            arguments["attn_mask"] = seen.to(query.device)
        return KernelCall(arguments, output)

    def _laid(self, x: Tensor) -> Tensor:
        """(1, heads, tokens of all images, dim) as (images, heads, cells, dim)."""
        x = x[0].unflatten(1, (self.n_images, -1)).transpose(0, 1)
        if self.order.plain:
            return x
        return x.index_select(2, self.order.index.to(x.device))


def window_of(parts: Tensor) -> tuple[int, ...] | None:
    """Sides of the windows that tile a grid of numbers of parts, (rows, cols) or (times, rows,
    cols), from its first cell, the last ones cut; None where there is one window, or where the
    parts are no windows."""
    sides = []
    number = torch.zeros_like(parts)
    for axis, n in enumerate(parts.shape):
        line = parts.movedim(axis, 0).flatten(1)[:, 0]
        sides.append(next((i for i in range(1, n) if line[i] != line[0]), n))
        along = [1] * parts.ndim
        along[axis] = n
        number = number * n + (torch.arange(n) // sides[-1]).reshape(along)
    pairs = torch.stack([number.flatten(), parts.flatten()]).unique(dim=1).shape[1]
    alike = pairs == len(number.unique()) == len(parts.unique())
    return tuple(sides) if alike and pairs > 1 else None
