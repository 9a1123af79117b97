"""Where probes get their features from: a store, or a random generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vitsee_core.features import SiteFeatures
from vitsee_core.truth.labels.labelled_rows import LabelledRows, random_pieces
from vitsee_core.types import Float32, Integers

# Indices (m,) of images, and their features (m, tokens, dim).
Block = tuple[Integers, Float32]


class Source(Protocol):
    """Features of some labelled images, one vector for each of `n_tokens` tokens."""

    @property
    def n_tokens(self) -> int:
        """Number of vectors per image."""

    @property
    def dim(self) -> int:
        """Channels of a vector."""

    def groups(self, n_tokens: int) -> list[slice]:
        """Return the tokens in groups of about `n_tokens` that are read together."""

    def blocks(self, token_slice: slice, indices: Integers) -> Iterator[Block]:
        """Yield blocks (indices (m,), features (m, tokens of the slice, dim)) of some images.

        Args:
            token_slice: which tokens.
            indices: which of the labelled images, ascending.
        """


@dataclass(frozen=True)
class Stored:
    """Reads the features of labelled rows from a store, slab by slab.

    Attributes:
        features: the features of one site.
        data: the labelled rows of the store.
        jobs: slabs that are read at a time.
        memory: bytes of the whole fit; a quarter of them is for reading.
    """

    features: SiteFeatures
    data: LabelledRows
    jobs: int
    memory: int

    @property
    def n_tokens(self) -> int:
        """Number of vectors per image."""
        return len(self.features.tokens)

    @property
    def dim(self) -> int:
        """Channels of a vector."""
        return self.features.dim

    def groups(self, n_tokens: int) -> list[slice]:
        """Return groups of about `n_tokens` tokens that follow the store's chunks."""
        return self.features.groups(n_tokens)

    def blocks(self, token_slice: slice, indices: Integers) -> Iterator[Block]:
        """Yield (indices (m,), features (m, tokens of the slice, dim)), one slab at a time."""
        yield from self.data.read(
            self.features, indices, token_slice, jobs=self.jobs, memory=self.memory // 4
        )


@dataclass(frozen=True)
class Random:
    """Draws independent standard normal numbers in place of features.

    Attributes:
        n: number of images.
        n_tokens: vectors per image.
        dim: channels of a vector.
        seed: with a token's number it seeds the generator of that token.
    """

    n: int
    n_tokens: int
    dim: int
    seed: Sequence[int]

    def groups(self, n_tokens: int) -> list[slice]:
        """Return the tokens in groups of `n_tokens`."""
        step = max(1, n_tokens)
        return [
            slice(start, min(start + step, self.n_tokens))
            for start in range(0, self.n_tokens, step)
        ]

    def blocks(self, token_slice: slice, indices: Integers) -> Iterator[Block]:
        """Yield (indices (m,), features (m, tokens of the slice, dim)).

        Numbers are drawn for every image and those of other images are dropped, so that an image
        has the same features whichever images are read with it.
        """
        is_read = np.zeros(self.n, bool)
        is_read[indices] = True
        pieces_of_tokens = [
            random_pieces(self.n, self.dim, (*self.seed, token))
            for token in range(*token_slice.indices(self.n_tokens))
        ]
        start = 0
        for pieces in zip(*pieces_of_tokens, strict=True):
            stop = start + len(pieces[0])
            rows = np.flatnonzero(is_read[start:stop])
            if len(rows):
                yield rows + start, np.stack([piece[rows] for piece in pieces], axis=1)
            start = stop


@dataclass(frozen=True)
class ConcatenatedTokens:
    """All tokens of another source, side by side as one vector."""

    source: Source
    n_tokens: int = 1

    @property
    def dim(self) -> int:
        """Channels of all tokens together."""
        return self.source.n_tokens * self.source.dim

    def groups(self, n_tokens: int) -> list[slice]:
        """Return a single group, as there is only one vector per image."""
        del n_tokens
        return [slice(0, 1)]

    def blocks(self, token_slice: slice, indices: Integers) -> Iterator[Block]:
        """Yield (indices (m,), features (m, 1, dim)) of some images."""
        del token_slice
        every_token = slice(0, self.source.n_tokens)
        for block_indices, x in self.source.blocks(every_token, indices):
            yield block_indices, x.reshape(len(x), 1, -1)
