"""Everything between the command line and the first slab: model, images, checks, manifest; for a
new store or one that is unfinished."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.extraction.erf import ErfCost, ErfPasses, prepare_erf
from vitsee_core.extraction.identity import (
    changed_identity,
    check_choices,
    check_same_model,
    chosen_identity,
    fixed_identity,
    given_identity,
)
from vitsee_core.extraction.image_layout import ImageLayout, lay_out
from vitsee_core.extraction.not_finite import FiniteWatch
from vitsee_core.extraction.options import DataOptions, KeepOptions, ModelOptions, Request
from vitsee_core.extraction.plan import Choices, build_plan, choose, fit_slab, hook_points
from vitsee_core.extraction.slab_grams import gram_notes
from vitsee_core.images import (
    DataError,
    ImageSource,
    Selection,
    normalise,
    open_source,
    select,
)
from vitsee_core.images.clips import has_clips
from vitsee_core.models.capture import Capture
from vitsee_core.models.hook_points import first_tensor
from vitsee_core.models.intervention_spec import ZERO
from vitsee_core.models.interventions.changes import Changes, prove
from vitsee_core.models.interventions.switching import Switch
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.same_origin import FirstImages, check_same_images, first_images
from vitsee_core.models.selfcheck import NotFinite, SelfCheck, self_check
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.tokens.clips import frames_of
from vitsee_core.models.weights import FILTERS, POSITIONS, input_weights_of
from vitsee_core.models.weights.classifier import find_classifier
from vitsee_core.runtime.device import precision_context, resolve_device
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.progress import SILENT, Progress, soon_said
from vitsee_core.runtime.versions import store_versions
from vitsee_core.tables.files import check_place
from vitsee_stores import StoreWriter
from vitsee_stores.errors import IdentityMismatch, SiteError, VitseeError
from vitsee_stores.files import Files
from vitsee_stores.layout import StorePlan
from vitsee_stores.manifest import Manifest, abbreviate, new_manifest
from vitsee_stores.url import Place


@dataclass(frozen=True)
class RecordedImages:
    """The first images of an extraction, as a store has them.

    hashes: (rows,) of their encoded bytes, 0 of unreadable ones.
    """

    hashes: NDArray[np.uint64]
    place: Place

    def check(self, first: int, found: NDArray[np.uint64], ids: Sequence[str]) -> None:
        """Compare the hashes of the images from row `first` on. Raises IdentityMismatch: names
        those that differ."""
        expected = self.hashes[first : first + len(found)]
        other = (np.flatnonzero(expected != found[: len(expected)]) + first).tolist()
        if other:
            named = abbreviate([ids[row] for row in other])
            raise IdentityMismatch(
                f"{named}: not the images that {self.place} was made from, or readable in one of "
                "both only; nothing of these is added (give the images that it was made from)"
            )


@dataclass(frozen=True)
class Prepared:
    """A checked extraction.

    Attributes:
        writer: None until the store exists.
        weights: None if the store already has all of its files.
        erf: passes and cost of receptive fields, if requested.
        changes: the interventions, which are in effect in its `applied()` alone.
        files: those of the generation that is added to a complete store; None: of the store itself.
        known: images that must be the same as in the generations before.
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
    known: RecordedImages | None = None
    adds: str = ""

    @property
    def plan(self) -> StorePlan:
        return self.manifest.plan


def check_output(asked: Request) -> None:
    """Refuse a new store inside another store, or inside the folder of its images. Raises
    VitseeError: names the folder."""
    if isinstance(asked.run.output, Path):
        check_place(asked.run.output, images=asked.data.data)


def of_same_model(
    writer: StoreWriter, stored: Mapping[str, Any], asked: Request, progress: Progress
) -> tuple[torch.device, Selection, ImageLayout]:
    """The device to compute on, the images, and the model laid out on an existing store's canvas.
    stored: the store's identity, with which choices that are not made now agree. Raises
    IdentityMismatch: the store is of another architecture; VitseeError: no such device, images or
    model."""
    device = resolve_device(asked.run.device)
    selection = chosen_images(asked.data, stored, progress)
    with soon_said("loading the model"):
        layout = lay_out(asked, selection, writer.manifest.plan)
        layout = with_orientation(layout, asked.data, stored)
    check_same_model(writer, layout.model)
    return device, as_model_takes(selection, layout, asked.data, stored), layout


def join_store(
    writer: StoreWriter, asked: Request, progress: Progress = SILENT
) -> Prepared:
    """An extraction that continues an existing store, by that store's plan. Raises VitseeError: as
    `prepare`; IdentityMismatch: the store was made from another model, other images or other
    choices."""
    stored = writer.manifest.identity
    plan = writer.manifest.plan
    keep = asked.keep
    device, selection, layout = of_same_model(writer, stored, asked, progress)
    model = layout.model
    table = layout.table
    choices = choose_of(layout, keep, stored)
    given = given_identity(keep, asked.data, choices, plan)
    changes = changes_of(layout, keep, selection, stored.get("seed", 0))
    absent: dict[str, Any] = {"interventions": []} if stored.get("interventions") else {}
    fixed = {
        **fixed_identity(model, selection, layout.canvas),
        **changed_identity(changes),
    }
    check_choices(writer.manifest, model, {**absent, **fixed, **given})
    weights = None
    if not writer.is_made:
        weights = small_weights(model, table, stored.get("head_weights"))
    model.module.to(device)
    first = first_images(selection, model.transform, writer.manifest.info)
    check_same_images(writer, selection, first)
    check = run_self_check(
        model, table, plan, first.pixels, device, choices.precision, changes, fixed=True
    )
    erf = None
    if plan.erf is not None and not writer.complete:
        _, erf, _ = prepare_erf(model, table, plan, plan.erf, first.pixels, device)
    notes = (*model.notes(), *table_notes(model, table), *selection.notes, *check.notes)
    return Prepared(
        *(
            model,
            table,
            selection,
            device,
            choices.precision,
            writer.manifest,
            writer,
            first,
        ),
        notes=(*notes, *change_notes(model, changes)),
        erf=erf,
        weights=weights,
        changes=changes if changes.lines else None,
    )


def plan_store(asked: Request, progress: Progress = SILENT) -> Prepared:
    """An extraction into a new store, planned but not yet created. Raises VitseeError: as
    `prepare`."""
    data = asked.data
    keep = asked.keep
    run = asked.run
    device = resolve_device(run.device)
    selection = chosen_images(data, {}, progress)
    with soon_said("loading the model"):
        layout = with_orientation(lay_out(asked, selection), data, {})
    selection = as_model_takes(selection, layout, data, {})
    model = layout.model
    table = layout.table
    choices, plan, weights, notes = plan_contents(layout, keep, len(selection.samples))
    notes += [*model.notes(), *cut_sides(asked.model, model), *table_notes(model, table)]
    changes = changes_of(layout, keep, selection, data.seed or 0)
    model.module.to(device)
    first = first_images(selection, model.transform, {})
    check = run_self_check(
        model, table, plan, first.pixels, device, choices.precision, changes
    )
    plan = without_sublayers(plan, check.left_out)
    erf = None
    without_erf = dict[str, str]()
    if plan.erf is not None:
        plan, erf, without_erf = prepare_erf(
            model, table, plan, plan.erf, first.pixels, device
        )
    plan = with_dtypes(plan, check.dtypes)
    manifest = new_manifest(
        {
            **fixed_identity(model, selection, layout.canvas),
            **changed_identity(changes),
            **chosen_identity(keep, data, choices, plan),
        },
        plan,
        selection.samples,
        model={
            "name": model.name,
            "architecture": model.architecture,
            "args": model.model_args,
            "input_size": list(model.input_size),
            "n_params": sum(p.numel() for p in model.module.parameters()),
            "weights": model.weights,
            **({"origin": model.origin} if model.origin else {}),
            **({"ablate_skip": list(model.ablate_skip)} if model.ablate_skip else {}),
            **changes.record(),
        },
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
            "data_folder": os.getcwd(),
            "checkpoint": getattr(asked.model, "checkpoint", None),
            "selection": selection.identity,
            **first.record(),
            "command": run.command,
            "versions": store_versions(),
            **weights.record,
        },
    )
    return Prepared(
        *(model, table, selection, device, choices.precision, manifest, None, first),
        notes=(*notes, *selection.notes, *check.notes, *change_notes(model, changes)),
        erf=erf,
        weights=weights,
        changes=changes if changes.lines else None,
    )


def plan_contents(
    layout: ImageLayout, keep: KeepOptions, n_images: int
) -> tuple[Choices, StorePlan, SmallWeights, list[str]]:
    """The planned contents of a new store of `n_images` images, and remarks. Raises VitseeError: as
    `choose`, `fit_slab` and `small_weights`."""
    choices = choose_of(layout, keep, {})
    slab, slab_note = fit_slab(keep.slab, choices, layout.kept, n_images, layout.clip)
    weights = small_weights(layout.model, layout.table, keep.head_weights)
    plan = build_plan(choices, layout.kept, n_images, slab, layout.canvas, layout.clip)
    plan = replace(plan, weights=weights.shapes)
    notes = [
        *layout.notes,
        *([slab_note] if slab_note else []),
        *gram_notes(plan),
        *weights.notes,
    ]
    if keep.erf is not None and keep.erf > n_images:
        notes.append(f"--erf {keep.erf}: there are {n_images} images, all are used")
    return choices, plan, weights, notes


def choose_of(
    layout: ImageLayout, keep: KeepOptions, stored: Mapping[str, Any]
) -> Choices:
    """The choices among the sites that the store can keep. Raises VitseeError: as `choose`."""
    try:
        return choose(keep, stored, layout.kept, layout.input_size)
    except SiteError as error:
        if layout.canvas is None or not layout.canvas.in_parts:
            raise
        option = "--tiles" if layout.canvas.tiles else "--native"
        raise VitseeError(f"{error} ({option} keeps sites with a grid only)") from None


def as_model_takes(
    selection: Selection,
    layout: ImageLayout,
    data: DataOptions,
    stored: Mapping[str, Any],
) -> Selection:
    """The same data as clips, for a model of clips. Raises VitseeError: clips for a model of images
    without a number of frames."""
    if layout.clip is None and has_clips(selection.source):
        raise VitseeError(
            f"{data.data} has videos, and {layout.model.name} takes images: give --frames N, and "
            "it sees N frames of each, one by one"
        )
    if layout.clip is None or has_clips(selection.source):
        return selection
    return chosen_images(data, stored, clips=True)


def turns_upright(data: DataOptions, stored: Mapping[str, Any]) -> bool:
    """Whether images are turned upright by their EXIF orientation: as asked, else as in an existing
    store (`stored`: its identity)."""
    return bool(data.exif or stored.get("transform", {}).get("exif"))


def with_orientation(
    layout: ImageLayout, data: DataOptions, stored: Mapping[str, Any]
) -> ImageLayout:
    """The layout whose transform says that images are turned upright, if they are: it is part of
    the store's identity, and whoever reads the images again turns them, too."""
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
    """The images, with an existing store's (`stored`: its identity) seed and order by default;
    clips where they are asked for, or where there are no images."""

    def opened(as_clips: bool) -> ImageSource:
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

    def found() -> ImageSource:
        if clips or data.of_clips or "clip" in stored.get("transform", {}):
            return opened(True)
        try:
            return opened(False)
        except DataError as error:
            try:
                return opened(True)
            except DataError:
                raise error from None

    with soon_said(f"listing the images of {data.data}"):
        return select(
            found(),
            images=data.images,
            per_class=data.per_class,
            seed=data.seed if data.seed is not None else stored.get("seed", 0),
            order=data.order or stored.get("order", "shuffled"),
            only=data.only,
        )


def run_self_check(
    model: LoadedModel,
    table: SiteTable,
    plan: StorePlan,
    pixels: torch.Tensor,
    device: torch.device,
    precision: str,
    changes: Changes | None = None,
    *,
    fixed: bool = False,
) -> SelfCheck:
    """The self-check on these images, which fixes the stored types for every process, and the proof
    that interventions have their effect and no other. fixed: the plan is an existing store's, from
    which nothing can be left out any more. Raises NotFinite: activations are NaN or inf;
    VitseeError: the check or the proof failed otherwise."""
    _, height, width = model.input_size  # of the first tile, where there are several
    pixels = pixels[..., :height, :width]
    if plan.clip is not None and plan.clip.by_frame:
        pixels = pixels[:, plan.clip.frames // 2]
    with (
        soon_said(f"checking {model.name} on the first images"),
        torch.inference_mode(),
        precision_context(device, precision),
    ):
        images = normalise(pixels, model.transform, device)
        dtypes = {site.name: site.dtype for site in plan.sites}
        check = self_check(
            model, table, images, dtypes=dtypes, **hook_points(table, plan)
        )
        if not check.finite:
            # The loop names the images that break a sound model.
            sound = finite_images(model, table, plan, images)
            if 0 < len(sound) < len(images):
                pixels = pixels[sound]
                images = images[sound]
                check = self_check(
                    model, table, images, dtypes=dtypes, **hook_points(table, plan)
                )
    lacking = sorted(check.left_out.keys() & {name for name, _ in plan.sublayers})
    if lacking and fixed:
        name = lacking[0]
        check.failures.append(
            f"{name}: {check.left_out[name]}, as it was when the store was made"
        )
    check.notes += [
        f"no residual products of {name}: {check.left_out[name]}" for name in lacking
    ]
    if not check.ok:
        kind = VitseeError if check.finite else NotFinite
        raise kind(f"the self-check of {model.name} failed: {'; '.join(check.failures)}")
    if changes is not None and changes.lines:
        with precision_context(device, precision):
            prove(model, table, changes, normalise(pixels, model.transform, device))
    return check


def finite_images(
    model: LoadedModel, table: SiteTable, plan: StorePlan, images: torch.Tensor
) -> list[int]:
    """Those of the images whose activations and output are finite."""
    watch = FiniteWatch()
    with Capture(model, table, **hook_points(table, plan)) as capture:
        watch.note("the output", first_tensor(capture.run(images, watch)))
    return [row for row in range(len(images)) if row not in watch.first_sites]


def changes_of(
    layout: ImageLayout, keep: KeepOptions, selection: Selection, seed: int
) -> Changes:
    """The model's interventions for a store of these images. Raises VitseeError: they exclude
    --erf, --tiles and images with grids of their own."""
    model = layout.model
    canvas = layout.canvas
    tiles = canvas is not None and canvas.tiles
    grids = canvas is not None and canvas.own_grids
    for option, asked in (("erf", keep.erf), ("tiles", tiles), ("native", grids)):
        if asked and model.interventions:
            raise VitseeError(
                f"--{option} is not supported with {model.interventions[0].text}"
            )
    identity = fixed_identity(model, selection, canvas)
    switch = Switch(
        model.name,
        layout.table,
        model.interventions,
        identity,
        seed,
        selection.samples.index,
    )
    return switch.changes(model.module)


def change_notes(model: LoadedModel, changes: Changes) -> list[str]:
    """Remarks on a model's interventions."""
    notes = [f"the model runs with {line}" for line in changes.lines]
    if any(getattr(one, "values", None) == ZERO for one in model.interventions):
        notes.append(
            "zero alone overstates what the replaced activations carry: compare with mean:STORE, "
            "noise:STORE and shuffle:STORE (docs/guide/interventions.md)"
        )
    return notes


def cut_sides(options: ModelOptions | LoadedModel, model: LoadedModel) -> list[str]:
    """A remark if a crop mode for whole images still crops them by the model's own share."""
    share = model.transform.get("crop_pct", 1)
    if (
        not isinstance(options, ModelOptions)
        or options.crop_pct is not None
        or share >= 1
    ):
        return []
    if options.crop_mode not in ("squash", "border"):
        return []
    return [
        f"--crop-mode {options.crop_mode} with the model's own crop keeps {share:g} of the sides: "
        "give --crop-pct 1 for whole images"
    ]


def table_notes(model: LoadedModel, table: SiteTable) -> list[str]:
    """Remarks that follow from what was found of a model's tokens and blocks."""
    return [*unseen_pixels(model, table), *table.remarks]


def unseen_pixels(model: LoadedModel, table: SiteTable) -> list[str]:
    """A remark if whole patches do not cover the input."""
    if not table.patches:
        return []
    # With several embeddings of one image (CrossViT) some see each pixel.
    ends = [[patches.covered[axis] for patches in table.patches] for axis in (0, 1)]
    (top, bottom), (left, right) = (
        (min(a for a, _ in e), max(b for _, b in e)) for e in ends
    )
    height, width = model.input_size[1:]
    if (top, left, bottom, right) == (0, 0, height, width):
        return []
    covered = bottom - top, right - left
    return [
        f"patches cover {covered[0]}x{covered[1]} of {height}x{width} input pixels: the rest is "
        "never seen (choose an --img-size that the patch size divides)"
    ]


def without_sublayers(plan: StorePlan, left_out: Collection[str]) -> StorePlan:
    """The plan without the residual products of these sublayers."""
    kept = tuple(
        (name, layout) for name, layout in plan.sublayers if name not in left_out
    )
    return replace(plan, sublayers=kept)


def with_dtypes(plan: StorePlan, dtypes: Mapping[str, str]) -> StorePlan:
    sites = tuple(
        replace(site, dtype=dtypes.get(site.name, site.dtype)) for site in plan.sites
    )
    return replace(plan, sites=sites)


# ---------------- weights that a store keeps

OF_CLIPS = (
    "the model takes clips, and its filters, positions and classifier reach over time"
)
HEAD_BYTES = 16 << 20  # the largest classifier that is kept without being asked for


@dataclass(frozen=True)
class SmallWeights:
    """Weights for a store."""

    arrays: dict[str, NDArray[np.float32]]  # float32 by name, for `weights/`
    record: dict[str, Any]  # for the manifest's `info`
    notes: list[str] = field(default_factory=list)  # for the user

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(name, shape) of each array, for a store's plan."""
        return tuple((name, values.shape) for name, values in self.arrays.items())


def small_weights(
    model: LoadedModel, table: SiteTable, head: bool | None
) -> SmallWeights:
    """The small weights of a model on the CPU. head: whether to keep the classifier; None: if it
    takes at most `HEAD_BYTES`. Raises VitseeError: `head` is requested and the model's is not a
    formula over tokens."""
    if frames_of(model.module) is not None:
        if head:
            raise VitseeError(f"--head-weights is not supported: {OF_CLIPS}")
        names = (FILTERS, POSITIONS)
        record: dict[str, Any] = {
            "sites": {},
            "kind": "",
            "absent": dict.fromkeys(names, OF_CLIPS),
        }
        return SmallWeights(
            {}, {"input_weights": record, "head_weights": {"absent": OF_CLIPS}}
        )
    own = input_weights_of(model)
    classifier = find_classifier(model, table) if head is not False else "not asked for"
    notes: list[str] = []
    if isinstance(classifier, str):
        if head:
            raise VitseeError(f"--head-weights is not supported: {classifier}")
        absent = classifier
    elif head is None and classifier.n_bytes > HEAD_BYTES:
        size = human_bytes(classifier.n_bytes)
        most = human_bytes(HEAD_BYTES)
        absent = f"it takes {size}, above {most} (extract --head-weights keeps it)"
        notes.append(f"the classifier's weights are not kept: {absent}")
    else:
        return SmallWeights(
            {**own.arrays, **classifier.arrays},
            {"input_weights": own.record(), "head_weights": classifier.record()},
        )
    record = {"input_weights": own.record(), "head_weights": {"absent": absent}}
    return SmallWeights(own.arrays, record, notes)
