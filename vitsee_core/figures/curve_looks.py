"""Looks of curves over depth: colours of stores, strokes of kinds of sites, dashes of baselines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vitsee_core.figures.plotting import colour, marker, store_order
from vitsee_core.tables.groups import GROUP_SEPARATOR, groups_of, split_label
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import BLOCK_PARTS, token_words
from vitsee_core.types import pl

FIRST = ("embed", "stem")  # sites that belong to the curve of the blocks' outputs
HEAD = "head"  # the kind of sites that belong to no block
# Line styles of matplotlib: (offset, (on, off, ...)) in points; of baselines, and of curves.
DASHES = ((0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (3, 1)))
STROKES = ("-", (0, (7, 1.5)), (0, (3, 1.2)), (0, (7, 1.5, 1.5, 1.5)))
Look = dict[str, Any]  # keywords of matplotlib's `plot`
ALIKE = 1e-9  # values nearer to each other than this count as equal


class Curve(NamedTuple):
    """The key of a curve, which its rows share: their store, the values of further columns
    (`token`, `k`), and the kind of their sites."""

    store: str
    values: tuple[Any, ...]
    kind: str

    @property
    def is_points(self) -> bool:
        """Whether its sites belong to no block: each is a point of its own, right of depth 1."""
        return self.kind == HEAD


def with_kinds(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with a further column `kind`, the kind of their site."""
    kinds = {site: site_kind(site) for site in rows["site"].unique().drop_nulls()}
    sites = pl.col("site").cast(pl.String)
    return rows.with_columns(kind=sites.replace_strict(kinds, return_dtype=pl.String))


def by_curve(rows: pl.DataFrame, by: Sequence[str] = ()) -> dict[Curve, pl.DataFrame]:
    """Return the rows of each curve, from input to output, in order of first appearance.

    A curve is a store, the values of the columns `by` (None where the rows lack the column) and
    the kind of its sites.
    """
    lacking = [name for name in by if name not in rows.columns]
    rows = with_kinds(rows).with_columns(pl.lit(None).alias(name) for name in lacking)
    parts = rows.partition_by("store", *by, "kind", maintain_order=True, as_dict=True)
    curves = {}
    for (store, *values, kind), curve_rows in parts.items():
        curve = Curve(store, tuple(values), kind)
        curves[curve] = curve_rows.sort("rel_depth", maintain_order=True)
    return curves


def curve_looks(rows: pl.DataFrame, by: Sequence[str] = ()) -> dict[Curve, Look]:
    """Return how each curve is drawn: its colour, marker and stroke.

    With several stores a colour stands for a store, stroke and marker for the kind of sites (and
    the values of `by`); with one store colours stand for the kinds. Stores of several groups look
    as `store_looks` says. Sites that belong to no block look like the first kind of their store.
    """
    curves = list(by_curve(rows, by))
    stores = store_order(rows)
    several_stores = len(stores) > 1
    # (values, kind) of the curves: all that distinguishes those of one store.
    kinds = list(dict.fromkeys(curve[1:] for curve in curves if not curve.is_points))
    grouped: dict[str, Look] = {}
    if len(groups_of(rows["store"].unique())) > 1:
        grouped = store_looks(rows)
    looks = {}
    for curve in curves:
        kind_number = _kind_number(curve, kinds)
        if grouped:
            looks[curve] = dict(grouped[curve.store])
            if len(kinds) > 1:
                looks[curve]["marker"] = marker(kind_number)
            continue
        store_number = stores.index(curve.store)
        if not several_stores:
            looks[curve] = {
                "color": colour(kind_number),
                "marker": marker(kind_number),
                "linestyle": "-",
            }
            continue
        looks[curve] = {
            "color": colour(store_number),
            "marker": marker(kind_number if len(kinds) > 1 else store_number),
            "linestyle": STROKES[kind_number % len(STROKES)],
        }
    return looks


def _kind_number(curve: Curve, kinds: Sequence[tuple[tuple[Any, ...], str]]) -> int:
    """Return the index of a curve's (values, kind), or the one that its points look like."""
    if curve.is_points:
        for i, (values, _) in enumerate(kinds):
            if values == curve.values:
                return i
    key = (curve.values, curve.kind)
    if key in kinds:
        return kinds.index(key)
    return 0


def store_looks(rows: pl.DataFrame) -> dict[str, Look]:
    """Return the colour, marker and stroke of each store.

    Stores of several groups, labelled `GROUP/NAME/VARIANT`, have the colour of their name and the
    stroke and marker of their variant, the same in every group.
    """
    order = store_order(rows)
    if len(groups_of(rows["store"].unique())) == 1:
        return {
            store: {"color": colour(i), "marker": marker(i), "linestyle": "-"}
            for i, store in enumerate(order)
        }
    labels: dict[str, tuple[str, str]] = {}  # store -> name, variant
    for store in order:
        name, _, variant = split_label(store)[1].partition(GROUP_SEPARATOR)
        labels[store] = (name, variant)
    names = list(dict.fromkeys(name for name, _ in labels.values()))
    variants = list(dict.fromkeys(variant for _, variant in labels.values()))
    looks = {}
    for store, (name, variant) in labels.items():
        name_number = names.index(name)
        variant_number = variants.index(variant)
        looks[store] = {
            "color": colour(name_number),
            "marker": marker(variant_number if len(variants) > 1 else name_number),
            "linestyle": STROKES[variant_number % len(STROKES)],
        }
    return looks


def site_kind(site: str) -> str:
    """Return the part of a site's name after its block's path: `out`, `norm1`, `attn.branch`.

    `out` for what enters the first block; `head` for sites that belong to no block.
    """
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
    """Return the rows without those of baselines."""
    if "baseline" in rows.columns:
        return rows.filter(pl.col("baseline").is_null())
    return rows


def baselines_of(rows: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return the rows of each baseline by its name, in order of first appearance."""
    if "baseline" not in rows.columns:
        return {}
    rows = rows.filter(pl.col("baseline").is_not_null())
    parts = rows.partition_by("baseline", maintain_order=True, as_dict=True)
    return {str(name): baseline_rows for (name,), baseline_rows in parts.items()}


def dashes_of(rows: pl.DataFrame) -> Look:
    """Return the dash pattern of each baseline."""
    return {name: DASHES[i % len(DASHES)] for i, name in enumerate(baselines_of(rows))}


def curve_label(rows: pl.DataFrame, by: Sequence[str], curve: Curve) -> str:
    """Return a curve's text in the legend: its store, and what tells it from the store's others.

    Args:
        rows: those of all curves.
        by: columns whose values make curves of their own; named where the rows have several.
        curve: the curve.
    """
    label = curve.store
    if len(groups_of(rows["store"].unique())) > 1:  # the panel's title names the group
        label = split_label(label)[1]
    parts = [shorten(label, 28)]
    kinds = {*map(site_kind, rows["site"].unique())} - {HEAD}
    if len(kinds) > 1 and not curve.is_points:
        parts.append(BLOCK_PARTS.get(curve.kind, curve.kind) or "block output")
    for name, value in zip(by, curve.values, strict=True):
        if name in rows.columns and rows[name].n_unique() > 1:
            if name == "token":
                parts.append(token_words(str(value)))
            else:
                parts.append(f"{name} = {value}")
    return ", ".join(parts)


def shared_baselines(curves: dict[Curve, pl.DataFrame]) -> set[str]:
    """Return the baselines that have one value, the same in several curves."""
    values_of: dict[str, list[pl.Series]] = {}
    for curve, rows in curves.items():
        if curve.is_points:
            continue
        for name, baseline_rows in baselines_of(rows).items():
            values_of.setdefault(name, []).append(baseline_rows["value"])
    shared = set()
    for name, values in values_of.items():
        spread = float(np.ptp(pl.concat(values).to_numpy()))
        if len(values) > 1 and spread < ALIKE:
            shared.add(name)
    return shared
