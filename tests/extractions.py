"""Small data and `vitsee extract` runs that the extraction tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from click.testing import CliRunner, Result
from PIL import Image

VIT = [
    "test_vit",
    "--random-init",
    "0",
    "--img-size",
    "32x48",
    "--model-arg",
    "patch_size=8",
]
RESNET = ["test_resnet", "--random-init", "0", "--img-size", "64"]


def plant_images(
    folder: Path, n: int, size: tuple[int, int] = (50, 60), damaged: str | None = None
) -> Path:
    """`n` smooth random pictures in two class folders below `folder`; `damaged` is none."""
    rng = np.random.default_rng(0)
    for i in range(n):
        path = folder / f"class{i % 2}" / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        seed = Image.fromarray(rng.integers(0, 256, (6, 5, 3), dtype=np.uint8))
        seed.resize((size[1], size[0]), Image.Resampling.BICUBIC).save(path)
    if damaged is not None:
        (folder / damaged).write_bytes(b"no picture")
    return folder


def plant_bright(folder: Path) -> list[object]:
    """MODEL and the options of data and weights for 12 images of which the last one alone is
    bright, long after the self-check's, and overflows float16 in channel 0 of `embed`."""
    from vitsee_core.models.load import load_model

    dim = np.random.default_rng(0).integers(0, 2, (12, 32, 48, 3), dtype=np.uint8)
    dim[11] = 255
    np.savez(folder / "data.npz", images=dim)
    model = load_model(
        "test_vit", random_init=0, img_size=(32, 48), model_args={"patch_size": 8}
    )
    state = model.module.state_dict()
    weight = state["patch_embed.proj.weight"]
    weight[0] = 7e4 / (2 * weight[0].numel())  # constant: reads the brightness only
    torch.save(state, folder / "bright.pt")
    options = [
        VIT[0],
        "--checkpoint",
        folder / "bright.pt",
        *VIT[3:],
        "--order",
        "dataset",
    ]
    options += ["--data", folder / "data.npz", "--slab", 4, "--crop-pct", 1]
    return [*options, "--img-mean", "0,0,0", "--img-std", "0.4,0.4,0.4"]


def extract(*args: object) -> Result:
    """`vitsee extract ARGS` in this process."""
    from vitsee_cli.main import main

    return CliRunner().invoke(main, ["extract", *map(str, args)])


def extracted(*args: object) -> Result:
    """As `extract`, for a run that has to succeed."""
    result = extract(*args)
    assert result.exit_code == 0, result.output
    return result


def array_bytes(store: Path) -> dict[str, bytes]:
    """Every chunk of every array, but for the commit markers, which name host and time."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("c.*"))
        if path.is_file() and path.parent.name != "commits"
    }
