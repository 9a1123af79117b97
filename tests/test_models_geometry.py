"""Where cells lie in the image: strides and offsets against a slow oracle and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.extractions import extracted, plant_images
from tests.models_helpers import SMALL, VIT, captured, images, small
from vitsee_core.extraction.prepare import unseen_pixels
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.selfcheck import self_check
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.survey.patches import Patches, cells
from vitsee_core.models.survey.strides import Step, Steps
from vitsee_core.similarity.stacks import PatchPixels
from vitsee_stores import open_store
from vitsee_stores.layout import TokenLayout

TINY_PIT = {"base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (2, 2, 2)}


def answering(model: LoadedModel, patches: Patches, axis: int) -> np.ndarray[Any, Any]:
    """The oracle: (cells, pixels) along an axis, which cells change when one row or column of
    pixels does."""
    base, other = images(model, 2)
    before = cells(model.module, patches.hook_point, patches.view, base[None])
    rows = []
    for pixel in range(model.input_size[1 + axis]):
        changed = base.clone()
        part = (slice(None), pixel) if axis == 0 else (slice(None), slice(None), pixel)
        changed[part] = other[part]
        after = cells(model.module, patches.hook_point, patches.view, changed[None])
        rows.append((after - before)[0].abs().amax((1 - axis, 2)) > 1e-6)
    return torch.stack(rows, 1).numpy()


def grids(table: SiteTable) -> dict[tuple[int, int], TokenLayout]:
    """The layouts of the block outputs, by grid."""
    layouts = [site.layout for site in table.sites if "blocks" in site.groups]
    return {x.grid: x for x in layouts if x is not None and x.grid is not None}


# Grids, strides and offsets, of both axes where one number is given.
MEASURED: dict[str, tuple[str, Any, dict[str, Any], list[tuple[Any, float, float]]]] = {
    "vit, 100 px": ("vit_tiny_patch16_224", 100, SMALL, [(6, 16, 0)]),
    "vit, 50 x 71 px": ("vit_tiny_patch16_224", (50, 71), VIT, [((6, 8), 8, 0)]),
    "dinov2, 320 px": (
        "vit_small_patch14_dinov2",
        320,
        {**SMALL, "depth": 1},
        [(22, 14, 0)],
    ),
    # Patches of 16 px every 8 px: a cell lies in the middle of its patch.
    "pit": ("pit_ti_224", None, TINY_PIT, [(27, 8, 4), (14, 16, 0), (7, 32, 0)]),
    "crossvit": (
        *("crossvit_tiny_240", None, {"depth": ((1, 1, 0),)}),
        [(20, 12, 0), (14, 240 / 14, 0)],
    ),
    "swin, 100 px": (
        *("swin_tiny_patch4_window7_224", 100, {"embed_dim": 24, "depths": (1, 1, 1, 1)}),
        [(25, 4, 0), (13, 8, 0), (4, 32, 0)],
    ),
    "mixer": ("mixer_s32_224", None, {}, [(7, 32, 0)]),
    "resnet, 100 px": ("test_resnet", 100, {}, [(25, 4, 0), (13, 8, 0), (4, 32, 0)]),
    # 299 -> 149 -> 147 -> 73 -> 71 -> 35: three strides of 2, the rest is lost at the borders.
    "inception": ("inception_v3", 299, {}, [(35, 8, 0)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MEASURED)
def test_strides_and_offsets_by_hand(case: str) -> None:
    name, size, args, wanted = MEASURED[case]
    found = grids(site_table(small(name, size, **args)))
    for grid, stride, offset in wanted:
        layout = found[grid if isinstance(grid, tuple) else (grid, grid)]
        assert layout.stride_px == pytest.approx((stride, stride), rel=1e-12)
        assert layout.offset_px == (offset, offset)


@pytest.mark.slow
def test_grids_that_are_padded_on_the_way() -> None:
    """DaViT pads maps of odd sizes before it halves them: 26, 13 (14), 7 (8), 4 cells."""
    model = small(
        "davit_tiny",
        101,
        embed_dims=(8, 8, 8, 8),
        num_heads=(2, 2, 2, 2),
        depths=(1,) * 4,
    )
    found = grids(site_table(model))
    strides = {26: 4.0, 13: 8.0, 7: 16.0, 4: 32.0}
    assert {grid: layout.stride_px for grid, layout in found.items()} == {
        (n, n): (stride, stride) for n, stride in strides.items()
    }


def test_steps_from_sizes_alone() -> None:
    steps = Steps((100, 150))
    assert steps.of((100, 150)).stride_px == (1.0, 1.0)
    assert steps.of((104, 152)).stride_px == (1.0, 1.0)  # padded
    assert steps.of((26, 38)).stride_px == (4.0, 4.0)  # 104 / 4
    assert steps.of((13, 19)).stride_px == (8.0, 8.0)
    assert steps.of((14, 20)).stride_px == (8.0, 8.0)
    assert steps.of((7, 10)).stride_px == (16.0, 16.0)
    one_axis = Steps((64, 64))
    assert one_axis.of((8, 8)).stride_px == (8.0, 8.0)
    assert one_axis.of((9, 8)).stride_px == (8.0, 8.0)  # with a border below alone
    resized = Steps((240, 240))
    assert resized.of((224, 224)) == Step((240 / 224, 240 / 224), 0)
    assert resized.of((14, 14)).stride_px == pytest.approx((240 / 14, 240 / 14))


class Embedding(nn.Module):
    """Any convolution as a patch embedding, then one block."""

    def __init__(self, kernel: int, stride: int, padding: Any, before: nn.Module) -> None:
        super().__init__()
        self.before = before
        self.proj = nn.Conv2d(3, 8, kernel, stride)
        self.padding = padding
        self.blocks = nn.Sequential(Wide(), Wide())

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(self.before(x), self.padding)
        return self.blocks(self.proj(x).flatten(2).transpose(1, 2))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(x).relu())


def embedding(
    size: tuple[int, int],
    kernel: int,
    stride: int,
    padding: Any = (0, 0, 0, 0),
    before: Any = None,
) -> LoadedModel:
    torch.manual_seed(0)
    module = Embedding(kernel, stride, padding, before or nn.Identity()).eval()
    return LoadedModel("toy", module, (3, *size), {}, {}, "toy")


# left, right, top, bottom; the wanted offset (y, x), None where padding cuts overlapping windows.
PADDED = {
    "whole patches": ((37, 35), 5, 5, (0, 0, 0, 0), (0, 0)),
    "overlapping": ((36, 40), 8, 4, (0, 0, 0, 0), (2, 2)),
    "gaps": ((36, 40), 4, 6, (0, 0, 0, 0), (-1, -1)),
    "a border above": ((33, 35), 5, 5, (0, 0, 2, 0), (-2, 0)),
    "a border left and below": ((33, 34), 5, 5, (1, 0, 0, 2), (0, -1)),
    "a crop": ((40, 40), 4, 4, (-3, -1, -2, -2), (2, 3)),
    "one row": ((6, 24), 5, 5, (0, 0, 0, 0), (0, 0)),
    "overlapping and padded": ((32, 32), 7, 4, (3, 3, 3, 3), None),
}


@pytest.mark.parametrize("case", PADDED)
def test_every_cell_against_the_oracle(case: str) -> None:
    """The windows that eight cells tell are those of all cells, to the pixel."""
    size, kernel, stride, padding, offset = PADDED[case]
    model = embedding(size, kernel, stride, padding)
    table = site_table(model)
    layout = table["blocks.0.out"].layout
    assert layout is not None and layout.stride_px == (stride, stride)
    if offset is None:
        assert table.patches == () and layout.offset_px == (0.0, 0.0)
        return
    (patches,) = table.patches
    assert layout.offset_px == patches.offset_px == offset
    for axis in (0, 1):
        seen = answering(model, patches, axis)
        wanted = np.zeros_like(seen)
        for cell, row in enumerate(wanted):
            centre = offset[axis] + (cell + 0.5) * stride
            first = round(centre - kernel / 2)
            row[max(first, 0) : first + kernel] = True
        assert np.array_equal(seen, wanted)
        touched = np.flatnonzero(seen.any(0))
        assert patches.covered[axis] == (touched[0], touched[-1] + 1)


def test_an_image_that_is_resized_first() -> None:
    """As one branch of CrossViT: 40 px to 32 px, then patches of 8 px: every 10 px."""
    model = embedding((40, 60), 8, 8, before=nn.Upsample(size=(32, 48), mode="bicubic"))
    table = site_table(model)
    layout = table["blocks.0.out"].layout
    assert layout == TokenLayout((), (4, 6), stride_px=(10.0, 10.0), offset_px=(0.0, 0.0))
    odd = site_table(
        embedding((45, 45), 8, 8, before=nn.Upsample(size=(32, 32), mode="bicubic"))
    )
    (patches,) = odd.patches
    assert patches.stride_px == (11.25, 11.25) and patches.offset_px == (0.0, 0.0)


def moved(table: SiteTable, **changes: Any) -> SiteTable:
    first, *others = table.patches
    return replace(table, patches=(replace(first, **changes), *others))


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", pytest.param("crossvit_tiny_240", marks=pytest.mark.slow)],
)
def test_the_self_check_proves_patches(name: str) -> None:
    """At a size that the patch does not divide; a pixel off is found, on either side."""
    args = VIT if name.startswith("vit") else {"depth": ((1, 1, 0),)}
    model = small(name, 52 if name.startswith("vit") else None, **args)
    table = site_table(model)
    x = images(model, 2)
    x[0] = 0.5  # constant images prove it too

    def failures(table: SiteTable) -> list[str]:
        return self_check(model, table, x, sites=[table["embed"]]).failures

    assert failures(table) == []
    figures = self_check(model, table, x, sites=[table["embed"]]).figures["patches"]
    assert [tuple(figure["grid"]) for figure in figures] == [
        p.grid for p in table.patches
    ]
    first, length = table.patches[0].window[0]
    stride = table.patches[0].stride_px[0]
    for changes, phrase in (
        ({"stride_px": (stride + 1, stride)}, "cell"),
        ({"stride_px": (stride, stride - 1)}, "cell"),
        (
            {"window": ((first + 4, length), (first, length))},
            "answers to pixels outside its patch",
        ),
        (
            {"window": ((first, length), (first, length + 4))},
            "not answer to the border of its",
        ),
    ):
        assert phrase in failures(moved(table, **changes))[0]


def test_the_proof_of_patches_runs_in_full_precision() -> None:
    model = small("vit_tiny_patch16_224", 52, **VIT)
    table = site_table(model)
    with torch.autocast("cpu", torch.bfloat16):
        check = self_check(model, table, images(model, 2), sites=[table["embed"]])
    assert check.failures == []


@pytest.mark.parametrize("site", ["stem", "layer1.0.out", "layer2.0.out"])
def test_strides_of_a_cnn_against_moved_images(site: str) -> None:
    """An image moved by the stride gives the same features one cell further on, away from the
    borders; moved by half of it, others."""
    model = small("test_resnet", 160)
    table = site_table(model)
    point, layout = table.points[site], table[site].layout
    assert layout is not None and layout.stride_px is not None and layout.grid is not None
    step, middle = int(layout.stride_px[0]), layout.grid[0] // 2
    big = torch.randn(3, 160 + step, 160, generator=torch.Generator().manual_seed(5))
    assert point.view.form == "nchw"
    stored = table[table[site].alias_of or site]
    batches = (big[None, :, start : start + 160] for start in (0, step, step // 2))
    here, moved_by_one, moved_by_half = (
        captured(model, table, batch, sites=[stored]).sites[stored.name][1][0]
        for batch in batches
    )
    torch.testing.assert_close(
        moved_by_one[middle], here[middle + 1], rtol=1e-4, atol=1e-4
    )
    assert not torch.allclose(
        moved_by_half[middle], here[middle + 1], rtol=1e-2, atol=1e-2
    )


@pytest.mark.slow
def test_a_store_says_where_its_cells_lie(tmp_path: Path) -> None:
    """From extraction to the pixels of patches: PiT's cells begin 4 px inside; 5 px are unseen."""
    data = plant_images(tmp_path / "data", 3)
    out = tmp_path / "pit.zarr"
    args = [f"--model-arg={key}={value}" for key, value in TINY_PIT.items()]
    options = [
        "--random-init",
        "0",
        "--img-size",
        "101",
        "--inputs",
        "--data",
        data,
        "-o",
        out,
    ]
    result = extracted("pit_ti_224", *args, *options)
    assert "patches cover 96x96 of 101x101 input pixels" in result.stderr
    store = open_store(out)
    layout = store.layout("transformers.0.blocks.0.out")
    assert layout == TokenLayout(("cls",), (11, 11), 0, (8.0, 8.0), (4.0, 4.0))
    assert store.plan.attention[0].layout == layout
    patches = PatchPixels(store, store.inputs(), layout)
    assert patches.bounds[0].tolist() == list(range(4, 93, 8))
    assert patches.shape == (3, 8, 8)
    (figures,) = store.manifest.selfcheck["patches"]
    assert figures["offset_px"] == [4.0, 4.0] and figures["window_px"] == [16, 16]


@pytest.mark.slow
def test_pixels_that_no_patch_covers_are_named() -> None:
    model = small("vit_tiny_patch16_224", (50, 64), **VIT)
    assert (
        "patches cover 48x64 of 50x64 input pixels"
        in unseen_pixels(model, site_table(model))[0]
    )
    for name, size, args in (("pit_ti_224", None, TINY_PIT), ("test_resnet", 50, {})):
        whole = small(name, size, **args)
        assert unseen_pixels(whole, site_table(whole)) == []


@pytest.mark.slow
def test_pit_keeps_two_tokens_in_one_tensor() -> None:
    """cls_token is (1, 2, dim) in the distilled PiT: class and distillation token in all stages."""
    model = small("pit_ti_distilled_224", None, **TINY_PIT)
    table = site_table(model)
    layouts = [table[f"transformers.{stage}.blocks.0.out"].layout for stage in range(3)]
    assert [layout.prefix for layout in layouts if layout] == [("cls", "dist")] * 3
    assert [layout.grid for layout in layouts if layout] == [(27, 27), (14, 14), (7, 7)]
    assert [block.layout for block in table.attention] == layouts
    # The final norm sees the two tokens alone: they are no grid.
    assert (table["norm"].kind, table["norm"].shape) == ("rows", (2, 16))
    plain = site_table(small("pit_ti_224", None, **TINY_PIT))
    assert (plain["norm"].kind, plain["norm"].shape) == ("rows", (1, 16))
