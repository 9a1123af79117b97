"""The effect of a change on a model's outputs: accuracy, equal answers and divergence, with
intervals."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vitsee_core.statistics.block_means import BlockMean
from vitsee_core.statistics.jackknife import METHOD as BLOCKS
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import PAIRED_METHOD as PAIRED
from vitsee_core.statistics.shares import difference_interval, mcnemar, wilson
from vitsee_core.statistics.value_columns import Cells
from vitsee_core.types import Float, Integers

# Keys of what `compare_outputs` gives; AGREEMENT and KL are metrics.
RIGHT, RIGHT_BASE, ONLY_BASE, ONLY_CHANGED = "right", "right base", "only base", "only changed"
AGREEMENT, KL = "agreement", "kl"
NOT_NEGATIVE = (0.0, np.inf)
OUTPUT_INTERVALS = {
    "top1, agreement": SHARES,
    "top1_difference": PAIRED,
    "kl": f"delete-a-block jackknife over images: {BLOCKS}",
}


def compare_outputs(
    base: Float, changed: Float, labels: Integers | None = None
) -> dict[str, Float]:
    """Metric -> (images,) of logits (images, classes); with labels (images,), -1 for none, which of
    both have the label's class as their first: NaN where there is none."""
    first, then = base.argmax(1), changed.argmax(1)
    log_p, log_q = log_softmax(base), log_softmax(changed)
    found = {
        AGREEMENT: (first == then).astype(np.float64),
        KL: (np.exp(log_p) * (log_p - log_q)).sum(1),
    }
    if labels is None:
        return found
    right, right_base = then == labels, first == labels
    known = labels >= 0
    shares = {
        RIGHT: right,
        RIGHT_BASE: right_base,
        ONLY_BASE: right_base & ~right,
        ONLY_CHANGED: right & ~right_base,
    }
    return found | {name: np.where(known, of, np.nan) for name, of in shares.items()}


def log_softmax(logits: Float) -> Float:
    """Logarithms of the softmax of (images, classes), along classes."""
    shifted = logits - logits.max(1, keepdims=True)
    log_sums: Float = np.log(np.exp(shifted).sum(1, keepdims=True))
    return shifted - log_sums


def top1_cells(mean: BlockMean) -> Cells:
    return {"metric": "top1", **mean.cells_between(wilson(mean.value, mean.n))}


def output_rows(of: Mapping[str, BlockMean]) -> list[Cells]:
    """Rows about a changed model's outputs, from means of what `compare_outputs` gives."""
    rows: list[Cells] = []
    if RIGHT in of:
        fewer, more = (round(of[name].total) for name in (ONLY_BASE, ONLY_CHANGED))
        difference = loss(of, -1.0)
        rows.append(top1_cells(of[RIGHT]))
        rows.append(
            {"metric": "top1_difference"}
            | difference.cells_between(difference_interval(more, fewer, of[RIGHT].n))
            | {"p": mcnemar(more, fewer), "n_only_base": fewer, "n_only_changed": more}
        )
    same = of[AGREEMENT]
    rows.append({"metric": AGREEMENT, **same.cells_between(wilson(same.value, same.n))})
    rows.append({"metric": KL, **of[KL].cells(NOT_NEGATIVE)})
    return rows


def loss(of: Mapping[str, BlockMean], sign: float = 1.0) -> BlockMean:
    """The accuracy that a change costs; sign: -1 for what it gains."""
    return BlockMean(sign * (of[RIGHT_BASE].sums - of[RIGHT].sums), of[RIGHT].counts)
