"""How an extraction begins: with a new store, an unfinished one, or more of a complete one."""

from __future__ import annotations

from vitsee_core.extraction.growth import grow_store
from vitsee_core.extraction.options import Request
from vitsee_core.extraction.prepare import Prepared, check_output, join_store, plan_store
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_stores import StoreWriter
from vitsee_stores.errors import StoreError


def prepare(asked: Request, progress: Progress = SILENT) -> Prepared:
    """Load the model (if needed), choose the images, run the self-check, and decide the contents of
    the store.

    Nothing is written. An existing store is joined: it supplies every choice that was not given,
    and is compared with those that were. To a complete one is added what it lacks.

    Raises:
        VitseeError: anything the user can fix, in one line.
        IdentityMismatch: the existing store was made from something else.
    """
    writer = None if asked.run.force else StoreWriter.join(asked.run.output)
    if writer is None:
        check_output(asked)
        return plan_store(asked, progress)
    if writer.manifest.growth is not None:
        raise StoreError(f"{writer.place} is a generation of the store above it: give that one")
    if writer.complete and not _changed(writer, asked):
        return grow_store(writer, asked, progress)
    return join_store(writer, asked, progress)


def _changed(writer: StoreWriter, asked: Request) -> bool:
    """Whether the model runs with interventions, or ran with some: such stores do not grow, as what
    replaces a value may depend on the rows."""
    interventions = asked.model.interventions
    given = interventions.values() if isinstance(interventions, dict) else interventions
    return any(given) or bool(writer.manifest.identity.get("interventions"))
