"""Try vitsee on the towers of the installed open_clip and torchvision; write a page of what came
out.

    python tools/try_towers.py docs/architectures-towers.md

Every classifier of torchvision, and of open_clip one model of each build, its own classes made
small, those of timm as they are; all with random weights and on small images. Of each: whether its
sites are found, whether blocks' outputs are to the bit what the module of the same weights gives
that its library makes, whether attention equals that of the same module with the explicit product
of softmax and values, and how many residual sublayers are proven. A row names what was refused and
why; a traceback or a difference is a FAILURE, and the exit code 1. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from timm.models import create_model, model_entrypoint
from torch import Tensor, nn
from torch.nn import functional
from try_transformers import (
    compare_attention,
    described,
    failed,
    same_tokens,
    table_lines,
)

from tests.models_helpers import Keeper, images, redraw
from vitsee_core.models.capture import Capture
from vitsee_core.models.hook_points import ModelError, first_tensor
from vitsee_core.models.load import load_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.sources import source_of
from vitsee_core.models.sources.tagged import library

MOST = 150_000_000  # parameters
SIDE = 96
TEXT = {"context_length": 8, "vocab_size": 16, "width": 64, "heads": 1, "layers": 1}
# What of an open_clip tower is a size, and how small it is made.
SMALL = {"width": 128, "head_width": 32, "mlp_ratio": 2.0, "patch_size": 16}
COLUMNS = {
    **{"name": "model", "outcome": "outcome", "blocks": "blocks", "grids": "grids"},
    **{
        "outputs": "outputs",
        "attention": "attention",
        "eager": "eager",
        "residual": "residual",
    },
    **{"reason": "refused"},
}


@dataclass(frozen=True)
class Trial:
    """name: as vitsee takes it. args: what makes it small. size: a tower's parameters, unless it is
    small. others: models of the same build."""

    name: str
    args: dict[str, Any]
    n_params: int = 0
    others: int = 0


def of_torchvision() -> Iterator[Trial]:
    for full in source_of("torchvision:*").matching():
        module = source_of(full).without_weights({})
        yield Trial(full, {}, sum(p.numel() for p in module.parameters()))


def of_open_clip() -> Iterator[Trial]:
    """The smallest model of each build, alphabetically."""
    builds: dict[Any, list[Trial]] = {}
    for name in library().list_models():
        config = library().get_model_config(name)
        vision, n_params = config["vision_cfg"], 0
        timm = vision.get("timm_model_name")
        if timm:
            with torch.device("meta"):
                n_params = sum(p.numel() for p in create_model(timm).parameters())
            key: Any = model_entrypoint(timm).__module__, vision.get("timm_pool")
        else:
            rest = {
                k: x
                for k, x in vision.items()
                if k not in (*SMALL, "layers", "image_size")
            }
            staged = isinstance(vision["layers"], list)
            key = staged, bool(config.get("quick_gelu")), str(sorted(rest.items()))
        builds.setdefault(key, []).append(
            Trial(f"open_clip:{name}", tiny(name), n_params)
        )
    for trials in builds.values():
        first = min(trials, key=lambda trial: (trial.n_params, len(trial.name)))
        yield Trial(first.name, first.args, first.n_params, len(trials) - 1)


def tiny(name: str) -> dict[str, Any]:
    """The arguments that make a tower of open_clip's own small, and any model's texts."""
    vision = library().get_model_config(name)["vision_cfg"]
    small: dict[str, Any] = {key: x for key, x in SMALL.items() if vision.get(key)}
    small["image_size"] = SIDE
    if isinstance(vision.get("layers"), list):
        small |= {"layers": [1, 1, 1, 2], "width": 32}
    elif "layers" in vision:
        small["layers"] = 3
    return {"vision_cfg": {**vision, **small}, "text_cfg": TEXT, "embed_dim": 64}


def attempt(trial: Trial) -> dict[str, Any]:
    same = f" and {trial.others} more of its build" if trial.others else ""
    row: dict[str, Any] = {"name": trial.name + same, "outcome": "ok", "reason": ""}
    if trial.n_params > MOST:
        return {
            **row,
            "outcome": "left out",
            "reason": f"{trial.n_params / 1e6:.0f} M parameters",
        }
    try:
        model = made(trial)
        redraw(model.module)
        table = site_table(model)
        row |= described(table) | compare(model, table)
    except Exception as error:
        return row | failed(error)
    if row["wrong"]:
        row |= {"outcome": "FAILURE", "reason": row["wrong"]}
    return row


def made(trial: Trial) -> LoadedModel:
    """On images of `SIDE` pixels, where it takes them; else of its own size."""
    try:
        return load_model(trial.name, random_init=0, img_size=SIDE, model_args=trial.args)
    except ModelError:
        return load_model(trial.name, random_init=0, model_args=trial.args)


def compare(model: LoadedModel, table: SiteTable) -> dict[str, Any]:
    """outputs and eager of a row; `wrong` where something differs."""
    x, keeper = images(model, 2), Keeper()
    outs = [site for site in table.sites if site.part == "out"]
    stored = [
        site for site in table.sites if site.alias_of is None and "blocks" in site.groups
    ]
    with torch.inference_mode():
        with Capture(model, table, sites=stored, attention=table.attention) as capture:
            capture.run(x, keeper)
        module = plain(model)
        paths = {
            site.name: table.points[site.name].hook_points[0].module for site in outs
        }
        given = outputs_of(module, [*paths.values()], x)
        own = {site.name: keeper.tokens(site.alias_of or site.name) for site in outs}
        same = [same_tokens(own[name], given[path]) for name, path in paths.items()]
        found = {"outputs": f"{sum(same)} of {len(same)}", "eager": "", "wrong": ""}
        if not all(same):
            found["wrong"] = (
                f"{outs[same.index(False)].name} is not what its module gives"
            )
        explicit = explicit_attention(module, [*table.attention_modules.values()], x)
        modules = {
            block.name: table.attention_modules[block.name] for block in table.attention
        }
        if modules:
            expected = {name: explicit[path][0] for name, path in modules.items()}
            found |= compare_attention(keeper, expected)
    return found


def plain(model: LoadedModel) -> nn.Module:
    """The module as its library makes it, with the same weights."""
    size = model.input_size[1:]
    wanted = {**model.model_args, "img_size": size}
    module = source_of(model.name).make(pretrained=False, seed=1, arguments=wanted)
    module.load_state_dict(model.module.state_dict())
    return module.eval()


def outputs_of(module: nn.Module, paths: list[str], x: Tensor) -> dict[str, Tensor]:
    """What modules give in the library's own forward pass, torch's fused path off."""
    found: dict[str, Tensor] = {}
    handles = []
    for path in paths:

        def keep(_m: nn.Module, _a: Any, output: Any, path: str = path) -> None:
            tensor = first_tensor(output)
            assert tensor is not None
            found[path] = tensor.clone()

        handles.append(module.get_submodule(path).register_forward_hook(keep))
    with slow_path():
        module(x)
    for handle in handles:
        handle.remove()
    return found


def explicit_attention(
    module: nn.Module, paths: list[str], x: Tensor
) -> dict[str, list[Tensor]]:
    """The softmax of scores within modules, the kernel replaced by its formula."""
    found: dict[str, list[Tensor]] = {path: [] for path in paths}
    inside: list[str] = []
    softmax, handles = functional.softmax, []
    for path in paths:
        child = module.get_submodule(path)
        handles.append(
            child.register_forward_pre_hook(lambda *_, path=path: inside.append(path))
        )
        handles.append(child.register_forward_hook(lambda *_: inside.pop() and None))

    def kept(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weights = softmax(scores, *args, **kwargs)
        if inside:
            found[inside[-1]].append(weights)
        return weights

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any = None,
        *_: Any,
        scale: Any = None,
        **given: Any,
    ) -> Tensor:
        scores, mask = (
            q @ k.mT * (scale or q.shape[-1] ** -0.5),
            given.get("attn_mask", mask),
        )
        return kept(scores if mask is None else scores + mask, dim=-1) @ v

    with (
        mock.patch.object(functional, "softmax", kept),
        mock.patch.object(functional, "scaled_dot_product_attention", kernel),
        slow_path(),
    ):
        module(x)
    for handle in handles:
        handle.remove()
    return found


@contextmanager
def slow_path() -> Iterator[None]:
    """Without torch's fused path of nn.MultiheadAttention, which rounds otherwise."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def page(rows: list[dict[str, Any]]) -> str:
    import torchvision

    counts = {kind: sum(r["outcome"] == kind for r in rows) for kind in ("ok", "FAILURE")}
    version = torchvision.__version__.partition("+")[0]  # without the kind of build
    versions = f"open_clip {library().__version__} and torchvision {version}"
    lines = [
        "# Architectures of open_clip and torchvision",
        "",
        f"{len(rows)} models of {versions} with random weights, tried by",
        f"`tools/try_towers.py`: {counts['ok']} ok, {counts['FAILURE']} failures, the others with",
        "the reason why not. Of open_clip's builds the smallest model, and how many more there",
        "are: its own classes made small, those of timm as they are. In every row that is `ok` the",
        "proofs of [what is checked](guide/extraction.md#what-is-checked) passed.",
        "",
        "Blocks: how many, and the path of the first. Outputs: how many of the blocks' outputs are",
        "to the bit what the module gives that the library makes, with the same weights.",
        "Attention: blocks whose attention is kept, or why none is; eager: its largest difference",
        "from the explicit softmax in that module. Residual: sublayers proven.",
        "",
        *table_lines(rows, COLUMNS),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--only", nargs="*", help="these models alone")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = []
    for trial in (*of_open_clip(), *of_torchvision()):
        if given.only and trial.name not in given.only:
            continue
        row = attempt(trial)
        rows.append(row)
        told = (row.get("outputs"), row.get("eager"), row.get("residual"), row["reason"])
        print(row["name"], row["outcome"], *told, flush=True)
    given.page.write_text(page(rows))
    return int(any(row["outcome"] == "FAILURE" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
