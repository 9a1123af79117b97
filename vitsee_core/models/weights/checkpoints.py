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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError, some
from vitsee_core.models.weights.checkpoint_files import read_file
from vitsee_core.models.weights.copies import Convert, State
from vitsee_core.models.weights.fitting import fit
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
# Resize to 256, centre crop of 224: what most publications evaluate with.
CROPPED = 224 / 256
MOCO_SMALL_WIDTH = 384
MOCO_HEADS = 12


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a file, before they are a model's.

    Attributes:
        path: the file.
        key: entry of the file that holds the state dict; "" if the file itself is the state dict.
        state: the state dict.
        others: keys of the other state dicts in the file.
        layout: the published layout, which says how images are prepared; None if it is not known.
        is_part: whether the key is a prefix of names within a state dict.
        cut: that prefix, as in the file.
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
        """Return the weights of a file. `key`, or `FILE#KEY`, chooses one of its state dicts.

        Raises:
            ModelError: an unreadable file, or no such state dict in it.
        """
        path = Path(path)
        key_in_name = None
        if "#" in path.name and not path.exists():
            file_name, _, key_in_name = path.name.rpartition("#")
            path = path.with_name(file_name)
        content = read_file(path)
        chosen = _choose_state(
            content, key=key if key is not None else key_in_name, path=path
        )
        layout = recognise_layout(
            content={str(name): x for name, x in content.items()},
            key=chosen.key,
            state=chosen.uncut or chosen.state,
        )
        return cls(
            path=path,
            key=chosen.key,
            state=chosen.state,
            others=chosen.others,
            layout=layout,
            is_part=chosen.is_part,
            cut=chosen.cut,
        )

    def put_into(
        self,
        model: nn.Module,
        convert: Convert | None = None,
        resampling: Resampling | None = None,
    ) -> dict[str, Any]:
        """Load the weights into a model, by the rule of `fitting`, and return their record.

        The record has file, key, other_keys (of state dicts and copies that were not taken), prefix
        (cut from the names), missing (the model's tensors that keep their random values),
        unexpected (the file's tensors that the model has no use for, those under another prefix
        summed up as "prefix.* (n)") and, where there are any, resampled (tensors of another size
        in the file, position tables above all) and notes (what was assumed).

        Args:
            model: the model, changed in place.
            convert: the library's function from a file's layout to the model's.
            resampling: which tensors may be resampled; by default position tables alone.

        Raises:
            ModelError: the weights do not fit; names what is missing or left over.
        """
        weights = fit(
            model,
            self.state,
            str(self.path),
            convert=convert,
            ignore_beside=self.is_part,
            resampling=resampling,
        )
        model.load_state_dict(weights.tensors, strict=False)
        key = self.key
        if not key and weights.copies:
            # Several copies in one state dict: the prefix says which of them this is.
            key = ".".join(without_wrappers(weights.prefix.split(".")))
        record: dict[str, Any] = {
            "file": self.path.name,
            "key": key,
            "other_keys": [*self.others, *weights.copies],
            "prefix": self.cut + weights.prefix,
            "missing": weights.missing,
            "unexpected": weights.left_over,
        }
        if weights.resampled:
            record["resampled"] = weights.resampled
        if weights.notes:
            record["notes"] = weights.notes
        return record


class _ChosenState(NamedTuple):
    """A state dict of a file, with the fields of `Checkpoint`.

    uncut: the whole state dict, where `state` holds the names below a prefix alone.
    """

    key: str
    state: State
    others: list[str]
    is_part: bool = False
    cut: str = ""
    uncut: State | None = None


def _is_state_dict(value: Any) -> bool:
    """Return whether a value is a mapping with names as keys, most of whose values are tensors."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) for name in value)
        and sum(isinstance(x, Tensor) for x in value.values()) > len(value) / 2
    )


def _choose_state(content: Any, *, key: str | None, path: Path) -> _ChosenState:
    """Return the state dict that `key` names, or the preferred one where it is None.

    Raises:
        ModelError: there is none; the message lists the keys that there are.
    """
    if not isinstance(content, Mapping):
        raise ModelError(
            f"{path} holds a {type(content).__name__}; expected a dict of tensors"
        )
    states = _state_dicts(content)
    if _is_state_dict(content):
        states[""] = _tensors_by_name(content)
    max_tensors = max(map(len, states.values()), default=0)

    def rank(state_key: str) -> tuple[bool, bool, int]:
        # Averaged weights only where there is nothing else, and a head's state dict never first.
        is_small = len(states[state_key]) < max_tensors / 2
        return is_small, is_averaged(state_key), _key_rank(state_key)

    ranked_keys = sorted(states, key=rank)
    if key is None:
        if not ranked_keys:
            key_list = ", ".join(map(str, list(content)[:8])) or "nothing"
            raise ModelError(f"{path} holds no state dict; its keys are: {key_list}")
        key = ranked_keys[0]
    if key in states:
        others = [name for name in states if name not in ("", key)]
        return _ChosenState(key, states[key], others)
    for state_key in ranked_keys:
        chosen = _below_prefix(states[state_key], state_key=state_key, key=key)
        if chosen is not None:
            return chosen
    if [*states] == [""]:
        first_words = list(dict.fromkeys(name.split(".")[0] for name in states[""]))
        raise ModelError(
            f"{path} is itself one state dict without names below {key!r}: leave out "
            f"--checkpoint-key, or name a prefix of it; its names begin with: "
            f"{some(first_words)}"
        )
    key_list = ", ".join(name for name in states if name) or "none"
    raise ModelError(
        f"{path} has no state dict under {key!r} (--checkpoint-key); it has: {key_list}"
    )


def preferred_state(content: Any, who: str) -> State:
    """Return the state dict that is taken where a file holds several.

    Raises:
        ModelError: there is none; the message begins with `who`.
    """
    return _choose_state(content, key=None, path=Path(who)).state


def _state_dicts(
    content: Mapping[Any, Any], prefix: str = "", depth: int = 2
) -> dict[str, State]:
    """Return key -> state dict for those in a file's content; "a.b" for one in another dict."""
    states: dict[str, State] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if _is_state_dict(value):
            states[key] = _tensors_by_name(value)
        elif isinstance(value, Mapping) and depth > 1:
            states |= _state_dicts(value, f"{key}.", depth - 1)
    return states


def _tensors_by_name(content: Mapping[Any, Any]) -> State:
    return {str(name): x for name, x in content.items() if isinstance(x, Tensor)}


def _below_prefix(state: State, *, state_key: str, key: str) -> _ChosenState | None:
    """Return the tensors of a state dict below a prefix; None without any.

    Args:
        state: the state dict.
        state_key: its key in the file.
        key: the prefix, as the user gives it; it may begin with `state_key`.
    """
    prefix = key.removeprefix(f"{state_key}.") if state_key else key
    prefix_words = without_wrappers(prefix.split(".")) or [prefix]
    state_below: State = {}
    names_below: set[str] = set()
    cut = ""
    for name, x in state.items():
        words = name.split(".")
        n_cut = _n_prefix_words(words, prefix_words)
        if n_cut is not None:
            state_below[".".join(words[n_cut:])] = x
            names_below.add(name)
            cut = ".".join(words[:n_cut]) + "."
    if not state_below:
        return None
    # What stands beside, with as many tensors, may be another copy of the model.
    n_beside = Counter(
        (without_wrappers(name.split(".")) or [name])[0]
        for name in state
        if name not in names_below
    )
    others = [word for word, n in n_beside.items() if n >= len(state_below) / 2]
    return _ChosenState(key, state_below, others, is_part=True, cut=cut, uncut=state)


def _n_prefix_words(words: Sequence[str], prefix_words: Sequence[str]) -> int | None:
    """Return how many of a name's words a prefix takes, wrappers' words between them included;
    None if the name is not below the prefix."""
    n = 0
    for prefix_word in prefix_words:
        while n < len(words) and words[n] != prefix_word and words[n] in WRAPPER_WORDS:
            n += 1
        if n == len(words) or words[n] != prefix_word:
            return None
        n += 1
    # The name must go on below the prefix.
    return n if n < len(words) else None


def _key_rank(key: str) -> int:
    """Return the rank of a key by `KEY_ORDER`: the word itself before keys that only contain it."""
    if key in KEY_ORDER:
        return KEY_ORDER.index(key)
    ranks = (rank for rank, word in enumerate(KEY_ORDER) if word in key)
    return len(KEY_ORDER) + next(ranks, len(KEY_ORDER))


@dataclass(frozen=True)
class Layout:
    """A published layout and the preprocessing that its authors evaluate with.

    Attributes:
        name: the publication.
        normalisation: mean and standard deviation of the channels, for values from 0 to 1.
        interpolation: of the resized image.
        whole_above: inputs with more rows than this are whole images (crop_pct 1), smaller ones
            are cropped by `CROPPED`.
        crop_mode: None for the architecture's default.
        args: arguments of timm's create_model that shapes of tensors do not show.
        sure: whether no other file has this layout.
    """

    name: str
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET
    interpolation: str = "bicubic"
    whole_above: float = float("inf")
    crop_mode: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    sure: bool = True

    def preprocessing(self, rows: int) -> dict[str, Any]:
        """Return mean, std, interpolation, crop_pct and, where it is known, crop_mode for inputs
        with this many rows of pixels."""
        mean, std = self.normalisation
        settings: dict[str, Any] = {
            "mean": mean,
            "std": std,
            "interpolation": self.interpolation,
            "crop_pct": 1.0 if rows > self.whole_above else CROPPED,
        }
        if self.crop_mode is not None:
            settings["crop_mode"] = self.crop_mode
        return settings


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


def recognise_layout(
    *, content: Mapping[str, Any], key: str, state: Mapping[str, Any]
) -> Layout | None:
    """Return the published layout of a file; None for one that is not known.

    Args:
        content: the whole file.
        key: entry of the file that holds the state dict, "" for the file itself.
        state: the state dict.
    """
    has_predictor = any("predictor." in name for name in state)
    for name in state:
        if ".base_encoder." in f".{name}" and has_predictor:
            return _moco_layout(state)
        if ".visual." in f".{name}":
            return _clip_layout(state)
    names = {_without_wrapper_prefix(name) for name in state}
    if {
        "storage_tokens",
        "rope_embed.periods",
        "blocks.0.attn.qkv.weight",
    } <= names:
        if "blocks.0.attn.qkv.bias" in names:
            return DINOV3
        return replace(DINOV3, args={})
    if "mask_token" in names:
        return _masked_image_layout(names)
    if {"student", "teacher"} <= content.keys():
        if any(x.startswith(("head.mlp.", "head.last_layer.")) for x in names):
            return DINO
        return None
    if not {"cls_token", "pos_embed", "blocks.0.attn.qkv.weight"} <= names:
        return None
    if {"dist_token", "head_dist.weight"} <= names:
        return DEIT
    has_head = any(name.startswith(("head.", "fc_norm.")) for name in names)
    if not has_head:
        return None if _has_layer_scale(names) else ENCODER
    if key == "model" and len(content) == 1:
        return DEIT3 if _has_layer_scale(names) else replace(DEIT, sure=False)
    return None


def _without_wrapper_prefix(name: str) -> str:
    """Return a tensor's name without the words of wrappers around the model."""
    words = name.split(".")
    while len(words) > 1 and words[0] in WRAPPERS:
        words = words[1:]
    return ".".join(words)


def _has_layer_scale(names: Collection[str]) -> bool:
    return "blocks.0.gamma_1" in names or "blocks.0.ls1.gamma" in names


def _masked_image_layout(names: Collection[str]) -> Layout | None:
    """Return the layout of a model that was trained on masked images, by its tensors' names."""
    if {"decoder_embed.weight", "decoder_pos_embed"} <= set(names):
        return MAE
    if "rel_pos_bias.relative_position_bias_table" in names:
        if any(name.startswith("cls_pt_layers.") for name in names):
            return BEIT2
        return BEIT
    rotary = any(name.startswith("rope_embed.") for name in names)
    if "blocks.0.ls1.gamma" in names and not rotary:
        return DINOV2
    return None


def _moco_layout(state: Mapping[str, Any]) -> Layout:
    """Return the layout of MoCo v3. Its ViT-S has 12 heads of 32 channels (Chen et al. 2021,
    Table 1), where timm's has 6 of 64."""
    ending = "base_encoder.patch_embed.proj.weight"
    widths = {int(x.shape[0]) for name, x in state.items() if name.endswith(ending)}
    if widths == {MOCO_SMALL_WIDTH}:
        return replace(MOCO, args={"num_heads": MOCO_HEADS})
    return MOCO


def _clip_layout(state: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a file with a CLIP model, or None for another model with an image tower.

    OpenAI's own files hold three sizes beside the weights, and their transformers compute
    QuickGELU; other files of this layout compute it or GELU. SigLIP's files as open_clip keeps
    them have the bias of the sigmoid loss, and a timm model as the image tower.
    """
    names = {_without_wrapper_prefix(name) for name in state}
    if "logit_bias" in names and any(name.startswith("visual.trunk.") for name in names):
        return SIGLIP
    if "token_embedding.weight" not in names or "logit_bias" in names:
        return None
    if not {"input_resolution", "context_length", "vocab_size"} <= names:
        return CLIP
    args = QUICK_GELU if "visual.class_embedding" in names else {}
    return replace(CLIP, name="OpenAI's CLIP", args=args, sure=True)
