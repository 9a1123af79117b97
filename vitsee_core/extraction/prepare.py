"""Everything between the command line and the first slab: model, images, checks, manifest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from vitsee_core.device import precision_context, resolve_device
from vitsee_core.extraction.erf import ErfCost, ErfPasses, prepare_erf
from vitsee_core.extraction.holding import gram_notes
from vitsee_core.extraction.options import DataOptions, KeepOptions, ModelOptions, RunOptions
from vitsee_core.extraction.plan import Choices, build_plan, choose, fit_slab
from vitsee_core.extraction.same_images import FirstImages, check_same_images, first_images
from vitsee_core.extraction.small_weights import SmallWeights, small_weights
from vitsee_core.extraction.versions import versions
from vitsee_core.images import Selection, normalise, open_source, select
from vitsee_core.models import LoadedModel, SiteTable, load_model, self_check, site_table
from vitsee_stores import StoreWriter
from vitsee_stores.errors import IdentityMismatch, VitseeError
from vitsee_stores.layout import FORMAT_VERSION, SiteSpec, StorePlan
from vitsee_stores.manifest import Manifest, check_identity, new_manifest

if TYPE_CHECKING:
    from vitsee_core.models.selfcheck import SelfCheck


@dataclass(frozen=True)
class Prepared:
    """A checked extraction: `writer` is None until the store exists, `weights` where it does; erf:
    where receptive fields are asked for, what makes them and what they cost."""

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

    @property
    def plan(self) -> StorePlan:
        """What the store holds."""
        return self.manifest.plan

    @property
    def captured(self) -> list[SiteSpec]:
        """The sites whose values are taken (aliases are not)."""
        return [site for site in self.plan.sites if site.alias_of is None]


def prepare(
    options: ModelOptions | LoadedModel, data: DataOptions, keep: KeepOptions, run: RunOptions
) -> Prepared:
    """Load the model (if it is not), choose the images, run the self-check, and settle what the
    store holds.

    Nothing is written. An existing store is joined: it supplies every choice that was not given,
    and is compared with those that were.

    Raises:
        VitseeError: anything the user can mend, in one line.
        IdentityMismatch: the store at the output was made from something else.
    """
    writer = None if run.force else StoreWriter.join(run.output)
    later = {"grams": False, "erf": 0, "ablate_skip": []}  # what older stores do not say
    stored = {**later, **writer.manifest.identity} if writer else {}
    device = resolve_device(run.device)
    source = open_source(data.data, split=data.split)
    selection = select(
        source,
        images=data.images,
        per_class=data.per_class,
        seed=data.seed if data.seed is not None else stored.get("seed", 0),
        order=data.order or stored.get("order", "shuffled"),
    )
    model = options if isinstance(options, LoadedModel) else load_model(**vars(options))
    model.module.cpu()
    table = site_table(model)
    base = _fixed_identity(model, selection)
    if writer is not None:
        check_same_model(writer, model)
    choices = choose(keep, stored, table, model.input_size)
    weights: SmallWeights | None = None
    if writer is not None:
        check_identity(stored, {**base, **_given(keep, data, choices, writer.manifest.plan)})
        plan, notes = writer.manifest.plan, []
    else:
        slab, note = fit_slab(keep.slab, choices, table, len(selection.samples.ids))
        plan = build_plan(choices, table, len(selection.samples.ids), slab)
        weights = small_weights(model, table, keep.head_weights)
        plan = replace(plan, weights=weights.shapes)
        notes = [*([note] if note else []), *gram_notes(plan), *weights.notes]
        if keep.erf is not None and keep.erf > plan.n_images:
            notes.append(f"--erf {keep.erf}: there are {plan.n_images} images, all are used")
    notes += [*model.notes(), *unseen_pixels(model, table)]
    model.module.to(device)
    first = first_images(selection, model.transform, writer.manifest.info if writer else {})
    if writer is not None:
        check_same_images(writer, selection, first)
    check = run_self_check(model, table, plan, first.pixels, device, choices.precision)
    erf, without_erf = None, dict[str, str]()
    if plan.erf is not None and (writer is None or not writer.complete):
        plan, erf, without_erf = prepare_erf(model, table, plan, plan.erf, first.pixels, device)
    notes += [*selection.notes, *check.notes]
    if writer is not None:
        manifest = writer.manifest
    else:
        plan = _with_dtypes(plan, check.dtypes)
        identity = {
            **base,
            **choices.requested,
            "seed": data.seed if data.seed is not None else 0,
            "order": data.order or "shuffled",
            "slab": plan.slab,
            "codec": choices.codec,
            "attention": choices.attention,
            "residual": choices.residual,
            "inputs": choices.inputs is not None,
            "grams": choices.grams,
            "erf": 0 if plan.erf is None else plan.erf.n_images,
            "precision": choices.precision,
            "head_weights": keep.head_weights,
        }
        manifest = new_manifest(
            identity,
            plan,
            selection.samples,
            model=_model_record(model),
            transform=model.transform,
            class_names=selection.class_names,
            selfcheck=check.figures,
            left_out={**choices.left_out, **without_erf, **table.left_out},
            info={
                "data": asdict(data),
                "data_folder": os.getcwd(),
                "checkpoint": getattr(options, "checkpoint", None),
                "selection": selection.identity,
                **first.record(),
                "command": run.command,
                "versions": versions(),
                **(weights.record if weights is not None else {}),
            },
        )
    return Prepared(
        *(model, table, selection, device, choices.precision, manifest, writer, first),
        notes=tuple(notes),
        erf=erf,
        weights=weights,
    )


def check_same_model(writer: StoreWriter, model: LoadedModel) -> None:
    """One store, one architecture.

    Raises:
        IdentityMismatch: the store is of another model, whose sites have other names.
    """
    stored = writer.manifest.model
    if stored.get("architecture") not in (None, model.architecture):
        raise IdentityMismatch(
            f"{writer.path} is a store of {stored.get('name')} ({stored['architecture']}), not of "
            f"{model.name} ({model.architecture}); choose another -o, or start anew with --force"
        )


def run_self_check(
    model: LoadedModel,
    table: SiteTable,
    plan: StorePlan,
    pixels: torch.Tensor,
    device: torch.device,
    precision: str,
) -> SelfCheck:
    """The self-check on these images, from which every process takes the same types.

    Raises:
        VitseeError: the check failed.
    """
    blocks = {block for group in plan.attention for block in group.blocks}
    chosen = {name for name, _ in plan.sublayers}
    with torch.inference_mode(), precision_context(device, precision):
        check = self_check(
            model,
            table,
            normalise(pixels, model.transform, device),
            sites=[site for site in plan.sites if site.alias_of is None],
            sublayers=[s for s in table.sublayers if s.name in chosen],
            attention=[b for b in table.attention if b.name in blocks],
            dtypes={site.name: site.dtype for site in plan.sites},
        )
    if not check.ok:
        raise VitseeError(f"the self-check of {model.name} failed: {'; '.join(check.failures)}")
    return check


def unseen_pixels(model: LoadedModel, table: SiteTable) -> list[str]:
    """A line where whole patches do not cover the input."""
    if not table.patches:
        return []
    # Of several embeddings of one image (CrossViT) each pixel is seen by some.
    ends = [[patches.covered[axis] for patches in table.patches] for axis in (0, 1)]
    (top, bottom), (left, right) = ((min(a for a, _ in e), max(b for _, b in e)) for e in ends)
    height, width = model.input_size[1:]
    if (top, left, bottom, right) == (0, 0, height, width):
        return []
    covered = bottom - top, right - left
    return [
        f"patches cover {covered[0]}x{covered[1]} of {height}x{width} input pixels: the rest is "
        "never seen (choose an --img-size that the patch size divides)"
    ]


def _fixed_identity(model: LoadedModel, selection: Selection) -> dict[str, Any]:
    """What is compared whether or not it was given explicitly."""
    return {
        "format": FORMAT_VERSION,
        "model": {
            "architecture": model.architecture,
            "args": model.model_args,
            "input_size": list(model.input_size),
        },
        "weights": model.weights["sha256"],
        "ablate_skip": list(model.ablate_skip),
        "transform": model.transform,
        "n_images": len(selection.samples),
        "samples_fingerprint": selection.samples.fingerprint(),
    }


def _given(
    keep: KeepOptions, data: DataOptions, choices: Choices, plan: StorePlan
) -> dict[str, Any]:
    """The identity fields that were chosen explicitly."""
    values: dict[str, Any] = {
        "sites": choices.requested["sites"] if keep.sites is not None else None,
        "tokens": choices.requested["tokens"] if keep.tokens is not None else None,
        "dtype": choices.requested["dtype"] if keep.dtype is not None else None,
        "seed": data.seed,
        "order": data.order,
        "slab": None if keep.slab is None else min(keep.slab, plan.n_images),
        "codec": keep.codec,
        "attention": keep.attention,
        "residual": keep.residual,
        "inputs": keep.inputs,
        "grams": keep.grams,
        "erf": None if keep.erf is None else min(keep.erf, plan.n_images),
        "precision": keep.precision,
        "head_weights": keep.head_weights,
    }
    return {key: value for key, value in values.items() if value is not None}


def _with_dtypes(plan: StorePlan, dtypes: Mapping[str, str]) -> StorePlan:
    sites = tuple(replace(site, dtype=dtypes.get(site.name, site.dtype)) for site in plan.sites)
    return replace(plan, sites=sites)


def _model_record(model: LoadedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "architecture": model.architecture,
        "args": model.model_args,
        "input_size": list(model.input_size),
        "n_params": sum(p.numel() for p in model.module.parameters()),
        "weights": model.weights,
        **({"ablate_skip": list(model.ablate_skip)} if model.ablate_skip else {}),
    }
