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

from vitsee_stores.layout import ArraySpec, arrays, n_checksums
from vitsee_stores.plan import Canvas, StorePlan, TokenLayout

T = TypeVar("T")

# Whole numbers of any meaning; both bounds fit int64.
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Integer = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Real = Annotated[float, Meta(ge=-1e30, le=1e30)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]

# Bounds that FORMAT.md states.
MAX_NAME_BYTES = 200
MAX_ROW_BYTES = 1 << 40
MAX_CHUNKS = 1 << 22
MAY_BE_ABSENT = ("grams", "boxes")  # fields of a plan that are false if absent
_CROP_MODE_FIELDS = ("short_side", "min_pixels", "max_pixels")
MAX_SHOWN_CHARS = 60
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
    """Convert a JSON value to a type, such as a dataclass or `dict[str, int]`.

    Args:
        value: what `json` returned.
        kind: the type.
        where: path of `value` in its document, for messages.

    Raises:
        ValueError: names the first field that is missing or invalid, with its value and what was
            expected.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if isinstance(value, dict) and len(value) > 1 and " - at `$[...]" in str(error):
            # msgspec does not name the key of a dict: each is converted alone to find it.
            for key, item in value.items():
                checked({key: item}, kind, where)
        raise ValueError(_describe_error(str(error), value, where)) from None
    except UnicodeEncodeError:
        raise ValueError(
            f"{where or 'it'} has a field whose name is no Unicode text"
        ) from None


def _describe_error(message: str, value: Any, where: str) -> str:
    """Return the line for one of msgspec's errors.

    Args:
        message: msgspec's message, `Expected X, got Y - at `$.a[2].b``.
        value: the converted document.
        where: path of that document.
    """
    problem, _, path = message.partition(" - at `$")
    expected = re.sub(r", got .*|^Expected ", "", problem)
    # The patterns of limits come back in words: `one_of`, and the digits of a `Digest`.
    if words := re.search(r"\\A\((.*)\)\\Z", expected):
        expected = f"one of {words[1].replace('|', ', ')}"
    elif "0-9a-f" in expected:
        expected = "64 hexadecimal digits"
    expected = re.sub(r"\w+", lambda word: _WORDS.get(word[0], word[0]), expected)
    expected = expected.replace("`", "").replace(" | ", " or ")
    key: str | int
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":  # a value of a dict, whose key msgspec does not name
            if len(value) > 1:
                return (
                    f"{where.removeprefix('.')} has an invalid value, expected {expected}"
                )
            key = next(iter(value))
        elif index:
            key = int(index)
        else:
            key = name
        where = f"{where}[{key}]" if isinstance(value, list) else f"{where}.{key}"
        value = value[key]
    where = where.removeprefix(".")
    if field := re.fullmatch("Object (missing|contains).* field `(.*)`", problem):
        field_path = f"{where}.{field[2]}".removeprefix(".")
        if field[1] == "missing":
            return f"{field_path} is missing"
        return f"{field_path} is no known field"
    return str(unexpected(where or "it", value, expected))


def require_fields(data: Any, converted: Any, where: str = "") -> None:
    """Check that a document has all fields of the dataclasses that it was converted to.

    msgspec fills absent fields with defaults, and a later default must not change what an
    older document means. A field may be absent only where it is then None, or if it is one of
    `MAY_BE_ABSENT`.

    Args:
        data: the document.
        converted: what `checked` made of it.
        where: path of `data`, for messages.

    Raises:
        ValueError: names the first field that is missing.
    """
    if isinstance(converted, tuple):
        for i, (item, converted_item) in enumerate(zip(data, converted, strict=True)):
            if not isinstance(converted_item, (str, int, float)):
                require_fields(item, converted_item, f"{where}[{i}]")
    for name in getattr(converted, "__dataclass_fields__", ()):
        value = getattr(converted, name)
        if name in data:
            if not isinstance(value, (str, int, float)):
                require_fields(data[name], value, f"{where}.{name}")
        elif value is not None and name not in MAY_BE_ABSENT:
            raise ValueError(f"{where}.{name} is missing".removeprefix("."))


def check_name(value: str, where: str) -> None:
    """Check a name that becomes part of a path.

    It must be printable and short, must not be hidden, and must not have a slash, a backslash
    or `..`.

    Raises:
        ValueError: names the field and its value.
    """
    good = (
        value.isprintable()
        and 0 < len(value.encode()) <= MAX_NAME_BYTES
        and not value.startswith(".")
        and ".." not in value
        and not {"/", "\\"} & set(value)
    )
    if not good:
        expected = "a name without slashes, '..' and control characters"
        raise unexpected(where, value, expected)


def unexpected(where: str, value: Any, expected: str) -> ValueError:
    """Return the error for a field with an unexpected value."""
    if isinstance(value, dict):
        text = "an object"
    elif isinstance(value, list):
        text = "a list"
    else:
        text = json.dumps(value, default=str)  # documents in TOML have dates, too
        if len(text) > MAX_SHOWN_CHARS:
            text = f"{text[:MAX_SHOWN_CHARS]} ..."
    return ValueError(f"{where} is {text}, expected {expected}")


def check_plan(plan: StorePlan) -> dict[str, ArraySpec]:
    """Check what the types of a plan cannot say: names, sizes, and that its fields agree.

    Returns:
        The arrays of the plan, by path.

    Raises:
        ValueError: names a field that is invalid.
    """
    for where, name in _fields_with_names(plan):
        check_name(name, where)
    _check_sites(plan)
    _check_summaries(plan)
    specs = arrays(plan)
    _check_arrays(specs)
    return specs


def _fields_with_names(plan: StorePlan) -> Iterator[tuple[str, str]]:
    """Yield (path of the field, name) for each name in a plan."""

    def indexed(names: Sequence[str], where: str) -> Iterator[tuple[str, str]]:
        """Return (path of the entry, name) for each name in a list."""
        return ((f"{where}[{i}]", name) for i, name in enumerate(names))

    def prefix(layout: TokenLayout, where: str) -> Iterator[tuple[str, str]]:
        """Return (path of the entry, name) for each prefix token of a layout."""
        return indexed(layout.prefix, f"{where}.prefix")

    for i, site in enumerate(plan.sites):
        where = f"plan.sites[{i}]"
        yield f"{where}.name", site.name
        if site.block is not None:
            yield f"{where}.block", site.block
        if site.alias_of is not None:
            yield f"{where}.alias_of", site.alias_of
        if site.site_path is not None:
            yield f"{where}.site_path", site.site_path
        if site.layout is not None:
            yield from prefix(site.layout, f"{where}.layout")
    for i, group in enumerate(plan.attention):
        where = f"plan.attention[{i}]"
        if group.prefix:
            yield f"{where}.prefix", group.prefix
        yield from indexed(group.blocks, f"{where}.blocks")
        yield from prefix(group.layout, f"{where}.layout")
    for i, (name, layout) in enumerate(plan.sublayers):
        yield f"plan.sublayers[{i}][0]", name
        yield from prefix(layout, f"plan.sublayers[{i}][1]")
    for i, (name, _) in enumerate(plan.weights):
        yield f"plan.weights[{i}][0]", name
    for i, (name, _, _) in enumerate(plan.places):
        yield f"plan.places[{i}][0]", name
    if plan.erf is not None:
        yield from indexed(plan.erf.sites, "plan.erf.sites")


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
                f"{where} is a vector of {site.dim} channels and of shape "
                f"{list(site.shape)}"
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
        absent = "grid" if layout.grid is None else "plan.clip"
        raise ValueError(f"{where}.frames is {layout.frames} without a {absent}")
    if layout.frames is None and layout.stride_frames is not None:
        raise ValueError(
            f"{where}.stride_frames is {layout.stride_frames:g} without frames"
        )


def _check_summaries(plan: StorePlan) -> None:
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
        if group.window is not None:
            # Prefix tokens are in no window; of clips each frame may have its own.
            has_others = group.layout.n_prefix > 0 and plan.clip is None
            fits = len(group.window) == len(body) and all(
                cells <= length for cells, length in zip(group.window, body, strict=True)
            )
            if has_others or not fits:
                others = " and no other tokens" if has_others else ""
                raise ValueError(
                    f"plan.attention[{i}] has windows of {list(group.window)} cells, "
                    f"expected some within a grid of {list(body)} cells{others}"
                )
    for i, (_, layout) in enumerate(plan.sublayers):
        if layout.n_tokens < 1:
            raise ValueError(f"plan.sublayers[{i}][1] has no tokens")
        _check_frames(layout, plan, f"plan.sublayers[{i}][1]")
    if plan.clip is not None and plan.canvas is not None:
        raise ValueError("plan.clip is beside plan.canvas, expected one of them")
    if plan.erf is not None:
        if plan.erf.n_images > plan.n_images:
            bound = f"at most plan.n_images, {plan.n_images}"
            raise unexpected("plan.erf.n_images", plan.erf.n_images, bound)
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
    """Check that a canvas fits its crop mode, and the plan the canvas.

    Raises:
        ValueError: a bound of another crop mode, or without one of its own; tiles or grids of
            their own beside arrays that need one grid for all images.
    """
    fields = {name for name in _CROP_MODE_FIELDS if getattr(canvas, name) is not None}
    needs = {"corner": {"short_side"}, "pixels": {"min_pixels", "max_pixels"}}
    needed = needs.get(canvas.crop_mode, {"max_pixels"})
    if fields != needed:
        raise ValueError(
            f"plan.canvas.crop_mode is {canvas.crop_mode} with "
            f"{', '.join(sorted(fields)) or 'none'} "
            f"of {', '.join(_CROP_MODE_FIELDS)}, expected {' and '.join(sorted(needed))}"
        )
    if (canvas.min_pixels or 0) > (canvas.max_pixels or math.inf):
        bound = f"at most plan.canvas.max_pixels, {canvas.max_pixels}"
        raise unexpected("plan.canvas.min_pixels", canvas.min_pixels, bound)
    if (canvas.own_grids and not canvas.is_native) or (canvas.tiles and canvas.is_native):
        excluded = "tiles" if canvas.is_native else "own_grids"
        raise ValueError(
            f"plan.canvas has {excluded}, which images of {canvas.crop_mode} do not have"
        )
    if not canvas.in_parts:
        return
    excluded_arrays = [plan.sublayers, plan.grams, plan.erf, plan.rollout]
    layouts: list[TokenLayout | None] = [group.layout for group in plan.attention]
    if canvas.tiles:
        excluded_arrays.append(plan.attention)
        layouts += [site.layout for site in plan.sites]
    else:
        # Images with grids of their own have vectors, and summaries of attention.
        excluded_arrays.append(plan.attention_level in ("rows", "full"))
        layouts += [site.layout for site in plan.sites if site.kind != "vector"]
    has_grids_alone = all(
        layout is not None and layout.grid is not None and not layout.n_prefix
        for layout in layouts
    )
    if any(excluded_arrays) or not has_grids_alone:
        kind = "tiles" if canvas.tiles else "own_grids"
        raise ValueError(f"plan.canvas has {kind}, beside what {kind} do not have")


def _check_arrays(specs: dict[str, ArraySpec]) -> None:
    """Check that the arrays' folders do not collide, and that none is unreasonably large."""
    for path, spec in specs.items():
        if any(name in ("zarr.json", "c") for name in path.split("/")):
            raise ValueError(f"{path} has the name of one of Zarr's files")
        folder = path
        while folder := folder.rpartition("/")[0]:
            if folder in specs:
                raise ValueError(f"{folder} is an array, and {path} would be in it")
        row_bytes = math.prod(spec.shape[1:]) * np.dtype(spec.dtype).itemsize
        if spec.per != "once" and row_bytes > MAX_ROW_BYTES:
            raise ValueError(
                f"{path} has {row_bytes} bytes a row, expected at most {MAX_ROW_BYTES}"
            )
    n_chunks = n_checksums(specs)
    if n_chunks > MAX_CHUNKS:
        raise ValueError(f"a slab has {n_chunks} chunks, expected at most {MAX_CHUNKS}")
