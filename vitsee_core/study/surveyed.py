"""The sites and summaries that a model offers to a study, from shapes on torch's meta device: no
weights, no pixels. A tower of packed patches is run with random weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import select_names

if TYPE_CHECKING:
    from vitsee_core.models.sites import SiteTable
    from vitsee_stores.layout import SiteSpec

WITHIN = ("norms", "hidden", "residual")  # groups of sites within blocks
HALF = 2  # bytes of a stored activation


@dataclass(frozen=True)
class SurveyedModel:
    """A model of a study.

    Attributes:
        name: with its options, as for extract.
        lacks: as `catalogue.offers`, with `classifier`, too.
        flops: twice the multiply-adds of one image's forward pass.
        grid: rows and columns of the last site with one.
        heads: the site of the first block's heads.
        n_fields: number of sites with a receptive field.
        more_groups, more_sites: groups of sites within blocks, and these sites.
        more_bytes: of all these.
        more_fields: number of these with a receptive field.
    """

    label: str
    name: str
    lacks: dict[str, str | None]
    class_token: bool
    grid: tuple[int, int] | None
    heads: str | None
    flops: int
    size: tuple[int, int, int]
    n_blocks: int
    bytes_of_tokens: int
    bytes_pooled: int
    n_fields: int = 1
    more_groups: tuple[str, ...] = ()
    more_sites: tuple[str, ...] = ()
    more_bytes: int = 0
    more_fields: int = 0

    def lack(self, needs: Sequence[str]) -> str | None:
        """Why the model does not offer all of these, None if it does."""
        return next((self.lacks[what] for what in needs if self.lacks[what] is not None), None)


def survey(label: str, name: str, options: Mapping[str, Any] | None = None) -> SurveyedModel:
    """A model by its name, as for `vitsee extract`.

    Args:
        label: in the study.
        name: with its options, as in `NAME?OPTION=VALUE`.
        options: these options, as the keywords of `load_model`; by default none.

    Raises:
        ModelError: unknown, or it does not run without weights.
    """
    from vitsee_core.extraction.options import split_model
    from vitsee_core.models.language_input import is_language_input
    from vitsee_core.models.listing import flops_of, sketched_module
    from vitsee_core.models.load import load_model
    from vitsee_core.models.packing import packing_of
    from vitsee_core.models.site_tables import site_table, sketch
    from vitsee_core.study.catalogue import offers

    given, model = dict(options or {}), split_model(name)[0]
    module, size = sketched_module(model, given)
    if packing_of(module) is None and not is_language_input(module):
        table = sketch(module, size)
    else:  # where its tokens lie is seen on values
        made = load_model(**(given | {"name": model, "checkpoint": None, "random_init": 0}))
        module, size, table = made.module, made.input_size, site_table(made)
    try:
        flops = flops_of(module, size)
    except (NotImplementedError, RuntimeError) as error:
        raise VitseeError(f"{name} does not run without weights: {error}") from None
    names = {site.name for site in table.sites}
    lacks = offers(table)
    lacks["classifier"] = None if "logits" in names else "it has no classifier"
    default = select_names(["blocks"], table.sites)
    of_groups = {g: [s for s in table.sites if g in s.groups and not s.alias_of] for g in WITHIN}
    more = {s.name: s for some in of_groups.values() for s in some if s not in default}
    gridded = [site.layout for site in table.sites if site.layout and site.layout.grid]
    return SurveyedModel(
        label=label,
        name=name,
        lacks=lacks,
        class_token=any("cls" in layout.prefix for layout in gridded),
        grid=gridded[-1].grid if gridded else None,
        heads=_first_heads(table) if lacks["heads"] is None else None,
        flops=flops,
        size=size,
        n_blocks=len({site.block for site in table.sites if site.block}),
        bytes_of_tokens=_bytes(default, pooled=False),
        bytes_pooled=_bytes(default, pooled=True),
        n_fields=_with_grid(default) or 1,
        more_groups=tuple(group for group, sites in of_groups.items() if sites),
        more_sites=tuple(more),
        more_bytes=_bytes([*more.values()], pooled=False),
        more_fields=_with_grid([*more.values()]),
    )


def _first_heads(table: SiteTable) -> str | None:
    return next((site.name for site in table.sites if "heads" in site.groups), None)


def _with_grid(sites: Sequence[SiteSpec]) -> int:
    return sum(bool(site.layout and site.layout.grid) for site in sites)


def _bytes(sites: Sequence[SiteSpec], *, pooled: bool) -> int:
    total = 0
    for site in sites:
        grid = site.layout.grid if site.layout else None
        tokens = math.prod(site.shape)
        kept = (1 + (len(site.layout.prefix) if site.layout else 0)) * site.dim * 2 * HALF
        total += (tokens * HALF if not pooled and grid else 0) + kept
    return total
