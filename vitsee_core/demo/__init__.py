"""The data and the trained models that ship with vitsee."""

from __future__ import annotations

from pathlib import Path

from vitsee_stores.errors import VitseeError

SPLITS = ("train", "test")
_HERE = Path(__file__).parent


def models() -> list[str]:
    """The names of the demo's models, sorted: each is a folder with config.json and weights."""
    return sorted(file.parent.name for file in _HERE.glob("*/config.json"))


def model_folder(name: str) -> Path:
    """The timm `local-dir:` folder of `demo:vit`, `demo:resnet` and so on (the prefix may be left
    out). Raises VitseeError: no demo model has that name."""
    short = name.removeprefix("demo:")
    if short not in (found := models()):
        known = ", ".join(f"demo:{model}" for model in found)
        raise VitseeError(f"no demo model {name!r}; the demo's models: {known}")
    return _HERE / short


def data_file() -> Path:
    """The .npz file of 2000 training and 2000 test images of Fashion-MNIST, 28 x 28 grey. Raises
    VitseeError: the file is not installed."""
    return _installed(_HERE / "fashion_mnist.npz")


def _installed(path: Path) -> Path:
    if not path.exists():
        raise VitseeError(
            f"{path} is missing; expected it in the package: install vitsee again"
        )
    return path
