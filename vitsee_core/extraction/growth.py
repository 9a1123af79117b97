"""Growth of a complete store: more sites, or more images, in a generation of their own.

A store grows by the same model only. Its weights and choices are compared as for every store
that is joined, what is stored of the first images is computed once more, and the hash of every
image that is read again must be the stored one. `vitsee_stores.generations` reads the result.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vitsee_core.extraction.erf import prepare_erf
from vitsee_core.extraction.first_check import run_self_check
from vitsee_core.extraction.identity import check_choices, fixed_identity, given_identity
from vitsee_core.extraction.image_layout import ImageLayout
from vitsee_core.extraction.options import DataOptions, KeepOptions, Request
from vitsee_core.extraction.plan import Choices, choose_erf, in_order
from vitsee_core.extraction.prepare import (
    Prepared,
    RecordedImages,
    choose_of,
    of_same_model,
    table_notes,
    with_dtypes,
)
from vitsee_core.images import Selection
from vitsee_core.models.same_origin import (
    check_reproduced,
    check_same_images,
    first_images,
)
from vitsee_core.runtime.machine import plural
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.runtime.versions import store_versions
from vitsee_stores import Store, StoreWriter
from vitsee_stores.errors import IdentityMismatch, VitseeError
from vitsee_stores.generations import (
    Generation,
    committed,
    files_of,
    grown,
    read_generations,
)
from vitsee_stores.layout import SiteSpec, StorePlan
from vitsee_stores.manifest import Growth, abbreviate, check_identity, new_manifest

GROWS = "; to what a complete store has, more --sites or more --images can be added"
# Fields of an identity in which a store may grow; this module compares them.
GROWING = ("sites", "tokens", "dtype", "n_images", "samples_fingerprint")


@dataclass(frozen=True)
class Addition:
    """The part of a command's request that a store does not have yet.

    It is either new sites for all images of the store, or all sites for further images.

    Attributes:
        sites: the sites to compute, aliases included.
        first_slab: the first slab to compute: 0 for new sites, else the first one that the
            store's images do not fill.
        n_images: number of images of the grown store.
    """

    sites: tuple[SiteSpec, ...]
    first_slab: int
    n_images: int

    @property
    def stored(self) -> list[SiteSpec]:
        """The sites without aliases."""
        return [site for site in self.sites if site.alias_of is None]

    def rows(self, plan: StorePlan) -> slice:
        """Return the rows of the grown store that are computed."""
        return slice(self.first_slab * plan.slab, self.n_images)


class GrowthState(NamedTuple):
    """The generations of a store that is asked to grow."""

    complete: list[Generation]  # in order; the first is the store as it was made
    unfinished: (
        Generation | None
    )  # the next one: being added, or complete before and damaged
    store: Store  # the complete ones, read as one store


def read_growth_state(writer: StoreWriter) -> GrowthState:
    """Read which generations of a store are complete, and which one is not."""
    first, *later = read_generations(writer.files)
    # Generations are added one after the other: the first that is not complete ends the
    # store.
    complete = [
        first,
        *itertools.takewhile(lambda generation: generation.complete, later),
    ]
    unfinished = None
    if len(complete) <= len(later):
        unfinished = later[len(complete) - 1]
    store = Store(complete, committed(complete), complete=True, label="")
    return GrowthState(complete, unfinished, store)


def grow_store(
    writer: StoreWriter, request: Request, progress: Progress = SILENT
) -> Prepared:
    """Prepare an extraction that adds to a complete store, or goes on with an addition.

    If the request adds nothing, the returned extraction has nothing to do.

    Args:
        writer: writer of the store's first generation.
        request: all options.
        progress: advanced while images are listed.

    Raises:
        VitseeError: anything the user can fix; both more sites and more images; something
            else is being added.
        IdentityMismatch: another model, other images, or other choices in which a store
            cannot grow.
    """
    state = read_growth_state(writer)
    store = state.store
    stored = store.manifest.identity
    keep = request.keep
    device, selection, layout = of_same_model(writer, stored, request, progress)
    model = layout.model
    table = layout.table
    # Which sites have receptive fields depends on all sites, not on the requested ones alone.
    stored_without_erf = {**stored, "erf": 0}
    stored_choices = choose_of(layout, KeepOptions(), stored_without_erf)
    choices = choose_of(layout, dataclasses.replace(keep, erf=None), stored_without_erf)
    first_plan = state.complete[0].manifest.plan
    identity = {
        **fixed_identity(model, selection, layout.canvas),
        **given_identity(keep, request.data, choices, first_plan),
    }
    # The fields in which a store may grow are compared by find_addition and check_sites.
    compared = {key: value for key, value in identity.items() if key not in GROWING}
    check_choices(store.manifest, model, compared, GROWS)
    check_sites(stored_choices, choices, keep)
    addition = find_addition(
        store, state.complete, layout, choices, selection, request.data
    )
    model.module.to(device)
    first = first_images(selection, model.transform, writer.manifest.info)
    check_same_images(writer, selection, first)
    prepared = Prepared(
        model=model,
        table=table,
        selection=selection,
        device=device,
        precision=choices.precision,
        manifest=store.manifest,
        writer=writer,
        first=first,
        notes=(*model.notes(), *table_notes(model, table), *selection.notes),
    )
    if addition is None:
        if state.unfinished is not None and state.unfinished.published:
            raise _lost_slabs(state.unfinished)
        return prepared
    # Equal weights are not enough: kernels and libraries may have changed since.
    check_reproduced(store, model, table, first, device, choices.precision)
    return _prepare_addition(state, request, layout, prepared, addition)


def _lost_slabs(generation: Generation) -> VitseeError:
    """Return the error for a published generation that lacks slabs."""
    lost = generation.manifest.plan.n_slabs - len(generation.markers)
    return VitseeError(
        f"{generation.files} was complete and lacks {plural(lost, 'slabs')}: repeat the "
        f"command that made it ({generation.manifest.info.get('command')})"
    )


def _prepare_addition(
    state: GrowthState,
    request: Request,
    layout: ImageLayout,
    prepared: Prepared,
    addition: Addition,
) -> Prepared:
    """Return the extraction that makes, or goes on with, the generation of an addition.

    Args:
        state: generations of the store.
        request: all options.
        layout: how images reach the model.
        prepared: the checked extraction without an addition.
        addition: what to add.
    """
    store = state.store
    model = prepared.model
    table = prepared.table
    selection = prepared.selection
    device = prepared.device
    first = prepared.first
    number = store.generation + 1
    rows = addition.rows(store.plan)
    # A generation adds sites or images, never both (find_addition).
    adds_sites = addition.n_images == store.plan.n_images
    identity = {
        **store.manifest.identity,
        "n_images": addition.n_images,
        "samples_fingerprint": selection.samples.fingerprint(),
        "sites": [site.name for site in addition.stored],
    }
    if adds_sites:
        identity["tokens"] = {site.name: site.tokens for site in addition.stored}
        identity["dtype"] = {site.name: site.dtype for site in addition.stored}
    identity["generation"] = number
    joined = None
    if state.unfinished is not None:
        # Goes on with the plan that was recorded, not with one that this process would
        # make.
        joined = StoreWriter(state.unfinished.files, state.unfinished.manifest)
        check_same_addition(state.unfinished, identity)
        plan = joined.plan
    else:
        plan = plan_of(store, layout, addition)
    check = run_self_check(
        model=model,
        table=table,
        plan=plan,
        pixels=first.pixels,
        device=device,
        precision=prepared.precision,
        plan_is_stored=True,
    )
    erf = None
    without_erf: dict[str, str] = {}
    if plan.erf is not None:
        plan_with_erf, erf, without_erf = prepare_erf(
            model, table, plan, plan.erf, first.pixels, device
        )
        if joined is None:
            plan = plan_with_erf
    # Only the rows of the generation, whose numbers begin at its first slab.
    selection = dataclasses.replace(selection, samples=selection.samples.subset(rows))
    if joined is not None:
        manifest = joined.manifest
    else:
        if adds_sites:
            # Further images keep the types of the stored ones, whatever this check finds.
            plan = with_dtypes(plan, check.dtypes)
        store_ids = [generation.manifest.store_id for generation in state.complete]
        sites = {site.name: site for site in (*store.plan.sites, *addition.sites)}
        manifest = new_manifest(
            identity=identity,
            plan=plan,
            samples=selection.samples,
            model=store.manifest.model,
            transform=store.manifest.transform,
            class_names=store.manifest.class_names,
            selfcheck=check.figures,
            left_out=without_erf,
            info={
                "data": request.data.record(),
                "data_folder": os.getcwd(),
                "command": request.run.command,
                "versions": store_versions(),
            },
            splits=store.manifest.splits,
            growth=Growth(
                after=tuple(store_ids),
                first_slab=addition.first_slab,
                sites=tuple(
                    site.name for site in in_order(sites.values(), layout.storable)
                ),
                samples_fingerprint=identity["samples_fingerprint"],
            ),
        )
        # Raises here, before any work, what every reader would refuse.
        grown(store_ids, store.manifest, manifest)
    return dataclasses.replace(
        prepared,
        selection=selection,
        manifest=manifest,
        writer=joined,
        notes=(*prepared.notes, *check.notes),
        erf=erf,
        files=files_of(store.files, number),
        recorded=RecordedImages(store.samples.hash[rows.start :], store.place),
        adds=describe(store, addition),
    )


def find_addition(
    store: Store,
    generations: Sequence[Generation],
    layout: ImageLayout,
    choices: Choices,
    selection: Selection,
    data: DataOptions,
) -> Addition | None:
    """Return the part of a request that the store does not have yet; None if it has all.

    Args:
        store: the store.
        generations: its complete generations.
        layout: how images reach the model.
        choices: the requested sites.
        selection: the requested images.
        data: options that chose them.

    Raises:
        IdentityMismatch: other images, or images that do not begin with the store's.
        VitseeError: both more sites and more images; more images on a canvas.
    """
    plan = store.plan
    place = store.place
    n_images = len(selection)
    stored_names = {site.name for site in plan.sites}
    sites = tuple(site for site in choices.sites if site.name not in stored_names)
    fingerprint = selection.samples.fingerprint()
    images = {"n_images": n_images, "samples_fingerprint": fingerprint}
    # The images of an earlier generation are requested by the command that made it.
    stored_fingerprints = {
        generation.combined.samples_fingerprint for generation in generations
    }
    if fingerprint in stored_fingerprints:
        if not sites:
            return None
        if n_images < plan.n_images:
            raise IdentityMismatch(
                f"{place} has {plural(plan.n_images, 'images')}: sites are added for all of them "
                f"(give --images {plan.n_images})"
            )
        return Addition(in_order(sites, layout.storable), first_slab=0, n_images=n_images)
    # By fingerprint, so that order, labels and ids count as well as the images.
    first_part = selection.samples.subset(slice(0, plan.n_images))
    begins_alike = first_part.fingerprint() == store.manifest.samples_fingerprint
    # Raises, as the images are others than the store's.
    if n_images <= plan.n_images or not begins_alike:
        check_identity(store.manifest.identity, images, _why_other(data))
    # Without --images the number follows from the data, which may have grown unnoticed.
    if data.images is None:
        hint = f"; --images {n_images} would add the others"
        if data.per_class is not None:
            hint = _why_other(data)
        check_identity(store.manifest.identity, images, hint)
    if plan.canvas is not None:
        raise VitseeError(
            f"{place} takes no more images: its canvas is as large as those that it has "
            f"(extract all {n_images} into another store; more --sites can be added)"
        )
    if sites:
        raise VitseeError(
            f"{place} is asked for more sites ({abbreviate([site.name for site in sites])}) "
            "and more "
            f"images ({n_images} in place of {plan.n_images}): add one after the other, first "
            f"with --images {plan.n_images}, then with --images {n_images}"
        )
    # Rounded down: a last slab that is not full is made again with the images that fill
    # it.
    return Addition(plan.sites, first_slab=plan.n_images // plan.slab, n_images=n_images)


def _why_other(data: DataOptions) -> str:
    """Return the end of a refusal of other images: which images can be added."""
    if data.per_class is not None:
        return "; images can be added by --images only: of more of each class others come first"
    return f"{GROWS}, of the same data, order and seed: the images that it has stay the first"


def check_sites(stored: Choices, requested: Choices, keep: KeepOptions) -> None:
    """Refuse explicit --tokens or --dtype that differ from those of stored sites.

    Raises:
        IdentityMismatch: names the sites.
    """
    if keep.tokens is not None:
        _check_site_field("tokens", stored, requested)
    if keep.dtype is not None:
        _check_site_field("dtype", stored, requested)


def _check_site_field(field: str, stored: Choices, requested: Choices) -> None:
    """Raise IdentityMismatch if stored sites are requested with another value of a field."""
    stored_values = {site.name: getattr(site, field) for site in stored.sites}
    differing = [
        site
        for site in requested.sites
        if site.name in stored_values and stored_values[site.name] != getattr(site, field)
    ]
    if differing:
        first = differing[0]
        raise IdentityMismatch(
            f"{abbreviate([site.name for site in differing])}: stored with {field} "
            f"{stored_values[first.name]}, given {getattr(first, field)}, and what is stored "
            "stays (give --sites of further ones alone)"
        )


def check_same_addition(unfinished: Generation, identity: dict[str, Any]) -> None:
    """Refuse to add something else while a generation is unfinished.

    Raises:
        IdentityMismatch: names the command that goes on with the unfinished one.
    """
    try:
        check_identity(unfinished.manifest.identity, identity)
    except IdentityMismatch:
        info = unfinished.manifest.info
        raise IdentityMismatch(
            f"{unfinished.files} is unfinished ({len(unfinished.markers)} of "
            f"{plural(unfinished.manifest.plan.n_slabs, 'slabs')}), and this asks for something "
            f"else: repeat its own command first ({info.get('command')}), or remove that folder"
        ) from None


def plan_of(store: Store, layout: ImageLayout, addition: Addition) -> StorePlan:
    """Return the plan of the generation that makes an addition."""
    plan = store.plan
    if addition.n_images > plan.n_images:
        first_row = addition.rows(plan).start
        erf = plan.erf
        if erf is not None:
            # Rows count from the generation's first; those before have receptive fields.
            n_left = erf.n_images - first_row
            erf = dataclasses.replace(erf, n_images=n_left) if n_left > 0 else None
        return dataclasses.replace(
            plan, n_images=addition.n_images - first_row, weights=(), erf=erf
        )
    erf = None
    has_grid = any(
        site.layout is not None and site.layout.grid for site in addition.stored
    )
    if plan.erf is not None and has_grid:
        erf = choose_erf(plan.erf.n_images, addition.stored, layout.input_size, {})
    return StorePlan(
        n_images=plan.n_images,
        slab=plan.slab,
        codec=plan.codec,
        sites=addition.sites,
        grams=plan.grams,
        erf=erf,
        canvas=plan.canvas,
        clip=plan.clip,
        pixel_hashes=plan.pixel_hashes,
    )


def describe(store: Store, addition: Addition) -> str:
    """Describe a generation: its number, its store, and the sites or images that it adds."""
    generation = f"generation {store.generation + 1} of {store.place}"
    plan = store.plan
    if addition.n_images > plan.n_images:
        further = plural(addition.n_images - plan.n_images, plan.examples)
        line = f"{generation} adds {further} to {plan.n_images}"
        # The last slab of the store may be short: it is made again with further images.
        n_again = plan.n_images - addition.first_slab * plan.slab
        if n_again:
            line += f", and makes the last {plural(n_again, plan.examples)} again"
        return line
    names = [site.name for site in addition.stored]
    sites = f"{plural(len(names), 'sites')} ({abbreviate(names)})"
    return f"{generation} adds {sites} of {plural(plan.n_images, plan.examples)}"
