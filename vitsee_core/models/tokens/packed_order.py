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
from typing import Any, NamedTuple, TypeVar

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
from vitsee_core.models.hook_points import (
    ModelError,
    ModuleSide,
    hooked,
    input_tensor,
    output_tensor,
)
from vitsee_core.models.tokens.towers import Grid, Packing

AnyOrder = TypeVar("AnyOrder")
# A token has changed if its change is more than this fraction of that with the whole image.
_MIN_CHANGE = 1e-2


@dataclass(frozen=True, eq=False)
class Order:
    """How a tensor without a batch axis becomes (images, cells, dim), row by row.

    Attributes:
        grid: rows and columns of cells.
        index: (cells,) the token of each cell within its image.
        axis: the axis along which the tokens of all images lie.
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
        """Whether tokens lie row by row already, so that nothing has to be moved."""
        return bool((self.index == torch.arange(len(self.index))).all())

    def calls(self, n_images: int) -> JoinedCalls:
        """The object that joins the calls of an attention whose tokens have this order."""
        return JoinedCalls(self, n_images)

    def to_grid_order(self, x: Tensor) -> Tensor:
        """Return the tokens in the order of the grid, (images, cells, dim)."""
        n_cells = len(self.index)
        n_images = x.shape[self.axis] // n_cells
        x = x.reshape(n_images, n_cells, -1)
        if self.plain:
            return x
        return x.index_select(1, self.index.to(x.device))


def same_order(first: object, second: object) -> bool:
    """Return whether two orders, of packed tokens or of clips, are equal field by field; None, for
    no order, equals None alone."""
    if first is None or second is None or type(first) is not type(second):
        return first is second
    # Dataclasses with tensors have no == of their own: it would be an array.
    for name, value in vars(first).items():
        other_value = getattr(second, name)
        if isinstance(value, Tensor):
            if not torch.equal(value, other_value):
                return False
        elif value != other_value:
            return False
    return True


class SelfOnlyAttention(TorchFunctionMode):
    """A mode in which each query attends to its own token alone; to none where keys are other
    tokens. Convolutions that keep the grid see their middle cell alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is KERNEL:
            arguments = dict(zip(KERNEL_ARGS, args, strict=False)) | kwargs
            query = arguments["query"]
            value = arguments["value"]
            if query.shape[-2] != value.shape[-2]:
                return value.new_zeros(*query.shape[:-1], value.shape[-1])
            if query.ndim == 4:
                return repeated(value, query.shape[1])
            return value
        if func is torch.conv2d and len(args) > 1 and _keeps_size(*args, **kwargs):
            weight = args[1]
            row = weight.shape[2] // 2
            col = weight.shape[3] // 2
            middle_only = torch.zeros_like(weight)
            middle_only[:, :, row, col] = weight[:, :, row, col]
            args = args[0], middle_only, *args[2:]
        result = func(*args, **kwargs)
        if func not in SOFTMAX:
            return result
        n_queries, n_keys = result.shape[-2:]
        identity = torch.eye(n_queries, n_keys, dtype=result.dtype, device=result.device)
        # Where keys are other tokens (cross-attention) nothing passes.
        return identity.expand_as(result) * (n_queries == n_keys)


def _keeps_size(
    x: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    """Return whether a convolution's cells stay where they are: an odd kernel, stride 1, and as
    much padding as it needs. The parameters are those of torch.conv2d."""
    if isinstance(padding, str):
        return padding == "same"
    strides = _rows_and_cols(stride)
    paddings = _rows_and_cols(padding)
    dilations = _rows_and_cols(dilation)
    for axis, side in enumerate(weight.shape[2:]):
        if side % 2 == 0 or strides[axis] != 1:
            return False
        if paddings[axis] != dilations[axis] * (side // 2):
            return False
    return True


def _rows_and_cols(value: Any) -> tuple[int, int]:
    """Return a convolution's setting for rows and for columns, where it may be one number."""
    if isinstance(value, int):
        return (value, value)
    return (value[0], value[-1])


def find_orders(
    module: nn.Module, packing: Packing, size: tuple[int, int, int]
) -> dict[ModuleSide, Order]:
    """Return the order at every module side whose tokens stand for cells of the grid of patches.

    It costs one forward pass of 2 + 4 log2(rows of patches) images or so.

    Args:
        module: the tower.
        packing: how the tower takes its images.
        size: (channels, rows, cols) of an image.

    Raises:
        ModelError: the tower does not take this size, or it has no values (meta device).
    """
    try:
        grid = packing.grid((size[1], size[2]))
    except ValueError as error:
        raise ModelError(
            f"the model does not run on images of {size[1]} x {size[2]} pixels: {error}; "
            "expected a size that it takes: try another --img-size"
        ) from error
    codes = Codes(grid)
    return _orders_of_codes(module, codes, codes.images(packing))


def output_order(
    module: nn.Module, patch: int, size: tuple[int, int, int]
) -> dict[ModuleSide, Order]:
    """Return the order of the model's own output, the tokens of all images one after another, for
    a model that takes its images as a batch. It is found as `find_orders` finds it.

    Args:
        module: the model.
        patch: the side of a patch in pixels.
        size: (channels, rows, cols) of an image.

    Raises:
        ModelError: its tokens are not cells of a grid, or it has no values (meta device).
    """
    channels, rows, cols = size
    codes = Codes((rows // patch, cols // patch))
    images = codes.images(Packing(patch, channels=channels))
    # Pixels beyond the last whole patch.
    right = cols - images.shape[3]
    bottom = rows - images.shape[2]
    images = nn.functional.pad(images, (0, right, 0, bottom))
    output_side = ModuleSide("", is_input=False)
    order = _orders_of_codes(module, codes, images).get(output_side)
    if order is None:
        raise ModelError(
            f"what the language model receives of {type(module).__name__} are no cells "
            "of the image's grid (a resampler's, or weights that are all 0); expected "
            "one of its towers"
        )
    return {output_side: order}


def _orders_of_codes(
    module: nn.Module, codes: Codes, images: Tensor
) -> dict[ModuleSide, Order]:
    """Return the order at every module side whose tokens stand for cells of the codes' grid."""
    parameter = next(module.parameters())
    if parameter.is_meta:
        raise ModelError("the order of tokens is for values to show")
    images = images.to(parameter.device)
    return orders_of_places(module, images, lambda _, x: order_of(x, codes))


def orders_of_places(
    module: nn.Module,
    inputs: Tensor,
    read_order: Callable[[ModuleSide, Tensor], AnyOrder | None],
) -> dict[ModuleSide, AnyOrder]:
    """Return the order of tokens at every module's input and output in a forward pass in which each
    query attends to itself alone. Sides without an order, or with another order at a second call,
    are left out.

    Args:
        module: the model.
        inputs: what it is run on.
        read_order: returns the order of a tensor at a side, None where it does not hold cells.
    """
    orders_by_side: dict[ModuleSide, list[AnyOrder | None]] = {}

    def note(side: ModuleSide, x: Tensor | None) -> None:
        order = None if x is None else read_order(side, x)
        orders_by_side.setdefault(side, []).append(order)

    def enter(name: str, args: Any, kwargs: dict[str, Any]) -> None:
        note(ModuleSide(name, is_input=True), input_tensor(args, kwargs))

    def leave(name: str, child: nn.Module, output: Any) -> None:
        output = output_tensor(child, output, len(inputs))
        note(ModuleSide(name, is_input=False), output)

    with hooked(module, enter, leave), torch.no_grad(), SelfOnlyAttention():
        module(inputs)
    return {
        side: orders[0]
        for side, orders in orders_by_side.items()
        if orders[0] is not None and all(same_order(orders[0], order) for order in orders)
    }


class Codes:
    """Images that tell the cells of a grid of patches apart.

    Attributes:
        grid: rows and columns of cells.
        cells: (images, rows, cols), which cells change in each image: none in the first, all in
            the second, then for each bit of the row's number the cells where it is set and those
            where it is not, then the same for the column's number.
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
        """Return the pixels, (images, channels, rows, cols): one random image, with another in its
        place in the cells that change."""
        side = packing.patch
        # (images, 1, rows, cols) in pixels
        is_changed = self.cells.repeat_interleave(side, 1).repeat_interleave(side, 2)
        is_changed = is_changed.unsqueeze(1)
        shape = (2, packing.channels, *is_changed.shape[2:])
        generator = torch.Generator().manual_seed(4)
        before, after = torch.randn(shape, generator=generator)
        return torch.where(is_changed, after, before)


def order_of(x: Tensor, codes: Codes) -> Order | None:
    """Return the order of a tensor's tokens in a pass of the images of `codes`; None where the
    tokens are not cells. Tokens are looked for along the first axis, then along the second."""
    n_images = len(codes.cells)
    n_cells = math.prod(codes.grid)
    for axis in (0, 1):
        if x.ndim < axis + 2 or (axis and x.shape[0] != 1) or not x.is_floating_point():
            continue
        n_tokens, remainder = divmod(x.shape[axis], n_images)
        if remainder or n_tokens < 1 or n_cells % n_tokens:
            continue
        if n_tokens == 1 and n_cells > 1:
            continue  # a pooled vector
        tokens = x.reshape(n_images, n_tokens, -1).float()
        change = torch.linalg.vector_norm(tokens - tokens[:1], dim=2)  # (images, tokens)
        change_of_all = change[1]  # where every cell changes
        if bool((change_of_all > 0).all()):
            has_changed = change > _MIN_CHANGE * change_of_all
            blocks = _decode(has_changed.cpu(), codes.grid)
            if blocks is not None:
                return Order(blocks.grid, blocks.token_index, axis)
    return None


class _TokenBlocks(NamedTuple):
    """A grid of blocks of cells, a token each; token_index: (blocks,) the token of each block."""

    grid: Grid
    token_index: Tensor


def _decode(has_changed: Tensor, grid: Grid) -> _TokenBlocks | None:
    """Return which token stands for which block of cells.

    Every token must stand for one block, all blocks must have one size, and together they must be
    the grid; else None.

    Args:
        has_changed: (images of `Codes`, tokens), whether a token changes with an image.
        grid: rows and columns of cells.
    """
    image = 2  # after the images in which no cell and every cell changes
    block_numbers = []  # of rows and of columns: (tokens,) the number of each token's block
    n_blocks = []
    for n in grid:
        numbers = torch.arange(n)
        # (tokens, n): the rows, or columns, that a token may depend on. It answers to an image
        # where one of its cells changes, so both answers to a bit leave both halves.
        may_depend = torch.ones(has_changed.shape[1], n, dtype=torch.bool)
        for bit in range((n - 1).bit_length()):
            is_set = (numbers >> bit & 1).bool()
            may_depend &= torch.where(
                is_set,
                has_changed[image].unsqueeze(1),
                has_changed[image + 1].unsqueeze(1),
            )
            image += 2
        length = may_depend.sum(1)
        first = may_depend.float().argmax(1)
        last = n - 1 - may_depend.flip(1).float().argmax(1)
        size = int(length[0])
        is_even = size > 0 and n % size == 0 and bool((length == size).all())
        if not is_even:
            return None
        has_gaps = bool((last - first + 1 != size).any())
        straddles_blocks = bool((first % size).any())
        if has_gaps or straddles_blocks:
            return None
        block_numbers.append(first // size)
        n_blocks.append(n // size)
    rows, cols = n_blocks
    block = block_numbers[0] * cols + block_numbers[1]
    if len(block) != rows * cols or len(block.unique()) != len(block):
        return None
    return _TokenBlocks((rows, cols), block.argsort())


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
        """Return the joined event once it is complete, None before; an event that is not a part of
        one comes back as it is."""
        call = event.call
        may_be_part = (
            isinstance(call, KernelCall) and call.mask is None and not call.causal
        )
        if not may_be_part:
            return event
        n_batch, n_heads, n_queries = event.query
        if n_batch != 1 or n_queries != event.n_keys:
            return event
        self.events.append(event)
        n_tokens = len(self.order.index)
        if sum(part.n_keys for part in self.events) < self.n_images * n_tokens:
            return None
        events = self.events
        self.events = []
        query = (self.n_images, n_heads, n_tokens)
        if all(part.n_keys == n_tokens for part in events):  # a call for each image
            return AttentionEvent(query, n_tokens, call=self._joined(events, None))
        labels = self._call_labels([part.n_keys for part in events])
        if labels is None:
            return events[0]
        window = window_of(labels.reshape(self.order.grid))
        if window is None:
            return AttentionEvent(query, n_tokens, within="groups of tokens")
        is_visible = labels.unsqueeze(0) == labels.unsqueeze(1)  # (queries, keys)
        return AttentionEvent(
            query, n_tokens, call=self._joined(events, is_visible), window=window
        )

    def _call_labels(self, lengths: list[int]) -> Tensor | None:
        """Return the number of the call that each cell of an image is in, (cells,) from 0; None
        where the images differ.

        lengths: tokens of each call, in the order of the calls.
        """
        n_tokens = len(self.order.index)
        starts = []  # of each token: where its call begins
        start = 0
        for length in lengths:
            crosses_images = start // n_tokens != (start + length - 1) // n_tokens
            if crosses_images:
                return None
            starts += [start] * length
            start += length
        if start != self.n_images * n_tokens:
            return None
        by_image = torch.tensor(starts).reshape(self.n_images, n_tokens)
        by_image = by_image - torch.arange(self.n_images).unsqueeze(1) * n_tokens
        if bool((by_image != by_image[:1]).any()):
            return None
        _, labels = by_image[0].unique(return_inverse=True)
        return labels[self.order.index]

    def _joined(
        self, events: list[AttentionEvent], is_visible: Tensor | None
    ) -> KernelCall:
        """Return one attention over (images, heads, cells) in place of several calls.

        is_visible: (queries, keys), which cells each cell sees; None where it sees all.
        """
        calls = [event.call for event in events if isinstance(event.call, KernelCall)]
        query = self._to_image_grids([call.query for call in calls])
        arguments: dict[str, Any] = {
            "query": query,
            "key": self._to_image_grids([call.key for call in calls]),
            "value": self._to_image_grids([call.value for call in calls]),
            "scale": calls[0].scale,
        }
        if is_visible is not None:
            arguments["attn_mask"] = is_visible.to(query.device)
        return KernelCall(
            arguments, output=self._to_image_grids([call.output for call in calls])
        )

    def _to_image_grids(self, parts: list[Tensor]) -> Tensor:
        """Return the calls' (1, heads, tokens, dim) tensors as one (images, heads, cells, dim)."""
        x = torch.cat(parts, 2)[0].unflatten(1, (self.n_images, -1)).transpose(0, 1)
        if self.order.plain:
            return x
        return x.index_select(2, self.order.index.to(x.device))


def window_of(labels: Tensor) -> tuple[int, ...] | None:
    """Return the size of the windows that tile a grid from its first cell, the last ones cut; None
    where there is only one window, or where the labels are not windows.

    labels: (rows, cols) or (times, rows, cols), which part each cell of the grid is in.
    """
    sides = []
    window_numbers = torch.zeros_like(labels)
    for axis, n in enumerate(labels.shape):
        # A window ends where the label changes first, along the axis from the first cell.
        line = labels.movedim(axis, 0).flatten(1)[:, 0]
        side = next((i for i in range(1, n) if line[i] != line[0]), n)
        sides.append(side)
        shape = [1] * labels.ndim
        shape[axis] = n
        window_numbers = window_numbers * n + (torch.arange(n) // side).reshape(shape)
    # Labels and windows are the same partition if as many pairs of both occur as there are of each.
    pairs = torch.stack([window_numbers.flatten(), labels.flatten()]).unique(dim=1)
    n_windows = pairs.shape[1]
    is_same = n_windows == len(window_numbers.unique()) == len(labels.unique())
    return tuple(sides) if is_same and n_windows > 1 else None
