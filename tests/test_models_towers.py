"""Towers of vision-language models: every stored site against the library's own states, images in a
batch against each alone, where a bright patch shows, and what is refused."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import vitsee
from tests.extractions import array_bytes, extract, extracted, plant_images
from tests.models_helpers import captured, redraw, refusal
from vitsee_core.analyses import attn_map
from vitsee_core.models.attention_watch import AttentionEvent, KernelCall
from vitsee_core.models.hook_points import ModelError, ModuleSide
from vitsee_core.models.load import load_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.sources.transformers_inputs import (
    accept_images,
    take_images_alone,
)
from vitsee_core.models.tokens.packed_order import (
    Codes,
    JoinedCalls,
    Order,
    order_of,
    output_order,
    window_of,
)
from vitsee_core.models.tokens.towers import Packing
from vitsee_stores import open_store

transformers: Any = pytest.importorskip("transformers", minversion="5.20")

SMALL = {
    **{"depth": 4, "num_hidden_layers": 4, "num_heads": 4, "num_attention_heads": 4},
    **{
        "hidden_size": 48,
        "embed_dim": 48,
        "intermediate_size": 96,
        "out_hidden_size": 40,
    },
    **{"num_position_embeddings": 64, "image_size": 112, "num_key_value_heads": 4},
    **{
        "fullatt_block_indexes": [1, 3],
        "window_size": 56,
        "deepstack_visual_indexes": [1, 2],
    },
}
# Model folder, class; form of patches and side of the groups in which they come.
TOWERS = [
    ("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "cthw", 2),
    ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "cthw", 2),
    ("qwen3_vl", "Qwen3VLVisionModel", "cthw", 2),
    ("qwen3_5", "Qwen3_5VisionModel", "cthw", 2),
    ("qwen2_5_omni", "Qwen2_5OmniVisionEncoder", "cthw", 2),
    ("glm4v", "Glm4vVisionModel", "cthw", 2),
    ("glm_ocr", "GlmOcrVisionModel", "cthw", 2),
    ("kimi_k25", "Kimi_K25VisionModel", "image", 1),
    ("paddleocr_vl", "PaddleOCRVisionModel", "sequence", 1),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeVisionTransformerPretrainedModel", "cthw", 2),
    ("video_llama_3", "VideoLlama3VisionModel", "cthw", 1),
    ("exaone4_5", "Exaone4_5_VisionModel", "cthw", 2),
    ("minimax_m3_vl", "MiniMaxM3VLVisionModel", "cthw", 2),
    ("lfm3_vl", "Lfm3VlVisionModel", "cthw", 2),
]
CALLED = {case: case[0] for case in TOWERS}


def library_tower(folder: str, name: str) -> nn.Module:
    """A tiny tower of the library as it is, weights and norms redrawn."""
    try:
        module = importlib.import_module(
            f"transformers.models.{folder}.modeling_{folder}"
        )
    except ModuleNotFoundError:
        pytest.skip(f"transformers {transformers.__version__} has no {folder}")
    kind = getattr(module, name)
    config = kind.config_class()
    for key, value in SMALL.items():
        if getattr(config, key, None) is not None:
            setattr(config, key, value)
    if "conv" in (getattr(config, "layer_types", None) or ()):
        config.layer_types = ["conv", "full_attention"] * 2
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    tower: nn.Module = kind(config).eval().requires_grad_(False)
    redraw(tower)
    return tower


def adapted(folder: str, name: str, grid: tuple[int, int] = (8, 12)) -> LoadedModel:
    """The same tower as a model of images with this grid of patches."""
    tower = library_tower(folder, name)
    take_images_alone(tower, False, name)
    patch = tower.config.patch_size  # type: ignore[union-attr]
    size = 3, grid[0] * patch, grid[1] * patch  # type: ignore[operator]
    return LoadedModel(name, tower, size, {}, {}, name)  # type: ignore[arg-type]


def patches_by_loop(images: Tensor, patch: int, frames: int, merge: int) -> Tensor:
    """(patches, channels x frames x patch x patch), one patch after another."""
    found = []
    for image in images:
        rows, cols = image.shape[1] // patch, image.shape[2] // patch
        for a in range(0, rows, merge):
            for b in range(0, cols, merge):
                for i in range(a, a + merge):
                    for j in range(b, b + merge):
                        one = image[
                            :, i * patch : (i + 1) * patch, j * patch : (j + 1) * patch
                        ]
                        found.append(torch.stack([one] * frames, 1).flatten())
    return torch.stack(found)


def cells_by_loop(grid: tuple[int, int], merge: int) -> list[int]:
    """Place of each packed patch in its grid, row by row."""
    return [
        i * grid[1] + j
        for a in range(0, grid[0], merge)
        for b in range(0, grid[1], merge)
        for i in range(a, a + merge)
        for j in range(b, b + merge)
    ]


def run_library(
    case: tuple[str, str, str, int], x: Tensor
) -> tuple[Any, list[Tensor], list[int]]:
    """The library's own output for images, the states before and after each block (hidden states,
    of which the library puts its last layer's in the place of the last), and the cell of each
    token of an image in them."""
    folder, name, form, merge = case
    tower: Any = library_tower(folder, name)
    config, patch = tower.config, tower.config.patch_size
    grid = x.shape[2] // patch, x.shape[3] // patch
    frames = getattr(config, "temporal_patch_size", 1) or 1
    patches = patches_by_loop(x, patch, frames, merge)
    if form != "cthw":
        patches = patches.reshape(-1, 3, patch, patch)
    patches = patches[None] if form == "sequence" else patches
    given = {"grid_thw": torch.tensor([[1, *grid]] * len(x))}
    if folder == "video_llama_3":
        given["merge_sizes"] = torch.tensor([merge] * len(x))
    last: list[Tensor] = []
    blocks = next(
        m for m in tower.modules() if isinstance(m, nn.ModuleList) and len(m) == 4
    )
    blocks[-1].register_forward_hook(lambda _m, _a, left: last.append(left))
    with torch.inference_mode():
        output = tower(patches, **given, output_hidden_states=True)
    states = [*output.hidden_states[:4], *last]
    cells = cells_by_loop(grid, merge)
    if getattr(config, "fullatt_block_indexes", None):
        from transformers.vision_utils import get_vision_window_index

        one = torch.tensor([[1, *grid]])
        index, _ = get_vision_window_index(one, merge, config.window_size, patch)
        cells = torch.tensor(cells).reshape(-1, merge * merge)[index].flatten().tolist()
    return output, states, cells


def laid(x: Tensor, n_images: int, cells: list[int]) -> Tensor:
    """(images, cells, dim), row by row."""
    x = x.reshape(n_images, len(cells), -1)
    found = torch.empty_like(x)
    found[:, cells] = x
    return found


def close(x: Tensor, y: Tensor) -> bool:
    return float((x - y).abs().max()) <= 1e-5 * float(y.abs().max())


def sites_of(model: LoadedModel, x: Tensor) -> tuple[SiteTable, Any]:
    table = site_table(model)
    return table, captured(model, table, x)


@pytest.mark.slow
@pytest.mark.parametrize("case", TOWERS, ids=CALLED.get)
def test_a_tower_against_the_librarys_own_states(case: tuple[str, str, str, int]) -> None:
    model = adapted(*case[:2])
    x = torch.randn((2, *model.input_size), generator=torch.Generator().manual_seed(1))
    table, seen = sites_of(model, x)
    output, states, cells = run_library(case, x)
    for site, state in zip(
        ["embed", *(f"blocks.{i}.out" for i in range(4))], states, strict=True
    ):
        assert close(seen.tokens(site), laid(state, 2, cells)), site
        layout, patch = table[site].layout, float(model.module.config.patch_size)  # type: ignore
        assert layout is not None and (layout.grid, layout.prefix) == ((8, 12), ())
        assert (layout.stride_px, layout.offset_px) == ((patch, patch), (0.0, 0.0))
    assert len(table.sublayers) == 8
    full = (1, 3) if hasattr(model.module.config, "window_size") else range(4)
    attend = (1, 3) if case[0] == "lfm3_vl" else range(4)
    assert {b.name: b.window for b in table.attention} == {
        f"blocks.{i}": None if i in full else (4, 4) for i in attend
    }
    # The library itself puts merged tokens back in order: row by row.
    by_row = list(range(24))
    owned = {"merger": output.pooler_output} if hasattr(model.module, "merger") else {}
    for i, features in enumerate(getattr(output, "deepstack_features", None) or ()):
        owned[f"deepstack_merger_list.{i}"] = features
        assert table[f"deepstack_merger_list.{i}"].depth == 2 + i  # behind blocks 1 and 2
    for name, own in owned.items():
        layout = table[name].layout
        assert layout is not None and layout.grid == (4, 6)
        assert close(seen.tokens(name), laid(own, 2, by_row)), name


@pytest.mark.slow
@pytest.mark.parametrize("case", TOWERS[:3], ids=CALLED.get)
def test_an_image_in_a_batch_equals_itself_alone(case: tuple[str, str, str, int]) -> None:
    model = adapted(*case[:2])
    x = torch.randn((3, *model.input_size), generator=torch.Generator().manual_seed(2))
    table, together = sites_of(model, x)
    for i in range(3):
        alone = captured(model, table, x[i : i + 1])
        assert alone.sites.keys() == together.sites.keys()
        for name, (_, body) in alone.sites.items():
            assert close(body, together.sites[name][1][i : i + 1]), name
        for name, scores in alone.scores.items():
            weights, others = (
                scores.softmax(-1),
                together.scores[name][i : i + 1].softmax(-1),
            )
            assert float((weights - others).abs().max()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", [TOWERS[1], TOWERS[7]], ids=CALLED.get)
def test_a_bright_patch_lights_its_own_cell(case: tuple[str, str, str, int]) -> None:
    model = adapted(*case[:2])
    patch = int(model.module.config.patch_size)  # type: ignore[union-attr, arg-type]
    x = torch.zeros(3, *model.input_size)
    places = [(0, 0), (3, 10), (7, 2)]
    for i, (row, col) in enumerate(places):
        x[i, :, row * patch : (row + 1) * patch, col * patch : (col + 1) * patch] = 3.0
    table = site_table(model)
    seen = captured(model, table, x)
    dark = captured(model, table, torch.zeros_like(x))
    change = (seen.sites["embed"][1] - dark.sites["embed"][1]).abs().amax(-1)
    for i, (row, col) in enumerate(places):
        assert float(change[i, row, col]) > 1e-3
        change[i, row, col] = 0
    assert float(change.max()) == 0


@pytest.mark.slow
def test_attention_within_windows_and_over_all() -> None:
    """Qwen2.5-VL: the library's eager weights, row by row, 0 outside of a query's window."""
    case = TOWERS[1]
    model = adapted(*case[:2])
    x = torch.randn((2, *model.input_size), generator=torch.Generator().manual_seed(3))
    _, seen = sites_of(model, x)
    tower: Any = library_tower(*case[:2])
    tower.config._attn_implementation = "eager"
    found: dict[int, list[Tensor]] = {}
    for i in range(4):
        found[i] = []
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as own

    plain = own.eager_attention_forward

    def kept(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output, weights = plain(module, *args, **kwargs)
        index = next(i for i, block in enumerate(tower.blocks) if block.attn is module)
        found[index].append(weights)
        return output, weights

    _, _, cells = run_library(case, x)
    with pytest.MonkeyPatch.context() as patched, torch.inference_mode():
        patched.setattr(own, "eager_attention_forward", kept)
        tower(patches_by_loop(x, 14, 2, 2), grid_thw=torch.tensor([[1, 8, 12]] * 2))
    rows = torch.tensor(cells * 2)
    for i in range(4):
        expected, start = torch.zeros(2, 4, 96, 96), 0
        for weights in found[i]:  # one image, or one window after another
            end = start + weights.shape[-1]
            place = rows[start:end]
            expected[start // 96][:, place[:, None], place] = weights[0]
            start = end
        assert (start, len(found[i])) == (192, 2 if i in (1, 3) else 12)
        got = seen.scores[f"blocks.{i}"].softmax(-1)
        assert float((got - expected).abs().max()) < 1e-5, i
    assert len(seen.scores) == 4


def in_window(grid: tuple[int, int], side: int) -> list[list[int]]:
    """The cells that each cell sees, by a loop over pairs."""
    cells = [(i, j) for i in range(grid[0]) for j in range(grid[1])]
    return [
        [
            k
            for k, (a, b) in enumerate(cells)
            if (a // side, b // side) == (i // side, j // side)
        ]
        for i, j in cells
    ]


@pytest.mark.slow
def test_tables_of_attention_within_windows(checkpoint: Path, tmp_path: Path) -> None:
    """10 x 10 patches in windows of 4 x 4, the last cut: distances by loops over the stored
    attention, relative to uniform attention within the window; the rows name it."""
    data, path = plant_images(tmp_path / "data", 4, (70, 90)), tmp_path / "a.zarr"
    name = f"transformers:{checkpoint}#visual"
    words = [name, "--data", data, "--img-size", 140, "--attention", "full", "-o", path]
    result = extracted(*words, "--slab", 2)
    assert "attention is within windows in some blocks" in result.output
    store = open_store(path)
    assert store.manifest.features == ("window", "pixel_hash")
    groups = store.attention_blocks
    assert [(g.prefix, g.window) for g in groups] == [("", (4, 4)), ("grid_10x10", None)]
    place = [(14.0 * i, 14.0 * j) for i in range(10) for j in range(10)]
    apart = np.array([[np.hypot(p[0] - q[0], p[1] - q[1]) for q in place] for p in place])
    sees = in_window((10, 10), 4)
    uniform = {
        "blocks.0": np.mean([apart[q, keys].mean() for q, keys in enumerate(sees)]),
        "blocks.1": apart.mean(),
    }
    table = vitsee.attn_dist(path)
    assert "uniform within the window" in table.notes["window"]
    for block, window in (("blocks.0", "4 x 4"), ("blocks.1", None)):
        a = np.asarray(store.attention(f"full/{block}")[:], np.float64)
        outside = np.ones((100, 100), bool)
        for q, keys in enumerate(sees):
            outside[q, keys] = False
        assert (a[:, :, outside].max() == 0) == (window is not None)
        rows = table.frame.filter(site=block)
        assert rows["window"].unique().to_list() == [window]
        for head in range(4):
            mine = (a[:, head] * apart).sum(-1).mean()
            own = dict(rows.filter(head=head).select("metric", "value").iter_rows())
            assert own["distance_px"] == pytest.approx(mine, rel=1e-3)  # float16
            assert own["distance_relative"] * uniform[block] == pytest.approx(
                own["distance_px"]
            )
    kinds = vitsee.head_types(path).frame.filter(metric="keys_share", site="blocks.0")
    entropy = store.attention("entropy", "")[:, 0].mean(0)
    seen = np.mean([len(keys) for keys in sees])
    assert kinds["value"].to_list() == pytest.approx(
        [*(np.exp(entropy) / seen)], rel=1e-6
    )
    maps = vitsee.attn_map(path, kind="aligned", coverage=True, sites="blocks.0").frame
    far = (pl.col("row").abs() > 3) | (pl.col("col").abs() > 3)
    assert maps.filter(far)["value"].null_count() == len(maps.filter(far)) > 0
    near = maps.filter(~far)["value"].to_numpy()
    assert near.min() > 0.5 / 16 and near.max() < 1 / 4  # random weights: nearly even
    assert maps["window"].unique().to_list() == ["4 x 4"]
    again = vitsee.attn_map(path, kind="aligned", sites="blocks.0")
    assert attn_map.plot(again) is not None


def test_windows_are_tiles() -> None:
    """By hand: 2 x 3 windows over 4 x 5 cells, the last column cut."""
    labels = torch.tensor(
        [[0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [2, 2, 2, 3, 3], [2, 2, 2, 3, 3]]
    )
    assert window_of(labels) == (2, 3)
    assert window_of(labels.clone().fill_(0)) is None  # one window
    labels[3, 4] = 0
    assert window_of(labels) is None


def test_tokens_come_into_the_order_of_the_grid_by_hand() -> None:
    """Cell i holds token index[i]: a cycle of three, whose inverse is another order."""
    order = Order((2, 2), torch.tensor([1, 2, 0, 3]), 0)
    tokens = torch.tensor(
        [[10.0], [11.0], [12.0], [13.0], [20.0], [21.0], [22.0], [23.0]]
    )
    cells = order.to_grid_order(tokens)
    assert cells[..., 0].tolist() == [[11, 12, 10, 13], [21, 22, 20, 23]]
    assert not order.plain


def test_calls_that_are_no_images_are_not_joined() -> None:
    order = Order((1, 4), torch.arange(4), 0)

    def event(n: int, mask: Tensor | None = None) -> AttentionEvent:
        q = torch.randn(1, 2, n, 3)
        call = KernelCall({"query": q, "key": q, "value": q, "attn_mask": mask}, q)
        return AttentionEvent((1, 2, n), n, call=call)

    whole = JoinedCalls(order, 2)
    assert whole.add(event(4)) is None
    joined = whole.add(event(4))
    assert joined is not None and joined.query == (2, 2, 4) and joined.within is None
    across = JoinedCalls(order, 2)  # one call over the tokens of two images
    one = across.add(event(8))
    assert one is not None and one.query == (1, 2, 8)
    masked = event(4, torch.zeros(4, 4))
    assert JoinedCalls(order, 2).add(masked) is masked
    halves = JoinedCalls(order, 2)  # each image in two windows
    events = [event(2) for _ in range(4)]
    assert [halves.add(one) for one in events[:3]] == [None] * 3
    within = halves.add(events[3])
    assert within is not None and within.call is not None and within.window == (1, 2)
    weights = within.call.scores(slice(None)).softmax(-1)
    assert weights.shape == (2, 2, 4, 4) and float(weights[:, :, :2, 2:].abs().max()) == 0
    first, own = events[2].call, weights[1, :, :2, :2]  # the second image's first window
    assert first is not None and torch.allclose(
        own, first.scores(slice(None)).softmax(-1)[0]
    )
    uneven = JoinedCalls(order, 2)  # the second image has other windows
    events = [event(n) for n in (2, 2, 1, 3)]
    assert [uneven.add(one) for one in events] == [None] * 3 + [events[0]]


@pytest.mark.parametrize("form", ["cthw", "image", "sequence"])
def test_patches_by_loop(form: str) -> None:
    frames = 2 if form == "cthw" else 1
    packing = Packing(2, frames=frames, merge=2, unit=2, form=form)
    x = torch.randn(2, 3, 8, 12)
    wanted = patches_by_loop(x, 2, frames, 2)
    assert torch.equal(packing.pack(x).reshape(wanted.shape), wanted)
    shape = {"cthw": (48, 24), "image": (48, 3, 2, 2), "sequence": (1, 48, 3, 2, 2)}
    assert packing.pack(x).shape == shape[form]
    assert packing.arguments(2, (4, 6), x.device)["grid_thw"].tolist() == [[1, 4, 6]] * 2
    for size in ((8, 10), (2, 8)):
        with pytest.raises(ValueError, match="a multiple of 4"):
            packing.grid(size)


def test_the_order_of_tokens_by_codes() -> None:
    """A permutation of single tokens and of 2 x 2 groups is found; tokens that mix are no cells."""
    codes = Codes((4, 6))
    images = codes.images(Packing(1))
    n = len(images)
    assert n == 2 + 2 * (2 + 3)
    cells = images.permute(0, 2, 3, 1).reshape(n, 24, 3)
    perm = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    order = order_of(cells[:, perm].reshape(n * 24, 3), codes)
    assert order is not None and (order.grid, order.axis) == ((4, 6), 0)
    assert torch.equal(order.to_grid_order(cells[:, perm].reshape(n * 24, 3)), cells)
    grouped = torch.tensor(cells_by_loop((4, 6), 2)).reshape(6, 4)[[3, 0, 5, 1, 2, 4]]
    merged = cells[:, grouped].sum(2).reshape(1, n * 6, 3)
    order = order_of(merged, codes)
    assert order is not None and (order.grid, order.axis) == ((2, 3), 1)
    assert order.index.tolist() == [1, 3, 4, 0, 5, 2]
    mixed = cells + cells.roll(1, 1)
    assert order_of(mixed.reshape(n * 24, 3), codes) is None
    assert order_of(cells.mean(1), codes) is None


class _Mixing(nn.Module):
    """Tokens of a grid of 4 x 6 through a convolution of 3 x 3 with weights alike, in no residual:
    nothing but the middle of its kernel tells a cell from its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 3, 3, padding=1, groups=3), nn.Linear(3, 3)
        with torch.no_grad():
            self.conv.weight.fill_(1.0)
        self.config = type("Config", (), {"patch_size": 1})()

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv(images)
        return self.out(x.permute(0, 2, 3, 1).flatten(0, 2))  # type: ignore[no-any-return]


def test_a_convolution_over_the_grid_keeps_the_order() -> None:
    order = output_order(_Mixing(), 1, (3, 4, 6))[ModuleSide("", is_input=False)]
    assert order.grid == (4, 6) and order.plain


class _Attention(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None]
        )


class _Tower(nn.Module):
    """One attention over packed patches that gets positions as `by` says."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.embed, self.attention, self.by = nn.Linear(12, 8), _Attention(), by
        self.config = type("Config", (), {"patch_size": 2})()

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Tensor:
        x = self.embed(hidden_states)
        _, rows, cols = grid_thw[0].tolist()
        image, cell = (
            torch.arange(len(x)) // (rows * cols),
            torch.arange(len(x)) % (rows * cols),
        )
        positions = {
            "row": [cell // cols, cell % cols],
            "column": [cell % rows, cell // rows],
            "cell": [cell, cell],
            "image": [image + cell // cols, cell % cols],
            "nothing": [0 * cell, 0 * cell],
        }[self.by]
        return self.attention(x, torch.stack(positions, 1))  # type: ignore[no-any-return]


def test_positions_say_the_order_of_patches() -> None:
    assert accept_images(_Tower("row"), "rows").merge == 1
    for by in ("column", "cell", "image", "nothing"):
        with pytest.raises(
            ModelError, match="no order of its patches gives its blocks positions"
        ):
            accept_images(_Tower(by), by)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL, whole, in many files, with its image processor."""
    folder = tmp_path_factory.mktemp("vlm") / "tiny-vlm"
    config = transformers.Qwen2_5_VLConfig()
    for key, value in SMALL.items():
        if hasattr(config.vision_config, key):
            setattr(config.vision_config, key, value)
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 152_000}
    for key, value in text.items():
        setattr(config.text_config, key, value)
    config.text_config.layer_types = ["full_attention"] * 2
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder, max_shard_size="1MB")
    transformers.Qwen2VLImageProcessor().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_only_the_towers_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tower of a sharded checkpoint equals the whole model's, and no other tensor is read."""
    whole = transformers.AutoModel.from_pretrained(checkpoint)
    assert len(list(checkpoint.glob("*.safetensors"))) > 3
    import safetensors

    opened, read = [], list[str]()
    plain: Any = safetensors.safe_open

    class Counted:
        def __init__(self, path: str, framework: str) -> None:
            opened.append(Path(path).name)
            self.inner = plain(path, framework)

        def __enter__(self) -> Any:
            self.tensors: Any = self.inner.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.inner.__exit__(*error)

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self.tensors.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Counted)
    model = load_model(f"transformers:{checkpoint}#visual", img_size=112)
    own = whole.visual.state_dict()
    assert own.keys() == model.module.state_dict().keys() and len(read) == len(own)
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, own[name]), name
    assert all("visual" in name for name in read) and "weights" not in model.notes()
    language = json.loads((checkpoint / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    without = {*language.values()} - {f for k, f in language.items() if "visual" in k}
    assert without and not without & {*opened}
    assert model.input_size == (3, 112, 112) and model.transform["mean"][0] == 0.48145466


# The largest resident size so far, in KB; a child's own, unlike ru_maxrss.
PEAK = """
import sys
from vitsee_core.models.load import load_model
def peak():
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("VmHWM"))
name = f"transformers:{sys.argv[1]}#visual"
load_model(name, random_init=0, img_size=112)
without = peak()
load_model(name, img_size=112)
print(without, peak())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads Linux' own figures"
)
def test_no_language_model_in_memory(checkpoint: Path) -> None:
    """The language model's 152,000 words of 64 numbers are 39 MB: the peak of a tower with its
    weights is that of one with random weights and little more."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(checkpoint)],
        capture_output=True,
        text=True,
        check=True,
    )
    without, peak = map(int, done.stdout.split())
    assert peak - without < 15e3, (without, peak)


@pytest.mark.slow
def test_a_tower_by_the_command(checkpoint: Path, tmp_path: Path) -> None:
    """Extracted as any model; resumed, sharded and grown stores are equal to one made at once."""
    data = plant_images(tmp_path / "data", 10, (70, 90))
    words = [
        f"transformers:{checkpoint}#visual",
        "--data",
        data,
        "--slab",
        4,
        "--img-size",
        112,
    ]
    words += ["--batch-size", 3]
    sites = ["--sites", "blocks,merger"]
    at_once = tmp_path / "a.zarr"
    result = extracted(*words, *sites, "-o", at_once)
    assert "gets all images at one size" in result.output
    store = open_store(at_once)
    grids = {
        site.name: site.layout and site.layout.grid for site in store.manifest.plan.sites
    }
    assert (grids["blocks.3.out"], grids["merger"]) == ((8, 8), (4, 4))
    sharded = tmp_path / "b.zarr"
    for shard in ("1/2", "0/2"):
        extracted(*words, *sites, "-o", sharded, "--shard", shard)
    assert array_bytes(sharded) == array_bytes(at_once)
    grown = tmp_path / "c.zarr"
    extracted(*words, "--sites", "blocks", "--images", 6, "-o", grown)
    extracted(*words, "--sites", "merger", "--images", 6, "-o", grown)
    extracted(*words, "--images", 10, "-o", grown)
    for name in ("blocks.3.out", "merger"):
        one, other = (open_store(path).acts(name) for path in (at_once, grown))
        assert np.array_equal(one, other), name
    again = [*words, *sites, "-o", at_once]
    assert "complete" in extracted(*again).output


@pytest.mark.slow
def test_images_in_their_own_proportions(checkpoint: Path, tmp_path: Path) -> None:
    """--short-side: the grid of the whole canvas, as that size by --img-size; --tiles: each cell as
    its tile gives it. Sides are multiples of patch x merge."""
    data = plant_images(tmp_path / "data", 3, (112, 168))
    words = [
        f"transformers:{checkpoint}#visual",
        "--data",
        data,
        "--sites",
        "blocks,merger",
    ]
    extracted(*words, "--short-side", 112, "-o", tmp_path / "a.zarr")
    size = ["--img-size", "112x168", "--crop-mode", "squash"]
    extracted(*words, *size, "-o", tmp_path / "b.zarr")
    whole, same = (open_store(tmp_path / name) for name in ("a.zarr", "b.zarr"))
    for site in ("blocks.3.out", "merger"):
        assert np.array_equal(whole.acts(site), same.acts(site)), site
    tiled = ["--short-side", 112, "--tiles", "--img-size", 112]
    extracted(*words, *tiled, "-o", tmp_path / "c.zarr")
    store = open_store(tmp_path / "c.zarr")
    layouts = {site.name: site.layout for site in store.manifest.plan.sites}
    assert layouts["merger"] is not None and layouts["merger"].grid == (4, 6)
    photos = [
        np.asarray(Image.open(data / name).convert("RGB")) for name in store.samples.id
    ]
    model = load_model(f"transformers:{checkpoint}#visual", img_size=112)
    mean, std = (np.array(model.transform[key]) for key in ("mean", "std"))
    pixels = (
        torch.from_numpy((np.stack(photos) / 255 - mean) / std)
        .permute(0, 3, 1, 2)
        .float()
    )
    table = site_table(model)
    left, right = (
        captured(model, table, pixels[..., at : at + 112]).sites["merger"][1]
        for at in (0, 56)
    )
    expected = torch.cat([left, right[:, :, 2:]], 2).flatten(1, 2)
    got = torch.from_numpy(np.asarray(store.acts("merger"))).float()
    assert torch.allclose(got, expected, rtol=2e-3, atol=2e-3)
    wrong = extract(*words, "--short-side", 100, "-o", tmp_path / "d.zarr")
    assert wrong.exit_code == 1 and "no multiple of the 28 pixels" in wrong.output


def test_what_is_refused_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    place = f"transformers:{checkpoint}"
    assert "no tower 'vision'; Qwen2_5_VLModel has #visual" in refusal(f"{place}#vision")
    whole = refusal(place)
    assert (
        "is a model of images and text" in whole and f"expected {place}#visual" in whole
    )
    assert "100 x 100 pixels: 2 x 2 patches of 14 pixels are merged" in refusal(
        f"{place}#visual", img_size=100
    )
    assert "beyond its limits" in refusal(f"{place}#visual", img_size=28)
    assert "14 x 14 pixels: 2 x 2 patches of 14" in refusal(
        f"{place}#visual", img_size=14
    )
    long = refusal(f"{place}#visual", img_size=(28, 28 * 210))
    assert "refuses an image of 28 x 5880 pixels" in long and "aspect ratio" in long
    small = tmp_path / "small"
    shutil.copytree(checkpoint, small)
    limits = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    transformers.Qwen2VLImageProcessor(size=limits).save_pretrained(small)
    wide = refusal(f"transformers:{small}#visual", img_size=(112, 224))
    assert "makes 4 x 10 patches" in wide and "the size is beyond its limits" in wide
    replaced = refusal(f"{place}#visual", img_size=112, ablate_heads=["blocks.1:0"])
    assert "where interventions do not reach" in replaced
    text = tmp_path / "text"
    transformers.BertConfig(
        num_hidden_layers=1, hidden_size=24, num_attention_heads=2
    ).save_pretrained(text)
    assert "BertModel has none that takes images" in refusal(
        f"transformers:{text}#visual"
    )
    remote = tmp_path / "remote"
    remote.mkdir()
    config = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.M"},
    }
    (remote / "config.json").write_text(json.dumps(config))
    (remote / "own.py").write_text("raise SystemExit(3)")
    assert "--trust-remote-code" in refusal(f"transformers:{remote}#visual")
    result = extract(f"{place}#vizual", "--data", tmp_path, "-o", tmp_path / "x.zarr")
    assert result.exit_code == 1 and not (tmp_path / "x.zarr").exists()


@pytest.mark.slow
def test_a_tower_made_anew_by_its_path(checkpoint: Path) -> None:
    """Random weights: the tower alone, with arguments of its own configuration."""
    name = f"transformers:{checkpoint}#visual"
    args = {"depth": 2, "fullatt_block_indexes": [1]}
    model = load_model(name, random_init=3, model_args=args, img_size=112)
    assert model.architecture == "transformers:Qwen2_5_VisionTransformerPretrainedModel"
    assert len(model.module.blocks) == 2  # type: ignore[arg-type]
