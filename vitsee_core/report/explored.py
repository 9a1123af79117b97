"""Pages of `vitsee explore` that lie beside a report, for it to lead to."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from vitsee_core.report.tables import relative
from vitsee_core.tables.text import visible

HEAD = 4096  # bytes within which a page says who made it and what it is called
_MADE = b'<meta name="generator" content="vitsee explore">'
_TITLE = re.compile(rb"<title>([^<]*) \xc2\xb7 vitsee explore</title>")


@dataclass(frozen=True)
class ExploredPage:
    """link: from the report; title: of the page."""

    link: str
    title: str


def explored_pages(folder: Path, output: Path) -> list[ExploredPage]:
    """Those in the folder, and in that of the report at `output`."""
    around = output.absolute().parent
    places = {path.absolute() for where in (folder, around) for path in where.glob("*.html")}
    found = []
    for path in sorted(places):
        try:
            with path.open("rb") as file:
                head = file.read(HEAD)
        except OSError:
            continue
        title = _TITLE.search(head)
        if _MADE in head and title is not None:
            text = html.unescape(title[1].decode("utf-8", "replace"))
            found.append(ExploredPage(quote(relative(path, around)), visible(text)))
    return found
