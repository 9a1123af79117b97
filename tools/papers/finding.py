"""What a finding of a paper is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from findings_statistics import Estimate

if TYPE_CHECKING:
    from findings_measure import Family


@dataclass(frozen=True)
class Finding:
    """section, name, claim: of the page; source: paper and place; statistic: what is computed, in
    `unit`; models: whose stores it takes; measure: that number, above 0 where the claim holds."""

    section: str
    name: str
    claim: str
    source: str
    statistic: str
    unit: str
    models: tuple[str, ...]
    measure: Callable[[Family], Estimate]

    def row(self, found: Estimate | None) -> dict[str, Any]:
        """Its row of docs/findings.csv; None: a model is missing."""
        text = ("section", "name", "claim", "source", "statistic", "unit")
        row: dict[str, Any] = {name: getattr(self, name) for name in text}
        row["models"] = " ".join(self.models)
        if found is None:
            return row | {"verdict": "not trained"}
        std, low, high = found.interval()
        numbers = {"value": found.value, "std": std, "low": low, "high": high}
        return row | numbers | {"n_blocks": len(found.without), "verdict": verdict(low, high)}


def verdict(low: float, high: float) -> str:
    """What an interval of a number that should be above 0 says."""
    if low > 0:
        return "holds"
    return "does not hold" if high < 0 else "undecided"
