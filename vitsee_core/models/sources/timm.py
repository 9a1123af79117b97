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
    check_known,
    create_model,
    heads_no_shape_shows,
    not_as_pretrained,
    read_config,
    refuse_loading,
)
from vitsee_core.models.sources.transforms import input_transform, label_names
from vitsee_core.models.weights.fitting import Fit

# What a store may ask for without --trust-store: sizes, counts and switches of layers.
_NAMES = """
act_layer always_partition attn_drop_rate attn_layer attn_type block_fn cardinality base_width
channels class_token cls_attn_layers conv_bias conv_mlp depth depths dim dims distilled
downsamples drop_path_rate drop_rate dynamic_img_pad dynamic_img_size embed_dim embed_dims
embed_norm expand_ratio fc_norm final_norm fix_init global_pool global_pos_size groups
growth_rate head_bias head_dim head_hidden_size head_init_scale head_norm_first hidden_size
img_size in_chans init_values inner_dim kernel_size kernel_sizes layer_scale_init_value layers
levels local_up_to_layer locality_strength ls_init_value mlp_layer mlp_ratio mlp_ratios
no_embed_class norm_eps norm_layer num_blocks num_classes num_features num_heads num_heads_inner
num_heads_outer num_kv_heads num_reg_tokens output_norm output_stride pad_type patch_drop_rate
patch_norm patch_size patch_sizes pool_include_prefix pool_size pos_drop_rate pos_embed pre_norm
proj_bias proj_drop_rate qk_norm qkv_bias qkv_fused ref_feat_shape reg_tokens rel_pos_type
rope_temperature rope_type scale_attn_inner scale_attn_norm scale_mlp_norm se_ratio sr_ratios
stem_chs stem_size stem_type stem_width strict_img_size swiglu_mlp use_abs_pos use_abs_pos_emb
use_fc_norm use_grn use_layer_scale use_post_norm use_pos_embed use_rel_pos use_rel_pos_bias
use_rope use_shared_rel_pos_bias weight_init widths window_ratio window_size window_sizes
zero_init_last
"""
KNOWN = frozenset(_NAMES.split())
MOST = 1 << 16  # a size or a count; beyond it a model is made to fill the memory
MOST_LAYERS = 512
MOST_ITEMS = 64
_WORD = re.compile(r"[\w.+-]{0,64}")


class TimmSource(Source):
    """A name that timm's create_model takes: `full`.

    fit: how the weights of the model that was made were fitted; None before, and for random ones.
    """

    fit: Fit | None = None

    @property
    def full(self) -> str:
        """The name as timm knows it."""
        return self.name

    def check(self) -> None:
        check_known(self.full, self.name)

    def check_arguments(self, args: Mapping[str, Any]) -> None:
        refuse_loading(args)

    def check_foreign(self, args: Mapping[str, Any], where: str) -> None:
        """Refuse what `Source` does: a folder or a repository, an unknown argument, or a value that
        is none of a layer's. timm's own models and the demo's take foreign weights."""
        if ":" in self.name and not self.name.startswith("demo:"):
            raise foreign_place(self.name, where)
        for key, value in args.items():
            if key not in KNOWN:
                raise ModelError(
                    f"{where} asks for the model argument {str(key)[:40]!r}, which a store may not "
                    "choose by itself (--trust-store if it is your own)"
                )
            if not _plain(
                value, MOST_LAYERS if key.startswith(("depth", "layers")) else MOST
            ):
                raise ModelError(
                    f"{where} asks for {key}={str(value)[:40]}, which is no size, switch or word "
                    "of a layer (--trust-store if it is your own)"
                )

    def placed(self, folder: Path) -> str:
        if not self.name.startswith(FOLDER):
            return self.name
        return f"{FOLDER}{folder / Path(self.name.removeprefix(FOLDER)).expanduser()}"

    def matching(self) -> dict[str, list[str]]:
        """The architectures that match; a folder and a repository stand for themselves."""
        if ":" in self.name:
            return {self.name: []}
        return matching(self.name)

    def stated_size(self) -> tuple[int, int] | None:
        import timm

        config: Any = timm.get_pretrained_cfg(self.name)
        return None if config is None else tuple(config.input_size[1:])

    @property
    def label(self) -> str:
        """The architecture; of a folder or repository its last part."""
        last = re.split(r"[/:]", self.name.rstrip("/"))[-1]
        if self.name.startswith(FOLDER):
            return last
        return last.partition(".")[0]

    @property
    def skips_left_out(self) -> tuple[str, ...]:
        """`ablate_skip` of a folder's config.json."""
        if not self.full.startswith(FOLDER):
            return ()
        found = read_config(Path(self.full.removeprefix(FOLDER)), self.name).get(
            "ablate_skip", []
        )
        if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
            raise ModelError(
                f"{self.name}: ablate_skip in its config.json is {str(found)[:40]!r}; expected a "
                "list of blocks or sublayers"
            )
        return tuple(found)

    def layout_arguments(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        return args

    def make(
        self,
        *,
        pretrained: bool,
        seed: int,
        wanted: dict[str, Any],
        foreign: bool = False,
    ) -> nn.Module:
        module, self.fit = create_model(
            self.full,
            self.name,
            pretrained=pretrained,
            seed=seed,
            wanted=wanted,
            foreign=foreign,
            resampling=self.resampling,
        )
        return module

    def transform(
        self,
        module: nn.Module,
        img_size: tuple[int, int] | None,
        given: Mapping[str, Any],
    ) -> dict[str, Any]:
        return input_transform(module, self.name, img_size, given)

    def architecture(self, module: nn.Module) -> str:
        return str(_config(module).get("architecture") or self.full)

    def class_names(self, module: nn.Module) -> list[str] | None:
        return label_names(_config(module), self.name)

    def pretrained_record(
        self, module: nn.Module, wanted: dict[str, Any]
    ) -> dict[str, Any]:
        """The record of `Source`; a name without a tag stands for the tag recorded here."""
        record = _record(module, self.full)
        if self.name.startswith(FOLDER):
            record["folder"] = (
                Path(self.name.removeprefix(FOLDER)).expanduser().resolve().name
            )
        record = {**record, **not_as_pretrained(module, self.full, wanted)}
        if self.fit is None:
            return record
        return {**record, **_fit_record(self.fit, record)}

    def assumed(self, module: nn.Module, wanted: dict[str, Any]) -> dict[str, Any]:
        """`num_heads` where no shape shows it."""
        heads = heads_no_shape_shows(module, self.full, wanted)
        return {} if heads is None else {"num_heads": heads}


def _config(module: nn.Module) -> dict[str, Any]:
    return getattr(module, "pretrained_cfg", None) or {}


def _record(module: nn.Module, full: str) -> dict[str, Any]:
    if full.startswith(FOLDER):
        return {"source": "local-dir"}
    config = _config(module)
    named = [str(config[key]) for key in ("architecture", "tag") if config.get(key)]
    # timm's configuration repeats its advice on the variants that follow it.
    advice = [str(note) for note in config.get("notes") or ()]
    if not any(isinstance(child, nn.GELU) for child in module.modules()):
        advice = [note for note in advice if "QuickGELU" not in note]
    record = {"source": "pretrained", "pretrained": ".".join(named) or full}
    return {**record, **({"notes": advice} if advice else {})}


def _fit_record(fit: Fit, record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a record that say how weights were fitted, beside those that it has."""
    said = [text.split(" ")[0] for text in record.get("resampled", ())]
    more = [text for text in fit.resampled if text.split(" ")[0] not in said]
    entries = {
        "resampled": [*record.get("resampled", ()), *more],
        "unexpected": fit.left_over,
        "other_keys": fit.copies,
        "notes": [*record.get("notes", ()), *fit.notes],
    }
    return {key: values for key, values in entries.items() if values}


class DemoSource(TimmSource):
    """A folder of the demo, as timm reads it."""

    @property
    def full(self) -> str:
        """timm's name of the folder, whose architecture may be the demo's own."""
        from vitsee_core.demo import architectures, model_folder

        folder = model_folder(self.name.removeprefix("demo:"))
        architectures.register()
        return f"{FOLDER}{folder}"


def matching(pattern: str) -> dict[str, list[str]]:
    """Architecture -> tags of its pretrained weights, as far as they match a glob of architectures
    or of `NAME.TAG`; a ModelError where nothing does."""
    import timm

    tags: dict[str, list[str]] = {name: [] for name in timm.list_models()}
    for name in timm.list_pretrained():
        architecture, _, tag = name.partition(".")
        tags.setdefault(architecture, []).append(tag)
    wanted, dot, wanted_tag = pattern.partition(".")
    found = {}
    for name, own in tags.items():
        kept = [tag for tag in own if not dot or fnmatchcase(tag, wanted_tag)]
        if fnmatchcase(name, wanted) and (kept or not dot):
            found[name] = kept
    if not found:
        if hint := path_hint(pattern):
            raise ModelError(f"{pattern} {hint}")
        near = near_names(wanted, [*tags])
        raise ModelError(
            f"no timm model matches {pattern!r}{near} (a part of a name: '*PART*')"
        )
    return found


def _plain(value: Any, most: int, nested: bool = True) -> bool:
    if isinstance(value, list | tuple):
        return (
            nested
            and len(value) <= MOST_ITEMS
            and all(_plain(x, most, False) for x in value)
        )
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    if isinstance(value, bool) or value is None:
        return True
    return isinstance(value, int | float) and abs(value) <= most
