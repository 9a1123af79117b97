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
    """An HTML table of text cells; all text is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f"<table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def site_table(caption: str, sites: Iterable[SiteSpec]) -> str:
    """The sites of a store as HTML: name, shape, tokens, depth."""
    rows = [
        [site.name, "x".join(map(str, site.shape)), _layout_text(site), str(site.depth)]
        for site in sites
    ]
    return html_table(caption, ["site", "shape", "tokens", "depth"], rows)


def _layout_text(site: SiteSpec) -> str:
    """`cls + 14x14`, `= blocks.0.out` for an alias, or the kind of output."""
    if site.alias_of is not None:
        return f"= {site.alias_of}"
    if site.layout is None:
        return site.kind
    grid = (
        "x".join(map(str, site.layout.body))
        if site.layout.grid
        else f"{site.layout.rows} rows"
    )
    return " + ".join([*site.layout.prefix, grid])


def shown_cell(value: Any) -> str:
    """A cell's text: floats to six digits, None and NaN as ""."""
    if value is None or value != value:
        return ""
    if isinstance(value, (float, np.floating)):
        return f"{value:.6g}"
    return str(value)


def to_frame(columns: Mapping[str, Any], attrs: Mapping[str, Any] | None = None) -> Any:
    """The columns as a pandas DataFrame. Raises VitseeError: pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise VitseeError(
            "pandas is not installed; run: pip install pandas (or 'vitsee[notebook]')"
        ) from None
    frame = pandas.DataFrame(dict(columns))
    frame.attrs = dict(attrs or {})
    return frame
