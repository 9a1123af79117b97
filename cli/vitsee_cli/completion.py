"""Shell completion of values that are neither paths nor click choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def one_of(words: Iterable[str] | Callable[[], Iterable[str]], *, files: bool = False) -> Complete:
    """Completes these words; files: also paths, if no word begins like that."""

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        known = words() if callable(words) else words
        found = [CompletionItem(word) for word in known if word.startswith(incomplete)]
        return found or ([CompletionItem(incomplete, type="file")] if files else [])

    return complete


def model_names() -> list[str]:
    """See `known_names`; torch and timm are not imported."""
    from vitsee_core.models.sources import known_names

    return known_names()
