"""Attention in which some queries do not attend to some keys: the scores become -inf, and the rows
of weights are renormalised by the softmax itself.

A TorchFunctionMode inside that of AttentionWatch, which so sees the changed arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitsee_core.models.attention_watch import KERNEL, KERNEL_ARGS, SOFTMAX
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.interventions.tokens import places_of
from vitsee_core.models.multihead import MULTIHEAD, attend
from vitsee_stores.layout import TokenLayout


def blocked_pairs(what: str, layout: TokenLayout, said: str) -> NDArray[np.bool_]:
    """(queries, keys) which pairs `QUERIES<-KEYS`, `own` or `distance>K` blocks: distances are
    Euclidean, in cells of the grid, between patches. `said` begins the errors.

    Raises:
        ModelError: the layout has no such tokens.
    """
    n = layout.n_tokens
    pairs = np.zeros((n, n), np.bool_)
    if what == "own":
        np.fill_diagonal(pairs, True)
    elif what.startswith("distance>"):
        patches = places_of("patches", layout, said)
        assert layout.grid is not None
        cells = np.stack(np.divmod(np.arange(len(patches)), layout.grid[1]), 1)
        gaps = np.linalg.norm(cells[:, None] - cells, axis=-1)
        pairs[np.ix_(patches, patches)] = gaps > float(what.partition(">")[2])
    else:
        queries, keys = (
            np.concatenate([places_of(word.strip(), layout, said) for word in words.split(",")])
            for words in what.split("<-")
        )
        pairs[np.ix_(queries, keys)] = True
    return pairs


def refuse_empty_rows(pairs: NDArray[np.bool_], layout: TokenLayout, said: str) -> None:
    """Raise ModelError if a query would be left without any key."""
    for query in np.flatnonzero(pairs.all(1))[:1]:
        name = layout.prefix[query] if query < layout.n_prefix else "a patch"
        raise ModelError(f"{said}: {name} would be left without any token to attend to")


class BlockedAttention(TorchFunctionMode):
    """While it is entered, the attention over as many tokens as `pairs` (tokens, tokens; True where
    blocked) has goes without these; `calls` counts it."""

    def __init__(self, pairs: NDArray[np.bool_]) -> None:
        super().__init__()
        self.blocked = torch.from_numpy(pairs)
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is MULTIHEAD:
            with self:
                return attend(*args, **kwargs)
        if func is KERNEL:
            arguments = dict(zip(KERNEL_ARGS, args, strict=False)) | kwargs
            query, key = arguments["query"], arguments["key"]
            if (query.shape[-2], key.shape[-2]) == self.blocked.shape:
                return func(**self._masked(arguments))
        elif func in SOFTMAX:
            given = args[0] if args else kwargs["input"]
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if given.shape[-2:] == self.blocked.shape and dim in (-1, given.ndim - 1):
                self.calls += 1
                given = given.masked_fill(self._on(given), float("-inf"))
                return func(given, *args[1:], **{k: x for k, x in kwargs.items() if k != "input"})
        return func(*args, **kwargs)

    def _on(self, x: Tensor) -> Tensor:
        self.blocked = self.blocked.to(x.device)
        return self.blocked

    def _masked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The kernel's arguments with the pairs in its mask."""
        self.calls += 1
        blocked = self._on(arguments["query"])
        if arguments.get("is_causal"):
            blocked = blocked | torch.ones_like(blocked).triu(1)
        mask = arguments.get("attn_mask")
        if mask is None:
            mask = ~blocked
        elif mask.dtype == torch.bool:
            mask = mask & ~blocked
        else:
            mask = mask.masked_fill(blocked, float("-inf"))
        return {**arguments, "attn_mask": mask, "is_causal": False}
