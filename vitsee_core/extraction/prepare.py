"""Preparation of an extraction: everything between the command line and the first slab.

It loads the model, chooses the images, runs the self-check and decides the manifest, for a new
store or one that is unfinished. Nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.extraction.erf import ErfCost, ErfPasses, prepare_erf
from vitsee_core.extraction.first_check import run_self_check
from vitsee_core.extraction.identity import (
    changed_identity,
    check_choices,
    check_same_model,
    chosen_identity,
    fixed_identity,
    given_identity,
)
from vitsee_core.extraction.image_layout import ImageLayout, lay_out
from vitsee_core.extraction.options import DataOptions, KeepOptions, ModelOptions, Request
from vitsee_core.extraction.plan import Choices, build_plan, choose, fit_slab
from vitsee_core.extraction.slab_grams import gram_notes
from vitsee_core.extraction.small_weights import SmallWeights, small_weights
from vitsee_core.images import (
    DataError,
    ImageSource,
    Selection,
    open_source,
    select,
)
from vitsee_core.images.clips import has_clips
from vitsee_core.models.intervention_spec import ZERO
from vitsee_core.models.interventions.changes import Changes
from vitsee_core.models.interventions.switching import Switch
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.same_origin import FirstImages, check_same_images, first_images
from vitsee_core.models.sites import SiteTable
from vitsee_core.runtime.device import resolve_device
from vitsee_core.runtime.progress import SILENT, Progress, soon_said
from vitsee_core.runtime.versions import store_versions
from vitsee_core.tables.files import check_output_path
from vitsee_stores import StoreWriter
from vitsee_stores.errors import IdentityMismatch, SiteError, VitseeError
from vitsee_stores.files import Files
from vitsee_stores.layout import StorePlan
from vitsee_stores.manifest import Manifest, abbreviate, new_manifest
from vitsee_stores.url import Place


@dataclass(frozen=True)
class RecordedImages:
    """The images that an existing store records, which must be read again unchanged.

    Attributes:
        hashes: (rows,) hashes of their encoded bytes, 0 for unreadable ones.
        place: folder or URL of the store.
    """

    hashes: NDArray[np.uint64]
    place: Place

    def check(
        self, first_row: int, hashes: NDArray[np.uint64], ids: Sequence[str]
    ) -> None:
        """Compare hashes of images with the recorded ones.

        Args:
            first_row: row of the first of these images.
            hashes: hashes of consecutive images; those beyond the recorded ones are new.
            ids: id of each row.

        Raises:
            IdentityMismatch: names the images that differ.
        """
        # Rows beyond the recorded ones are new images, which nothing is compared with.
        expected = self.hashes[first_row : first_row + len(hashes)]
        # 0 against another hash: readable at one of both times only.
        differing = np.flatnonzero(expected != hashes[: len(expected)]) + first_row
        if len(differing):
            names = abbreviate([ids[row] for row in differing.tolist()])
            raise IdentityMismatch(
                f"{names}: not the images that {self.place} was made from, or readable in one of "
                "both only; nothing of these is added (give the images that it was made from)"
            )


@dataclass(frozen=True)
class Prepared:
    """A checked extraction.

    Attributes:
        model: the model, on `device`.
        table: its sites.
        selection: the images.
        device: where the model runs.
        precision: precision of its forward passes.
        manifest: manifest of the store, or of the generation that is added to it.
        writer: writer of an existing store; None until a new one is created.
        first: the first images, by which joining processes know the images again.
        notes: remarks for the user.
        erf: passes and cost of receptive fields, if requested.
        weights: small weights to store; None if the store already has all of its files.
        changes: the interventions, which are in effect only within their `applied()`.
        files: files of the generation that is added to a complete store; None for the store
            itself.
        recorded: images that must be the same as in the generations before.
        adds: what the generation adds, in words.
    """

    model: LoadedModel
    table: SiteTable
    selection: Selection
    device: torch.device
    precision: str
    manifest: Manifest
    writer: StoreWriter | None
    first: FirstImages
    notes: tuple[str, ...]
    erf: tuple[ErfPasses, ErfCost] | None = None
    weights: SmallWeights | None = None
    changes: Changes | None = None
    files: Files | None = None
    recorded: RecordedImages | None = None
    adds: str = ""

    @property
    def plan(self) -> StorePlan:
        """Contents of the store, or of the generation that is added."""
        return self.manifest.plan


def check_output(request: Request) -> None:
    """Refuse a new store inside another store, or inside the folder of its images.

    Raises:
        VitseeError: names the folder.
    """
    if isinstance(request.run.output, Path):
        check_output_path(request.run.output, images=request.data.data)


class SameModel(NamedTuple):
    """The plan and checks with which an existing store is continued."""

    device: torch.device
    selection: Selection
    layout: ImageLayout


def of_same_model(
    writer: StoreWriter, stored: Mapping[str, Any], request: Request, progress: Progress
) -> SameModel:
    """Load the model and the images with which an existing store is continued.

    Args:
        writer: writer of the store, whose canvas and clips the model is laid out on.
        stored: identity of the store, which supplies choices that the request leaves open.

    Raises:
        IdentityMismatch: the store is of another architecture.
        VitseeError: no such device, images or model.
    """
    # A device that is not there is refused before a model is loaded.
    device = resolve_device(request.run.device)
    selection = chosen_images(request.data, stored, progress)
    with soon_said("loading the model"):
        layout = lay_out(request, selection, writer.manifest.plan)
        layout = with_orientation(layout, request.data, stored)
    check_same_model(writer, layout.model)
    selection = as_model_takes(selection, layout, request.data, stored)
    return SameModel(device, selection, layout)


def join_store(
    writer: StoreWriter, request: Request, progress: Progress = SILENT
) -> Prepared:
    """Prepare an extraction that continues an unfinished store, by that store's plan.

    Raises:
        IdentityMismatch: the store was made from another model, other images or other
            choices.
        VitseeError: anything else that the user can fix.
    """
    stored = writer.manifest.identity
    plan = writer.manifest.plan
    keep = request.keep
    device, selection, layout = of_same_model(writer, stored, request, progress)
    model = layout.model
    table = layout.table
    # What the request leaves open comes from the store, and is compared with it below.
    choices = choose_of(layout, keep, stored)
    changes = changes_of(layout, keep, selection, stored.get("seed", 0))
    identity: dict[str, Any] = {}
    if stored.get("interventions"):
        # Without interventions the identity lacks the field, which would not be compared.
        identity["interventions"] = []
    identity |= fixed_identity(model, selection, layout.canvas)
    identity |= changed_identity(changes)
    identity |= given_identity(keep, request.data, choices, plan)
    check_choices(writer.manifest, model, identity)
    weights = None
    if not writer.is_created:
        # Another process was killed while it created the store: this one finishes that. The
        # weights are collected before the model leaves the CPU.
        weights = small_weights(model, table, stored.get("head_weights"))
    model.module.to(device)
    # The first images are loaded once for three checks: same images, self-check,
    # receptive fields.
    first = first_images(selection, model.transform, writer.manifest.info)
    check_same_images(writer, selection, first)
    check = run_self_check(
        model=model,
        table=table,
        plan=plan,
        pixels=first.pixels,
        device=device,
        precision=choices.precision,
        changes=changes,
        plan_is_stored=True,
    )
    erf = None
    # A complete store computes nothing more.
    if plan.erf is not None and not writer.complete:
        _, erf, _ = prepare_erf(model, table, plan, plan.erf, first.pixels, device)
    return Prepared(
        model=model,
        table=table,
        selection=selection,
        device=device,
        precision=choices.precision,
        manifest=writer.manifest,
        writer=writer,
        first=first,
        notes=(
            *model.notes(),
            *table_notes(model, table),
            *selection.notes,
            *check.notes,
            *change_notes(model, changes),
        ),
        erf=erf,
        weights=weights,
        changes=changes if changes.lines else None,
    )


def plan_store(request: Request, progress: Progress = SILENT) -> Prepared:
    """Prepare an extraction into a new store, which is not created yet.

    Raises:
        VitseeError: anything the user can fix, in one line.
    """
    data = request.data
    keep = request.keep
    device = resolve_device(request.run.device)
    selection = chosen_images(data, {}, progress)
    with soon_said("loading the model"):
        layout = with_orientation(lay_out(request, selection), data, {})
    selection = as_model_takes(selection, layout, data, {})
    model = layout.model
    table = layout.table
    # Weights are collected here, before the model leaves the CPU.
    contents = plan_contents(layout, keep, len(selection.samples))
    plan = contents.plan
    choices = contents.choices
    changes = changes_of(layout, keep, selection, data.seed or 0)
    model.module.to(device)
    first = first_images(selection, model.transform, {})
    check = run_self_check(
        model=model,
        table=table,
        plan=plan,
        pixels=first.pixels,
        device=device,
        precision=choices.precision,
        changes=changes,
    )
    # The check ran on the whole plan: what it disproved leaves the plan now.
    plan = without_sublayers(plan, check.left_out)
    erf = None
    without_erf: dict[str, str] = {}
    if plan.erf is not None:
        plan, erf, without_erf = prepare_erf(
            model, table, plan, plan.erf, first.pixels, device
        )
    plan = with_dtypes(plan, check.dtypes)
    manifest = new_manifest(
        identity={
            **fixed_identity(model, selection, layout.canvas),
            **changed_identity(changes),
            **chosen_identity(keep, data, choices, plan),
        },
        plan=plan,
        samples=selection.samples,
        model=_model_record(model, changes),
        transform=model.transform,
        class_names=selection.class_names,
        selfcheck=check.figures,
        left_out={
            **choices.left_out,
            **layout.left_out,
            **without_erf,
            **table.left_out,
            **check.left_out,
        },
        info={
            "data": data.record(),
            # The folder that a relative path in `data` is meant in.
            "data_folder": os.getcwd(),
            "checkpoint": getattr(request.model, "checkpoint", None),
            "selection": selection.identity,
            **first.record(),
            "command": request.run.command,
            "versions": store_versions(),
            **contents.weights.record,
        },
    )
    return Prepared(
        model=model,
        table=table,
        selection=selection,
        device=device,
        precision=choices.precision,
        manifest=manifest,
        writer=None,
        first=first,
        notes=(
            *contents.notes,
            *model.notes(),
            *cut_sides(request.model, model),
            *table_notes(model, table),
            *selection.notes,
            *check.notes,
            *change_notes(model, changes),
        ),
        erf=erf,
        weights=contents.weights,
        changes=changes if changes.lines else None,
    )


def _model_record(model: LoadedModel, changes: Changes) -> dict[str, Any]:
    """Return the description of a model for the manifest."""
    record = {
        "name": model.name,
        "architecture": model.architecture,
        "args": model.model_args,
        "input_size": list(model.input_size),
        "n_params": sum(p.numel() for p in model.module.parameters()),
        "weights": model.weights,
    }
    if model.origin:
        record["origin"] = model.origin
    if model.ablate_skip:
        record["ablate_skip"] = list(model.ablate_skip)
    return {**record, **changes.record()}


class PlannedContents(NamedTuple):
    """The contents of a store that is about to be made."""

    choices: Choices
    plan: StorePlan
    weights: SmallWeights
    notes: list[str]  # remarks for the user


def plan_contents(
    layout: ImageLayout, keep: KeepOptions, n_images: int
) -> PlannedContents:
    """Plan the contents of a new store of `n_images` images.

    Raises:
        VitseeError: an explicit choice that the model does not support, a selector without a
            match, or slabs that do not fit the memory.
    """
    choices = choose_of(layout, keep, {})
    slab, slab_note = fit_slab(keep.slab, choices, layout.storable, n_images, layout.clip)
    weights = small_weights(layout.model, layout.table, keep.head_weights)
    plan = build_plan(
        choices, layout.storable, n_images, slab, layout.canvas, layout.clip
    )
    plan = replace(plan, weights=weights.shapes)
    notes = list(layout.notes)
    if slab_note:
        notes.append(slab_note)
    notes += gram_notes(plan)
    notes += weights.notes
    # The plan has already cut the number.
    if keep.erf is not None and keep.erf > n_images:
        notes.append(f"--erf {keep.erf}: there are {n_images} images, all are used")
    return PlannedContents(choices, plan, weights, notes)


def choose_of(
    layout: ImageLayout, keep: KeepOptions, stored: Mapping[str, Any]
) -> Choices:
    """Resolve the choices among the sites that the store can keep.

    Args:
        layout: how images reach the model.
        keep: what was chosen.
        stored: identity of an existing store, {} for a new one.

    Raises:
        VitseeError: an explicit choice that the model does not support, or a selector without
            a match; names the option of the canvas if that excludes it.
    """
    try:
        return choose(keep, stored, layout.storable, layout.input_size)
    except SiteError as error:
        # Canvases in parts store sites with a grid only, so a selector may match nothing
        # for that reason.
        if layout.canvas is None or not layout.canvas.in_parts:
            raise
        option = "--tiles" if layout.canvas.tiles else "--native"
        raise VitseeError(f"{error} ({option} keeps sites with a grid only)") from None


# ---------------- the images


def as_model_takes(
    selection: Selection,
    layout: ImageLayout,
    data: DataOptions,
    stored: Mapping[str, Any],
) -> Selection:
    """Return the selection, or the same data as clips for a model of clips.

    Args:
        selection: images or clips.
        layout: how they reach the model.
        data: options that choose them.
        stored: identity of an existing store, {} for a new one.

    Raises:
        VitseeError: clips for a model of images, without a number of frames.
    """
    are_clips = has_clips(selection.source)
    if layout.clip is None:
        if are_clips:
            raise VitseeError(
                f"{data.data} has videos, and {layout.model.name} takes images: give --frames N, "
                "and it sees N frames of each, one by one"
            )
        return selection
    if are_clips:
        return selection
    return chosen_images(data, stored, clips=True)


def turns_upright(data: DataOptions, stored: Mapping[str, Any]) -> bool:
    """Return whether images are turned upright by their EXIF orientation.

    Args:
        data: options, which may request it.
        stored: identity of an existing store, which decides otherwise; {} for a new one.
    """
    return bool(data.exif or stored.get("transform", {}).get("exif"))


def with_orientation(
    layout: ImageLayout, data: DataOptions, stored: Mapping[str, Any]
) -> ImageLayout:
    """Return the layout with `exif` in its transform, if images are turned upright.

    The transform is part of the store's identity, and whoever reads the images again turns
    them, too.
    """
    if not turns_upright(data, stored):
        return layout
    model = replace(layout.model, transform={**layout.model.transform, "exif": True})
    return replace(layout, model=model)


def chosen_images(
    data: DataOptions,
    stored: Mapping[str, Any],
    progress: Progress = SILENT,
    clips: bool = False,
) -> Selection:
    """Open the data and select the images.

    Args:
        data: options that choose them.
        stored: identity of an existing store, whose seed and order are the defaults; {} for
            a new one.
        clips: whether the model takes clips. Clips are opened too if an option requests
            them, or where the data have no images.

    Raises:
        DataError: no such data.
    """
    with soon_said(f"listing the images of {data.data}"):
        return select(
            _open_data(data, stored, progress, clips),
            images=data.images,
            per_class=data.per_class,
            seed=data.seed if data.seed is not None else stored.get("seed", 0),
            order=data.order or stored.get("order", "shuffled"),
            only=data.only,
        )


def _open_data(
    data: DataOptions, stored: Mapping[str, Any], progress: Progress, clips: bool
) -> ImageSource:
    """Open the data as images or as clips; arguments as for `chosen_images`."""

    def open_as(as_clips: bool) -> ImageSource:
        return open_source(
            data.data,
            split=data.split,
            label_key=data.label_key,
            image_column=data.image_column,
            label_column=data.label_column,
            clips=as_clips,
            exif=turns_upright(data, stored),
            progress=progress,
        )

    # Asked for by the model, an option, or the store that is continued.
    if clips or data.has_clip_options or "clip" in stored.get("transform", {}):
        return open_as(as_clips=True)
    # Images first: a folder of images is also a folder of frames.
    try:
        return open_as(as_clips=False)
    except DataError as error:
        try:
            return open_as(as_clips=True)
        except DataError:
            # The first error says what is wrong with the images, which were meant.
            raise error from None


# ---------------- interventions and remarks


def changes_of(
    layout: ImageLayout, keep: KeepOptions, selection: Selection, seed: int
) -> Changes:
    """Return the model's interventions for a store of these images.

    Raises:
        VitseeError: they exclude --erf, --tiles and images with grids of their own.
    """
    model = layout.model
    canvas = layout.canvas
    excluded = []
    if keep.erf:
        excluded.append("erf")
    if canvas is not None and canvas.tiles:
        excluded.append("tiles")
    if canvas is not None and canvas.own_grids:
        excluded.append("native")
    if excluded and model.interventions:
        raise VitseeError(
            f"--{excluded[0]} is not supported with {model.interventions[0].text}"
        )
    switch = Switch(
        model.name,
        layout.table,
        model.interventions,
        identity=fixed_identity(model, selection, canvas),
        seed=seed,
        index=selection.samples.index,
    )
    return switch.changes(model.module)


def change_notes(model: LoadedModel, changes: Changes) -> list[str]:
    """Return remarks on a model's interventions."""
    notes = [f"the model runs with {line}" for line in changes.lines]
    uses_zero = any(
        getattr(intervention, "values", None) == ZERO
        for intervention in model.interventions
    )
    if uses_zero:
        notes.append(
            "zero alone overstates what the replaced activations carry: compare with mean:STORE, "
            "noise:STORE and shuffle:STORE (docs/guide/interventions.md)"
        )
    return notes


def cut_sides(options: ModelOptions | LoadedModel, model: LoadedModel) -> list[str]:
    """Return a remark if a crop mode for whole images still crops them.

    The model's own crop share applies to it, too, unless --crop-pct is given.
    """
    crop_pct = model.transform.get("crop_pct", 1)
    if not isinstance(options, ModelOptions) or options.crop_pct is not None:
        return []
    if crop_pct >= 1 or options.crop_mode not in ("squash", "border"):
        return []
    return [
        f"--crop-mode {options.crop_mode} with the model's own crop keeps {crop_pct:g} of the "
        "sides: give --crop-pct 1 for whole images"
    ]


def table_notes(model: LoadedModel, table: SiteTable) -> list[str]:
    """Return remarks that follow from a model's tokens and blocks."""
    return [*unseen_pixels(model, table), *table.remarks]


def unseen_pixels(model: LoadedModel, table: SiteTable) -> list[str]:
    """Return a remark if the model's patches do not cover the input."""
    if not table.patches:
        return []
    # With several embeddings of one image (CrossViT) some see each pixel: the union counts.
    row_ranges = [patches.covered[0] for patches in table.patches]
    col_ranges = [patches.covered[1] for patches in table.patches]
    top = min(start for start, _ in row_ranges)
    bottom = max(stop for _, stop in row_ranges)
    left = min(start for start, _ in col_ranges)
    right = max(stop for _, stop in col_ranges)
    height, width = model.input_size[1:]
    # Half-open pixel ranges of all patches together.
    if (top, left, bottom, right) == (0, 0, height, width):
        return []
    return [
        f"patches cover {bottom - top}x{right - left} of {height}x{width} input pixels: the rest "
        "is never seen (choose an --img-size that the patch size divides)"
    ]


# ---------------- plans after the self-check


def without_sublayers(plan: StorePlan, left_out: Collection[str]) -> StorePlan:
    """Return the plan without the residual products of these sublayers."""
    sublayers = tuple(
        (name, layout) for name, layout in plan.sublayers if name not in left_out
    )
    return replace(plan, sublayers=sublayers)


def with_dtypes(plan: StorePlan, dtypes: Mapping[str, str]) -> StorePlan:
    """Return the plan with other types of these sites (name -> dtype)."""
    sites = tuple(
        replace(site, dtype=dtypes.get(site.name, site.dtype)) for site in plan.sites
    )
    return replace(plan, sites=sites)
