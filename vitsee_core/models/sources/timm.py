"""timm's models: `vit_base_patch16_224.dino`, `hf-hub:OWNER/NAME`, `local-dir:FOLDER`; those that
ship with vitsee, `demo:vit`, are folders as timm writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import Source, foreign_place, near_names
from vitsee_core.models.sources.path_hints import path_hint
from vitsee_core.models.sources.timm_create import (
    FOLDER,
    ambiguous_head_count,
    check_known,
    create_model,
    read_config,
    refitted_tensors,
    refuse_loading,
)
from vitsee_core.models.sources.transforms import input_transform, label_names
from vitsee_core.models.weights.fitting import Fit

# Arguments that a store may ask for without --trust-store: sizes, counts and switches of layers.
_SAFE_ARGUMENTS = """
act_layer always_partition attn_drop_rate attn_layer attn_type block_fn cardinality
base_width channels class_token cls_attn_layers conv_bias conv_mlp depth depths dim dims
distilled downsamples drop_path_rate drop_rate dynamic_img_pad dynamic_img_size
embed_dim embed_dims embed_norm expand_ratio fc_norm final_norm fix_init global_pool
global_pos_size groups growth_rate head_bias head_dim head_hidden_size head_init_scale
head_norm_first hidden_size img_size in_chans init_values inner_dim kernel_size
kernel_sizes layer_scale_init_value layers levels local_up_to_layer locality_strength
ls_init_value mlp_layer mlp_ratio mlp_ratios no_embed_class norm_eps norm_layer
num_blocks num_classes num_features num_heads num_heads_inner num_heads_outer
num_kv_heads num_reg_tokens output_norm output_stride pad_type patch_drop_rate
patch_norm patch_size patch_sizes pool_include_prefix pool_size pos_drop_rate pos_embed
pre_norm proj_bias proj_drop_rate qk_norm qkv_bias qkv_fused ref_feat_shape reg_tokens
rel_pos_type rope_temperature rope_type scale_attn_inner scale_attn_norm scale_mlp_norm
se_ratio sr_ratios stem_chs stem_size stem_type stem_width strict_img_size swiglu_mlp
use_abs_pos use_abs_pos_emb use_fc_norm use_grn use_layer_scale use_post_norm
use_pos_embed use_rel_pos use_rel_pos_bias use_rope use_shared_rel_pos_bias weight_init
widths window_ratio window_size window_sizes zero_init_last
"""
KNOWN = frozenset(_SAFE_ARGUMENTS.split())
MAX_NUMBER = 1 << 16  # a size or a count; beyond it a model is made to fill the memory
MAX_LAYERS = 512
MAX_ITEMS = 64
_WORD = re.compile(r"[\w.+-]{0,64}")


class TimmSource(Source):
    """A model of timm: a name of its registry, a repository of the hub, or a folder.

    Attributes:
        fit: how the weights of the model that was made were fitted; None before, and for random
            ones.
    """

    fit: Fit | None = None

    @property
    def full(self) -> str:
        """The name that timm's create_model takes."""
        return self.name

    def check(self) -> None:
        """Raise ModelError unless timm knows the name, or wrote the config.json of its folder."""
        check_known(self.full, self.name)

    def check_arguments(self, args: Mapping[str, Any]) -> None:
        """Raise ModelError if an argument chooses what to load."""
        refuse_loading(args)

    def check_foreign(self, args: Mapping[str, Any], where: str) -> None:
        """Allow timm's registered models and the demo's, with plain arguments of layers.

        Raises:
            ModelError: the name is a folder or a repository, an argument is not in `KNOWN`, or a
                value is not a size, a switch or a word of bounded length.
        """
        if ":" in self.name and not self.name.startswith("demo:"):
            raise foreign_place(self.name, where)
        for key, value in args.items():
            if key not in KNOWN:
                raise ModelError(
                    f"{where} asks for the model argument {str(key)[:40]!r}, which a "
                    "store may not choose by itself (--trust-store if it is your own)"
                )
            is_depth = key.startswith(("depth", "layers"))
            if not _is_plain(value, MAX_LAYERS if is_depth else MAX_NUMBER):
                raise ModelError(
                    f"{where} asks for {key}={str(value)[:40]}, which is no size, switch "
                    "or word of a layer (--trust-store if it is your own)"
                )

    def placed(self, folder: Path) -> str:
        """Return the name with the path of a folder made absolute."""
        if not self.name.startswith(FOLDER):
            return self.name
        return f"{FOLDER}{folder / Path(self.name.removeprefix(FOLDER)).expanduser()}"

    def matching(self) -> dict[str, list[str]]:
        """Return the architectures that match; a folder and a repository stand for themselves."""
        if ":" in self.name:
            return {self.name: []}
        return matching(self.name)

    def stated_size(self) -> tuple[int, int] | None:
        """Return (rows, cols) of timm's configuration, None for names that it has none of."""
        import timm

        config: Any = timm.get_pretrained_cfg(self.name)
        return None if config is None else tuple(config.input_size[1:])

    @property
    def label(self) -> str:
        """The architecture; of a folder or repository the last word of its path."""
        last_word = re.split(r"[/:]", self.name.rstrip("/"))[-1]
        if self.name.startswith(FOLDER):
            return last_word
        return last_word.partition(".")[0]

    @property
    def skips_left_out(self) -> tuple[str, ...]:
        """`ablate_skip` of a folder's config.json."""
        if not self.full.startswith(FOLDER):
            return ()
        config = read_config(Path(self.full.removeprefix(FOLDER)), self.name)
        skips = config.get("ablate_skip", [])
        if not isinstance(skips, list) or not all(isinstance(x, str) for x in skips):
            raise ModelError(
                f"{self.name}: ablate_skip in its config.json is {str(skips)[:40]!r}; "
                "expected a list of blocks or sublayers"
            )
        return tuple(skips)

    def layout_arguments(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return all arguments: their names are timm's."""
        return args

    def make(
        self,
        *,
        pretrained: bool,
        seed: int,
        arguments: dict[str, Any],
        foreign: bool = False,
    ) -> nn.Module:
        """Make the model like `Source.make`, and set `fit`."""
        module, self.fit = create_model(
            self.full,
            self.name,
            pretrained=pretrained,
            seed=seed,
            arguments=arguments,
            foreign=foreign,
            resampling=self.resampling,
        )
        return module

    def transform(
        self,
        module: nn.Module,
        img_size: tuple[int, int] | None,
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the transform of the model's configuration, with the user's settings."""
        return input_transform(module, self.name, img_size, settings)

    def architecture(self, module: nn.Module) -> str:
        """Return timm's name of the architecture."""
        return str(_config(module).get("architecture") or self.full)

    def class_names(self, module: nn.Module) -> list[str] | None:
        """Return `label_names` of the model's configuration."""
        return label_names(_config(module), self.name)

    def pretrained_record(
        self, module: nn.Module, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the entries of `LoadedModel.weights` for the model's own weights.

        They are `source`, `pretrained` (ARCHITECTURE.TAG), `folder`, timm's `notes`, and, where
        there are any, tensors that are `resampled`, `missing` (of the classifier, left random) or
        `unexpected` (of the file, without use), and `other_keys`, the model's other copies in it.

        A name without a tag stands for the tag recorded here; a folder has no `pretrained`.
        """
        record = _pretrained_name(module, self.full)
        if self.name.startswith(FOLDER):
            folder = Path(self.name.removeprefix(FOLDER)).expanduser()
            record["folder"] = folder.resolve().name
        record |= refitted_tensors(module, self.full, arguments)
        if self.fit is not None:
            record |= _fit_record(self.fit, record)
        return record

    def assumed(self, module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return `num_heads` where no tensor's shape shows it."""
        n_heads = ambiguous_head_count(module, self.full, arguments)
        return {} if n_heads is None else {"num_heads": n_heads}


def _config(module: nn.Module) -> dict[str, Any]:
    """Return timm's configuration of a module."""
    return getattr(module, "pretrained_cfg", None) or {}


def _pretrained_name(module: nn.Module, full: str) -> dict[str, Any]:
    """Return the entries `source`, `pretrained` (ARCHITECTURE.TAG) and `notes`, timm's advice."""
    if full.startswith(FOLDER):
        return {"source": "local-dir"}
    config = _config(module)
    words = [str(config.get("architecture") or ""), str(config.get("tag") or "")]
    record: dict[str, Any] = {
        "source": "pretrained",
        "pretrained": ".".join(word for word in words if word) or full,
    }
    # timm's configuration repeats its advice on the variants that follow it.
    advice = [str(note) for note in config.get("notes") or ()]
    if not any(isinstance(child, nn.GELU) for child in module.modules()):
        advice = [note for note in advice if "QuickGELU" not in note]
    if advice:
        record["notes"] = advice
    return record


def _fit_record(fit: Fit, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that say how weights were fitted, with those that the record has.

    A tensor that both resampled, as timm does itself, is named once.
    """
    resampled = list(record.get("resampled", ()))
    recorded_names = {text.split(" ")[0] for text in resampled}
    for text in fit.resampled:  # "NAME (shape) to (shape)"
        if text.split(" ")[0] not in recorded_names:
            resampled.append(text)
    entries = {
        "resampled": resampled,
        "unexpected": fit.left_over,
        "other_keys": fit.copies,
        "notes": [*record.get("notes", ()), *fit.notes],
    }
    return {key: values for key, values in entries.items() if values}


class DemoSource(TimmSource):
    """A model of the demo: a folder that ships with vitsee, as timm reads it."""

    @property
    def full(self) -> str:
        """The folder's name for timm; the demo's own architectures are registered there."""
        from vitsee_core.demo import architectures, model_folder

        folder = model_folder(self.name.removeprefix("demo:"))
        architectures.register()
        return f"{FOLDER}{folder}"


def matching(pattern: str) -> dict[str, list[str]]:
    """Return architecture -> tags of its pretrained weights, for those that match a pattern.

    pattern: a glob of architectures, or of `NAME.TAG`: then architectures without a matching tag
    are left out.

    Raises:
        ModelError: nothing matches.
    """
    import timm

    tags: dict[str, list[str]] = {name: [] for name in timm.list_models()}
    for name in timm.list_pretrained():
        architecture, _, tag = name.partition(".")
        tags.setdefault(architecture, []).append(tag)
    name_pattern, dot, tag_pattern = pattern.partition(".")
    matches = {}
    for name, model_tags in tags.items():
        if not fnmatchcase(name, name_pattern):
            continue
        if dot:
            model_tags = [tag for tag in model_tags if fnmatchcase(tag, tag_pattern)]
            if not model_tags:
                continue
        matches[name] = model_tags
    if not matches:
        hint = path_hint(pattern)
        if hint:
            raise ModelError(f"{pattern} {hint}")
        near = near_names(name_pattern, [*tags])
        raise ModelError(
            f"no timm model matches {pattern!r}{near} (a part of a name: '*PART*')"
        )
    return matches


def _is_plain(value: Any, max_number: int) -> bool:
    """Return whether a value is a short word, a switch, None or a bounded number, or a short list
    of these."""
    if isinstance(value, list | tuple):
        is_flat = not any(isinstance(item, list | tuple) for item in value)
        return (
            is_flat
            and len(value) <= MAX_ITEMS
            and all(_is_plain(item, max_number) for item in value)
        )
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    if isinstance(value, bool) or value is None:
        return True
    return isinstance(value, int | float) and abs(value) <= max_number
