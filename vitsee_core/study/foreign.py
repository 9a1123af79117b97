"""A study replaces only files that it wrote itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vitsee_core.report.outputs import Outputs
from vitsee_core.study.running import BEGUN, Record
from vitsee_core.study.steps import Step, Study
from vitsee_core.tables.files import check_place
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import few


def check_outputs(study: Study, steps: Sequence[Step], record: Record) -> None:
    """Refuse outputs of steps that are not the study's own, by its record. Stores are left to
    extract, which replaces none. Raises VitseeError: names the files; or the study's folder is
    inside a store or among its images."""
    for images in (study.data, study.train or ""):
        check_place(record.path, images=images)
    found = [
        path
        for step in steps
        for output in step.outputs
        if output.suffix != ".zarr" and not _is_own(output.relative_to(study.folder), record)
        for path in _files_of(output)
        if path.exists()
    ]
    if found:
        names = few([str(path) for path in found])
        raise VitseeError(
            f"{names} would be replaced, and {record.path} does not say that this study wrote "
            f"{'it' if len(found) == 1 else 'them'}; move {'it' if len(found) == 1 else 'them'} "
            "away, or choose another -o"
        )


def _is_own(place: Path, record: Record) -> bool:
    """Whether a finished step wrote this place of the study's folder, wherever that was then; or
    one was stopped while it wrote."""
    for entry in record.steps.values():
        outputs = entry.get("outputs")
        for path, held in outputs.items() if isinstance(outputs, dict) else ():
            ours = held or entry.get("status") == BEGUN
            if ours and Path(path).parts[-len(place.parts) :] == place.parts:
                return True
    return False


def _files_of(output: Path) -> Iterator[Path]:
    if output.suffix == ".csv":
        yield from Outputs(output, with_replicates=True).paths()
    else:
        yield output
