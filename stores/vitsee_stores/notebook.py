"""Notebook display of stores and tables: escaped HTML, and pandas frames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_stores.plan import SiteSpec


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table of text cells; all text is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return (
        f"<table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def site_table(caption: str, sites: Iterable[SiteSpec]) -> str:
    """Return the sites of a store as an HTML table: name, shape, tokens, depth."""
    rows = []
    for site in sites:
        shape = "x".join(map(str, site.shape))
        rows.append([site.name, shape, _describe_tokens(site), str(site.depth)])
    return html_table(caption, ["site", "shape", "tokens", "depth"], rows)


def _describe_tokens(site: SiteSpec) -> str:
    """Return `cls + 14x14`, `= blocks.0.out` for an alias, or the kind of output."""
    if site.alias_of is not None:
        return f"= {site.alias_of}"
    if site.layout is None:
        return site.kind
    if site.layout.grid:
        body = "x".join(map(str, site.layout.body))
    else:
        body = f"{site.layout.rows} rows"
    return " + ".join([*site.layout.prefix, body])


def format_cell(value: Any) -> str:
    """Return a cell's text: floats to six digits, None and NaN as ""."""
    # NaN alone differs from itself; the cell may be of any type, so np.isnan would raise.
    if value is None or value != value:
        return ""
    if isinstance(value, (float, np.floating)):
        return f"{value:.6g}"
    return str(value)


def to_frame(columns: Mapping[str, Any], attrs: Mapping[str, Any] | None = None) -> Any:
    """Return the columns as a pandas DataFrame that carries `attrs`.

    Raises:
        VitseeError: pandas is not installed. It is optional, no analysis uses it.
    """
    try:
        import pandas
    except ImportError:
        raise VitseeError(
            "pandas is not installed; run: pip install pandas (or 'vitsee[notebook]')"
        ) from None
    frame = pandas.DataFrame(dict(columns))
    frame.attrs = dict(attrs or {})
    return frame
