"""Planning of a store's contents from choices, a model's sites and a list of images.

`choose` resolves options to `Choices`, `fit_slab` the slab size, `build_plan` makes the plan of
both. The last part lists the bytes and files that a plan takes.
"""

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
    """Every choice about a store's contents, resolved.

    Attributes:
        sites: the chosen sites in the model's order, aliases included.
        attention: level of attention summaries, "none" to "full".
        residual: whether residual products are stored.
        inputs: (3, H, W) if pixels are stored, else None.
        grams: whether Gram matrices within slabs are stored.
        erf: the receptive fields, None without any.
        codec: compression of the arrays.
        precision: precision of the model's forward passes.
        left_out: default that the model does not support -> reason.
        requested: sites, tokens and dtypes as the identity records them.
    """

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
    """Resolve the options that say what a store keeps.

    An option that is not given takes the value of the existing store, or the default. A
    default that the model does not support is left out with its reason.

    Args:
        keep: the options.
        stored: identity of an existing store, {} for a new one.
        table: the sites, blocks and sublayers that the model has.
        input_size: (channels, height, width) of the pixels.

    Raises:
        VitseeError: an explicit choice that the model does not support, or a selector without
            a match.
    """
    left_out: dict[str, str] = {}
    patterns = _first_given(keep.sites, stored.get("sites"))
    if patterns is None:
        require_blocks(table)
        # Default groups that the model lacks are left out with a reason; named ones would
        # be refused.
        groups = {group for site in table.sites for group in site.groups}
        patterns = [group for group in DEFAULT_SITES if group in groups] or DEFAULT_SITES
        for group in DEFAULT_SITES:
            if group not in groups:
                left_out[group] = "the model has none of these sites"
    tokens_default, tokens_by_selector = parse_tokens(keep.tokens)
    dtype_default, dtype_by_selector = parse_dtypes(keep.dtype)
    # The identity keeps the default beside the selectors, under a name that no site has.
    if keep.tokens is None and "tokens" in stored:
        tokens_by_selector = dict(stored["tokens"])
        tokens_default = tokens_by_selector.pop("default")
    if keep.dtype is None and "dtype" in stored:
        dtype_by_selector = dict(stored["dtype"])
        dtype_default = dtype_by_selector.pop("default")
    names: set[str] = set()
    if patterns:
        # Aliases are chosen by either name, and stored under one.
        names = stored_names(select_names(patterns, table.sites))
    tokens = _values_by_site(names, tokens_default, tokens_by_selector, table)
    dtypes = _values_by_site(names, dtype_default, dtype_by_selector, table)
    sites = tuple(
        dataclasses.replace(site, tokens=tokens[site.name], dtype=dtypes[site.name])
        for site in table.sites
        if site.name in names
    )

    def supported(
        name: str, explicit: Any, default: Any, off: Any, refusal: str | None
    ) -> Any:
        """Return the value of an option, or `off` if the model refuses it as a default."""
        value = _first_given(explicit, stored.get(name, default))
        # A store's value counts as a default: another model may not support it.
        if value == off or refusal is None:
            return value
        if explicit is not None:
            raise VitseeError(f"--{name} {explicit} is not supported: {refusal}")
        left_out[name] = refusal
        return off

    attention = supported(
        "attention",
        explicit=keep.attention,
        default="summary",
        off="none",
        refusal=table.attention_refusal,
    )
    residual = supported(
        "residual",
        explicit=keep.residual,
        default=True,
        off=False,
        refusal=table.residual_refusal,
    )
    # Rollout has no option of its own: it is made wherever attention is.
    if attention != "none" and table.rollout_refusal is not None:
        left_out["rollout"] = table.rollout_refusal
    inputs = None
    if _first_given(keep.inputs, stored.get("inputs", False)):
        inputs = input_size
    erf = None
    n_erf = _first_given(keep.erf, stored.get("erf", 0))
    if n_erf:
        erf = choose_erf(n_erf, sites, input_size, left_out)
    # An alias costs nothing: it comes with the site that it equals.
    aliases = tuple(site for site in table.sites if site.alias_of in names)
    return Choices(
        sites=in_order((*sites, *aliases), table),
        attention=attention,
        residual=residual,
        inputs=inputs,
        grams=_first_given(keep.grams, stored.get("grams", False)),
        erf=erf,
        codec=keep.codec or stored.get("codec", "none"),
        precision=keep.precision or stored.get("precision", "fp32"),
        left_out=left_out,
        requested={
            "sites": [site.name for site in sites],
            "tokens": {"default": tokens_default, **tokens_by_selector},
            "dtype": {"default": dtype_default, **dtype_by_selector},
        },
    )


def _first_given(explicit: Any, otherwise: Any) -> Any:
    """Return an option's explicit value, or another if it is None."""
    return otherwise if explicit is None else explicit


def _values_by_site(
    names: Iterable[str], default: str, by_selector: Mapping[str, str], table: SiteTable
) -> dict[str, str]:
    """Return the value of --tokens or --dtype for each site; later selectors win."""
    values = dict.fromkeys(names, default)
    for selector, value in by_selector.items():
        for name in stored_names(select_names([selector], table.sites)):
            values[name] = value
    return values


# Fewer modules that run several times are the activations and poolings of a sound network.
MIN_HIDDEN = 4


def require_blocks(table: SiteTable) -> None:
    """Refuse a model whose blocks cannot be captured, so that a default store would lack them.

    Such blocks run several times in one pass, or on several views of an image in one batch.

    Raises:
        VitseeError: names a module, and says how often it runs or on how many views.
    """
    if any(site.block is not None and "modules" in site.groups for site in table.sites):
        return
    # The beginnings of the reasons in `left_out`, of which only these two mean hidden
    # blocks.
    causes = {
        "called ": "one block shared by all depths, or several passes for one image",
        "its first dimension ": "images doubled, flipped or cropped inside the model",
    }
    for beginning, cause in causes.items():
        hidden = [
            name
            for name, reason in table.left_out.items()
            if reason.startswith(beginning)
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
    """Return the receptive fields of the chosen sites with a grid.

    Args:
        n_images: number of leading images that have them.
        sites: the chosen sites.
        input_size: (channels, height, width) of the pixels.
        left_out: gets an entry for each site without a grid.

    Raises:
        VitseeError: no chosen site has a grid.
    """
    with_grid = [
        site.name
        for site in sites
        if site.layout is not None and site.layout.grid is not None
    ]
    if not with_grid:
        raise VitseeError(
            f"--erf {n_images} is not supported: no chosen site has an image grid (choose others "
            "with --sites)"
        )
    for site in sites:
        if site.name not in with_grid:
            left_out[f"{site.name} erf"] = "no image grid"
    return ErfPlan(n_images, tuple(with_grid), input_size[1:])


def stored_names(sites: Iterable[SiteSpec]) -> set[str]:
    """Return the names under which sites are stored: for an alias, the site it equals."""
    return {site.alias_of or site.name for site in sites}


def in_order(sites: Iterable[SiteSpec], table: SiteTable) -> tuple[SiteSpec, ...]:
    """Return sites in the order of the model's table."""
    index = {site.name: i for i, site in enumerate(table.sites)}
    return tuple(sorted(sites, key=lambda site: index[site.name]))


def build_plan(
    choices: Choices,
    table: SiteTable,
    n_images: int,
    slab: int,
    canvas: Canvas | None = None,
    clip: Clip | None = None,
) -> StorePlan:
    """Return the contents of a store of `n_images` images in slabs of `slab`."""
    groups: tuple[AttentionGroup, ...] = ()
    if choices.attention != "none":
        groups = attention_groups(table.attention)
    sublayers: tuple[tuple[str, TokenLayout], ...] = ()
    if choices.residual:
        sublayers = tuple((s.name, s.layout) for s in table.sublayers)
    erf = choices.erf
    if erf is not None:
        # Fewer images than were asked for: all of them have receptive fields.
        erf = dataclasses.replace(erf, n_images=min(erf.n_images, n_images))
    return StorePlan(
        n_images=n_images,
        slab=slab,
        codec=choices.codec,
        sites=choices.sites,
        attention=groups,
        attention_level=choices.attention,
        rollout=bool(groups) and table.rollout_refusal is None,
        sublayers=sublayers,
        places=relative_depths(table),
        inputs=choices.inputs,
        grams=choices.grams,
        erf=erf,
        canvas=canvas,
        clip=clip,
        pixel_hashes=True,
    )


def attention_groups(blocks: Sequence[AttentionBlock]) -> tuple[AttentionGroup, ...]:
    """Group blocks by token layout and window, in the model's order.

    The first group has no prefix, so that most models have `attention/` without folders.
    """
    # In the order in which layouts are met, as dictionaries keep it.
    alike: dict[tuple[TokenLayout, tuple[int, ...] | None], list[AttentionBlock]] = {}
    for block in blocks:
        alike.setdefault((block.layout, block.window), []).append(block)
    groups: list[AttentionGroup] = []
    for (layout, window), members in alike.items():
        prefix = ""
        if groups:
            # Its tokens per axis name a further group, for instance grid_7x7_window_7x7.
            prefix = f"grid_{'x'.join(map(str, layout.body))}"
            if window is not None:
                prefix += f"_window_{'x'.join(map(str, window))}"
        groups.append(
            AttentionGroup(
                prefix=prefix,
                blocks=tuple(block.name for block in members),
                n_heads=tuple(block.n_heads for block in members),
                layout=layout,
                window=window,
            )
        )
    return tuple(groups)


def relative_depths(table: SiteTable) -> tuple[tuple[str, int, float], ...]:
    """Return (name, index, relative depth) of each block with attention and each sublayer.

    The relative depth is the index over the last block's, or the last sublayer's.
    """
    # The depth of the first block's output is 1, as the embedding has 0.
    last_block = max(
        (site.depth - 1 for site in table.sites if site.part == "out"), default=0
    )
    last_sublayer = max((sublayer.index for sublayer in table.sublayers), default=0)
    depths = []
    # At least 1, as a model of a single block would divide by 0.
    for block in table.attention:
        depths.append((block.name, block.index, block.index / max(last_block, 1)))
    for sublayer in table.sublayers:
        depth = sublayer.index / max(last_sublayer, 1)
        depths.append((sublayer.name, sublayer.index, depth))
    return tuple(depths)


def hook_points(table: SiteTable, plan: StorePlan) -> dict[str, Any]:
    """Return what a store of this plan captures of a model, as keywords of `Capture`.

    They are its sites, sublayers and attention blocks.
    """
    blocks = {block for group in plan.attention for block in group.blocks}
    sublayers = {name for name, _ in plan.sublayers}
    return {
        "sites": plan.stored,
        "sublayers": [s for s in table.sublayers if s.name in sublayers],
        "attention": [b for b in table.attention if b.name in blocks],
    }


def slab_bytes(plan: StorePlan) -> int:
    """Return the host memory of one slab's buffers and Gram matrices.

    Activations that wait for Gram matrices are not counted: they may be in a file
    (slab_grams.py).
    """
    total = 0
    for spec in arrays(plan).values():
        # Arrays with a row for each image, and the slab's one Gram matrix of each site.
        if spec.per == "image" or spec.pairs:
            n_rows = plan.slab if spec.per == "image" else 1
            # int64: a product of numpy's default type overflows on some systems
            n_values = n_rows * int(np.prod(spec.shape[1:], dtype=np.int64))
            total += n_values * np.dtype(spec.dtype).itemsize
    return total


def images_per_example(contents: SiteTable | StorePlan) -> int:
    """Return the number of images that an example counts as in memory.

    For clips it is the largest number of grid cells in time of any site, for images 1.
    """
    layouts = [site.layout for site in contents.sites if site.layout is not None]
    return max((layout.frames or 1 for layout in layouts), default=1)


def fit_slab(
    explicit: int | None,
    choices: Choices,
    table: SiteTable,
    n_images: int,
    clip: Clip | None = None,
) -> tuple[int, str | None]:
    """Choose the slab size.

    The default is halved until two slabs, one of which is written while the other is filled,
    fit a quarter of the memory; a clip counts as many images as its grids have cells in time.
    An explicit value is kept.

    Returns:
        The size, and a remark if the default was reduced.

    Raises:
        VitseeError: two slabs of an explicit size exceed the memory, or the size is not
            positive.
    """
    memory = memory_bytes()

    def bytes_of_two(slab: int) -> int:
        return 2 * slab_bytes(build_plan(choices, table, n_images, slab, clip=clip))

    if explicit is not None:
        if explicit < 1:
            raise VitseeError(
                f"--slab is {explicit}; expected a positive number of images"
            )
        slab = min(explicit, n_images)
        need = bytes_of_two(slab)
        if need > memory:
            raise VitseeError(
                f"--slab {explicit} needs {human_bytes(need)} of memory for two slabs, this "
                f"machine has {human_bytes(memory)}; choose a smaller one"
            )
        return slab, None
    default = min(max(1, DEFAULT_SLAB // images_per_example(table)), n_images)
    slab = default
    # A quarter: the model, its activations and the page cache need memory beside the
    # slabs.
    while slab > 1 and bytes_of_two(slab) > memory // 4:
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
    """Disk usage of an array, of a folder of arrays (`acts/`), or the `total`.

    Attributes:
        name: path of the array or folder, or "total".
        shape: shape of an array, else empty.
        dtype: type of an array, else empty.
        size_bytes: bytes of the chunks before compression.
        n_files: number of chunk and metadata files.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    n_files: int

    def row(self, n_images: int) -> str:
        """Return a line of CSV with the columns of `HEADER`."""
        shape = "x".join(map(str, self.shape))
        per_image = round(self.size_bytes / n_images)
        return f"{self.name},{shape},{self.dtype},{self.size_bytes},{per_image},{self.n_files}"


HEADER = "array,shape,dtype,bytes,bytes_per_image,files"


def total_size(plan: StorePlan) -> Size:
    """Return the size of the whole store, with the metadata files of its groups."""
    sizes = array_sizes(plan)
    # Each group has a metadata file of its own, the root (".") among them.
    groups = {
        str(parent) for size in sizes for parent in PurePosixPath(size.name).parents
    }
    total = _sum_of_sizes("total", sizes)
    return dataclasses.replace(total, n_files=total.n_files + len(groups))


def folder_sizes(plan: StorePlan) -> list[Size]:
    """Return the sizes of the arrays below each top folder together, largest first."""
    sizes_by_folder: dict[str, list[Size]] = {}
    for size in array_sizes(plan):
        top, slash, _ = size.name.partition("/")
        sizes_by_folder.setdefault(top + slash, []).append(size)
    sums = [_sum_of_sizes(name, sizes) for name, sizes in sizes_by_folder.items()]
    return sorted(sums, key=lambda size: -size.size_bytes)


def _sum_of_sizes(name: str, sizes: Sequence[Size]) -> Size:
    """Return the size of several arrays together."""
    return Size(
        name=name,
        shape=(),
        dtype="",
        size_bytes=sum(size.size_bytes for size in sizes),
        n_files=sum(size.n_files for size in sizes),
    )


def array_sizes(plan: StorePlan) -> list[Size]:
    """Return the size of every array, in writing order."""
    sizes = n_bytes(plan)
    return [
        # The files of an array are its chunks and one of metadata.
        Size(path, tuple(spec.shape), spec.dtype, sizes[path], math.prod(spec.grid) + 1)
        for path, spec in arrays(plan).items()
    ]
