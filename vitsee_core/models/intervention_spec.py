"""The grammar of interventions; knows no model and no store.

replace          TOKENS@SITES=VALUES      cls,reg0@blocks.6..11.out=mean:base.zarr
ablate-heads     BLOCKS:HEAD,HEAD[=VALUES]   blocks.3:0,5=zero
block-attention  QUERIES<-KEYS@BLOCKS     cls<-patches@blocks.6..11
                 own@BLOCKS, distance>K@BLOCKS
registers        N:NEURONS@SITE=outliers:STORE   1:10@blocks.8.out=outliers:base.zarr
                 N:NEURONS@SITE=random:STORE

VALUES is zero, or mean:STORE, noise:STORE, shuffle:STORE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitsee_stores.errors import VitseeError
from vitsee_stores.url import is_url

REFERRING = ("mean", "noise", "shuffle")
COUNTED = ("outliers", "random")
OPTIONS = {
    "replace": "--replace",
    "heads": "--ablate-heads",
    "attention": "--block-attention",
}
OPTIONS |= {"registers": "--registers"}
_STORED = re.compile(rf"(.*=(?:{'|'.join((*REFERRING, *COUNTED))}):)(.+)")


class InterventionError(VitseeError):
    """A text that is no intervention, whatever the model."""

    exit_code = 2


@dataclass(frozen=True)
class Values:
    """The values that replace activations. kind: "zero", "mean", "noise" or "shuffle"; store: where
    the plain activations are, "" for zero."""

    kind: str
    store: str = ""


ZERO = Values("zero")


@dataclass(frozen=True)
class Replacement:
    """Tokens of some sites. tokens: kinds of tokens, or `outliers:N` or `random:N` alone."""

    text: str
    tokens: tuple[str, ...]
    sites: str
    values: Values


@dataclass(frozen=True)
class HeadAblation:
    """The outputs of some heads, before the projection, at every token."""

    text: str
    blocks: str
    heads: tuple[int, ...]
    values: Values


@dataclass(frozen=True)
class Block:
    """Keys that queries must not attend to. what: `QUERIES<-KEYS`, `own` or `distance>K`."""

    text: str
    what: str
    blocks: str


@dataclass(frozen=True)
class Registers:
    """Tokens added to the input, to which neurons of MLPs move their activations.

    n: of tokens. n_neurons: how many of those most active at the outliers of `site` (values.kind
    "outliers"), found in the store; or as many others of the same layers ("random").
    """

    text: str
    n: int
    n_neurons: int
    site: str
    values: Values


Intervention = Replacement | HeadAblation | Block | Registers


def parse(
    replace: Sequence[str] = (),
    ablate_heads: Sequence[str] = (),
    block_attention: Sequence[str] = (),
    registers: Sequence[str] = (),
) -> tuple[Intervention, ...]:
    """The interventions that the options name, in their order.

    Raises:
        InterventionError: a text that cannot be read; says what was expected. registers twice.
    """
    if len(registers) > 1:
        raise InterventionError(
            f"--registers is given {len(registers)} times; expected one, as in "
            "2:10@blocks.8.out=outliers:STORE"
        )
    return (
        *map(_replacement, replace),
        *map(_ablation, ablate_heads),
        *map(_block, block_attention),
        *map(_registers, registers),
    )


def placed(texts: Sequence[str]) -> tuple[str, ...]:
    """The same with the stores' absolute paths, for another working directory."""
    found = []
    for text in texts:
        match = _STORED.fullmatch(text)
        if match and not is_url(match[2]):
            text = match[1] + os.fspath(Path(match[2]).absolute())
        found.append(text)
    return tuple(found)


def _replacement(text: str) -> Replacement:
    place, _, values = text.partition("=")
    words, at, sites = place.partition("@")
    tokens = tuple(word.strip() for word in words.split(","))
    if not (at and sites and all(tokens)):
        raise _malformed(
            "--replace", text, "TOKENS@SITES=VALUES, as in cls@blocks.6.out=zero"
        )
    for word in tokens:
        kind, colon, number = word.partition(":")
        if (colon or kind in COUNTED) and not (
            kind in COUNTED
            and re.fullmatch("[1-9][0-9]{0,8}", number)
            and len(tokens) == 1
        ):
            raise _malformed(
                "--replace", text, "outliers:N or random:N alone, N from 1 on"
            )
    return Replacement(text, tokens, sites, _values("--replace", text, values))


def _ablation(text: str) -> HeadAblation:
    place, equals, values = text.partition("=")
    blocks, _, numbers = place.rpartition(":")
    if not blocks or not re.fullmatch("[0-9]{1,6}(,[0-9]{1,6})*", numbers):
        raise _malformed(
            "--ablate-heads", text, "BLOCK:HEAD,HEAD[=VALUES], as in blocks.3:0,5"
        )
    heads = tuple(sorted({int(number) for number in numbers.split(",")}))
    found = _values("--ablate-heads", text, values) if equals else ZERO
    return HeadAblation(text, blocks, heads, found)


def _block(text: str) -> Block:
    what, at, blocks = text.rpartition("@")
    both = re.fullmatch("[^<>@]+<-[^<>@]+", what)
    if not (
        at
        and blocks
        and (both or what == "own" or re.fullmatch(r"distance>\d+(\.\d+)?", what))
    ):
        expected = "QUERIES<-KEYS@BLOCKS, own@BLOCKS or distance>K@BLOCKS, as in"
        raise _malformed(
            "--block-attention", text, f"{expected} 'cls<-patches@blocks.6..11'"
        )
    return Block(text, what, blocks)


def _registers(text: str) -> Registers:
    number = "[1-9][0-9]{0,5}"
    match = re.fullmatch(
        rf"({number}):({number})@([^=]+)=({'|'.join(COUNTED)}):(.+)", text
    )
    if match is None:
        expected = (
            "N:NEURONS@SITE=outliers:STORE or =random:STORE, both numbers from 1 on"
        )
        raise _malformed(
            "--registers", text, f"{expected}, as in 1:10@blocks.8.out=outliers:base.zarr"
        )
    return Registers(
        text, int(match[1]), int(match[2]), match[3], Values(match[4], match[5])
    )


def _values(option: str, text: str, values: str) -> Values:
    kind, colon, store = values.partition(":")
    if (kind == "zero" and not colon) or (kind in REFERRING and store):
        return Values(kind, store)
    choices = ", ".join(f"{word}:STORE" for word in REFERRING)
    raise _malformed(
        option, text, f"the values zero, {choices}, with STORE a plain extraction"
    )


def _malformed(option: str, text: str, expected: str) -> InterventionError:
    return InterventionError(f"{option} {text!r}; expected {expected}")
