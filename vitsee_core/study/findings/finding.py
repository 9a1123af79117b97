"""A finding of a paper."""

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
        name, claim: what the papers say.
        source: paper and place.
        statistic: what is computed, in `unit`.
        models: what its stores are of (`vit`, `resnet`, `vit-gap`, ...).
        measure: the number, above 0 where the claim holds.
    """

    name: str
    claim: str
    source: str
    statistic: str
    unit: str
    models: tuple[str, ...]
    measure: Callable[[ModelTables], Estimate]
    section: str = ""  # of the page

    def row(self, found: Estimate | None, other: Estimate | None = None) -> dict[str, Any]:
        """The finding's row in a table. found: None where it could not be measured. other: with
        models of another seed; a verdict is given where both agree."""
        text = ("section", "name", "claim", "source", "statistic", "unit")
        row: dict[str, Any] = {name: getattr(self, name) for name in text}
        row["models"] = " ".join(self.models)
        if found is None:
            return row | {"verdict": "not trained"}
        verdicts = set()
        for suffix, estimate in (("", found), ("_seed1", other)):
            if estimate is not None:
                std, low, high = estimate.interval()
                numbers = {"value": estimate.value, "std": std, "low": low, "high": high}
                row |= {f"{name}{suffix}": number for name, number in numbers.items()}
                verdicts.add(verdict(low, high))
        said = verdicts.pop() if len(verdicts) == 1 else DEPENDS
        return row | {"n_blocks": len(found.without), "verdict": said}


def verdict(low: float, high: float) -> str:
    """The verdict on a number that should be above 0, by its interval: "holds" where all of it is,
    "does not hold" where none is, else "undecided"."""
    if low > 0:
        return "holds"
    return "does not hold" if high < 0 else "undecided"
