"""Writes docs/findings.md from docs/findings.csv and docs/findings-real.csv, which
tools/findings_measure.py writes.

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

from vitsee_core.study.findings.finding import DEPENDS

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLE = DOCS / "findings.csv"
REAL_TABLE = DOCS / "findings-real.csv"
PAGE = DOCS / "findings.md"
Row = Mapping[str, str]
VERDICTS = {
    "holds": "the interval lies above 0, of the demo's with both seeds of the ViT",
    "does not hold": "it lies below 0, with both",
    "undecided": "it contains 0, with both",
    DEPENDS: "the two seeds of the ViT have different verdicts",
    "not trained": "a model that it needs does not ship with vitsee yet",
}
NOT_LABELS = {"repeating"}  # of models that labels taught, which the real ViT is not
HEAD = """\
# What the papers found, and what the demo's models show

<!-- Written by python tools/findings.py; do not edit it. -->

The numbers as tables: [findings.csv](findings.csv), [findings-real.csv](findings-real.csv); `python
tools/findings_measure.py FOLDER` writes them.
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

**Real weights** is the same statistic on a ViT-S/14 of 22 million parameters (its tensors' names
say DINOv2; fine-tuned for saliency, so that it stands for no other model) and, for the CNN, on
EfficientNet-lite0, an ImageNet classifier, both at 224 pixels, from [a real ViT, layer by
layer](guide/real-vit.md). The images are sixteen photographs, and intervals are over these
sixteen: wide for CKA, narrow for what each photograph shows alone. A dash stands where a finding
does not apply: it compares with a twin that was trained otherwise (on less data, without skips,
with another pooling), takes labels or keypoints, or a grid or a number of images that these do not
have. It is one ViT and one CNN, so that of these a verdict says nothing of ViTs. Your own models:
`vitsee findings vit.zarr cnn.zarr`.

The last section replaces tokens and heads while the model runs, over the same images
([effect](analyses/effect.md), [head-importance](analyses/head-importance.md); `vitsee study
registers` and `vitsee study heads` are of public checkpoints).

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
    args = parser.parse_args()
    text = page(read_rows(TABLE), {row["name"]: row for row in read_rows(REAL_TABLE)})
    if args.print:
        sys.stdout.write(text)
    else:
        PAGE.write_text(text)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table, as text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def page(rows: Sequence[Row], real: Mapping[str, Row]) -> str:
    """The page. real: rows of the weights of real size, by the findings' names."""
    real = {
        name: row for name, row in real.items() if row["value"] and name not in NOT_LABELS
    }
    parts = [HEAD, ABOUT, counts(rows, real)]
    for title in dict.fromkeys(row["section"] for row in rows):
        parts.append(
            section(title, [row for row in rows if row["section"] == title], real)
        )
    return "\n".join(parts)


def counts(rows: Sequence[Row], real: Mapping[str, Row]) -> str:
    """How many findings have which verdict."""
    lines = ["| verdict | demo's models | real weights | |", "|---|---|---|---|"]
    for name, meaning in VERDICTS.items():
        n, n_real = (
            sum(row["verdict"] == name for row in of) for of in (rows, real.values())
        )
        lines.append(f"| {name} | {n} | {n_real} | {meaning} |")
    lines.append(f"| does not apply | 0 | {len(rows) - len(real)} | see above |")
    return "\n".join([*lines, ""])


def section(title: str, rows: Sequence[Row], real: Mapping[str, Row]) -> str:
    """A heading, a table of numbers, and what was computed."""
    lines = [f"## {title}", ""]
    names = (
        "",
        "finding",
        "here (95 % interval)",
        "other seed",
        "verdict",
        "real weights",
        "unit",
    )
    lines.append(f"| {' | '.join(names)} |".replace("|  |", "| |"))
    lines.append("|---" * len(names) + "|")
    for row in rows:
        here, other = (measured(row, suffix) for suffix in ("", "_seed1"))
        shown = real.get(row["name"])
        cells = (
            f"`{row['name']}`",
            row["claim"],
            here,
            other,
            f"**{row['verdict']}**",
            "–" if shown is None else f"{measured(shown)}: **{shown['verdict']}**",
            row["unit"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "What is computed:", ""]
    for row in rows:
        text = f"- `{row['name']}` ({models(row)}): {row['statistic']}. {row['source']}."
        lines.append(
            textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False)
        )
    return "\n".join([*lines, ""])


def measured(row: Row, suffix: str = "") -> str:
    """`+0.212 (+0.201 to +0.224)`, empty where there is no value."""
    if not row[f"value{suffix}"]:
        return ""
    value, low, high = (
        number(row[f"{name}{suffix}"]) for name in ("value", "low", "high")
    )
    return f"{value} ({low} to {high})"


def models(row: Row) -> str:
    return ", ".join(f"demo:{name}" for name in row["models"].split())


def number(text: str) -> str:
    return f"{float(text):+.3f}"


if __name__ == "__main__":
    main()
