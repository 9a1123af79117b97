"""Command lines as lists of words: with options removed, or changed to resume a store."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence

# Of the command that began a store: what would repeat a part of the work only, or delete it.
_NOT_AGAIN = ("--shard", "--plan")


def without_options(words: Sequence[str], options: Collection[str]) -> tuple[str, ...]:
    """The words without every `OPTION VALUE` and `OPTION=VALUE` of these options; for one-dash
    options also `-oVALUE`."""
    return tuple(word for word, option in _by_option(words, options) if option is None)


def resuming(command: str, store: str) -> str | None:
    """The command line that completes a store, from the one that began it. Every word is quoted
    anew: an untrusted store cannot smuggle in a second command.

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
    kept = without_options(words, (*_NOT_AGAIN, "-o", "--output"))
    return shlex.join((*(word for word in kept if word != "--force"), "-o", store))


def _by_option(
    words: Sequence[str], options: Collection[str]
) -> Iterator[tuple[str, str | None]]:
    """Each word with the option that it belongs to."""
    rest = iter(words)
    for word in rest:
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        yield word, name if name in options else None
        if word in options:
            for value in rest:
                yield value, word
                break
