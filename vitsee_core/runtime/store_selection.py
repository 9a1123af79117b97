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

    members: list[
        tuple[Store, list[T]]
    ]  # each store that takes part, with its sites, blocks, ...
    left_out: dict[str, str] = field(
        default_factory=dict
    )  # label of each other store -> reason

    @property
    def stores(self) -> list[Store]:
        return [store for store, _ in self.members]

    @property
    def chosen(self) -> list[list[T]]:
        """The selected items of each of these stores."""
        return [chosen for _, chosen in self.members]

    def notes(self) -> dict[str, dict[str, str]]:
        """The entry of a sidecar about the stores that were left out, if any."""
        return {"left_out": self.left_out} if self.left_out else {}


def sites_of(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """The sites of one store; see `selectors.select_names`."""
    return store.select(list(patterns))


def select_each(
    stores: Sequence[Store],
    patterns: Sequence[str],
    select: Callable[[Store, Sequence[str]], list[T]],
) -> StoreSelection[T]:
    """The sites or blocks that selectors choose in every store.

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
    parts = split_patterns(patterns)
    single = len(parts) == 1 and not parts[0].startswith(NOT)
    able: list[Store] = []
    chosen: list[list[T]] = []  # by the last selector
    left_out: dict[str, MissingInput] = {}
    matching: list[list[str]] = []
    errors: list[dict[str, SiteError]] = []
    for store in stores:
        matched: list[str] = []
        failed: dict[str, SiteError] = {}
        picked: list[T] = []
        try:
            for part in parts:
                try:
                    picked = select(store, [part.removeprefix(NOT)])
                    matched.append(part)
                except SiteError as unmatched:
                    failed[part] = unmatched
        except MissingInput as lacking:
            left_out[store.label] = lacking
            continue
        able.append(store)
        chosen.append(picked)
        matching.append(matched)
        errors.append(failed)
    if not able:
        raise next(iter(left_out.values()))
    for store, matched, failed in zip(able, matching, errors, strict=True):
        for part, error in failed.items():
            alone = all(other.startswith(NOT) for other in matched)
            if alone or not any(part in others for others in matching):
                raise error
        if failed:
            log.info("%s: no site matches %s", store.label, ", ".join(failed))
    for reason in left_out.values():
        log.warning("left out: %s", reason)
    if not single:
        chosen = [
            select(store, matched) for store, matched in zip(able, matching, strict=True)
        ]
    return StoreSelection(
        list(zip(able, chosen, strict=True)),
        {label: str(reason) for label, reason in left_out.items()},
    )
