"""The attention of a batch, from calls that hold it in parts or folded: of packed images, one call
an image or a window; and of clips, one call over all tokens, or over frames or places, each
attending within itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitsee_core.models.attention_watch import AttentionCall, AttentionEvent, KernelCall
from vitsee_core.models.clip_orders import ClipOrder
from vitsee_core.models.packing import Grid
from vitsee_core.models.token_order import Order


class JoinedCalls:
    """Gathers the calls of one attention module until all tokens of all images were queries.

    The calls take the module's tokens in their order, one range after another: `order` says which
    cells these are, and the product with the values proves it (see `proofs.AttentionProof`). Where
    an image takes several calls, a query sees the tokens of its own call alone: those of its
    window, which the joined event names and masks, or groups of tokens of another form, of which
    it has no tensors.
    """

    def __init__(self, order: Order, n_images: int) -> None:
        self.order, self.n_images = order, n_images
        self.events: list[AttentionEvent] = []

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
        events, self.events = self.events, []
        whole = self.n_images, event.query[1], n_tokens
        if all(one.n_keys == n_tokens for one in events):
            return AttentionEvent(whole, n_tokens, call=self._joined(events, None))
        labels = self._labels([one.n_keys for one in events])
        if labels is None:
            return events[0]
        window = tiles(labels.reshape(self.order.grid))
        if window is None:
            return AttentionEvent(whole, n_tokens, within="groups of tokens")
        seen = labels.unsqueeze(0) == labels.unsqueeze(1)
        return AttentionEvent(whole, n_tokens, call=self._joined(events, seen), window=window)

    def left(self) -> list[AttentionEvent]:
        """Events that never became complete."""
        return self.events

    def _labels(self, lengths: list[int]) -> Tensor | None:
        """Which call each cell of an image is in, (cells,) from 0; None where the images differ."""
        n_tokens, found, start = len(self.order.index), [], 0
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
        return x if self.order.plain else x.index_select(2, self.order.index.to(x.device))


def tiles(labels: Tensor) -> Grid | None:
    """Rows and columns of the windows that tile a grid of labels from its top left corner, those at
    the end cut; None where there is one window, or where the labels are no windows."""
    rows, cols = labels.shape
    sides = [
        next((i for i in range(1, len(line)) if line[i] != line[0]), len(line))
        for line in (labels[:, 0].tolist(), labels[0].tolist())
    ]
    number = torch.arange(rows)[:, None] // sides[0] * cols + torch.arange(cols) // sides[1]
    same = number.unique(return_inverse=True)[1].flatten()
    other = labels.flatten()
    pairs = torch.stack([same, other]).unique(dim=1).shape[1]
    alike = pairs == len(same.unique()) == len(other.unique())
    return (sides[0], sides[1]) if alike and pairs > 1 else None


Window = tuple[int, int, int]  # times, rows and columns of cells


class ClipCalls:
    """Lays the attention of one module out by the order of its tokens, with the interface of
    `JoinedCalls`: a call over the tokens of whole clips, or over their parts."""

    def __init__(self, order: ClipOrder, n_clips: int) -> None:
        self.order, self.n_clips = order, n_clips

    def add(self, event: AttentionEvent) -> AttentionEvent:
        """The event over (clips, heads, tokens), its window named; as it is where its queries are
        not the tokens of this order."""
        order, call = self.order, event.call
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
        if window is None or (order.n_prefix and order.prefix.shape[1] != folds):
            return AttentionEvent(whole, n_tokens, within="groups of tokens")
        return AttentionEvent(whole, n_tokens, call=FoldedCall(call, order, folds), window=window)

    def left(self) -> list[AttentionEvent]:
        """Events that never became complete: none."""
        return []


class FoldedCall(AttentionCall):
    """One attention over the parts of clips as one over whole clips: A is 0 between parts.

    A prefix token with a copy in every part attends, as the model means its copies, with the mean
    of their rows; a query sees the copy of its own part.
    """

    def __init__(self, inner: AttentionCall, order: ClipOrder, folds: int) -> None:
        self.inner, self.order, self.folds = inner, order, folds
        self.n_images, self.n_heads = inner.n_images // folds, inner.n_heads
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
        n, copies = self.order.n_prefix, self.order.prefix.shape[1]
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


def window_of(parts: Tensor) -> Window | None:
    """Times, rows and columns of the windows that tile a grid of numbers of parts (times, rows,
    cols) from its first cell, the last ones cut; None where they are no windows."""
    lines = parts[:, 0, 0], parts[0, :, 0], parts[0, 0]
    sides = [
        next((i for i in range(1, len(line)) if line[i] != line[0]), len(line)) for line in lines
    ]
    number = torch.zeros_like(parts)
    for axis, (n, side) in enumerate(zip(parts.shape, sides, strict=True)):
        shape = [1, 1, 1]
        shape[axis] = n
        number = number * n + (torch.arange(n) // side).reshape(shape)
    pairs = torch.stack([number.flatten(), parts.flatten()]).unique(dim=1).shape[1]
    alike = pairs == len(number.unique()) == len(parts.unique())
    return (sides[0], sides[1], sides[2]) if alike and pairs > 1 else None
