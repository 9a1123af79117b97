"""The same weights in timm and in transformers: where do the libraries compute the same?

    python examples/two_libraries.py            # five models of two blocks in their own widths
    python examples/two_libraries.py --tiny     # the same, narrow: seconds

Random weights are drawn once per model and written as two files, each with one library's names.
Both libraries run over the same images into stores, whose sites have the same names. Each site's
largest difference is given beside the largest value there; then one setting is changed, and what is
left of the difference says whether that was the cause.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import vitsee
from vitsee_stores import Store

SITES = (
    "embed",
    "blocks.0.attn.branch",
    "blocks.0.mlp.branch",
    "blocks.0.out",
    "blocks.1.out",
)
DEPTH, IMAGES = 2, 4
SAME = 1e-4  # of the largest value: float32 in another order of additions stays below
TINY = {"width": 48, "heads": 3}

# A tensor's name in transformers -> in timm, each rule in turn.
RENAMES = (
    (r"^embeddings\.(cls_token|class_embedding)$", "cls_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.position_embeddings?(\.weight)?$", "pos_embed"),
    (r"^embeddings\.patch_embeddings?\.(projection\.)?", "patch_embed.proj."),
    (r"^pre_layrnorm\.", "norm_pre."),
    (r"^(encoder\.|model\.)?layers?\.(\d+)\.", r"blocks.\2."),
    (r"\.(self_attn|attention)\.(attention\.)?", ".attn."),
    (r"\.(out_proj|o_proj)\.", ".proj."),
    (r"\.(layernorm_before|layer_norm1)\.", ".norm1."),
    (r"\.(layernorm_after|layer_norm2)\.", ".norm2."),
    (r"\.up_proj\.", ".fc1."),
    (r"\.down_proj\.", ".fc2."),
    (r"^(layernorm|post_layernorm)\.", "norm."),
)
LEFT_OUT = ("mask_token", "pooler.", "head.")  # what timm's tower does not have


@dataclass(frozen=True)
class Side:
    """One library's settings. name: of the model; "" for the pair's. args: of the model. size: of
    the input; None for the pair's."""

    name: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    size: int | None = None


@dataclass(frozen=True)
class Pair:
    """A model in both libraries.

    Attributes:
        timm, ours: names in timm, and the class in transformers.
        config: of the class, as its published checkpoints have it.
        size: of the input in pixels, (wide, tiny).
        scale: LayerScale's name in timm, and `{}` for the sublayer.
        changes: what is changed for the next row, and the settings of timm and of transformers.
    """

    title: str
    timm: str
    kind: str
    config: Mapping[str, Any]
    size: tuple[int, int]
    changes: tuple[tuple[str, Side, Side], ...] = ()
    scale: str = "ls{}.gamma"
    tiny: Mapping[str, Any] = field(default_factory=dict)


PAIRS = (
    Pair(
        "ViT-B/16",
        "vit_base_patch16_224",
        "ViTModel",
        {"layer_norm_eps": 1e-12},
        (224, 64),
        (("LayerNorm's eps 1e-6 in both", Side(), Side(args={"layer_norm_eps": 1e-6})),),
        tiny={"pooler_output_size": TINY["width"]},
    ),
    Pair(
        "DINOv2-S/14 at 224",
        "vit_small_patch14_dinov2",
        "Dinov2Model",
        {"hidden_size": 384, "num_attention_heads": 6, "image_size": 518},
        (224, 70),
        (("at 518, the size of its position table", Side(size=518), Side(size=518)),),
        tiny={"image_size": 126},
    ),
    Pair(
        "DINOv3-S/16",
        "vit_small_patch16_dinov3",
        "DINOv3ViTModel",
        {"num_register_tokens": 4},
        (224, 64),
        (
            (
                "with biases of q and v (dinov3_qkvb)",
                Side("vit_small_patch16_dinov3_qkvb"),
                Side(),
            ),
            ("and one table of rotations (RoPE)", Side(f"{__file__}:rotated"), Side()),
        ),
        scale="gamma_{}",
    ),
    Pair(
        "CLIP-B/32",
        "vit_base_patch32_clip_224",
        "CLIPVisionModel",
        {},
        (224, 128),
        (
            (
                "QuickGELU in both (clip_quickgelu)",
                Side("vit_base_patch32_clip_quickgelu_224"),
                Side(),
            ),
        ),
    ),
    Pair(
        "SigLIP-B/16",
        "vit_base_patch16_siglip_gap_224",
        "SiglipVisionModel",
        {"vision_use_head": False},
        (224, 64),
        (("GELU by tanh in both", Side(args={"act_layer": "gelu_tanh"}), Side()),),
    ),
)


def rotated(
    depth: int,
    embed_dim: int = 384,
    num_heads: int = 6,
    img_size: int = 224,
    num_classes: int = 0,
) -> nn.Module:
    """timm's DINOv3 with the table of rotations that transformers computes; vitsee builds it as any
    user's own file, from the name `two_libraries.py:rotated`."""
    args: dict[str, Any] = {
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "img_size": img_size,
    }
    module: Any = timm.create_model(
        "vit_small_patch16_dinov3_qkvb", depth=depth, num_classes=num_classes, **args
    )
    kind: Any = transformers.DINOv3ViTModel
    config = kind.config_class(
        hidden_size=embed_dim, num_attention_heads=num_heads, num_hidden_layers=1
    )
    table = kind(config).eval().rope_embeddings  # in training it draws scales

    def get_embed(*_: Any, **__: Any) -> torch.Tensor:
        cos, sin = table(torch.zeros(1, 3, img_size, img_size))
        return torch.cat([sin, cos], -1)

    module.rope.get_embed = get_embed
    return module  # type: ignore[no-any-return]


def config_of(pair: Pair, tiny: bool) -> dict[str, Any]:
    """The arguments of the class in transformers."""
    found = {**pair.config, "num_hidden_layers": DEPTH}
    if tiny:
        width, heads = TINY["width"], TINY["heads"]
        found |= {
            "hidden_size": width,
            "num_attention_heads": heads,
            "image_size": pair.size[1],
        }
        kind = getattr(transformers, pair.kind)
        if hasattr(kind.config_class(), "intermediate_size"):
            found["intermediate_size"] = 4 * width
        found |= pair.tiny
    return found


def draw(pair: Pair, tiny: bool) -> dict[str, torch.Tensor]:
    """Weights with transformers' names, all of them at random and large enough to matter."""
    kind = getattr(transformers, pair.kind)
    config = kind.config_class(**config_of(pair, tiny))
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, x in kind(config).state_dict().items():
        if not x.is_floating_point():
            continue
        noise = torch.randn(x.shape, generator=generator)
        scale = 1 / np.sqrt(x[0].numel()) if x.ndim > 1 else 0.2
        found[name] = noise * scale + (
            1.0 if x.ndim == 1 and name.endswith("weight") else 0.0
        )
        if "embeddings" in name and x.ndim != 4 and not name.endswith("bias"):
            found[name] = noise
    return found


def renamed(state: Mapping[str, torch.Tensor], scale: str) -> dict[str, torch.Tensor]:
    """The same weights with timm's names; q, k and v as one."""
    found: dict[str, torch.Tensor] = {}
    for name, x in state.items():
        if any(part in name for part in LEFT_OUT):
            continue
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        name = re.sub(r"layer_scale(\d)\.lambda1", lambda m: scale.format(m[1]), name)
        found[name] = (
            x.reshape(1, -1, x.shape[-1]) if name in ("cls_token", "pos_embed") else x
        )
    for block in range(DEPTH):
        at = f"blocks.{block}.attn."
        parts = [found.pop(f"{at}{letter}_proj.weight") for letter in "qkv"]
        found[f"{at}qkv.weight"] = torch.cat(parts)
        biases = [found.pop(f"{at}{letter}_proj.bias", None) for letter in "qkv"]
        if all(bias is not None for bias in biases):
            found[f"{at}qkv.bias"] = torch.cat(
                [bias for bias in biases if bias is not None]
            )
        else:
            found[f"{at}q_bias"], found[f"{at}v_bias"] = biases[0], biases[2]  # type: ignore[assignment]
    return found


def stores(
    pair: Pair, changed: tuple[Side, Side], tiny: bool, folder: Path
) -> tuple[Store, Store]:
    """The model run by timm and by transformers."""
    folder.mkdir()
    state = draw(pair, tiny)
    theirs, ours = changed
    name = theirs.name or pair.timm
    files = {"timm": renamed(state, pair.scale), "transformers": state}
    if name == "vit_small_patch16_dinov3":  # it has no such biases
        files["timm"] = {
            k: x for k, x in files["timm"].items() if not k.endswith(("q_bias", "v_bias"))
        }
    for library, tensors in files.items():
        save_file(
            {k: x.contiguous() for k, x in tensors.items()},
            folder / f"{library}.safetensors",
        )
    config = config_of(pair, tiny) | dict(ours.args)
    args: dict[str, Any] = {"depth": DEPTH, "num_classes": 0, **theirs.args}
    if tiny:
        args |= {"embed_dim": TINY["width"], "num_heads": TINY["heads"]}
    table = int(config.get("image_size", 0))
    size = pair.size[tiny] if theirs.size is None else (table or theirs.size)
    models = {"timm": (name, args), "transformers": (f"transformers:{pair.kind}", config)}
    found = [
        vitsee.extract(
            model,
            "demo:test",
            folder / f"{library}.zarr",
            checkpoint=folder / f"{library}.safetensors",
            model_args=own,
            images=IMAGES,
            sites=SITES,
            dtype="float32",
            img_size=size,
            img_mean=(0.5,) * 3,
            img_std=(0.5,) * 3,
            crop_pct=1.0,
            crop_mode="squash",
        )
        for library, (model, own) in models.items()
    ]
    return found[0], found[1]


def difference(a: Store, b: Store, site: str) -> tuple[float, float]:
    """The largest difference, and the largest value."""
    x, y = (store.acts(site)[:].astype(np.float64) for store in (a, b))
    return float(np.abs(x - y).max()), float(max(np.abs(x).max(), np.abs(y).max()))


def in_words(gap: float, largest: float) -> str:
    """Bit for bit, equal to so many digits, or by how much it differs."""
    if gap == 0:
        return "bit for bit"
    if gap <= SAME * largest:
        return f"{int(-np.log10(gap / largest))} digits"
    return f"{gap:.2g} of {largest:.2g}"


def measure(tiny: bool, folder: Path) -> list[list[str]]:
    """A row per model and change: the model, what was changed, and each site in words."""
    rows = []
    for pair in PAIRS:
        changes = (("as published", Side(), Side()), *pair.changes)
        for number, (what, *changed) in enumerate(changes):
            place = folder / f"{pair.kind}{number}"
            a, b = stores(pair, (changed[0], changed[1]), tiny, place)
            rows.append(
                [pair.title, what, *(in_words(*difference(a, b, s)) for s in SITES)]
            )
    return rows


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="narrow models and small images"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(given.tiny, Path(folder))
    header = ["model", "settings", *(f"`{site}`" for site in SITES)]
    print(f"| {' | '.join(header)} |", "|---" * len(header) + "|", sep="\n")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
