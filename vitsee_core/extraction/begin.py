"""How an extraction begins: with a new store, an unfinished one, or more of a complete one."""

from __future__ import annotations

from vitsee_core.extraction.growth import grow_store
from vitsee_core.extraction.options import DataOptions, KeepOptions, ModelOptions, RunOptions
from vitsee_core.extraction.prepare import Prepared, check_output, join_store, plan_store
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_stores import StoreWriter
from vitsee_stores.errors import StoreError


def prepare(
    options: ModelOptions | LoadedModel,
    data: DataOptions,
    keep: KeepOptions,
    run: RunOptions,
    progress: Progress = SILENT,
) -> Prepared:
    """Load the model (if needed), choose the images, run the self-check, and decide the contents of
    the store.

    Nothing is written. An existing store is joined: it supplies every choice that was not given,
    and is compared with those that were. To a complete one is added what it lacks.

    Raises:
        VitseeError: anything the user can fix, in one line.
        IdentityMismatch: the existing store was made from something else.
    """
    writer = None if run.force else StoreWriter.join(run.output)
    if writer is None:
        check_output(run, data)
        return plan_store(options, data, keep, run, progress)
    if writer.manifest.growth is not None:
        raise StoreError(f"{writer.place} is a generation of the store above it: give that one")
    if writer.complete and not _changed(writer, options):
        return grow_store(writer, options, data, keep, run, progress)
    return join_store(writer, options, data, keep, run, progress)


def _changed(writer: StoreWriter, options: ModelOptions | LoadedModel) -> bool:
    """Whether the model runs with interventions, or ran with some: such stores do not grow, as what
    replaces a value may depend on the rows."""
    asked = options.interventions
    given = any(asked.values()) if isinstance(asked, dict) else bool(asked)
    return given or bool(writer.manifest.identity.get("interventions"))
