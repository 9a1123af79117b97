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
    """Tensors of a file whose names share a prefix.

    Attributes:
        prefix: the prefix as in the file, with wrappers' words; "" or with a dot at its end.
        names: name without prefix and wrappers' words -> name in the file.
    """

    prefix: str
    names: dict[str, str]

    @property
    def label(self) -> str:
        """The prefix as --checkpoint-key takes it, without wrappers' words and the last dot."""
        return ".".join(without_wrappers(self.prefix.split(".")))


def without_wrappers(
    words: Iterable[str], model_words: Collection[str] = ()
) -> list[str]:
    """Return the words of a name that no wrapper put there.

    Args:
        words: the name, split at its dots.
        model_words: words that are kept, because the model has them in its names.
    """
    return [
        word
        for word in words
        if word and (word not in WRAPPER_WORDS or word in model_words)
    ]


def is_averaged(name: str) -> bool:
    """Return whether a key or prefix is that of averaged weights."""
    words = re.split(r"[._\d]+", name.lower())
    return any(word in AVERAGED or word in ("modelema", "emamodel") for word in words)


def preferred_copy(groups: Sequence[Group]) -> tuple[Group, list[Group]]:
    """Return the copy of the model that its authors evaluate, and the other copies.

    Args:
        groups: groups of names, the fullest first; those with far fewer names are not copies.
    """
    copies = [
        group for group in groups if len(group.names) >= COPY_SHARE * len(groups[0].names)
    ]
    chosen = min(copies, key=lambda group: (_copy_rank(group.prefix), len(group.prefix)))
    return chosen, [group for group in copies if group is not chosen]


def _copy_rank(prefix: str) -> tuple[bool, int]:
    """Return the sort key of a copy: preferred copies first, averaged weights last."""
    ranks = (rank for rank, word in enumerate(COPY_ORDER) if word in prefix)
    rank = next(ranks, len(COPY_ORDER))
    # A teacher is an average of its student, and yet what its authors evaluate.
    return is_averaged(prefix) and rank == len(COPY_ORDER), rank


def unchunked(names: Sequence[str], model_names: Collection[str]) -> dict[str, str]:
    """Return name -> name with `blocks.BLOCK.` in place of DINOv2's `blocks.CHUNK.BLOCK.`.

    Names stay as they are where the model itself has such names, or where two tensors would get
    the same name.
    """
    renamed = {name: _CHUNKED.sub(r"\1blocks.\3.", name) for name in names}
    model_is_chunked = any(_CHUNKED.search(name) for name in model_names)
    if model_is_chunked or len(set(renamed.values())) < len(renamed):
        return {name: name for name in names}
    return renamed


def groups_of(names: Sequence[str], model_names: Collection[str]) -> list[Group]:
    """Return the file's names that end in a name of the model, grouped by what stands before it,
    the fullest group first.

    Names without such an ending are in no group. Where the names of two tensors differ by
    wrappers' words alone, one of them is in a group of its own.
    """
    model_words = {word for name in model_names for word in name.split(".")}
    names_by_prefix: dict[str, dict[str, str]] = defaultdict(dict)
    raw_prefixes: dict[str, Counter[str]] = defaultdict(Counter)
    for name in names:
        words = name.split(".")
        # From the longest ending on: the first that is a name of the model counts.
        for n in range(len(words)):
            ending = ".".join(without_wrappers(words[n:], model_words))
            if ending not in model_names:
                continue
            # Wrappers' words in front of the ending belong to the prefix.
            while words[n] in WRAPPER_WORDS and words[n] not in model_words:
                n += 1
            raw_prefix = "".join(f"{word}." for word in words[:n])
            prefix = ".".join(without_wrappers(words[:n], model_words))
            if ending in names_by_prefix[prefix]:
                # `module.x` beside `x`: copies that wrappers alone tell apart.
                prefix = raw_prefix
            names_by_prefix[prefix][ending] = name
            raw_prefixes[prefix][raw_prefix] += 1
            break
    groups = []
    for prefix, names_below in names_by_prefix.items():
        [(raw_prefix, _)] = raw_prefixes[prefix].most_common(1)
        groups.append(Group(raw_prefix, names_below))
    return sorted(groups, key=lambda group: -len(group.names))
