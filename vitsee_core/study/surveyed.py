"""What a model offers a study, read from shapes on torch's meta device: no weights, no pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import select_names

if TYPE_CHECKING:
    from vitsee_core.models import SiteTable

HALF = 2  # bytes of a stored activation


@dataclass(frozen=True)
class SurveyedModel:
    """A model of a study. lacks: as `catalogue.offers`, with `classifier` too; flops: multiply-adds
    of one image's forward pass, twice; grid: rows and columns of the last site that lies on the
    image; heads: the site of the first block's heads."""

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

    def lack(self, needs: Sequence[str]) -> str | None:
        """Why the model does not offer all of these, None where it does."""
        return next((self.lacks[what] for what in needs if self.lacks[what] is not None), None)


def survey(label: str, name: str) -> SurveyedModel:
    """A model by its name, as for `vitsee extract`.

    Raises:
        ModelError: unknown, or it does not run without weights.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from vitsee_core.catalogue import offers
    from vitsee_core.models.create import without_weights
    from vitsee_core.models.site_tables import sketch

    module, size = without_weights(name)
    table = sketch(module, size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        try:
            module(torch.empty(1, *size, device="meta"))
        except (NotImplementedError, RuntimeError) as error:
            raise VitseeError(f"{name} does not run without weights: {error}") from None
    names = {site.name for site in table.sites}
    lacks = offers(table)
    lacks["classifier"] = None if "logits" in names else "it has no classifier"
    gridded = [site.layout for site in table.sites if site.layout and site.layout.grid]
    return SurveyedModel(
        label=label,
        name=name,
        lacks=lacks,
        class_token=any("cls" in layout.prefix for layout in gridded),
        grid=gridded[-1].grid if gridded else None,
        heads=_first_heads(table) if lacks["heads"] is None else None,
        flops=int(counter.get_total_flops()),
        size=size,
        n_blocks=len({site.block for site in table.sites if site.block}),
        bytes_of_tokens=_bytes(table, pooled=False),
        bytes_pooled=_bytes(table, pooled=True),
    )


def _first_heads(table: SiteTable) -> str | None:
    return next((site.name for site in table.sites if "heads" in site.groups), None)


def _bytes(table: SiteTable, *, pooled: bool) -> int:
    """Of one image's default sites."""
    total = 0
    for site in select_names(["blocks"], table.sites):
        grid = site.layout.grid if site.layout else None
        tokens = math.prod(site.shape)
        kept = (1 + (len(site.layout.prefix) if site.layout else 0)) * site.dim * 2 * HALF
        total += (tokens * HALF if not pooled and grid else 0) + kept
    return total
