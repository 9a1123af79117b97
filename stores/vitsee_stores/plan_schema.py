"""Reads a plan from JSON, with types, ranges and sizes checked before any is used.

The limits are far above what extraction makes, and low enough that a store's claims alone cost
neither time nor memory.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from vitsee_stores.canvas import Canvas
from vitsee_stores.json_schema import Fields, integer, items, name, number, text, unexpected
from vitsee_stores.layout import CODECS, ArraySpec, arrays, n_places
from vitsee_stores.plan import AttentionGroup, ErfPlan, SiteSpec, StorePlan, TokenLayout

MOST_IMAGES, MOST_SLAB = 1 << 27, 1 << 24
MOST_LENGTH, MOST_ROW_BYTES, MOST_CHUNKS = 1 << 31, 1 << 40, 1 << 22
MOST_ID_BYTES, MOST_SIDE, MOST_AXES = 1 << 16, 1 << 20, 8
MOST_PIXELS = 1e9
LEVELS = ("none", "summary", "rows", "full")
KINDS = ("tokens", "rows", "vector", "raw")

_length = partial(integer, low=1, high=MOST_LENGTH)
_side = partial(integer, low=1, high=MOST_SIDE)
_depth = partial(integer, low=-1, high=MOST_SIDE)
_stride = partial(number, low=1e-6, high=MOST_PIXELS)
_offset = partial(number, low=-MOST_PIXELS, high=MOST_PIXELS)
_relative = partial(number, low=-1e6, high=1e6)


def read_plan(value: Any) -> StorePlan:
    """The plan that `StorePlan.to_json` described.

    Raises:
        ValueError: names a field that is missing or invalid.
    """
    data = Fields(value, "plan")
    n_images = data.integer("n_images", 1, MOST_IMAGES)
    plan = StorePlan(
        n_images=n_images,
        slab=data.integer("slab", 1, MOST_SLAB),
        codec=data.one_of("codec", CODECS),
        sites=data.list("sites", _site),
        attention=data.list("attention", _group),
        attention_level=data.one_of("attention_level", LEVELS),
        rollout=data.flag("rollout"),
        sublayers=data.list("sublayers", _sublayer),
        inputs=_shape(data, "inputs", 3) if "inputs" in data else None,  # type: ignore[arg-type]
        weights=data.list("weights", _weight),
        places=data.list("places", _place),
        id_bytes=data.integer("id_bytes", 1, MOST_ID_BYTES),
        grams=data.flag("grams") if "grams" in data else False,
        erf=_erf(data.object("erf"), n_images) if "erf" in data else None,
        boxes=data.flag("boxes") if "boxes" in data else False,
        canvas=_canvas(data.object("canvas")) if "canvas" in data else None,
    )
    _check_names(plan)
    _check_arrays(arrays(plan))
    return plan


def _layout(data: Fields) -> TokenLayout:
    return TokenLayout(
        prefix=data.list("prefix", name),
        grid=data.pair("grid", _side) if "grid" in data else None,
        rows=data.integer("rows", 0, MOST_LENGTH),
        stride_px=data.pair("stride_px", _stride) if "stride_px" in data else None,
        offset_px=data.pair("offset_px", _offset),
    )


def _site(value: Any, where: str) -> SiteSpec:
    data = Fields(value, where)
    layout = _layout(data.object("layout")) if "layout" in data else None
    kind = data.one_of("kind", KINDS)
    shape = _shape(data, "shape")
    dim = data.integer("dim", 1, MOST_ROW_BYTES)
    if (layout is None) != (kind in ("vector", "raw")):
        raise ValueError(f"{where} is of kind {kind} {'without' if layout is None else 'with'} "
                         "a token layout")  # fmt: skip
    if layout is not None and (layout.grid is None) != (kind == "rows"):
        raise ValueError(f"{where} is of kind {kind}, which its grid contradicts")
    if layout is not None and layout.grid is None and layout.rows < 1:
        raise ValueError(f"{where} has no rows")
    if kind == "vector" and shape != (dim,):
        raise ValueError(f"{where} is a vector of {dim} channels and of shape {list(shape)}")
    return SiteSpec(
        name=data.name("name"),
        part=data.text("part"),
        block=data.name("block") if "block" in data else None,
        groups=data.list("groups", text),
        kind=kind,
        dim=dim,
        shape=shape,
        layout=layout,
        depth=data.integer("depth", -1, MOST_SIDE),
        rel_depth=data.number("rel_depth", -1e6, 1e6),
        alias_of=data.name("alias_of") if "alias_of" in data else None,
        tokens=data.one_of("tokens", ("all", "pooled")),
        dtype=data.one_of("dtype", ("float16", "float32")),
        site_path=data.name("site_path") if "site_path" in data else None,
    )


def _group(value: Any, where: str) -> AttentionGroup:
    data = Fields(value, where)
    prefix = data.text("prefix") and data.name("prefix")
    blocks, n_heads = data.list("blocks", name), data.list("n_heads", _side)
    layout = _layout(data.object("layout"))
    if not blocks or len(blocks) != len(n_heads) or layout.grid is None:
        raise ValueError(f"{where} has {len(blocks)} blocks, {len(n_heads)} numbers of heads and "
                         f"the grid {layout.grid}")  # fmt: skip
    return AttentionGroup(prefix, blocks, n_heads, layout)


def _sublayer(value: Any, where: str) -> tuple[str, TokenLayout]:
    first, second = _parts(value, where, 2)
    return name(first, f"{where}[0]"), _layout(Fields(second, f"{where}[1]"))


def _weight(value: Any, where: str) -> tuple[str, tuple[int, ...]]:
    first, second = _parts(value, where, 2)
    shape = items(second, f"{where}[1]", _length)
    if not 0 < len(shape) <= MOST_AXES:
        raise unexpected(f"{where}[1]", second, f"1 to {MOST_AXES} lengths")
    return name(first, f"{where}[0]"), shape


def _place(value: Any, where: str) -> tuple[str, int, float]:
    first, second, third = _parts(value, where, 3)
    place = name(first, f"{where}[0]"), _depth(second, f"{where}[1]")
    return *place, _relative(third, f"{where}[2]")


def _erf(data: Fields, n_images: int) -> ErfPlan:
    return ErfPlan(
        n_images=data.integer("n_images", 1, n_images),
        sites=data.list("sites", name),
        size=data.pair("size", _side),
    )


def _canvas(data: Fields) -> Canvas:
    return Canvas(
        size=data.pair("size", _side),
        short_side=data.integer("short_side", 1, MOST_SIDE),
        multiple=data.integer("multiple", 1, MOST_SIDE),
        tiles=data.pair("tiles", _side) if "tiles" in data else None,
        crop_mode=data.one_of("crop_mode", ("corner",)),
    )


def _shape(data: Fields, key: str, length: int | None = None) -> tuple[int, ...]:
    shape = data.list(key, _length)
    if not 0 < len(shape) <= MOST_AXES or (length and len(shape) != length):
        raise unexpected(
            data.place(key), data.value[key], f"{length or f'1 to {MOST_AXES}'} lengths"
        )
    return shape


def _parts(value: Any, where: str, length: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise unexpected(where, value, f"a list of {length}")
    return value


def _check_names(plan: StorePlan) -> None:
    """Check that references to sites are to stored ones."""
    stored = {site.name for site in plan.stored}
    for site in plan.sites:
        if site.alias_of is not None and site.alias_of not in stored:
            raise ValueError(f"{site.name} is an alias of {site.alias_of}, which is not stored")
    if len({site.name for site in plan.sites}) < len(plan.sites):
        raise ValueError("two sites have one name")
    with_grid = {s.name for s in plan.sites if s.layout is not None and s.layout.grid is not None}
    if plan.erf is not None and (
        lost := [s for s in plan.erf.sites if s not in with_grid & stored]
    ):
        raise ValueError(f"plan.erf.sites names {lost[0]}, which has no stored grid")
    if plan.rollout and not plan.attention:
        raise ValueError("plan.rollout is true without attention")
    if plan.canvas is not None and plan.canvas.tiles is not None:
        more = (plan.attention, plan.sublayers, plan.grams, plan.erf)
        if any(more) or any(s.layout is None or s.layout.n_prefix for s in plan.sites):
            raise ValueError("plan.canvas has tiles, beside what tiles do not have")


def _check_arrays(specs: dict[str, ArraySpec]) -> None:
    """Check that the arrays' folders do not collide, and that none is unreasonably large."""
    for path, spec in specs.items():
        if any(part in ("zarr.json", "c") for part in path.split("/")):
            raise ValueError(f"{path} has the name of one of Zarr's files")
        above = path
        while above := above.rpartition("/")[0]:
            if above in specs:
                raise ValueError(f"{above} is an array, and {path} would be in it")
        row = math.prod(spec.shape[1:]) * np.dtype(spec.dtype).itemsize
        if spec.per != "once" and row > MOST_ROW_BYTES:
            raise ValueError(f"{path} has {row} bytes a row, expected at most {MOST_ROW_BYTES}")
    if (chunks := n_places(specs)) > MOST_CHUNKS:
        raise ValueError(f"a slab has {chunks} chunks, expected at most {MOST_CHUNKS}")
