"""Groups of stores: a label `GROUP/NAME` puts a store beside the others of its group.

Figures draw a panel per group. Stores of one NAME look alike in all of them; a NAME with a slash of
its own is NAME/VARIANT: one colour per name, one stroke per variant (`DINO/B/16` and `DINO/B/8`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line splits labels without it, see `vitsee --help`
    import polars as pl

GROUP_SEPARATOR = "/"


def split_label(label: str) -> tuple[str, str]:
    """Return group and name of a store's label; the group is "" where it has none."""
    group, separator, name = label.partition(GROUP_SEPARATOR)
    if separator and group and name:
        return group, name
    return "", label


def groups_of(labels: Iterable[str]) -> list[str]:
    """Return the groups of these labels in order of appearance.

    [""] where there is at most one: nothing has to be side by side then.
    """
    groups = list(dict.fromkeys(split_label(str(label))[0] for label in labels))
    if len(groups) > 1:
        return groups
    return [""]


def by_group(rows: pl.DataFrame) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield each group with the rows of its stores; "" and all rows without several groups."""
    stores = rows["store"].unique(maintain_order=True).to_list()
    groups = groups_of(stores)
    if len(groups) == 1:
        yield "", rows
        return
    for group in groups:
        members = [store for store in stores if split_label(store)[0] == group]
        yield group, rows.filter(rows["store"].is_in(members))
