"""Looks of curves over depth: colours of stores, strokes of kinds of sites, dashes of baselines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.plotting import colour, marker, store_order
from vitsee_core.tables.groups import SIGN, groups_of, split_label
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import PARTS, token_words

if TYPE_CHECKING:
    from vitsee_core.tables.results import Table

FIRST = ("embed", "stem")  # belong to the curve of the blocks' outputs
DASHES = ((0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (3, 1)))
STROKES = ("-", (0, (7, 1.5)), (0, (3, 1.2)), (0, (7, 1.5, 1.5, 1.5)))
Look = dict[str, Any]
Curve = tuple[Any, ...]  # store, values of further columns, kind of site
ALIKE = 1e-9  # values nearer than this are one


def curve_looks(table: Table, by: Sequence[str] = ()) -> dict[Curve, Look]:
    """(store, values of `by`, kind of site) -> how it is drawn. The colour is the store's where
    there are several, see `store_looks`; sites that belong to no block look as the first kind of
    their store."""
    curves = dict.fromkeys(curves_of(table, by))
    stores = store_order(table)
    kinds = list(dict.fromkeys(curve[1:] for curve in curves if curve[-1] != "head"))
    grouped = store_looks(table) if len(groups_of(table.unique("store"))) > 1 else {}
    found = {}
    for curve in curves:
        same = [kind for kind in kinds if curve[-1] == "head" and kind[:-1] == curve[1:-1]]
        kind = kinds.index(same[0] if same else curve[1:]) if same or curve[1:] in kinds else 0
        if grouped:
            kinded = {"marker": marker(kind)} if len(kinds) > 1 else {}
            found[curve] = grouped[curve[0]] | kinded
            continue
        store = stores.index(curve[0])
        tint, mark = (store, kind or store) if len(stores) > 1 else (kind, kind)
        stroke = STROKES[kind % len(STROKES)] if len(stores) > 1 else "-"
        if len(stores) > 1 and len(kinds) > 1:
            mark = kind
        found[curve] = {"color": colour(tint), "marker": marker(mark), "linestyle": stroke}
    return found


def store_looks(table: Table) -> dict[str, Look]:
    """Store -> colour, marker and stroke. Stores of several groups (`GROUP/NAME/VARIANT`) have the
    colour of their name and the stroke and marker of their variant, in every group the same."""
    order = store_order(table)
    if len(groups_of(table.unique("store"))) == 1:
        return {
            store: {"color": colour(i), "marker": marker(i), "linestyle": "-"}
            for i, store in enumerate(order)
        }
    parts = {store: split_label(store)[1].partition(SIGN)[::2] for store in order}
    names, variants = (list(dict.fromkeys(of)) for of in zip(*parts.values(), strict=True))
    return {
        store: {
            "color": colour(names.index(name)),
            "marker": marker(variants.index(variant) if len(variants) > 1 else names.index(name)),
            "linestyle": STROKES[variants.index(variant) % len(STROKES)],
        }
        for store, (name, variant) in parts.items()
    }


def site_kind(site: str) -> str:
    """The part of a site's name after its block's path: `out`, `norm1`, `attn.branch`; `out` for
    what enters the first block; `head` for sites that belong to no block."""
    if site in FIRST:
        return "out"
    match = re.fullmatch(r".*?\.\d+\.(.+)", site)
    # The last number ends the block's path: stages.0.blocks.1.out.
    while match is not None and (deeper := re.fullmatch(r".*?(?:^|\.)\d+\.(.+)", match[1])):
        match = deeper
    return match[1] if match is not None else "block" if re.search(r"\.\d+$", site) else "head"


def cells_of(table: Table, name: str) -> list[Any]:
    """A column, None in each row where the table has none."""
    return table[name].tolist() if name in table.columns else [None] * len(table)


def baseline_name(name: Any) -> str:
    """A cell of the column `baseline` as text, empty for no baseline."""
    return "" if name is None or name != name else str(name)


def curves_of(table: Table, by: Sequence[str]) -> list[Curve]:
    """Each row's curve: its store, the values of `by`, the kind of its site."""
    kinds = [site_kind(site) for site in table["site"].tolist()]
    return list(
        zip(table["store"].tolist(), *(cells_of(table, name) for name in by), kinds, strict=True)
    )


def dashes_of(table: Table) -> Look:
    """Baseline -> its dash pattern."""
    names = dict.fromkeys(filter(None, map(baseline_name, cells_of(table, "baseline"))))
    return {name: DASHES[i % len(DASHES)] for i, name in enumerate(names)}


def curve_label(table: Table, by: Sequence[str], curve: Curve) -> str:
    """The store, and every other column in which the table has several values."""
    label = str(curve[0])
    if len(groups_of(table.unique("store"))) > 1:  # whose panel names the group
        label = split_label(label)[1]
    parts = [shorten(label, 28)]
    kinds = {kind for kind in map(site_kind, table["site"].tolist()) if kind != "head"}
    if len(kinds) > 1 and curve[-1] != "head":
        parts.append(PARTS.get(curve[-1], curve[-1]) or "block output")
    for name, value in zip(by, curve[1:-1], strict=True):
        if len(set(cells_of(table, name))) > 1:
            parts.append(token_words(str(value)) if name == "token" else f"{name} = {value}")
    return ", ".join(parts)


def shared_baselines(table: Table, curves: Sequence[Curve], names: Any) -> set[str]:
    """The baselines of which several curves have the same value everywhere."""
    found = set()
    lines = np.array([curve[-1] != "head" for curve in curves], bool)
    for name in dict.fromkeys(n for n in names.tolist() if n):
        picked = lines & (names == name)
        values = table["value"][picked].astype(float)
        several = len({curve for curve, own in zip(curves, picked, strict=True) if own}) > 1
        if several and float(np.ptp(values)) < ALIKE:
            found.add(name)
    return found
