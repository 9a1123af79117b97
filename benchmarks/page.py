"""Writes docs/performance.md from benchmarks/results/*.json.

python benchmarks/page.py            # writes the page
python benchmarks/page.py --print    # to stdout, which a test compares with the page
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, Result

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
FIELDS = ("name", "title", "machine", "date", "load", "command", "rows")
HEAD = """\
# Performance, as measured

Written by `python benchmarks/page.py` from `benchmarks/results/*.json`, which the commands below
write with `--record`; do not edit it. Both sides of a line ran in turn in one process or one after
the other on the same machine; numbers are medians, and the last column, the median of the rounds'
ratios, says how many times faster or smaller ours is: below 1 the other side wins. *Load* is the
machine's at the end of the run: above the number of its cores others were at work beside it.

What a GPU should do is in [gpu.md](gpu.md); none was measured.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--print", action="store_true", help="to stdout")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    text = page([load(path) for path in sorted(args.results.glob("*.json"))])
    if args.print:
        sys.stdout.write(text)
    else:
        PAGE.write_text(text)


def load(path: Path) -> dict[str, Any]:
    """The fields of one file, rows as `Result`.

    Raises:
        SystemExit: it is none of `common.record`'s.
    """
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        assert sorted(fields) == sorted(FIELDS) and fields["name"] == path.stem
        rows = [Result(*row) for row in fields["rows"]]
    except (ValueError, TypeError, AssertionError) as error:
        sys.exit(f"{path} was not written by common.record: {error or 'other fields'}")
    return fields | {"rows": rows}


def page(results: Sequence[dict[str, Any]]) -> str:
    """The page."""
    return "\n".join([HEAD, *map(section, results)])


def section(fields: dict[str, Any]) -> str:
    """One result's heading, command and table."""
    lines = [
        f"## {fields['title']}",
        "",
        f"`{fields['command']}`",
        "",
        f"{fields['date']}, {fields['machine']}, load {fields['load']:g}",
        "",
        "| | ours | other side | ours is better by |",
        "|---|---|---|---|",
    ]
    for row in fields["rows"]:
        ours, other = (number(x, row.unit) for x in (row.ours, row.other))
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        lines.append(f"| {row.what} | {ours} | {other} | {ratio} |")
    return "\n".join([*lines, ""])


def number(value: float | None, unit: str) -> str:
    """With its unit; large ones with thousands marked."""
    if value is None:
        return ""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".strip()


if __name__ == "__main__":
    main()
