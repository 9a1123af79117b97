"""The grammar that chooses sites: names, globs, groups, and indices from the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from vitsee_stores.errors import SiteError

if TYPE_CHECKING:
    from vitsee_stores.plan import SiteSpec

GROUPS = ("blocks", "head", "residual", "norms", "hidden", "heads", "modules", "all")
SHOWN_NAMES = 12


def select_names(
    patterns: Iterable[str],
    sites: Sequence[SiteSpec],
    *,
    what: str = "model",
    hint: str = "vitsee sites MODEL",
) -> list[SiteSpec]:
    """The sites that any of `patterns` names, each once, in the order of `sites`.

    A pattern is a group (`blocks`), a name (`norm`), a case-sensitive glob (`blocks.*.out`), or
    either of these with negative numbers, which count the neighbouring paths from the end
    (`blocks.-1.out`, `stages.-1.blocks.-2.*`). Groups give stored names, never aliases; an alias
    that a glob matches is left out where the site it equals is chosen too.

    Raises:
        SiteError: a pattern that nothing matches; names `what` was searched and `hint` to run.
    """
    chosen: set[str] = set()
    exact: set[str] = set()
    for pattern in patterns:
        found = set(_match(pattern, sites))
        if not found:
            raise SiteError(
                f"no site matches {pattern!r}; sites of this {what}: {_shown(sites)} (run: {hint})"
            )
        chosen |= found
        if not _is_glob(pattern):
            exact |= found
    return [
        site
        for site in sites
        if site.name in chosen and (site.alias_of not in chosen or site.name in exact)
    ]


def _match(pattern: str, sites: Sequence[SiteSpec]) -> Iterator[str]:
    if pattern in GROUPS:
        for site in sites:
            if site.alias_of is None and (pattern == "all" or pattern in site.groups):
                yield site.name
        return
    names = [site.name for site in sites]
    for wanted in _without_negatives(pattern.split("."), names):
        for name in names:
            if name == wanted or (_is_glob(wanted) and fnmatchcase(name, wanted)):
                yield name


def _is_glob(pattern: str) -> bool:
    return pattern in GROUPS or any(character in pattern for character in "*?[")


def _without_negatives(parts: list[str], names: Sequence[str]) -> list[str]:
    """The pattern with each negative number replaced by what it counts to, once for each path
    that the parts before it match."""
    for place, part in enumerate(parts):
        if not (part.startswith("-") and part[1:].isdigit()):
            continue
        siblings: dict[str, set[int]] = {}
        for name in names:
            own = name.split(".")
            before = own[:place]
            if (
                len(own) > place
                and own[place].isdigit()
                and all(map(fnmatchcase, before, parts[:place]))
            ):
                siblings.setdefault(".".join(before), set()).add(int(own[place]))
        resolved: list[str] = []
        for before_text, numbers in siblings.items():
            if int(part[1:]) <= len(numbers):
                number = sorted(numbers)[int(part)]
                head = before_text.split(".") if before_text else []
                resolved += _without_negatives([*head, str(number), *parts[place + 1 :]], names)
        return resolved
    return [".".join(parts)]


def _shown(sites: Sequence[SiteSpec]) -> str:
    names = [site.name for site in sites]
    more = f", ... ({len(names)} in all)" if len(names) > SHOWN_NAMES else ""
    return (", ".join(names[:SHOWN_NAMES]) + more) or "none"
