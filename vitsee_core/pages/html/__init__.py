"""The parts that pages for a browser share: style, modules of script, and how these get into one
file.

Script is written as ES modules, so that types and tests know who uses what; a page has them one
after another in one `<script type="module">`, each behind those that it imports, without the lines
that import and the words that export. So no two of them may have one name at the top.
"""

from __future__ import annotations

import base64
import hashlib
import json
import posixpath
import re
from importlib import resources
from typing import Any

from vitsee_core.tables.text import visible

_IMPORT = re.compile(r'^import \{[^}]*\} from "(\.[^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async |function|class|const)", re.MULTILINE)


def asset(place: str) -> str:
    """The text of a file by its path in the package, as `pages/html/assets/base.css`."""
    return resources.files("vitsee_core").joinpath(*place.split("/")).read_text("utf-8")


def modules(*places: str) -> dict[str, str]:
    """Path -> text of modules of script and all that they import, what is imported first."""
    found: dict[str, str] = {}

    def add(path: str) -> None:
        text = asset(path)
        for target in _IMPORT.findall(text):
            needed = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if needed not in found:
                add(needed)
        found[path] = text

    for place in places:
        if place not in found:
            add(place)
    return found


def script(*places: str) -> str:
    """Modules and all that they import as one."""
    return "\n".join(
        _EXPORT.sub("", _IMPORT.sub("", text)) for text in modules(*places).values()
    )


def csp_hash(text: str) -> str:
    """The SHA-256 in base64 by which a page's content policy names a script or style."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def json_for_html(value: Any) -> str:
    """JSON that no HTML parser takes for anything else."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def template(place: str) -> Any:
    """A template of a page; what it is given is escaped, and `visible` is a filter of it."""
    from jinja2 import BaseLoader, Environment, StrictUndefined

    environment = Environment(
        loader=BaseLoader(),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = lambda text: visible(str(text))
    return environment.from_string(asset(place))
