"""Command lines as lists of words: with options removed, or changed to resume a store."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence

# Options of the command that began a store that would do only a part of the work, or none.
_NOT_REPEATED = ("--shard", "--plan")


def without_options(words: Sequence[str], options: Collection[str]) -> tuple[str, ...]:
    """Return the words without these options and their values.

    An option may be written as `OPTION VALUE`, `OPTION=VALUE`, or, with one dash, `-oVALUE`.
    """
    return tuple(
        word for word, option in _words_with_options(words, options) if option is None
    )


def resuming(command: str, store: str) -> str | None:
    """Return the command line that completes a store, from the one that began it.

    Every word is quoted anew: an untrusted store cannot smuggle in a second command.

    Args:
        command: as recorded in the store.
        store: the store's current name.

    Returns:
        The line; None if no command line made the store.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    if words[:1] != ["vitsee"] or "extract" not in words:
        return None
    if "--" in words:  # positional arguments follow
        return None
    kept_words = without_options(words, (*_NOT_REPEATED, "-o", "--output"))
    kept_words = tuple(word for word in kept_words if word != "--force")
    return shlex.join([*kept_words, "-o", store])


def _words_with_options(
    words: Sequence[str], options: Collection[str]
) -> Iterator[tuple[str, str | None]]:
    """Yield (word, option) for each word: the option that it is, or is the value of; else None."""
    rest = iter(words)
    for word in rest:
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        yield word, name if name in options else None
        if word in options:
            for value in rest:
                yield value, word
                break
