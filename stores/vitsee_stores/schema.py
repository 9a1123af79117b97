"""Converts JSON that a stranger may have written to typed objects, and refuses it in one line.

The annotations of a dataclass or a msgspec.Struct are the schema: types, and limits by `Meta`.
Fields without a name there are ignored. What is converted is what `json` has read, not the text:
msgspec refuses the escapes of file names that are no UTF-8, which manifests may hold.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from vitsee_stores.layout import ArraySpec, arrays, n_places
from vitsee_stores.plan import Canvas, StorePlan, TokenLayout

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Whole = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Real = Annotated[float, Meta(ge=-1e30, le=1e30)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]

MOST_NAME_BYTES = 200
MOST_ROW_BYTES = 1 << 40
MOST_CHUNKS = 1 << 22
MAY_BE_ABSENT = ("grams", "boxes")  # and is false then
_OF_CROP_MODES = ("short_side", "min_pixels", "max_pixels")
SHOWN = 60
# msgspec's words -> ours
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def checked(value: Any, kind: type[T], where: str = "") -> T:
    """`value` as a `kind`, such as a dataclass or `dict[str, int]`.

    Args:
        value: as `json` returns it.
        where: the place of `value` in its document.

    Raises:
        ValueError: names the first field that is missing or invalid, with its value and what was
            expected.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if isinstance(value, dict) and len(value) > 1 and " - at `$[...]" in str(error):
            for key, item in value.items():  # msgspec does not name keys: find it
                checked({key: item}, kind, where)
        raise ValueError(_in_words(str(error), value, where)) from None
    except UnicodeEncodeError:
        raise ValueError(
            f"{where or 'it'} has a field whose name is no Unicode text"
        ) from None


def _in_words(message: str, value: Any, where: str) -> str:
    """The line for one of msgspec's errors."""
    said, _, path = message.partition(" - at `$")
    kind = re.sub(r", got .*|^Expected ", "", said)
    if words := re.search(r"\\A\((.*)\)\\Z", kind):
        kind = f"one of {words[1].replace('|', ', ')}"
    elif "0-9a-f" in kind:
        kind = "64 hexadecimal digits"
    kind = re.sub(r"\w+", lambda word: _WORDS.get(word[0], word[0]), kind)
    kind = kind.replace("`", "").replace(" | ", " or ")
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if index == "..." and len(value) > 1:
            return f"{where.removeprefix('.')} has an invalid value, expected {kind}"
        key = next(iter(value)) if index == "..." else int(index) if index else name
        where = f"{where}[{key}]" if isinstance(value, list) else f"{where}.{key}"
        value = value[key]
    where = where.removeprefix(".")
    if field := re.fullmatch("Object (missing|contains).* field `(.*)`", said):
        place = f"{where}.{field[2]}".removeprefix(".")
        missing = field[1] == "missing"
        if missing:
            return f"{place} is missing"
        return f"{place} is no known field"
    return str(unexpected(where or "it", value, kind))


def require_fields(data: Any, made: Any, where: str = "") -> None:
    """Check that a document has the fields of the dataclasses made of it: a field may be absent
    where it is then None, or one of `MAY_BE_ABSENT`. Raises ValueError: names the first that is
    missing."""
    if isinstance(made, tuple):
        for i, (one, own) in enumerate(zip(data, made, strict=True)):
            if not isinstance(own, (str, int, float)):
                require_fields(one, own, f"{where}[{i}]")
    for name in getattr(made, "__dataclass_fields__", ()):
        value = getattr(made, name)
        if name in data:
            if not isinstance(value, (str, int, float)):
                require_fields(data[name], value, f"{where}.{name}")
        elif value is not None and name not in MAY_BE_ABSENT:
            raise ValueError(f"{where}.{name} is missing".removeprefix("."))


def check_name(value: str, where: str) -> None:
    """Check a name that can be part of a path: no slash, no `..`, no control characters, not
    hidden. Raises ValueError: see `checked`."""
    good = (
        value.isprintable()
        and 0 < len(value.encode()) <= MOST_NAME_BYTES
        and not value.startswith(".")
        and ".." not in value
        and not {"/", "\\"} & set(value)
    )
    if not good:
        expected = "a name without slashes, '..' and control characters"
        raise unexpected(where, value, expected)


def unexpected(where: str, value: Any, expected: str) -> ValueError:
    """The error for a field with an unexpected value."""
    # Of TOML there are dates, too.
    in_full = not isinstance(value, (dict, list)) or not value
    shown = json.dumps(value, default=str) if in_full else "..."
    kind = (
        "an object"
        if isinstance(value, dict)
        else "a list"
        if isinstance(value, list)
        else ""
    )
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]} ..."
    return ValueError(f"{where} is {kind or shown}, expected {expected}")


def check_plan(plan: StorePlan) -> dict[str, ArraySpec]:
    """Check what the types of a plan do not say: names, sizes, and that its parts fit each other.
    Returns its arrays. Raises ValueError: names a field that is invalid."""
    for where, name in _names(plan):
        check_name(name, where)
    _check_sites(plan)
    _check_parts(plan)
    specs = arrays(plan)
    _check_arrays(specs)
    return specs


def _names(plan: StorePlan) -> Iterator[tuple[str, str]]:
    """Each name in a plan with its place."""

    def of(names: Sequence[str], where: str) -> Iterator[tuple[str, str]]:
        return ((f"{where}[{i}]", name) for i, name in enumerate(names))

    def prefix(layout: TokenLayout, where: str) -> Iterator[tuple[str, str]]:
        return of(layout.prefix, f"{where}.prefix")

    for i, site in enumerate(plan.sites):
        where = f"plan.sites[{i}]"
        yield f"{where}.name", site.name
        for key in ("block", "alias_of", "site_path"):
            if (name := getattr(site, key)) is not None:
                yield f"{where}.{key}", name
        if site.layout is not None:
            yield from prefix(site.layout, f"{where}.layout")
    for i, group in enumerate(plan.attention):
        where = f"plan.attention[{i}]"
        if group.prefix:
            yield f"{where}.prefix", group.prefix
        yield from of(group.blocks, f"{where}.blocks")
        yield from prefix(group.layout, f"{where}.layout")
    for i, (name, layout) in enumerate(plan.sublayers):
        yield f"plan.sublayers[{i}][0]", name
        yield from prefix(layout, f"plan.sublayers[{i}][1]")
    for key in ("weights", "places"):
        for i, (name, *_) in enumerate(getattr(plan, key)):
            yield f"plan.{key}[{i}][0]", name
    if plan.erf is not None:
        yield from of(plan.erf.sites, "plan.erf.sites")


def _check_sites(plan: StorePlan) -> None:
    """Check that each site's fields agree, and that aliases are of stored sites."""
    for i, site in enumerate(plan.sites):
        where = f"plan.sites[{i}]"
        kind = site.kind
        layout = site.layout
        if (layout is None) != (kind in ("vector", "raw")):
            raise ValueError(
                f"{where} is of kind {kind} {'without' if layout is None else 'with'} "
                "a token layout"
            )
        if layout is not None and (layout.grid is None) != (kind == "rows"):
            raise ValueError(f"{where} is of kind {kind}, which its grid contradicts")
        if layout is not None and layout.grid is None and layout.rows < 1:
            raise ValueError(f"{where} has no rows")
        if layout is not None:
            _check_frames(layout, plan, f"{where}.layout")
        if kind == "vector" and site.shape != (site.dim,):
            raise ValueError(
                f"{where} is a vector of {site.dim} channels and of shape {list(site.shape)}"
            )
    stored = {site.name for site in plan.stored}
    for site in plan.sites:
        if site.alias_of is not None and site.alias_of not in stored:
            raise ValueError(
                f"{site.name} is an alias of {site.alias_of}, which is not stored"
            )
    if len({site.name for site in plan.sites}) < len(plan.sites):
        raise ValueError("two sites have one name")


def _check_frames(layout: TokenLayout, plan: StorePlan, where: str) -> None:
    """Check that a layout's axis of time belongs to a grid of a store of clips."""
    if layout.frames is not None and (layout.grid is None or plan.clip is None):
        what = "grid" if layout.grid is None else "plan.clip"
        raise ValueError(f"{where}.frames is {layout.frames} without a {what}")
    if layout.frames is None and layout.stride_frames is not None:
        raise ValueError(
            f"{where}.stride_frames is {layout.stride_frames:g} without frames"
        )


def _check_parts(plan: StorePlan) -> None:
    """Check that attention, receptive fields, tiles and clips fit the sites and each other."""
    for i, group in enumerate(plan.attention):
        blocks = group.blocks
        n_heads = group.n_heads
        grid = group.layout.grid
        if not blocks or len(blocks) != len(n_heads) or grid is None:
            raise ValueError(
                f"plan.attention[{i}] has {len(blocks)} blocks, {len(n_heads)} "
                f"numbers of heads and the grid {grid}"
            )
        _check_frames(group.layout, plan, f"plan.attention[{i}].layout")
        body = group.layout.body
        other = group.layout.n_prefix and plan.clip is None
        if group.window is not None and (
            other
            or len(group.window) != len(body)
            or any(n > m for n, m in zip(group.window, body, strict=True))
        ):
            raise ValueError(
                f"plan.attention[{i}] has windows of {list(group.window)} cells, expected some "
                f"within a grid of {list(body)} cells{' and no other tokens' if other else ''}"
            )
    for i, (_, layout) in enumerate(plan.sublayers):
        if layout.n_tokens < 1:
            raise ValueError(f"plan.sublayers[{i}][1] has no tokens")
        _check_frames(layout, plan, f"plan.sublayers[{i}][1]")
    if plan.clip is not None and plan.canvas is not None:
        raise ValueError("plan.clip is beside plan.canvas, expected one of them")
    if plan.erf is not None:
        if plan.erf.n_images > plan.n_images:
            most = f"at most plan.n_images, {plan.n_images}"
            raise unexpected("plan.erf.n_images", plan.erf.n_images, most)
        stored = [site for site in plan.stored if site.layout is not None]
        with_grid = {
            site.name for site in stored if site.layout and site.layout.grid is not None
        }
        if lost := [name for name in plan.erf.sites if name not in with_grid]:
            raise ValueError(f"plan.erf.sites names {lost[0]}, which has no stored grid")
    if plan.rollout and not plan.attention:
        raise ValueError("plan.rollout is true without attention")
    if plan.canvas is not None:
        _check_canvas(plan.canvas, plan)


def _check_canvas(canvas: Canvas, plan: StorePlan) -> None:
    """Check that a canvas has the numbers of its crop mode, and the plan nothing beside it that
    tiles and grids of their own do not have."""
    has = {name for name in _OF_CROP_MODES if getattr(canvas, name) is not None}
    needs = {"corner": {"short_side"}, "pixels": {"min_pixels", "max_pixels"}}
    wanted = needs.get(canvas.crop_mode, {"max_pixels"})
    if has != wanted:
        raise ValueError(
            f"plan.canvas.crop_mode is {canvas.crop_mode} with {', '.join(sorted(has)) or 'none'} "
            f"of {', '.join(_OF_CROP_MODES)}, expected {' and '.join(sorted(wanted))}"
        )
    if (canvas.min_pixels or 0) > (canvas.max_pixels or math.inf):
        most = f"at most plan.canvas.max_pixels, {canvas.max_pixels}"
        raise unexpected("plan.canvas.min_pixels", canvas.min_pixels, most)
    if (canvas.own_grids and not canvas.is_native) or (canvas.tiles and canvas.is_native):
        what = "tiles" if canvas.is_native else "own_grids"
        raise ValueError(
            f"plan.canvas has {what}, which images of {canvas.crop_mode} do not have"
        )
    if not canvas.in_parts:
        return
    more = [plan.sublayers, plan.grams, plan.erf, plan.rollout]
    more += (
        [plan.attention] if canvas.tiles else [plan.attention_level in ("rows", "full")]
    )
    layouts = [
        site.layout for site in plan.sites if site.kind != "vector" or canvas.tiles
    ]
    layouts += [group.layout for group in plan.attention]
    if any(more) or any(
        one is None or one.grid is None or one.n_prefix for one in layouts
    ):
        what = "tiles" if canvas.tiles else "own_grids"
        raise ValueError(f"plan.canvas has {what}, beside what {what} do not have")


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
            raise ValueError(
                f"{path} has {row} bytes a row, expected at most {MOST_ROW_BYTES}"
            )
    if (chunks := n_places(specs)) > MOST_CHUNKS:
        raise ValueError(f"a slab has {chunks} chunks, expected at most {MOST_CHUNKS}")
