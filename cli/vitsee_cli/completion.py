"""Shell completion of values that are neither paths nor click choices."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path

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
    """The demo's models, the prefixes of other sources, and timm's architectures, read from timm's
    files without importing it."""
    from vitsee_core import demo
    from vitsee_core.models.sources import prefixes

    spec = importlib.util.find_spec("timm")
    folders = spec.submodule_search_locations or () if spec is not None else ()
    texts = [f.read_text("utf-8") for d in folders for f in Path(d, "models").glob("*.py")]
    registered = re.compile(r"^@register_model\s+def (\w+)", re.MULTILINE)
    names = {name for text in texts for name in registered.findall(text)}
    others = [prefix for prefix in prefixes() if prefix != "demo:"]
    return [*(f"demo:{name}" for name in demo.models()), *others, *sorted(names)]
