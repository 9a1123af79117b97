"""Sources of models, a class for each kind of name: what stands before the first colon says which.

A source's module, and the library behind it, is imported when one of its names is used.

    base                  the questions that vitsee asks of every source, and pieces of error lines
    transforms            how a model's images are prepared
    timm, timm_create     timm's models, the demo's among them; how they are made
    tagged                torchvision's and open_clip's
    python_file           a user's own file, and repositories with a hubconf.py; `several_modules`
                          chooses among the networks that these return
    transformers          those of transformers: `transformers_checkpoint` reads what a name points
                          to, `transformers_classes` makes classes and reads a tower's weights,
                          `transformers_inputs` lets images go in
    processors            image processors of transformers: `processor_record` reads what they say,
                          `native_sizes` finds their sizes at native resolution
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

# Beginning of a name -> (module, class) of its source.
_PREFIXES = {
    "demo:": ("timm", "DemoSource"),
    "torchvision:": ("tagged", "TorchvisionSource"),
    "torchhub:": ("python_file", "TorchhubSource"),
    "transformers:": ("transformers", "TransformersSource"),
    "open_clip:": ("tagged", "OpenClipSource"),
}
_TRUST = "trust-remote-code"  # an option that makes code of a repository run


def source_of(name: str, options: Mapping[str, Any] | None = None) -> Source:
    """Return the source of a model's name; nothing is made, read or fetched.

    options: those of `load_model`, of which a source takes its `Choices`.
    """
    from vitsee_core.models.sources.base import Choices

    module_name, class_name = _module_and_class(name)
    module = importlib.import_module(f"{__name__}.{module_name}")
    source_class: type[Source] = getattr(module, class_name)
    choices = {}
    for key in Choices.__dataclass_fields__:
        value = (options or {}).get(key)
        if value is not None:
            choices[key] = value
    return source_class(name, Choices(**choices))


def runs_code(word: str) -> bool:
    """Return whether a word of a command line, a model's name or an option, makes code run that it
    points to. Only a user may give such a word, on a command line or in Python, never a file that
    vitsee reads."""
    module_name, _ = _module_and_class(word)
    return module_name == "python_file" or _TRUST in word


def has_parts(name: str) -> bool:
    """Return whether `#` behind a name chooses a part of what is made."""
    module_name, _ = _module_and_class(name)
    return module_name in ("python_file", "transformers")


def prefixes() -> list[str]:
    """Return the prefixes of names, one per source; timm's models and files have none."""
    return list(_PREFIXES)


def known_names() -> list[str]:
    """Return the names that can be completed without making or importing anything: the demo's
    models, the prefixes of other sources, and timm's architectures.

    timm's architectures are read from the text of its files: importing it takes seconds.
    """
    from vitsee_core import demo

    others = [prefix for prefix in _PREFIXES if prefix != "demo:"]
    spec = importlib.util.find_spec("timm")
    folders = spec.submodule_search_locations or () if spec is not None else ()
    definition = re.compile(r"^@register_model\s+def (\w+)", re.MULTILINE)
    names: set[str] = set()
    for folder in folders:
        for file in Path(folder, "models").glob("*.py"):
            names.update(definition.findall(file.read_text("utf-8")))
    registered = sorted(names)
    return [*(f"demo:{name}" for name in demo.models()), *others, *registered]


def _module_and_class(name: str) -> tuple[str, str]:
    """Return the module of this package and the class that are the source of a name."""
    for prefix, module_and_class in _PREFIXES.items():
        if name.startswith(prefix):
            return module_and_class
    if ".py:" in name or name.endswith(".py"):
        return ("python_file", "FileSource")
    return ("timm", "TimmSource")
