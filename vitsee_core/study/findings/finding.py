"""A finding of a paper: its claim, the number that tests it, and the verdict on that number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitsee_core.study.findings.estimates import Estimate

if TYPE_CHECKING:
    from vitsee_core.study.findings.model_tables import ModelTables

DEPENDS = "depends on the seed"


@dataclass(frozen=True)
class Finding:
    """A claim of a paper about layers or heads, and the number that tests it.

    Attributes:
        name: the finding's name in tables.
        claim: what the papers say, in a sentence.
        source: the paper, and the section or figure.
        statistic: what is computed, in words.
        unit: unit of the statistic.
        models: the models that are compared (`vit`, `resnet`, `vit-gap`, ...).
        measure: computes the statistic from the models' tables; above 0 if the claim holds.
        section: heading on the page.
    """

    name: str
    claim: str
    source: str
    statistic: str
    unit: str
    models: tuple[str, ...]
    measure: Callable[[ModelTables], Estimate]
    section: str = ""

    def row(
        self, estimate: Estimate | None, second_seed: Estimate | None = None
    ) -> dict[str, Any]:
        """Return the finding's row in a table, column -> value.

        Args:
            estimate: the measured number; None if it could not be measured.
            second_seed: the number with models of another seed; the verdict then depends on
                the seed unless both agree.
        """
        row: dict[str, Any] = {
            "section": self.section,
            "name": self.name,
            "claim": self.claim,
            "source": self.source,
            "statistic": self.statistic,
            "unit": self.unit,
            "models": " ".join(self.models),
        }
        if estimate is None:
            row["verdict"] = "not trained"
            return row
        verdicts = {self._add_numbers(row, estimate, "")}
        if second_seed is not None:
            verdicts.add(self._add_numbers(row, second_seed, "_seed1"))
        row["n_blocks"] = len(estimate.without)
        row["verdict"] = verdicts.pop() if len(verdicts) == 1 else DEPENDS
        return row

    @staticmethod
    def _add_numbers(row: dict[str, Any], estimate: Estimate, suffix: str) -> str:
        """Add an estimate's columns, named with a suffix, to a row; return its verdict."""
        std, low, high = estimate.interval()
        row[f"value{suffix}"] = estimate.value
        row[f"std{suffix}"] = std
        row[f"low{suffix}"] = low
        row[f"high{suffix}"] = high
        return verdict(low, high)


def verdict(low: float, high: float) -> str:
    """Return the verdict on a number that should be above 0, from its interval.

    "holds" if all of the interval is above 0, "does not hold" if all is below; else "undecided".
    """
    if low > 0:
        return "holds"
    if high < 0:
        return "does not hold"
    return "undecided"
