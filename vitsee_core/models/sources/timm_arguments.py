"""Arguments of timm's create_model: those that never decide a model's shape are refused, and those
that a manifest may ask for are listed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.errors import foreign_place

# What timm loads, from where and onto what; each has an option of its own here, or none.
LOADING = {
    "checkpoint_path": "use --checkpoint FILE",
    "pretrained": "use --random-init SEED for fresh weights",
    "pretrained_cfg": "use local-dir:FOLDER for weights with a configuration of their own",
    "pretrained_cfg_overlay": "use local-dir:FOLDER, --img-mean, --img-std or --crop-pct",
    "pretrained_model_args": "use local-dir:FOLDER",
    "pretrained_strict": "weights are always loaded strictly",
    "pretrained_filter_fn": "use --checkpoint FILE",
    "model_name": "it is the argument MODEL",
    "cache_dir": "set HF_HOME",
    "device": "use --device",
    "dtype": "use --precision",
    "scriptable": "hooks see nothing in scripted models",
    "exportable": "hooks see nothing in exported models",
    "features_only": "sites of every layer are captured anyway",
}

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


def refuse_loading(args: Mapping[str, Any], where: str = "--model-arg ") -> None:
    """Raise ModelError if an argument chooses what to load, not how the model is made."""
    for name in args:
        if name in LOADING:
            raise ModelError(
                f"{where}{name}={str(args[name])[:40]} is not passed on to timm: {LOADING[name]}"
            )


def check_foreign(name: str, args: Mapping[str, Any], where: str) -> None:
    """A model that a manifest asks for and nobody vouches for: timm's own or the demo's, with known
    arguments and small plain values.

    Raises:
        ModelError: a folder or a repository, an unknown argument, or a value that is none of a
            layer's.
    """
    if ":" in name and not name.startswith("demo:"):
        raise foreign_place(name, where)
    for key, value in args.items():
        if key not in KNOWN:
            raise ModelError(
                f"{where} asks for the model argument {str(key)[:40]!r}, which a store may not "
                "choose by itself (--trust-store if it is your own)"
            )
        if not _plain(value, MOST_LAYERS if key.startswith(("depth", "layers")) else MOST):
            raise ModelError(
                f"{where} asks for {key}={str(value)[:40]}, which is no size, switch or word of a "
                "layer (--trust-store if it is your own)"
            )


def _plain(value: Any, most: int, nested: bool = True) -> bool:
    if isinstance(value, list | tuple):
        return nested and len(value) <= MOST_ITEMS and all(_plain(x, most, False) for x in value)
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    if isinstance(value, bool) or value is None:
        return True
    return isinstance(value, int | float) and abs(value) <= most
