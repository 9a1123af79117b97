"""Detects a repeated command with nothing to do, from its store's manifest: without model, images
and torch."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from vitsee_core.runtime.command_lines import without_options
from vitsee_stores import StoreWriter
from vitsee_stores.generations import Generation, read_generations
from vitsee_stores.metadata import ZARR_JSON
from vitsee_stores.url import Place
from vitsee_stores.writer import tidy

# Options that do not affect a store.
_HOW = ("--shard", "--dask", "--device", "--workers", "--batch-size")


def n_complete(command: str, output: Place) -> int | None:
    """The number of images of the store at `output`, if it is complete, it or one of its
    generations was made by this command in this folder, and no file that it names (a list, a
    checkpoint) is newer; else None. Raises StoreError: not a store, or damaged."""
    writer = StoreWriter.join(output)
    if writer is None or not writer.complete:
        return None
    generations = [one for one in read_generations(writer.files) if one.published]
    if not all(one.complete for one in generations):
        return None
    made = next((n for one in generations if (n := _n_made(one, command)) is not None), None)
    if made is not None:
        tidy(writer.files)
    return made


def _n_made(generation: Generation, command: str) -> int | None:
    """The number of images of a store with this generation, if the command made that."""
    info, place = generation.manifest.info, generation.files.place
    try:
        made = shlex.split(str(info.get("command", "")))
    except ValueError:
        return None
    same = without_options(made, _HOW) == without_options(shlex.split(command), _HOW)
    if not same or info.get("data_folder") != os.getcwd():
        return None
    if isinstance(place, Path):
        finished = (place / ZARR_JSON).stat().st_mtime
        if any(os.path.isfile(word) and os.path.getmtime(word) > finished for word in made):
            return None
    return generation.whole.plan.n_images
