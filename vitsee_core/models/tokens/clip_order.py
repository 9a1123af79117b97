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
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.tokens.clips import Cells, clip_cells
from vitsee_core.models.tokens.packed_order import Place, orders_of_places, window_of

CONTENTS = 4
MOST_PREFIX = 32
UNSEEN = "the order of a clip's tokens is for values to show"
# A row shows a content if it is nearer to it than this share of its distance from any other.
_SAME = 1e-2
# A row answers to no content if it changes by less than this share of what others change by.
_STILL = 1e-4


@dataclass(frozen=True, eq=False)
class ClipOrder:
    """How a tensor becomes (clips, tokens, dim): prefix tokens, then time by time, row by row.

    grid: times, rows and columns of cells. index: (cells,) the row of each cell within its clip's.
    prefix: (prefix tokens, copies) their rows. n_rows: of a clip, in all. folds: parts of a clip
    that lie in the batch dimension. channels: whether the channels are the second axis. by_view:
    whether the prefix tokens are each view's own, kind by kind.
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
    def places(self) -> Tensor:
        """(rows of a clip,) the token that each stands for."""
        found = torch.zeros(self.n_rows, dtype=torch.long)
        found[self.index] = torch.arange(len(self.index)) + self.n_prefix
        found[self.prefix] = (
            torch.arange(self.n_prefix).unsqueeze(1).expand_as(self.prefix)
        )
        return found

    @property
    def plain(self) -> bool:
        """Whether the rows are the tokens already, in their order."""
        return bool((self.places == torch.arange(self.n_rows)).all())

    def calls(self, n_clips: int) -> ClipCalls:
        """The object that lays out an attention whose tokens have this order."""
        return ClipCalls(self, n_clips)

    def to_grid_order(self, x: Tensor) -> Tensor:
        """(clips, tokens, dim); of a prefix token with several copies their mean."""
        x = x.movedim(1, -1) if self.channels else x
        return self.tokens(x.reshape(-1, self.n_rows, x.shape[-1]), 1)

    def tokens(self, x: Tensor, axis: int) -> Tensor:
        """A tensor with the rows of a clip along an axis, with its tokens along it."""
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

    contents: (clips, times, rows, cols) which content each cell shows: in the first `CONTENTS`
    clips all cells one, then by each digit of the cell's number.
    """

    def __init__(self, grid: Cells) -> None:
        self.grid = grid
        n = math.prod(grid)
        number = torch.arange(n).reshape(grid)
        codes = [torch.full(grid, content) for content in range(CONTENTS)]
        self.n_digits = 0
        while CONTENTS**self.n_digits < n:
            codes.append(number // CONTENTS**self.n_digits % CONTENTS)
            self.n_digits += 1
        self.contents = torch.stack(codes)

    def clips(self, frames: int, size: tuple[int, int, int]) -> Tensor:
        """(clips, frames, channels, rows, cols) of pixels: `CONTENTS` random clips, in pieces."""
        sides = (frames, *size[1:])
        shown = self.contents
        for axis, (n, cells) in enumerate(zip(sides, self.grid, strict=True)):
            shown = shown.repeat_interleave(n // cells, axis + 1)
        shown = shown.unsqueeze(2)
        whole = torch.randn(
            (CONTENTS, frames, *size), generator=torch.Generator().manual_seed(4)
        )
        made = torch.zeros(len(shown), frames, *size)
        for content in range(CONTENTS):
            made = torch.where(shown == content, whole[content], made)
        return made

    def read(self, x: Tensor, folds: int, channels: bool) -> ClipOrder | None:
        """The order of a tensor's rows in a pass of these clips, (clips, rows, dim); None where
        they are not the cells, each once, and prefix tokens."""
        n_cells = math.prod(self.grid)
        n_rows = x.shape[1]
        if n_rows < n_cells or n_rows > n_cells + max(folds, self.grid[0]) * MOST_PREFIX:
            return None
        whole = x[:CONTENTS].float()
        apart = torch.linalg.vector_norm(whole - whole[:1], dim=2)[1:].amin(0)
        if not bool(torch.isfinite(apart).all()) or float(apart.max()) == 0:
            return None
        answers = apart > _STILL * apart.max()
        if int(answers.sum()) != n_cells:
            return None
        number = torch.zeros(n_rows, dtype=torch.long)
        sure = torch.ones(n_rows, dtype=torch.bool)
        for digit in range(self.n_digits):
            row = x[CONTENTS + digit].float()
            distance = torch.linalg.vector_norm(whole - row, dim=2)
            nearest, which = (one.cpu() for one in distance.topk(2, dim=0, largest=False))
            number += which[0] * CONTENTS**digit
            sure &= nearest[0] <= _SAME * nearest[1]
        of_cells = answers.cpu().nonzero().flatten()
        number = number[of_cells]
        sure = sure[of_cells]
        if not bool(sure.all()) or not torch.equal(
            number.sort()[0], torch.arange(n_cells)
        ):
            return None
        still = (~answers.cpu()).nonzero().flatten()
        prefix = _copies(still, n_rows, folds)
        if prefix is None:
            return None
        return ClipOrder(
            self.grid, of_cells[number.argsort()], prefix, n_rows, folds, channels
        )


def _copies(still: Tensor, n_rows: int, folds: int) -> Tensor | None:
    """(prefix tokens, copies) of the rows that answer to nothing: of a clip in one piece each is a
    token, of one in several each stands at the same place of all."""
    if not len(still):
        return still.reshape(0, 1)
    if len(still) % folds or n_rows % folds:
        return None
    found = still.reshape(folds, -1).T
    start = torch.arange(folds) * (n_rows // folds)
    within = found - start
    return found if bool((within == within[:, :1]).all()) else None


def order_in(x: Tensor, codes: ClipCodes) -> ClipOrder | None:
    """The order of a tensor's tokens in a pass of `codes`' clips, None where they are no cells."""
    n = len(codes.contents)
    n_cells = math.prod(codes.grid)
    if x.ndim < 3 or not x.is_floating_point() or x.shape[0] % n or n_cells < 2:
        return None
    folds = x.shape[0] // n
    forms = [False] if x.ndim == 3 else [False, True]
    for channels in forms:
        rows = x.movedim(1, -1) if channels else x
        n_rows = folds * math.prod(rows.shape[1:-1])
        found = codes.read(rows.reshape(n, n_rows, rows.shape[-1]), folds, channels)
        if found is not None:
            return found
    return None


def find_clip_orders(
    module: nn.Module, frames: int, size: tuple[int, int, int]
) -> tuple[Cells, dict[Place, ClipOrder]]:
    """The grid of a clip's tokens, and the order at every place that holds them all, for so many
    frames of this size (channels, rows, cols).

    One forward pass of 4 + log4(tokens) clips.

    Raises:
        ModelError: the size is none that the model takes, or it has no values (meta device).
    """
    parameter = next(module.parameters())
    if parameter.is_meta:
        raise ModelError(UNSEEN)
    grid = clip_cells(module, frames, size)
    codes = ClipCodes(grid)
    given = codes.clips(frames, size).to(parameter.device)
    sequences = any(
        isinstance(child, nn.MultiheadAttention) for child in module.modules()
    )

    def read(place: Place, x: Tensor) -> ClipOrder | None:
        if place == ("", True):
            return None  # the clips themselves
        if sequences and x.ndim == 3 and x.shape[1] == len(given) != len(x):
            x = x.transpose(0, 1)  # tokens before clips, as torch's own layer has them
        return order_in(x, codes)

    return grid, with_views(orders_of_places(module, given, read))


def with_views(orders: Mapping[Place, ClipOrder]) -> dict[Place, ClipOrder]:
    """The orders with the prefix tokens of each frame kept apart where these are its own."""
    once = {order.n_prefix for order in orders.values() if order.folds == 1}
    found = dict(orders)
    rows: dict[tuple[int, ...], Tensor] = {}  # those of all prefix tokens -> kind by kind
    for place, order in orders.items():
        own = (
            order.n_prefix
            and order.n_prefix not in once
            and order.folds == order.grid[0] > 1
        )
        if own:
            by_kind = order.prefix.reshape(-1, 1)
            rows[tuple(by_kind.flatten().sort()[0].tolist())] = by_kind
            found[place] = replace(order, prefix=by_kind, by_view=True)
    for place, order in orders.items():
        by_kind_or_none = rows.get(tuple(order.prefix.flatten().tolist()))
        if order.folds == 1 and by_kind_or_none is not None:
            found[place] = replace(order, prefix=by_kind_or_none, by_view=True)
    return found


def order_of_shape(shape: tuple[int, ...], n: int, grid: Cells) -> ClipOrder | None:
    """The order that the shape of a tensor of n clips suggests where nothing is known of its
    values: tokens time by time, row by row, of whole clips, of frames or of places over time."""
    times = grid[0]
    places = grid[1] * grid[2]
    if len(shape) == 5 and (shape[0], *shape[2:]) == (n, *grid):
        return _made_up(grid, 0, 1, channels=True)
    if len(shape) == 4 and (shape[0], *shape[2:]) == (n * times, *grid[1:]):
        return _made_up(grid, 0, times, channels=True)
    if len(shape) != 3:
        return None
    if shape[0] == n and 0 <= shape[1] - times * places <= MOST_PREFIX:
        return _made_up(grid, shape[1] - times * places, 1)
    if shape[0] == n * times and 0 <= shape[1] - places <= MOST_PREFIX:
        return _made_up(grid, shape[1] - places, times)
    if shape[:2] == (n * places, times):
        by_place = torch.arange(times * places).reshape(places, times).T.flatten()
        return ClipOrder(
            grid, by_place, torch.zeros(0, 1, dtype=torch.long), len(by_place), places
        )
    return None


def _made_up(grid: Cells, n_prefix: int, folds: int, channels: bool = False) -> ClipOrder:
    rows = torch.arange(math.prod(grid) + folds * n_prefix).reshape(folds, -1)
    prefix = rows[:, :n_prefix].T
    cells = rows[:, n_prefix:].flatten()
    return ClipOrder(grid, cells, prefix, rows.numel(), folds, channels)


class ClipCalls:
    """Lays the attention of one module out by the order of its tokens, with the interface of
    `JoinedCalls`: a call over the tokens of whole clips, or over their parts."""

    events: Sequence[AttentionEvent] = ()  # each is complete

    def __init__(self, order: ClipOrder, n_clips: int) -> None:
        self.order = order
        self.n_clips = n_clips

    def add(self, event: AttentionEvent) -> AttentionEvent:
        """The event over (clips, heads, tokens), its window named; as it is where its queries are
        not the tokens of this order."""
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
        whole = self.n_clips, event.query[1], n_tokens
        if folds == 1:
            found = call if order.plain else FoldedCall(call, order, 1)
            return AttentionEvent(whole, n_tokens, call=found)
        window = window_of((order.index // event.n_keys).reshape(order.grid))
        copied = order.by_view or order.prefix.shape[1] == folds
        if window is None or (order.n_prefix and not copied):
            return AttentionEvent(whole, n_tokens, within="groups of tokens")
        return AttentionEvent(
            whole, n_tokens, call=FoldedCall(call, order, folds), window=window
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
        self.value, self.output = self._laid(inner.value), self._laid(inner.output)

    def scores(self, images: slice, out: Tensor | None = None) -> Tensor:
        """The scores of `AttentionCall`; for prefix tokens with copies the logarithm of their mean
        row."""
        start, stop, _ = images.indices(self.n_images)
        parts = self.inner.scores(slice(start * self.folds, stop * self.folds))
        parts = parts.unflatten(0, (stop - start, self.folds)).transpose(1, 2)
        shape = stop - start, self.n_heads, self.n_tokens, self.n_tokens
        if out is None:
            out = parts.new_empty(shape)
        out.fill_(float("-inf"))
        n = self.order.n_prefix
        copies = self.order.prefix.shape[1]
        places = self.order.places.reshape(self.folds, -1).to(parts.device)
        if n and copies > 1:
            # Rows of copies are made probabilities, each worth one part of all.
            is_prefix = (places[0] < n).nonzero().flatten()
            rows = parts[:, :, :, is_prefix].log_softmax(-1) - math.log(self.folds)
            parts = parts.index_copy(3, is_prefix, rows)
        at = places.unsqueeze(2) * self.n_tokens + places.unsqueeze(1)
        out.flatten(2).index_copy_(2, at.flatten(), parts.flatten(2))
        if n and copies > 1:
            which = places[0, is_prefix]
            own = rows[..., is_prefix].logsumexp(2)
            out[:, :, which[:, None], which] = own
        return out

    def _laid(self, x: Tensor) -> Tensor:
        """(clips x parts, heads, rows of a part, dim) as (clips, heads, tokens, dim)."""
        x = x.unflatten(0, (self.n_images, self.folds)).transpose(1, 2).flatten(2, 3)
        return self.order.tokens(x, 2)
