"""timm's architectures by name."""

from __future__ import annotations

import importlib.util
import re
from fnmatch import fnmatchcase
from pathlib import Path

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.errors import near_names


def registered() -> list[str]:
    """timm's architectures, read from its files without importing it; sorted."""
    spec = importlib.util.find_spec("timm")
    folders = spec.submodule_search_locations or () if spec is not None else ()
    texts = [f.read_text("utf-8") for d in folders for f in Path(d, "models").glob("*.py")]
    own = re.compile(r"^@register_model\s+def (\w+)", re.MULTILINE)
    return sorted({name for text in texts for name in own.findall(text)})


def matching(pattern: str) -> dict[str, list[str]]:
    """Architecture -> tags of its pretrained weights, as far as they match a glob of architectures
    or of `NAME.TAG`; a ModelError where nothing does."""
    import timm

    tags: dict[str, list[str]] = {name: [] for name in timm.list_models()}
    for name in timm.list_pretrained():
        architecture, _, tag = name.partition(".")
        tags.setdefault(architecture, []).append(tag)
    wanted, dot, wanted_tag = pattern.partition(".")
    found = {}
    for name, own in tags.items():
        kept = [tag for tag in own if not dot or fnmatchcase(tag, wanted_tag)]
        if fnmatchcase(name, wanted) and (kept or not dot):
            found[name] = kept
    if not found:
        if Path(pattern).is_dir():
            raise ModelError(f"{pattern} is a folder; expected a model's name, or a pattern")
        near = near_names(wanted, [*tags])
        raise ModelError(f"no timm model matches {pattern!r}{near} (a part of a name: '*PART*')")
    return found
