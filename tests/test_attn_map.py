"""Attention maps: numbers against hand and loops, single images, and what a user sees."""

from __future__ import annotations

import io
import itertools
import json
import logging
import shutil
import types
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner, Result
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from tests.attention_maps import (
    Attention,
    aligned,
    layout,
    random_attention,
    rollout,
    write,
)
from tests.command_line import refused
from tests.extractions import VIT, extracted, plant_images
from tests.manifests import edited
from tests.printed_text import colour_bars, flat, flaws
from tests.stores import write_attention
from tests.tables import equal, groups_of, having, unique
from vitsee_cli.main import main
from vitsee_core.analyses.attn_map import KINDS, MAP_COLUMNS, NUMBER_COLUMNS, plot, run
from vitsee_core.attention import recompute
from vitsee_core.attention.recompute import attention_of_images, find_rows
from vitsee_core.figures.head_tiles import SCALES, tile_table
from vitsee_core.models.provenance import Provenance
from vitsee_core.tables.results import Table
from vitsee_stores import open_store
from vitsee_stores.errors import MissingInput, SiteError, VitseeError

Array = NDArray[Any]
REGISTERS = ("reg0", "cls", "reg1")


def cells(table: Table, site: str, head: int, shape: tuple[int, ...]) -> Array:
    """One head's map; the table holds its cells row by row."""
    values: Array = having(table, site=site, head=head)["value"].reshape(shape)
    return values


def one_head(path: Path, a: Array, **kwargs: Any) -> Any:
    """A store of one image whose single head has this attention over patches, no prefix."""
    shape = kwargs.pop("grid")
    made = Attention(
        layout(shape, ()), (np.asarray(a, np.float64)[None, None],), ("blocks.0",)
    )
    return write(path, [made], **kwargs)


# ---------------------------------------------------------------- by hand


def test_uniform_attention(tmp_path: Path) -> None:
    store = one_head(tmp_path / "a.zarr", np.full((6, 6), 1 / 6), grid=(2, 3))
    # pairs of cells by offset: 1 2 3 2 1 across times 1 2 1 down, of 36
    pairs = np.outer([1, 2, 1], [1, 2, 3, 2, 1])
    table = run(store, kind="aligned")
    assert tuple(table.written.columns) == MAP_COLUMNS
    # the store keeps float32
    assert cells(table, "blocks.0", 0, (3, 5)) == pytest.approx(pairs / 36, rel=1e-6)
    assert table["row"].tolist() == [-1] * 5 + [0] * 5 + [1] * 5
    assert table["col"].tolist() == [-2, -1, 0, 1, 2] * 3
    corrected = run(store, kind="aligned", coverage=True)
    assert corrected["value"] == pytest.approx(np.full(15, 1 / 6), rel=1e-6)
    assert set(corrected["metric"].tolist()) == {"aligned_coverage"}
    received = run(store, kind="mean-spatial")
    assert received["value"] == pytest.approx(np.full(6, 1 / 6), rel=1e-6)
    assert received["row"].tolist() == [0, 0, 0, 1, 1, 1]
    assert run(store, kind="entropy")["value"][0] == pytest.approx(np.log(6), rel=1e-6)
    assert run(store, kind="prefix-mass")["value"][0] == 0


def test_identity_attention(tmp_path: Path) -> None:
    store = one_head(tmp_path / "a.zarr", np.eye(6), grid=(2, 3))
    expected = np.zeros((3, 5))
    expected[1, 2] = 1
    assert (
        cells(run(store, kind="aligned"), "blocks.0", 0, (3, 5)).tolist()
        == expected.tolist()
    )
    assert run(store, kind="entropy")["value"][0] == 0
    # every query of the rollout keeps to itself: the mean over patches is even
    assert run(store, kind="rollout")["value"] == pytest.approx(
        np.full(6, 1 / 6), rel=1e-6
    )


def test_a_pure_shift(tmp_path: Path) -> None:
    # each patch looks one down and one to the right; at the rim it has nobody to look at
    a = np.zeros((6, 6))
    for q, k in ((0, 4), (1, 5)):
        a[q, k] = 1
    table = run(one_head(tmp_path / "a.zarr", a, grid=(2, 3)), kind="aligned")
    peak = table.filter(table["value"] > 0)
    assert (peak["row"].tolist(), peak["col"].tolist(), peak["value"].tolist()) == (
        [1],
        [1],
        [1],
    )
    # clamped on one row of three: two queries of three look one to the right, one at itself
    a = np.array([[0, 1, 0], [0, 0, 1], [0, 0, 1]])
    table = run(one_head(tmp_path / "b.zarr", a, grid=(1, 3)), kind="aligned")
    assert table["value"] == pytest.approx([0, 0, 1 / 3, 2 / 3, 0], rel=1e-6)


def test_the_class_token_and_prefix_mass(tmp_path: Path) -> None:
    # tokens: reg, cls, and two patches
    a = np.array(
        [[1, 0, 0, 0], [0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.7, 0], [0.5, 0.1, 0, 0.4]]
    )
    made = Attention(layout((1, 2), ("reg0", "cls")), (a[None, None],), ("blocks.0",))
    store = write(tmp_path / "a.zarr", [made])
    assert run(store, kind="mean-cls")["value"] == pytest.approx([0.3, 0.4], rel=1e-6)
    assert run(store, kind="mean-spatial")["value"] == pytest.approx(
        [0.35, 0.2], rel=1e-6
    )
    numbers = run(store, kind="prefix-mass")
    assert tuple(numbers.written.columns) == NUMBER_COLUMNS
    assert numbers["value"][0] == pytest.approx(0.45, rel=1e-6)
    assert np.isnan(numbers["std"][0])  # one image


# ---------------------------------------------------------------- against loops


@pytest.mark.parametrize("prefix", [("cls",), REGISTERS, ()])
def test_means_against_a_loop(tmp_path: Path, prefix: tuple[str, ...]) -> None:
    n, valid = 7, [1, 1, 0, 1, 1, 1, 1]
    fine = random_attention(layout((3, 2), prefix), n, [2, 3])
    coarse = random_attention(layout((1, 2), prefix), n, [4], seed=1, prefix="grid_1x2")
    store = write(tmp_path / "a.zarr", [fine, coarse], slab=3, valid=valid)
    kept = [i for i in range(n) if valid[i]]
    for group in (fine, coarse):
        first, grid = len(prefix), group.layout.grid
        assert grid is not None
        for site, a in zip(group.blocks, group.a, strict=True):
            for head in range(a.shape[1]):
                rows: dict[str, Any] = {}
                rows |= {
                    "mean-spatial": a[kept, head, first:, first:]
                    .mean((0, 1))
                    .reshape(grid)
                }
                rows["aligned"] = sum(
                    aligned(a[i, head], group.layout) for i in kept
                ) / len(kept)
                if "cls" in prefix:
                    cls = prefix.index("cls")
                    rows["mean-cls"] = a[kept, head, cls, first:].mean(0).reshape(grid)
                for kind, expected in rows.items():
                    table = run(store, kind=kind)
                    found = cells(table, site, head, expected.shape)
                    assert found == pytest.approx(expected, rel=1e-5), (kind, site, head)
                    assert set(table["n_images"].tolist()) == {6}
    table = run(store, kind="aligned")
    totals = [
        t["value"].sum()
        for _, s in groups_of(table, "site")
        for _, t in groups_of(s, "head")
    ]
    assert totals == pytest.approx([1.0] * 9, rel=1e-12)


def test_numbers_against_a_loop(tmp_path: Path) -> None:
    made = random_attention(layout((2, 3), REGISTERS), 6, [2, 2])
    store = write(tmp_path / "a.zarr", [made], slab=4)
    table = run(store, kind="entropy")
    for row in range(len(table)):
        a = made.a[table["depth"][row]][:, table["head"][row], 3:]
        per_image = -(a * np.log(np.where(a > 0, a, 1))).sum(-1).mean(-1)
        assert table["value"][row] == pytest.approx(per_image.mean(), rel=1e-6)
        assert table["std"][row] == pytest.approx(per_image.std(ddof=1), rel=1e-4)
        assert table["low"][row] < table["value"][row] < table["high"][row]


@pytest.mark.parametrize("prefix", [("cls",), REGISTERS, ()])
def test_rollout_against_the_matrix_product(
    tmp_path: Path, prefix: tuple[str, ...]
) -> None:
    n, valid = 5, [1, 0, 1, 1, 1]
    made = random_attention(layout((2, 2), prefix), n, [2, 3, 2])
    store = write(tmp_path / "a.zarr", [made], slab=2, valid=valid, level="full")
    for residual in (True, False):
        rolled = [
            rollout([a[i].mean(0) for a in made.a], made.layout, residual)
            for i in range(n)
            if valid[i]
        ]
        table = run(store, kind="rollout", rollout_residual=residual)
        expected = np.mean(rolled, 0)[len(prefix) :]
        assert table["value"] == pytest.approx(expected, rel=1e-6)
        assert table["std"] == pytest.approx(
            np.std(rolled, 0, ddof=1)[len(prefix) :], rel=1e-4
        )
        assert table["metric"][0] == ("rollout" if residual else "rollout_no_residual")
        assert (table["site"][0], table["head"][0]) == ("blocks.2", None)
        assert set(table["n_images"].tolist()) == {4}


def test_a_head_without_spatial_mass_has_no_aligned_map(tmp_path: Path) -> None:
    made = random_attention(layout((2, 2)), 4, [2])
    made.a[0][:, 1] = [1, 0, 0, 0, 0]  # all to the class token
    made.a[0][0, 0] = [1, 0, 0, 0, 0]  # in one image only
    store = write(tmp_path / "a.zarr", [made])
    table = run(store, kind="aligned")
    assert np.isnan(table.filter(head=1)["value"]).all()
    assert set(table.filter(head=1)["n_images"].tolist()) == {0}
    expected = sum(aligned(made.a[0][i, 0], made.layout) for i in (1, 2, 3)) / 3
    assert cells(table, "blocks.0", 0, (3, 3)) == pytest.approx(expected, rel=1e-5)
    assert set(table.filter(head=0)["n_images"].tolist()) == {3}
    for scale in SCALES:
        plot(table, scale)


# ---------------------------------------------------------------- which images, blocks, heads


def test_slabs_jobs_and_memory_do_not_matter(tmp_path: Path) -> None:
    made = random_attention(layout(), 9, [2, 2])
    whole = write(tmp_path / "a.zarr", [made], slab=9)
    cut = write(tmp_path / "b.zarr", [made], slab=2)
    for kind in KINDS:
        once = run(cut, kind=kind)
        assert equal(once, run(cut, kind=kind, jobs=3))
        assert equal(once, run(cut, kind=kind, jobs=3, memory=1))
        # the store keeps float32 sums of another number of images
        assert once["value"] == pytest.approx(run(whole, kind=kind)["value"], rel=1e-6)


def test_sums_take_whole_slabs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = random_attention(layout(), 10, [2])
    store = write(tmp_path / "a.zarr", [made], slab=4)
    with caplog.at_level(logging.INFO, "vitsee_core"):
        table = run(store, kind="mean-cls", images=5)
    assert "rounded up to 2 whole slabs (8 images)" in caplog.text
    expected = made.a[0][:8, :, 0, 1:].mean(0)
    assert table["value"] == pytest.approx(expected.ravel(), rel=1e-5)
    assert set(table["n_images"].tolist()) == {8}
    assert set(run(store, kind="entropy", images=5)["n_images"].tolist()) == {5}


def test_only_committed_slabs(tmp_path: Path) -> None:
    made = random_attention(layout(), 10, [2])
    store = write(tmp_path / "a.zarr", [made], slab=4, slabs=[0, 2])
    expected = made.a[0][[0, 1, 2, 3, 8, 9], :, 0, 1:].mean(0)
    assert run(store, kind="mean-cls")["value"] == pytest.approx(
        expected.ravel(), rel=1e-5
    )


def test_blocks_and_heads_are_chosen(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", [random_attention(layout(), 3, [3, 3, 3])])
    everything = run(store, kind="mean-cls")
    table = run(store, kind="mean-cls", sites=["blocks.-1"], heads=[2, 0])
    assert equal(table, having(everything, site="blocks.2", head=[0, 2]))
    with pytest.raises(SiteError, match=r"no site matches 'blocks\.9'"):
        run(store, kind="entropy", sites=["blocks.9"])
    with pytest.raises(VitseeError, match=r"no head 3 in blocks\.0; expected 0 to 2"):
        run(store, kind="entropy", heads=[3])


def test_refusals(tmp_path: Path) -> None:
    registers = write(
        tmp_path / "r.zarr", [random_attention(layout((2, 2), ("reg0",)), 2, [1])]
    )
    with pytest.raises(
        MissingInput, match=r"no class token in blocks\.0 .*reg0.*mean-spatial"
    ):
        run(registers, kind="mean-cls")
    groups = [
        random_attention(layout(), 2, [1]),
        random_attention(layout((1, 2)), 2, [1], prefix="grid_1x2"),
    ]
    left_out = {"rollout": "attention lies on several grids"}
    several = write(tmp_path / "s.zarr", groups, left_out=left_out)
    with pytest.raises(MissingInput, match="left out: attention lies on several grids"):
        run(several, kind="rollout")
    for options, phrase in (
        ({}, "a kind of map or single images"),
        ({"kind": "mean-cls", "image": ["0"]}, "and not both"),
        ({"kind": "cls"}, "no kind 'cls'; kinds of attn-map: mean-cls"),
        ({"kind": "mean-cls", "coverage": True}, "coverage corrects aligned maps only"),
        (
            {"kind": "mean-cls", "rollout_residual": False},
            "only the kind rollout goes without",
        ),
        ({"kind": "mean-cls", "query": [(0, 0)]}, "name an --image"),
        ({"kind": "rollout", "sites": ["blocks.0"]}, "through all blocks"),
        ({"image": ["0"], "coverage": True}, "aligned maps only, not single images"),
        ({"image": ["0"], "images": 1}, "leave the number of images out"),
    ):
        with pytest.raises(VitseeError, match=phrase):
            run(registers, **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------- single images


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [REGISTERS, ()])
def test_single_images_are_the_stored_maps(
    tmp_path: Path, prefix: tuple[str, ...]
) -> None:
    made = random_attention(layout((2, 3), prefix), 6, [2, 2])
    store = write(tmp_path / "a.zarr", [made], slab=4, level="full")
    table = run(store, image=["5", "test/2.png"], query=[(1, 2)])
    assert unique(table, "image") == ["test/5.png", "test/2.png"]
    assert unique(table, "site") == ["blocks.1"]
    first = len(prefix)
    for image, i in (("test/5.png", 5), ("test/2.png", 2)):
        own = having(table, image=image)
        for head in range(2):
            a = made.a[1][i, head]
            token = "cls" if prefix else "mean"
            expected = a[prefix.index("cls"), first:] if prefix else a[first:].mean(0)
            rows = having(own, metric="attention", token=token, head=head)
            assert rows["value"] == pytest.approx(expected, rel=1e-6)
            rows = having(own, metric="attention", token="1,2", head=head)
            # float16 is exact here: the attention was made of such numbers
            assert rows["value"].tolist() == a[first + 5, first:].tolist()
        for metric, residual in (("rollout", True), ("rollout_no_residual", False)):
            rolled = rollout([a[i].mean(0) for a in made.a], made.layout, residual)
            # head means are float32
            assert having(own, metric=metric)["value"] == pytest.approx(
                rolled[first:], rel=1e-5
            )
    assert table.notes["attention"] == "stored (float16)"
    assert table.notes["pictures"] == {}  # made without a data set
    for scale in SCALES:
        plot(table, scale)


def test_single_images_are_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = random_attention(layout(), 4, [1])
    store = write(tmp_path / "a.zarr", [made], valid=[1, 1, 0, 1], level="full")
    assert find_rows(store, ["test/3.png", "0"]).tolist() == [3, 0]
    assert not caplog.text
    numbered = types.SimpleNamespace(
        label="rows",
        samples=types.SimpleNamespace(id=np.array(["2", "1", "0"])),
        valid=[True] * 3,
    )
    with caplog.at_level("INFO"):
        assert find_rows(numbered, ["0", "1"]).tolist() == [2, 1]  # type: ignore[arg-type]
    assert (
        "rows: '0' is read as an image's id (row 2 of the store); the image in row 0 is '2'"
        in (caplog.text)
    )
    assert caplog.text.count("read as") == 1
    for name, phrase in (
        (
            "nine.png",
            r"no image 'nine.png'; expected an id like 'test/0.png' or a row from 0 to 3",
        ),
        ("4", "no image '4'"),
        ("2", "'2': it is not valid"),
    ):
        with pytest.raises(VitseeError, match=phrase):
            run(store, image=[name])
    with pytest.raises(VitseeError, match=r"no token 2,0: .*grid of 2 x 3"):
        run(store, image=["0"], query=[(2, 0)])


def test_stored_attention_is_read_in_bounded_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = random_attention(layout(), 11, [2])
    store = write(tmp_path / "a.zarr", [made], slab=4, level="full")
    monkeypatch.setattr(recompute, "MAX_IMAGES", 3)
    rows = np.array([9, 0, 1, 2, 3, 8, 5])
    batches = list(attention_of_images(store, rows, lambda _, a: {"all": a}))
    assert [b.rows.tolist() for b in batches] == [[0, 1, 2], [3], [5], [8, 9]]
    for batch in batches:
        stored = made.a[0][batch.rows]
        assert np.array_equal(batch.values["blocks.0"]["all"], stored.astype(np.float32))


@pytest.mark.slow
def test_single_images_of_blocks_on_several_grids(tmp_path: Path) -> None:
    groups = [
        random_attention(layout((3, 4)), 2, [2, 2]),
        random_attention(layout((2, 2)), 2, [3], prefix="grid_2x2"),
    ]
    store = write(
        tmp_path / "a.zarr", groups, level="full", left_out={"rollout": "two grids"}
    )
    assert unique(run(store, image=["1"]), "site") == ["grid_2x2.0"]  # the last of all
    table = run(store, image=["1"], sites=["blocks"])
    assert unique(table, "metric") == ["attention"]
    figure = plot(table)
    # the picture, and each grid's tiles with a colour bar
    assert len(figure.axes) == 1 + 2


# ---------------------------------------------------------------- recomputed


@pytest.fixture(scope="module")
def extractions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures and two stores of them: whole attention and summaries only."""
    folder = tmp_path_factory.mktemp("attn-map")
    data = plant_images(folder / "data", 6)
    common = [
        *VIT,
        "--data",
        data,
        "--tokens",
        "pooled",
        "--slab",
        "4",
        "--sites",
        "logits",
    ]
    extracted(*common, "--attention", "full", "--inputs", "-o", folder / "full.zarr")
    extracted(*common, "-o", folder / "summary.zarr")
    return folder


def test_summaries_equal_those_of_whole_maps(extractions: Path) -> None:
    store = open_store(extractions / "full.zarr")
    (group,) = store.attention_blocks
    full = np.stack(
        [store.attention(f"full/{b}")[:].astype(float) for b in group.blocks], 1
    )
    cls, first = group.layout.cls, group.layout.n_prefix
    table = run(store, kind="mean-cls")
    # float16 keeps three to four digits
    assert table["value"] == pytest.approx(
        full[..., cls, first:].mean(0).ravel(), rel=2e-3
    )
    table = run(store, kind="mean-spatial")
    expected = full[..., first:, first:].mean((0, 3)).ravel()
    assert table["value"] == pytest.approx(expected, rel=2e-3)
    table = run(store, kind="aligned", sites=["blocks.0"], heads=[0])
    maps = [aligned(full[i, 0, 0], group.layout) for i in range(6)]
    assert table["value"] == pytest.approx(np.mean(maps, 0).ravel(), rel=2e-3)


def test_computed_attention_equals_the_stored(extractions: Path) -> None:
    full, summary = (
        open_store(extractions / f"{n}.zarr", label="x") for n in ("full", "summary")
    )
    image = str(full.samples.id[4])
    options: dict[str, Any] = {
        "image": [image, "1"],
        "sites": ["blocks"],
        "query": [(1, 3)],
    }
    stored, computed = run(full, **options), run(summary, **options)
    assert computed.notes["attention"] == "recomputed"
    for name in stored.written.columns:
        if name != "value":
            assert stored[name].tolist() == computed[name].tolist()
    # float16 keeps three to four digits
    assert computed["value"] == pytest.approx(stored["value"], rel=2e-3)
    # one store keeps the pixels, the other's are read again: the same pictures
    assert computed.notes["pictures"] == stored.notes["pictures"]
    rolled = run(summary, kind="rollout", rollout_residual=False)
    expected = run(full, kind="rollout", rollout_residual=False)["value"]
    assert rolled["value"] == pytest.approx(expected, rel=2e-3)
    row = int(np.flatnonzero(full.samples.id == image)[0])
    own = having(computed, image=image, metric="rollout")
    assert own["value"] == pytest.approx(full.attention("rollout")[row, 1:], rel=1e-5)


@pytest.mark.slow
def test_images_that_are_gone_or_changed(extractions: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(extractions / "data", moved)
    shutil.copytree(extractions / "summary.zarr", tmp_path / "s.zarr")
    with edited(tmp_path / "s.zarr") as manifest:
        manifest["info"]["data"]["data"] = "/gone/data"
    store = open_store(tmp_path / "s.zarr")
    with pytest.raises(VitseeError, match=r"images of s cannot be read again.*--data"):
        run(store, image=["0"])
    again = Provenance(data=str(moved))
    run(store, image=["0"], origin=again)
    name = str(store.samples.id[0])
    Image.new("RGB", (60, 50)).save(moved / name)
    with pytest.raises(VitseeError, match=f"{name!r} in {moved} is another picture now"):
        run(store, image=["0"], origin=again)
    (moved / name).unlink()
    with pytest.raises(VitseeError, match=f"no longer has the image {name!r}"):
        run(store, image=["0"], origin=again)


def test_weights_that_are_others(extractions: Path, tmp_path: Path) -> None:
    shutil.copytree(extractions / "summary.zarr", tmp_path / "s.zarr")
    with edited(tmp_path / "s.zarr") as manifest:
        manifest["model"]["weights"]["seed"] = 1
    with pytest.raises(
        VitseeError, match=r"test_vit now has other weights \(\w{12}\) than s was"
    ):
        run(open_store(tmp_path / "s.zarr"), image=["0"])
    with edited(tmp_path / "s.zarr") as manifest:
        manifest["model"]["weights"] |= {"source": "checkpoint", "file": "lost.pth"}
        del manifest["model"]["weights"]["seed"]
    lost = "cannot be loaded again: no checkpoint at .*--checkpoint"
    with pytest.raises(VitseeError, match=lost):
        run(open_store(tmp_path / "s.zarr"), image=["0"])


@pytest.mark.slow
def test_weights_of_a_checkpoint_are_found_again(tmp_path: Path) -> None:
    import torch

    from vitsee_core.models.load import load_model

    model = load_model(
        "test_vit", random_init=3, img_size=(32, 48), model_args={"patch_size": 8}
    )
    torch.save(model.module.state_dict(), tmp_path / "w.pth")
    data = plant_images(tmp_path / "data", 2)
    options = ["test_vit", "--checkpoint", tmp_path / "w.pth", *VIT[3:], "--data", data]
    extracted(*options, "--tokens", "pooled", "-o", tmp_path / "s.zarr")
    store = open_store(tmp_path / "s.zarr")
    table = run(store, image=["0"])
    (tmp_path / "w.pth").rename(tmp_path / "elsewhere.pth")
    with pytest.raises(VitseeError, match=r"no checkpoint at .*w\.pth"):
        run(store, image=["0"])
    origin = Provenance(checkpoint=tmp_path / "elsewhere.pth")
    assert equal(table, run(store, image=["0"], origin=origin))


def test_a_store_that_does_not_say_what_made_it(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", [random_attention(layout(), 2, [1])])
    with pytest.raises(MissingInput, match="does not say which weights made it"):
        run(store, image=["0"])


# ---------------------------------------------------------------- figures


def fake_maps(
    layers: int, heads: int, grid: tuple[int, int], metric: str = "mean_cls"
) -> Table:
    n = layers * heads * grid[0] * grid[1]
    depth, head, row, col = np.indices((layers, heads, *grid)).reshape(4, -1)
    columns: dict[str, Array] = {
        "store": np.full(n, "a"),
        "model": np.full(n, "m"),
        "site": np.char.add("blocks.", depth.astype(str)),
        "depth": depth,
        "rel_depth": depth / max(layers - 1, 1),
        "head": head,
        "row": row,
        "col": col,
        "metric": np.full(n, metric),
        "value": np.random.default_rng(0).random(n),
        "n_images": np.full(n, 10),
    }
    return Table(columns)


def test_tiles_stand_where_they_belong() -> None:
    table = fake_maps(3, 2, (2, 5))
    shuffled = table.with_frame(table.frame.sample(fraction=1, shuffle=True, seed=1))
    (tiles,) = tile_table(shuffled.frame)
    assert tiles.row_labels == ["block 0", "block 1", "block 2"]
    assert tiles.column_labels == ["0", "1"]
    image = plot(shuffled).axes[0].images[0]
    drawn = np.asarray(image.get_array())
    for (row, column), values in tiles.maps.items():
        assert np.array_equal(values, cells(table, f"blocks.{row}", column, (2, 5)))
        y, x = (
            int(v) for v in tiles.centre(row, column)
        )  # 2 x 5 cells: above the middle
        assert np.array_equal(drawn[y : y + 2, x - 2 : x + 3], values)
    assert image.norm.vmin == 0
    assert image.norm.vmax == table["value"].max()


def test_each_head_over_its_own_range() -> None:
    figure = plot(fake_maps(2, 2, (3, 3)), "head")
    drawn: Any = np.ma.filled(np.ma.asarray(figure.axes[0].images[0].get_array()), np.nan)
    for row in (slice(0, 3), slice(4, 7)):
        for column in (slice(0, 3), slice(4, 7)):
            assert (drawn[row, column].min(), drawn[row, column].max()) == (0, 1)
    (bar,) = colour_bars(figure)
    assert flat(bar.get_ylabel()) == "each head scaled to its own range"


def test_aligned_maps_have_midlines() -> None:
    axes = plot(fake_maps(2, 3, (3, 5), "aligned")).axes[0]
    (lines,) = axes.collections
    segments = lines.get_segments()  # type: ignore[attr-defined]
    assert len(segments) == 2 * 6
    assert segments[0].tolist() == [[-0.5, 1.0], [4.5, 1.0]]
    assert not plot(fake_maps(2, 3, (3, 5))).axes[0].collections


def drawn_values(figure: Figure) -> Array:
    drawn: Array = np.asarray(figure.axes[0].images[0].get_array())
    return drawn[np.isfinite(drawn)]


def test_uniform_attention_has_no_bright_centre(tmp_path: Path) -> None:
    """Its mass by offset has one, the number of pairs of patches that far apart."""
    store = one_head(tmp_path / "a.zarr", np.full((12, 12), 1 / 12), grid=(3, 4))
    table = run(store, kind="aligned")
    mass = cells(table, "blocks.0", 0, (5, 7))
    assert mass[2, 3] == pytest.approx(12 / 144) and mass[0, 0] == pytest.approx(1 / 144)
    assert drawn_values(plot(table)) == pytest.approx(1 / 12, rel=1e-6)
    assert drawn_values(plot(table, coverage=False)).max() == pytest.approx(12 / 144)


def test_colours_where_all_heads_are_near_uniform() -> None:
    table = fake_maps(2, 2, (3, 3))
    near = 0.1 + 0.01 * table["value"]
    figure = plot(Table(table.frame.with_columns(value=near)))
    norm = figure.axes[0].images[0].norm
    assert (norm.vmin, norm.vmax) == (near.min(), near.max())
    assert "do not start at 0" in flat(colour_bars(figure)[0].get_ylabel())
    rounded = plot(Table(table.frame.with_columns(value=0.1 + 1e-9 * table["value"])))
    assert rounded.axes[0].images[0].norm.vmin == 0


def test_one_map_says_which_it_is() -> None:
    table = fake_maps(3, 2, (3, 3)).filter(depth=2, head=1)
    title = flat(plot(table).get_suptitle())
    assert title == "a, block 2 head 1: mean attention of the class token (n = 10)"


@pytest.mark.slow
def test_every_token_grid_has_its_own_tiles() -> None:
    coarse = fake_maps(4, 3, (2, 2))
    table = Table.concat([fake_maps(2, 2, (4, 6)), having(coarse, depth=[2, 3])])
    figure = plot(table)
    assert len(figure.axes) == len(colour_bars(figure)) == 2
    assert [t.size for t in tile_table(table.frame)] == [(4, 6), (2, 2)]
    assert "4 x 6" in figure.axes[0].get_xlabel()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 1), (6, 4), (32, 16)])
def test_sizes_of_models(size: tuple[int, int]) -> None:
    figure = plot(fake_maps(*size, (4, 4)))
    width, height = figure.get_size_inches()
    assert width <= 7 and height < 24
    axes = figure.axes[0]
    shown = axes.get_position()
    # at 200 dots an inch a tile has at least 60
    assert shown.width * width * 200 / size[1] >= 60
    if size != (1, 1):
        figure.canvas.draw()
        boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert min(box.x0 for box in boxes) > 0
        pairs = itertools.pairwise(boxes)
        assert all(abs(a.y0 - b.y0) > a.height for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("least", [0.0, 0.9])
@pytest.mark.parametrize(("size", "stores"), [((1, 1), 1), ((1, 4), 1), ((2, 2), 5)])
def test_no_text_leaves_the_picture(
    size: tuple[int, int], stores: int, least: float, scale: str
) -> None:
    """The long title of several stores, and what is said of colours beside one row of tiles."""
    rows = fake_maps(*size, (5, 5), "aligned")
    columns = rows.frame.with_columns(
        value=least + pl.col("value") / pl.col("value").max()
    )
    tables = [
        Table(columns.with_columns(store=pl.lit(f"store{i}"))) for i in range(stores)
    ]
    figure = plot(Table.concat(tables), scale, coverage=stores > 1)
    # Of several stores the title says what the colours are.
    said = figure.get_suptitle() if stores > 1 else colour_bars(figure)[0].get_ylabel()
    # A map alone shows its values whatever the scale.
    alone = size == (1, 1) and stores == 1
    ranged = scale == "head" and not alone
    assert ("range" if ranged else "attention") in said and figure.get_suptitle()
    assert flaws(figure) == []


def test_a_table_from_csv_draws_the_same(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", [random_attention(layout(), 3, [2, 2])])
    table = run(store, kind="aligned")
    table.write(tmp_path / "r.csv")
    (a,), (b,) = tile_table(table.frame), tile_table(Table.read(tmp_path / "r.csv").frame)
    assert all(np.array_equal(a.maps[place], b.maps[place]) for place in a.maps)


# ---------------------------------------------------------------- the command


def attn_map_cli(*args: object) -> Result:
    return CliRunner().invoke(main, ["attn-map", *map(str, args)])


def test_command_prints_the_table(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", [random_attention(layout(), 3, [2, 2])])
    for kind in KINDS:
        result = attn_map_cli(f"mine={store.path}", "--kind", kind)
        assert result.exit_code == 0, result.stderr
        text = io.StringIO()
        run(open_store(store.path, label="mine"), kind=kind).to_csv(text)
        assert result.stdout == text.getvalue()


@pytest.mark.slow
def test_command_writes_files(extractions: Path, tmp_path: Path) -> None:
    out, png = tmp_path / "r.csv", tmp_path / "r.png"
    result = attn_map_cli(
        *(
            extractions / "full.zarr",
            "--image",
            "0",
            "--query",
            "1,2",
            "-o",
            out,
            "--png",
            png,
        )
    )
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    assert png.read_bytes()[1:4] == b"PNG"
    assert "token" in out.read_text().splitlines()[0]
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    assert sidecar["parameters"]["query"] == [[1, 2]]
    assert sidecar["parameters"]["origin"] == {
        "data": None,
        "checkpoint": None,
        "trust": False,
    }
    for kind in KINDS:
        png = tmp_path / f"{kind}.png"
        result = attn_map_cli(extractions / "full.zarr", "--kind", kind, "--png", png)
        assert result.exit_code == 0, result.stderr
        assert png.exists()


def test_command_refuses_in_one_line(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", [random_attention(layout(), 3, [2])])
    plain = write(
        tmp_path / "w.zarr", [random_attention(layout(), 3, [2])], with_rollout=False
    )
    for args, phrase in (
        ((store.path, "--kind", "mean-cls", "--sites", "blocks.7"), "no site matches"),
        ((store.path, "--kind", "mean-cls", "--heads", "7"), "no head 7"),
        ((plain.path, "--kind", "rollout"), "attention/rollout"),
        ((store.path, "--image", "9"), "no image '9'"),
    ):
        assert phrase in refused("attn-map", *args)
    for words in (
        "",
        "--kind mean-cls --image 0",
        "--kind saliency",
        "--image 0 --query 3",
    ):
        refused("attn-map", store.path, *words.split(), code=2)


def test_windowed_and_channel_attention_are_named(tmp_path: Path) -> None:
    reason = {"attention": "attention within windows (49 per image)"}
    path = write_attention(
        tmp_path / "swin.zarr", [], {}, n_images=3, left_out=reason
    ).path
    line = refused("attn-map", path, "--kind", "aligned")
    assert "attention within windows (49 per image)" in line


def test_blocks_that_were_left_out_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left_out = {
        "stages.0 attention": "attention within windows (4 per image)",
        "rollout": "no",
    }
    made = random_attention(layout(), 2, [2])
    store = write(tmp_path / "a.zarr", [made], left_out=left_out, with_rollout=False)
    with pytest.raises(
        SiteError, match=r"no attention of stages\.0: attention within windows"
    ):
        run(store, kind="mean-cls", sites=["stages.0"])
    with caplog.at_level(logging.INFO, "vitsee_core"):
        run(store, kind="mean-cls")
    assert "lacks the attention of stages.0: attention within windows" in caplog.text
