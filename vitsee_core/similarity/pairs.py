"""The choice of the sites of stores that are compared, and of the rows of several stores that hold
the same image."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.runtime.streaming import Rows
from vitsee_core.types import Integers
from vitsee_stores import require_paired
from vitsee_stores.errors import MissingInput, StoreMismatch, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store

log = logging.getLogger(__name__)

Side = tuple["Store", "SiteSpec"]

DEFAULT_SITES = ("blocks",)
PAIRS = ("all", "same-depth", "branch")
# A sublayer's long branch -> names of its skip, by preference.
SKIPS = {
    "attn.branch": ("in",),
    "mlp.branch": ("mid",),
    "token.branch": ("in",),
    "channel.branch": ("mid",),
    "branch": ("shortcut", "in"),
}
PAIR_BY = ("image", "id")


@dataclass(frozen=True)
class SitePairs:
    """Sites to compare: rows with cols (None: rows with each other), and the requested (row, col)
    pairs, in the table's order."""

    rows: list[Side]
    cols: list[Side] | None
    places: list[tuple[int, int]]


def choose_pairs(
    stores: Sequence[Store],
    sites: Sequence[str] = (),
    sites_a: Sequence[str] = (),
    sites_b: Sequence[str] = (),
    pairs: str = "all",
) -> SitePairs:
    """The pairs that `vitsee cka` compares.

    all: one store's sites with each other, or its `sites_a` with its `sites_b`; two stores' sites;
    of three or more, one site each, with each other. same-depth: the first store's sites with each
    other store's, one by one. branch: one store's skips with its long branches, sublayers of one
    kind with each other.

    Args:
        stores: one or more.
        sites: selectors, for every store, by default `blocks`; for `branch` of sites in the blocks
            that count, by default all.
        sites_a: for the rows, instead of `sites`.
        sites_b: for the columns, instead of `sites`.
        pairs: one of `PAIRS`.

    Raises:
        SiteError: a selector without a match.
        MissingInput: the store has no skips and branches.
        VitseeError: a number of stores or sites that gives no such comparison.
    """
    if pairs not in PAIRS:
        raise VitseeError(f"no pairs {pairs!r}; expected {', '.join(PAIRS)}")
    if sites and sites_a and sites_b:
        raise VitseeError("--sites-a and --sites-b choose both sides; leave --sites out")
    if pairs == "branch":
        if len(stores) > 1 or sites_a or sites_b:
            raise VitseeError(
                "--pairs branch compares the skips of one store with its own branches; give one "
                "store, and --sites to choose its blocks"
            )
        return _branches(stores[0], sites)
    sites = sites or DEFAULT_SITES
    if pairs == "same-depth":
        return _same_depth(stores, sites, sites_a, sites_b)
    if len(stores) > 2:
        if sites_a or sites_b:
            raise VitseeError(
                f"--sites-a and --sites-b are the two sides of one or two stores, not of "
                f"{len(stores)}; use --sites"
            )
        return _square([_one_site(stores, sites)])
    if len(stores) == 1 and not (sites_a or sites_b):
        return _square(sites_of_each(stores, sites))
    a, b = _two_sides(stores, sites, sites_a, sites_b)
    return SitePairs(a, b, [(i, j) for i in range(len(a)) for j in range(len(b))])


def _square(sides: Sequence[Sequence[Side]]) -> SitePairs:
    (rows,) = sides
    n = len(rows)
    return SitePairs(list(rows), None, [(i, j) for i in range(n) for j in range(n)])


def _two_sides(
    stores: Sequence[Store],
    sites: Sequence[str],
    sites_a: Sequence[str],
    sites_b: Sequence[str],
) -> tuple[list[Side], list[Side]]:
    first = stores[0]
    last = stores[-1]
    if not sites_a and not sites_b:
        a, b = sites_of_each((first, last), sites)
        return a, b
    a = _of(first, sites_a or sites)
    return a, _of(last, sites_b or sites)


def _of(store: Store, patterns: Sequence[str]) -> list[Side]:
    return [(store, site) for site in store.select(patterns)]


def sites_of_each(stores: Sequence[Store], patterns: Sequence[str]) -> list[list[Side]]:
    """The chosen sites of every store; see `select_each`."""
    selection = select_each(stores, patterns, sites_of)
    return [[(store, site) for site in sites] for store, sites in selection.members]


def _one_site(stores: Sequence[Store], sites: Sequence[str]) -> list[Side]:
    """One site of every store. Raises VitseeError: a store has several."""
    chosen = sites_of_each(stores, sites)
    if any(len(of_store) > 1 for of_store in chosen):
        counts = ", ".join(
            f"{len(of_store)} of {of_store[0][0].label}" for of_store in chosen
        )
        raise VitseeError(
            f"{len(stores)} stores are compared by one site each; {' '.join(sites)} chooses "
            f"{counts} (give --sites pooled, --sites blocks.-1.out, or one site for each family: "
            "--sites blocks.11.out --sites layer4.2.out)"
        )
    return [of_store[0] for of_store in chosen]


def _same_depth(
    stores: Sequence[Store],
    sites: Sequence[str],
    sites_a: Sequence[str],
    sites_b: Sequence[str],
) -> SitePairs:
    """Pairs of sites: by name if both lists have the same names, else the i-th with the i-th."""
    if len(stores) == 1 and not (sites_a and sites_b):
        raise VitseeError(
            "--pairs same-depth compares two stores, or --sites-a with --sites-b of one; got one "
            "store"
        )
    rows: list[Side] = []
    cols: list[Side] = []
    places: list[tuple[int, int]] = []
    for other in stores[1:] or stores:
        rows, b = _two_sides((stores[0], other), sites, sites_a, sites_b)
        if len(rows) != len(b):
            raise VitseeError(
                f"--pairs same-depth: {len(rows)} sites of {stores[0].label} against {len(b)} of "
                f"{other.label}; choose as many of each with --sites-a and --sites-b"
            )
        by_name = {site.name: j for j, (_, site) in enumerate(b)}
        named = by_name.keys() == {site.name for _, site in rows}
        places += [
            (i, len(cols) + (by_name[site.name] if named else i))
            for i, (_, site) in enumerate(rows)
        ]
        cols += b
    return SitePairs(rows, cols, places)


def _branches(store: Store, sites: Sequence[str]) -> SitePairs:
    """Skips (rows) and long branches (cols), in the model's order within each kind of sublayer.
    Raises MissingInput: the store has no branches, or not their skips."""
    blocks = {site.block for site in store.select(sites)} if sites else None
    kinds: dict[str, list[tuple[SiteSpec, SiteSpec]]] = {}
    for site in store.sites.values():
        is_branch = site.part in SKIPS and "residual" in site.groups
        if is_branch and (blocks is None or site.block in blocks):
            kinds.setdefault(site.part, []).append((_skip(store, site), site))
    if not kinds:
        reason = store.manifest.left_out.get("residual")
        raise MissingInput(
            f"{store.label} keeps no skips and branches"
            + (
                f": {reason}"
                if reason
                else "; run: vitsee extract MODEL --sites residual ..."
            )
        )
    rows: list[Side] = []
    cols: list[Side] = []
    places: list[tuple[int, int]] = []
    for members in kinds.values():
        at = len(rows)
        n = len(members)
        rows += [(store, skip) for skip, _ in members]
        cols += [(store, branch) for _, branch in members]
        places += [(at + i, at + j) for i in range(n) for j in range(n)]
    return SitePairs(rows, cols, places)


def _skip(store: Store, branch: SiteSpec) -> SiteSpec:
    names = [f"{branch.block}.{part}" for part in SKIPS[branch.part]]
    for name in names:
        if name in store.sites:
            return store.sites[name]
    raise MissingInput(
        f"{store.label} keeps {branch.name} without its skip {names[0]}; run: vitsee extract MODEL "
        "--sites residual ..."
    )


def paired_rows(
    stores: Sequence[Store], chosen: Rows, pair_by: str = "image"
) -> tuple[dict[str, Integers], dict[str, Any]]:
    """The rows (n,) of every store that hold the same image, by store_id and in the first one's
    order, if all of them could read it; and notes for a sidecar.

    Args:
        stores: distinct stores.
        chosen: rows of the first one.
        pair_by: "image": the stores hold the same images, by ids, labels and bytes, in the same
            order; "id": rows with the same id, whatever their bytes, labels and order (the same
            pictures clean and corrupted); a row without a partner in every store is left out, which
            is logged.

    Raises:
        StoreMismatch: "image": they do not hold the same images in the same order; "id": a store
            holds an id twice, or no id is in all stores.
        VitseeError: an unknown word.
    """
    if pair_by not in PAIR_BY:
        raise VitseeError(
            f"no way to pair by {pair_by!r}; expected {' or '.join(PAIR_BY)}"
        )
    first, *others = stores
    names = [store.manifest.store_id for store in stores]
    mask = chosen.mask & first.valid
    if pair_by == "image":
        for other in others:
            mask = mask & require_paired(first, other)
        return dict.fromkeys(names, np.flatnonzero(mask)), {}
    for store in stores if others else ():
        each, times = np.unique(store.samples.id, return_counts=True)
        if (times > 1).any():
            raise StoreMismatch(
                f"{store.label} holds {(times > 1).sum()} ids more than once "
                f"({each[times > 1][0]!s}, ...); rows cannot be paired by id"
            )
    rows = np.flatnonzero(mask)
    paired = [rows]
    for other in others:
        ids = other.samples.id
        order = np.argsort(ids, kind="stable")
        wanted = first.samples.id[rows]
        at = np.searchsorted(ids[order], wanted).clip(max=len(ids) - 1)
        partners = order[at]
        there = (ids[partners] == wanted) & other.valid[partners]
        paired = [*(of_store[there] for of_store in paired), partners[there]]
        rows = paired[0]
    n = len(rows)
    if others and not n:
        labels = ", ".join(store.label for store in stores)
        raise StoreMismatch(
            f"no image is in all of {labels} under the same id: {first.label} has ids like "
            f"{first.samples.id[0]!s}, {others[0].label} like {others[0].samples.id[0]!s}"
        )
    left = {store.label: int(store.valid.sum()) - n for store in stores}
    if any(left.values()) and others:
        counts = ", ".join(
            f"{count} of {label}" for label, count in left.items() if count
        )
        log.info("%d images are paired by id; left out: %s", n, counts)
    equal = np.ones(n, bool)
    for other, of_store in zip(others, paired[1:], strict=True):
        equal &= first.samples.hash[rows] == other.samples.hash[of_store]
    notes = {"paired": "by id", "left_out": left, "with_equal_bytes": int(equal.sum())}
    return dict(zip(names, paired, strict=True)), {"pairing": notes}
