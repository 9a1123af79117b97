"""The site table: names, order, groups, aliases, depths, geometry, and what is left out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models_helpers import SMALL, VIT, small
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.survey.geometry import ModelGeometry
from vitsee_core.models.survey.strides import whole_stride
from vitsee_stores.layout import SiteSpec, TokenLayout, select_names


@pytest.fixture(scope="module")
def vit() -> SiteTable:
    return site_table(small("vit_tiny_patch16_224", (32, 48), **VIT))


@pytest.fixture(scope="module")
def resnet() -> SiteTable:
    return site_table(small("resnet26", 64))


def names(table: SiteTable, *patterns: str) -> list[str]:
    return [site.name for site in select_names(patterns, table.sites)]


def wrapped(module: nn.Module, size: tuple[int, int, int]) -> LoadedModel:
    return LoadedModel("toy", module.eval().requires_grad_(False), size, {}, {}, "toy")


def test_transformer_parts_in_order(vit: SiteTable) -> None:
    parts = [
        s.part for s in vit.sites if s.block == "blocks.1" and "modules" not in s.groups
    ]
    assert parts == ["in", "attn.heads", "mid", "out"]
    every = [s.part for s in vit.sites if s.block == "blocks.1"]
    wanted = ["in", "norm1", "attn.heads", "attn.branch", "mid", "norm2"]
    wanted += ["mlp.hidden", "mlp.branch", "out"]
    assert [part for part in every if part in wanted] == wanted
    assert every.index("attn.qkv") < every.index("attn.heads") < every.index("attn.proj")


def test_groups_list_stored_names(vit: SiteTable) -> None:
    assert names(vit, "blocks") == ["embed", *(f"blocks.{i}.out" for i in range(3))]
    assert names(vit, "head") == ["norm", "pooled", "logits"]
    assert names(vit, "norms") == [
        *(f"blocks.{i}.norm{j}" for i in range(3) for j in (1, 2)),
        "norm",
    ]
    assert names(vit, "heads") == [f"blocks.{i}.attn.heads" for i in range(3)]
    assert names(vit, "hidden") == [f"blocks.{i}.mlp.hidden" for i in range(3)]
    residual = [
        f"blocks.{i}.{part}"
        for i in range(3)
        for part in ("attn.branch", "mid", "mlp.branch", "out")
    ]
    assert names(vit, "residual") == ["embed", *residual]
    assert "blocks.1.mlp.hidden" in names(vit, "modules")
    assert names(vit, "blocks.-1.out") == ["blocks.2.out"]
    assert names(vit, "all") == [s.name for s in vit.sites if s.alias_of is None]


def test_aliases_are_the_stored_tensors(vit: SiteTable, resnet: SiteTable) -> None:
    assert vit["blocks.0.in"].alias_of == "embed"
    assert vit["blocks.2.in"].alias_of == "blocks.1.out"
    assert vit["blocks.1.mlp.act"].alias_of == "blocks.1.mlp.hidden"
    assert vit["blocks.1.attn.proj"].alias_of == "blocks.1.attn.branch"
    assert vit["blocks.1.mid"].alias_of is None
    assert resnet["layer1.1.shortcut"].alias_of == "layer1.0.out"
    assert resnet["layer1.0.shortcut"].alias_of is None
    assert resnet["layer1.0.act3"].alias_of == "layer1.0.out"
    assert resnet["layer1.0.bn3"].alias_of == "layer1.0.branch"
    assert resnet["layer1.0.bn1"].alias_of is None
    stored = {site.name for site in vit.sites if site.alias_of is None}
    assert all(site.alias_of in stored for site in vit.sites if site.alias_of)
    scaled = site_table(small("deit3_small_patch16_224", 32, **VIT))
    assert scaled["blocks.1.attn.proj"].alias_of is None


def test_depths_count_one_kind(vit: SiteTable) -> None:
    def depth(name: str) -> tuple[int, float]:
        return vit[name].depth, round(vit[name].rel_depth, 3)

    assert depth("embed") == (0, 0.0)
    assert [depth(f"blocks.{i}.out") for i in range(3)] == [
        (1, 0.333),
        (2, 0.667),
        (3, 1.0),
    ]
    assert [depth(f"blocks.{i}.norm2") for i in range(3)] == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
    ]
    for name in ("norm", "pooled", "logits"):
        assert depth(name) == (3, 1.0)


def test_shapes_and_layouts(vit: SiteTable) -> None:
    out = vit["blocks.1.out"]
    assert (out.kind, out.shape, out.dim) == ("tokens", (25, 48), 48)
    assert out.layout == TokenLayout(("cls",), (4, 6), stride_px=(8.0, 8.0))
    assert vit["logits"].kind == "vector" and vit["logits"].shape == (1000,)
    assert [block.layout for block in vit.attention] == [out.layout] * 3
    assert [(s.name, s.index, s.kind) for s in vit.sublayers[:3]] == [
        ("blocks.0.attn", 0, "attn"),
        ("blocks.0.mlp", 1, "mlp"),
        ("blocks.1.attn", 2, "attn"),
    ]


PREFIXES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "cls": ("vit_tiny_patch16_224", VIT, ("cls",)),
    "distilled": ("deit_tiny_distilled_patch16_224", VIT, ("cls", "dist")),
    "dinov2": (
        "vit_small_patch14_reg4_dinov2",
        VIT,
        ("cls", "reg0", "reg1", "reg2", "reg3"),
    ),
    "dinov3": ("vit_small_patch16_dinov3", VIT, ("cls", "reg0", "reg1", "reg2", "reg3")),
    "registers": (
        "vit_medium_patch16_reg4_gap_256",
        VIT,
        ("reg0", "reg1", "reg2", "reg3"),
    ),
    "siglip": ("vit_base_patch16_siglip_224", VIT, ()),
    "mixer": ("mixer_s32_224", {}, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PREFIXES)
def test_prefix_kinds(case: str) -> None:
    name, args, prefix = PREFIXES[case]
    table = site_table(small(name, 64, **args))
    layout = table["blocks.0.out"].layout
    assert layout is not None and layout.prefix == prefix
    assert layout.cls == (0 if "cls" in prefix else None)


def test_resnet_parts_and_strides(resnet: SiteTable) -> None:
    wanted = [f"{kind}{i}" for i in (1, 2, 3) for kind in ("conv", "bn", "act")]
    wanted += ["branch", "shortcut", "out"]
    parts = [s.part for s in resnet.sites if s.block == "layer2.0" if s.part in wanted]
    assert parts == wanted
    assert names(resnet, "blocks") == [
        "stem",
        *(f"layer{s}.{j}.out" for s in range(1, 5) for j in range(2)),
    ]
    grids = [resnet[f"layer{s}.0.out"].layout for s in range(1, 5)]
    assert [x.grid for x in grids if x] == [(16, 16), (8, 8), (4, 4), (2, 2)]
    assert [x.stride_px for x in grids if x] == [
        (4.0, 4.0),
        (8.0, 8.0),
        (16.0, 16.0),
        (32.0, 32.0),
    ]
    assert {"bn1", "layer1.0.bn1", "layer1.0.branch"} <= set(names(resnet, "norms"))
    stem = [resnet[name] for name in ("conv1", "bn1", "act1", "stem", "layer1.0.bn1")]
    assert [(site.depth, site.rel_depth) for site in stem] == [(0, 0.0)] * 5
    assert (resnet["pooled"].depth, resnet["pooled"].rel_depth) == (8, 1.0)
    assert resnet.residual_refusal is None and resnet.attention_refusal is not None
    assert [s.name for s in resnet.sublayers[:2]] == ["layer1.0", "layer1.1"]


@pytest.mark.slow
def test_hybrid_counts_backbone_and_blocks_together() -> None:
    table = site_table(small("vit_small_r26_s32_224", 64, **SMALL))
    chosen = select_names(["blocks"], table.sites)
    assert chosen[0].name == "stem"
    assert chosen[1].name == "patch_embed.backbone.stages.0.blocks.0.out"
    assert [site.name for site in chosen][-4:] == [
        "embed",
        *(f"blocks.{i}.out" for i in range(3)),
    ]
    assert [site.depth for site in chosen] == list(range(len(chosen)))
    branch = table["patch_embed.backbone.stages.0.blocks.0.branch"]
    assert "residual" in branch.groups


def test_no_norm_where_it_is_an_identity() -> None:
    table = site_table(
        small("vit_tiny_patch16_224", 32, **VIT, class_token=False, global_pool="avg")
    )
    assert names(table, "head") == ["pooled", "logits"]
    bare = site_table(small("vit_tiny_patch16_224", 32, **VIT, num_classes=0))
    assert names(bare, "head") == ["norm", "pooled"]
    assert "no vector of logits" in bare.left_out["logits"]


def test_parallel_blocks_have_one_branch() -> None:
    from timm.models.vision_transformer import ParallelScalingBlock

    table = site_table(
        small("vit_tiny_patch16_224", 32, **VIT, block_fn=ParallelScalingBlock)
    )
    parts = [s.part for s in table.sites if s.block == "blocks.0"]
    assert [part for part in parts if part in ("in", "branch", "out")] == [
        "in",
        "branch",
        "out",
    ]
    assert [s.name for s in table.sublayers] == ["blocks.0", "blocks.1", "blocks.2"]


def test_windows_and_repeated_modules_are_left_out_and_named() -> None:
    swin = site_table(
        small(
            "swin_tiny_patch4_window7_224",
            64,
            embed_dim=24,
            depths=(1, 1, 1, 1),
            window_size=4,
        )
    )
    assert "first dimension is" in swin.left_out["layers.0.blocks.0.attn.qkv"]
    beit = site_table(small("beit_base_patch16_224", 32, **VIT))
    assert "never called" in beit.left_out["blocks.0.attn.qkv"]
    assert all(s.name != "blocks.0.attn.qkv" for s in beit.sites)


class Toy(nn.Module):
    """Two convolutions whose maps have as many channels as rows and columns."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last
        self.stages = nn.Sequential(Stage(last), Stage(last))
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        x = self.stages(x.permute(0, 2, 3, 1) if self.last else x)
        pooled: Tensor = x.mean((1, 2) if self.last else (2, 3))
        return self.head(pooled)

    def get_classifier(self) -> nn.Module:
        return self.head


class Stage(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 3, 1, 2) if self.last else x
        x = self.norm(self.conv(x))
        return x.permute(0, 2, 3, 1) if self.last else x


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_where_the_channels_are_is_found_out(last: bool, seed: int) -> None:
    """8 channels on a grid of 8 x 8: shapes say nothing, the answer to local changes does."""
    torch.manual_seed(seed)
    table = site_table(wrapped(Toy(last), (3, 32, 32)))
    forms = {name: table.points[name].view.form for name in table.points}
    assert forms["stages.0.out"] == ("nhwc" if last else "nchw")
    assert forms["stages.1.out"] == ("nhwc" if last else "nchw")
    assert forms["stages.1.conv"] == "nchw"
    assert names(table, "blocks")[0] == ("embed" if last else "stem")


class Shuffled(nn.Module):
    """Tokens in another order than row by row."""

    def __init__(self, order: Tensor) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, 4)
        self.register_buffer("order", order)
        self.blocks = nn.Sequential(Wide(), Wide())

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.blocks(tokens[:, self.order])


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(12, 12)
        self.two = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(x).relu())


def test_tokens_in_another_order_are_no_grid() -> None:
    torch.manual_seed(0)
    plain = site_table(wrapped(Shuffled(torch.arange(64)), (3, 32, 32)))
    assert plain["blocks.1.out"].kind == "tokens"
    mixed = site_table(wrapped(Shuffled(torch.randperm(64)), (3, 32, 32)))
    assert mixed["blocks.1.out"].kind == "rows"
    assert mixed["blocks.1.out"].layout == TokenLayout((), None, rows=64)


class Odd(Wide):
    """A block that looks like a residual transformer block and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.attn, self.mlp = nn.Linear(12, 12), nn.Linear(12, 12)
        self.drop_path1, self.drop_path2 = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


def test_a_block_whose_sums_do_not_hold_has_its_output_alone() -> None:
    module = Shuffled(torch.arange(64))
    module.blocks = nn.Sequential(Odd(), Odd())
    table = site_table(wrapped(module, (3, 32, 32)))
    assert (
        "blocks.0.in + blocks.0.attn.branch is not blocks.0.mid"
        in table.left_out["blocks.0"]
    )
    assert table.sublayers == () and table.residual_refusal is not None
    assert "blocks.0.attn.branch" not in table.points
    assert names(table, "blocks") == ["embed", "blocks.0.out", "blocks.1.out"]


@pytest.mark.slow
def test_compiled_and_traced_models_are_refused() -> None:
    model = small("resnet10t", 32)
    x = torch.zeros(1, 3, 32, 32)
    for module, phrase in (
        (torch.compile(model.module), "compiled"),
        (torch.jit.trace(model.module, x), "scripted"),
        (torch.fx.symbolic_trace(model.module), "an fx graph"),
    ):
        with pytest.raises(ModelError, match=phrase):
            site_table(wrapped_as_is(module))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "made", "size", "args", "phrase"),
    [
        (
            "vit_tiny_patch16_224",
            32,
            (33, 32),
            VIT,
            "does not run on images of 33 x 32 pixels",
        ),
        (
            "mvitv2_tiny",
            101,
            (101, 101),
            {},
            "101 x 101 pixels: index 23 is out of bounds",
        ),
        # A layer that refuses without a word is named.
        (
            "halonet_h1",
            None,
            (100, 100),
            {},
            "pixels: stages.0.0.self_attn (HaloAttn) refuses",
        ),
    ],
)
def test_an_image_size_that_the_model_cannot_take_is_one_line(
    name: str, made: int | None, size: tuple[int, int], args: dict[str, Any], phrase: str
) -> None:
    model = small(name, made, **args)
    model.input_size = (3, *size)
    with pytest.raises(ModelError) as error:
        site_table(model)
    assert phrase in str(error.value) and "\n" not in str(error.value)
    assert "--img-size" in str(error.value)


@pytest.mark.slow
def test_windows_are_counted_without_the_heads() -> None:
    """HaloNet has its heads in the batch dimension: 8 of them, and 4 windows of 8 x 8."""
    table = site_table(small("halonet26t", 256))
    assert (
        table.left_out["stages.2.1 attention"] == "attention within windows (4 per image)"
    )


@pytest.mark.slow
def test_heads_on_vectors_of_several_sizes_have_no_pooled_vector() -> None:
    """EfficientViM averages a classifier a stage; its distilled models twice as many."""
    for name in ("efficientvim_m1", "efficientvim_m1_dist"):
        table = site_table(small(name, None))
        assert names(table, "head") == ["logits"]
        assert (
            table.left_out["pooled"]
            == "several classifiers, on vectors of different sizes"
        )


def wrapped_as_is(module: Any) -> LoadedModel:
    return LoadedModel("toy", module, (3, 32, 32), {}, {}, "toy")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["test_vit", "test_resnet", "test_convnext", "test_maxvit"]
)
def test_names_are_unique_and_the_table_repeats(name: str) -> None:
    model = small(name, 64)
    one, two = site_table(model), site_table(model)
    assert one.sites == two.sites and one.left_out == two.left_out
    assert max(Counter(site.name for site in one.sites).values()) == 1
    for site in one.sites:
        check_spec(site)


def check_spec(site: SiteSpec) -> None:
    assert "all" in site.groups and 0.0 <= site.rel_depth <= 1.0
    if site.kind == "tokens":
        assert site.layout is not None and site.layout.grid is not None
        assert site.shape == (site.layout.n_tokens, site.dim)
    if site.kind == "vector":
        assert site.shape == (site.dim,) and site.layout is None
    if site.block is not None and site.part != site.name:
        assert site.name == f"{site.block}.{site.part}"


def test_stride_and_grids_by_hand() -> None:
    assert whole_stride((224, 224), (7, 7)) == (32.0, 32.0)
    assert whole_stride((97, 97), (25, 25)) == (4.0, 4.0)
    assert whole_stride((225, 150), (14, 9)) == (16.0, 16.0)
    assert whole_stride((10, 10), (3, 3)) == (3.0, 3.0)
    assert whole_stride((240, 240), (224, 224)) is None
    geometry = ModelGeometry((32, 48))
    assert geometry.grid_of(24) == (4, 6)
    assert geometry.grid_of(23) is None
    assert geometry.token_layout(25) is None
    with_cls = ModelGeometry((32, 48), prefix=("cls",))
    layout = with_cls.token_layout(25)
    assert layout is not None and (layout.prefix, layout.grid) == (("cls",), (4, 6))
    without = with_cls.token_layout(24)
    assert without is not None and without.prefix == ()
