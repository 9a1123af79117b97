"""The classifier as stores keep it, against the model's own logits and by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.extractions import extract, extracted, plant_images
from tests.models_helpers import VIT, captured, images, small
from vitsee_core.extraction import small_weights as keeping
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.weights import HeadWeights, stored_classifier
from vitsee_core.models.weights.classifier import (
    TOLERANCE,
    classifier_of,
    find_classifier,
)
from vitsee_stores import open_store
from vitsee_stores.errors import MissingInput
from vitsee_stores.layout import TokenLayout

CASES: dict[str, tuple[str, Any, dict[str, Any], tuple[str, str, str, bool]]] = {
    # architecture, input size, arguments: site, pooling, norm, norm before pooling
    "class token": (
        "vit_tiny_patch16_224",
        32,
        VIT,
        ("blocks.2.out", "cls", "layer", True),
    ),
    "mean, then fc_norm": (
        *("vit_tiny_patch16_224", (32, 48), {**VIT, "global_pool": "avg"}),
        ("blocks.2.out", "mean", "layer", False),
    ),
    "norm, then mean": (
        *("vit_tiny_patch16_224", 32, {**VIT, "global_pool": "avg", "fc_norm": False}),
        ("blocks.2.out", "mean", "layer", True),
    ),
    "all tokens": (
        *(
            "vit_tiny_patch16_224",
            32,
            {**VIT, "global_pool": "avg", "fc_norm": False, "pool_include_prefix": True},
        ),
        ("blocks.2.out", "mean-all", "layer", True),
    ),
    "registers": (
        "vit_small_patch14_reg4_dinov2",
        32,
        VIT,
        ("blocks.2.out", "cls", "layer", True),
    ),
    "resnet": ("test_resnet", 64, {}, ("layer4.0.out", "mean", "none", True)),
    "mixer": ("mixer_s32_224", 96, {}, ("blocks.7.out", "mean", "layer", True)),
    "convnext": (
        "convnext_atto",
        96,
        {},
        ("stages.3.blocks.1.out", "mean", "layer", False),
    ),
    "after the blocks": ("mobilenetv3_small_050", 64, {}, ("act2", "mean", "none", True)),
    "batch norm": (
        *("levit_128s", 224, {"distilled": False}),
        ("stages.2.blocks.3.out", "mean", "affine", True),
    ),
}


def found(model: LoadedModel) -> HeadWeights:
    head = find_classifier(model, site_table(model))
    assert isinstance(head, HeadWeights), head
    return head


def loop_logits(
    head: HeadWeights, tokens: NDArray[Any], layout: TokenLayout
) -> list[float]:
    """One image's logits with nothing but loops."""
    body = [list(map(float, t)) for t in tokens[layout.n_prefix :]]
    everything = [list(map(float, t)) for t in tokens]

    def norm(x: list[float]) -> list[float]:
        mean = sum(x) / len(x) if head.norm == "layer" else 0.0
        variance = sum((v - mean) ** 2 for v in x) / len(x)
        scale = (
            1 / math.sqrt(variance + head.eps) if head.norm in ("layer", "rms") else 1.0
        )
        out = [(v - mean) * scale for v in x]
        for name in ("head_norm_scale", "head_norm_bias"):
            own = head.arrays.get(name)
            for i, v in enumerate(out):
                if own is not None:
                    out[i] = (
                        v * float(own[i])
                        if name == "head_norm_scale"
                        else v + float(own[i])
                    )
        return out

    def average(rows: list[list[float]]) -> list[float]:
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    if head.norm_first:
        body, everything = [norm(x) for x in body], [norm(x) for x in everything]
    assert layout.cls is not None or head.pool != "cls"
    pooled = {
        "cls": lambda: everything[layout.cls or 0],
        "mean": lambda: average(body),
        "mean-all": lambda: average(everything),
    }[head.pool]()
    pooled = pooled if head.norm_first else norm(pooled)
    bias = head.arrays.get("head_bias", np.zeros(len(head.arrays["head_kernel"])))
    return [
        sum(float(w) * v for w, v in zip(row, pooled, strict=True)) + float(b)
        for row, b in zip(head.arrays["head_kernel"], bias, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_give_the_models_own_logits(case: str) -> None:
    name, size, args, expected = CASES[case]
    model = small(name, size, **{**args, "num_classes": 7})
    if case == "mixer":  # timm begins with a head of zeros
        drawn = torch.Generator().manual_seed(0)
        torch.nn.init.normal_(model.module.head.weight, generator=drawn)  # type: ignore[arg-type,union-attr]
    head = found(model)
    assert (head.site, head.pool, head.norm, head.norm_first) == expected
    assert head.error <= 1e-6 and head.arrays["head_kernel"].shape[0] == 7
    assert all(x.dtype == np.float32 for x in head.arrays.values())
    # On other images than those it was found on.
    x, table = images(model), site_table(model)
    site = table[head.site]
    keeper = captured(model, table, x, sites=[site])
    own = keeper.output.double().numpy()
    tokens = keeper.tokens(head.site).double().numpy()
    assert site.layout is not None
    # Roundings grow with the logits: as in `find_classifier`, a part of the largest less its bias.
    scale = np.abs(own - head.arrays.get("head_bias", 0.0)).max()
    np.testing.assert_allclose(
        head.logits(tokens, site.layout), own, rtol=0, atol=TOLERANCE * scale
    )
    by_loops = loop_logits(head, tokens[0], site.layout)
    np.testing.assert_allclose(head.logits(tokens, site.layout)[0], by_loops, rtol=1e-10)


def test_by_hand() -> None:
    """Of (1, 3) the norm is (-1, 1) / sqrt(1 + 3) = (-0.5, 0.5), times (2, 4) plus (1, 0)."""
    arrays = {
        "head_kernel": np.array([[1, 1], [2, -1]], np.float32),
        "head_bias": np.array([0, 10], np.float32),
        "head_norm_scale": np.array([2, 4], np.float32),
        "head_norm_bias": np.array([1, 0], np.float32),
    }
    head = HeadWeights(arrays, "x", "cls", "layer", 3.0, True)
    layout = TokenLayout(("cls",), (1, 2))
    tokens = np.array([[[1, 3], [9, 9], [7, 5]]], np.float32)
    assert head.logits(tokens, layout).tolist() == [[2.0, 8.0]]
    assert head.of_tokens(tokens[0, 0]).tolist() == [2.0, 8.0]
    # rms with eps 3 of (1, 3): mean square 5, so over sqrt(8)
    rms = HeadWeights(
        {"head_kernel": np.eye(2, dtype=np.float32)}, "x", "mean", "rms", 3.0, False
    )
    means = np.array([[[5, 5], [0, 2], [2, 4]]], np.float32)  # patches: mean (1, 3)
    expected = [1 / math.sqrt(8), 3 / math.sqrt(8)]
    np.testing.assert_allclose(rms.logits(means, layout), [expected], rtol=1e-15)
    largest = HeadWeights(
        {"head_kernel": np.eye(2, dtype=np.float32)}, "x", "max", "none", 0, True
    )
    assert largest.logits(means, layout).tolist() == [[2.0, 4.0]]
    all_tokens = HeadWeights(rms.arrays, "x", "mean-all", "none", 0.0, True)
    np.testing.assert_allclose(
        all_tokens.logits(means, layout), [[7 / 3, 11 / 3]], rtol=1e-15
    )


REFUSED: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "zeros": ("mixer_s32_224", 64, {"num_classes": 5}, "the same for every image"),
    "attention pooling": (
        *("vit_base_patch16_siglip_224", 32, {**VIT, "num_classes": 5}),
        "the logits are not head(norm(pool)) of a late site's tokens",
    ),
    "distilled": ("deit_tiny_distilled_patch16_224", 32, VIT, "2 classifiers"),
    "headless": (
        "vit_tiny_patch16_224",
        32,
        {**VIT, "num_classes": 0},
        "has no classifier",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_other_classifiers_are_refused(case: str) -> None:
    name, size, args, phrase = REFUSED[case]
    model = small(name, size, **args)
    table = site_table(model)
    reason = find_classifier(model, table)
    assert isinstance(reason, str) and phrase in reason
    assert case == "attention pooling" or classifier_of(model) == reason


@pytest.mark.parametrize("args", [{}, {"pool_include_prefix": True}, {"fc_norm": True}])
def test_attention_pooling_is_the_models_modules(args: dict[str, Any]) -> None:
    own = {**VIT, "num_classes": 5, "global_pool": "map", **args}
    model = small("vit_tiny_patch16_224", (32, 48), **own)
    head, table = classifier_of(model), site_table(model)
    assert not isinstance(head, str), head
    assert (head.site, head.pool, head.n_classes) == ("blocks.2.out", "attention", 5)
    assert head.pooled_kind is None
    assert head.width == table[head.site].dim
    x, site = images(model), table[head.site]
    keeper = captured(model, table, x, sites=[site])
    logits, tokens = (
        keeper.output.double().numpy(),
        keeper.tokens(head.site).double().numpy(),
    )
    assert site.layout is not None
    np.testing.assert_allclose(
        head.logits(tokens, site.layout), logits, rtol=0, atol=1e-5
    )
    by_loops = attention_logits(model.module, tokens[0], site.layout, args)
    np.testing.assert_allclose(
        head.logits(tokens, site.layout)[0], by_loops, rtol=0, atol=1e-5
    )
    # A token by itself: attention over one token is that token's value, whatever the query.
    alone = head.of_tokens(tokens[:, 3:5])
    no_prefix = TokenLayout((), (1, 1))
    for at in (0, 1):
        expected = attention_logits(
            model.module, tokens[1, 3 + at][None], no_prefix, args
        )
        np.testing.assert_allclose(alone[1, at], expected, rtol=0, atol=1e-5)


def attention_logits(
    module: Any, tokens: NDArray[Any], layout: TokenLayout, args: dict[str, Any]
) -> NDArray[Any]:
    """One image's, head by head in float64 (AttentionPoolLatent with one learned query)."""
    pool = module.attn_pool

    def linear(layer: Any, x: NDArray[Any]) -> NDArray[Any]:
        weight, bias = (
            layer.weight.detach().double().numpy(),
            layer.bias.detach().double().numpy(),
        )
        return x @ weight.T + bias

    def norm(layer: Any, x: NDArray[Any]) -> NDArray[Any]:
        if isinstance(layer, torch.nn.Identity):
            return x
        scale, shift = (
            layer.weight.detach().double().numpy(),
            layer.bias.detach().double().numpy(),
        )
        rest = x - x.mean(-1, keepdims=True)
        return rest / np.sqrt(x.var(-1, keepdims=True) + layer.eps) * scale + shift

    x = norm(module.norm, tokens)
    x = x if args.get("pool_include_prefix") else x[layout.n_prefix :]
    query = linear(pool.q, pool.latent.detach().double().numpy()[0, 0])
    both = linear(pool.kv, x)
    keys, values = np.split(both, 2, axis=-1)
    out = []
    for q, k, v in zip(
        np.split(query, pool.num_heads),
        np.split(keys, pool.num_heads, axis=1),
        np.split(values, pool.num_heads, axis=1),
        strict=True,
    ):
        weights = np.exp(k @ q / math.sqrt(len(q)))
        out.append(weights @ v / weights.sum())
    pooled = linear(pool.proj, np.concatenate(out))
    inner = linear(pool.mlp.fc1, norm(pool.norm, pooled))
    gelu = inner * 0.5 * (1 + np.array([math.erf(t / math.sqrt(2)) for t in inner]))
    pooled = pooled + linear(pool.mlp.fc2, gelu)
    return linear(module.head, norm(module.fc_norm, pooled))


OWN = [
    "test_vit",
    "--random-init",
    "0",
    "--img-size",
    "32x48",
    "--model-arg",
    "patch_size=8",
]
CLASSES = ["--model-arg", "num_classes=5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("head") / "data", 3)


@pytest.mark.slow
def test_a_store_keeps_it(folder: Path, tmp_path: Path) -> None:
    options = ["--data", folder, "--dtype", "float32"]
    extracted(*OWN, *CLASSES, *options, "-o", tmp_path / "s.zarr")
    store = open_store(tmp_path / "s.zarr")
    head = stored_classifier(store)
    layout = store.layout(head.site)
    assert layout is not None and (head.pool, head.norm) == ("cls", "layer")
    assert store.weights("head_kernel").shape == (5, 64)
    logits = head.logits(store.acts(head.site)[:], layout)
    np.testing.assert_allclose(logits, store.vectors("logits")[:], rtol=0, atol=1e-5)
    with pytest.raises(MissingInput, match="has no weights nothing"):
        store.weights("nothing")


@pytest.mark.slow
def test_a_large_one_is_kept_on_request(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "MAX_HEAD_BYTES", 5 * 64 * 4)
    base = [*OWN, *CLASSES, "--data", folder, "--tokens", "pooled"]
    said = extracted(*base, "-o", tmp_path / "a.zarr").stderr
    assert "the classifier's weights are not kept: it takes" in said
    store = open_store(tmp_path / "a.zarr")
    assert not store.has("weights/head_kernel") and store.has("weights/filters")
    for read in (stored_classifier, lambda s: s.weights("head_kernel")):
        with pytest.raises(
            MissingInput, match=r"it takes .* \(extract --head-weights keeps it\)"
        ):
            read(store)
    extracted(*base, "--head-weights", "-o", tmp_path / "b.zarr")
    assert stored_classifier(open_store(tmp_path / "b.zarr")).arrays[
        "head_kernel"
    ].shape == (5, 64)
    again = extract(*base, "--head-weights", "-o", tmp_path / "a.zarr")
    assert again.exit_code == 1 and "head_weights is null, given true" in again.stderr
    extracted(*base, "--no-head-weights", "-o", tmp_path / "c.zarr")
    with pytest.raises(MissingInput, match="not asked for"):
        stored_classifier(open_store(tmp_path / "c.zarr"))


def test_one_that_is_asked_for_and_cannot_be_had(folder: Path, tmp_path: Path) -> None:
    headless = [*OWN, "--model-arg", "num_classes=0", "--data", folder]
    result = extract(*headless, "--head-weights", "-o", tmp_path / "s.zarr")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "--head-weights is not supported: the model has no classifier" in result.stderr
    assert not (tmp_path / "s.zarr").exists()
