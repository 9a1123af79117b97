"""Writes docs/findings.md from docs/findings.csv, which tools/findings_measure.py writes.

python tools/findings.py            # writes the page
python tools/findings.py --print    # to stdout, which a test compares with the page
"""

from __future__ import annotations

import argparse
import csv
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitsee_core.findings.finding import DEPENDS

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLE = DOCS / "findings.csv"
PAGE = DOCS / "findings.md"
Row = Mapping[str, str]
VERDICTS = {
    "holds": "the interval lies above 0, with both seeds of the ViT where it takes part",
    "does not hold": "it lies below 0, with both",
    "undecided": "it contains 0, with both",
    DEPENDS: "the two seeds of the ViT have different verdicts",
    "not trained": "a model that it needs does not ship with vitsee yet",
}
HEAD = """\
# What the papers found, and what the demo's models show

Written by `python tools/findings.py` from [findings.csv](findings.csv), which `python
tools/findings_measure.py FOLDER` writes; do not edit it.
"""
ABOUT = """\
What Raghu et al. 2021, Walmer et al. 2023 and Dosovitskiy et al. 2021 found of layers and heads is
here, finding by finding, one number that is above 0 where it holds. The papers' ViTs have
22 to 632 million parameters and saw ImageNet or more. These have 0.46 (ViT) and 0.89 (ResNet)
million, inputs of 32 x 32 pixels, 64 patches, six blocks of four heads, and saw Fashion-MNIST:
**what does not hold here is no evidence against a paper**, and what holds here was not tested at
the papers' size. A verdict is about the sign alone: whether an effect is as large as in the
papers' figures, its number says.

The images are 1,000 of the 2,000 bundled test images of Fashion-MNIST, which no model was trained
on, the same in the same order for every model; receptive fields are over 320 of them. Nearest
neighbours and probes are trained on 1,000 bundled images of the training set. Keypoints are those
of the miniature of SPair-71k that ships with vitsee.

Intervals are 95 % intervals over images (delete-a-block jackknife; differences are paired, over
the same blocks). They say what other images of the same kind would change, and do **not** contain
what another training of the same model would change. So every finding that takes `vit` is
measured again with `vit-seed1` in its place, a ViT of other initial weights and order of images
(and `vit` in that of `vit-seed1`): most values move by many of their standard errors. A verdict is
given where both agree. The other models have one seed. Intervals are not corrected for the number
of findings: of thirty that are truly 0, one or two miss it by chance.

Not measured here: whatever compares models of several sizes, or before and after fine-tuning
(Raghu et al., Fig. 13, App. G); a single token against all tokens pooled (Fig. 11 right); the order
of position embeddings (Dosovitskiy et al., Fig. 7 center: [weights](analyses/weights.md) shows it);
attention on objects (Walmer et al., Sec. 4.4), clusters over supervisions (Sec. 5.2, 5.3),
retrieval and video (Sec. 6.1, 6.2). `saliency`, `cluster`, `retrieve` and `propagate` measure these
of your own models.

Of no paper: do the solvers of dense probes agree on which layer is best? Kendall's tau between
them, over all layers of the demo's models and of EfficientNet-lite0, with what it is worth at
this size, stands
[where they are explained](analyses/dense-probe.md#do-solvers-agree-on-which-layer-is-best).
Within the demo's ViT they hardly agree (its layers are alike), in the network trained on ImageNet
they do: 0.77 to 0.92 for all pairs of ridge, balanced ridge, logistic, k-NN and Hummingbird.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--print", action="store_true", help="to stdout")
    parser.add_argument("--table", type=Path, default=TABLE)
    args = parser.parse_args()
    with args.table.open(newline="") as file:
        text = page(list(csv.DictReader(file)))
    if args.print:
        sys.stdout.write(text)
    else:
        PAGE.write_text(text)


def page(rows: Sequence[Row]) -> str:
    """The page."""
    parts = [HEAD, ABOUT, counts(rows)]
    for title in dict.fromkeys(row["section"] for row in rows):
        parts.append(section(title, [row for row in rows if row["section"] == title]))
    return "\n".join(parts)


def counts(rows: Sequence[Row]) -> str:
    """How many findings have which verdict."""
    lines = ["| verdict | findings | |", "|---|---|---|"]
    for name, meaning in VERDICTS.items():
        n = sum(row["verdict"] == name for row in rows)
        lines.append(f"| {name} | {n} | {meaning} |")
    return "\n".join([*lines, ""])


def section(title: str, rows: Sequence[Row]) -> str:
    """A heading, a table of numbers, and what was computed."""
    lines = [f"## {title}", ""]
    lines.append("| | finding | here (95 % interval) | other seed | unit | verdict |")
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        here, other = (measured(row, suffix) for suffix in ("", "_seed1"))
        cells = (
            f"`{row['name']}`",
            row["claim"],
            here,
            other,
            row["unit"],
            f"**{row['verdict']}**",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "What is computed:", ""]
    for row in rows:
        text = f"- `{row['name']}` ({models(row)}): {row['statistic']}. {row['source']}."
        lines.append(textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join([*lines, ""])


def measured(row: Row, suffix: str) -> str:
    """`+0.212 (+0.201 to +0.224)`, empty where there is no value."""
    if not row[f"value{suffix}"]:
        return ""
    value, low, high = (number(row[f"{name}{suffix}"]) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def models(row: Row) -> str:
    """`demo:vit`, `demo:resnet`."""
    return ", ".join(f"demo:{name}" for name in row["models"].split())


def number(text: str) -> str:
    """With its sign, three digits after the point."""
    return f"{float(text):+.3f}"


if __name__ == "__main__":
    main()
