"""Native resolution: sizes against the library's own, stored sites against the library's own states
of the files themselves, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tests.extractions import array_bytes
from tests.models_helpers import redraw
from tests.test_canvas import tiled
from tests.test_models_towers import cells_by_loop, laid
from vitsee_cli.main import main
from vitsee_core.analyses.attn_dist import run as attn_dist
from vitsee_core.attention.heads import uniform_distance
from vitsee_core.models.load import load_model
from vitsee_core.models.site_tables import site_table, table_of_size
from vitsee_core.models.survey import orders_at
from vitsee_core.models.tokens.packed_order import same_order
from vitsee_stores import Store, manifest, open_store
from vitsee_stores.errors import StoreError
from vitsee_stores.manifest import without_absent
from vitsee_stores.plan import Canvas, patches_size, pixels_size
from vitsee_stores.schema import check_plan
from vitsee_stores.store_contents import BY_IMAGE

transformers: Any = pytest.importorskip("transformers", minversion="5.20")
qwen2_5: Any = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")

VISION = {
    **{
        "depth": 3,
        "num_heads": 2,
        "hidden_size": 24,
        "embed_dim": 24,
        "intermediate_size": 40,
    },
    **{"out_hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1]},
    **{"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
}
TEXT = {
    **{
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "vocab_size": 160_000,
    },
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
}
# (height, width) of files, and at 28 pixels a group and 56 x 56 to 160 x 160 pixels of a tower.
SIZES = [(120, 200), (210, 90), (100, 101), (61, 340), (40, 45), (120, 200)]
# By hand: 120 / 28 = 4.3 and 200 / 28 = 7.1 groups, 4 x 7. 40 x 45 pixels are 1 x 2 groups, and
# 28 x 56 = 1568 are fewer than 56 x 56: times sqrt(3136 / 1800) = 1.32 they are 52.8 x 59.4,
# rounded up.
PIXELS = [(112, 196), (224, 84), (112, 112), (56, 336), (56, 84), (112, 196)]


def photos(folder: Path, sizes: list[tuple[int, int]] = SIZES) -> Path:
    rng = np.random.default_rng(0)
    for k, size in enumerate(sizes):
        own = folder / "ab"[k % 2]
        own.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 256, (9, 9, 3), np.uint8)
        Image.fromarray(coarse).resize(size[::-1], Image.Resampling.BICUBIC).save(
            own / f"{k}.png"
        )
    return folder


def saved(folder: Path, model: Any, processor: Any) -> Path:
    redraw(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of several sizes in `photos`, and tiny models that transformers saved."""
    root = tmp_path_factory.mktemp("native")
    photos(root / "photos")
    torch.manual_seed(0)
    bounds = {"min_pixels": 56 * 56, "max_pixels": 160 * 160}
    for name in ("Qwen2_5_VL", "Qwen3VL"):
        config = getattr(transformers, f"{name}Config")(
            vision_config=VISION, text_config=TEXT
        )
        patch = config.vision_config.patch_size
        processor = transformers.Qwen2VLImageProcessor(**bounds, patch_size=patch)
        saved(
            root / name, getattr(transformers, f"{name}Model")(config).eval(), processor
        )
    siglip = transformers.Siglip2VisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        num_patches=64, patch_size=16,
    )  # fmt: skip
    processor = transformers.Siglip2ImageProcessor(max_num_patches=40)
    saved(root / "Siglip2", transformers.Siglip2VisionModel(siglip).eval(), processor)
    return root


def ran(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def extracted(folder: Path, name: str, output: Path, *more: object) -> Store:
    part = "" if name == "Siglip2" else "#visual"
    sites = [] if name == "Siglip2" else ["--sites", "*merger*"]
    result = ran(
        "extract", f"transformers:{folder / name}{part}", "--data", folder / "photos", "--native",
        "-o", output, "--dtype", "float32", "--sites", "blocks", "--sites", "norm", *sites, *more,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    return open_store(output)


# ---------------------------------------------------------------- sizes


def test_sizes_by_hand() -> None:
    assert [pixels_size(size, 28, 56 * 56, 160 * 160) for size in SIZES] == PIXELS
    # 1 and a half groups are rounded to the even number, as Python rounds
    assert pixels_size((42, 70), 28, 1, 10**6) == (56, 56)
    # 10 x 10 patches of an image of 100 x 100; of one twice as wide 4 x 8, since 5 x 9 are above 40
    assert patches_size((100, 100), 16, 100 * 256) == (160, 160)
    assert patches_size((100, 200), 16, 40 * 256) == (64, 128)


@pytest.mark.parametrize("size", [(27, 100), (100, 27), (28, 28 * 201)])
def test_no_size(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"smaller than the 28 x 28|more than 200 times"):
        pixels_size(size, 28, 1, 10**6)


def test_sizes_are_the_librarys() -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
    from transformers.models.siglip2.image_processing_siglip2 import (
        get_image_size_for_max_num_patches,
    )

    rng = np.random.default_rng(0)
    for height, width in rng.integers(28, 1400, (300, 2)).tolist():
        wanted = smart_resize(height, width, 28, 3136, 250_000)
        assert pixels_size((height, width), 28, 3136, 250_000) == wanted
        wanted = get_image_size_for_max_num_patches(height, width, 16, 256)
        assert patches_size((height, width), 16, 256 * 256) == wanted


# ---------------------------------------------------------------- against the library


def processed(folder: Path, name: str, file: Path) -> Any:
    own = transformers.AutoImageProcessor.from_pretrained(folder / name)
    return own(images=[Image.open(file).convert("RGB")], return_tensors="pt")


def states_of(folder: Path, name: str, file: Path) -> dict[str, Tensor]:
    """Site -> (cells, dim) of the library's own states for a file, row by row, and its grid."""
    given = processed(folder, name, file)
    with torch.inference_mode():
        if name == "Siglip2":
            model = transformers.Siglip2VisionModel.from_pretrained(folder / name).eval()
            out = model(**given, output_hidden_states=True)
            rows, cols = given["spatial_shapes"][0].tolist()
            found = {f"blocks.{i}.out": x for i, x in enumerate(out.hidden_states[1:])}
            found |= {"embed": out.hidden_states[0], "norm": out.last_hidden_state}
            return {
                site: x[0, : rows * cols].reshape(rows, cols, -1)
                for site, x in found.items()
            }
        whole = getattr(transformers, f"{name}Model").from_pretrained(folder / name)
        tower = whole.eval().visual
        last: list[Tensor] = []
        tower.blocks[-1].register_forward_hook(lambda _m, _a, left: last.append(left))
        thw = given["image_grid_thw"]
        out = tower(given["pixel_values"], grid_thw=thw, output_hidden_states=True)
    grid = int(thw[0, 1]), int(thw[0, 2])
    cells = cells_by_loop(grid, 2)
    if name == "Qwen2_5_VL":
        from transformers.vision_utils import get_vision_window_index

        index, _ = get_vision_window_index(thw, 2, 56, 14)
        cells = torch.tensor(cells).reshape(-1, 4)[index].flatten().tolist()
    states = [*out.hidden_states[:3], *last]
    names = ["embed", "blocks.0.out", "blocks.1.out", "blocks.2.out"]
    found = {
        site: laid(x, 1, cells)[0].reshape(*grid, -1)
        for site, x in zip(names, states, strict=True)
    }
    half = grid[0] // 2, grid[1] // 2
    merged = {"merger": out.pooler_output}
    for i, x in enumerate(getattr(out, "deepstack_features", None) or ()):
        merged[f"deepstack_merger_list.{i}"] = x
    return found | {site: x.reshape(*half, -1) for site, x in merged.items()}


def at(store: Store, site: str, image: int) -> NDArray[np.float32]:
    """(rows, cols, dim) of the canvas' grid."""
    found = store.acts(site, "patches", partial=True)[image : image + 1][0]
    return np.asarray(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL", "Siglip2"])
def test_each_site_against_the_librarys_own_states(
    name: str, folder: Path, tmp_path: Path
) -> None:
    store = extracted(folder, name, tmp_path / "a.zarr", "--inputs")
    canvas = store.plan.canvas
    assert canvas is not None and canvas.own_grids
    assert {"canvas", "native"} <= {*store.plan.features}
    sites = {site for site in store.sites if not site.endswith((".in", ".mlp.2", ".fc2"))}
    for i, file in enumerate(store.samples.id):
        own = states_of(folder, name, folder / "photos" / file)
        assert sites >= own.keys()
        for site, wanted in own.items():
            rows, cols = wanted.shape[:2]
            stored = at(store, site, i)
            error = np.abs(stored[:rows, :cols] - wanted.numpy()).max()
            assert error <= 2e-5 * float(wanted.abs().max()), (file, site)
            # beside the image nothing, and means are over the image alone
            assert not stored[rows:].any() and not stored[:, cols:].any()
            mean = wanted.numpy().mean((0, 1))
            assert np.allclose(
                store.pooled(site)[i], mean, atol=1e-4 * np.abs(mean).max()
            )
        step = canvas.multiple if name == "Siglip2" else canvas.multiple // 2
        size = canvas.image(tuple(store.sizes[i].tolist()))
        assert own["embed"].shape[:2] == (size[0] // step, size[1] // step)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Siglip2"])
def test_pixels_are_the_processors(name: str, folder: Path, tmp_path: Path) -> None:
    """Uint8 pixels as stored, normalised, against the processor's own values."""
    store = extracted(folder, name, tmp_path / "a.zarr", "--inputs")
    transform = store.manifest.transform
    mean, std = (np.array(transform[key])[:, None, None] for key in ("mean", "std"))
    canvas = store.plan.canvas
    assert canvas is not None
    for i, file in enumerate(store.samples.id):
        height, width = canvas.image(tuple(store.sizes[i].tolist()))
        pixels = store.array("input")[i : i + 1][0][:, :height, :width]
        seen = (pixels / 255 - mean) / std
        made = processed(folder, name, folder / "photos" / file)["pixel_values"].numpy()
        if name == "Siglip2":
            made = made[0, : height * width // 256].reshape(
                height // 16, width // 16, 16, 16, 3
            )
            own = made.transpose(4, 0, 2, 1, 3).reshape(3, height, width)
        else:
            cells = cells_by_loop((height // 14, width // 14), 2)
            own = np.empty((height // 14, width // 14, 3, 14, 14))
            own.reshape(-1, 3, 14, 14)[cells] = made.reshape(-1, 3, 2, 14, 14)[:, :, 0]
            own = own.transpose(2, 0, 3, 1, 4).reshape(3, height, width)
        assert np.abs(seen - own).max() < 1e-5


@pytest.mark.slow
def test_an_image_in_a_batch_equals_itself_alone(folder: Path, tmp_path: Path) -> None:
    together = extracted(folder, "Qwen2_5_VL", tmp_path / "a.zarr")
    alone = extracted(folder, "Qwen2_5_VL", tmp_path / "b.zarr", "--batch-size", 1)
    for site in ("blocks.2.out", "merger"):
        for i in range(len(SIZES)):
            one, other = at(together, site, i), at(alone, site, i)
            assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max()


@pytest.mark.slow
def test_a_bright_patch_lights_its_own_cell(folder: Path, tmp_path: Path) -> None:
    """On a black image of 8 x 14 patches, and one of 12 x 4, in one batch."""
    places = {"wide.png": ((112, 196), (5, 11)), "high.png": ((168, 56), (9, 2))}
    for name, (size, (row, col)) in places.items():
        for lit in (True, False):
            pixels = np.zeros((*size, 3), np.uint8)
            pixels[14 * row : 14 * row + 14, 14 * col : 14 * col + 14] = 255 * lit
            own = tmp_path / "photos" / ("lit" if lit else "dark")
            own.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(own / name)
    (tmp_path / "Qwen2_5_VL").symlink_to(folder / "Qwen2_5_VL")
    store = extracted(tmp_path, "Qwen2_5_VL", tmp_path / "a.zarr")
    row_of = {name: i for i, name in enumerate(store.samples.id)}
    for name, (_, place) in places.items():
        bright, black = (
            at(store, "embed", row_of[f"{kind}/{name}"]) for kind in ("lit", "dark")
        )
        change = np.abs(bright - black).max(-1)
        assert change[place] > 1e-3 and np.count_nonzero(change) == 1
        merged = [
            at(store, "merger", row_of[f"{kind}/{name}"]) for kind in ("lit", "dark")
        ]
        assert merged[0].shape[:2] == (change.shape[0] // 2, change.shape[1] // 2)


@pytest.mark.slow
def test_orders_without_blocks_are_those_of_a_whole_pass(folder: Path) -> None:
    """A size costs no block: none runs, and the order at every place is that of a pass with all."""
    model = load_model(f"transformers:{folder / 'Qwen2_5_VL'}#visual", native=True)
    model = replace(model, input_size=(3, 112, 140))
    table = site_table(model)
    attended = []
    for block in model.module.blocks:  # type: ignore[union-attr]
        block.attn.register_forward_hook(lambda *_: attended.append(1))
    for size in ((224, 84), (56, 336), (28, 28)):
        orders = table_of_size(model, table, size).orders
        assert not attended and orders.keys() == table.orders.keys()
        whole = orders_at(model.module, (3, *size))
        assert attended
        attended.clear()
        for place, order in orders.items():
            if order.grid != (1, 1):
                assert same_order(order, whole[place]), place


# ---------------------------------------------------------------- one size


@pytest.mark.slow
def test_images_of_one_size_have_all_that_a_canvas_has(
    folder: Path, tmp_path: Path
) -> None:
    """Of images that all fill the canvas: attention with its windows, residuals; the same numbers
    as with that size as --img-size."""
    photos(tmp_path / "photos", [(112, 196)] * 3)
    model = f"transformers:{folder / 'Qwen2_5_VL'}#visual"
    given = ["extract", model, "--data", tmp_path / "photos", "--slab", 2, "-o"]
    assert ran(*given, tmp_path / "a.zarr", "--native").exit_code == 0
    sized = ["--img-size", "112x196", "--crop-mode", "squash"]
    assert ran(*given, tmp_path / "b.zarr", *sized).exit_code == 0
    one, other = array_bytes(tmp_path / "a.zarr"), array_bytes(tmp_path / "b.zarr")
    assert one.keys() == other.keys()
    assert any("attention" in path for path in one)
    same = {path for path in one if one[path] == other[path]}
    assert {
        path for path in one if path.startswith(("acts", "attention", "residual"))
    } <= same
    store = open_store(tmp_path / "a.zarr")
    assert {group.window for group in store.plan.attention} == {None, (4, 4)}
    done = ran("attn-dist", tmp_path / "a.zarr")
    assert done.exit_code == 0 and "window" in done.stdout.splitlines()[0]


@pytest.mark.slow
def test_attention_on_each_images_own_grid(folder: Path, tmp_path: Path) -> None:
    """Numbers of each image, and sums by offset and cell, against stores of one image each, which
    fills its canvas."""
    store = extracted(folder, "Qwen2_5_VL", tmp_path / "a.zarr")
    assert {group.window for group in store.plan.attention} == {None, (4, 4)}
    (tmp_path / "Qwen2_5_VL").symlink_to(folder / "Qwen2_5_VL")
    canvas = store.plan.canvas
    assert canvas is not None
    sums: dict[tuple[str, str], NDArray[np.float64]] = {}
    even: dict[str, list[float]] = {}
    for i, name in enumerate(store.samples.id):
        photo = tmp_path / "photos" / "a" / "one.png"
        photo.parent.mkdir(parents=True, exist_ok=True)
        photo.write_bytes((folder / "photos" / name).read_bytes())
        alone = extracted(tmp_path, "Qwen2_5_VL", tmp_path / f"{i}.zarr")
        of_block = {
            block: group for group in alone.plan.attention for block in group.blocks
        }
        for group in store.plan.attention:
            for row, block in enumerate(group.blocks):
                own = of_block[block]
                at_row = own.blocks.index(block)
                assert own.layout.grid is not None and group.layout.grid is not None
                for what in (*BY_IMAGE, "received_max"):
                    path = f"attention/{group.prefix}/{what}".replace("//", "/")
                    one = store.array(path)[i : i + 1][0][row]
                    other = alone.attention(what, own.prefix)[:1][0][at_row]
                    assert np.allclose(
                        one, other, rtol=2e-4, atol=1e-6, equal_nan=True
                    ), what
                token = alone.attention("received_argmax", own.prefix)[:1][0][at_row]
                at_cell = token // own.layout.grid[1] * group.layout.grid[1]
                stored = store.array(f"{group.folder}received_argmax")[i : i + 1][0][row]
                assert (
                    stored == at_cell + token % own.layout.grid[1]
                ).mean() > 0.9  # ties
                wide = sums.setdefault(
                    (block, "aligned"),
                    np.zeros((2, *(2 * n - 1 for n in group.layout.grid))),
                )
                (rows, cols), (top, left) = own.layout.grid, group.layout.grid
                aligned = alone.attention_sums("aligned", own.prefix)[0][at_row]
                for dy in range(1 - rows, rows):
                    for dx in range(1 - cols, cols):
                        wide[:, top - 1 + dy, left - 1 + dx] += aligned[
                            :, rows - 1 + dy, cols - 1 + dx
                        ]
                received = sums.setdefault((block, "received"), np.zeros((2, top, left)))
                got = alone.attention_sums("received", own.prefix)[0][at_row]
                received[:, :rows, :cols] += got.reshape(2, rows, cols)
                distance = alone.attention("distance_px", own.prefix)[:1][0][at_row]
                window = None if own.window is None else (own.window[0], own.window[1])
                found = uniform_distance(own.layout, window)
                even.setdefault(block, []).append(float(distance[0]) / found)
    for group in store.plan.attention:
        for row, block in enumerate(group.blocks):
            for what in ("aligned", "received"):
                one = store.array(f"{group.folder}{what}")[:].sum(0)[row]
                other = sums[block, what]
                assert np.allclose(one, other.reshape(one.shape), rtol=2e-4, atol=1e-6)
    table = attn_dist(store, metrics=["distance_relative"]).frame
    for block, values in even.items():
        own_rows = table.filter((pl.col("block") == block) & (pl.col("head") == 0))
        assert own_rows["value"].to_list() == pytest.approx([np.mean(values)], rel=1e-4)
        assert own_rows["n_images"].to_list() == [len(SIZES)]


@pytest.mark.slow
def test_images_to_learn_from_may_be_smaller_than_those_to_test(
    folder: Path, tmp_path: Path
) -> None:
    """The canvas follows the largest image, of which the model's sites are examined."""
    test = extracted(folder, "Qwen2_5_VL", tmp_path / "test.zarr")
    (tmp_path / "Qwen2_5_VL").symlink_to(folder / "Qwen2_5_VL")
    photos(tmp_path / "photos", [(60, 60), (61, 90), (84, 60), (90, 62)])
    train = extracted(tmp_path, "Qwen2_5_VL", tmp_path / "train.zarr")
    assert train.plan.canvas != test.plan.canvas
    done = ran("knn", train.path, test.path, "--k", "1", "--sites", "blocks.2.out")
    assert done.exit_code == 0, done.stderr
    assert "blocks.2.out" in done.stdout


# ---------------------------------------------------------------- stores


@pytest.mark.slow
def test_shards_resumed_and_grown_stores_are_equal(folder: Path, tmp_path: Path) -> None:
    whole = extracted(folder, "Qwen3VL", tmp_path / "a.zarr", "--slab", 2)
    for i in (1, 0):
        result = ran(
            "extract", f"transformers:{folder / 'Qwen3VL'}#visual", "--data", folder / "photos",
            "--native", "-o", tmp_path / "b.zarr", "--dtype", "float32", "--slab", 2, "--shard",
            f"{i}/2", "--sites", "blocks", "--sites", "norm", "--sites", "*merger*",
        )  # fmt: skip
        assert result.exit_code == 0, result.stderr
    (tmp_path / "b.zarr" / "commits" / "c.1.0").unlink()
    again = extracted(folder, "Qwen3VL", tmp_path / "b.zarr", "--slab", 2)
    assert array_bytes(tmp_path / "a.zarr") == array_bytes(tmp_path / "b.zarr")
    assert again.plan == whole.plan
    few = ["--sites", "embed", "--slab", 2]
    model = f"transformers:{folder / 'Qwen3VL'}#visual"
    given = [
        "extract",
        model,
        "--data",
        folder / "photos",
        "--native",
        "-o",
        tmp_path / "c.zarr",
    ]
    assert ran(*given, "--dtype", "float32", *few).exit_code == 0
    grown = ran(*given, "--sites", "embed", "--sites", "merger")
    assert grown.exit_code == 0, grown.stderr
    store = open_store(tmp_path / "c.zarr")
    for i in range(len(SIZES)):
        assert np.allclose(
            at(store, "merger", i), at(whole, "merger", i), rtol=1e-3, atol=1e-3
        )
    valid = ran("validate", "--deep", tmp_path / "c.zarr")
    assert valid.exit_code == 0, valid.stdout
    record = json.loads(ran("info", "--json", tmp_path / "a.zarr").stdout)
    assert (
        record["canvas"]["crop_mode"] == "pixels"
        and record["canvas"]["own_grids"] is True
    )
    assert "short_side" not in record["canvas"]
    other = ran(*given, "--max-pixels", 10_000)
    assert other.exit_code == 1 and "max_pixels" in other.stderr
    assert other.stderr.strip().count("\n") <= 3


@pytest.mark.slow
def test_analyses_of_means_run_and_others_refuse_in_a_line(
    folder: Path, tmp_path: Path
) -> None:
    photos(tmp_path / "photos", SIZES * 4)
    (tmp_path / "Qwen2_5_VL").symlink_to(folder / "Qwen2_5_VL")
    extracted(tmp_path, "Qwen2_5_VL", tmp_path / "a.zarr")
    store = str(tmp_path / "a.zarr")
    for words in (
        ["cluster", store],
        ["probe", store, "--holdout", "0.5"],
        ["cka", store, "--tokens", "mean"],
        ["attn-dist", store],
        ["pca", store],
    ):
        done = ran(*words)
        assert done.exit_code == 0, done.stderr
        assert "blocks.2" in done.stdout
    for words, phrase in (
        (["cka", store], "do not fill its canvas of"),
        (["localize", store], "do not fill its canvas of"),
        (["attn-map", store, "--kind", "aligned"], "do not fill its canvas of"),
        (["attn-map", store, "--kind", "sink"], "do not fill its canvas of"),
        (["head-types", store], "do not fill its canvas of"),
        (["norms", store], "do not fill its canvas of"),
        (["normratio", store], "images at native resolution have grids of their own"),
    ):
        refused = ran(*words)
        assert refused.exit_code == 1 and phrase in refused.stderr, (
            words,
            refused.stderr,
        )
        assert refused.stderr.count("\n") == 1 and not refused.stdout


# ---------------------------------------------------------------- what is refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more", "phrase"),
    [
        ("demo:vit", [], "--native is for models of transformers"),
        ("transformers:ViTModel --random-init 0", [], "has no native resolution"),
        ("Qwen3VL", ["--short-side", 56], "--short-side and --native exclude each other"),
        ("Qwen3VL", ["--img-size", 56], "--img-size and --native exclude each other"),
        ("Qwen3VL", ["--tiles"], "--tiles and --native exclude each other"),
        ("Qwen3VL", ["--frames", 2], "--frames and --native exclude each other"),
        (
            "Qwen3VL",
            ["--transform", "timm"],
            "--transform and --native exclude each other",
        ),
        (
            "Qwen3VL",
            ["--min-pixels", 9000, "--max-pixels", 8000],
            "9000 is more than --max-pix",
        ),
        (
            "Qwen3VL",
            ["--min-pixels", 99000],
            "99000 is more than --max-pixels 25600 (the image",
        ),
        ("Qwen3VL", ["--max-pixels", 100], "less than the 32 x 32 pixels of one group"),
        (
            "Qwen3VL",
            ["--erf", 2],
            "--erf is not supported: images at native resolution have",
        ),
        (
            "Qwen3VL",
            ["--grams"],
            "--grams is not supported: images at native resolution have",
        ),
        ("Qwen3VL", ["--attention", "rows"], "--attention rows is not supported: images"),
        ("Siglip2", ["--min-pixels", 9000], "--min-pixels is not supported"),
        (
            "transformers:Qwen3VLVisionModel --random-init 0",
            [],
            "would say --min-pixels and --max-pixels: give --native --min-pixels N --max-pixels N",
        ),
        (
            "transformers:Qwen3VLVisionModel --random-init 0",
            ["--min-pixels", 4096],
            "which would say --max-pixels: give --native --max-pixels N",
        ),
    ],
)
def test_refused_in_a_line(
    model: str, more: list[object], phrase: str, folder: Path, tmp_path: Path
) -> None:
    if model in ("Qwen3VL", "Siglip2"):
        model = f"transformers:{folder / model}{'#visual' if model == 'Qwen3VL' else ''}"
    output = tmp_path / "a.zarr"
    given = [
        "extract",
        *model.split(),
        "--data",
        folder / "photos",
        "--native",
        "-o",
        output,
    ]
    refused = ran(*given, *more)
    assert refused.exit_code in (1, 2) and phrase in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr and not refused.stdout
    assert [line for line in refused.stderr.splitlines() if phrase in line]
    assert list(tmp_path.iterdir()) == []


def test_a_size_for_each_image_names_the_option(folder: Path, tmp_path: Path) -> None:
    model = f"transformers:{folder / 'Siglip2'}"
    refused = ran(
        "extract", model, "--data", folder / "photos", "-o", tmp_path / "a.zarr"
    )
    assert (
        "give --native for the size of each image, or --transform timm" in refused.stderr
    )
    for words in ([f"{model}#"], [f"{model}#", "--native"]):
        refused = ran(
            "extract", *words, "--data", folder / "photos", "-o", tmp_path / "a.zarr"
        )
        assert (
            refused.exit_code == 1
            and "names no part behind #; leave it out" in refused.stderr
        )


def test_bounds_belong_to_native(folder: Path, tmp_path: Path) -> None:
    refused = ran(
        *("extract", "demo:vit", "--data", folder / "photos", "-o", tmp_path / "a.zarr"),
        *("--max-pixels", 10_000),
    )
    assert refused.exit_code == 2 and "give --native too" in refused.stderr


@pytest.mark.slow
def test_images_beyond_the_processors_limits_are_unreadable(
    folder: Path, tmp_path: Path
) -> None:
    """Too small for a group of patches, or too long: a row that is not valid, with the reason."""
    photos(tmp_path / "photos", [(20, 100), (64, 90), (40, 40 * 201), (80, 60)])
    (tmp_path / "Qwen3VL").symlink_to(folder / "Qwen3VL")
    model = f"transformers:{tmp_path / 'Qwen3VL'}#visual"
    given = ["extract", model, "--native", "--data"]
    result = ran(*given, tmp_path / "photos", "-o", tmp_path / "a.zarr")
    assert result.exit_code == 0, result.stderr
    store = open_store(tmp_path / "a.zarr")
    named = dict(zip(store.samples.id, store.valid.tolist(), strict=True))
    assert named == {"a/0.png": 0, "b/1.png": 1, "a/2.png": 0, "b/3.png": 1}
    assert "smaller than the 32 x 32 of one group of patches" in result.stderr
    alone = photos(tmp_path / "small", [(20, 100)])
    refused = ran(*given, alone, "-o", tmp_path / "b.zarr")
    assert refused.exit_code == 1 and not (tmp_path / "b.zarr").exists()
    assert "a/0.png: 100 x 20 pixels are smaller than the 32 x 32" in refused.stderr


def test_older_readers_refuse_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    canvas = Canvas((448, 1072), None, 16, None, "pixels", 3136, 10**6, own_grids=True)
    plan = replace(tiled(), canvas=canvas)
    check_plan(plan)
    for bad in (
        replace(canvas, min_pixels=2 * 10**6), replace(canvas, max_pixels=None),
        replace(canvas, short_side=448), replace(canvas, tiles=(224, 224)),
        replace(canvas, crop_mode="patches"), replace(canvas, crop_mode="corner"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"plan\.canvas"):
            check_plan(replace(plan, canvas=bad))
    data = {"format": 2, "features": list(plan.features)}
    monkeypatch.setattr(manifest, "FEATURES", ("box", "canvas", "window", "clips"))
    with pytest.raises(
        StoreError, match="uses 'native', which this vitsee does not read; update"
    ):
        manifest.Manifest.from_json(data)


def test_canvases_without_native_are_written_as_before() -> None:
    written = without_absent(asdict(Canvas((448, 1072), 448, 16, (224, 224))))
    assert list(written) == ["size", "short_side", "multiple", "tiles", "crop_mode"]
    assert math.prod(written["size"]) == 448 * 1072


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 3])
def test_an_image_that_breaks_the_model_is_named(
    row: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is NaN, those of the others are as without it. A white patch makes the model NaN."""
    embedding = qwen2_5.Qwen2_5_VisionPatchEmbed
    as_published = embedding.forward

    processor = transformers.Qwen2VLImageProcessor()
    white = (1 - torch.tensor(processor.image_mean)) / torch.tensor(processor.image_std)

    def broken_by_white(self: Any, patches: torch.Tensor) -> torch.Tensor:
        by_channel = patches.reshape(len(patches), 3, -1)
        darkness = (by_channel - white[:, None]).abs().flatten(1).amax(1, keepdim=True)
        result: torch.Tensor = as_published(self, patches)
        return torch.where(darkness < 1e-4, torch.nan, result)

    monkeypatch.setattr(embedding, "forward", broken_by_white)
    one_white = tmp_path / "one_white"
    shutil.copytree(folder / "photos", one_white)
    path = sorted(one_white.rglob("*.png"))[row]
    Image.new("RGB", Image.open(path).size, "white").save(path)
    words = ["extract", f"transformers:{folder / 'Qwen2_5_VL'}#visual", "--native"]
    words += ["--sites", "blocks", "--slab", "4", "--order", "dataset"]
    stores = []
    for data in (folder / "photos", one_white):
        output = tmp_path / f"{data.name}.zarr"
        result = ran(*words, "--data", data, "-o", output)
        assert result.exit_code == 0, result.output
        stores.append(open_store(output))
    assert "1 of 6 images make the model give NaN or inf: " in result.stderr
    whole = stores[0]
    store = stores[1]
    others = np.arange(6) != row
    assert store.valid.tolist() == others.tolist()
    paths = [f"acts/{site.name}/grid" for site in store.plan.stored]
    paths += [f"pooled/{site.name}/mean" for site in store.plan.stored]
    for path_of_array in (*paths, "attention/entropy", "attention/distance_px"):
        values = store.zarr[path_of_array][:]
        assert np.isnan(values[row]).all()
        expected = whole.zarr[path_of_array][:]
        np.testing.assert_array_equal(values[others], expected[others])
    failed = ran(
        *words, "--data", one_white, "-o", tmp_path / "f.zarr", "--on-error", "fail"
    )
    assert failed.exit_code == 1
    assert f"{path.name}: NaN or inf at " in failed.stderr
