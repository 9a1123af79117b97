"""Depth, rollout and groups by the order in which blocks run, not by that of their lists."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import small_vits
from tests.every_command import vitsee
from tests.extractions import extracted
from tests.models_helpers import captured, images, redraw
from vitsee_core.models.load import model_from_module
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.survey.block_flow import block_inputs
from vitsee_core.models.survey.tracing import trace
from vitsee_stores import open_store
from vitsee_stores.layout import select_names

SIZE = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
BUILD = """
import sys
sys.path.insert(0, {root!r})
import torch
from tests import small_vits

def build(kind):
    torch.manual_seed(0)
    half = (0.5, 0.5, 0.5)
    return getattr(small_vits, kind)(), {{"input_size": (3, 32, 32), "mean": half, "std": half}}
"""


def model_of(module: nn.Module) -> LoadedModel:
    model = model_from_module(module, SIZE, name="toy")
    redraw(model.module)
    return model


def outs(table: SiteTable) -> dict[str, int]:
    """Depth of what leaves each block, in the order of the table."""
    return {site.name: site.depth for site in table.sites if site.part == "out"}


def observed_order(module: nn.Module, names: list[str], x: Tensor) -> list[str]:
    """Names of modules in the order in which hooks of one's own see them leave."""
    order: list[str] = []
    for name in names:
        child = module.get_submodule(name)
        child.register_forward_hook(lambda *_, name=name: order.append(name))
    with torch.no_grad():
        module(x)
    return order


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("Alternating", ["frame_blocks.0", "global_blocks.0", "frame_blocks.1"]),
        ("FromTheEnd", ["blocks.2", "blocks.1", "blocks.0"]),
        (
            "OnAnotherModel",
            ["patch_embed.blocks.1", "patch_embed.blocks.0", "frame_blocks.0"],
        ),
        (
            "UShape",
            ["in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1"],
        ),
        ("DecoderFirst", ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]),
    ],
)
def test_depth_is_the_order_of_execution(kind: str, first: list[str]) -> None:
    model = model_of(getattr(small_vits, kind)())
    table = site_table(model)
    found = outs(table)
    names = [name.removesuffix(".out") for name in found]
    assert names[: len(first)] == first
    assert list(found.values()) == list(range(1, len(found) + 1))
    assert table[f"{names[-1]}.out"].rel_depth == 1
    assert names == observed_order(model.module, names, images(model))
    # What enters a block of a chain is what left the one that ran before, at one depth less.
    if kind in ("Alternating", "FromTheEnd"):
        for before, block in pairwise(names):
            assert table[f"{block}.in"].alias_of == f"{before}.out"
        assert not table.remarks
    group = [site.name for site in select_names(["blocks"], table.sites)]
    assert [name for name in group if name.endswith(".out")] == list(found)


@pytest.mark.parametrize("kind", ["Alternating", "FromTheEnd"])
def test_rollout_follows_execution(tmp_path: Path, kind: str) -> None:
    """Against the whole product of head means, multiplied by hand in the order of the code."""
    built = tmp_path / "own.py"
    built.write_text(BUILD.format(root=str(Path(__file__).parents[1])))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", images=rng.integers(0, 256, (3, 32, 32, 3), np.uint8))
    place = tmp_path / "s.zarr"
    extracted(
        f"{built}:build?kind={kind}",
        "--data",
        tmp_path / "x.npz",
        "-o",
        place,
        "--inputs",
    )
    store = open_store(place)
    torch.manual_seed(0)
    module = getattr(small_vits, kind)().eval()
    pixels = torch.from_numpy(
        np.stack([store.array("input")[i] for i in range(3)])
    ).float()
    with torch.no_grad():
        x = module.embed((pixels / 255 - 0.5) / 0.5)
        product = torch.eye(x.shape[1], dtype=torch.float64).repeat(3, 1, 1)
        for block in module.in_order():
            mean = block.probabilities(x).double().mean(1)
            step = 0.5 * mean + 0.5 * torch.eye(x.shape[1], dtype=torch.float64)
            product = step @ product
            x = block(x)
    found = np.stack([store.array("attention/rollout")[i] for i in range(3)])
    np.testing.assert_allclose(found, product[:, 0].numpy(), rtol=1e-4)


def test_blocks_that_join_are_said() -> None:
    u_shape = site_table(model_of(small_vits.UShape()))
    assert u_shape.remarks == (
        "branches join: out_blocks.0 takes what in_blocks.1 and mid_block give, and so 1 more "
        "block; depth is the order in which blocks ran, not a distance along one path",
    )
    assert u_shape.rollout_refusal is None
    (remark,) = site_table(model_of(small_vits.DecoderFirst())).remarks
    assert remark.startswith(
        "branches join: decoder.1 takes what encoder.1 and decoder.0 give"
    )
    towers = site_table(model_of(small_vits.Towers()))
    (remark,) = towers.remarks
    assert remark.startswith("branches run side by side: right.0 takes nothing of left.1")
    assert towers.rollout_refusal == (
        "right.0 takes nothing of left.1, which ran before it: blocks are no chain"
    )


def test_what_each_block_is_made_of_against_gradients() -> None:
    """A block takes what another gives if, all other blocks' outputs held, its input changes."""
    for kind in ("UShape", "Towers", "DecoderFirst", "Alternating"):
        model = model_of(getattr(small_vits, kind)())
        names = [name.removesuffix(".out") for name in outs(site_table(model))]
        found = block_inputs(trace(model.module, model.input_size, corners=False), names)
        assert found == dependence(model.module, names, images(model))


def dependence(module: nn.Module, names: list[str], x: Tensor) -> list[set[int]]:
    """Which blocks' outputs the arguments of each depend on, by automatic differentiation with each
    block's output made a leaf."""
    leaves: list[Tensor] = []
    taken: list[list[Tensor]] = []
    handles = []
    for name in names:
        child = module.get_submodule(name)

        def enter(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            taken.append(list(args))

        def leave(_m: nn.Module, _a: object, output: Tensor) -> Tensor:
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]

        handles += [
            child.register_forward_pre_hook(enter),
            child.register_forward_hook(leave),
        ]
    module(x)
    for handle in handles:
        handle.remove()
    sources: list[set[int]] = []
    for args in taken:
        with_history = [arg.sum() for arg in args if arg.requires_grad]
        if not with_history:
            sources.append(set())
            continue
        total = torch.stack(with_history).sum()
        changes = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
        sources.append({i for i, change in enumerate(changes) if change is not None})
    return sources


def test_the_remark_reaches_the_user(tmp_path: Path) -> None:
    built = tmp_path / "own.py"
    built.write_text(BUILD.format(root=str(Path(__file__).parents[1])))
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 32, 32, 3), np.uint8))
    name = f"{built}:build?kind=UShape"
    line = "branches join: out_blocks.0 takes what in_blocks.1 and mid_block give"
    output = extracted(
        name, "--data", tmp_path / "x.npz", "-o", tmp_path / "s.zarr"
    ).output
    assert output.count(line) == 1
    assert line not in vitsee("sites", name)  # stdout is the table alone


def test_a_list_that_was_taken_apart_is_no_block_itself() -> None:
    """A stage that is a list stands for its blocks, though a block is of that class, too."""

    class Stages(small_vits.Embedding):
        def __init__(self) -> None:
            super().__init__()
            self.early = nn.Sequential(*small_vits.blocks(2))
            linear = nn.Linear(small_vits.DIM, small_vits.DIM)
            self.between = nn.ModuleList([nn.Sequential(linear, small_vits.Block())])
            self.late = nn.Sequential(*small_vits.blocks(2))

        def forward(self, images: Tensor) -> Tensor:
            x = self.early(self.embed(images))
            return self.last(self.late(self.between[0](x)))

    names = ["early.0.out", "early.1.out", "between.0.out", "late.0.out", "late.1.out"]
    assert list(outs(site_table(model_of(Stages())))) == names


def test_a_block_that_runs_several_times_is_said() -> None:
    """Its depths have no sites; blocks beside it keep their numbers, and nothing is rolled out."""
    table = site_table(model_of(small_vits.Repeated((0, 1, 2, 1))))
    assert outs(table) == {"blocks.0.out": 1, "blocks.2.out": 2}
    reason = "blocks.1 runs 2 times in one forward pass, and depths that share a block have no site"
    assert table.remarks == (reason,) and table.rollout_refusal == reason
    assert [block.name for block in table.attention] == ["blocks.0", "blocks.2"]
    shared = site_table(model_of(small_vits.Repeated((0, 0, 0))))
    reason = reason.replace("blocks.1", "blocks.0").replace("2 times", "3 times")
    assert not outs(shared) and shared.remarks == (reason,)
    assert shared.attention_refusal == shared.residual_refusal == reason


def test_a_block_that_joins_its_inputs_has_its_branches() -> None:
    """The stream begins with what the joint gives, which hooks of one's own see."""
    model = model_of(small_vits.UShapeInside())
    table, x = site_table(model), images(model)
    assert len(table.sublayers) == 10 and len(table.remarks) == 1
    given: dict[str, Tensor] = {}
    for name in ("joint", "attention"):
        child = model.module.get_submodule(f"out_blocks.1.{name}")
        child.register_forward_hook(
            lambda _m, _a, y, name=name: given.update({name: y.clone()})
        )
    found = captured(model, table, x)
    skip, branch = found.branches["out_blocks.1.attn"]
    assert torch.equal(skip, given["joint"]) and torch.equal(branch, given["attention"])
    assert torch.equal(found.tokens("out_blocks.1.shortcut"), given["joint"])
