"""Branches that are scaled outside of any module, by bare parameters or by gates that a layer makes
of a timestep or an image: read as the model runs, and fitted where nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.extractions import extracted
from tests.models_helpers import captured, images
from tests.small_vits import DIM, Attention, Embedding, feed_forward
from vitsee_core.models.load import model_from_module
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.proofs import scaled_error
from vitsee_core.models.selfcheck import SelfCheck, self_check
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_stores import open_store

HALF = (0.5, 0.5, 0.5)
SIZE = {"input_size": (3, 32, 32), "mean": HALF, "std": HALF}


class Gated(nn.Module):
    """A pre-norm block; kind: how its branches are scaled."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.feed_forward = Attention(), feed_forward()
        self.modulate = nn.Linear(DIM, 2 * DIM)
        self.of_image = nn.Linear(DIM, DIM)
        self.lambda_1, self.lambda_2 = (nn.Parameter(torch.randn(DIM)) for _ in range(2))
        self.table = nn.Parameter(torch.randn(1, 2, DIM))
        self.number = nn.Parameter(torch.randn(1))

    def gates(self, x: Tensor, timestep: Tensor) -> tuple[Any, Any]:
        """The factors of the two branches."""
        if self.kind == "adaln":  # of a timestep's embedding, a chunk for each branch
            first, second = self.modulate(nn.functional.silu(timestep)).chunk(2, dim=1)
            return first.unsqueeze(1), second.unsqueeze(1)
        if (
            self.kind == "adaln-single"
        ):  # one embedding for all blocks, and a table in each
            first, second = (self.table + timestep.unsqueeze(1)).chunk(2, dim=1)
            return first, second
        if self.kind == "tanh":
            return self.number.tanh(), torch.tanh(self.number)
        if self.kind == "image":  # a gate of each image's own
            gate = torch.sigmoid(self.of_image(x.mean(1, keepdim=True)))
            return gate, gate
        return self.lambda_1, self.lambda_2

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        first, second = self.gates(x, timestep)
        f = self.attention(self.a(x))
        if self.kind == "in place":
            f *= first
            f.div_(0.5)
            x = f.add_(x)
        elif self.kind == "fused":
            x = torch.addcmul(x, first, f)
        else:
            x = x + first * f
        f = self.feed_forward(self.b(x))
        return torch.addcmul(x, second, f) if self.kind == "fused" else x + f * second


class Net(Embedding):
    def __init__(self, kind: str, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated(kind) for _ in range(depth))
        self.timestep = nn.Parameter(torch.randn(1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        timestep = self.timestep.expand(len(x), -1)
        for block in self.blocks:
            x = block(x, timestep)
        return self.last(x)


def checked(model: LoadedModel, table: SiteTable, x: Tensor) -> SelfCheck:
    sites = [site for site in table.sites if site.alias_of is None]
    return self_check(
        model, table, x, sites=sites, sublayers=table.sublayers, attention=table.attention
    )


KINDS = ["parameter", "adaln", "adaln-single", "tanh", "image", "in place", "fused"]


@pytest.mark.parametrize("kind", KINDS)
def test_gates_are_read_and_the_sum_is_exact(kind: str) -> None:
    """Every block of ten random models; fitted factors alone lose some blocks of most of these."""
    for seed in range(10):
        torch.manual_seed(seed)
        model = model_from_module(Net(kind), SIZE, name="toy")
        table = site_table(model)
        assert len(table.sublayers) == 6, seed
        check = checked(model, table, images(model, 4, seed=seed + 1))
        assert check.ok and not check.left_out
        # Only the fused kernel rounds its product otherwise than the product that is made of it.
        assert check.figures["sums"]["max"] <= (1 if kind == "fused" else 0)
    # What is stored as the branch is the gate times what the module gives, by hooks of one's own.
    x = images(model)
    seen = captured(model, table, x)
    given: dict[str, Tensor] = {}
    block: Any = model.module.get_submodule("blocks.1")
    block.attention.register_forward_hook(lambda _m, _a, f: given.update(attn=f.clone()))
    block.feed_forward.register_forward_hook(
        lambda _m, _a, f: given.update(mlp=f.clone())
    )
    timestep: Any = model.module.timestep
    with torch.inference_mode():
        block(seen.tokens("blocks.0.out"), timestep.expand(len(x), -1))
        first, second = block.gates(seen.tokens("blocks.0.out"), timestep)
    first = 2 * first if kind == "in place" else first
    for name, factor in (("attn", first), ("mlp", second)):
        branch = seen.branches[f"blocks.1.{name}"][1]
        assert torch.allclose(branch, factor * given[name], atol=1e-5)


@pytest.mark.parametrize("timestep", range(0, 1000, 80))
def test_thirteen_timesteps_of_one_model(timestep: int) -> None:
    torch.manual_seed(0)
    net = Net("adaln")
    steps = torch.exp(-torch.arange(DIM // 2) * 9.2 / (DIM // 2)) * timestep
    net.timestep.data = torch.cat([steps.cos(), steps.sin()]).unsqueeze(0)
    model = model_from_module(net, SIZE, name="toy")
    table = site_table(model)
    assert len(table.sublayers) == 6
    assert checked(model, table, images(model, 4)).figures["sums"]["max"] == 0


def test_a_fitted_factor_has_an_error_of_its_own() -> None:
    """A cell with a small skip and a large branch shows that of the cells it was fitted to."""
    generator = torch.Generator().manual_seed(0)
    skip = 1000 * torch.randn(2, 60, 4, generator=generator)
    given = torch.randn(2, 60, 4, generator=generator)
    skip[0, 0], given[0, 0] = 1e-6, 4.0
    total = skip + 0.01 * given
    assert scaled_error(total, skip, given) <= 1
    # Against float64: of the factor that is fitted only the least squares' bound may be off.
    difference = (total.double() - skip.double())[0, 0]
    by_rounding_alone = (difference - 0.01 * given[0, 0].double()).abs().max()
    assert float(by_rounding_alone) < 1e-8
    wrong = total.clone()
    wrong[1, 7, 2] += 0.5
    assert scaled_error(wrong, skip, given) > 100


FAILING = """
import torch
from torch import nn
from torch.nn import functional

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(12), nn.Linear(12, 12)
        self.attend = nn.Linear(12, 12)
        self.norm_2, self.mix = nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x, brightness):
        # A gate that is one for most images, in a function that multiplies and is no product.
        gate = 1 + 0.5 * (brightness > {bright}).float()
        x = x + torch.einsum("btd,b->btd", self.lin(self.norm(x)), gate)
        return x + self.mix(self.norm_2(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, 12, 8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, images):
        x = self.cut(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, images.mean((1, 2, 3)))
        return x.mean(1)

def build():
    torch.manual_seed(0)
    return Net(), {{"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}}
"""


def test_what_is_fitted_and_fails_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    built = tmp_path / "own.py"
    built.write_text(FAILING.format(bright=0.5))
    pictures = np.zeros((4, 32, 32, 3), np.uint8)
    pictures[:] = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3))
    pictures[1] = 250  # where the gate is another
    np.savez(tmp_path / "x.npz", images=pictures)
    words = [f"{built}:build", "--data", tmp_path / "x.npz", "-o", tmp_path / "s.zarr"]
    output = " ".join(extracted(*words).output.split())
    reason = "what it adds is not the output of blocks.0.lin, nor that times a factor per channel"
    assert f"no residual products of blocks.0.token: {reason}" in output
    store = open_store(tmp_path / "s.zarr")
    assert [name for name, _ in store.plan.sublayers] == [
        "blocks.0.channel",
        "blocks.1.channel",
    ]
    assert store.manifest.left_out["blocks.0.token"].startswith(reason)
    plain = extracted(*words[:-1], tmp_path / "p.zarr", "--no-residual").output
    assert "no residual products" not in plain
