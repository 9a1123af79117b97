"""`vitsee explore`: what its page holds against the analyses that compute the same, its script
against a port of it, and what it says of what is missing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import vitsee
from tests.explored_pages import Page, read_page
from tests.extractions import extracted
from tests.stores import write_sites
from tests.tables import groups_of, having
from vitsee_cli.main import main
from vitsee_core.figures.patch_maps.colours import Colours
from vitsee_core.models.weights import stored_classifier
from vitsee_core.pages import html
from vitsee_core.pages.explore import choose_images, tokens
from vitsee_core.pages.explore.contents import short_name, within, without_folders
from vitsee_core.pages.explore.page import definition_of, panels, steps_of
from vitsee_core.pages.explore.readouts import pack_rows, query_cells, query_step
from vitsee_core.pages.explore.tokens import (
    ALLOWED_ERROR,
    MAX_BYTES,
    MAX_GRID_SIDE,
    PackedTokens,
    Precision,
    SiteTokens,
    bfloat16,
    coarse_layout,
    pack_tokens,
    pooled,
    pooled_side,
    unit_directions,
)
from vitsee_stores import open_store
from vitsee_stores.errors import StoreMismatch, VitseeError
from vitsee_stores.layout import TokenLayout

HOSTILE = "<script>pwned=1</script>\"'><img src=x onerror=pwned=1>\u202e&amp;"
SCRIPT = "pages/explore/assets/explore.js"
GRID = TokenLayout(("cls",), (4, 4), stride_px=(8.0, 8.0))
NODE = shutil.which("node")


def explore(*args: object) -> Result:
    return CliRunner().invoke(main, ["explore", *map(str, args)])


def page_of(out: Path, *args: object) -> Page:
    done = explore(*args, "-o", out)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{out}\n"
    return read_page(out)


@pytest.fixture(scope="module")
def page(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """All 8 images of a ViT whose store has full attention, and of a CNN."""
    out = tmp_path_factory.mktemp("page") / "explore.html"
    return page_of(out, everything / "vit.zarr", everything / "cnn.zarr", "--images", 8)


# ---------------------------------------------------------------- tokens


def exact(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    u = x / np.linalg.norm(x, axis=1, keepdims=True)
    found: np.ndarray[Any, Any] = u @ u.T
    return found


def packed(x: np.ndarray[Any, Any], *, most: float = MAX_BYTES) -> PackedTokens:
    (found,) = pack_tokens(
        [SiteTokens(x.astype(np.float32), np.ones(len(x), bool))], most
    )
    return found


def test_two_directions_by_hand() -> None:
    """(3, 0) and (0, 4): both at 45 degrees to their mean direction, at +-1/sqrt 2 across it: 101
    steps of 0.7 x 0.01."""
    found = packed(np.array([[3, 0], [0, 4]]))
    assert found.along.tolist() == [round(32767 / 2**0.5)] * 2
    assert found.step == pytest.approx(0.007)
    assert np.abs(found.codes[0]).tolist() == [101, 101] and found.codes[0].sum() == 0
    assert found.vectors() @ found.vectors().T == pytest.approx(np.eye(2), abs=1e-3)
    assert found.error.n_pairs == 1 and found.error.largest < 1e-3


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_the_error_is_that_of_all_pairs(mean: float) -> None:
    """With a large part in common, too, as tokens of late layers have."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 96)) * np.arange(1, 97) ** -1.2 + mean * rng.normal(size=96)
    found = packed(x)
    v = found.vectors().astype(np.float64)
    off = np.abs(exact(x) - v @ v.T)[np.triu_indices(300, 1)]
    assert found.error.n_pairs == 300 * 299 // 2
    assert found.error.largest == pytest.approx(off.max(), abs=1e-5)
    assert (
        found.error.p99 == pytest.approx(np.percentile(off, 99), abs=1e-5)
        and off.max() < 0.1
    )
    assert found.error.p99 <= ALLOWED_ERROR and len(found.codes) < 96


def test_as_few_axes_and_bytes_as_the_error_allows() -> None:
    """Against each number of axes in turn; bytes are estimated, of sites of fewer tokens than are
    tried exactly."""
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(200, 40)) * np.arange(1, 41) ** -1.0).astype(np.float32)
    site = SiteTokens(x, np.ones(200, bool))
    precision = site.precision(0.02)
    errors = [
        site.pack(Precision(precision.step, k, 0)).error.p99
        for k in range(1, precision.n_axes + 1)
    ]
    assert errors[-1] <= 0.02 < min(errors[:-1])
    kept = site.pack(precision)
    parts = (kept.along, kept.codes)
    assert precision.n_bytes == sum(len(zlib.compress(part.tobytes())) for part in parts)


@pytest.mark.slow
def test_all_sites_share_the_bytes_of_a_page_and_one_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokens, "MIN_TOKEN_BYTES", 0)
    rng = np.random.default_rng(1)
    white, thin = (
        rng.normal(size=(400, 192)),
        rng.normal(size=(400, 192)) * 0.5 ** np.arange(192),
    )
    sites = [SiteTokens(x.astype(np.float32), np.ones(400, bool)) for x in (white, thin)]
    best, small = pack_tokens(sites), pack_tokens(sites, 30_000)
    assert len(best[0].codes) > 150 > 20 > len(best[1].codes)
    assert all(found.error.p99 <= 1.05 * ALLOWED_ERROR for found in best)
    assert sum(len(zlib.compress(found.codes.tobytes())) for found in small) < 32_000
    assert small[0].step == small[1].step > best[0].step
    assert (
        ALLOWED_ERROR < small[0].error.p99 == pytest.approx(small[0].step / 0.7, rel=0.1)
    )
    (none,) = pack_tokens(sites[:1], 0)
    assert none.error.p99 > 0.1, "the coarsest is what is left"


def test_what_does_not_count_is_empty_and_changes_nothing() -> None:
    x = np.random.default_rng(2).normal(size=(50, 8)).astype(np.float32)
    counts = np.ones(50, bool)
    counts[[3, 7]] = False
    there = x.copy()
    there[3], there[7] = np.nan, 1e30
    (found,) = pack_tokens([SiteTokens(there, counts)])
    alone = packed(x[counts])
    assert (found.codes[:, counts] == alone.codes).all() and found.error == alone.error
    assert not found.codes[:, ~counts].any() and not found.along[~counts].any()
    (none,) = pack_tokens([SiteTokens(x, np.zeros(50, bool))])
    assert not none.codes.any() and none.error.n_pairs == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(1, 20), st.floats(1e-3, 1e3))
def test_lengths_change_no_cosine(n: int, dim: int, factor: float) -> None:
    x = np.random.default_rng(n * dim).normal(size=(n, dim)).astype(np.float32)
    a, b = packed(x).vectors(), packed(x * np.float32(factor)).vectors()
    assert a @ a.T == pytest.approx(b @ b.T, abs=0.02)
    assert unit_directions(x * 1e18) == pytest.approx(unit_directions(x), abs=1e-5)


@pytest.mark.parametrize("grid", [(56, 56), (41, 7), (112, 80)])
def test_large_grids_are_means_of_squares(grid: tuple[int, int]) -> None:
    """Cell by cell, of the cells that count."""
    layout = TokenLayout((), grid, stride_px=(4.0, 4.0), offset_px=(-2.0, 0.0))
    side, small = pooled_side(layout), coarse_layout(layout)
    assert (
        small.grid == (-(-grid[0] // side), -(-grid[1] // side))
        and max(small.grid) <= MAX_GRID_SIDE
    )
    assert small.stride_px == (4 * side, 4 * side) and small.offset_px == (-2, 0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, grid[0] * grid[1], 3)).astype(np.float32)
    counts = rng.random((2, grid[0] * grid[1])) < 0.6
    x[~counts] = np.nan
    counts[0, : side * grid[1]] = False
    means, known = pooled(x, counts, layout)
    cells, on = x.reshape(2, *grid, 3), counts.reshape(2, *grid)
    for k, (i, row, col) in enumerate(np.ndindex(2, *small.grid)):
        at = np.s_[i, row * side : (row + 1) * side, col * side : (col + 1) * side]
        assert known.ravel()[k] == on[at].any()
        if on[at].any():
            assert means.reshape(-1, 3)[k] == pytest.approx(
                cells[at][on[at]].mean(0), abs=1e-5
            )


def test_small_grids_stay_as_they_are() -> None:
    layout = TokenLayout(("cls",), (37, 40), stride_px=(14.0, 14.0))
    x, counts = np.zeros((1, 37 * 40, 2), np.float32), np.ones((1, 37 * 40), bool)
    assert pooled_side(layout) == 1 and coarse_layout(layout) is layout
    assert all(
        a is b for a, b in zip(pooled(x, counts, layout), (x, counts), strict=True)
    )


def test_upper_halves_of_numbers() -> None:
    assert bfloat16(np.array([1.0, -2.0, 0.0])).tolist() == [0x3F80, 0xC000, 0]
    values = np.random.default_rng(0).lognormal(0, 5, 1000)
    back = (bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    assert np.abs(back / values - 1).max() <= 1 / 256
    assert np.isnan(
        (bfloat16(np.array([np.nan])).astype(np.uint32) << 16).view(np.float32)
    ).all()


# ---------------------------------------------------------------- the same as the analyses


def test_cosines_are_those_of_cosine_map(page: Page, everything: Path) -> None:
    stores = [everything / "vit.zarr", everything / "cnn.zarr"]
    for k, store in enumerate(stores):
        table = vitsee.cosine_map(store, image=["3"], at=["1,1"], to=["5"])
        maps = table.filter(metric="cosine")
        for site, rows in groups_of(maps, "site"):
            own = page.site(k, str(site))
            for name, cells in groups_of(rows, "image"):
                query = page.image(str(rows["query"][0]))
                cols = own.about["grid"][1]
                cell = cols + 1
                found = own.cosines(query, [cell], page.image(str(name)))
                at = [int(r) * cols + int(c) for r, c in zip(cells["row"], cells["col"],
                                                             strict=True)]  # fmt: skip
                off = np.abs(found[at] - cells["value"].astype(float))
                assert off.max() <= own.about["error"]["largest"] + 1e-4
                if str(name) == str(rows["query"][0]):
                    assert found[cell] == pytest.approx(1, abs=1e-6)


def test_a_box_is_the_mean_of_its_tokens(page: Page, everything: Path) -> None:
    store = open_store(everything / "vit.zarr")
    for own in page.sites[0]:
        tokens = store.acts(own.about["name"], "patches")[:].astype(np.float64)
        x = tokens[3].reshape(-1, tokens.shape[-1])
        mean = x[[0, 1, 4, 5]].mean(0)
        expected = x @ mean / np.linalg.norm(x, axis=1) / np.linalg.norm(mean)
        image = page.image(str(store.samples.id[3]))
        found = own.cosines(image, [0, 1, 4, 5], image)
        assert np.abs(found - expected).max() <= own.about["error"]["largest"] + 5e-3


def test_colours_are_those_of_pca(page: Page, everything: Path) -> None:
    stores = [everything / "vit.zarr", everything / "cnn.zarr"]
    ids = [one["id"] for one in page.about["images"]]
    table = vitsee.pca(*stores, image=ids, fit_shown=True)
    checked = 0
    for k, store in enumerate(("vit", "cnn")):
        for own in page.sites[k]:
            rows = having(table, store=store, site=own.about["name"], metric="score")
            share = having(
                table, store=store, site=own.about["name"], metric="explained_variance"
            )
            assert own.about["explained"] == pytest.approx(share["value"].sum(), abs=1e-3)
            colours = Colours.read(table.notes["colours"][store][own.about["name"]])
            for name, cells in groups_of(rows, "image"):
                scores = np.stack(
                    [having(cells, component=c)["value"] for c in (1, 2, 3)], 1
                )
                found = own.colours
                assert found is not None
                shown = found[page.image(str(name))] / 255
                assert (
                    np.abs(shown - colours(scores.astype(float))).max()
                    <= 0.5 / 255 + 2e-3
                )
                checked += 1
    assert checked == 8 * sum(len(sites) for sites in page.sites)


def test_norms_are_those_of_the_tokens(page: Page, everything: Path) -> None:
    for k, name in enumerate(("vit.zarr", "cnn.zarr")):
        table = vitsee.norms(everything / name, metrics=["norm"], tokens="patches")
        for own in page.sites[k]:
            mean = float(having(table, site=own.about["name"])["value"][0])
            assert own.norms.mean() == pytest.approx(mean, rel=1 / 256)


def test_attention_is_that_of_attn_map(page: Page, everything: Path) -> None:
    names = [one["id"] for one in page.about["images"]][:2]
    table = vitsee.attn_map(
        everything / "vit.zarr", image=names, query=[(2, 3)], sites="blocks"
    )
    rows = table.filter(metric="attention")
    for own in page.blocks[0]:
        assert own.about["queries"] == [*range(16)], "a grid of 4 x 4 is not thinned"
        for name in names:
            of = having(rows, site=own.about["name"], image=name)
            heads = of.filter(token="cls")["value"].astype(float).reshape(-1, 16)
            shown = own.heads[page.image(name)]
            assert (
                np.abs(shown - heads) <= heads.max(1, keepdims=True) / 500 + 1e-4
            ).all()
            mean = of.filter(token="2,3")["value"].astype(float).reshape(-1, 16).mean(0)
            assert own.patches is not None
            query = own.patches[page.image(name), 2 * 4 + 3]
            assert np.abs(query - mean).max() <= mean.max() / 500 + 1e-4


def test_answers_are_those_of_lens(page: Page, everything: Path) -> None:
    store = open_store(everything / "vit.zarr")
    head = stored_classifier(store)
    answered = [own for own in page.sites[0] if own.classes is not None]
    assert len(answered) == len(page.sites[0]), "all are as wide as the classifier"
    assert (
        "channels, which none of the shown sites has" in page.about["models"][1]["lens"]
    )
    rows = [
        int(np.flatnonzero(store.samples.id == one["id"])[0])
        for one in page.about["images"]
    ]
    for own in answered:
        tokens = store.acts(own.about["name"])[rows].astype(np.float64)
        layout = store.site(own.about["name"]).layout
        assert layout is not None
        logits = head.of_tokens(tokens[:, layout.n_prefix :])
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        assert own.classes is not None and own.shares is not None
        assert (own.classes[:, 1:] == logits.argmax(-1)).all()
        assert np.abs(own.shares[:, 1:] / 255 - shares.max(-1)).max() <= 0.5 / 255 + 1e-6
        pooled = head.logits(tokens.reshape(8, -1, tokens.shape[-1]), store.site(
            own.about["name"]).layout or GRID)  # fmt: skip
        assert (own.classes[:, 0] == pooled.argmax(-1)).all()


# ---------------------------------------------------------------- the script


CHECK = """
const about = JSON.parse(text("data"));
const models = await Promise.all(about.models.map(async (model, k) => {
  const blobs = async (kind) => {
    const own = text("blob-" + kind + k);
    return own ? inflate(own) : null;
  };
  const n = about.images.length;
  return { sites: await readSites(model, n, blobs), blocks: await readBlocks(model, n, blobs) };
}));
function text(id) {
  return page.match(new RegExp(`<script type="[a-z/]+" id="${id}">([^]*?)</script>`))?.[1];
}
const site = models[0].sites[asked.site], { grid } = site.about;
const query = queryOf(site.tokens, site.cells, asked.image, asked.cells);
const own = cosines(site.tokens, site.cells, query, asked.image);
const maps = [...about.images.keys()].filter((i) => i !== asked.image)
  .map((image) => ({ image, values: cosines(site.tokens, site.cells, query, image) }));
const block = models[0].blocks[1], heads = block.about.heads;
const limits = { images: 8, grid: [4, 4], layers: 5, views: ["cosine", "lens"], heads: 2,
                 steps: 0 };
const none = { image: 0, patch: 0, box: null, layer: 0, view: "cosine", scale: "shared", head: -1,
               step: -1 };
const state = { ...none, image: 2, patch: 5, box: [1, 0, 2, 3], layer: 4, view: "lens", head: 1,
                scale: "map" };
console.log(JSON.stringify({
  own: [...own], others: maps.map((one) => [...one.values]),
  reach: reachOf(own, asked.cells, grid), best: nearest(maps, 5),
  row: [...attentionRow(block.most, block.values, 3 * heads + 1, block.cells)],
  places: [cellAt(site.about, 0, 0.3, 0.9), cellAt(site.about, 0, -0.1, 0.5),
           cellsIn(site.about, 0, [0.1, 0.1, 0.6, 0.4]),
           cellsIn(site.about, 0, [0.3, 0.3, 0.31, 0.31])],
  coarse: [coarseOf([14, 14], 2, 0), coarseOf([14, 14], 2, 15), coarseOf([14, 14], 2, 195)],
  depths: depthsOf([[0, 0.5, 1], [0, 1 / 3, 1]]), nearest: nearestDepth([0, 0.4, 0.6, 1], 0.5),
  again: readState(writeState(state), none, limits), text: writeState(state),
  hostile: readState("#image=99&patch=-4&layer=1e9&view=<script>&box=3,0,1,9&head=x", none, limits),
  range: rangeOf([new Float32Array([NaN, 3, 1]), new Float32Array([9])], (i) => i === 0),
  median: medianOf(new Float32Array([NaN, 4, 1, 3])),
}));
"""


@pytest.mark.skipif(NODE is None, reason="no node here (Debian: apt install nodejs)")
def test_the_script_computes_what_the_port_does(page: Page, tmp_path: Path) -> None:
    """And state and addresses: what is beyond the page's limits is brought to them."""
    assert NODE is not None
    asked = {"site": 3, "image": 3, "cells": [5]}
    (tmp_path / "page.html").write_text(page.text)
    lead = 'import { readFileSync } from "node:fs";\n'
    code = html.script(
        *(f"pages/explore/assets/{name}.js" for name in ("maps", "packed", "state"))
    )
    about = (
        f"const page = readFileSync('page.html', 'utf8'), asked = {json.dumps(asked)};\n"
    )
    (tmp_path / "check.mjs").write_text(lead + code + about + CHECK)
    done = subprocess.run(
        [NODE, "check.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    own = page.sites[0][3]
    assert found["own"] == pytest.approx(own.cosines(3, [5], 3), abs=1e-5)
    others = [own.cosines(3, [5], k) for k in range(8) if k != 3]
    assert np.array(found["others"]) == pytest.approx(np.array(others), abs=1e-5)
    values = own.cosines(3, [5], 3)
    rest = np.delete(values, 5)
    near = values[[0, 1, 2, 4, 6, 8, 9, 10]]
    assert found["reach"]["mean"] == pytest.approx(rest.mean(), abs=1e-5)
    assert found["reach"]["neighbours"] == pytest.approx(near.mean(), abs=1e-5)
    assert found["reach"]["area"] == pytest.approx((rest > (rest.mean() + 1) / 2).mean())
    flat = np.array(others)
    order = np.argsort(-flat.ravel())[:5]
    images = [k for k in range(8) if k != 3]
    assert [(b["image"], b["cell"]) for b in found["best"]] == [
        (images[i // 16], i % 16) for i in order.tolist()
    ]
    assert found["row"] == pytest.approx(page.blocks[0][1].heads[3, 1], abs=1e-7)
    assert found["places"] == [1 * 4 + 3, -1, [0, 1, 4, 5], [5]]
    assert found["coarse"] == [0, 0, 48]
    assert found["depths"] == [0, 0.3333, 0.5, 1] and found["nearest"] == 1
    assert (
        found["text"] == "#image=2&patch=5&layer=4&view=lens&scale=map&box=1,0,2,3&head=1"
    )
    assert found["again"] == {"image": 2, "patch": 5, "box": [1, 0, 2, 3], "layer": 4,
                              "view": "lens", "scale": "map", "head": 1, "step": -1}  # fmt: skip
    assert found["hostile"] == {"image": 7, "patch": 0, "box": None, "layer": 0, "view": "cosine",
                                "scale": "shared", "head": -1, "step": -1}  # fmt: skip
    assert found["range"] == [1, 3] and found["median"] == 3


@pytest.mark.parametrize("place", [SCRIPT, "pages/report/assets/script.js"])
def test_modules_become_one_script(place: str) -> None:
    """Without lines that import, and without two things of one name."""
    code = html.script(place)
    assert not re.search(r"^(import|export)\b", code, re.MULTILINE)
    for text in html.modules(place).values():
        assert not re.search(r"import \{[^}]* as ", text), "names stay as they are"
    names = [
        name
        for text in html.modules(place).values()
        for name in re.findall(
            r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", text, re.MULTILINE
        )
        + [n for line in re.findall(r"^(?:export )?const (.*)", text, re.MULTILINE)
           for n in re.findall(r", ([A-Z_]+) =", line)]
    ]  # fmt: skip
    assert len(names) > 15 and len({*names}) == len(names)


@pytest.mark.skipif(
    shutil.which("tsc") is None, reason="no tsc here (npm install -g typescript)"
)
def test_types() -> None:
    folder = Path(html.__file__).parent / "assets"
    done = subprocess.run(
        ["tsc", "-p", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------- attention, places, words


def test_rows_of_attention_by_hand() -> None:
    most, values = pack_rows(
        np.array([[0.5, 0.25, 0.0], [0, 0, 0], [np.nan] * 3], np.float32)
    )
    assert most.tolist() == [32768, 0, 0] and values.tolist() == [
        [255, 127, 0],
        [0] * 3,
        [0] * 3,
    ]


@pytest.mark.parametrize("grid", [(1, 1), (4, 4), (8, 8), (14, 14), (7, 20), (37, 37)])
def test_queries_are_in_the_middle_of_their_squares(grid: tuple[int, int]) -> None:
    step, cells = query_step(grid), query_cells(grid)
    rows, cols = (-(-n // step) for n in grid)
    assert max(rows, cols) <= 8 and len(cells) == rows * cols == len({*cells})
    assert (max(grid) - 1) // max(1, step - 1) >= 8 or step == 1, "as fine as that allows"
    for k, cell in enumerate(cells):
        assert (cell // grid[1] // step, cell % grid[1] // step) == divmod(k, cols)


def test_a_page_does_not_show_where_the_weights_lie() -> None:
    assert without_folders("local-dir:/home/me/weights/dino") == "local-dir:dino"
    assert without_folders("/home/me/model.py:build") == "model.py:build"
    assert without_folders("vit_small_patch16_224.dino") == "vit_small_patch16_224.dino"
    assert without_folders("hf-hub:timm/vit") == "hf-hub:timm/vit"
    assert without_folders("https://host/model.pt") == "https://host/model.pt"


@pytest.mark.slow
def test_a_note_below_the_title(tmp_path: Path) -> None:
    place = tmp_path / "s.zarr"
    extracted("demo:vit", "--data", "demo:test", "--images", "4", "-o", place)
    page = tmp_path / "page.html"
    vitsee.explore(place, output=page, images=2, note="See <there>.")
    assert "<bdi>See &lt;there&gt;.</bdi>" in page.read_text()
    vitsee.explore(place, output=page, images=2, force=True)
    assert '<p class="about"><bdi>' not in page.read_text()


def test_places_and_names() -> None:
    assert within((0.0, 0.25, 1.0, 0.75), (0.0, 0.25, 0.5, 0.75)) == [0, 0, 2, 1]
    assert [short_name(*pair) for pair in (("blocks.3.out", "blocks.3"), ("embed", ""),
            ("layer1.0.out", "layer1.0"), ("norm", ""))] == ["3", "in", "1.0", "norm"]  # fmt: skip
    assert definition_of("One `two`\nthree:\n\n- a\n  b\n- c\n\nEnd.") == [
        "One two three:", ["a b", "c"], "End.",
    ]  # fmt: skip
    for panel in panels():
        assert len(panel.reading) > 100 and panel.definition and panel.caption.source


# ---------------------------------------------------------------- which images


def vectors(n: int, *groups: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """(n, 1 + 16, 4) tokens that point along one axis for each group of images."""
    rng = np.random.default_rng(0)
    x = rng.normal(scale=0.05, size=(n, 17, 4))
    for axis, rows in enumerate(groups):
        x[list(rows), :, axis] += 1
    return x


def test_picks(tmp_path: Path) -> None:
    x = vectors(9, (0, 3, 4, 5), (1, 6, 7, 8), (2,))
    store = write_sites(tmp_path / "a.zarr", {"blocks.0.out": x}, layout=GRID)
    (last,) = store.select(["blocks"])
    (diverse,) = choose_images([store], last, names=(), n=3, pick="diverse", seed=0)
    groups = [{0, 3, 4, 5}, {1, 6, 7, 8}, {2}]
    assert sorted(
        k for row in diverse for k, group in enumerate(groups) if row in group
    ) == [
        0,
        1,
        2,
    ]
    (odd,) = choose_images([store], last, names=(), n=1, pick="outliers", seed=0)
    assert odd == [2]
    drawn = [
        choose_images([store], last, names=(), n=4, pick="random", seed=seed)[0]
        for seed in range(6)
    ]
    assert all(len({*rows}) == 4 for rows in drawn) and len({*map(tuple, drawn)}) > 1
    assert choose_images([store], last, names=(), n=99, pick="diverse", seed=0) == [
        [*range(9)]
    ]
    assert choose_images(
        [store], last, names=["image7", "2"], n=99, pick="diverse", seed=0
    ) == [[7, 2]]
    for pick, n in (("best", 3), ("random", 0)):
        with pytest.raises(VitseeError, match="expected"):
            choose_images([store], last, names=(), n=n, pick=pick, seed=0)


def test_stores_pair_by_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = np.random.default_rng(0).normal(size=(5, 17, 6))
    ids = ["a", "b", "c", "d", "e"]
    first = write_sites(tmp_path / "a.zarr", {"blocks.0.out": x}, layout=GRID, ids=ids,
                        valid=[1, 1, 0, 1, 1])  # fmt: skip
    turned = write_sites(tmp_path / "b.zarr", {"blocks.0.out": x[::-1]}, layout=GRID,
                         ids=ids[::-1], hash_offset=9)  # fmt: skip
    (last,) = first.select(["blocks"])
    rows = choose_images([first, turned], last, names=(), n=9, pick="random", seed=0)
    assert rows == [[0, 1, 3, 4], [4, 3, 1, 0]]
    assert "other bytes" in caplog.text
    page = page_of(tmp_path / "p.html", first.path, turned.path, "--images", 9)
    a, b = (page.site(k, "blocks.0.out") for k in (0, 1))
    assert (a.codes == b.codes).all() and (a.norms == b.norms).all()
    others = write_sites(
        tmp_path / "c.zarr", {"blocks.0.out": x}, layout=GRID, name="other"
    )
    with pytest.raises(StoreMismatch, match="no image is in all of"):
        choose_images([first, others], last, names=(), n=9, pick="random", seed=0)
    done = explore(first.path, others.path, "--image", "a", "-o", tmp_path / "q.html")
    assert done.exit_code == 1 and "c has no image 'a'" in done.stderr


def test_only_rows_that_are_shown_are_read(tmp_path: Path) -> None:
    """The chunks of all other images are damaged, which reading them would say."""
    x = np.random.default_rng(0).normal(size=(6, 17, 6))
    store = write_sites(tmp_path / "a.zarr", {"blocks.0.out": x}, layout=GRID, slab=1)
    for path in (store.path / "acts").rglob("*"):
        if path.is_file() and path.name.split(".")[1] in "01235":
            path.write_bytes(b"damaged")
    page = page_of(tmp_path / "p.html", store.path, "--image", "image4")
    assert [one["id"] for one in page.about["images"]] == ["image4"]
    assert (
        explore(store.path, "--image", "image3", "-o", tmp_path / "q.html").exit_code == 1
    )


# ---------------------------------------------------------------- what is missing, who may name it


def test_one_image_one_site_no_attention(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(1, 17, 2))
    store = write_sites(tmp_path / "a.zarr", {"blocks.0.out": x}, layout=GRID)
    page = page_of(tmp_path / "p.html", store.path)
    (model,) = page.about["models"]
    assert "has no attention summaries" in model["attention"]
    assert "has no weights of the classifier" in model["lens"]
    assert [len(page.about["images"]), len(model["sites"])] == [1, 1]
    assert not model["sites"][0]["colours"], "two channels are no three colours"
    assert page.about["images"][0]["picture"] == ""


def test_rows_that_are_not_finite_are_empty(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(3, 17, 6))
    x[1] = np.nan
    x[2, 5] = 0
    store = write_sites(tmp_path / "a.zarr", {"blocks.0.out": x}, layout=GRID)
    done = explore(store.path, "-o", tmp_path / "p.html")
    assert (
        done.exit_code == 0 and "16 of the shown patches of blocks.0.out" in done.stderr
    )
    (site,) = read_page(tmp_path / "p.html").sites[0]
    assert np.isnan(site.norms[1]).all() and site.norms[2, 4] == 0
    assert np.isnan(site.cosines(0, [0], 1)).all()
    assert np.isnan(site.cosines(0, [0], 2)).nonzero()[0].tolist() == [4]


def test_refusals(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(3, 17, 6))
    store = write_sites(
        tmp_path / "a.zarr", {"blocks.0.out": x, "pooled": x[:, 0]}, layout=GRID
    )
    pooled = write_sites(
        tmp_path / "b.zarr", {"blocks.0.out": x}, layout=GRID, tokens="pooled"
    )
    invalid = write_sites(
        tmp_path / "c.zarr", {"blocks.0.out": x}, layout=GRID, valid=[0, 0, 0]
    )
    out = tmp_path / "p.html"
    (tmp_path / "there.html").write_text("mine")
    (tmp_path / "ids.txt").write_text("image1\n\nnobody\n")
    for args, code, line in (
        ((store.path, "--images", 0), 2, "0 is not in the range"),
        ((store.path, "--image", "nobody"), 1, "a has no image 'nobody'"),
        ((store.path, "--ids", tmp_path / "ids.txt"), 1, "a has no image 'nobody'"),
        (
            (store.path, "--ids", tmp_path / "none.txt"),
            1,
            "--ids expects a list of images",
        ),
        ((store.path, "--image", "0", "--images", 2), 2, "--images has no effect"),
        (
            (store.path, "--device", "cpu"),
            2,
            "--device has no effect without --recompute",
        ),
        ((store.path, "--sites", "pooled"), 1, "has no grid of patches"),
        ((pooled.path,), 1, "keeps blocks.0.out pooled only"),
        ((invalid.path,), 1, "holds no readable image"),
        ((store.path, "-o", tmp_path / "there.html"), 1, "exists"),
        ((store.path, "-o", store.path / "p.html"), 1, "results do not go into a store"),
        ((store.path, "-o", tmp_path / "p.csv"), 1, ".html"),
    ):
        more = () if "-o" in args else ("-o", out)
        done = explore(*args, *more)
        assert (done.exit_code, done.stdout) == (code, ""), done.output
        last = done.stderr.splitlines()[-1]
        assert line in last and (code == 2 or last.startswith("vitsee explore: ")), (
            done.stderr
        )
        assert not out.exists()
    assert (tmp_path / "there.html").read_text() == "mine"


def hostile_store(folder: Path) -> Path:
    """A store whose ids and classes are markup."""
    x = np.random.default_rng(0).normal(size=(4, 17, 6))
    pixels = np.random.default_rng(1).integers(0, 256, (4, 3, 32, 32), np.uint8)
    ids = [f"{HOSTILE}{i}" for i in range(4)]
    store = write_sites(folder / "a.zarr", {"blocks.0.out": x}, layout=GRID, ids=ids,
                        labels=[0, 1, 0, 1], class_names=[HOSTILE, "</script>"], pixels=pixels,
                        model=HOSTILE)  # fmt: skip
    return Path(store.path)


def test_names_are_inert(tmp_path: Path) -> None:
    place = hostile_store(tmp_path)
    page = page_of(tmp_path / "p.html", f"<b>x={place}", "--title", HOSTILE)
    data = re.findall(r"<script[^>]*>", page.text)
    kinds = [re.sub(r' id="[^"]*"', "", tag) for tag in data]
    assert {*kinds} == {'<script type="application/json">', '<script type="text/plain">',
                        '<script type="module">'}  # fmt: skip
    assert kinds.count('<script type="module">') == 1 == kinds.count(kinds[0])
    assert "<img" not in page.text and "\u202e" not in page.text
    assert (
        page.about["labels"]["1"] == "</script>"
        and page.about["models"][0]["name"] == "<b>x"
    )
    assert HOSTILE.replace("\u202e", r"\u202e") == page.about["title"]


@pytest.mark.slow
def test_the_report_leads_to_pages_beside_it(tmp_path: Path) -> None:
    place = hostile_store(tmp_path)
    report = ["report", str(tmp_path), "--force"]
    assert CliRunner().invoke(main, report).exit_code == 0
    assert "Explore patches of" not in (tmp_path / "report.html").read_text()
    (tmp_path / "other.html").write_text("<title>mine</title>")
    page_of(tmp_path / "my page.html", place, "--title", "A <b> & c")
    done = CliRunner().invoke(main, report)
    assert done.exit_code == 0 and "nothing has changed" not in done.stderr
    text = (tmp_path / "report.html").read_text()
    assert (
        'href="my%20page.html">Explore patches of <bdi>A &lt;b&gt; &amp; c</bdi></a>'
        in text
    )
    assert text.count("Explore patches of") == 1
    assert "nothing has changed" in CliRunner().invoke(main, report).stderr


def test_in_python(tmp_path: Path, everything: Path) -> None:
    made = vitsee.explore(everything / "vit.zarr", output=tmp_path / "p.html", images=2,
                          sites="blocks.-1.out", pick="random")  # fmt: skip
    assert made.place == tmp_path / "p.html" and (made.n_images, made.n_sites) == (2, 1)
    page = read_page(made.place)
    assert made.p99 == pytest.approx(page.sites[0][0].about["error"]["p99"], abs=1e-6)
    with pytest.raises(TypeError, match="no keyword 'image_ids'"):
        vitsee.explore(
            everything / "vit.zarr", output=tmp_path / "q.html", image_ids=["0"]
        )


@pytest.mark.slow
def test_what_a_store_lacks_is_computed_with_its_model(
    tmp_path: Path, everything: Path
) -> None:
    """The same as of a store that keeps it."""
    from tests.every_command import vitsee as run

    model = [
        "test_vit",
        "--random-init",
        "0",
        "--img-size",
        "32",
        "--model-arg",
        "patch_size=8",
    ]
    run("extract", *model, "--data", everything / "data", "-o", tmp_path / "bare.zarr")
    plain = page_of(
        tmp_path / "a.html", tmp_path / "bare.zarr", "--image", "0", "--image", "1"
    )
    assert "--recompute" in plain.about["models"][0]["attention"]
    made = page_of(tmp_path / "b.html", tmp_path / "bare.zarr", "--image", "0", "--image", "1",
                   "--recompute")  # fmt: skip
    shown = [word for one in made.about["images"] for word in ("--image", one["id"])]
    kept = page_of(tmp_path / "c.html", everything / "vit.zarr",
                   *shown)  # fmt: skip
    for a, b in zip(made.blocks[0], kept.blocks[0], strict=True):
        assert a.patches is not None and b.patches is not None
        assert (
            np.abs(a.heads - b.heads).max() < 2e-3
            and np.abs(a.patches - b.patches).max() < 2e-3
        )


def test_which_stores_are_steps_of_one_training() -> None:
    three = ["vit-step0", "vit-step1000", "vit-step20"]
    assert steps_of(three) == {"unit": "step", "numbers": [0, 1000, 20]}
    assert steps_of(["a-epoch1", "a-epoch2", "a-epoch3"]) == {
        "unit": "epoch",
        "numbers": [1, 2, 3],
    }
    assert steps_of(three[:2]) is None and steps_of(["vit", "resnet", "mixer"]) is None
    assert steps_of(["vit-step0", "cnn-step10", "vit-step20"]) is None
    assert steps_of(["vit-step1", "vit-step1", "vit-step2"]) is None
