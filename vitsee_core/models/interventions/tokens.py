"""Which tokens of a site an intervention is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.intervention_spec import COUNTED
from vitsee_stores.layout import TokenLayout

Places = NDArray[np.int64]


@dataclass(frozen=True)
class TokenChoice:
    """The same tokens of every image (`fixed`), or of each image `n` patch tokens: those of largest
    norm ("outliers"), or drawn for each image ("random")."""

    layout: TokenLayout
    fixed: Places
    kind: str = ""
    n: int = 0

    @property
    def of_prefix(self) -> bool:
        """Whether they are prefix tokens in every image."""
        return not self.kind and bool((self.fixed < self.layout.n_prefix).all())

    def of(self, x: Tensor, draws: Sequence[np.random.Generator]) -> Places:
        """(images, chosen) places of the tokens of x (images, tokens, dim); draws: one generator
        for each image."""
        if self.kind == "outliers":
            norms = torch.linalg.vector_norm(x[:, self.layout.n_prefix :].float(), dim=-1)
            # Stable, so that equal norms give the same tokens on every device.
            order = norms.sort(dim=1, descending=True, stable=True).indices[:, : self.n]
            return order.cpu().numpy() + self.layout.n_prefix
        if self.kind == "random":
            n_body = self.layout.n_body
            drawn = [draw.choice(n_body, self.n, replace=False) for draw in draws]
            return np.stack(drawn) + self.layout.n_prefix
        return np.repeat(self.fixed[None], len(x), axis=0)


def choose_tokens(words: Sequence[str], layout: TokenLayout, what: str) -> TokenChoice:
    """The tokens that these words name in a layout; `what` begins the errors.

    Raises:
        ModelError: the layout has no such tokens, or fewer.
    """
    kind, _, number = words[0].partition(":")
    if kind in COUNTED:
        if layout.grid is None or int(number) > layout.n_body:
            raise ModelError(f"{what}: {words[0]}, and there are {_patches(layout)}")
        return TokenChoice(layout, np.zeros(0, np.int64), kind, int(number))
    places = sorted({int(place) for word in words for place in places_of(word, layout, what)})
    return TokenChoice(layout, np.array(places, np.int64))


def places_of(word: str, layout: TokenLayout, what: str) -> Places:
    """The places of one kind of tokens: `all`, `patches`, `prefix`, `registers` (reg0, reg1, ...),
    or one prefix token by its name (`cls`).

    Raises:
        ModelError: the layout has none of these.
    """
    every = np.arange(layout.n_tokens)
    found = every[:0]
    if word == "all":
        found = every
    elif word == "patches" and layout.grid is not None:
        found = every[layout.n_prefix :]
    elif word == "prefix":
        found = every[: layout.n_prefix]
    elif word == "registers":
        found = np.array([i for i, name in enumerate(layout.prefix) if name.startswith("reg")], int)
    elif word in layout.prefix:
        found = every[layout.prefix.index(word) :][:1]
    if not len(found):
        prefix = (
            f"prefix tokens {', '.join(layout.prefix)}" if layout.prefix else "no prefix tokens"
        )
        raise ModelError(
            f"{what}: there are no tokens {word!r}; there are {prefix} and {_patches(layout)}"
        )
    return found


def _patches(layout: TokenLayout) -> str:
    if layout.grid is None:
        return f"{layout.n_body} other tokens on no grid"
    return f"{layout.grid[0]}x{layout.grid[1]} patches"
