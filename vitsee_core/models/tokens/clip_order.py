"""The order of a clip's tokens, at every place of the forward pass, found on numbers; and attention
over frames, or over time at a place, laid out as attention over whole clips.

As in `packed_order`, each query attends to itself alone, so that what a place holds for a token
depends on its own piece of the clip and on no other. Clips whose cells (times, rows, columns) show
one of a few contents, by the digits of the cell's number, tell for every row of every tensor which
cell it stands for: a row equals, digit by digit, that of the clip whose cells all show one content.
This identifies tokens in any order (time fastest, for instance), also where frames or spatial
positions are folded into the batch dimension, as for attention within a frame or over time at a
position. Rows that respond to no change are prefix tokens; there may be one copy for each frame.

Copies are one token where the model elsewhere has it once beside the cells of a whole clip
(TimeSformer's class token). Where it has as many there as frames (VGGT's camera and register
tokens), or none, each view has tokens of its own, which are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitsee_core.models.attention_watch import AttentionCall, AttentionEvent
from vitsee_core.models.hook_points import ModelError, ModuleSide
from vitsee_core.models.tokens.clips import Cells, clip_cells
from vitsee_core.models.tokens.packed_order import orders_of_places, window_of

CONTENTS = 4
MAX_PREFIX = 32
UNSEEN = "the order of a clip's tokens is for values to show"
# A row shows a content if it is nearer to it than this fraction of its distance to any other.
_MAX_DISTANCE = 1e-2
# A row is constant if it changes by less than this fraction of what others change by.
_MAX_CONSTANT_CHANGE = 1e-4


@dataclass(frozen=True, eq=False)
class ClipOrder:
    """How a tensor becomes (clips, tokens, dim): prefix tokens, then time by time, row by row.

    Attributes:
        grid: times, rows and columns of cells.
        index: (cells,) the row of each cell within the rows of its clip.
        prefix: (prefix tokens, copies) the rows of the prefix tokens.
        n_rows: rows of a clip in all.
        folds: parts of a clip that lie in the batch dimension.
        channels: whether the channels are the second axis.
        by_view: whether each view has prefix tokens of its own, which are kept kind by kind.
    """

    grid: Cells
    index: Tensor
    prefix: Tensor
    n_rows: int
    folds: int = 1
    channels: bool = False
    by_view: bool = False

    @property
    def n_prefix(self) -> int:
        """Number of prefix tokens."""
        return len(self.prefix)

    @property
    def token_of_row(self) -> Tensor:
        """(rows of a clip,) the token that each row stands for."""
        tokens = torch.zeros(self.n_rows, dtype=torch.long)
        tokens[self.index] = torch.arange(len(self.index)) + self.n_prefix
        prefix_tokens = torch.arange(self.n_prefix).unsqueeze(1)
        tokens[self.prefix] = prefix_tokens.expand_as(self.prefix)
        return tokens

    @property
    def plain(self) -> bool:
        """Whether the rows are the tokens already, in their order."""
        return bool((self.token_of_row == torch.arange(self.n_rows)).all())

    def calls(self, n_clips: int) -> ClipCalls:
        """The object that lays out an attention whose tokens have this order."""
        return ClipCalls(self, n_clips)

    def to_grid_order(self, x: Tensor) -> Tensor:
        """Return (clips, tokens, dim); a prefix token with several copies is their mean."""
        if self.channels:
            x = x.movedim(1, -1)
        return self.tokens(x.reshape(-1, self.n_rows, x.shape[-1]), 1)

    def tokens(self, x: Tensor, axis: int) -> Tensor:
        """Return a tensor that has the rows of a clip along an axis with the clip's tokens along
        it."""
        if self.plain:
            return x
        cells = x.index_select(axis, self.index.to(x.device))
        if not self.n_prefix:
            return cells
        copies = self.prefix.shape[1]
        rows = x.index_select(axis, self.prefix.flatten().to(x.device))
        prefix = rows.unflatten(axis, (self.n_prefix, copies)).mean(axis + 1)
        return torch.cat([prefix, cells], axis)


class ClipCodes:
    """Clips that tell the cells of a grid apart.

    Attributes:
        grid: times, rows and columns of cells.
        contents: (clips, times, rows, cols), which content each cell shows: in each of the first
            `CONTENTS` clips all cells the same, then by one digit of the cell's number after
            another.
        n_digits: digits of a cell's number, to the base `CONTENTS`.
    """

    def __init__(self, grid: Cells) -> None:
        self.grid = grid
        n_cells = math.prod(grid)
        numbers = torch.arange(n_cells).reshape(grid)
        codes = [torch.full(grid, content) for content in range(CONTENTS)]
        self.n_digits = 0
        while CONTENTS**self.n_digits < n_cells:
            codes.append(numbers // CONTENTS**self.n_digits % CONTENTS)
            self.n_digits += 1
        self.contents = torch.stack(codes)

    def clips(self, frames: int, size: tuple[int, int, int]) -> Tensor:
        """Return the pixels, (clips, frames, channels, rows, cols): each cell is a piece of one of
        `CONTENTS` random clips."""
        n_frames_rows_cols = (frames, *size[1:])
        contents = self.contents
        for axis, n_cells in enumerate(self.grid):
            contents = contents.repeat_interleave(
                n_frames_rows_cols[axis] // n_cells, axis + 1
            )
        contents = contents.unsqueeze(2)  # the same in all channels
        random_clips = torch.randn(
            (CONTENTS, frames, *size), generator=torch.Generator().manual_seed(4)
        )
        clips = torch.zeros(len(contents), frames, *size)
        for content in range(CONTENTS):
            clips = torch.where(contents == content, random_clips[content], clips)
        return clips

    def read(self, x: Tensor, folds: int, channels: bool) -> ClipOrder | None:
        """Return the order of a tensor's rows in a pass of these clips; None where the rows are not
        the cells, each once, and prefix tokens.

        Args:
            x: (clips, rows, dim).
            folds: parts of a clip that lay in the batch dimension.
            channels: whether the channels were the second axis.
        """
        n_cells = math.prod(self.grid)
        n_rows = x.shape[1]
        if n_rows < n_cells or n_rows > n_cells + max(folds, self.grid[0]) * MAX_PREFIX:
            return None
        references = x[
            :CONTENTS
        ].float()  # of each content: the rows where all cells show it
        change = torch.linalg.vector_norm(references - references[:1], dim=2)[1:].amin(0)
        if not bool(torch.isfinite(change).all()) or float(change.max()) == 0:
            return None
        is_cell = change > _MAX_CONSTANT_CHANGE * change.max()  # else a prefix token
        if int(is_cell.sum()) != n_cells:
            return None
        numbers = torch.zeros(n_rows, dtype=torch.long)
        is_certain = torch.ones(n_rows, dtype=torch.bool)
        for digit in range(self.n_digits):
            rows = x[CONTENTS + digit].float()
            distances = torch.linalg.vector_norm(references - rows, dim=2)
            nearest = distances.topk(2, dim=0, largest=False)
            distance = nearest.values.cpu()
            numbers += nearest.indices[0].cpu() * CONTENTS**digit
            is_certain &= distance[0] <= _MAX_DISTANCE * distance[1]
        cell_rows = is_cell.cpu().nonzero().flatten()
        numbers = numbers[cell_rows]
        if not bool(is_certain[cell_rows].all()):
            return None
        if not torch.equal(numbers.sort()[0], torch.arange(n_cells)):
            return None
        prefix_rows = (~is_cell.cpu()).nonzero().flatten()
        prefix = _copies(prefix_rows, n_rows, folds)
        if prefix is None:
            return None
        return ClipOrder(
            grid=self.grid,
            index=cell_rows[numbers.argsort()],
            prefix=prefix,
            n_rows=n_rows,
            folds=folds,
            channels=channels,
        )


def _copies(prefix_rows: Tensor, n_rows: int, folds: int) -> Tensor | None:
    """Return the rows of each prefix token, (prefix tokens, copies).

    In a clip in one piece each row is a token; in one of several parts each token stands at the
    same row of all parts, else the result is None.
    """
    if not len(prefix_rows):
        return prefix_rows.reshape(0, 1)
    if len(prefix_rows) % folds or n_rows % folds:
        return None
    rows = prefix_rows.reshape(folds, -1).T
    part_starts = torch.arange(folds) * (n_rows // folds)
    rows_in_part = rows - part_starts
    return rows if bool((rows_in_part == rows_in_part[:, :1]).all()) else None


def find_order(x: Tensor, codes: ClipCodes) -> ClipOrder | None:
    """Return the order of a tensor's tokens in a pass of the clips of `codes`; None where the
    tokens are not cells.

    x: (clips x folds, ..., dim), or channels as its second axis; folds, as frames, are parts of a
    clip that lie in the batch axis.
    """
    n_clips = len(codes.contents)
    n_cells = math.prod(codes.grid)
    if x.ndim < 3 or not x.is_floating_point() or x.shape[0] % n_clips or n_cells < 2:
        return None
    folds = x.shape[0] // n_clips
    order = _order_of_rows(x, codes, folds, channels=False)
    if order is None and x.ndim > 3:
        order = _order_of_rows(x.movedim(1, -1), codes, folds, channels=True)
    return order


def _order_of_rows(
    x: Tensor, codes: ClipCodes, folds: int, *, channels: bool
) -> ClipOrder | None:
    """Return the order of a tensor (clips x folds, ..., dim); channels: as in `ClipOrder`."""
    n_rows = folds * math.prod(x.shape[1:-1])
    rows = x.reshape(len(codes.contents), n_rows, x.shape[-1])
    return codes.read(rows, folds, channels)


def find_clip_orders(
    module: nn.Module, frames: int, size: tuple[int, int, int]
) -> tuple[Cells, dict[ModuleSide, ClipOrder]]:
    """Return the grid of a clip's tokens, and the order at every module side that holds them all.

    It costs one forward pass of 4 + log4(tokens) clips.

    Args:
        module: a model of clips.
        frames: frames of a clip.
        size: (channels, rows, cols) of a frame.

    Raises:
        ModelError: the model does not take this size, or it has no values (meta device).
    """
    parameter = next(module.parameters())
    if parameter.is_meta:
        raise ModelError(UNSEEN)
    grid = clip_cells(module, frames, size)
    codes = ClipCodes(grid)
    clips = codes.clips(frames, size).to(parameter.device)
    has_torch_layers = any(
        isinstance(child, nn.MultiheadAttention) for child in module.modules()
    )

    def read_order(side: ModuleSide, x: Tensor) -> ClipOrder | None:
        if side == ModuleSide("", is_input=True):
            return None  # the clips themselves
        if has_torch_layers and x.ndim == 3 and x.shape[1] == len(clips) != len(x):
            x = x.transpose(0, 1)  # tokens before clips, as torch's own layer has them
        return find_order(x, codes)

    return grid, with_views(orders_of_places(module, clips, read_order))


def with_views(
    orders: Mapping[ModuleSide, ClipOrder],
) -> dict[ModuleSide, ClipOrder]:
    """Return the orders, in which the prefix tokens of each frame are kept apart where each frame
    has prefix tokens of its own."""
    # Prefix tokens that stand once beside the cells of a whole clip are one token with copies.
    n_prefix_of_clips = {order.n_prefix for order in orders.values() if order.folds == 1}
    by_view = dict(orders)
    # The sorted rows of all prefix tokens -> the same rows kind by kind.
    rows_by_kind: dict[tuple[int, ...], Tensor] = {}
    for side, order in orders.items():
        is_by_frame = order.folds == order.grid[0] > 1
        if order.n_prefix and order.n_prefix not in n_prefix_of_clips and is_by_frame:
            by_kind = order.prefix.reshape(-1, 1)
            rows_by_kind[tuple(by_kind.flatten().sort()[0].tolist())] = by_kind
            by_view[side] = replace(order, prefix=by_kind, by_view=True)
    # Where whole clips have the same rows for prefix tokens, these are in the same order.
    for side, order in orders.items():
        same_rows = rows_by_kind.get(tuple(order.prefix.flatten().tolist()))
        if order.folds == 1 and same_rows is not None:
            by_view[side] = replace(order, prefix=same_rows, by_view=True)
    return by_view


def order_of_shape(shape: tuple[int, ...], n: int, grid: Cells) -> ClipOrder | None:
    """Return the order that the shape of a tensor of n clips suggests where its values are not
    known: tokens time by time, row by row, of whole clips, of frames, or of one position over time.
    None for other shapes."""
    n_times = grid[0]
    n_positions = grid[1] * grid[2]
    if len(shape) == 5 and (shape[0], *shape[2:]) == (n, *grid):
        return _order_by_time(grid, n_prefix=0, folds=1, channels=True)
    if len(shape) == 4 and (shape[0], *shape[2:]) == (n * n_times, *grid[1:]):
        return _order_by_time(grid, n_prefix=0, folds=n_times, channels=True)
    if len(shape) != 3:
        return None
    n_prefix_of_clip = shape[1] - n_times * n_positions
    if shape[0] == n and 0 <= n_prefix_of_clip <= MAX_PREFIX:
        return _order_by_time(grid, n_prefix=n_prefix_of_clip, folds=1)
    n_prefix_of_frame = shape[1] - n_positions
    if shape[0] == n * n_times and 0 <= n_prefix_of_frame <= MAX_PREFIX:
        return _order_by_time(grid, n_prefix=n_prefix_of_frame, folds=n_times)
    if shape[:2] == (n * n_positions, n_times):
        n_cells = n_times * n_positions
        by_position = torch.arange(n_cells).reshape(n_positions, n_times)
        return ClipOrder(
            grid=grid,
            index=by_position.T.flatten(),
            prefix=torch.zeros(0, 1, dtype=torch.long),
            n_rows=n_cells,
            folds=n_positions,
        )
    return None


def _order_by_time(
    grid: Cells, *, n_prefix: int, folds: int, channels: bool = False
) -> ClipOrder:
    """Return the order of cells time by time, in parts with prefix tokens in front of each."""
    rows = torch.arange(math.prod(grid) + folds * n_prefix).reshape(folds, -1)
    prefix = rows[:, :n_prefix].T
    cells = rows[:, n_prefix:].flatten()
    return ClipOrder(
        grid=grid,
        index=cells,
        prefix=prefix,
        n_rows=rows.numel(),
        folds=folds,
        channels=channels,
    )


class ClipCalls:
    """Lays the attention of one module out by the order of its tokens, with the interface of
    `JoinedCalls`: a call over the tokens of whole clips, or over their parts."""

    events: Sequence[AttentionEvent] = ()  # each is complete

    def __init__(self, order: ClipOrder, n_clips: int) -> None:
        self.order = order
        self.n_clips = n_clips

    def add(self, event: AttentionEvent) -> AttentionEvent:
        """Return the event over (clips, heads, tokens), with its window; as it is where its queries
        are not the tokens of this order."""
        order = self.order
        call = event.call
        folds = event.query[0] // self.n_clips
        n_rows = folds * event.n_keys
        if (
            call is None
            or len(event.query) != 3
            or event.query[0] % self.n_clips
            or event.query[2] != event.n_keys
            or n_rows != order.n_rows
            or call.value.shape[2] != event.n_keys
        ):
            return event
        n_tokens = len(order.index) + order.n_prefix
        query = (self.n_clips, event.query[1], n_tokens)
        if folds == 1:
            if not order.plain:
                call = FoldedCall(call, order, folds=1)
            return AttentionEvent(query, n_tokens, call=call)
        part_numbers = order.index // event.n_keys
        window = window_of(part_numbers.reshape(order.grid))
        is_in_every_part = order.by_view or order.prefix.shape[1] == folds
        if window is None or (order.n_prefix and not is_in_every_part):
            return AttentionEvent(query, n_tokens, within="groups of tokens")
        return AttentionEvent(
            query, n_tokens, call=FoldedCall(call, order, folds), window=window
        )


class FoldedCall(AttentionCall):
    """One attention over the parts of clips as one over whole clips: A is 0 between parts.

    A prefix token with a copy in every part attends, as the model means its copies, with the mean
    of their rows; a query sees the copy of its own part.
    """

    def __init__(self, inner: AttentionCall, order: ClipOrder, folds: int) -> None:
        self.inner = inner
        self.order = order
        self.folds = folds
        self.n_images = inner.n_images // folds
        self.n_heads = inner.n_heads
        self.n_tokens = len(order.index) + order.n_prefix
        self.value = self._to_clips(inner.value)
        self.output = self._to_clips(inner.output)

    def scores(self, images: slice, out: Tensor | None = None) -> Tensor:
        """Return the scores of `AttentionCall`; -inf between parts, and for prefix tokens with
        copies the logarithm of their mean row."""
        start, stop, _ = images.indices(self.n_images)
        parts = self.inner.scores(slice(start * self.folds, stop * self.folds))
        # (clips, heads, folds, rows of a part, rows of a part)
        parts = parts.unflatten(0, (stop - start, self.folds)).transpose(1, 2)
        if out is None:
            out = parts.new_empty(
                stop - start, self.n_heads, self.n_tokens, self.n_tokens
            )
        out.fill_(float("-inf"))
        n_prefix = self.order.n_prefix
        has_copies = n_prefix > 0 and self.order.prefix.shape[1] > 1
        tokens = self.order.token_of_row.reshape(self.folds, -1).to(parts.device)
        if has_copies:
            # Rows of copies become log probabilities, each worth one part of all.
            prefix_rows = (tokens[0] < n_prefix).nonzero().flatten()
            log_rows = parts[:, :, :, prefix_rows].log_softmax(-1) - math.log(self.folds)
            parts = parts.index_copy(3, prefix_rows, log_rows)
        # Each score goes to (its query's token, its key's token), as an index into a flat matrix.
        flat_index = tokens.unsqueeze(2) * self.n_tokens + tokens.unsqueeze(1)
        out.flatten(2).index_copy_(2, flat_index.flatten(), parts.flatten(2))
        if has_copies:
            # Among prefix tokens all copies wrote to one score: their sum over the parts.
            prefix_tokens = tokens[0, prefix_rows]
            among_prefix = log_rows[..., prefix_rows].logsumexp(2)
            out[:, :, prefix_tokens[:, None], prefix_tokens] = among_prefix
        return out

    def _to_clips(self, x: Tensor) -> Tensor:
        """Return (clips x parts, heads, rows of a part, dim) as (clips, heads, tokens, dim)."""
        x = x.unflatten(0, (self.n_images, self.folds)).transpose(1, 2).flatten(2, 3)
        return self.order.tokens(x, 2)
