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

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError, some
from vitsee_core.models.weights.checkpoint_files import read_file
from vitsee_core.models.weights.fitting import State, fit
from vitsee_core.models.weights.names import WRAPPER_WORDS, is_averaged, without_wrappers
from vitsee_core.models.weights.positions import Resampling

# Which of several state dicts in a file, or of several copies of the model in one, is taken: the
# one its authors evaluate. Averaged weights (EMA) are taken only where a file has nothing else.
KEY_ORDER = ("state_dict", "model", "model_state_dict", "teacher", "student", "encoder")

# Mean and standard deviation of RGB from 0 to 1.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CLIP_IMAGES = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
WRAPPERS = WRAPPER_WORDS | {"model", "backbone"}
CROPPED = (
    224 / 256
)  # resize to 256, centre crop of 224: what most publications evaluate with
MOCO_SMALL = 384
MOCO_HEADS = 12


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a file, before they are a model's.

    key: of the file's state dict, "" if the file is that itself. others: keys of the others.
    layout: of a known publication, which says how its images are prepared; None for other files.
    is_part: the key is a prefix of names within a state dict; cut: that prefix, as in the file.
    """

    path: Path
    key: str
    state: State
    others: list[str]
    layout: Layout | None
    is_part: bool = False
    cut: str = ""

    @classmethod
    def read(cls, path: Path, key: str | None = None) -> Checkpoint:
        """`key`, or `FILE#KEY`, names which of a file's state dicts to take.

        Raises:
            ModelError: an unreadable file, or none of these weights in it.
        """
        path = Path(path)
        in_name = None
        if "#" in path.name and not path.exists():
            file, _, in_name = path.name.rpartition("#")
            path = path.with_name(file)
        content = read_file(path)
        chosen = _state_dict(content, key if key is not None else in_name, path)
        whole = {str(name): x for name, x in content.items()}
        layout = recognise(whole, chosen.key, chosen.uncut or chosen.state)
        return cls(
            path,
            chosen.key,
            chosen.state,
            chosen.others,
            layout,
            is_part=chosen.is_part,
            cut=chosen.cut,
        )

    def put_into(
        self,
        model: nn.Module,
        convert: Callable[..., Any] | None = None,
        resampling: Resampling | None = None,
    ) -> dict[str, Any]:
        """Load the weights, by the rule of `fitting`. convert: see `Source.converter`.

        Comes back: file, key, other_keys (of state dicts and copies that were not taken), prefix
        (cut from the names), missing (the model's tensors that keep their random values),
        unexpected (the file's tensors that the model has no use for, those under another prefix
        summed up as "prefix.* (n)") and, where there are any, resampled (tensors of another size
        in the file, position tables above all) and notes (what was assumed).

        Raises:
            ModelError: the weights do not fit; names what is missing or left over.
        """
        taken = fit(
            model,
            self.state,
            str(self.path),
            convert=convert,
            alone=self.is_part,
            resampling=resampling,
        )
        model.load_state_dict(taken.tensors, strict=False)
        label = ".".join(without_wrappers(taken.prefix.split(".")))
        record: dict[str, Any] = {
            "file": self.path.name,
            "key": self.key or (label if taken.copies else ""),
            "other_keys": [*self.others, *taken.copies],
            "prefix": self.cut + taken.prefix,
            "missing": taken.missing,
            "unexpected": taken.left_over,
        }
        if taken.resampled:
            record["resampled"] = taken.resampled
        if taken.notes:
            record["notes"] = taken.notes
        return record


@dataclass
class _Chosen:
    """A state dict of a file, as in `Checkpoint`. uncut: the one that a part is of."""

    key: str
    state: State
    others: list[str]
    is_part: bool = False
    cut: str = ""
    uncut: State | None = None


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) for name in value)
        and sum(isinstance(x, Tensor) for x in value.values()) > len(value) / 2
    )


def _state_dict(content: Any, wanted: str | None, path: Path) -> _Chosen:
    """The state dict that `wanted` names, or else the preferred one."""
    if not isinstance(content, Mapping):
        raise ModelError(
            f"{path} holds a {type(content).__name__}; expected a dict of tensors"
        )
    states = _state_dicts(content)
    if _is_state(content):
        states[""] = _tensors(content)
    most = max(map(len, states.values()), default=0)
    # Averaged weights only where there is nothing else, and a head's own state dict never first.
    ranked = sorted(
        states,
        key=lambda key: (len(states[key]) < most / 2, is_averaged(key), _place(key)),
    )
    if wanted is None:
        if not ranked:
            held = ", ".join(map(str, list(content)[:8])) or "nothing"
            raise ModelError(f"{path} holds no state dict; its keys are: {held}")
        key = ranked[0]
        others = [name for name in states if name and name != ranked[0]]
        return _Chosen(key, states[key], others)
    if wanted in states:
        return _Chosen(
            wanted, states[wanted], [name for name in states if name not in ("", wanted)]
        )
    for key in ranked:
        part = _below_prefix(states[key], key, wanted)
        if part is not None:
            return part
    held = ", ".join(name for name in states if name) or "none"
    if [*states] == [""]:
        tops = {name.split(".")[0]: None for name in states[""]}
        raise ModelError(
            f"{path} is itself one state dict without names below {wanted!r}: leave out "
            f"--checkpoint-key, or name a prefix of it; its names begin with: {some([*tops])}"
        )
    raise ModelError(
        f"{path} has no state dict under {wanted!r} (--checkpoint-key); it has: {held}"
    )


def preferred_state(content: Any, who: str) -> State:
    """The tensors of the state dict that is taken of a file's content.

    Raises:
        ModelError: about `who`: there is none.
    """
    return _state_dict(content, None, Path(who)).state


def _state_dicts(
    content: Mapping[Any, Any], above: str = "", depth: int = 2
) -> dict[str, State]:
    """Key -> tensors of each state dict in a file; "a.b" of one within another dict."""
    states: dict[str, State] = {}
    for name, value in content.items():
        key = f"{above}{name}"
        if _is_state(value):
            states[key] = _tensors(value)
        elif isinstance(value, Mapping) and depth > 1:
            states |= _state_dicts(value, f"{key}.", depth - 1)
    return states


def _tensors(content: Mapping[Any, Any]) -> State:
    return {str(name): x for name, x in content.items() if isinstance(x, Tensor)}


def _below_prefix(state: State, key: str, wanted: str) -> _Chosen | None:
    """The tensors of a state dict below the prefix `wanted`, which may begin with the state dict's
    own key; None without any."""
    prefix = wanted.removeprefix(f"{key}.") if key else wanted
    words = without_wrappers(prefix.split(".")) or [prefix]
    part: State = {}
    taken: set[str] = set()
    cut = ""
    for name, x in state.items():
        own = name.split(".")
        n = 0
        for word in words:
            while n < len(own) and own[n] != word and own[n] in WRAPPER_WORDS:
                n += 1
            n = n + 1 if n < len(own) and own[n] == word else len(own) + 1
        if n < len(own):
            part[".".join(own[n:])] = x
            taken.add(name)
            cut = ".".join(own[:n]) + "."
    if not part:
        return None
    beside = [name for name in state if name not in taken]
    tops = Counter((without_wrappers(name.split(".")) or [name])[0] for name in beside)
    others = [top for top, n in tops.items() if n >= len(part) / 2]
    return _Chosen(wanted, part, others, is_part=True, cut=cut, uncut=state)


def _place(name: str) -> int:
    """The place of a key in `KEY_ORDER`: the key itself before one that only has its words."""
    if name in KEY_ORDER:
        return KEY_ORDER.index(name)
    has = (i for i, word in enumerate(KEY_ORDER) if word in name)
    return len(KEY_ORDER) + next(has, len(KEY_ORDER))


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
        own = {
            "mean": mean,
            "std": std,
            "interpolation": self.interpolation,
            "crop_pct": crop,
        }
        if self.crop_mode is None:
            return own
        return {**own, "crop_mode": self.crop_mode}


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
    args={
        "use_shared_rel_pos_bias": True,
        "use_rel_pos_bias": False,
        "global_pool": "token",
    },
)
BEIT2 = replace(BEIT, name="BEiT v2", normalisation=IMAGENET)
CLIP = Layout("CLIP", CLIP_IMAGES, whole_above=0, sure=False)
SIGLIP = Layout("SigLIP", HALF, whole_above=0, crop_mode="squash", sure=False)
QUICK_GELU = {"act_layer": "quick_gelu"}


def recognise(
    content: Mapping[str, Any], key: str, state: Mapping[str, Any]
) -> Layout | None:
    """The layout of a file, None for one that is not known; key: of the state dict that is taken,
    "" for the file itself."""
    for name in state:
        if ".base_encoder." in f".{name}" and any("predictor." in x for x in state):
            return _moco(state)
        if ".visual." in f".{name}":
            return _clip(state)
    names = {_bare(name): x for name, x in state.items()}
    if {
        "storage_tokens",
        "rope_embed.periods",
        "blocks.0.attn.qkv.weight",
    } <= names.keys():
        if "blocks.0.attn.qkv.bias" in names:
            return DINOV3
        return replace(DINOV3, args={})
    if "mask_token" in names:
        return _masked(names)
    if {"student", "teacher"} <= content.keys():
        if any(x.startswith(("head.mlp.", "head.last_layer.")) for x in names):
            return DINO
        return None
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
        if any(x.startswith("cls_pt_layers.") for x in names):
            return BEIT2
        return BEIT
    rotary = any(name.startswith("rope_embed.") for name in names)
    if "blocks.0.ls1.gamma" in names and not rotary:
        return DINOV2
    return None


def _moco(state: Mapping[str, Any]) -> Layout:
    """The layout of MoCo v3, whose ViT-S has 12 heads of 32 channels (Chen et al. 2021, Table 1),
    timm's has 6 of 64."""
    widths = set(_sizes(state, "base_encoder.patch_embed.proj.weight"))
    small = widths == {MOCO_SMALL}
    if small:
        return replace(MOCO, args={"num_heads": MOCO_HEADS})
    return MOCO


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
