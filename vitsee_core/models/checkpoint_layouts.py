"""Layouts of published checkpoints, told by their keys, and what belongs to them: normalisation,
crop, and arguments of the architecture that the shapes of tensors do not show.

Nothing depends on a file's name. Layouts that other files may share are not `sure`: what follows
from them is assumed, which is said and recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Mean and standard deviation of RGB from 0 to 1.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CLIP_IMAGES = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
WRAPPERS = ("module", "_orig_mod", "model", "backbone")
CROPPED = 224 / 256  # resize to 256, centre crop of 224: what most publications evaluate with
MOCO_SMALL, MOCO_HEADS = 384, 12


@dataclass(frozen=True)
class Layout:
    """A published layout and the preprocessing that its authors evaluate with.

    normalisation: mean and standard deviation of the channels. whole_above: inputs with more rows
    than this are whole images (crop_pct 1), smaller ones are cropped by `CROPPED`. crop_mode: None
    for the architecture's own. args: of timm's create_model. sure: whether no other file has this
    layout.
    """

    name: str
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET
    interpolation: str = "bicubic"
    whole_above: float = float("inf")
    crop_mode: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    sure: bool = True

    def preprocessing(self, rows: int) -> dict[str, Any]:
        """mean, std, interpolation, crop_pct and where it is known crop_mode of inputs of so many
        rows."""
        mean, std = self.normalisation
        crop = 1.0 if rows > self.whole_above else CROPPED
        own = {"mean": mean, "std": std, "interpolation": self.interpolation, "crop_pct": crop}
        return own if self.crop_mode is None else {**own, "crop_mode": self.crop_mode}


# Sources: the evaluation transforms of the authors' repositories.
DINO = Layout("DINO")
DINOV2 = Layout("DINOv2", whole_above=224)
# Its models of satellite images have the same keys and another normalisation. Some of its models
# have biases of queries and values, which timm's architectures without `qkvb` would leave out.
DINOV3 = Layout("DINOv3", whole_above=224, args={"qkv_bias": True}, sure=False)
MAE = Layout("MAE", whole_above=224)
MOCO = Layout("MoCo v3", interpolation="bilinear")
DEIT = Layout("DeiT")
DEIT3 = Layout("DeiT III", whole_above=0, sure=False)
ENCODER = Layout("DINO's or MAE's encoder", sure=False)
BEIT = Layout(
    "BEiT",
    HALF,
    whole_above=383,
    args={"use_shared_rel_pos_bias": True, "use_rel_pos_bias": False, "global_pool": "token"},
)
BEIT2 = replace(BEIT, name="BEiT v2", normalisation=IMAGENET)
CLIP = Layout("CLIP", CLIP_IMAGES, whole_above=0, sure=False)
SIGLIP = Layout("SigLIP", HALF, whole_above=0, crop_mode="squash", sure=False)
QUICK_GELU = {"act_layer": "quick_gelu"}


def recognise(content: Mapping[str, Any], key: str, state: Mapping[str, Any]) -> Layout | None:
    """The layout of a file, None for one that is not known; key: of the state dict that is taken,
    "" for the file itself."""
    for name in state:
        if ".base_encoder." in f".{name}" and any("predictor." in x for x in state):
            return _moco(state)
        if ".visual." in f".{name}":
            return _clip(state)
    names = {_bare(name): x for name, x in state.items()}
    if {"storage_tokens", "rope_embed.periods", "blocks.0.attn.qkv.weight"} <= names.keys():
        return DINOV3 if "blocks.0.attn.qkv.bias" in names else replace(DINOV3, args={})
    if "mask_token" in names:
        return _masked(names)
    if {"student", "teacher"} <= content.keys():
        return DINO if any(x.startswith(("head.mlp.", "head.last_layer.")) for x in names) else None
    if not {"cls_token", "pos_embed", "blocks.0.attn.qkv.weight"} <= names.keys():
        return None
    if {"dist_token", "head_dist.weight"} <= names.keys():
        return DEIT
    if not any(name.startswith(("head.", "fc_norm.")) for name in names):
        return ENCODER if not _scaled(names) else None
    if key == "model" and len(content) == 1:
        return DEIT3 if _scaled(names) else replace(DEIT, sure=False)
    return None


def _bare(name: str) -> str:
    """A tensor's name without wrappers around the model."""
    words = name.split(".")
    while len(words) > 1 and words[0] in WRAPPERS:
        words = words[1:]
    return ".".join(words)


def _scaled(names: Mapping[str, Any]) -> bool:
    return "blocks.0.gamma_1" in names or "blocks.0.ls1.gamma" in names


def _masked(names: Mapping[str, Any]) -> Layout | None:
    """The layout of models that were trained on masked images."""
    if {"decoder_embed.weight", "decoder_pos_embed"} <= names.keys():
        return MAE
    if "rel_pos_bias.relative_position_bias_table" in names:
        return BEIT2 if any(x.startswith("cls_pt_layers.") for x in names) else BEIT
    rotary = any(name.startswith("rope_embed.") for name in names)
    return DINOV2 if "blocks.0.ls1.gamma" in names and not rotary else None


def _moco(state: Mapping[str, Any]) -> Layout:
    """The layout of MoCo v3, whose ViT-S has 12 heads of 32 channels (Chen et al. 2021, Table 1),
    timm's has 6 of 64."""
    widths = set(_sizes(state, "base_encoder.patch_embed.proj.weight"))
    small = widths == {MOCO_SMALL}
    return replace(MOCO, args={"num_heads": MOCO_HEADS}) if small else MOCO


def _clip(state: Mapping[str, Any]) -> Layout | None:
    """OpenAI's own files hold three sizes beside the weights, and their transformers compute
    QuickGELU; others of this layout compute it or GELU. SigLIP's as open_clip keeps them have the
    bias of the sigmoid loss, and a timm model as the image's tower."""
    names = {_bare(name) for name in state}
    if "logit_bias" in names and any(name.startswith("visual.trunk.") for name in names):
        return SIGLIP
    if "token_embedding.weight" not in names or "logit_bias" in names:
        return None
    if not {"input_resolution", "context_length", "vocab_size"} <= names:
        return CLIP
    args = QUICK_GELU if "visual.class_embedding" in names else {}
    return replace(CLIP, name="OpenAI's CLIP", args=args, sure=True)


def _sizes(state: Mapping[str, Any], ending: str) -> Iterator[int]:
    return (int(x.shape[0]) for name, x in state.items() if name.endswith(ending))
