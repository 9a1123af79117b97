"""Try vitsee on the vision models of the installed transformers; write a table of what came out.

    tools/transformers_4.sh /tmp/t4 python tools/try_transformers.py --rows /tmp/t4.json
    python tools/try_transformers.py docs/architectures-transformers.md --beside /tmp/t4.json
    python tools/try_transformers.py docs/architectures-transformers.md --towers

Classes of backbones, classifiers and towers of larger models, each made tiny from its own
configuration with random weights. Of each: whether its sites are found; whether
the blocks' outputs equal its own `hidden_states` bit for bit, and whether the last of these is
before or behind the final norm; whether attention under scaled_dot_product_attention equals the
`attentions` of the eager implementation; how many residual sublayers are proven. A row names what
was refused and why; a traceback or a difference is a FAILURE, and the exit code 1. Some minutes on
two cores. With --towers the section of the towers of all models of images and text is written anew,
each tower made tiny by its path; a tower of packed patches gets them as vitsee cuts them, and its
own states are compared row by row.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models_helpers import Keeper, images, redraw
from vitsee_core.models.capture import Capture
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.sources.transformers_classes import (
    PIXELS,
    VIDEOS,
    class_names,
    library,
    named_towers,
    on_meta,
)
from vitsee_core.models.tokens.clip_order import ClipOrder
from vitsee_core.models.tokens.clips import frames_of
from vitsee_core.models.tokens.packed_order import Order
from vitsee_core.models.tokens.towers import packing_of

ATTENTION = 1e-6
MOST = 40_000_000  # parameters
CLASSES = (
    *("CLIPVisionModel", "SiglipVisionModel", "Siglip2VisionModel", "Aimv2VisionModel"),
    *("MetaClip2VisionModel", "AltCLIPVisionModel", "ChineseCLIPVisionModel", "CLIPSegVisionModel"),
    *("AlignVisionModel", "BlipVisionModel", "Blip2VisionModel", "InstructBlipVisionModel"),
    *("GitVisionModel", "GroupViTVisionModel", "XCLIPVisionModel", "InternVLVisionModel"),
    *("IdeficsVisionTransformer", "Idefics2VisionTransformer", "Idefics3VisionTransformer"),
    *("SamVisionModel", "Sam2VisionModel", "SamHQVisionModel", "OwlViTVisionModel"),
    *("Owlv2VisionModel",),
    *("PixtralVisionModel", "Dinov2ForImageClassification", "ViTForImageClassification"),
    *("SwinForImageClassification", "BeitForImageClassification", "ConvNextForImageClassification"),
    *("ResNetForImageClassification", "DINOv3ConvNextModel", "DINOv3ViTModel", "TextNetModel"),
    *("Dinov2WithRegistersModel", "HieraModel", "PvtV2Model", "Data2VecVisionModel", "IJepaModel"),
    *("ViTMSNModel", "ViTDetModel", "TimesformerModel", "SwiftFormerModel", "FocalNetModel"),
    *("Swinv2Model", "CvtModel", "LevitModel", "BitModel", "RegNetModel", "EfficientNetModel"),
    *("MobileViTModel", "MobileViTV2Model", "MobileNetV1Model", "MobileNetV2Model", "PvtModel"),
    *("SegformerModel", "GLPNModel", "PoolFormerModel", "YolosModel", "DeiTModel", "ViTMAEModel"),
    *("BeitModel", "ViTModel", "Dinov2Model", "SwinModel", "ConvNextModel", "ConvNextV2Model"),
    *("ResNetModel", "ViTHybridModel", "PixioModel", "VJEPA2Model", "VideoMAEModel"),
    *("HGNetV2ForImageClassification", "MLCDVisionModel", "JanusVisionModel", "DonutSwinModel"),
    *("MaskFormerSwinModel", "Swin2SRModel", "RadioModel", "VivitModel", "TimesformerModel"),
    *("VideoPrismVisionModel", "VideoMAEForVideoClassification", "VJEPA2ForVideoClassification"),
)  # fmt: skip
# What makes a configuration small and changes nothing of how its model works; a list keeps its
# length. Only what the configuration has is set.
NUMBERS = {
    **{"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{
        "intermediate_size": 96,
        "mlp_dim": 96,
        "num_key_value_heads": 4,
        "projection_dim": 32,
    },
    **{"output_channels": 32, "head_dim": 12, "decoder_num_hidden_layers": 1},
    **{"num_patches": 16, "out_hidden_size": 32, "num_frames": 4, "frames_per_clip": 4},
    **{"num_spatial_layers": 2, "num_temporal_layers": 1, "num_pooler_layers": 1},
    **{
        "pred_hidden_size": 48,
        "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 1,
    },
}
STAGED = ("depths", "layer_depths", "num_blocks")
SIDE, PATCH = 64, 16
# Classes whose hidden states are no block's outputs, and what they are.
TOWERS = "\n## Towers of models of images and text\n"
PACKED = {
    **{"depth": 4, "num_heads": 4, "embed_dim": 48, "num_position_embeddings": 64},
    **{
        "window_size": 56,
        "fullatt_block_indexes": [1, 3],
        "deepstack_visual_indexes": [1, 2],
    },
}
# Whose eager attention is another than that of its default implementation, and how.
OTHER_EAGER = {"Phi4MultimodalVisionModel": "not causal, as its default is"}
OTHER_STATES = {"Swin2SRModel": "of stages, each with a convolution behind its blocks"}


def smaller(config: Any) -> dict[str, Any]:
    """The arguments that make a model of this configuration tiny."""
    found: dict[str, Any] = {}
    staged = any(isinstance(getattr(config, key, None), list | tuple) for key in STAGED)
    flat = isinstance(getattr(config, "hidden_size", None), int) and not staged
    for key, value in NUMBERS.items():
        if isinstance(getattr(config, key, None), int) and flat:
            found[key] = value
    for key in STAGED:
        depths = getattr(config, key, None)
        if isinstance(depths, list | tuple):
            found[key] = [1] * (len(depths) - 1) + [2]
    if isinstance(getattr(config, "image_size", None), int) and flat:
        found["image_size"] = SIDE
        if isinstance(getattr(config, "patch_size", None), int):
            found["patch_size"] = PATCH
    if isinstance(getattr(config, "crop_size", None), int) and flat:
        found |= {"crop_size": SIDE, "patch_size": PATCH}
    tubelet = getattr(config, "tubelet_size", None)
    if isinstance(tubelet, list | tuple) and flat:
        found["tubelet_size"] = [tubelet[0], PATCH, PATCH]
    return found


def names() -> list[str]:
    """Those of `CLASSES` that the installed release has, and that take images, or clips, alone."""
    found = {name: getattr(library(), name, None) for name in sorted({*CLASSES})}
    taken = {n: getattr(kind, "main_input_name", "") for n, kind in found.items()}
    return [n for n, given in taken.items() if given in (PIXELS, VIDEOS)]


def outputs(model: LoadedModel, x: Tensor, **wanted: bool) -> Any:
    """What the class itself gives with these outputs asked for, in a copy without vitsee's hooks;
    attention by its eager implementation where its weights are asked for."""
    module: Any = model.module
    config = copy.deepcopy(module.config)
    config._attn_implementation = "eager" if "output_attentions" in wanted else "sdpa"
    try:
        plain = type(module)(config)
    except ValueError:
        config._attn_implementation = "eager"
        plain = type(module)(config)
    plain.load_state_dict(module.state_dict())
    given: dict[str, Any] = {**wanted, "return_dict": True}
    taken = inspect.signature(plain.forward).parameters
    if "spatial_shapes" in taken:  # patches, as the class's own processor cuts them
        x, more = naflex(x, config.patch_size)
        given |= more
    if (packing := packing_of(module)) is not None:
        given |= packing.arguments(
            len(x), packing.grid((x.shape[2], x.shape[3])), x.device
        )
        x = packing.pack(x)
    if "skip_predictor" in taken:
        given["skip_predictor"] = True
    if "noise" in taken and isinstance(
        config.patch_size, int
    ):  # ViT-MAE orders its patches by it
        n = n_patches(x, config.patch_size)
        given["noise"] = torch.arange(n).expand(len(x), n)
    with torch.inference_mode():
        return plain.eval()(x, **given)


def naflex(x: Tensor, patch: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Images as the inputs of SigLIP 2 NaFlex, by transformers' own functions."""
    from transformers.models.siglip2 import image_processing_siglip2 as own

    size = [n // patch for n in x.shape[2:]]
    cut = [
        own.pad_along_first_dim(
            own.convert_image_to_patches(one, patch), n_patches(x, patch)
        )
        for one in x
    ]
    return torch.stack([one for one, _ in cut]), {
        "pixel_attention_mask": torch.stack([mask for _, mask in cut]),
        "spatial_shapes": torch.tensor([size] * len(x)),
    }


def n_patches(x: Tensor, patch: int) -> int:
    return int((x.shape[-2] // patch) * (x.shape[-1] // patch))


def compare(model: LoadedModel, table: SiteTable) -> dict[str, Any]:
    """The row of a model: hidden states, attention; `wrong` where something differs."""
    x, keeper = images(model, 2), Keeper()
    sites = [
        s for s in table.sites if s.alias_of is None and {"blocks", "head"} & {*s.groups}
    ]
    capture = Capture(model, table, sites=sites, attention=table.attention)
    with torch.inference_mode(), capture:
        capture.run(x, keeper)
    found: dict[str, Any] = {"hidden": "", "eager": "", "wrong": ""}
    outs = [site.name for site in table.sites if site.part == "out"]
    try:
        states = getattr(
            outputs(model, x, output_hidden_states=True), "hidden_states", None
        )
    except TypeError:  # of 4.x, where some classes do not take it
        states, found["hidden"] = None, "does not give them"
    if (
        states and frames_of(model.module) is not None
    ):  # in each order that tokens have somewhere
        known = [o for o in table.orders.values() if isinstance(o, ClipOrder)]
        rows = [o for o in known if not o.channels]
        laid = [(x, o) for x in states if isinstance(x, Tensor) for o in rows]
        tensors = [
            o.to_grid_order(x) for x, o in laid if len(x) * x.shape[1] == 2 * o.n_rows
        ]
        found |= hidden_states(tensors, outs, keeper)
    elif states:
        packed = packing_of(model.module) is not None
        tensors = [x for x in states if isinstance(x, Tensor) and (packed or x.ndim > 2)]
        if packed:  # in each order that tokens have somewhere
            orders = [o for o in table.orders.values() if isinstance(o, Order)]
            pairs = [(x, o) for x in tensors for o in orders if x.ndim > o.axis]
            tensors = [
                o.to_grid_order(x) for x, o in pairs if not x.shape[o.axis] % len(o.index)
            ]
        other = OTHER_STATES.get(type(model.module).__name__)
        found |= {"hidden": other} if other else hidden_states(tensors, outs, keeper)
    if table.attention and packing_of(model.module) is None:
        try:
            weights = getattr(
                outputs(model, x, output_attentions=True), "attentions", None
            )
        except (RuntimeError, TypeError, ValueError):
            weights, found["eager"] = None, "its own eager pass fails"
        if (other := OTHER_EAGER.get(type(model.module).__name__)) is not None:
            found["eager"] = other
        elif (
            weights
            and len(weights) == len(outs)
            and not any(b.window for b in table.attention)
        ):
            own = {block.name: weights[block.index] for block in table.attention}
            found |= compare_attention(keeper, own)
    return found


def compare_attention(keeper: Keeper, expected: dict[str, Tensor]) -> dict[str, str]:
    """`eager` of a row, and `wrong` where it is too large; expected: block -> attention."""
    gaps = []
    for name, weights in expected.items():
        own = keeper.scores[name].softmax(-1)
        # SAM has images and heads in one dimension.
        gaps.append(float((own - weights.reshape(own.shape)).abs().max()))
    gap = max(gaps)
    wrong = (
        {}
        if gap <= ATTENTION
        else {"wrong": f"attention differs from eager's by {gap:.2g}"}
    )
    return {"eager": f"{gap:.0e}", **wrong}


def hidden_states(
    states: list[Tensor], outs: list[str], keeper: Keeper
) -> dict[str, Any]:
    """Which of the class's own hidden states are which blocks' outputs, to the bit."""
    if not states:
        return {}
    captured = {
        name: keeper.tokens(name) for name in (*outs, "norm") if name in keeper.sites
    }

    places = {
        name: [i for i, state in enumerate(states) if same_tokens(own, state)]
        for name, own in captured.items()
    }
    n_found = sum(bool(places[name]) for name in outs)
    last = len(states) - 1
    end = "before the norm" if last in places[outs[-1]] else ""
    if last in places.get("norm", ()):
        end = "behind the norm"
    # Of stages only the ends are hidden states; the last block's may be there normalised alone.
    whole = n_found >= min(len(outs), len(states) - 1) - (end == "behind the norm")
    missing = [name for name in outs if not places[name]]
    wrong = "" if whole or n_found or end else f"no hidden state equals {missing[0]}"
    return {
        "hidden": f"{n_found} of {len(outs)}; last {end or 'in another shape'}",
        "wrong": wrong,
    }


def same_tokens(own: Tensor, given: Tensor) -> bool:
    """Whether (images, tokens, dim) are what a module gives, tokens first or last, or as a map."""
    maps = [given.flatten(2).mT, given.flatten(1, 2)] if given.ndim == 4 else []
    readings = maps or [given, given.transpose(0, 1)]
    return any(own.shape == one.shape and torch.equal(own, one) for one in readings)


def tower_names() -> list[str]:
    """CLASS#PATH of each tower of a class that takes images and text."""
    return [n for name in class_names() for n in named_towers(name) if "#" in n]


def tower_config(name: str) -> Any:
    """The configuration of a tower, CLASS#PATH."""
    whole, _, path = name.partition("#")
    kind = getattr(library(), whole)
    module: Any = on_meta(kind, kind.config_class()).get_submodule(path)
    return module.config


def smaller_tower(config: Any) -> dict[str, Any]:
    args = smaller(config)
    for key, value in PACKED.items():
        now = getattr(config, key, None)
        if now is not None and isinstance(now, list) == isinstance(value, list):
            args[key] = value
    if (
        "depth" in args
        or "fullatt_block_indexes" in args
        or "deepstack_visual_indexes" in args
    ):
        args["num_hidden_layers"] = 4
    for key, value in (("image_size", SIDE), ("patch_size", PATCH)):
        if isinstance(getattr(config, key, None), list | tuple):
            args[key] = [value, value]
    return {key: value for key, value in args.items() if hasattr(config, key)}


def attempt(name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"class": name, "outcome": "ok", "reason": ""}
    more: dict[str, Any] = {}
    try:
        if "#" in name:
            config = tower_config(name)
            args = smaller_tower(config)
            patch = args.get("patch_size", getattr(config, "patch_size", None))
            if "image_size" not in args and isinstance(patch, int):
                more = {"img_size": 8 * patch}
        else:
            args = smaller(getattr(library(), name).config_class())
        model = load_model(f"transformers:{name}", random_init=0, model_args=args, **more)
        n_params = sum(p.numel() for p in model.module.parameters())
        row |= {"n_params": n_params, "input": model.input_size[1]}
        if n_params > MOST:
            return {
                **row,
                "outcome": "left out",
                "reason": f"{n_params / 1e6:.0f} M parameters",
            }
        redraw(model.module)
        table = site_table(model)
        if not any(site.block for site in table.sites):
            return {
                **row,
                "outcome": "refused",
                "reason": "no blocks that give one tensor",
            }
        row |= compare(model, table)
    except Exception as error:
        file = traceback.extract_tb(error.__traceback__)[-1].filename
        ours = "vitsee" in file or "tools" in file
        return row | failed(error) | ({} if ours else {"outcome": "refused"})
    row |= described(table)
    if row["wrong"]:
        row |= {"outcome": "FAILURE", "reason": row["wrong"]}
    return row


def failed(error: Exception) -> dict[str, str]:
    """outcome and reason of a row."""
    if isinstance(error, ModelError):
        return {"outcome": "refused", "reason": str(error)}
    file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    reason = f"{type(error).__name__}: {str(error)[:150]} ({file.name})"
    return {"outcome": "FAILURE", "reason": reason}


def described(table: SiteTable) -> dict[str, str]:
    """Cells of a row: blocks, grids, attention, residual."""
    outs = [site for site in table.sites if site.part == "out"]
    layouts = dict.fromkeys(
        site.layout for site in outs if site.layout and site.layout.grid
    )
    grids = "; ".join(
        "x".join(map(str, x.body)) + (f" + {','.join(x.prefix)}" if x.prefix else "")
        for x in layouts
        if x.grid
    )
    return {
        "blocks": f"{len(outs)} ({outs[0].site_path or outs[0].name})",
        "grids": grids,
        "attention": str(len(table.attention) or table.attention_refusal),
        "residual": str(len(table.sublayers) or table.residual_refusal),
    }


def table_lines(rows: list[dict[str, Any]], columns: dict[str, str]) -> list[str]:
    """The rows as a table of Markdown; columns: key -> what is written above."""
    lines = [f"| {' | '.join(columns.values())} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [
            " ".join(str(row.get(k, "")).replace("|", "\\|").split()) for k in columns
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


COMPARED = ("outcome", "blocks", "grids", "hidden", "attention", "residual", "reason")


def release(rows: list[dict[str, Any]], others: dict[str, Any]) -> list[str]:
    """What another release does otherwise. Of classes that are ok in both, paths of blocks are left
    out: releases name them anew."""
    version, known = others["version"], {row["class"]: row for row in others["rows"]}
    counts = {
        kind: sum(r["outcome"] == kind for r in known.values())
        for kind in ("ok", "FAILURE")
    }
    lines = [
        "",
        f"## transformers {version}",
        "",
        f"The same in {version} (`tools/transformers_4.sh`): {len(known)} classes,",
        f"{counts['ok']} ok, {counts['FAILURE']} failures. What is not as above:",
        "",
        f"| class | {version} |",
        "|---|---|",
    ]
    for row in rows:
        if (other := known.get(row["class"])) is None:
            lines.append(f"| {row['class']} | is not there |")
            continue
        differing = []
        for key in COMPARED:
            here, there = (str(r.get(key) or "").partition(" (")[0] for r in (row, other))
            if here != there and (there or key != "reason"):
                whole = str(other.get(key) or "none")
                differing.append(
                    f"{key}: {whole if key == 'reason' else there or 'none'}"
                )
        if differing:
            text = "; ".join(differing).replace("|", "\\|")
            lines.append(f"| {row['class']} | {text} |")
    return lines


def page(rows: list[dict[str, Any]], others: dict[str, Any] | None = None) -> str:
    """The page. others: `version` and `rows` of another release."""
    version = library().__version__
    counts = {kind: sum(r["outcome"] == kind for r in rows) for kind in ("ok", "FAILURE")}
    lines = [
        "# Architectures of transformers",
        "",
        f"{len(rows)} classes of transformers {version}, tiny, with random weights, tried by",
        f"`tools/try_transformers.py`: {counts['ok']} ok, {counts['FAILURE']} failures, the others",
        "with the reason why they are refused. In every row that is `ok` the proofs of",
        "[what is checked](guide/extraction.md#what-is-checked) passed.",
        "",
        "Blocks: how many, and the path of the first in the class. Hidden: how many of the blocks'",
        "outputs equal one of the class's own `hidden_states` bit for bit, and whether the last of",
        "these is before or behind the final norm. Attention: blocks whose attention is kept, or",
        "why none is; eager: its largest difference from the `attentions` of the eager",
        "implementation.",
        "Residual: sublayers proven.",
        "",
    ]
    keys = (
        "class",
        "outcome",
        "blocks",
        "grids",
        "hidden",
        "attention",
        "eager",
        "residual",
    )
    lines += table_lines(rows, {**{key: key for key in keys}, "reason": "refused"})
    lines += [] if others is None else release(rows, others)
    return "\n".join(lines) + "\n"


def section(rows: list[dict[str, Any]]) -> str:
    """The section of the towers."""
    counts = {kind: sum(r["outcome"] == kind for r in rows) for kind in ("ok", "FAILURE")}
    lines = [
        TOWERS,
        f"{len(rows)} towers of classes of transformers {library().__version__} that take images",
        "and text, by their paths as `vitsee extract transformers:NAME#PATH` takes them, the",
        f"columns as above: {counts['ok']} ok, {counts['FAILURE']} failures. `vitsee models",
        "'transformers:*'` lists all there are. Of towers of packed patches the hidden states are",
        "compared row by row, to the bit, where the class gives any; their own classes give no",
        "attention by image. LFM3-VL has none in blocks that convolve over the grid. A reason",
        "about numbers of heads, groups or pixels is one of the tiny configuration.",
        "",
    ]
    keys = (
        "class",
        "outcome",
        "blocks",
        "grids",
        "hidden",
        "attention",
        "eager",
        "residual",
    )
    columns = {**{key: key for key in keys}, "reason": "refused"}
    return "\n".join([*lines, *table_lines(rows, columns), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path, nargs="?")
    parser.add_argument(
        "--rows", type=Path, help="write what was found as JSON, for --beside"
    )
    parser.add_argument("--beside", type=Path, help="the --rows of another release")
    parser.add_argument("--only", nargs="*", help="these classes alone")
    parser.add_argument(
        "--towers", action="store_true", help="the section of towers alone"
    )
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = []
    for name in given.only or (tower_names() if given.towers else names()):
        rows.append(attempt(name))
        row = rows[-1]
        print(
            name,
            row["outcome"],
            row.get("hidden"),
            row.get("eager"),
            row["reason"],
            flush=True,
        )
    if given.rows is not None:
        record = {"version": library().__version__, "rows": rows}
        given.rows.write_text(json.dumps(record, indent=1))
    if given.page is not None:
        others = None if given.beside is None else json.loads(given.beside.read_text())
        known = given.page.read_text() if given.page.exists() else ""
        above, _, towers = known.partition(TOWERS)
        if given.towers:
            given.page.write_text(above + section(rows))
        else:
            given.page.write_text(
                page(rows, others) + (TOWERS + towers if towers else "")
            )
    return int(any(row["outcome"] == "FAILURE" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
