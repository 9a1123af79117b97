"""Selecting sites in several stores: site names differ between models, contents between stores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from vitsee_stores.errors import MissingInput, SiteError
from vitsee_stores.selectors import NOT, split_patterns

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreSelection(Generic[T]):
    """Result of a selection."""

    # each store that takes part, with its sites, blocks, ...
    members: list[tuple[Store, list[T]]]
    # label of each other store -> reason
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def stores(self) -> list[Store]:
        """The stores that take part."""
        return [store for store, _ in self.members]

    @property
    def chosen(self) -> list[list[T]]:
        """The selected items of each of these stores."""
        return [chosen for _, chosen in self.members]

    def notes(self) -> dict[str, dict[str, str]]:
        """Return the entry of a sidecar about the stores that were left out, if any."""
        return {"left_out": self.left_out} if self.left_out else {}


def sites_of(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """Return the sites of one store that names, globs, groups and places in depth select."""
    return store.select(list(patterns))


def select_each(
    stores: Sequence[Store],
    patterns: Sequence[str],
    select: Callable[[Store, Sequence[str]], list[T]],
) -> StoreSelection[T]:
    """Return the sites or blocks that selectors choose in every store.

    Each selector must match in at least one of the stores, and in every store at least one must
    match; missing ones are logged. A store without the required input (attention, residual
    products, ...) is left out if another has it, which is logged, too.

    Args:
        stores: one or more.
        patterns: selectors, including comma lists.
        select: selects in one store; raises MissingInput if the store lacks the input, and
            SiteError if a selector matches nothing.

    Raises:
        MissingInput: no store has the input.
        SiteError: a pattern matches nothing in any store.
    """
    selectors = split_patterns(patterns)
    usable_stores: list[Store] = []
    matched_selectors: list[list[str]] = []  # of each usable store
    errors: list[dict[str, SiteError]] = []  # of each usable store, by selector
    last_items: list[list[T]] = []  # of each usable store, for its last selector
    left_out: dict[str, MissingInput] = {}
    for store in stores:
        matched: list[str] = []
        failed: dict[str, SiteError] = {}
        items: list[T] = []
        try:
            # One selector at a time, to know which of them match in this store.
            for selector in selectors:
                try:
                    items = select(store, [selector.removeprefix(NOT)])
                    matched.append(selector)
                except SiteError as error:
                    failed[selector] = error
        except MissingInput as missing:
            left_out[store.label] = missing
            continue
        usable_stores.append(store)
        matched_selectors.append(matched)
        errors.append(failed)
        last_items.append(items)
    if not usable_stores:
        raise next(iter(left_out.values()))
    for store, matched, failed in zip(
        usable_stores, matched_selectors, errors, strict=True
    ):
        only_exclusions_match = all(selector.startswith(NOT) for selector in matched)
        for selector, site_error in failed.items():
            matches_elsewhere = any(selector in others for others in matched_selectors)
            if only_exclusions_match or not matches_elsewhere:
                raise site_error
        if failed:
            log.info("%s: no site matches %s", store.label, ", ".join(failed))
    for reason in left_out.values():
        log.warning("left out: %s", reason)
    if len(selectors) == 1 and not selectors[0].startswith(NOT):
        chosen = last_items  # already selected by the only selector
    else:
        chosen = [
            select(store, matched)
            for store, matched in zip(usable_stores, matched_selectors, strict=True)
        ]
    return StoreSelection(
        members=list(zip(usable_stores, chosen, strict=True)),
        left_out={label: str(reason) for label, reason in left_out.items()},
    )
