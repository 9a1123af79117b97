"""Looks of curves over depth: colours of stores, strokes of kinds of sites, dashes of baselines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vitsee_core.figures.plotting import colour, marker, store_order
from vitsee_core.tables.groups import SIGN, groups_of, split_label
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import PARTS, token_words
from vitsee_core.types import pl

FIRST = ("embed", "stem")  # belong to the curve of the blocks' outputs
HEAD = "head"  # the kind of sites that belong to no block
DASHES = ((0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (3, 1)))
STROKES = ("-", (0, (7, 1.5)), (0, (3, 1.2)), (0, (7, 1.5, 1.5, 1.5)))
Look = dict[str, Any]
ALIKE = 1e-9  # values nearer than this are one


class Curve(NamedTuple):
    """The key of a curve, which its rows share: their store, the values of further columns
    (`token`, `k`), and the kind of their sites."""

    store: str
    values: tuple[Any, ...]
    kind: str

    @property
    def is_points(self) -> bool:
        """Whether its sites belong to no block: each is a point of its own, beside the depths."""
        return self.kind == HEAD


def with_kinds(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with a column `kind`, the kind of each one's site."""
    kinds = {site: site_kind(site) for site in rows["site"].unique().drop_nulls()}
    sites = pl.col("site").cast(pl.String)
    return rows.with_columns(kind=sites.replace_strict(kinds, return_dtype=pl.String))


def by_curve(rows: pl.DataFrame, by: Sequence[str] = ()) -> dict[Curve, pl.DataFrame]:
    """The rows of each curve, from input to output, in order of first appearance. A curve is a
    store, the values of `by` (None where there is no such column) and the kind of its sites."""
    lacking = [name for name in by if name not in rows.columns]
    rows = with_kinds(rows).with_columns(pl.lit(None).alias(name) for name in lacking)
    found = rows.partition_by("store", *by, "kind", maintain_order=True, as_dict=True)
    return {
        Curve(store, tuple(values), kind): own.sort("rel_depth", maintain_order=True)
        for (store, *values, kind), own in found.items()
    }


def curve_looks(rows: pl.DataFrame, by: Sequence[str] = ()) -> dict[Curve, Look]:
    """Curve -> how it is drawn. The colour is the store's where there are several, see
    `store_looks`; sites that belong to no block look as the first kind of their store."""
    curves = list(by_curve(rows, by))
    stores = store_order(rows)
    kinds = list(dict.fromkeys(curve[1:] for curve in curves if not curve.is_points))
    grouped = store_looks(rows) if len(groups_of(rows["store"].unique())) > 1 else {}
    found = {}
    for curve in curves:
        same = [kind for kind in kinds if curve.is_points and kind[0] == curve.values]
        kind = (
            kinds.index(same[0] if same else curve[1:])
            if same or curve[1:] in kinds
            else 0
        )
        if grouped:
            kinded = {"marker": marker(kind)} if len(kinds) > 1 else {}
            found[curve] = grouped[curve.store] | kinded
            continue
        store = stores.index(curve.store)
        tint, mark = (store, kind or store) if len(stores) > 1 else (kind, kind)
        stroke = STROKES[kind % len(STROKES)] if len(stores) > 1 else "-"
        if len(stores) > 1 and len(kinds) > 1:
            mark = kind
        found[curve] = {
            "color": colour(tint),
            "marker": marker(mark),
            "linestyle": stroke,
        }
    return found


def store_looks(rows: pl.DataFrame) -> dict[str, Look]:
    """Store -> colour, marker and stroke. Stores of several groups (`GROUP/NAME/VARIANT`) have the
    colour of their name and the stroke and marker of their variant, in every group the same."""
    order = store_order(rows)
    if len(groups_of(rows["store"].unique())) == 1:
        return {
            store: {"color": colour(i), "marker": marker(i), "linestyle": "-"}
            for i, store in enumerate(order)
        }
    parts = {store: split_label(store)[1].partition(SIGN)[::2] for store in order}
    names, variants = (
        list(dict.fromkeys(of)) for of in zip(*parts.values(), strict=True)
    )
    return {
        store: {
            "color": colour(names.index(name)),
            "marker": marker(
                variants.index(variant) if len(variants) > 1 else names.index(name)
            ),
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
    while match is not None and (
        deeper := re.fullmatch(r".*?(?:^|\.)\d+\.(.+)", match[1])
    ):
        match = deeper
    if match is not None:
        return match[1]
    if re.search(r"\.\d+$", site):
        return "block"
    return HEAD


def of_models(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows without those of baselines."""
    if "baseline" in rows.columns:
        return rows.filter(pl.col("baseline").is_null())
    return rows


def baselines_of(rows: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """The rows of each baseline, in order of first appearance."""
    if "baseline" not in rows.columns:
        return {}
    named = rows.filter(pl.col("baseline").is_not_null())
    found = named.partition_by("baseline", maintain_order=True, as_dict=True)
    return {str(name): own for (name,), own in found.items()}


def dashes_of(rows: pl.DataFrame) -> Look:
    """Baseline -> its dash pattern."""
    return {name: DASHES[i % len(DASHES)] for i, name in enumerate(baselines_of(rows))}


def curve_label(rows: pl.DataFrame, by: Sequence[str], curve: Curve) -> str:
    """The store, and every other column in which the rows have several values."""
    label = curve.store
    if len(groups_of(rows["store"].unique())) > 1:  # whose panel names the group
        label = split_label(label)[1]
    parts = [shorten(label, 28)]
    kinds = {*map(site_kind, rows["site"].unique())} - {HEAD}
    if len(kinds) > 1 and not curve.is_points:
        parts.append(PARTS.get(curve.kind, curve.kind) or "block output")
    for name, value in zip(by, curve.values, strict=True):
        if name in rows.columns and rows[name].n_unique() > 1:
            parts.append(
                token_words(str(value)) if name == "token" else f"{name} = {value}"
            )
    return ", ".join(parts)


def shared_baselines(curves: dict[Curve, pl.DataFrame]) -> set[str]:
    """The baselines of which several curves have the same value everywhere."""
    values: dict[str, list[pl.Series]] = {}
    for curve, rows in curves.items():
        for name, own in baselines_of(rows).items() if not curve.is_points else ():
            values.setdefault(name, []).append(own["value"])
    return {
        name
        for name, of in values.items()
        if len(of) > 1 and float(np.ptp(pl.concat(of).to_numpy())) < ALIKE
    }
