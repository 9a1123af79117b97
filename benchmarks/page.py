"""Writes docs/performance.md, and the table of README, from benchmarks/results/*.json.

python benchmarks/page.py            # writes both
python benchmarks/page.py --print    # to stdout, which a test compares with the page
python benchmarks/page.py --readme   # the same of README
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, Result

ROOT = Path(__file__).resolve().parents[1]
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
EARLIER = RESULTS / "earlier.md"  # what was measured before results were kept, as text
# README's table: which line of which result, and what README calls it.
SHORT = (
    (
        "cka",
        "vitsee, against torch_cka",
        "CKA of 40 x 40 layers, 1,024 images, against torch_cka",
    ),
    (
        "cka",
        "vitsee, against the published",
        "the same, against the published scheme in memory",
    ),
    (
        "cka-repeats",
        "vitsee, against the published",
        "20 repeats of minibatches of 1,024 out of 4,096 images, against that scheme",
    ),
    (
        "gram",
        "Gram pass, reading and casting included, against numpy",
        "one Gram matrix of 1,024 images from the store, against `x @ x.T` of float32 in memory",
    ),
    (
        "localize",
        "against the published scheme",
        "localize: 196 x 196 maps of 1,024 images, against that scheme",
    ),
    (
        "extraction",
        "vit_small_patch16_224, 128 images in batches of 32, blocks",
        "extraction of ViT-S/16, written to disk, against the bare model: activations, residuals",
    ),
    (
        "extraction",
        "vit_small_patch16_224, 128 images in batches of 32, + attention",
        "the same with every attention summary",
    ),
    (
        "knn",
        "4000 among 20000",
        "k-NN of 4,000 among 20,000 images, against scikit-learn's cosine",
    ),
    (
        "probe",
        "probes of 4 layers, against scikit-learn's Ridge over 20 l2",
        "ridge probes at 20 l2, against a loop of `Ridge`",
    ),
    (
        "probe",
        "probes of 4 layers, against scikit-learn's RidgeCV",
        "ridge probes whose l2 is chosen, against `RidgeCV`",
    ),
    (
        "similarity-peers",
        "mutual_knn of 28",
        "mutual k-NN of 28 pairs of layers, against platonic-rep",
    ),
    ("similarity-peers", "procrustes of 28", "Procrustes of the same, against netrep"),
)
START, END = "<!-- table: written by benchmarks/page.py -->\n", "<!-- end -->\n"
FIELDS = ("name", "title", "machine", "date", "load", "command", "rows")
HEAD = """\
# Performance, as measured

Written by `python benchmarks/page.py` from `benchmarks/results/*.json`, which the commands below
write with `--record`; do not edit it. Both sides of a line ran in turn in one process or one after
the other on the same machine; numbers are medians, and the last column, their quotient, says how
many times faster or smaller ours is: below 1 the other side wins. *Load* is the machine's at the
end of the run: above the number of its cores others were at work beside it.

What a GPU should do is in [gpu.md](gpu.md); none was measured.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--print", action="store_true", help="to stdout")
    parser.add_argument("--readme", action="store_true", help="README, to stdout")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    results = [load(path) for path in sorted(args.results.glob("*.json"))]
    if args.print:
        sys.stdout.write(page(results))
    elif args.readme:
        sys.stdout.write(readme(README.read_text(), results))
    else:
        PAGE.write_text(page(results))
        README.write_text(readme(README.read_text(), results))


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
    return "\n".join([HEAD, *map(section, results), EARLIER.read_text()])


def readme(text: str, results: Sequence[dict[str, Any]]) -> str:
    """README with its table made anew.

    Raises:
        SystemExit: a line that README shows is in no result, or README has no place for them.
    """
    lines = ["| | vitsee | other side | vitsee is better by |", "|---|---|---|---|"]
    found = {fields["name"]: fields["rows"] for fields in results}
    for name, start, words in SHORT:
        rows = [row for row in found.get(name, ()) if row.what.startswith(start)]
        if not rows:
            sys.exit(f"no line {start!r} in {name}.json: mend SHORT in {__file__}")
        lines.append(cells(words, rows[0]))
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        sys.exit(f"README has no {START.strip()} with {END.strip()} behind it")
    return "\n".join([before + start, *lines, "", end + after])


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
    lines += [cells(row.what, row) for row in fields["rows"]]
    return "\n".join([*lines, ""])


def cells(what: str, row: Result) -> str:
    """A line of a table."""
    ours, other = (number(x, row.unit) for x in (row.ours, row.other))
    return f"| {what} | {ours} | {other} | {better(row)} |"


def better(row: Result) -> str:
    """How many times ours is, of the numbers beside it; of rates, per second, larger is better."""
    if row.ratio is None or not row.ours or not row.other:
        return ""
    quotient = row.ours / row.other if row.unit.endswith("/s") else row.other / row.ours
    return f"{quotient:.3g}"


def number(value: float | None, unit: str) -> str:
    """With its unit; large ones with thousands marked."""
    if value is None:
        return ""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".strip()


if __name__ == "__main__":
    main()
