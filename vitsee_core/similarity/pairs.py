"""Choose the sites of stores that are compared, and the rows of several stores that hold the same
image."""

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

# A site of a store, on one side of a comparison.
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
    """The sites that are compared, and which of them with which."""

    rows: list[Side]
    cols: list[Side] | None  # None: rows with each other
    index_pairs: list[tuple[int, int]]  # (row, col) indices, in the table's order


def choose_pairs(
    stores: Sequence[Store],
    sites: Sequence[str] = (),
    sites_a: Sequence[str] = (),
    sites_b: Sequence[str] = (),
    pairs: str = "all",
) -> SitePairs:
    """Return the sites that `vitsee cka` compares, and their pairs.

    - "all": the sites of one store with each other, or its `sites_a` with its `sites_b`; the sites
      of one store with those of a second; of three or more stores one site each, with each other.
    - "same-depth": the first store's sites with those of each other store, one by one.
    - "branch": one store's skips with its long branches, within each kind of sublayer.

    Args:
        stores: one or more.
        sites: selectors of sites in every store, by default `blocks`. With "branch": any sites in
            the blocks that are compared, by default all blocks.
        sites_a: selectors for the rows, instead of `sites`.
        sites_b: selectors for the columns, instead of `sites`.
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
        return _all_with_each_other(_one_site_of_each(stores, sites))
    if len(stores) == 1 and not (sites_a or sites_b):
        (rows,) = sites_of_each(stores, sites)
        return _all_with_each_other(rows)
    # One store with two sides, or two stores (the last is the first where there is one).
    rows, cols = _two_sides(stores[0], stores[-1], sites, sites_a, sites_b)
    index_pairs = [(i, j) for i in range(len(rows)) for j in range(len(cols))]
    return SitePairs(rows, cols, index_pairs)


def _all_with_each_other(rows: list[Side]) -> SitePairs:
    """Return all pairs of these sites, in both orders and each with itself."""
    n = len(rows)
    index_pairs = [(i, j) for i in range(n) for j in range(n)]
    return SitePairs(rows, cols=None, index_pairs=index_pairs)


def _two_sides(
    store_a: Store,
    store_b: Store,
    sites: Sequence[str],
    sites_a: Sequence[str],
    sites_b: Sequence[str],
) -> tuple[list[Side], list[Side]]:
    """Return the chosen sites of store_a and of store_b, which may be the same store."""
    if not sites_a and not sites_b:
        rows, cols = sites_of_each((store_a, store_b), sites)
        return rows, cols
    rows = [(store_a, site) for site in store_a.select(sites_a or sites)]
    cols = [(store_b, site) for site in store_b.select(sites_b or sites)]
    return rows, cols


def sites_of_each(stores: Sequence[Store], patterns: Sequence[str]) -> list[list[Side]]:
    """Return the sites of every store that the patterns select.

    Raises:
        SiteError: a pattern matches no site of any store.
    """
    selection = select_each(stores, patterns, sites_of)
    return [[(store, site) for site in sites] for store, sites in selection.members]


def _one_site_of_each(stores: Sequence[Store], sites: Sequence[str]) -> list[Side]:
    """Return the one site that the selectors choose in each store.

    Raises:
        VitseeError: they choose several in a store.
    """
    chosen = sites_of_each(stores, sites)
    if any(len(store_sites) > 1 for store_sites in chosen):
        counts = ", ".join(
            f"{len(store_sites)} of {store_sites[0][0].label}" for store_sites in chosen
        )
        raise VitseeError(
            f"{len(stores)} stores are compared by one site each; {' '.join(sites)} chooses "
            f"{counts} (give --sites pooled, --sites blocks.-1.out, or one site for each family: "
            "--sites blocks.11.out --sites layer4.2.out)"
        )
    return [store_sites[0] for store_sites in chosen]


def _same_depth(
    stores: Sequence[Store],
    sites: Sequence[str],
    sites_a: Sequence[str],
    sites_b: Sequence[str],
) -> SitePairs:
    """Return the first store's sites (rows), each paired with its partner in each other store.

    Partners have the same name if both stores' sites have the same names; else the i-th site has
    the i-th. One store's `sites_a` are paired with its `sites_b`.

    Raises:
        VitseeError: a store has more or fewer sites than the first.
    """
    if len(stores) == 1 and not (sites_a and sites_b):
        raise VitseeError(
            "--pairs same-depth compares two stores, or --sites-a with --sites-b of one; got one "
            "store"
        )
    rows: list[Side] = []
    cols: list[Side] = []  # of all other stores, one after the other
    index_pairs: list[tuple[int, int]] = []
    for other in stores[1:] or stores:
        rows, partners = _two_sides(stores[0], other, sites, sites_a, sites_b)
        if len(rows) != len(partners):
            raise VitseeError(
                f"--pairs same-depth: {len(rows)} sites of {stores[0].label} against "
                f"{len(partners)} of {other.label}; choose as many of each with --sites-a and "
                "--sites-b"
            )
        # By name where all names agree, so that another order of the sites does not
        # matter.
        by_name = {site.name: j for j, (_, site) in enumerate(partners)}
        have_same_names = by_name.keys() == {site.name for _, site in rows}
        for i, (_, site) in enumerate(rows):
            j = by_name[site.name] if have_same_names else i
            # Columns of all other stores are numbered on.
            index_pairs.append((i, len(cols) + j))
        cols += partners
    return SitePairs(rows, cols, index_pairs)


def _branches(store: Store, sites: Sequence[str]) -> SitePairs:
    """Return skips (rows) and long branches (cols), all pairs within each kind of sublayer.

    Args:
        store: with the sites `residual`.
        sites: selectors of sites in the blocks to compare; none: all blocks.

    Raises:
        MissingInput: the store has no branches, or not their skips.
    """
    blocks = {site.block for site in store.select(sites)} if sites else None
    # Kind of sublayer -> its (skip, branch) in the model's order
    kinds: dict[str, list[tuple[SiteSpec, SiteSpec]]] = {}
    for site in store.sites.values():
        is_branch = site.part in SKIPS and "residual" in site.groups
        if is_branch and (blocks is None or site.block in blocks):
            kinds.setdefault(site.part, []).append((_skip_of_branch(store, site), site))
    if not kinds:
        reason = store.manifest.left_out.get("residual")
        advice = "; run: vitsee extract MODEL --sites residual ..."
        if reason:
            advice = f": {reason}"
        raise MissingInput(f"{store.label} keeps no skips and branches{advice}")
    rows: list[Side] = []
    cols: list[Side] = []
    index_pairs: list[tuple[int, int]] = []
    for members in kinds.values():
        first = len(rows)
        n = len(members)
        rows += [(store, skip) for skip, _ in members]
        cols += [(store, branch) for _, branch in members]
        # All pairs within a kind: attention branches with attention skips, MLPs with
        # MLPs.
        index_pairs += [(first + i, first + j) for i in range(n) for j in range(n)]
    return SitePairs(rows, cols, index_pairs)


def _skip_of_branch(store: Store, branch: SiteSpec) -> SiteSpec:
    """Return the site of the skip connection that is parallel to a long branch.

    Raises:
        MissingInput: the store does not keep it.
    """
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
    """Return the rows of each store that hold the same images.

    Args:
        stores: distinct stores.
        chosen: rows of the first one.
        pair_by: "image": the stores hold the same images, by ids, labels and bytes, in the same
            order. "id": rows with the same id are paired, whatever their bytes, labels and order
            (the same pictures clean and corrupted); a row without a partner in every store is left
            out, which is logged.

    Returns:
        store_id -> its rows (n,), in the first store's order, of images that are readable in all
        stores; and notes for a table's sidecar.

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
    if others:
        for store in stores:
            _require_distinct_ids(store)
    rows = np.flatnonzero(mask)
    paired = [rows]  # the rows of each store so far, all of one length
    for other in others:
        ids = other.samples.id
        # Sorted once, as each id of the first store is looked up among them.
        order = np.argsort(ids, kind="stable")
        first_ids = first.samples.id[rows]
        # Where each id would stand among the sorted ones; it is a partner if it is that id.
        position = np.searchsorted(ids[order], first_ids).clip(max=len(ids) - 1)
        partners = order[position]
        has_partner = (ids[partners] == first_ids) & other.valid[partners]
        # A row that has no partner here leaves all stores before, too.
        paired = [store_rows[has_partner] for store_rows in paired]
        paired.append(partners[has_partner])
        rows = paired[0]
    n = len(rows)
    if others and not n:
        labels = ", ".join(store.label for store in stores)
        raise StoreMismatch(
            f"no image is in all of {labels} under the same id: {first.label} has ids like "
            f"{first.samples.id[0]!s}, {others[0].label} like {others[0].samples.id[0]!s}"
        )
    left_out = {store.label: int(store.valid.sum()) - n for store in stores}
    if any(left_out.values()) and others:
        counts = ", ".join(
            f"{count} of {label}" for label, count in left_out.items() if count
        )
        log.info("%d images are paired by id; left out: %s", n, counts)
    # For the sidecar: how many are the same bytes although only ids were compared.
    equal = np.ones(n, bool)
    for other, other_rows in zip(others, paired[1:], strict=True):
        equal &= first.samples.hash[rows] == other.samples.hash[other_rows]
    notes = {
        "paired": "by id",
        "left_out": left_out,
        "with_equal_bytes": int(equal.sum()),
    }
    return dict(zip(names, paired, strict=True)), {"pairing": notes}


def _require_distinct_ids(store: Store) -> None:
    """Raise StoreMismatch if a store holds an id twice: it would have two partners."""
    ids, counts = np.unique(store.samples.id, return_counts=True)
    repeated = counts > 1
    if repeated.any():
        raise StoreMismatch(
            f"{store.label} holds {repeated.sum()} ids more than once "
            f"({ids[repeated][0]!s}, ...); rows cannot be paired by id"
        )
