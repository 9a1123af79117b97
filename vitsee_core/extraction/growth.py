"""More sites, or more images, for a complete store: a generation of its own, see
`vitsee_stores.generations`.

What may grow is added by the same model only: its weights and choices are compared as for every
store that is joined, what is stored of the first images is computed once more, and the hash of
every image that is read again must be the stored one.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitsee_core.extraction.erf import prepare_erf
from vitsee_core.extraction.identity import check_choices, fixed_identity, given_identity
from vitsee_core.extraction.image_layout import ImageLayout
from vitsee_core.extraction.options import DataOptions, KeepOptions, Request
from vitsee_core.extraction.plan import Choices, choose_erf, in_order
from vitsee_core.extraction.prepare import (
    Prepared,
    RecordedImages,
    choose_of,
    of_same_model,
    run_self_check,
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
# Fields of an identity in which a store may grow; they are compared here.
GROWING = ("sites", "tokens", "dtype", "n_images", "samples_fingerprint")


@dataclass(frozen=True)
class Addition:
    """The part of a command's request that a store does not have yet: new sites (aliases included)
    of all of its images, or all of its sites for the images from the first slab on that it has not
    whole.

    `n_images` is that of the grown store.
    """

    sites: tuple[SiteSpec, ...]
    first_slab: int
    n_images: int

    @property
    def stored(self) -> list[SiteSpec]:
        """The sites without aliases."""
        return [site for site in self.sites if site.alias_of is None]

    def rows(self, plan: StorePlan) -> slice:
        """The rows of the grown store that it is computed for."""
        return slice(self.first_slab * plan.slab, self.n_images)


def grow_store(
    writer: StoreWriter, request: Request, progress: Progress = SILENT
) -> Prepared:
    """An extraction that adds to a complete store, or goes on with what is being added; without
    anything to add, one that has nothing to do.

    Raises:
        VitseeError: as `prepare`; both sites and images are asked for; something else is being
            added.
        IdentityMismatch: another model, other images, or other choices that cannot grow.
    """
    every = read_generations(writer.files)
    # Those that are whole, and the next one, which is being added or lacks a slab.
    generations = [every[0], *itertools.takewhile(lambda one: one.complete, every[1:])]
    unfinished = every[len(generations)] if len(generations) < len(every) else None
    store = Store(generations, committed(generations), True, "")
    stored = store.manifest.identity
    plan = store.plan
    data = request.data
    keep = request.keep
    device, selection, layout = of_same_model(writer, stored, request, progress)
    model = layout.model
    table = layout.table
    # Which sites have receptive fields is no question of those that are asked for alone.
    of_sites = {**stored, "erf": 0}
    kept = choose_of(layout, KeepOptions(), of_sites)
    asked = choose_of(layout, dataclasses.replace(keep, erf=None), of_sites)
    given = given_identity(keep, data, asked, generations[0].manifest.plan)
    fixed = fixed_identity(model, selection, layout.canvas)
    same = {key: value for key, value in {**fixed, **given}.items() if key not in GROWING}
    check_choices(store.manifest, model, same, GROWS)
    check_sites(kept, asked, keep)
    added = addition(store, generations, layout, asked, selection, data)
    model.module.to(device)
    first = first_images(selection, model.transform, writer.manifest.info)
    check_same_images(writer, selection, first)
    prepared = Prepared(
        *(
            model,
            table,
            selection,
            device,
            asked.precision,
            store.manifest,
            writer,
            first,
        ),
        notes=(*model.notes(), *table_notes(model, table), *selection.notes),
    )
    if added is None:
        if unfinished is not None and unfinished.published:
            lost = unfinished.manifest.plan.n_slabs - len(unfinished.markers)
            raise VitseeError(
                f"{unfinished.files} was complete and lacks {plural(lost, 'slabs')}: repeat the "
                f"command that made it ({unfinished.manifest.info.get('command')})"
            )
        return prepared
    check_reproduced(store, model, table, first, device, asked.precision)
    number = store.generation + 1
    rows = added.rows(plan)
    fingerprint = selection.samples.fingerprint()
    identity = {
        **stored,
        "n_images": added.n_images,
        "samples_fingerprint": fingerprint,
        "sites": [site.name for site in added.stored],
    }
    more_sites = added.n_images == plan.n_images
    for key in ("tokens", "dtype") if more_sites else ():
        identity[key] = {site.name: getattr(site, key) for site in added.stored}
    identity["generation"] = number
    joined = None
    if unfinished is not None:
        joined = StoreWriter(unfinished.files, unfinished.manifest)
        check_same_addition(unfinished, identity)
    own = plan_of(store, layout, added) if joined is None else joined.plan
    check = run_self_check(
        model, table, own, first.pixels, device, asked.precision, fixed=True
    )
    erf = None
    without_erf = dict[str, str]()
    if own.erf is not None:
        planned, erf, without_erf = prepare_erf(
            model, table, own, own.erf, first.pixels, device
        )
        own = planned if joined is None else own
    part = dataclasses.replace(selection, samples=selection.samples.part(rows))
    if joined is not None:
        manifest = joined.manifest
    else:
        # Types of stored sites are those of the images before, whatever this device rounds to.
        own = with_dtypes(own, check.dtypes) if more_sites else own
        before = [one.manifest.store_id for one in generations]
        sites = {site.name: site for site in (*plan.sites, *added.sites)}
        manifest = new_manifest(
            identity,
            own,
            part.samples,
            model=store.manifest.model,
            transform=store.manifest.transform,
            class_names=store.manifest.class_names,
            selfcheck=check.figures,
            left_out=without_erf,
            info={
                "data": data.record(),
                "data_folder": os.getcwd(),
                "command": request.run.command,
                "versions": store_versions(),
            },
            splits=store.manifest.splits,
            growth=Growth(
                after=tuple(before),
                first_slab=added.first_slab,
                sites=tuple(site.name for site in in_order(sites.values(), layout.kept)),
                samples_fingerprint=fingerprint,
            ),
        )
        grown(
            before, store.manifest, manifest
        )  # raises here what every reader would refuse
    return dataclasses.replace(
        prepared,
        selection=part,
        manifest=manifest,
        writer=joined,
        notes=(*prepared.notes, *check.notes),
        erf=erf,
        files=files_of(store.files, number),
        known=RecordedImages(store.samples.hash[rows.start :], store.place),
        adds=describe(store, added),
    )


def addition(
    store: Store,
    generations: Sequence[Generation],
    layout: ImageLayout,
    asked: Choices,
    selection: Selection,
    data: DataOptions,
) -> Addition | None:
    """The part of a request that the store does not have yet; None if it has all of it.

    Raises:
        IdentityMismatch: other images, or none that begin with the store's.
        VitseeError: both more sites and more images; more images on a canvas.
    """
    plan = store.plan
    place = store.place
    n = len(selection)
    names = {site.name for site in plan.sites}
    sites = tuple(site for site in asked.sites if site.name not in names)
    fingerprint = selection.samples.fingerprint()
    images = {"n_images": n, "samples_fingerprint": fingerprint}
    before = {one.combined.samples_fingerprint for one in generations}
    if fingerprint in before:
        if not sites:
            return None
        if n < plan.n_images:
            raise IdentityMismatch(
                f"{place} has {plural(plan.n_images, 'images')}: sites are added for all of them "
                f"(give --images {plan.n_images})"
            )
        return Addition(in_order(sites, layout.kept), 0, n)
    begin = selection.samples.part(slice(0, plan.n_images)).fingerprint()
    if n <= plan.n_images or begin != store.manifest.samples_fingerprint:
        check_identity(store.manifest.identity, images, _why_other(data))
    if data.images is None:
        hint = f"; --images {n} would add the others"
        hint = hint if data.per_class is None else _why_other(data)
        check_identity(store.manifest.identity, images, hint)
    if plan.canvas is not None:
        raise VitseeError(
            f"{place} takes no more images: its canvas is as large as those that it has "
            f"(extract all {n} into another store; more --sites can be added)"
        )
    if sites:
        raise VitseeError(
            f"{place} is asked for more sites ({abbreviate([site.name for site in sites])}) "
            "and more "
            f"images ({n} in place of {plan.n_images}): add one after the other, first with "
            f"--images {plan.n_images}, then with --images {n}"
        )
    return Addition(plan.sites, plan.n_images // plan.slab, n)


def _why_other(data: DataOptions) -> str:
    """The end of a refusal of other images: which images can be added."""
    if data.per_class is not None:
        return "; images can be added by --images only: of more of each class others come first"
    return f"{GROWS}, of the same data, order and seed: the images that it has stay the first"


def check_sites(stored: Choices, asked: Choices, keep: KeepOptions) -> None:
    """Refuse other tokens or types of stored sites. Raises IdentityMismatch: names them."""
    by_name = {site.name: site for site in stored.sites}
    both = [(by_name[site.name], site) for site in asked.sites if site.name in by_name]
    for field, explicit in (("tokens", keep.tokens), ("dtype", keep.dtype)):
        other = [new for old, new in both if getattr(old, field) != getattr(new, field)]
        if explicit is not None and other:
            old = by_name[other[0].name]
            new = other[0]
            raise IdentityMismatch(
                f"{abbreviate([site.name for site in other])}: stored with {field} "
                f"{getattr(old, field)}, given {getattr(new, field)}, and what is stored stays "
                "(give --sites of further ones alone)"
            )


def check_same_addition(unfinished: Generation, identity: dict[str, Any]) -> None:
    """Refuse to add something else while a generation is unfinished. Raises IdentityMismatch: names
    the command that goes on."""
    try:
        check_identity(unfinished.manifest.identity, identity)
    except IdentityMismatch:
        info = unfinished.manifest.info
        raise IdentityMismatch(
            f"{unfinished.files} is unfinished ({len(unfinished.markers)} of "
            f"{plural(unfinished.manifest.plan.n_slabs, 'slabs')}), and this asks for something "
            f"else: repeat its own command first ({info.get('command')}), or remove that folder"
        ) from None


def plan_of(store: Store, layout: ImageLayout, added: Addition) -> StorePlan:
    """The plan of the generation that adds this."""
    plan = store.plan
    first = added.rows(store.plan).start
    if added.n_images > plan.n_images:
        erf = plan.erf
        if erf is not None:
            left = erf.n_images - first
            erf = dataclasses.replace(erf, n_images=left) if left > 0 else None
        return dataclasses.replace(
            plan, n_images=added.n_images - first, weights=(), erf=erf
        )
    erf = None
    if plan.erf is not None and any(
        s.layout is not None and s.layout.grid for s in added.stored
    ):
        erf = choose_erf(plan.erf.n_images, added.stored, layout.input_size, {})
    return StorePlan(
        n_images=plan.n_images,
        slab=plan.slab,
        codec=plan.codec,
        sites=added.sites,
        grams=plan.grams,
        erf=erf,
        canvas=plan.canvas,
        clip=plan.clip,
        pixel_hashes=plan.pixel_hashes,
    )


def describe(store: Store, added: Addition) -> str:
    """A generation in words: its number, its store, and the sites or images that it adds."""
    what = f"generation {store.generation + 1} of {store.place}"
    plan = store.plan
    if added.n_images > plan.n_images:
        more = plural(added.n_images - plan.n_images, plan.examples)
        again = plan.n_images - added.first_slab * plan.slab
        remade = (
            f", and makes the last {plural(again, plan.examples)} again" if again else ""
        )
        return f"{what} adds {more} to {plan.n_images}{remade}"
    names = [site.name for site in added.stored]
    examples = plural(plan.n_images, plan.examples)
    return (
        f"{what} adds {plural(len(names), 'sites')} ({abbreviate(names)}) of {examples}"
    )
