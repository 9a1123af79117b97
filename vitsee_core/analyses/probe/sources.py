"""Sources of a probe's features: a store, or a random generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vitsee_core.features import SiteFeatures
from vitsee_core.labels.labelled_rows import LabelledRows, random_pieces
from vitsee_core.types import Float32, Integers

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
        """The tokens in groups of about `n_tokens` that are read together."""

    def blocks(self, part: slice, places: Integers) -> Iterator[Block]:
        """(places, features (m, tokens of the part, dim)) until all of `places` are done.

        Args:
            part: of the tokens.
            places: which of the labelled images, ascending.
        """


@dataclass(frozen=True)
class Stored:
    """A store's features of the labelled rows `data`, read slab by slab, `jobs` at a time."""

    features: SiteFeatures
    data: LabelledRows
    jobs: int
    memory: int

    @property
    def n_tokens(self) -> int:
        return len(self.features.tokens)

    @property
    def dim(self) -> int:
        return self.features.dim

    def groups(self, n_tokens: int) -> list[slice]:
        return self.features.groups(n_tokens)

    def blocks(self, part: slice, places: Integers) -> Iterator[Block]:
        yield from self.data.read(
            self.features, places, part, jobs=self.jobs, memory=self.memory // 4
        )


@dataclass(frozen=True)
class Random:
    """Independent standard normal numbers instead of features: for n images, `n_tokens` vectors of
    `dim` channels each."""

    n: int
    n_tokens: int
    dim: int
    seed: Sequence[int]

    def groups(self, n_tokens: int) -> list[slice]:
        step = max(1, n_tokens)
        return [slice(a, min(a + step, self.n_tokens)) for a in range(0, self.n_tokens, step)]

    def blocks(self, part: slice, places: Integers) -> Iterator[Block]:
        wanted = np.zeros(self.n, bool)
        wanted[places] = True
        tokens = [
            random_pieces(self.n, self.dim, (*self.seed, token))
            for token in range(*part.indices(self.n_tokens))
        ]
        start = 0
        for pieces in zip(*tokens, strict=True):
            stop = start + len(pieces[0])
            rows = np.flatnonzero(wanted[start:stop])
            if len(rows):
                yield rows + start, np.stack([piece[rows] for piece in pieces], axis=1)
            start = stop


@dataclass(frozen=True)
class ConcatenatedTokens:
    """All tokens of a source as one vector."""

    source: Source
    n_tokens: int = 1

    @property
    def dim(self) -> int:
        return self.source.n_tokens * self.source.dim

    def groups(self, n_tokens: int) -> list[slice]:
        del n_tokens
        return [slice(0, 1)]

    def blocks(self, part: slice, places: Integers) -> Iterator[Block]:
        del part
        for where, x in self.source.blocks(slice(0, self.source.n_tokens), places):
            yield where, x.reshape(len(x), 1, -1)
