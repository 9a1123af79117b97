"""The data and the trained models that ship with vitsee."""

from __future__ import annotations

from pathlib import Path

from vitsee_stores.errors import VitseeError

SPLITS = ("train", "test")
_HERE = Path(__file__).parent


def models() -> list[str]:
    """Return the names of the demo's models, sorted: each is a folder with config.json and
    weights."""
    return sorted(file.parent.name for file in _HERE.glob("*/config.json"))


def model_folder(name: str) -> Path:
    """Return the timm `local-dir:` folder of a model.

    Args:
        name: `demo:vit`, `demo:resnet` and so on; the prefix may be left out.

    Raises:
        VitseeError: no demo model has that name.
    """
    short_name = name.removeprefix("demo:")
    names = models()
    if short_name not in names:
        listed = ", ".join(f"demo:{model}" for model in names)
        raise VitseeError(f"no demo model {name!r}; the demo's models: {listed}")
    return _HERE / short_name


def data_file() -> Path:
    """Return the .npz file of 2000 training and 2000 test images of Fashion-MNIST, 28 x 28 grey.

    Raises:
        VitseeError: the file is not installed.
    """
    path = _HERE / "fashion_mnist.npz"
    # A distributor's package may leave out data.
    if not path.exists():
        raise VitseeError(
            f"{path} is missing; expected it in the package: install vitsee again"
        )
    return path
