"""The attention of packed images: one call an image, joined to the attention of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from vitsee_core.models.attention_watch import AttentionEvent, KernelCall
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
