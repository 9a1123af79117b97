"""Sources of models, a module for each kind of name: what stands before the first colon says which.

A source's module, and the library behind it, is imported when one of its names is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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


def source_of(name: str) -> Source:
    """The source of what `name` stands for; nothing is made, read or fetched."""
    source: type[Source] = importlib.import_module(f"{__name__}.{_module_of(name)}").SOURCE
    return source(name)


def runs_code(name: str) -> bool:
    """Whether making what `name` stands for runs code that it points to: only a user may name such
    a model, on a command line or in Python, never a file that vitsee reads."""
    return _module_of(name) in _OF_OTHERS


def prefixes() -> list[str]:
    """What the names of sources begin with; those of timm's models and of files have no such."""
    return list(_PREFIXES)


def _module_of(name: str) -> str:
    for prefix, module in _PREFIXES.items():
        if name.startswith(prefix):
            return module
    return "python_file" if ".py:" in name or name.endswith(".py") else "timm"
