"""Puts styles, scripts and templates into one HTML file.

Scripts are ES modules in files, so that types and tests know who uses what. A page has them one
after another in one `<script type="module">`, each behind those that it imports, without `import`
lines and the words `export`. So two of them may not have a name in common at the top.
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


def asset(path: str) -> str:
    """Return the text of a file of the package, such as `pages/html/assets/base.css`."""
    return resources.files("vitsee_core").joinpath(*path.split("/")).read_text("utf-8")


def modules(*paths: str) -> dict[str, str]:
    """Return path -> text of scripts and of all that they import, an import before its user."""
    texts: dict[str, str] = {}

    def add(path: str) -> None:
        """Add a module behind those that it imports."""
        text = asset(path)
        for target in _IMPORT.findall(text):
            folder = posixpath.dirname(path)
            imported = posixpath.normpath(posixpath.join(folder, target))
            if imported not in texts:
                add(imported)
        texts[path] = text

    for path in paths:
        if path not in texts:
            add(path)
    return texts


def script(*paths: str) -> str:
    """Return modules, and all that they import, as one script."""
    texts = []
    for text in modules(*paths).values():
        texts.append(_EXPORT.sub("", _IMPORT.sub("", text)))
    return "\n".join(texts)


def csp_hash(text: str) -> str:
    """Return the SHA-256 in base64 by which a page's content policy allows a script or style."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def json_for_html(value: Any) -> str:
    """Return JSON with `<`, `>` and `&` escaped, so that it can stand inside HTML."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def template(path: str) -> Any:
    """Return a jinja2 template; it escapes its values, and has `visible` as a filter."""
    from jinja2 import BaseLoader, Environment, StrictUndefined

    environment = Environment(
        loader=BaseLoader(),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = lambda text: visible(str(text))
    return environment.from_string(asset(path))
