"""`extract --dry-run`: the contents of a planned store, from the shapes of a model if these
suffice."""

from __future__ import annotations

from dataclasses import dataclass

from vitsee_core.extraction.image_layout import ImageLayout
from vitsee_core.extraction.options import OF_NATIVE, ModelOptions, Request
from vitsee_core.extraction.prepare import check_output, chosen_images, cut_sides, plan_contents
from vitsee_core.extraction.run import default_batch, erf_cost, prepare, strategy_of
from vitsee_core.extraction.slab_grams import choose_strategy
from vitsee_core.images.clips import has_clips
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import check_model_options
from vitsee_core.models.same_origin import first_images
from vitsee_core.models.sources import source_of
from vitsee_core.models.weights.checkpoints import Checkpoint
from vitsee_core.models.without_weights import from_shapes, stand_in
from vitsee_core.runtime.device import resolve_device
from vitsee_stores import StoreWriter
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import StorePlan
from vitsee_stores.manifest import with_samples

UNCHECKED = (
    "from the model's shapes: no weights were read, so whether they are to be had and fit, the "
    "self-check, and values beyond float16 are left to the extraction"
)


@dataclass(frozen=True)
class DryRun:
    """The contents of a store that is not made."""

    plan: StorePlan
    left_out: dict[str, str]  # what it will not have -> reason
    notes: tuple[str, ...]  # for the user
    cost: str = ""  # of receptive fields in words, "" without any
    adds: str = ""  # to a complete store, in words


def dry_run(asked: Request) -> DryRun:
    """The arrays that `extract` with these options would store, and their cost. Nothing is written.

    Weights are loaded if shapes are not enough (order of tokens, ablated skips, interventions,
    cells on a canvas), for an existing store, which is compared with the model, and to measure the
    cost of --erf. Raises VitseeError: anything the user can fix, in one line.
    """
    model = asked.model
    assert isinstance(model, ModelOptions), "a model that is loaded has its weights"
    check_model_options(model.name, vars(model))
    if not needs_weights(model, asked) and (planned := _from_shapes(model, asked)) is not None:
        return planned
    prepared = prepare(asked)
    batch_size = strategy_of(prepared, asked.run).batch_size
    cost = erf_cost(prepared, batch_size, [slice(0, prepared.plan.n_images)])
    left_out = dict(prepared.manifest.left_out)
    return DryRun(prepared.plan, left_out, prepared.notes, cost, adds=prepared.adds)


def needs_weights(model: ModelOptions, asked: Request) -> bool:
    """Whether the options depend on weights, whatever the architecture."""
    data, run = asked.data, asked.run
    canvas = data.short_side is not None or data.tiles or data.multiple is not None or data.of_clips
    canvas = canvas or any(getattr(data, name) for name in OF_NATIVE)
    ablated = model.ablate_skip or source_of(model.name).skips_left_out
    changed = ablated or any(model.interventions.values())
    if canvas or changed or asked.keep.erf or _brings_arguments(model):
        return True
    return not run.force and StoreWriter.join(run.output) is not None


def _brings_arguments(model: ModelOptions) -> bool:
    """Whether a checkpoint's layout has arguments that differ from the architecture's."""
    try:
        file = model.checkpoint and Checkpoint.read(model.checkpoint, model.checkpoint_key)
    except ModelError:
        return False  # the extraction refuses it
    return bool(file and file.layout and source_of(model.name).layout_arguments(file.layout.args))


def _from_shapes(options: ModelOptions, asked: Request) -> DryRun | None:
    """The plan without weights; None if shapes are not enough."""
    check_output(asked)
    keep, run = asked.keep, asked.run
    device, selection = resolve_device(run.device), chosen_images(asked.data, {})
    if has_clips(selection.source):
        return None
    listing = from_shapes(options.name, vars(options))
    if listing is None:
        return None
    table = listing.table
    model = stand_in(options.name, vars(options), table)
    layout = ImageLayout(model, table, table)
    try:
        choices, contents, _, notes = plan_contents(layout, keep, len(selection.samples))
    except (ModelError, NotImplementedError, RuntimeError):
        return None  # the error recurs as one line once there are values
    except VitseeError:
        if keep.head_weights:  # whether there is such a classifier depends on weights
            return None
        raise
    first_images(selection, model.transform, {})
    choose_strategy(contents, table, device, run.batch_size, default_batch(device))
    left_out = {**choices.left_out, **table.left_out}
    notes = [*notes, *cut_sides(options, model), *selection.notes, UNCHECKED]
    return DryRun(with_samples(contents, selection.samples), left_out, tuple(notes))
