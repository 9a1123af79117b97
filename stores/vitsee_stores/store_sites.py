"""The sites of a store by name."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from vitsee_stores.errors import MissingInput, SiteError
from vitsee_stores.layout import select_names
from vitsee_stores.plan import SiteSpec, StorePlan, TokenLayout
from vitsee_stores.url import Place


class StoreSites:
    """Site lookup of a store; see `Store`."""

    place: Place
    label: str
    plan: StorePlan
    sites: dict[str, SiteSpec]

    def select(self, patterns: str | Sequence[str]) -> list[SiteSpec]:
        """The sites selected by names, globs, groups or `blocks.-1.out`, in the model's order.

        Raises:
            SiteError: a pattern without a match.
        """
        patterns = [patterns] if isinstance(patterns, str) else patterns
        hint = f"vitsee info {shlex.quote(str(self.place))}"
        return select_names(patterns, self.plan.sites, what=f"store, {self.label}", hint=hint)

    def site(self, name: str) -> SiteSpec:
        """The stored site for one name, an alias or `blocks.-1.out`.

        Raises:
            MissingInput: the store does not hold it.
        """
        site = self.sites.get(name)
        if site is None:
            try:
                (site,) = self.select([name])
            except SiteError as error:
                raise MissingInput(f"{self.label}: {error}; extract adds it with --sites") from None
            except ValueError:
                raise SiteError(f"{name!r} names several sites; expected one") from None
        return self.sites[site.alias_of] if site.alias_of else site

    def layout(self, site: str) -> TokenLayout | None:
        """The token layout of a site; None for a vector or a raw output."""
        return self.site(site).layout
