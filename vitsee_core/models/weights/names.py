"""Names of the tensors in a file of weights: wrappers' words and prefixes that stand before or
inside a model's own names, and several copies of the model beside each other.

A state dict that was saved from within a training loop calls `blocks.0.norm1.weight`
`module.backbone.blocks.0._fsdp_wrapped_module.norm1.weight`. The same cuts are made for weights of
every source. Prefixes are found from the model's own names; of several copies the one is taken that
authors evaluate, and averaged ones (EMA, momentum, target networks) only where nothing else is
there.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

# Words that wrappers put before or into the names of what they wrap: DataParallel, torch.compile,
# FSDP, activation checkpointing, Lightning Fabric.
WRAPPER_WORDS = frozenset(
    {
        "module",
        "_orig_mod",
        "_fsdp_wrapped_module",
        "_fpw_module",
        "_checkpoint_wrapped_module",
        "_forward_module",
    }
)
# Which of several copies is taken, the first of these that there is.
COPY_ORDER = ("teacher", "base_encoder", "online", "student")
# Words of averaged copies, between dots or underscores.
AVERAGED = frozenset(
    {
        "ema",
        "averaged",
        "average",
        "avg",
        "swa",
        "momentum",
        "target",
        "shadow",
        "k",
        "slow",
    }
)
# A group of names is another copy of the model if it has this share of what the fullest one has.
COPY_SHARE = 0.9
MIN_SHARE = 0.25  # below it, no names of the file are the model's
MAX_PREFIX_WORDS = 4
# DINOv2 trains with blocks in chunks, `blocks.CHUNK.BLOCK.`; BLOCK counts over all chunks.
_CHUNKED = re.compile(r"(^|\.)blocks\.(\d+)\.(\d+)\.")


@dataclass(frozen=True)
class Group:
    """Tensors whose names share a prefix.

    prefix: as in the file, with wrappers' words, "" or with a dot at its end. names: name without
    prefix and wrappers' words -> name in the file.
    """

    prefix: str
    names: dict[str, str]

    @property
    def label(self) -> str:
        """The prefix without wrappers' words and without the dot at its end, as --checkpoint-key
        takes it."""
        return ".".join(without_wrappers(self.prefix.split(".")))


def without_wrappers(words: Iterable[str], own_words: Collection[str] = ()) -> list[str]:
    """The words of a name that no wrapper put there. own_words: kept, because the model has them
    in its names."""
    return [
        word
        for word in words
        if word and (word not in WRAPPER_WORDS or word in own_words)
    ]


def is_averaged(name: str) -> bool:
    """Whether a key or prefix is that of averaged weights."""
    words = re.split(r"[._\d]+", name.lower())
    return any(word in AVERAGED or word in ("modelema", "emamodel") for word in words)


def copy_rank(prefix: str) -> tuple[bool, int]:
    """The place of a copy in the order of preference, the smallest first."""
    order = (i for i, word in enumerate(COPY_ORDER) if word in prefix)
    place = next(order, len(COPY_ORDER))
    return is_averaged(prefix) and place == len(COPY_ORDER), place


def unchunked(names: Sequence[str], own_names: Collection[str]) -> dict[str, str]:
    """The names -> names with `blocks.BLOCK.` in place of DINOv2's `blocks.CHUNK.BLOCK.`, where the
    model has no such names and no two tensors get the same name."""
    renamed = {name: _CHUNKED.sub(r"\1blocks.\3.", name) for name in names}
    own = any(_CHUNKED.search(name) for name in own_names)
    if own or len(set(renamed.values())) < len(renamed):
        return {name: name for name in names}
    return renamed


def groups_of(names: Sequence[str], own_names: Collection[str]) -> list[Group]:
    """The groups of names below whose prefix names of the model are found, with how many of these,
    the fullest first. Names in no group have no such ending. Of two tensors whose names differ by
    wrappers' words alone one is in a group of its own.
    """
    own_words = {word for name in own_names for word in name.split(".")}
    hits: dict[str, dict[str, str]] = defaultdict(dict)
    raw_prefixes: dict[str, Counter[str]] = defaultdict(Counter)
    for name in names:
        words = name.split(".")
        for n in range(len(words)):
            rest = ".".join(without_wrappers(words[n:], own_words))
            if rest not in own_names:
                continue
            while words[n] in WRAPPER_WORDS and words[n] not in own_words:
                n += 1
            raw = ".".join(words[:n]) + "." * bool(n)
            prefix = ".".join(without_wrappers(words[:n], own_words))
            if (
                rest in hits[prefix]
            ):  # `module.x` beside `x`: copies that wrappers alone tell apart
                prefix = raw
            hits[prefix][rest] = name
            raw_prefixes[prefix][raw] += 1
            break
    found = [
        Group(raw_prefixes[prefix].most_common(1)[0][0], inside)
        for prefix, inside in hits.items()
    ]
    return sorted(found, key=lambda group: -len(group.names))
