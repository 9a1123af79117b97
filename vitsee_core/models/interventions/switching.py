"""Interventions on a model: what the options name is found in its site table, and values in their
stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.intervention_spec import (
    OPTIONS,
    HeadAblation,
    Intervention,
    Registers,
    Replacement,
    Values,
    parse,
)
from vitsee_core.models.interventions.changes import (
    BlockedAttention,
    Change,
    ChangedSite,
    Changes,
    SiteChanges,
    blocked_pairs,
    refuse_empty_rows,
)
from vitsee_core.models.interventions.replacements import (
    Moved,
    Reference,
    TokenChoice,
    check_base,
    check_site,
    choose_tokens,
    other_neurons,
    register_neurons,
)
from vitsee_core.models.sites import AttentionBlock, SiteTable
from vitsee_stores import Store, open_store
from vitsee_stores.errors import SiteError
from vitsee_stores.layout import SiteSpec
from vitsee_stores.manifest import abbreviate
from vitsee_stores.selectors import select_names
from vitsee_stores.weights_names import ranges

# Names of blocks in an error line.
SHOWN = 8


class Switch:
    """Finds what a model's interventions are about.

    identity: of the new store, what base stores are compared with; None to leave the stores alone
    (`vitsee sites`). seed, index: of noise and shuffles, and the images' places in the data set.
    """

    def __init__(
        self,
        name: str,
        table: SiteTable,
        interventions: Sequence[Intervention],
        identity: Mapping[str, Any] | None = None,
        seed: int = 0,
        index: NDArray[np.int64] | None = None,
    ) -> None:
        self.name = name
        self.table = table
        self.interventions = tuple(interventions)
        self.identity = identity
        self.seed = seed
        self.index = np.zeros(0, np.int64) if index is None else index
        self.bases: dict[str, Store] = {}
        self.changed: dict[str, SiteChanges] = {}
        # Block -> (tokens, tokens), True where a query does not see a key.
        self.pairs: dict[str, NDArray[np.bool_]] = {}

    def lines(self) -> list[str]:
        """Return the interventions in words, a line each, as manifests and tables have them.

        Raises:
            VitseeError: sites, tokens, heads or stores that are not there, or do not fit; in one
                line.
        """
        # Both `lines` and `changes` fill these anew from the options.
        self.changed.clear()
        self.pairs.clear()
        lines = [self._add(intervention) for intervention in self.interventions]
        # Refused only now: several options together may leave a query without any key.
        blocks = {block.name: block for block in self.table.attention}
        for name, pairs in self.pairs.items():
            refuse_empty_rows(
                pairs, blocks[name].layout, f"{OPTIONS['attention']} at {name}"
            )
        return lines

    def changes(self, module: nn.Module) -> Changes:
        """Return the interventions as hooks on the model's module, not yet in effect.

        Raises:
            VitseeError: as `lines`.
        """
        lines = self.lines()
        store_ids = sorted({store.manifest.store_id for store in self.bases.values()})
        changes = Changes(module, lines, store_ids, self.seed, self.index)
        changes.sites = self.changed
        for name, pairs in self.pairs.items():
            # A distance beyond the grid blocks nothing, and a mode would count as an
            # intervention.
            if pairs.any():
                path = self.table.attention_modules[name]
                changes.attention[name] = (path, BlockedAttention(pairs))
        return changes

    def _add(self, one: Intervention) -> str:
        """Add one intervention; its line."""
        if isinstance(one, Replacement):
            said = f"{OPTIONS['replace']} {one.text}"
            sites = self._sites(one.sites, said)
            for site in sites:
                tokens = _tokens_of(site, one.tokens, f"{said}: {site.name}")
                self._change(site, tokens, None, one.values, ",".join(one.tokens), said)
            return f"{','.join(one.tokens)}={one.values.kind} at {_names(sites)}"
        if isinstance(one, HeadAblation):
            said = f"{OPTIONS['heads']} {one.text}"
            blocks = self._blocks(one.blocks, said)
            for block in blocks:
                self._ablate(block, one, said)
            heads = ",".join(map(str, one.heads))
            return f"heads {heads}={one.values.kind} at {_names(blocks)}"
        if isinstance(one, Registers):
            return self._add_registers(one, f"{OPTIONS['registers']} {one.text}")
        said = f"{OPTIONS['attention']} {one.text}"
        blocks = self._blocks(one.blocks, said)
        for block in blocks:
            pairs = blocked_pairs(one.what, block.layout, f"{said}: {block.name}")
            # The union of all options about this block.
            self.pairs[block.name] = self.pairs.get(block.name, False) | pairs
        return f"no {one.what} at {_names(blocks)}"

    def _sites(self, patterns: str, said: str) -> list[SiteSpec]:
        """The stored sites that the patterns select."""
        try:
            chosen = select_names(
                [patterns], self.table.sites, hint=f"vitsee sites {self.name}"
            )
        except SiteError as error:
            raise ModelError(f"{said}: {error}") from None
        # A dictionary by stored name, so that an alias beside its site is changed once.
        return list(
            {
                (s.alias_of or s.name): self.table[s.alias_of or s.name] for s in chosen
            }.values()
        )

    def _blocks(self, patterns: str, said: str) -> list[AttentionBlock]:
        """The blocks that the patterns select among those whose attention is known."""
        served = self.table.attention
        if not served:
            raise ModelError(
                f"{said} cannot be done in {self.name}: {self.table.attention_refusal}"
            )
        # Blocks as entries of a table of sites, so that every selector of sites (globs,
        # negative numbers, depths) also selects blocks.
        last = max(1, len(served) - 1)
        places = [
            replace(
                self.table.sites[0],
                name=b.name,
                part="",
                block=b.name,
                groups=(),
                depth=i,
                rel_depth=i / last,
                alias_of=None,
                site_path=None,
            )
            for i, b in enumerate(served)
        ]
        try:
            found = {site.name for site in select_names([patterns], places)}
        except SiteError:
            # A name without a wildcard may be a block whose attention is known not to be
            # captured.
            reason = self.table.left_out.get(patterns) or self.table.left_out.get(
                f"{patterns} attention"
            )
            name = self.name
            there = (
                f"{name} has no such block with token-to-token attention; there are: "
                f"{abbreviate([block.name for block in served], SHOWN)} (run: vitsee "
                f"sites {name})"
            )
            raise ModelError(f"{said}: {reason or there}") from None
        return [block for block in served if block.name in found]

    def _ablate(self, block: AttentionBlock, one: HeadAblation, said: str) -> None:
        name = f"{block.name}.attn.heads"
        if block.name not in self.table.heads or name not in self.table.points:
            raise ModelError(
                f"{said}: the outputs of the heads of {block.name} are no site"
            )
        site = self.table[name]
        # Ascending: the last is the largest.
        if one.heads[-1] >= block.n_heads:
            raise ModelError(
                f"{said}: {block.name} has the heads 0 to {block.n_heads - 1}, not "
                f"{one.heads[-1]}"
            )
        # (heads, head dim): the heads' outputs lie side by side in the channels.
        channels = np.arange(site.dim).reshape(block.n_heads, -1)[list(one.heads)].ravel()
        tokens = TokenChoice(block.layout, np.arange(block.layout.n_tokens))
        about = f"heads {one.heads}"
        self._change(site, tokens, channels, one.values, about, said)

    def _add_registers(self, one: Registers, said: str) -> str:
        """Let register neurons move their largest values to the tokens that were added, the last
        prefix tokens of the blocks; return the line about it (Jiang et al. 2025)."""
        sites = self._sites(one.site, said)
        site = sites[0]
        layout = sites[0].layout
        if len(sites) > 1 or site.block is None or layout is None or not layout.n_prefix:
            raise ModelError(
                f"{said}: {one.site} is {_names(sites)}; expected one block's output"
            )
        # Neurons behind the site cannot have made its outliers.
        before = self.table.sites[: self.table.sites.index(site)]
        hidden = [
            self.table[self._stored(s.name)]
            for s in before
            if "hidden" in s.groups and s.layout == layout
        ]
        if not hidden:
            raise ModelError(
                f"{said}: there is no hidden layer of an MLP before {site.name}"
            )
        kind = "random" if one.values.kind == "random" else "register"
        line = f"{one.n} register{'s' * (one.n > 1)} with {one.n_neurons} {kind} neurons"
        # `vitsee sites` opens no store, so the neurons are not named.
        if self.identity is None:
            return f"{line} up to {site.name}"
        store = self._base(one.values, said)
        hidden_names = [s.name for s in hidden]
        try:
            neurons_by_site = register_neurons(
                store, site.name, hidden_names, one.n_neurons
            )
            # The control: as many neurons of the same layers, others than these.
            if one.values.kind == "random":
                widths = {s.name: s.dim for s in hidden}
                neurons_by_site = other_neurons(neurons_by_site, widths, self.seed)
        except ModelError as error:
            raise ModelError(f"{said}: {error}") from None
        # The registers that were added are the last of the prefix tokens.
        tokens = np.arange(layout.n_prefix - one.n, layout.n_prefix)
        words = []
        for name, neurons in neurons_by_site.items():
            self._add_change(self.table[name], Moved(tokens, neurons), said)
            words.append(f"{name} {' '.join(map(str, neurons))}")
        return f"{line}: {', '.join(words)}"

    def _change(
        self,
        site: SiteSpec,
        tokens: TokenChoice,
        channels: NDArray[np.int64] | None,
        values: Values,
        about: str,
        said: str,
    ) -> None:
        """Add a change of some tokens of a site.

        Args:
            site: the site.
            tokens: which tokens.
            channels: which channels, None for all.
            values: where the new values come from.
            about: tokens or heads in words, which random numbers depend on.
            said: the beginning of error lines.
        """
        reference = None
        # Zeros need no store.
        if values.store and self.identity is not None:
            store = self._base(values, said)
            base_site = check_site(store, site, said)
            reference = Reference(store, base_site, values.kind, tokens, self.seed)
        self._add_change(site, Change(tokens, channels, reference, about), said)

    def _add_change(self, site: SiteSpec, change: Change | Moved, said: str) -> None:
        """Add a change of a site, behind those that it has."""
        changed_site = self._changed_site(site, said)
        if site.name not in self.changed:
            self.changed[site.name] = SiteChanges(changed_site, [])
        self.changed[site.name].changes.append(change)

    def _base(self, values: Values, said: str) -> Store:
        """Return the store that values come from, opened once and checked against the model."""
        assert self.identity is not None
        if values.store not in self.bases:
            self.bases[values.store] = open_store(values.store)
        # Checked for each use: shuffle needs the same images, mean and noise do not.
        check_base(self.bases[values.store], self.identity, values.kind, said)
        return self.bases[values.store]

    def _changed_site(self, site: SiteSpec, said: str) -> ChangedSite:
        """Return where a site is replaced. Raises ModelError: it has no tensor of its own."""
        point = self.table.points[site.name]
        if len(point.hook_points) > 1:
            raise ModelError(
                f"{said}: {site.name} is made of several tensors, none of which is it"
            )
        # Hiera's tokens: `View.unflat` has no inverse for them.
        if point.view.form == "unrolled":
            raise ModelError(
                f"{said}: the tokens of {site.name} lie in another order than the image"
            )
        (hook_point,) = point.hook_points
        # Sums that no module gives, as `mid`, are known where the next module takes them.
        sums = {
            self._stored(residual.total) for residual in self.table.residuals.values()
        }
        return ChangedSite(
            name=site.name,
            hook_point=hook_point,
            view=point.view,
            # The skip must see the change of a sum, too, not the module alone that takes it.
            in_place=hook_point.side.is_input and site.name in sums,
            turned=hook_point.side in self.table.turned,
        )

    def _stored(self, name: str) -> str:
        return self.table[name].alias_of or name


def interventions_of(
    name: str, table: SiteTable, texts: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the interventions of these options on a model, in words; base stores are not opened.

    Args:
        name: the model.
        table: its sites.
        texts: option -> its texts, as `intervention_spec.parse` takes them.

    Raises:
        ModelError: the model has no such sites, tokens or heads.
    """
    return Switch(name, table, parse(**texts)).lines()


def _tokens_of(site: SiteSpec, words: Sequence[str], what: str) -> TokenChoice:
    if site.kind != "tokens" or site.layout is None:
        kinds = {"vector": "a vector", "rows": "rows on no grid", "raw": "a raw output"}
        kind = kinds.get(site.kind, site.kind)
        raise ModelError(f"{what} is {kind}, without tokens that could be replaced")
    return choose_tokens(words, site.layout, what)


def _names(places: Sequence[SiteSpec | AttentionBlock]) -> str:
    return ", ".join(ranges([place.name for place in places]))
