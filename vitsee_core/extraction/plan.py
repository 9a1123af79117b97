"""The exact contents of a store, planned from choices, a model's sites and a list of images; and
their bytes and files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.extraction.options import (
    DEFAULT_SITES,
    DEFAULT_SLAB,
    KeepOptions,
    parse_dtypes,
    parse_tokens,
)
from vitsee_core.runtime.machine import human_bytes, memory_bytes
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import (
    AttentionGroup,
    ErfPlan,
    SiteSpec,
    StorePlan,
    TokenLayout,
    arrays,
    n_bytes,
    select_names,
)
from vitsee_stores.plan import CLIPS, Canvas, Clip

if TYPE_CHECKING:
    from vitsee_core.models.sites import AttentionBlock, SiteTable


@dataclass(frozen=True)
class Choices:
    """Every choice about a store's contents, resolved; identity compares `requested`."""

    sites: tuple[SiteSpec, ...]
    attention: str
    residual: bool
    inputs: tuple[int, int, int] | None
    grams: bool
    erf: ErfPlan | None
    codec: str
    precision: str
    left_out: dict[str, str]
    requested: dict[str, Any]


def choose(
    keep: KeepOptions,
    stored: Mapping[str, Any],
    table: SiteTable,
    input_size: tuple[int, int, int],
) -> Choices:
    """Resolve `keep` against an existing store's identity (`stored`, {} for a new one) and what the
    model supports. An unsupported default is left out with its reason. Raises VitseeError: an
    explicit choice that the model does not support, a selector without a match."""
    left_out: dict[str, str] = {}
    patterns = keep.sites if keep.sites is not None else stored.get("sites")
    if patterns is None:
        require_blocks(table)
        there = {group for site in table.sites for group in site.groups}
        patterns = [group for group in DEFAULT_SITES if group in there] or DEFAULT_SITES
        reason = "the model has none of these sites"
        left_out |= {group: reason for group in DEFAULT_SITES if group not in there}
    tokens_default, tokens_by = parse_tokens(keep.tokens)
    dtype_default, dtype_by = parse_dtypes(keep.dtype)
    if keep.tokens is None and "tokens" in stored:
        tokens_by = dict(stored["tokens"])
        tokens_default = tokens_by.pop("default")
    if keep.dtype is None and "dtype" in stored:
        dtype_by = dict(stored["dtype"])
        dtype_default = dtype_by.pop("default")
    names = stored_names(select_names(patterns, table.sites)) if patterns else []
    tokens = dict.fromkeys(names, tokens_default)
    for selector, value in tokens_by.items():
        tokens |= dict.fromkeys(
            stored_names(select_names([selector], table.sites)), value
        )
    dtypes = dict.fromkeys(names, dtype_default)
    for selector, value in dtype_by.items():
        dtypes |= dict.fromkeys(
            stored_names(select_names([selector], table.sites)), value
        )
    sites = tuple(
        dataclasses.replace(s, tokens=tokens[s.name], dtype=dtypes[s.name])
        for s in table.sites
        if s.name in names
    )

    def supported(
        name: str, given: Any, default: Any, off: Any, refusal: str | None
    ) -> Any:
        value = given if given is not None else stored.get(name, default)
        if value == off or refusal is None:
            return value
        if given is not None:
            raise VitseeError(f"--{name} {given} is not supported: {refusal}")
        left_out[name] = refusal
        return off

    attention = supported(
        "attention", keep.attention, "summary", "none", table.attention_refusal
    )
    residual = supported("residual", keep.residual, True, False, table.residual_refusal)
    if attention != "none" and table.rollout_refusal is not None:
        left_out["rollout"] = table.rollout_refusal
    inputs = keep.inputs if keep.inputs is not None else stored.get("inputs", False)
    aliases = tuple(s for s in table.sites if s.alias_of in names)
    n_erf = keep.erf if keep.erf is not None else stored.get("erf", 0)
    return Choices(
        sites=in_order((*sites, *aliases), table),
        attention=attention,
        residual=residual,
        inputs=input_size if inputs else None,
        grams=keep.grams if keep.grams is not None else stored.get("grams", False),
        erf=choose_erf(n_erf, sites, input_size, left_out) if n_erf else None,
        codec=keep.codec or stored.get("codec", "none"),
        precision=keep.precision or stored.get("precision", "fp32"),
        left_out=left_out,
        requested={
            "sites": [site.name for site in sites],
            "tokens": {"default": tokens_default, **tokens_by},
            "dtype": {"default": dtype_default, **dtype_by},
        },
    )


# Fewer modules that run several times are the activations and poolings of a sound network.
MIN_HIDDEN = 4


def require_blocks(table: SiteTable) -> None:
    """Refuse a model whose blocks no default store would have, since they run several times in one
    pass, or on several views of an image in one batch.

    Raises:
        VitseeError: says how often, or how many; names a module.
    """
    if any(site.block is not None and "modules" in site.groups for site in table.sites):
        return
    causes = {
        "called ": "one block shared by all depths, or several passes for one image",
        "its first dimension ": "images doubled, flipped or cropped inside the model",
    }
    for beginning, cause in causes.items():
        hidden = [
            name for name, why in table.left_out.items() if why.startswith(beginning)
        ]
        if len(hidden) >= MIN_HIDDEN:
            names = f"{hidden[0]} and {len(hidden) - 1} more"
            raise VitseeError(
                f"the model's blocks cannot be captured, {names}: {table.left_out[hidden[0]]} "
                f"({cause}); expected a model that runs each block once, on the images alone "
                "(--sites takes what is left: vitsee sites MODEL)"
            )


def choose_erf(
    n_images: int,
    sites: Sequence[SiteSpec],
    input_size: tuple[int, int, int],
    left_out: dict[str, str],
) -> ErfPlan:
    """Receptive fields of the chosen sites with a grid; the others go into `left_out`. Raises
    VitseeError: no chosen site has a grid."""
    with_grid = [
        s.name for s in sites if s.layout is not None and s.layout.grid is not None
    ]
    if not with_grid:
        raise VitseeError(
            f"--erf {n_images} is not supported: no chosen site has an image grid (choose others "
            "with --sites)"
        )
    left_out |= {
        f"{s.name} erf": "no image grid" for s in sites if s.name not in with_grid
    }
    return ErfPlan(n_images, tuple(with_grid), input_size[1:])


def stored_names(sites: Iterable[SiteSpec]) -> set[str]:
    """The names under which `sites` are stored: an alias counts as the site it equals."""
    return {site.alias_of or site.name for site in sites}


def in_order(sites: Iterable[SiteSpec], table: SiteTable) -> tuple[SiteSpec, ...]:
    place = {site.name: i for i, site in enumerate(table.sites)}
    return tuple(sorted(sites, key=lambda site: place[site.name]))


def build_plan(
    choices: Choices,
    table: SiteTable,
    n_images: int,
    slab: int,
    canvas: Canvas | None = None,
    clip: Clip | None = None,
) -> StorePlan:
    """The store's contents for `n_images` images in slabs of `slab`."""
    groups = attention_groups(table.attention) if choices.attention != "none" else ()
    return StorePlan(
        n_images=n_images,
        slab=slab,
        codec=choices.codec,
        sites=choices.sites,
        attention=groups,
        attention_level=choices.attention,
        rollout=bool(groups) and table.rollout_refusal is None,
        sublayers=tuple((s.name, s.layout) for s in table.sublayers)
        if choices.residual
        else (),
        places=places(table),
        inputs=choices.inputs,
        grams=choices.grams,
        erf=choices.erf
        and dataclasses.replace(
            choices.erf, n_images=min(choices.erf.n_images, n_images)
        ),
        canvas=canvas,
        clip=clip,
        pixel_hashes=True,
    )


def attention_groups(blocks: Sequence[AttentionBlock]) -> tuple[AttentionGroup, ...]:
    """Blocks grouped by token layout and window, in the model's order; the first group is
    unnamed."""
    alike: dict[tuple[TokenLayout, tuple[int, ...] | None], list[AttentionBlock]] = {}
    for block in blocks:
        alike.setdefault((block.layout, block.window), []).append(block)
    groups: list[AttentionGroup] = []
    for (layout, window), members in alike.items():
        grid = "x".join(map(str, layout.body))
        within = "" if window is None else f"_window_{'x'.join(map(str, window))}"
        groups.append(
            AttentionGroup(
                prefix=f"grid_{grid}{within}" if groups else "",
                blocks=tuple(b.name for b in members),
                n_heads=tuple(b.n_heads for b in members),
                layout=layout,
                window=window,
            )
        )
    return tuple(groups)


def places(table: SiteTable) -> tuple[tuple[str, int, float], ...]:
    """Index and relative depth of every block with attention and every sublayer."""
    last_block = max(
        (site.depth - 1 for site in table.sites if site.part == "out"), default=0
    )
    last_sublayer = max((sublayer.index for sublayer in table.sublayers), default=0)
    blocks = [(b.name, b.index, b.index / max(last_block, 1)) for b in table.attention]
    return (
        *blocks,
        *((s.name, s.index, s.index / max(last_sublayer, 1)) for s in table.sublayers),
    )


def hook_points(table: SiteTable, plan: StorePlan) -> dict[str, Any]:
    """The sites, sublayers and attention blocks of a model that a store of this plan keeps, as
    `Capture` and the self-check take them."""
    blocks = {block for group in plan.attention for block in group.blocks}
    sublayers = {name for name, _ in plan.sublayers}
    return {
        "sites": plan.stored,
        "sublayers": [s for s in table.sublayers if s.name in sublayers],
        "attention": [b for b in table.attention if b.name in blocks],
    }


def slab_bytes(plan: StorePlan) -> int:
    """Host memory of one slab's buffers and Gram matrices, without the activations for those, which
    may be in a file (slab_grams.py)."""
    return sum(
        (plan.slab if spec.per == "image" else 1)
        * int(np.prod(spec.shape[1:], dtype=np.int64))
        * np.dtype(spec.dtype).itemsize
        for spec in arrays(plan).values()
        if spec.per == "image" or spec.pairs
    )


def times_of(of: SiteTable | StorePlan) -> int:
    """The number of images that a sample counts as: the most cells in time of any site's grid, 1
    for images."""
    layouts = [site.layout for site in of.sites if site.layout is not None]
    return max((layout.frames or 1 for layout in layouts), default=1)


def fit_slab(
    explicit: int | None,
    choices: Choices,
    table: SiteTable,
    n_images: int,
    clip: Clip | None = None,
) -> tuple[int, str | None]:
    """The slab size, and a remark if the default was reduced.

    The default is halved until two slabs fit a quarter of the memory; an explicit value is kept. A
    clip counts as many images as its grids have cells in time. Raises VitseeError: two slabs of an
    explicit size exceed the memory, or the size is not positive.
    """
    memory = memory_bytes()
    if explicit is not None:
        if explicit < 1:
            raise VitseeError(
                f"--slab is {explicit}; expected a positive number of images"
            )
        slab = min(explicit, n_images)
        need = 2 * slab_bytes(build_plan(choices, table, n_images, slab, clip=clip))
        if need > memory:
            raise VitseeError(
                f"--slab {explicit} needs {human_bytes(need)} of memory for two slabs, this "
                f"machine has {human_bytes(memory)}; choose a smaller one"
            )
        return slab, None
    default = slab = min(max(1, DEFAULT_SLAB // times_of(table)), n_images)
    while (
        slab > 1
        and 2 * slab_bytes(build_plan(choices, table, n_images, slab, clip=clip))
        > memory // 4
    ):
        slab = (slab + 1) // 2
    note = None
    if slab < default:
        examples = "images" if clip is None else CLIPS
        note = (
            f"slab reduced to {slab} {examples} so that two fit a quarter of the memory"
        )
    return slab, note


# ---------------- its bytes and files


@dataclass(frozen=True)
class Size:
    """Disk usage of an array, of a folder of arrays (`acts/`), or the `total`."""

    name: str
    shape: tuple[int, ...]  # of an array, else empty
    dtype: str  # of an array, else empty
    size_bytes: int  # of the chunks before compression
    n_files: int  # chunks and metadata

    def row(self, n_images: int) -> str:
        """A line of CSV, see HEADER."""
        shape = "x".join(map(str, self.shape))
        per_image = round(self.size_bytes / n_images)
        return f"{self.name},{shape},{self.dtype},{self.size_bytes},{per_image},{self.n_files}"


HEADER = "array,shape,dtype,bytes,bytes_per_image,files"


def total_size(plan: StorePlan) -> Size:
    """The whole store; the files include its groups' metadata."""
    each = array_sizes(plan)
    groups = {str(parent) for size in each for parent in PurePosixPath(size.name).parents}
    files = sum(size.n_files for size in each) + len(groups)
    return Size("total", (), "", sum(size.size_bytes for size in each), files)


def folder_sizes(plan: StorePlan) -> list[Size]:
    """The arrays below each top folder together, largest first."""
    folders: dict[str, list[Size]] = {}
    for size in array_sizes(plan):
        top, slash, _ = size.name.partition("/")
        folders.setdefault(top + slash, []).append(size)
    sums = [
        Size(name, (), "", sum(s.size_bytes for s in some), sum(s.n_files for s in some))
        for name, some in folders.items()
    ]
    return sorted(sums, key=lambda size: -size.size_bytes)


def array_sizes(plan: StorePlan) -> list[Size]:
    """Every array, in writing order."""
    sizes = n_bytes(plan)
    return [
        Size(path, tuple(spec.shape), spec.dtype, sizes[path], math.prod(spec.grid) + 1)
        for path, spec in arrays(plan).items()
    ]
