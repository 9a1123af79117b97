"""Weights from a checkpoint file: which tensors in it are the model's, do they fit, and which
published layout they have.

Files of DINO, MoCo-v3, MAE, CLIP, BEiT, of training loops that wrap the model, and timm's own
differ in the key of the tensors and in the prefix of their names. Both are found from the model's
own tensor names; renaming and resampling of position tables is the source's.

Layouts of published checkpoints are recognised by their keys, never by a file's name. A layout
brings what belongs to it: normalisation, crop, and arguments of the architecture that the shapes of
tensors do not show. Layouts that other files may share are not `sure`: what follows from them is
assumed, which is said and recorded.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import some
from vitsee_core.models.survey.structure import classifier_prefixes
from vitsee_core.models.weights.checkpoint_files import read_file

# Which of several state dicts in a file, or of several copies of the model in one, is taken: the
# one its authors evaluate. Averaged weights (EMA) are taken only where a file has nothing else.
KEY_ORDER = ("state_dict", "model", "model_state_dict", "teacher", "student", "encoder")
COPY_ORDER = ("teacher", "base_encoder", "student", "momentum_encoder")

State = dict[str, Tensor]
# Mean and standard deviation of RGB from 0 to 1.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CLIP_IMAGES = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
WRAPPERS = ("module", "_orig_mod", "model", "backbone")
CROPPED = 224 / 256  # resize to 256, centre crop of 224: what most publications evaluate with
MOCO_SMALL, MOCO_HEADS = 384, 12


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a file, before they are a model's.

    key: of the file's state dict, "" if the file is that itself. others: keys of the others.
    layout: of a known publication, which says how its images are prepared; None for other files.
    """

    path: Path
    key: str
    state: State
    others: list[str]
    layout: Layout | None

    @classmethod
    def read(cls, path: Path, key: str | None = None) -> Checkpoint:
        """`key`, or `FILE#KEY`, names which of a file's state dicts to take.

        Raises:
            ModelError: an unreadable file, or none of these weights in it.
        """
        path, in_name = Path(path), None
        if "#" in path.name and not path.exists():
            file, _, in_name = path.name.rpartition("#")
            path = path.with_name(file)
        content = read_file(path)
        found, state, others = _state_dict(content, key if key is not None else in_name, path)
        whole = {str(name): x for name, x in content.items()}
        layout = recognise(whole, found, whole[found] if found else whole)
        return cls(path, found, state, others, layout)

    def put_into(
        self, model: nn.Module, convert: Callable[..., Any] | None = None
    ) -> dict[str, Any]:
        """Load the weights; only the classifier may be missing, and the counters of batches that
        older files lack. convert: see `Source.converter`.

        Comes back: file, key, other_keys, prefix (cut from the names), missing (the model's tensors
        that keep their random values), unexpected (the file's tensors that the model has no use
        for, those under another prefix summed up as "prefix.* (n)") and, where there are any,
        resampled (tensors of another size in the file, position tables above all).

        Raises:
            ModelError: the weights do not fit; names what is missing or left over.
        """
        model_keys = set(model.state_dict())
        prefix = _prefix(self.state, model_keys)
        kept = {name[len(prefix) :]: x for name, x in self.state.items() if name.startswith(prefix)}
        others = [name for name in self.state if prefix and not name.startswith(prefix)]
        filtered = _filtered(model, kept, self.path, convert)
        missing, unexpected = _fit(model, filtered, self.path)
        renamed = not set(kept) & set(filtered)
        unexpected += [name for name in kept if not renamed and name not in filtered]
        unexpected += [f"{top}.* ({n})" for top, n in Counter(map(_top, others)).items()]
        resampled = _resampled(kept, filtered)
        return {
            "file": self.path.name,
            "key": self.key,
            "other_keys": self.others,
            "prefix": prefix,
            "missing": missing,
            "unexpected": unexpected,
            **({"resampled": resampled} if resampled else {}),
        }


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) for name in value)
        and sum(isinstance(x, Tensor) for x in value.values()) > len(value) / 2
    )


def _state_dict(content: Any, wanted: str | None, path: Path) -> tuple[str, State, list[str]]:
    """Key, tensors, and the keys of the other state dicts in the file."""
    if not isinstance(content, Mapping):
        raise ModelError(f"{path} holds a {type(content).__name__}; expected a dict of tensors")
    found = {str(key): value for key, value in content.items() if _is_state(value)}
    if wanted is not None and wanted not in found:
        held = ", ".join(found) or "none"
        if _is_state(content) and not found:
            raise ModelError(f"{path} is itself one state dict: leave out --checkpoint-key")
        raise ModelError(
            f"{path} has no state dict under {wanted!r} (--checkpoint-key); it has: {held}"
        )
    if wanted is None and _is_state(content) and not found:
        return "", {str(k): x for k, x in content.items() if isinstance(x, Tensor)}, []
    if not found:
        held = ", ".join(map(str, list(content)[:8])) or "nothing"
        raise ModelError(f"{path} holds no state dict; its keys are: {held}")
    names = sorted(found, key=lambda key: ("ema" in key.lower(), _place(key, KEY_ORDER)))
    key = wanted or names[0]
    tensors = {str(k): x for k, x in found[key].items() if isinstance(x, Tensor)}
    return key, tensors, [name for name in found if name != key]


def _place(name: str, order: tuple[str, ...]) -> int:
    return next((i for i, word in enumerate(order) if word in name), len(order))


def _top(name: str) -> str:
    """The word that names a copy or a part of a model in a file: the first that is no wrapper."""
    words = [word for word in name.split(".") if word not in ("module", "_orig_mod", "model")]
    return words[0] if words else name


def _prefix(state: State, model_keys: set[str]) -> str:
    """The prefix under which most of the model's own tensor names are found in the file."""
    counts: Counter[str] = Counter()
    for name in state:
        words = name.split(".")
        for n in range(len(words)):
            if ".".join(words[n:]) in model_keys:
                counts[".".join(words[:n]) + "." * bool(n)] += 1
                break
    # Foreign names (raw CLIP): only wrappers around everything can be recognised.
    wrapped = next(
        (p for p in ("module.", "_orig_mod.") if all(k.startswith(p) for k in state)), ""
    )
    if not counts or counts.most_common(1)[0][1] < len(model_keys) / 4:
        return wrapped
    most = max(counts.values())
    best = [prefix for prefix, n in counts.items() if n >= 0.9 * most]
    return min(best, key=lambda prefix: (_place(prefix, COPY_ORDER), len(prefix)))


def _filtered(
    model: nn.Module, state: State, path: Path, convert: Callable[..., Any] | None
) -> State:
    if convert is None:
        return dict(state)
    given: dict[str, Any] = {}
    if "adapt_layer_scale" in inspect.signature(convert).parameters:
        given["adapt_layer_scale"] = any("gamma_1" in name for name in state)
    try:
        converted: State = convert(dict(state), model, **given)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{path} cannot be converted for this model ({type(error).__name__}: {text}); "
            "expected weights of the same architecture"
        ) from error
    return {name: x for name, x in converted.items() if isinstance(x, Tensor)}


def _resampled(before: State, after: State) -> list[str]:
    """Tensors that the conversion gave another size, as "NAME (shape) to (shape)"."""
    counts = {x.numel() for name, x in before.items() if "pos" in name}
    found = []
    for name, x in after.items():
        if name in before:
            if before[name].numel() != x.numel():
                found.append(f"{name} {tuple(before[name].shape)} to {tuple(x.shape)}")
        elif "pos" in name and x.numel() not in counts:
            found.append(f"{name} to {tuple(x.shape)}")
    return found


def _fit(model: nn.Module, state: State, path: Path) -> tuple[list[str], list[str]]:
    """Load; what the model lacks (its classifier at most) and what it has no use for."""
    own = model.state_dict()
    heads = classifier_prefixes(model)
    sizes = {
        name: f"{tuple(x.shape)} for {tuple(own[name].shape)}"
        for name, x in state.items()
        if name in own and x.shape != own[name].shape
    }
    odd = [f"{name} {size}" for name, size in sizes.items() if not name.startswith(heads)]
    # What torch's own strict loading does without, too: nothing computes with it.
    counters = {name for name in own if name.rpartition(".")[2] == "num_batches_tracked"}
    missing = [name for name in own if name in sizes or name not in {*state, *counters}]
    lacking = [name for name in missing if not name.startswith(heads)]
    buffers = {name for name, _ in model.named_buffers()}
    extra = [name for name in state if name not in own and name not in buffers]
    inside = {name.partition(".")[0] for name, _ in model.named_parameters()}
    alien = [x for x in extra if x.partition(".")[0] in inside and not x.startswith(heads)]
    if lacking or odd or alien:
        problems = [
            f"{what} {len(found)} ({some(found)})"
            for what, found in (
                ("missing:", [n for n in lacking if n not in sizes]),
                ("of another size:", odd),
                ("left over:", alien or (extra if lacking else [])),
            )
            if found
        ]
        raise ModelError(
            f"{path} does not fit this model: {'; '.join(problems)}; expected all but the "
            "classifier: try another MODEL or --model-arg"
        )
    fitting = {name: x for name, x in state.items() if name in own and name not in sizes}
    model.load_state_dict(fitting, strict=False)
    return missing, extra + [f"{name} {size}" for name, size in sizes.items()]


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
