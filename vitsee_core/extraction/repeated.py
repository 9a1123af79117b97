"""Detects a repeated command with nothing to do, from its store's manifest: without model, images
and torch."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from vitsee_core.runtime.command_lines import without_options
from vitsee_stores import StorePlan, StoreWriter
from vitsee_stores.generations import Generation, read_generations
from vitsee_stores.metadata import ZARR_JSON
from vitsee_stores.url import Place
from vitsee_stores.writer import tidy

# Options that do not affect a store.
_HOW = ("--shard", "--dask", "--device", "--workers", "--batch-size")


def complete_plan(command: str, output: Place) -> StorePlan | None:
    """What the store at `output` holds, if it is complete, it or one of its
    generations was made by this command in this folder, and no file that it names (a list, a
    checkpoint) is newer; else None. Raises StoreError: not a store, or damaged."""
    writer = StoreWriter.join(output)
    if writer is None or not writer.complete:
        return None
    generations = [one for one in read_generations(writer.files) if one.published]
    if not all(one.complete for one in generations):
        return None
    if not any(_was_made_by(command, one) for one in generations):
        return None
    tidy(writer.files)
    return generations[-1].whole.plan


def _was_made_by(command: str, generation: Generation) -> bool:
    info, place = generation.manifest.info, generation.files.place
    try:
        made = shlex.split(str(info.get("command", "")))
    except ValueError:
        return False
    same = without_options(made, _HOW) == without_options(shlex.split(command), _HOW)
    if not same or info.get("data_folder") != os.getcwd():
        return False
    if not isinstance(place, Path):
        return True
    finished = (place / ZARR_JSON).stat().st_mtime
    return not any(os.path.isfile(word) and os.path.getmtime(word) > finished for word in made)
