"""Groups of stores: a label `GROUP/NAME` puts a store beside the others of its group.

Figures draw a panel per group. Stores of one NAME look alike in all of them; a NAME with a slash of
its own is NAME/VARIANT: one colour per name, one stroke per variant (`DINO/B/16` and `DINO/B/8`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitsee_core.tables.results import Table

SIGN = "/"


def split_label(label: str) -> tuple[str, str]:
    """(group, name) of a store's label, the group "" where it has none."""
    group, sign, name = label.partition(SIGN)
    return (group, name) if sign and group and name else ("", label)


def groups_of(labels: Iterable[str]) -> list[str]:
    """The groups in order of appearance, without one another's stores: [""] where there is at most
    one, as nothing is side by side then."""
    found = list(dict.fromkeys(split_label(str(label))[0] for label in labels))
    return found if len(found) > 1 else [""]


def by_group(table: Table) -> Iterator[tuple[str, Table]]:
    """(group, the rows of its stores); ("", the table) where there are not several groups."""
    import numpy as np

    groups = groups_of(table.unique("store"))
    if len(groups) == 1:
        yield "", table
        return
    own = np.array([split_label(str(store))[0] for store in table["store"].tolist()], object)
    for group in groups:
        yield group, table.take(own == group)
