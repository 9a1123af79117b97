"""Sources of models, a module for each kind of name: what stands before the first colon says which.

A source's module, and the library behind it, is imported when one of its names is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitsee_core.models.sources.base import Source

# What a name begins with -> the module whose `SOURCE` it is.
_PREFIXES = {
    "demo:": "demo",
    "torchvision:": "torchvision",
    "torchhub:": "torchhub",
    "transformers:": "transformers",
    "open_clip:": "open_clip",
}
_OF_OTHERS = ("python_file", "torchhub")  # these run code that the name points to
_TRUST = "trust-remote-code"  # and so does this option


def source_of(name: str, options: Mapping[str, Any] | None = None) -> Source:
    """The source of what `name` stands for, with those of the options of `load_model` that are a
    source's `Choices`; nothing is made, read or fetched."""
    from vitsee_core.models.sources.base import Choices

    source: type[Source] = importlib.import_module(f"{__name__}.{_module_of(name)}").SOURCE
    given = {key: (options or {}).get(key) for key in Choices.__dataclass_fields__}
    return source(name, Choices(**{key: x for key, x in given.items() if x is not None}))


def runs_code(word: str) -> bool:
    """Whether a word of a command line, a model's name or an option, makes code run that it points
    to: only a user may give such a word, on a command line or in Python, never a file that vitsee
    reads."""
    return _module_of(word) in _OF_OTHERS or _TRUST in word


def prefixes() -> list[str]:
    """The prefixes of names, one per source; timm's models and files have none."""
    return list(_PREFIXES)


def known_names() -> list[str]:
    """The names that can be completed without making or importing anything: the demo's models, the
    prefixes of other sources, timm's architectures."""
    from vitsee_core import demo
    from vitsee_core.models.sources.timm_names import registered

    others = [prefix for prefix in _PREFIXES if prefix != "demo:"]
    return [*(f"demo:{name}" for name in demo.models()), *others, *registered()]


def _module_of(name: str) -> str:
    for prefix, module in _PREFIXES.items():
        if name.startswith(prefix):
            return module
    return "python_file" if ".py:" in name or name.endswith(".py") else "timm"
