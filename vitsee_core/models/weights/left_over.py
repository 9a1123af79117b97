"""Tensors in a file of weights that a model has no use for, and what they may be.

All of a file is the model's but for what is listed here, by the names that published files and
training codes use: other words mean that the file belongs to another architecture. `docs/guide/
extraction.md` has the same list for users.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from vitsee_core.models.weights.names import without_wrappers

# First words of what stands beside an encoder.
_MASK = frozenset({"mask_token", "mask_tokens"})
_DECODER = frozenset(
    {"decoder", "decoders", "mask_decoder", "prompt_encoder", "neck", "necks"}
)
_PROJECTION = frozenset(
    {
        "proj",
        "projector",
        "projectors",
        "projection",
        "projections",
        "visual_projection",
        "text_projection",
        "image_projection",
        "vision_proj",
        "text_proj",
        "image_proj",
        "predictor",
        "prototypes",
        "student_proj",
        "teacher_proj",
        "multi_modal_projector",
        "queue",
        "queue_ptr",
        "queue_l",
        "centroids",
        "center",
    }
)
_TEXT = frozenset(
    {
        "text",
        "text_model",
        "text_encoder",
        "text_decoder",
        "textual",
        "text_embed",
        "token_embedding",
        "ln_final",
        "language_model",
        "logit_scale",
        "logit_bias",
        "input_resolution",
        "context_length",
        "vocab_size",
        "qformer",
        "query_tokens",
        "tokenizer",
        "bert",
        "lm",
        "llm",
        "image_newline",
    }
)
_HEAD = frozenset(
    {
        "head",
        "heads",
        "fc",
        "classifier",
        "classifiers",
        "cls_classifier",
        "distillation_classifier",
        "pooler",
        "pre_logits",
        "cls_pt_layers",
        "local_cls_norm",
        "linear_classifier",
        "logits",
    }
)
_HEAD_ENDINGS = ("_head", "_heads", "_classifier")
# Of averages of weights and of training loops: numbers that they count with. Last words.
_COUNTERS = frozenset(
    {
        "n_averaged",
        "num_updates",
        "n_updates",
        "num_steps",
        "decay",
        "ema_decay",
        "initted",
        "initialized",
        "initialised",
        "step",
        "steps",
        "global_step",
        "epoch",
        "epochs",
        "iter",
        "iters",
        "iteration",
        "iterations",
        "it",
    }
)
_COUNTER_ENDINGS = ("_step", "_steps", "_updates", "_epoch", "_iter", "_iteration")
# Words of peft's adapters; without them weights are not those that were trained.
_ADAPTER_WORDS = ("lora_", "modules_to_save", "hada_w", "lokr_w", "ia3_l")
# Of losses and metrics of a training loop, beside the model.
_TRAINING = frozenset(
    {"criterion", "loss", "loss_fn", "metrics", "n_averaged", "teacher_temp"}
)
_TRAINING_ENDINGS = ("_loss", "_metric", "_metrics", "_acc", "_accuracy", "acc1", "acc5")
# Tables that follow from sizes, and counters: last words.
FIXED_TABLES = frozenset(
    {
        "relative_position_index",
        "relative_coords_table",
        "attn_mask",
        "position_ids",
        "num_batches_tracked",
        "bias_mask",
        "total_ops",
        "total_params",
        "periods",
        "inv_freq",
        "attention_bias_idxs",
        "freqs_cos",
        "freqs_sin",
        "freqs_cis",
        "freqs",
    }
)
# In OpenAI's layout the text's tower has these names, beside `visual.`.
_TEXT_BESIDE_VISUAL = frozenset({"transformer", "positional_embedding"})


def is_counter(name: str, x: Tensor) -> bool:
    """Return whether a tensor is one number that a training loop counts with, by its name."""
    last = name.rpartition(".")[2]
    return x.numel() == 1 and (last in _COUNTERS or last.endswith(_COUNTER_ENDINGS))


def adapter_names(names: Collection[str]) -> list[str]:
    """Return the names that have a word of an adapter (LoRA) of the library peft."""
    return [
        name
        for name in names
        if any(word.startswith(_ADAPTER_WORDS) for word in name.split("."))
    ]


def one_copy_alone(
    left_over: Sequence[str], model_names: Collection[str], label: str = ""
) -> str:
    """Return how to take one copy of a model alone, where names that are left over are those of
    another copy that lacks tensors; "" where they are not.

    Args:
        left_over: names of the file's tensors without use.
        model_names: names of the model's tensors.
        label: the chosen copy's prefix, as --checkpoint-key takes it; "" if it has none.
    """
    # Loops join the names of a copy by a dot or an underscore: `b.cls_token`, `ema_cls_token`.
    endings = tuple(f"{joint}{name}" for name in model_names for joint in "._")
    n_of_copy = sum(name.endswith(endings) for name in left_over)
    if 2 * n_of_copy <= len(left_over):
        return ""
    if label:
        return f"expected one copy of the model: --checkpoint-key {label}"
    return "expected one copy of the model: save the state dict of one alone"


def is_known(name: str) -> bool:
    """Return whether a tensor that the model has no use for may be left over.

    name: the tensor's name below the model's prefix.
    """
    words = without_wrappers(name.split(".")) or [name]
    first = words[0]
    last = words[-1]
    if last in FIXED_TABLES:
        return True
    if first in _MASK or last in _MASK:
        return True
    if first in _DECODER or first.startswith(("decoder_", "decode_")):
        return True
    if first in _PROJECTION or first.endswith(("_projector", "_projection")):
        return True
    if first in _TEXT or first.startswith("text_"):
        return True
    if first in _HEAD or first.startswith("head_") or first.endswith(_HEAD_ENDINGS):
        return True
    return first in _TRAINING or first.endswith(_TRAINING_ENDINGS)


def is_known_beside(name: str, prefixes: Sequence[str]) -> bool:
    """Return whether a tensor outside the model's prefix may be left over: it is known, or is in
    another copy of the model.

    What counts is the name behind the words that it shares with a copy: beside the copy
    `module.backbone.` the tensor `module.head.0.weight` is `head.0.weight`.

    Args:
        name: the tensor's name in the file.
        prefixes: the prefixes of the copies without wrappers' words, the chosen copy's first.
    """
    words = without_wrappers(name.split(".")) or [name]
    n_shared = 0  # words that the name has in common with a prefix
    for prefix in prefixes:
        prefix_words = prefix.split(".") if prefix else []
        if prefix_words and words[: len(prefix_words)] == prefix_words:
            return True
        n = 0
        # The last word, a tensor's own name, is never a part of a prefix.
        while n < min(len(prefix_words), len(words) - 1) and prefix_words[n] == words[n]:
            n += 1
        n_shared = max(n_shared, n)
    is_beside_visual = bool(prefixes) and "visual" in prefixes[0].split(".")
    if is_beside_visual and words[n_shared] in _TEXT_BESIDE_VISUAL:
        return True
    rest = words[n_shared:]
    if is_known(".".join(rest)):
        return True
    # Also a part that the loop keeps by a name of its own, `student.head`.
    return len(rest) > 1 and is_known(".".join(rest[1:]))


def unknown(names: Collection[str], prefixes: Sequence[str] | None = None) -> list[str]:
    """Return the names that no list of known parts has.

    Args:
        names: names of tensors without use.
        prefixes: the prefixes of the model's copies, for names beside these; None for names inside
            the model.
    """
    if prefixes is None:
        return [name for name in names if not is_known(name)]
    return [name for name in names if not is_known_beside(name, prefixes)]
