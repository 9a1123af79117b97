"""The format: FORMAT.md against the code, our bytes against zarr's, sizes against the disk."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

import vitsee_stores
from tests.random_stores import PLANS, expected, write
from vitsee_stores import describe, metadata
from vitsee_stores.layout import (
    CODECS,
    FORMAT_VERSION,
    StorePlan,
    TokenLayout,
    _chunks,
    arrays,
    n_bytes,
)
from vitsee_stores.schema import checked

FORMAT = Path(vitsee_stores.__file__).with_name("FORMAT.md").read_text()
MIB = 1 << 20


def table(text: str = FORMAT.partition("- `clips`")[0]) -> dict[str, dict[str, str]]:
    """The rows of FORMAT.md's table by array path."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    rows = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0].strip("`")] = dict(
            zip(("shape", "dtype", "axes", "nan"), cells[1:5], strict=True)
        )
    return rows


def table_of_clips() -> dict[str, dict[str, str]]:
    """The rows of arrays that differ in stores of clips."""
    return table(FORMAT.partition("- `clips`")[2])


def sizes(plan: StorePlan, path: str) -> dict[str, int]:
    """What the letters of the table stand for in one array of one store."""
    letters = {"N": plan.n_images, "K": plan.n_slabs, "S": plan.slab, "W": plan.id_bytes}
    letters["C"] = sum(
        math.prod(spec.grid[1:])
        for spec in arrays(plan).values()
        if spec.per in ("image", "slab")
    )
    if plan.inputs is not None:
        letters |= {"height": plan.inputs[1], "width": plan.inputs[2]}
    if plan.clip is not None:
        letters["F"] = plan.clip.frames
    if plan.erf is not None and path.startswith("erf/"):
        letters |= {"E": math.ceil(plan.erf.n_images / plan.slab)}
        letters |= dict(zip(("height", "width"), plan.erf.size, strict=True))
    layouts: dict[str, TokenLayout] = {}
    for site in plan.sites:
        if (
            path.split("/")[0] in ("acts", "pooled", "vectors")
            and path.split("/")[1] == site.name
        ):
            letters["D"] = site.dim
            if site.layout is not None:
                layouts[path] = site.layout
    for group in plan.attention:
        own = path.startswith(group.folder) and (group.prefix or "/grid_" not in path)
        if own or path.rpartition("/")[2] in group.blocks:
            layouts[path] = group.layout
            letters |= {"L": len(group.blocks), "H": max(group.n_heads)}
            for block, count in zip(group.blocks, group.n_heads, strict=True):
                if path == f"attention/full/{block}":
                    letters["h"] = count
    for name, layout in plan.sublayers:
        if path == f"residual/{name}":
            layouts[path] = layout
    if path in layouts:
        layout = layouts[path]
        letters |= {"P": layout.n_prefix, "T": layout.n_tokens, "R": layout.rows}
        if layout.grid is not None:
            gh, gw = layout.grid
            letters |= {"gh": gh, "gw": gw, "2gh-1": 2 * gh - 1, "2gw-1": 2 * gw - 1}
        if layout.frames is not None:
            letters |= {"gt": layout.frames, "2gt-1": 2 * layout.frames - 1}
    return letters


def pattern_of(path: str) -> str:
    """A path as FORMAT.md writes it."""
    parts = path.split("/")
    if parts[0] in ("acts", "pooled", "vectors", "grams", "erf") and path != "erf/count":
        parts[1] = "SITE"
    elif parts[0] == "residual":
        parts[1] = "SUBLAYER"
    elif parts[0] == "weights":
        parts[1] = "NAME"
    elif parts[:2] == ["attention", "full"]:
        parts[2] = "BLOCK"
    elif parts[0] == "attention" and len(parts) == 3:
        parts.pop(1)
    return "/".join(parts)


@pytest.mark.parametrize("name", PLANS)
def test_format_text(name: str) -> None:
    plan, rows = PLANS[name], table()
    rows |= table_of_clips() if plan.clip is not None else {}
    for path, spec in arrays(plan).items():
        row = rows[pattern_of(path)]
        letters = sizes(plan, path)
        shape = [part.strip() for part in row["shape"].strip("[]").split(",")]
        if "..." not in shape:
            numbers = tuple(letters[s] if s in letters else int(s) for s in shape)
            assert numbers == spec.shape, path
        n_slabs = plan.n_erf_slabs if path.startswith("erf/") else plan.n_slabs
        assert spec.shape[0] == {"image": plan.n_images, "slab": n_slabs}.get(
            spec.per, spec.shape[0]
        )
        dtypes = {word.strip() for word in row["dtype"].split(" or ")}
        assert spec.dtype in dtypes, path
        assert (
            row["nan"] == "yes" or (row["nan"] == "ragged" and ragged(plan, path))
        ) == (spec.nan_ok), path
        if "..." not in row["axes"]:
            axes = [part.strip() for part in row["axes"].split(",")]
            end = "_grid_2x1" if "/grid_2x1/" in path else ""
            wanted = [with_size(axis, letters) for axis in axes]
            assert list(spec.axes) == [wanted[0], *(axis + end for axis in wanted[1:])], (
                path
            )


def with_size(axis: str, letters: dict[str, int]) -> str:
    """`channel_D` -> `channel_768`."""
    word, _, letter = axis.rpartition("_")
    return f"{word}_{letters[letter]}" if letter in letters else axis


def ragged(plan: StorePlan, path: str) -> bool:
    groups = [g for g in plan.attention if path.startswith(g.folder)]
    return len(set(groups[-1].n_heads)) > 1


def test_format_text_knows_no_other_array() -> None:
    written = {pattern_of(path) for plan in PLANS.values() for path in arrays(plan)}
    assert set(table()) | set(table_of_clips()) == written


def test_format_text_names_the_version() -> None:
    assert f"format version {FORMAT_VERSION}" in FORMAT
    for codec in CODECS:
        assert f"`{codec}`" in FORMAT


@pytest.mark.parametrize("name", PLANS)
def test_plans_survive_json(name: str) -> None:
    plan = PLANS[name]
    assert checked(json.loads(json.dumps(asdict(plan))), StorePlan) == plan


# bytes ----------------------------------------------------------------------------------------

COMPRESSORS: dict[str, Any] = {
    "none": lambda item: [],
    "zstd": lambda item: [ZstdCodec(level=1)],
    "lz4": lambda item: [
        BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=item)
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", PLANS)
def test_files_are_those_that_zarr_writes(tmp_path: Path, name: str, codec: str) -> None:
    plan = StorePlan(**{**vars(PLANS[name]), "codec": codec})
    write(tmp_path / "ours.zarr", plan)
    whole = expected(plan)
    group = zarr.create_group(tmp_path / "zarrs.zarr")
    for path, array in whole.items():
        spec = arrays(plan)[path]
        theirs = group.create_array(
            path,
            shape=spec.shape,
            chunks=spec.chunks,
            dtype=spec.dtype,
            fill_value=spec.fill,
            compressors=[*COMPRESSORS[codec](array.dtype.itemsize), Crc32cCodec()],
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=spec.axes,
            config={"write_empty_chunks": True},
        )
        theirs[...] = array
        files = sorted(p.name for p in (tmp_path / "zarrs.zarr" / path).iterdir())
        assert files == sorted(p.name for p in (tmp_path / "ours.zarr" / path).iterdir())
        for file in files:
            ours = (tmp_path / "ours.zarr" / path / file).read_bytes()
            other = (tmp_path / "zarrs.zarr" / path / file).read_bytes()
            if file == "zarr.json":
                assert json.loads(ours) == json.loads(other), path
            else:
                assert ours == other, f"{path}/{file}"


@pytest.mark.parametrize("name", PLANS)
def test_sizes_are_those_on_disk(tmp_path: Path, name: str) -> None:
    plan = write(tmp_path / "a.zarr", PLANS[name]).plan
    for path, size in n_bytes(plan).items():
        files = (tmp_path / "a.zarr" / path).glob("c*")
        assert sum(file.stat().st_size for file in files) == size, path


# chunks ---------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, 8]),
)
def test_chunk_rule(shape: list[int], item: int) -> None:
    chunks = _chunks(tuple(shape), item)
    assert chunks[0] == shape[0]
    assert all(1 <= c <= n for c, n in zip(chunks, shape, strict=True))
    size, whole = math.prod(chunks) * item, math.prod(shape) * item
    if whole <= 16 * MIB:
        assert size == whole
        return
    cut = [axis for axis, (c, n) in enumerate(zip(chunks, shape, strict=True)) if c < n]
    if size > 16 * MIB:
        assert math.prod(chunks[1:]) == 1, "only where nothing is left to cut"
    elif cut:
        assert size >= 4 * MIB or math.ceil(shape[cut[-1]] / chunks[cut[-1]]) == 2
    assert all(chunks[axis] == 1 for axis in cut[:-1]), "axes are cut from the first on"


def test_chunks_of_well_known_models() -> None:
    assert _chunks((256, 14, 14, 768), 2) == (256, 1, 14, 768)  # ViT-B/16: 5.25 MiB
    assert _chunks((256, 14, 14, 384), 2) == (256, 2, 14, 384)  # ViT-S/16
    assert _chunks((256, 1, 768), 2) == (256, 1, 768)
    assert _chunks((256, 12, 12), 4) == (256, 12, 12)


# what is not imported -------------------------------------------------------------------------


@pytest.mark.slow
def test_describing_and_reading_import_neither_zarr_nor_torch(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", PLANS["registers"])
    code = (
        "import sys; from vitsee_stores import describe, open_store\n"
        f"path = {str(tmp_path / 'a.zarr')!r}\n"
        "describe(path); open_store(path).acts('blocks.0.out')[:]\n"
        "heavy = {'zarr', 'torch', 'timm', 'matplotlib', 'numcodecs'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    root_folder = Path(vitsee_stores.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root_folder)


@pytest.mark.slow
def test_description_is_json(tmp_path: Path) -> None:
    for name, plan in PLANS.items():
        made = write(tmp_path / f"{name}.zarr", plan)
        record = json.loads(
            json.dumps(describe(tmp_path / f"{name}.zarr"), allow_nan=False)
        )
        assert record["complete"]
        assert record["n_committed"] == plan.n_slabs
        assert list(record["sites"]) == [site.name for site in plan.sites]
        assert record["size_bytes"] == sum(n_bytes(made.plan).values())
        assert record["made_by"][0]["command"] == "random"
        assert record["made_by"][0]["n_slabs"] == plan.n_slabs
    assert metadata.ZARR_JSON == "zarr.json"
