"""Try vitsee on every architecture family of the installed timm; write a table of what came out.

    python tools/try_every_architecture.py WORK_DIR docs/architectures.md

Of each of timm's module files the architecture with the fewest parameters (timm's own `test_*`
models aside) is extracted with random weights, three images and default options: at its own input
size, and at one that its patches do not divide, where it takes one. Then, independent of the
hooks, the store is validated, and its `logits` and `pooled` are compared with the model's output
and timm's pre-logits features of the same images; once more with norms, running statistics and
position tables redrawn, whose initial values make many hook points equal. A row names what was left
out or refused and why; a traceback, a failed self-check, damage or a difference is a FAILURE, and
the exit code 1.

WORK_DIR keeps a file for each row, so that the run can be stopped and goes on where it was; remove
a row's file to try it again. About an hour on two cores; several GB of memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from click.testing import CliRunner
from PIL import Image
from try_transformers import table_lines

from tests.models_helpers import Keeper, redraw
from vitsee_cli.main import main as vitsee
from vitsee_core.images import normalise
from vitsee_core.models.capture import Capture
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.provenance import Pictures
from vitsee_core.models.site_tables import site_table
from vitsee_stores import Store, VitseeError, open_store

N_IMAGES = 3
# Sizes that no patch of 2, 4, 8, 14, 16, 32 divides; the larger one for models with a least size.
UNEVEN = (101, 229)
# What makes the smallest one of a family small enough, and changes nothing of how it works.
SIZES = {
    "hieradet_sam2": 256,
    "mobilenetv5": 256,
    "qwen3_vit": 256,
    "vision_transformer_sam": 256,
}
SMALLER: dict[str, dict[str, Any]] = {
    "deepseek_vit": {"depth": 2},
    "gemma4_vit": {"depth": 2},
}
COLUMNS = {
    **{
        "module": "module",
        "architecture": "architecture",
        "n_params": "M",
        "input": "input",
    },
    **{
        "outcome": "outcome",
        "sites": "block sites",
        "grids": "grids",
        "attention": "attention",
    },
    **{"residual": "residual", "notes": "left out, refused"},
}
TOLERANCE = 2e-4  # of the largest value: other batches, other order of sums


def smallest(module: str, work: Path) -> tuple[str, int]:
    """The architecture of a module file with the fewest parameters, and how many it has."""
    file = work / f"{module}.params.json"
    if not file.exists():
        counts = {}
        for name in timm.list_models(module=module):
            if not name.startswith("test_"):
                with torch.device("meta"):
                    model = timm.create_model(name)
                counts[name] = sum(p.numel() for p in model.parameters())
        file.write_text(json.dumps(counts))
    counts = json.loads(file.read_text())
    name = min(counts, key=lambda name: (counts[name], name))
    return name, counts[name]


def extract(
    name: str, size: int | None, smaller: dict[str, Any], data: Path, out: Path
) -> tuple[str, str]:
    """Run `vitsee extract` with default options; (outcome, reason), the first "ok", "refused" or
    "FAILURE"."""
    args = [
        "extract",
        name,
        "--random-init",
        "0",
        "--data",
        str(data),
        "-o",
        str(out),
        "--force",
    ]
    for key, value in smaller.items():
        args += ["--model-arg", f"{key}={value}"]
    if size is not None:
        args += ["--img-size", str(size)]
    result = CliRunner().invoke(vitsee, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        lines = traceback.format_exception(result.exception)
        return (
            "FAILURE",
            f"{type(result.exception).__name__}: {result.exception} {lines[-2]}",
        )
    if result.exit_code == 0:
        return "ok", ""
    line = [line for line in result.stderr.splitlines() if line.strip()][-1]
    # A size that the model does not take is its user's mistake; a default has none to make.
    takes = size is None or not any(
        word in line for word in ("--img-size", "cannot be made")
    )
    return ("FAILURE" if takes else "refused"), line


def compare(store: Store, model: LoadedModel) -> str | None:
    """Where the store's vectors differ from what the model itself gives, or those captured with
    redrawn weights; None if nowhere."""
    pixels = torch.from_numpy(Pictures(store)(np.arange(store.n_images)))
    x = normalise(pixels, model.transform, "cpu")
    names: list[str] = [name for name in ("logits", "pooled") if name in store.sites]
    stored = {
        name: torch.from_numpy(np.asarray(store.vectors(name)[:])) for name in names
    }
    return difference(model, x, stored) or redrawn(model, x)


def redrawn(model: LoadedModel, x: torch.Tensor) -> str | None:
    """Redraw the model's weights, and compare what is captured then."""
    redraw(model.module)
    table, keeper = site_table(model), Keeper()
    sites = [site for site in table.sites if site.name in ("logits", "pooled")]
    with torch.inference_mode(), Capture(model, table, sites=sites) as capture:
        capture.run(x, keeper)
    found = difference(model, x, {name: body for name, (_, body) in keeper.sites.items()})
    return found and f"with redrawn weights {found}"


def difference(
    model: LoadedModel, x: torch.Tensor, found: dict[str, torch.Tensor]
) -> str | None:
    """Where `found`, by site, differs from the model's output and its pre-logits."""
    wanted: dict[str, Any] = {}
    with torch.inference_mode():
        wanted["logits"] = model.module(x)
        try:
            features = model.module.forward_features(x)  # type: ignore[operator]
            wanted["pooled"] = model.module.forward_head(features, pre_logits=True)  # type: ignore[operator]
        except (AttributeError, TypeError, NotImplementedError):
            pass
    for name, value in wanted.items():
        if name not in found or not isinstance(value, torch.Tensor):
            continue
        stored = found[name]
        flat = value.flatten(1).float()
        if stored.shape != flat.shape:
            return f"{name} is {tuple(stored.shape)}, timm's {tuple(flat.shape)}"
        gap = float((stored - flat).abs().max() / flat.abs().max().clamp_min(1e-30))
        if not gap <= TOLERANCE:
            return f"{name} differs from timm's by {gap:.2g} of the largest value"
    return None


def facts(store: Store) -> dict[str, Any]:
    """What the store holds, in words."""
    plan, left = store.plan, store.manifest.left_out
    stored = [site for site in plan.sites if site.alias_of is None]
    outs = [site for site in stored if "blocks" in site.groups]
    layouts = dict.fromkeys(
        site.layout for site in outs if site.layout and site.layout.grid
    )
    grids = [
        f"{x.grid[0]}x{x.grid[1]} every {x.stride_px[0]:g}"
        + (f" from {x.offset_px[0]:g}" if x.offset_px != (0.0, 0.0) else "")
        + (f" + {','.join(x.prefix)}" if x.prefix else "")
        for x in layouts
        if x.grid and x.stride_px
    ]
    n_attention = sum(len(group.blocks) for group in plan.attention)
    others = [
        site.name for site in outs if site.layout is None or site.layout.grid is None
    ]
    head = [
        f"{name}: {left[name]}" for name in ("norm", "pooled", "logits") if name in left
    ]
    return {
        "input": store.manifest.transform["input_size"][1],
        "sites": len(outs),
        "grids": grids,
        "no_grid": others,
        "attention": str(n_attention) if n_attention else left.get("attention", "none"),
        "residual": str(len(plan.sublayers))
        if plan.sublayers
        else left.get("residual", "none"),
        "left_out": [left["head"]] if "head" in left else head,
    }


def attempt(
    name: str, size: int | None, smaller: dict[str, Any], data: Path
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "s.zarr"
        outcome, reason = extract(name, size, smaller, data, out)
        if outcome != "ok":
            return {"outcome": outcome, "reason": reason}
        checked = CliRunner().invoke(vitsee, ["validate", "--deep", str(out)])
        if checked.exit_code != 0:
            return {"outcome": "FAILURE", "reason": f"validate: {checked.output}"}
        store = open_store(out)
        try:
            model = load_model(name, random_init=0, img_size=size, model_args=smaller)
            wrong = compare(store, model)
        except (VitseeError, ModelError, RuntimeError) as error:
            wrong = f"{type(error).__name__}: {error}"
        row = facts(store)
    return {"outcome": "FAILURE" if wrong else "ok", "reason": wrong or "", **row}


def attempts(module: str, work: Path, data: Path) -> list[dict[str, Any]]:
    """The rows of one module file, tried or read from an earlier run."""
    file = work / f"{module}.json"
    if file.exists():
        known: list[dict[str, Any]] = json.loads(file.read_text())
        return known
    name, n_params = smallest(module, work)
    size, smaller = SIZES.get(module), SMALLER.get(module, {})
    args = ", ".join(f"{key}={value}" for key, value in smaller.items())
    shown = f"{name} ({args})" if args else name
    base = {"module": module, "architecture": shown, "n_params": n_params}
    rows = [{**base, "size": size, **attempt(name, size, smaller, data)}]
    for uneven in UNEVEN:
        row = {**base, "size": uneven, **attempt(name, uneven, smaller, data)}
        rows.append(row)
        if row["outcome"] != "refused":
            break
    refused = [row for row in rows[1:] if row["outcome"] == "refused"]
    for row in refused[:-1]:  # one refusal says it all
        rows.remove(row)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1))
    part.replace(file)
    return rows


def plant(folder: Path) -> Path:
    """Smooth random pictures."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(N_IMAGES):
        seed = Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8))
        seed.resize((320, 360), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
    return folder


def table(rows: list[dict[str, Any]]) -> str:
    failures = sum(row["outcome"] == "FAILURE" for row in rows)
    modules = len({row["module"] for row in rows})
    lines = [
        "# Architectures",
        "",
        "Of transformers' classes: [their own page](architectures-transformers.md); of open_clip's",
        "and torchvision's towers: [theirs](architectures-towers.md).",
        "",
        f"The smallest architecture of each of timm {timm.__version__}'s {modules} module files,",
        f"extracted with default options by `tools/try_every_architecture.py`: {len(rows)} runs,",
        f"{failures} failures. The second row of a family has an image size that its patches do",
        "not divide, or says why it takes none. In every run that is `ok` the self-check passed,",
        "the store validates, and `logits` and `pooled` equal what the model and timm's",
        "`forward_head(pre_logits=True)` give, with initial weights and with norms, running",
        "statistics and position tables redrawn.",
        "",
        "Input: pixels. Grids: of the block outputs, cells, stride and offset in pixels, prefix",
        "tokens. Attention: blocks whose attention is kept, or why none is. Residual: sublayers.",
        "",
    ]
    shown = []
    for row in rows:
        notes = [row["reason"], *row.get("left_out", [])]
        if row.get("no_grid"):
            notes.append(
                f"no grid: {len(row['no_grid'])} sites ({row['no_grid'][0]}, ...)"
            )
        shown.append(row | {
            "n_params": f"{row['n_params'] / 1e6:.1f}",
            "input": row.get("input") or row["size"] or "default",
            "grids": "; ".join(row.get("grids", [])),
            "notes": "; ".join(note for note in notes if note),
        })  # fmt: skip
    return "\n".join([*lines, *table_lines(shown, COLUMNS)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--only", nargs="*", help="these module files alone")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    given.work.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(given.work).free < 4e9:
        print("4 GB of free disk are needed", file=sys.stderr)
        return 1
    data = plant(given.work / "data")
    rows = []
    for module in given.only or timm.list_modules():
        found = attempts(module, given.work, data)
        rows += found
        for row in found:
            print(
                module,
                row["architecture"],
                row["size"],
                row["outcome"],
                row["reason"],
                flush=True,
            )
    given.page.write_text(table(rows))
    return int(any(row["outcome"] == "FAILURE" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
