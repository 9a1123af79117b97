"""Tables over a training: which column counts the steps, and steps read from names."""

from __future__ import annotations

import re
from dataclasses import replace

from vitsee_core.tables.results import Table
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

# Unit -> words before a number in names of files and stores, or keys of a file's fields.
UNITS = {
    "step": ("global_step", "step", "steps", "iteration", "iter"),
    "epoch": ("epoch", "ep"),
}

RECORD = "steps.csv"  # the file of a training that says how each of its steps ended


def numbers_in_name(stem: str) -> dict[str, int]:
    """Return unit -> the number behind one of its words: `{"step": 1000}` of `vit-step1000`."""
    numbers: dict[str, int] = {}
    for unit, words in UNITS.items():
        for word in words:
            # Neither the end of a longer word nor the front of a decimal number.
            pattern = rf"(?<![a-z]){word}[-_= ]*(\d+)(?![.]?\d)"
            match = re.search(pattern, stem.lower())
            if match is not None:
                numbers.setdefault(unit, int(match[1]))
    return numbers


def with_steps(table: Table, unit: str) -> Table:
    """Return a table of several stores, sorted by a first column with the step of each store.

    The step is read from the store's label, else from the name of its weights. In a comparison the
    steps are those of the second stores.

    Args:
        table: of stores and sites.
        unit: "step" or "epoch"; the name of the new column, too.

    Raises:
        VitseeError: no table of stores and sites, a store without a step, or one step alone.
    """
    rows = table.frame
    side = "" if "store" in rows.columns else "_b"
    if not {f"store{side}", f"site{side}", "metric", "value"} <= {*rows.columns}:
        raise VitseeError(
            f"this table has no layers of stores, and so no chart along {unit}s"
        )
    name_columns = [f"store{side}"]
    if f"weights{side}" in rows.columns:
        name_columns.append(f"weights{side}")
    steps: dict[str, int] = {}
    for names in rows.select(pl.col(name_columns).cast(pl.String)).unique().rows():
        store = names[0]
        numbers = [numbers_in_name(name or "").get(unit) for name in names]
        step = next((number for number in numbers if number is not None), None)
        if step is None:
            raise VitseeError(
                f"no {unit} in the name of the store {store}; expected one such as "
                f"vit-{unit}1000, from the file's name or given as vit-{unit}1000=STORE"
            )
        steps[store] = step
    if len({*steps.values()}) < 2:
        raise VitseeError(
            f"one {unit} alone: {', '.join(steps)}; expected stores of several"
        )
    labels = pl.col(f"store{side}").cast(pl.String)
    step_column = labels.replace_strict(steps, return_dtype=pl.Int64).alias(unit)
    # A stable sort: the order of the rows of one step stays.
    frame = rows.select(step_column, pl.all()).sort(unit, maintain_order=True)
    return replace(table, frame=frame, notes={**table.notes, "unit": unit})
