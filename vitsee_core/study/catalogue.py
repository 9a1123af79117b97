"""Models by name: parameters, input size, and which analyses apply; and what a model offers to a
study, from shapes on torch's meta device: no weights, no pixels. A tower of packed patches is run
with random weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitsee_core.models.sources import source_of
from vitsee_core.runtime.progress import SILENT, Progress, counting
from vitsee_core.runtime.registry import loaded
from vitsee_core.tables.results import Table
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
        return next(
            (self.lacks[what] for what in needs if self.lacks[what] is not None), None
        )


def survey(
    label: str, name: str, options: Mapping[str, Any] | None = None
) -> SurveyedModel:
    """A model by its name, as for `vitsee extract`.

    Args:
        label: in the study.
        name: with its options, as in `NAME?OPTION=VALUE`.
        options: these options, as the keywords of `load_model`; by default none.

    Raises:
        ModelError: unknown, or it does not run without weights.
    """
    from vitsee_core.extraction.options import split_model
    from vitsee_core.models.load import load_model
    from vitsee_core.models.site_tables import site_table, sketch
    from vitsee_core.models.tokens.towers import is_language_input, packing_of
    from vitsee_core.models.without_weights import flops_of, sketched_module
    from vitsee_core.study.catalogue import offers

    given = dict(options or {})
    model = split_model(name)[0]
    module, size = sketched_module(model, given)
    if packing_of(module) is None and not is_language_input(module):
        table = sketch(module, size)
    else:  # where its tokens lie is seen on values
        made = load_model(
            **(given | {"name": model, "checkpoint": None, "any_weights": True})
        )
        module = made.module
        size = made.input_size
        table = site_table(made)
    try:
        flops = flops_of(module, size)
    except (NotImplementedError, RuntimeError) as error:
        raise VitseeError(f"{name} does not run without weights: {error}") from None
    names = {site.name for site in table.sites}
    lacks = offers(table)
    lacks["classifier"] = None if "logits" in names else "it has no classifier"
    default = select_names(["blocks"], table.sites)
    of_groups = {
        g: [s for s in table.sites if g in s.groups and not s.alias_of] for g in WITHIN
    }
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


COLUMNS = (
    *(
        "model",
        "tags",
        "n_params",
        "flops",
        "height",
        "width",
        "n_blocks",
        "heads",
        "grid",
    ),
    *("analyses", "left_out"),
)
MOST = (
    100  # architectures that are made without being asked for more; about a second each
)


def run(
    pattern: str,
    *,
    limit: int = MOST,
    names_only: bool = False,
    prove: bool = False,
    progress: Progress = SILENT,
) -> Table:
    """One row per architecture, in its library's order.

    Columns: `COLUMNS`. `tags`: of its pretrained weights, with spaces between (`NAME.TAG` is a
    model). n_params, flops (floating-point operations per image), height, width (input size in
    pixels), n_blocks, heads (per block; several numbers where blocks differ), grid (of the last
    site that lies on the image, ROWSxCOLS): with the default arguments.
    `analyses`: the commands that its shapes allow, with spaces between; what has to be proven on
    pixels is proven by extract. `left_out`: the others and why.

    Args:
        pattern: a name, or a glob of timm's architectures or of `NAME.TAG`, or of those of another
            source (`torchvision:vit_*`); case-sensitive, but for classes of transformers where none
            matches so. A class of images and text stands for its towers, CLASS#PATH; of several
            models one that is refused is a row with the reason.
        limit: how many architectures may be made.
        names_only: make none; columns beyond tags and input size are empty.
        prove: make each with random weights and prove its sites on pixels, as extract does, in
            place of reading shapes, which do not reveal attention or branches of another kind.
        progress: advanced by one per model.

    Raises:
        VitseeError: nothing matches, or more than `limit`.
    """
    found = source_of(pattern).matching()
    if len(found) > limit and not names_only:
        raise VitseeError(
            f"{pattern!r} matches {len(found)} architectures, which takes about "
            f"{len(found) / 60:.0f} minutes; narrow it, list --names alone, or give "
            f"--limit {len(found)}"
        )
    if names_only:
        rows = [_named(name, tags) for name, tags in found.items()]
    else:
        needs = needs_of_analyses()
        rows = []
        with counting(progress, len(found), "models"):
            for name, tags in found.items():
                rows.append(_made(name, tags, needs, prove, len(found) > 1))
                progress.advance(1)
    return Table.from_rows(rows, COLUMNS)


def needs_of_analyses() -> dict[str, tuple[str, ...]]:
    """Command -> what a model must offer for it (`offers`), as each analysis declares; those
    of tables are left out, and guests that cannot be used."""
    found: dict[str, tuple[str, ...]] = {}
    for name, analysis in loaded():
        if analysis.needs is not None:
            found[name.replace("_", "-")] = tuple(analysis.needs)
    return found


def offers(table: SiteTable) -> dict[str, str | None]:
    """Each need of an analysis -> why the model does not offer it, None where it does: `sites`,
    `grid` (sites that lie on the image), `attention` (token to token), `heads` (their outputs),
    `residual` (branches), `images` (still ones, no clips)."""
    clips = any(site.layout is not None and site.layout.frames for site in table.sites)
    grid = any(site.layout is not None and site.layout.grid for site in table.sites)
    heads = any("heads" in site.groups for site in table.sites)
    return {
        "sites": None if table.sites else "no module gives one tensor per image",
        "grid": None if grid else "no site lies on the image's grid",
        "attention": table.attention_refusal,
        "heads": None
        if heads
        else table.attention_refusal or "no block whose heads are known",
        "residual": table.residual_refusal,
        "images": "it takes clips, and the analysis is of images" if clips else None,
    }


def _named(name: str, tags: Sequence[str]) -> dict[str, Any]:
    height, width = source_of(name).stated_size() or (None, None)
    return {"model": name, "tags": " ".join(tags), "height": height, "width": width}


def _made(
    name: str,
    tags: Sequence[str],
    needs: Mapping[str, tuple[str, ...]],
    prove: bool,
    several: bool,
) -> dict[str, Any]:
    from vitsee_core.models.hook_points import ModelError
    from vitsee_core.models.load import load_model
    from vitsee_core.models.site_tables import site_table, sketch
    from vitsee_core.models.without_weights import flops_of, sketched_module

    try:
        module, size = sketched_module(name, {})
    except ModelError as error:
        if not several:
            raise
        return {"model": name, "tags": " ".join(tags), "left_out": _line(error)}
    row: dict[str, Any] = {
        "model": name,
        "tags": " ".join(tags),
        "n_params": sum(p.numel() for p in module.parameters()),
        "height": size[1],
        "width": size[2],
    }
    try:
        table = (
            site_table(load_model(name, any_weights=True))
            if prove
            else sketch(module, size)
        )
    except (ModelError, NotImplementedError) as error:
        return {**row, "left_out": f"unknown without weights: {_line(error)}"}
    lacks = offers(table)
    reasons: dict[str, list[str]] = {}
    supported = []
    for command, wanted in needs.items():
        why = next((lacks[what] for what in wanted if lacks[what] is not None), None)
        if why is None:
            supported.append(command)
        else:
            reasons.setdefault(why, []).append(command)
    left_out = "; ".join(f"{' '.join(some)}: {why}" for why, some in reasons.items())
    n_blocks = len({site.block for site in table.sites if site.block is not None})
    heads = [str(block.n_heads) for block in table.attention]
    grids = [site.layout.grid for site in table.sites if site.layout and site.layout.grid]
    grid = "x".join(map(str, grids[-1])) if grids else None
    row |= {"n_blocks": n_blocks, "heads": " ".join(dict.fromkeys(heads)), "grid": grid}
    with suppress(NotImplementedError, RuntimeError):
        row["flops"] = flops_of(module, size)
    return {**row, "analyses": " ".join(supported), "left_out": left_out}


def _line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error))[:200]
