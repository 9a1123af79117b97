"""Sources of models, a class for each kind of name: what stands before the first colon says which.

A source's module, and the library behind it, is imported when one of its names is used.

    base                  the questions that vitsee asks of every source, and pieces of error lines
    transforms            how a model's images are prepared
    timm, timm_create     timm's models, the demo's among them; how they are made
    tagged                torchvision's and open_clip's
    python_file           a user's own file, and repositories with a hubconf.py; `several_modules`
                          which of the networks that these give
    transformers          those of transformers: `transformers_classes` which there are, one part of
                          a model and its weights; `transformers_inputs` how images go in;
                          `processors` their image processors
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitsee_core.models.sources.base import Source

# What a name begins with -> the module and the class of its source.
_PREFIXES = {
    "demo:": ("timm", "DemoSource"),
    "torchvision:": ("tagged", "TorchvisionSource"),
    "torchhub:": ("python_file", "TorchhubSource"),
    "transformers:": ("transformers", "TransformersSource"),
    "open_clip:": ("tagged", "OpenClipSource"),
}
_TRUST = "trust-remote-code"  # an option that makes code of a repository run


def source_of(name: str, options: Mapping[str, Any] | None = None) -> Source:
    """The source of what `name` stands for, with those of the options of `load_model` that are a
    source's `Choices`; nothing is made, read or fetched."""
    from vitsee_core.models.sources.base import Choices

    module, kind = _place(name)
    source: type[Source] = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    given = {key: (options or {}).get(key) for key in Choices.__dataclass_fields__}
    return source(name, Choices(**{key: x for key, x in given.items() if x is not None}))


def runs_code(word: str) -> bool:
    """Whether a word of a command line, a model's name or an option, makes code run that it points
    to: only a user may give such a word, on a command line or in Python, never a file that vitsee
    reads."""
    return _place(word)[0] == "python_file" or _TRUST in word


def has_parts(name: str) -> bool:
    """Whether `#` behind a name chooses a part of what is made."""
    return _place(name)[0] in ("python_file", "transformers")


def prefixes() -> list[str]:
    """The prefixes of names, one per source; timm's models and files have none."""
    return list(_PREFIXES)


def known_names() -> list[str]:
    """The names that can be completed without making or importing anything: the demo's models, the
    prefixes of other sources, timm's architectures, which are read from its files."""
    from vitsee_core import demo

    others = [prefix for prefix in _PREFIXES if prefix != "demo:"]
    spec = importlib.util.find_spec("timm")
    folders = spec.submodule_search_locations or () if spec is not None else ()
    texts = [
        f.read_text("utf-8") for d in folders for f in Path(d, "models").glob("*.py")
    ]
    own = re.compile(r"^@register_model\s+def (\w+)", re.MULTILINE)
    registered = sorted({name for text in texts for name in own.findall(text)})
    return [*(f"demo:{name}" for name in demo.models()), *others, *registered]


def _place(name: str) -> tuple[str, str]:
    """The module and the class of the source of a name."""
    for prefix, place in _PREFIXES.items():
        if name.startswith(prefix):
            return place
    own = ".py:" in name or name.endswith(".py")
    if own:
        return ("python_file", "FileSource")
    return ("timm", "TimmSource")
