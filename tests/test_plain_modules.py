"""Parametrized weights become what they compute; weights without plain values are one line."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.test_batch_independence import DIM, TRANSFORM, vit
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import hash_weights, model_from_module
from vitsee_core.models.site_tables import site_table


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class LowRank(nn.Module):
    """An adapter with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (
            nn.Parameter(torch.randn(DIM, 2)),
            nn.Parameter(torch.randn(2, DIM)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down @ self.up


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def register(name: str, parametrization: nn.Module) -> Callable[[Any], None]:
    """Put this parametrization on one tensor of a module."""
    path, _, key = name.rpartition(".")

    def change(module: Any) -> None:
        layer = module.get_submodule(path)
        parametrize.register_parametrization(layer, key, parametrization, unsafe=True)

    return change


def weight_norms(module: Any) -> None:
    for layer in (module.patch_embed.proj, module.head, module.blocks[0].mlp.fc1):
        parametrizations.weight_norm(layer)


def shared_with_a_plain_layer(module: Any) -> None:
    projections = [block.attn.proj for block in module.blocks]
    projections[1].weight = projections[0].weight
    parametrize.register_parametrization(
        projections[0], "weight", Symmetric(), unsafe=True
    )


def two_on_one_layer(module: Any) -> None:
    layer = module.blocks[1].attn.proj
    parametrizations.weight_norm(layer)
    parametrize.register_parametrization(layer, "weight", Symmetric(), unsafe=True)
    parametrize.register_parametrization(layer, "bias", Twice())


def packed_projection(module: Any) -> None:
    """torch's own attention, whose weights of three projections are one parameter."""

    class Attention(nn.MultiheadAttention):
        def forward(self, x: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
            output: Tensor = super().forward(x, x, x, need_weights=False)[0]
            return output

    module.blocks[1].attn = Attention(DIM, 2, batch_first=True).eval()
    parametrizations.weight_norm(module.blocks[1].attn, "in_proj_weight")


PARAMETRIZED: dict[str, Callable[[Any], object]] = {
    "weight norm": weight_norms,
    "spectral norm": lambda module: parametrizations.spectral_norm(
        module.blocks[1].mlp.fc2
    ),
    "orthogonal": lambda module: parametrizations.orthogonal(module.blocks[1].attn.proj),
    "own": register("blocks.1.attn.proj.weight", Symmetric()),
    "of the model itself": register("pos_embed", Twice()),
    "of a norm": register("norm.weight", Twice()),
    "adapter": register("blocks.0.attn.proj.weight", LowRank()),
    "shared": shared_with_a_plain_layer,
    "two": two_on_one_layer,
    "packed projections": packed_projection,
}


@pytest.mark.parametrize("case", PARAMETRIZED)
def test_a_parametrized_model_is_read_as_the_one_that_it_computes(case: str) -> None:
    module = vit()
    PARAMETRIZED[case](module)
    module.eval()
    images = torch.randn((2, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = module(images)
    before = copy.deepcopy(module.state_dict())
    model = model_from_module(module, TRANSFORM, name="mine")
    table = site_table(model)
    with torch.inference_mode():
        # torch's fused attention, which is off in a model that is read, has other roundings.
        torch.testing.assert_close(model.module(images), expected, rtol=1e-5, atol=1e-6)
    names = {site.name for site in table.sites}
    assert {"blocks.0.mlp.fc1", "blocks.1.mlp.fc2", "logits"} <= names
    assert not any("parametrizations" in name for name in {*names, *table.left_out})
    assert [sublayer.kind for sublayer in table.sublayers] == ["attn", "mlp"] * 2
    assert [block.name for block in table.attention] == ["blocks.0", "blocks.1"]
    after = module.state_dict()  # the user's own module
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_buffer_stays_a_buffer() -> None:
    module = vit()
    module.blocks[0].register_buffer("steps", torch.ones(3))
    parametrize.register_parametrization(module.blocks[0], "steps", Twice())
    block = model_from_module(module, TRANSFORM, name="mine").module.get_submodule(
        "blocks.0"
    )
    assert dict(block.named_buffers(recurse=False))["steps"].tolist() == [2.0, 2.0, 2.0]


def test_a_pruned_layer_and_norms_of_the_older_kind() -> None:
    """They set a plain tensor before each pass."""
    module = vit()
    prune.l1_unstructured(module.blocks[0].mlp.fc1, "weight", 0.5)
    nn.utils.spectral_norm(module.blocks[1].mlp.fc1)
    model = model_from_module(module, TRANSFORM, name="mine", copied=True)
    names = {site.name for site in site_table(model).sites}
    assert {"blocks.0.mlp.fc1", "blocks.1.mlp.fc1"} <= names


def test_weights_that_change_at_every_access_are_refused() -> None:
    module = vit()
    register("blocks.1.attn.proj.weight", Noise())(module)
    with pytest.raises(
        ModelError, match=r"blocks\.1\.attn\.proj\.weight changes from run to run"
    ):
        model_from_module(module, TRANSFORM, name="mine")


def dynamically_quantised(dtype: torch.dtype) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        return torch.ao.quantization.quantize_dynamic(vit(), {nn.Linear}, dtype=dtype)


def with_weight(change: Callable[[Tensor], Tensor]) -> Any:
    module = vit()
    layer = module.blocks[0].mlp.fc1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "in beta state"
        weight = change(layer.weight.detach())
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return module


def with_buffer(persistent: bool) -> Any:
    module = vit()
    module.blocks[1].register_buffer(
        "mask", torch.ones(2, device="meta"), persistent=persistent
    )
    return module


def with_lazy_head() -> Any:
    module = vit()
    module.head = nn.LazyLinear(5)
    return module


def with_nested_buffer(layout: torch.layout) -> Any:
    module = vit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "in prototype stage"
        parts = [torch.ones(2), torch.ones(3)]
        nested = torch.nested.nested_tensor(parts, layout=layout)
    module.blocks[1].register_buffer("lengths", nested)
    return module


UNREADABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "dynamic int8": (
        lambda: dynamically_quantised(torch.qint8),
        r"mine: blocks\.0\.attn\.qkv keeps a .* quantised layers",
    ),
    "dynamic float16": (
        lambda: dynamically_quantised(torch.float16),
        r"mine: blocks\.0\.attn\.qkv keeps a .* quantised layers",
    ),
    "sparse": (
        lambda: with_weight(Tensor.to_sparse),
        r"mine: blocks\.0\.mlp\.fc1\.weight is sparse \(torch\.sparse_coo\)",
    ),
    "sparse rows": (
        lambda: with_weight(Tensor.to_sparse_csr),
        r"mine: blocks\.0\.mlp\.fc1\.weight is sparse \(torch\.sparse_csr\)",
    ),
    "meta": (
        lambda: with_weight(lambda weight: weight.to("meta")),
        r"mine: blocks\.0\.mlp\.fc1\.weight is on the meta device",
    ),
    "meta buffer": (
        lambda: with_buffer(True),
        r"mine: blocks\.1\.mask is on the meta device",
    ),
    "meta buffer that is not saved": (
        lambda: with_buffer(False),
        r"mine: blocks\.1\.mask is on the meta device",
    ),
    "nested": (
        lambda: with_nested_buffer(torch.strided),
        r"mine: blocks\.1\.lengths is a nested tensor",
    ),
    "nested, jagged": (
        lambda: with_nested_buffer(torch.jagged),
        r"mine: blocks\.1\.lengths is a nested tensor",
    ),
    "lazy": (with_lazy_head, r"mine: head\.weight has no shape yet"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_weights_without_plain_values_are_one_line(case: str) -> None:
    make, line = UNREADABLE[case]
    with pytest.raises(ModelError, match=line) as error:
        model_from_module(make(), TRANSFORM, name="mine")
    assert "\n" not in str(error.value)


def test_extra_state_of_a_layer_is_no_weight() -> None:
    class Layer(nn.LayerNorm):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 2}

    module = vit()
    digest = hash_weights(module)
    module.norm = Layer(DIM)
    module.norm.load_state_dict(
        {**vit().norm.state_dict(), "_extra_state": {}}, strict=False
    )
    assert model_from_module(module, TRANSFORM, name="mine").weights["sha256"] == digest
