"""Tables over a training: which column counts the steps, and steps read from names."""

from __future__ import annotations

import re
from dataclasses import replace

from vitsee_core.tables.results import Table
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

# Words before a number in names of files and stores, or keys of a file's fields, by unit.
UNITS = {
    "step": ("global_step", "step", "steps", "iteration", "iter"),
    "epoch": ("epoch", "ep"),
}


RECORD = "steps.csv"  # of a training: how each of its steps ended


def numbers_in_name(stem: str) -> dict[str, int]:
    """Unit -> the number behind one of its words: `{"step": 1000}` of `vit-step1000`."""
    found: dict[str, int] = {}
    for unit, words in UNITS.items():
        for word in words:
            if match := re.search(
                rf"(?<![a-z]){word}[-_= ]*(\d+)(?![.]?\d)", stem.lower()
            ):
                found.setdefault(unit, int(match[1]))
    return found


def with_steps(table: Table, unit: str) -> Table:
    """A table of several stores with the step of each in front, read from the store's label, else
    from the name of its weights; in a comparison the steps are those of the second stores.

    Raises:
        VitseeError: no table of stores and sites, a store without a step, or one step alone.
    """
    rows = table.frame
    end = "" if "store" in rows.columns else "_b"
    if not {f"store{end}", f"site{end}", "metric", "value"} <= {*rows.columns}:
        raise VitseeError(
            f"this table has no layers of stores, and so no chart along {unit}s"
        )
    names = [f"store{end}", *(n for n in (f"weights{end}",) if n in rows.columns)]
    found: dict[str, int] = {}
    for store, *weights in rows.select(pl.col(names).cast(pl.String)).unique().rows():
        numbers = [numbers_in_name(text or "").get(unit) for text in (store, *weights)]
        if (step := next((n for n in numbers if n is not None), None)) is None:
            raise VitseeError(
                f"no {unit} in the name of the store {store}; expected one such as vit-{unit}1000, "
                f"from the file's name or given as vit-{unit}1000=STORE"
            )
        found[store] = step
    if len({*found.values()}) < 2:
        raise VitseeError(
            f"one {unit} alone: {', '.join(found)}; expected stores of several"
        )
    column = (
        pl.col(f"store{end}").cast(pl.String).replace_strict(found, return_dtype=pl.Int64)
    )
    frame = rows.select(column.alias(unit), pl.all()).sort(unit, maintain_order=True)
    return replace(table, frame=frame, notes={**table.notes, "unit": unit})
