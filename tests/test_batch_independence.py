"""The self-check refuses a model whose features of an image depend on its batch or on the run,
names the module that does it, and passes roundings of other kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models_helpers import redraw
from vitsee_core.models.batch_independence import (
    N_DIRECTIONS,
    ChangingModelError,
    compositions,
    difference,
    fingerprint,
)
from vitsee_core.models.load import model_from_module
from vitsee_core.models.selfcheck import SelfCheck, self_check
from vitsee_core.models.site_tables import site_table
from vitsee_core.runtime.device import precision_context

CPU = torch.device("cpu")
TRANSFORM: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "mean": (0.5,) * 3,
    "std": (0.5,) * 3,
}
TRANSFORM |= {"interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "center"}
DIM = 24


def vit() -> Any:
    torch.manual_seed(0)
    size: dict[str, Any] = {"img_size": 32, "patch_size": 8}
    size |= {"embed_dim": DIM, "depth": 2, "num_heads": 2, "num_classes": 5}
    module = timm.create_model("vit_tiny_patch16_224", **size)
    redraw(module)
    return module.eval()


def checked(module: nn.Module, n_images: int = 4, precision: str = "fp32") -> SelfCheck:
    model = model_from_module(module, TRANSFORM, name="mine")
    table = site_table(model)
    images = torch.randn(
        (n_images, 3, 32, 32), generator=torch.Generator().manual_seed(1)
    )
    stored = [site for site in table.sites if site.alias_of is None]
    with precision_context(CPU, precision):
        return self_check(
            model,
            table,
            images,
            sites=stored,
            sublayers=table.sublayers,
            attention=table.attention,
        )


def layer(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A module that is this function."""

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return Layer()


def after_norm(function: Callable[[Tensor], Tensor]) -> Any:
    """A ViT whose second block normalises, then does this."""
    module = vit()
    module.blocks[1].norm1 = nn.Sequential(module.blocks[1].norm1, layer(function))
    return module


class TokenNorm(nn.Module):
    """A BatchNorm over images and tokens, in one of its wrong states."""

    def __init__(self, training: bool, **options: Any) -> None:
        super().__init__()
        self.norm, self.trains = nn.BatchNorm1d(DIM, **options), training

    def forward(self, x: Tensor) -> Tensor:
        if self.trains:
            self.norm.train()
        normalised: Tensor = self.norm(x.transpose(1, 2))
        return normalised.transpose(1, 2)


def with_norm(norm: nn.Module) -> Any:
    module = vit()
    module.blocks[1].norm1 = norm
    return module


def with_norm_over_images() -> Any:
    """A GroupNorm whose group spans the batch."""
    group = nn.GroupNorm(1, 1)
    return after_norm(lambda x: group(x.reshape(1, 1, -1)).reshape(x.shape))


def with_attention_over_images() -> Any:
    attention = nn.MultiheadAttention(
        DIM, 2
    )  # expects (tokens, images, dim) and gets images first
    module = after_norm(torch.nn.Identity().forward)
    module.blocks[1].norm1.add_module("over_images", CrossAttention(attention))
    return module


class CrossAttention(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output


class CentredBlock(nn.Module):
    """A block that subtracts the mean over images in its own code, between two modules."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = block.norm1, block.attn, block.norm2
        self.mlp = block.mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(0, keepdim=True)
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def with_centred_block() -> Any:
    module = vit()
    module.blocks[1] = CentredBlock(module.blocks[1])
    return module


def by_place(x: Tensor) -> Tensor:
    return x + torch.arange(len(x)).view(-1, 1, 1) * torch.linspace(-1, 1, DIM)


# A model -> the module that the line names first.
DEPENDENT: dict[str, tuple[Callable[[], Any], str]] = {
    "no running statistics": (
        lambda: with_norm(TokenNorm(training=False, track_running_stats=False)),
        "blocks.1.norm1.norm (BatchNorm1d)",
    ),
    "train mode in forward": (
        lambda: with_norm(TokenNorm(training=True)),
        "blocks.1.norm1.norm (BatchNorm1d)",
    ),
    "centred over images": (
        lambda: after_norm(lambda x: x - x.mean(0)),
        "blocks.1.norm1.1 (Layer)",
    ),
    "centred a little": (
        lambda: after_norm(lambda x: x - 1e-3 * x.mean(0)),
        "blocks.1.norm1.1 (Layer)",
    ),
    "the first image subtracted": (
        lambda: after_norm(lambda x: x - 0.1 * x[:1]),
        "blocks.1.norm1.1 (Layer)",
    ),
    "scaled by all": (
        lambda: after_norm(lambda x: x / x.std()),
        "blocks.1.norm1.1 (Layer)",
    ),
    "the number of images": (
        lambda: after_norm(lambda x: x * len(x)),
        "blocks.1.norm1.1 (Layer)",
    ),
    "the place in the batch": (lambda: after_norm(by_place), "blocks.1.norm1.1 (Layer)"),
    "a group over images": (with_norm_over_images, "blocks.1.norm1.1 (Layer)"),
    "attention over images": (
        with_attention_over_images,
        "blocks.1.norm1.over_images.attention (MultiheadAttention)",
    ),
    "between modules": (with_centred_block, "blocks.1 (CentredBlock)"),
}


@pytest.mark.parametrize("case", DEPENDENT)
def test_features_that_depend_on_the_batch_are_refused(case: str) -> None:
    make, module = DEPENDENT[case]
    (failure,) = checked(make()).failures
    assert "depend on the other images of its batch" in failure
    assert f"first in {module}" in failure


@pytest.mark.parametrize("n_images", [1, 2, 3])
def test_few_images_are_enough(n_images: int) -> None:
    (failure,) = checked(after_norm(lambda x: x / x.std()), n_images).failures
    assert "first in blocks.1.norm1.1 (Layer)" in failure


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_weak_dependence_shows_in_half_precision(precision: str) -> None:
    (failure,) = checked(
        after_norm(lambda x: x - 1e-3 * x.mean(0)), precision=precision
    ).failures
    assert "first in blocks.1.norm1.1 (Layer)" in failure


def test_a_model_that_takes_batches_of_one_size_only() -> None:
    in_pairs = after_norm(lambda x: x.view(-1, 2, *x.shape[1:]).view(x.shape))
    (failure,) = checked(in_pairs, n_images=2).failures
    assert "it runs on 2 images and not on a batch of 3 images: " in failure
    assert checked(in_pairs, n_images=4).ok


class Summed(nn.Module):
    """A linear layer whose sums are made in this type, in another order for larger batches."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = linear, dtype

    def forward(self, x: Tensor) -> Tensor:
        x, weight = x.to(self.dtype), self.linear.weight.to(self.dtype)
        pieces = [x] if len(x) > 2 else x.tensor_split(4, dim=-1)
        columns = [weight] if len(x) > 2 else weight.tensor_split(4, dim=1)
        total = sum(a @ b.T for a, b in zip(pieces, columns, strict=True))
        assert isinstance(total, Tensor)
        return total.float() + self.linear.bias


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_kernels_for_other_sizes_pass(dtype: torch.dtype, precision: str) -> None:
    module = vit()
    for block in module.blocks:
        block.mlp.fc1, block.mlp.fc2 = (
            Summed(block.mlp.fc1, dtype),
            Summed(block.mlp.fc2, dtype),
        )
    result = checked(module, precision=precision)
    assert result.failures == []
    assert 0 < result.figures["batches"]["max"] < 0.1


def test_the_kernels_of_one_size_give_equal_bits() -> None:
    """What the tolerance within one size of batch rests on."""
    module, (neighbours, _) = vit(), compositions(images := torch.randn(4, 3, 32, 32))
    with torch.inference_mode():
        first, second = module(images), module(neighbours.images)
    assert torch.equal(first[[0, 2]], second[[0, 2]])
    assert not torch.equal(first[1], second[1])


@pytest.mark.parametrize("n_images", [1, 2, 3, 4])
def test_every_image_is_compared_in_another_batch(n_images: int) -> None:
    images = torch.randn(n_images, 3, 2, 2)
    seen: set[int] = set()
    for other in compositions(images):
        assert torch.equal(other.images[list(other.rows)], images[list(other.first_rows)])
        assert len(other.images) > 1
        assert (len(other.images) == n_images) == other.same_size
        alike = len(other.images) == n_images and torch.equal(other.images, images)
        assert not alike
        seen |= set(other.first_rows)
    assert seen == set(range(n_images))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class LayerDrop(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.5 else self.block(x)


def shuffled(x: Tensor) -> Tensor:
    """Which the class token, and so the output, hardly notices."""
    order = torch.randperm(x.shape[1] - 1) + 1
    return torch.cat([x[:, :1], x[:, order]], 1)


def with_embedding(module: nn.Module) -> Any:
    model = vit()
    model.norm_pre = module
    return model


RANDOM: dict[str, tuple[Callable[[], Any], str]] = {
    "dropout": (
        lambda: after_norm(lambda x: functional.dropout(x, 0.1, training=True)),
        "blocks.1.norm1.1 (Layer)",
    ),
    "noise": (
        lambda: after_norm(lambda x: x + 1e-2 * torch.randn_like(x)),
        "blocks.1.norm1.1 (Layer)",
    ),
    "patches left out": (
        lambda: with_embedding(layer(lambda x: x[:, torch.randperm(x.shape[1])[:9]])),
        "norm_pre (Layer)",
    ),
    "patches shuffled": (lambda: with_embedding(layer(shuffled)), "norm_pre (Layer)"),
    "calls counted": (lambda: with_embedding(Counting()), "norm_pre (Counting)"),
}


@pytest.mark.parametrize("case", RANDOM)
def test_features_that_change_from_run_to_run_are_refused(case: str) -> None:
    make, module = RANDOM[case]
    (failure,) = checked(make()).failures
    assert "changes from run to run" in failure
    assert f"first in {module}" in failure
    assert "hooks" not in failure


def test_blocks_left_out_at_random_are_said_before_there_is_a_table() -> None:
    torch.manual_seed(3)
    module = vit()
    module.blocks = nn.Sequential(
        *[LayerDrop(block) for block in vit().blocks for _ in range(4)]
    )
    with pytest.raises(
        ChangingModelError, match="changes from run to run, first in blocks"
    ):
        site_table(model_from_module(module, TRANSFORM, name="mine"))


def test_the_difference_of_fingerprints_is_that_of_tokens() -> None:
    """Against the distance itself, of a token that is changed by a hundredth of its length."""
    tokens = torch.randn((2, 7, 300), generator=torch.Generator().manual_seed(5))
    changed = tokens.clone()
    changed[1, 3] += 0.01 * tokens[0, 0]
    gaps = (tokens - changed).norm(dim=-1)
    expected = float(gaps.max() / tokens.square().sum(-1).mean().sqrt())
    assert (
        expected / 2
        < difference(fingerprint(tokens), fingerprint(changed))
        < 2 * expected
    )


def test_differences_by_hand() -> None:
    short = torch.tensor(
        [[3.0, 4.0], [0.0, 5.0]]
    )  # no longer than the directions are many
    assert short.shape[-1] <= N_DIRECTIONS
    assert torch.equal(fingerprint(short), short)
    assert difference(short, short + torch.tensor([0.0, 0.5])) == pytest.approx(0.5 / 5)
    assert difference(short, short) == 0
    assert difference(torch.zeros(1, 2), torch.ones(1, 2)) == float("inf")
    nan = torch.tensor([[float("nan"), 1.0]])
    assert difference(nan, nan.clone()) == 0
    assert difference(nan, torch.ones(1, 2)) == float("inf")
    assert difference(short, short[:1]) == float("inf")
