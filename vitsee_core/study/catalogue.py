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
HALF = 2  # bytes of a stored activation, float16; pooled vectors take twice as many


@dataclass(frozen=True)
class SurveyedModel:
    """A model of a study, as its shapes describe it.

    Sites within blocks (`WITHIN`) are counted apart: only a thorough study keeps them.

    Attributes:
        label: names the model in the study.
        name: with its options, as for extract.
        lacks: need of an analysis -> why the model does not offer it, None if it does; those of
            `offers`, and `classifier`.
        class_token: whether the tokens include a class token.
        grid: rows and columns of the last site with a grid.
        heads: the site of the first block's heads.
        flops: twice the multiply-adds of one image's forward pass.
        size: channels, height and width of the input.
        n_blocks: number of blocks.
        bytes_of_tokens: of an image's tokens at all block outputs, and their pooled vectors.
        bytes_pooled: of the pooled vectors alone.
        n_fields: number of block outputs with a receptive field, at least 1.
        more_groups: groups of sites within blocks that the model has.
        more_sites: these sites.
        more_bytes: of an image's tokens at these sites.
        more_fields: number of these sites with a receptive field.
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
        """Return why the model does not offer all of these needs, None if it does."""
        reasons = [self.lacks[need] for need in needs]
        return next((reason for reason in reasons if reason is not None), None)


def survey(
    label: str, name: str, options: Mapping[str, Any] | None = None
) -> SurveyedModel:
    """Return what a model offers to a study, from its shapes.

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
    from vitsee_core.models.tokens.towers import computes_language_input, packing_of
    from vitsee_core.models.without_weights import flops_of, sketched_module

    arguments = dict(options or {})
    bare_name = split_model(name)[0]
    module, size = sketched_module(bare_name, arguments)
    if packing_of(module) is None and not computes_language_input(module):
        table = sketch(module, size)
    else:
        # Where the tokens of a packed sequence lie on the image is seen on values alone.
        arguments |= {"name": bare_name, "checkpoint": None, "any_weights": True}
        model = load_model(**arguments)
        module = model.module
        size = model.input_size
        table = site_table(model)
    try:
        flops = flops_of(module, size)
    except (NotImplementedError, RuntimeError) as error:
        raise VitseeError(f"{name} does not run without weights: {error}") from None
    site_names = {site.name for site in table.sites}
    lacks = offers(table)
    lacks["classifier"] = None if "logits" in site_names else "it has no classifier"
    heads = None
    if lacks["heads"] is None:
        heads = next((site.name for site in table.sites if "heads" in site.groups), None)
    block_outputs = select_names(["blocks"], table.sites)
    more_groups = []
    # A site of two groups is stored once.
    more_sites: dict[str, SiteSpec] = {}
    for group in WITHIN:
        sites = [s for s in table.sites if group in s.groups and not s.alias_of]
        if sites:
            more_groups.append(group)
        more_sites |= {site.name: site for site in sites if site not in block_outputs}
    gridded = [site.layout for site in table.sites if site.layout and site.layout.grid]
    return SurveyedModel(
        label=label,
        name=name,
        lacks=lacks,
        class_token=any("cls" in layout.prefix for layout in gridded),
        grid=gridded[-1].grid if gridded else None,
        heads=heads,
        flops=flops,
        size=size,
        n_blocks=len({site.block for site in table.sites if site.block}),
        bytes_of_tokens=_n_bytes(block_outputs, pooled=False),
        bytes_pooled=_n_bytes(block_outputs, pooled=True),
        n_fields=_n_with_grid(block_outputs) or 1,
        more_groups=tuple(more_groups),
        more_sites=tuple(more_sites),
        more_bytes=_n_bytes([*more_sites.values()], pooled=False),
        more_fields=_n_with_grid([*more_sites.values()]),
    )


def _n_with_grid(sites: Sequence[SiteSpec]) -> int:
    """Return how many sites lie on the image: each has a receptive field."""
    return sum(bool(site.layout and site.layout.grid) for site in sites)


def _n_bytes(sites: Sequence[SiteSpec], *, pooled: bool) -> int:
    """Return the bytes of an image's activations at these sites. pooled: of pooled vectors alone,
    which a store always has."""
    n_bytes = 0
    for site in sites:
        # The mean of the patches, and each token before them, such as the class token; in float32.
        n_pooled = 1 + (len(site.layout.prefix) if site.layout else 0)
        n_bytes += n_pooled * site.dim * 2 * HALF
        if not pooled and site.layout and site.layout.grid:
            n_bytes += math.prod(site.shape) * HALF
    return n_bytes


COLUMNS = (
    "model",
    "tags",
    "n_params",
    "flops",
    "height",
    "width",
    "n_blocks",
    "heads",
    "grid",
    "analyses",
    "left_out",
)
# Architectures that are made without being asked for more; about a second each.
MOST = 100
MAX_ERROR_CHARS = 200


def run(
    pattern: str,
    *,
    limit: int = MOST,
    names_only: bool = False,
    prove: bool = False,
    progress: Progress = SILENT,
) -> Table:
    """Describe architectures, one a row, in their library's order.

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
    tags_of_model = source_of(pattern).matching()
    n_models = len(tags_of_model)
    if n_models > limit and not names_only:
        raise VitseeError(
            f"{pattern!r} matches {n_models} architectures, which takes about "
            f"{n_models / 60:.0f} minutes; narrow it, list --names alone, or give "
            f"--limit {n_models}"
        )
    rows: list[dict[str, Any]] = []
    if names_only:
        for name, tags in tags_of_model.items():
            height, width = source_of(name).stated_size() or (None, None)
            row = {"model": name, "tags": " ".join(tags)}
            rows.append(row | {"height": height, "width": width})
        return Table.from_rows(rows, COLUMNS)
    from vitsee_core.models.hook_points import ModelError  # it imports torch

    needs = needs_of_analyses()
    with counting(progress, n_models, "models"):
        for name, tags in tags_of_model.items():
            row = {"model": name, "tags": " ".join(tags)}
            try:
                row |= _describe(name, needs, prove=prove)
            except ModelError as error:
                # A single model that cannot be made is a mistake of the user.
                if n_models == 1:
                    raise
                row["left_out"] = _as_line(error)
            rows.append(row)
            progress.advance(1)
    return Table.from_rows(rows, COLUMNS)


def needs_of_analyses() -> dict[str, tuple[str, ...]]:
    """Return command -> what a model must offer for it (`offers`), as each analysis declares.

    Analyses of tables are left out, and guests that cannot be used.
    """
    needs: dict[str, tuple[str, ...]] = {}
    for name, analysis in loaded():
        if analysis.needs is not None:
            needs[name.replace("_", "-")] = tuple(analysis.needs)
    return needs


def offers(table: SiteTable) -> dict[str, str | None]:
    """Return need of an analysis -> why a model does not offer it, None if it does.

    The needs: `sites`, `grid` (sites that lie on the image), `attention` (token to token), `heads`
    (their outputs), `residual` (branches), `images` (still ones, no clips).
    """
    lacks: dict[str, str | None] = {
        "sites": "no module gives one tensor per image",
        "grid": "no site lies on the image's grid",
        "attention": table.attention_refusal,
        # Without attention there are no heads either: the cause is the better reason.
        "heads": table.attention_refusal or "no block whose heads are known",
        "residual": table.residual_refusal,
        "images": None,
    }
    if table.sites:
        lacks["sites"] = None
    for site in table.sites:
        if "heads" in site.groups:
            lacks["heads"] = None
        if site.layout is not None and site.layout.grid:
            lacks["grid"] = None
        if site.layout is not None and site.layout.frames:
            lacks["images"] = "it takes clips, and the analysis is of images"
    return lacks


def _describe(
    name: str, needs: Mapping[str, tuple[str, ...]], *, prove: bool
) -> dict[str, Any]:
    """Make an architecture, and return its row but for name and tags.

    Args:
        name: of the architecture.
        needs: command -> what a model must offer for it.
        prove: make it with random weights and prove its sites on pixels.

    Raises:
        ModelError: it cannot be made.
    """
    from vitsee_core.models.hook_points import ModelError
    from vitsee_core.models.load import load_model
    from vitsee_core.models.site_tables import site_table, sketch
    from vitsee_core.models.without_weights import flops_of, sketched_module

    module, size = sketched_module(name, {})
    row: dict[str, Any] = {
        "n_params": sum(parameter.numel() for parameter in module.parameters()),
        "height": size[1],
        "width": size[2],
    }
    try:
        if prove:
            table = site_table(load_model(name, any_weights=True))
        else:
            table = sketch(module, size)
    except (ModelError, NotImplementedError) as error:
        return {**row, "left_out": f"unknown without weights: {_as_line(error)}"}
    lacks = offers(table)
    commands = []
    commands_of_reason: dict[str, list[str]] = {}
    for command, command_needs in needs.items():
        reasons = [lacks[need] for need in command_needs if lacks[need] is not None]
        if reasons:
            commands_of_reason.setdefault(str(reasons[0]), []).append(command)
        else:
            commands.append(command)
    left_out = [
        f"{' '.join(refused)}: {reason}" for reason, refused in commands_of_reason.items()
    ]
    n_heads = [str(block.n_heads) for block in table.attention]
    grids = [site.layout.grid for site in table.sites if site.layout and site.layout.grid]
    row["n_blocks"] = len({site.block for site in table.sites if site.block is not None})
    row["heads"] = " ".join(dict.fromkeys(n_heads))
    row["grid"] = "x".join(map(str, grids[-1])) if grids else None
    # Some models do not run without values: their other columns are known.
    with suppress(NotImplementedError, RuntimeError):
        row["flops"] = flops_of(module, size)
    return {**row, "analyses": " ".join(commands), "left_out": "; ".join(left_out)}


def _as_line(error: BaseException) -> str:
    """Return a message as one line, cut."""
    return re.sub(r"\s+", " ", str(error))[:MAX_ERROR_CHARS]
