"""Sites, outputs and CKA of the base and of a changed store, and the numbers per image of a slab of
both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.similarity import Estimator, GramOptions, Representation, hsic, summarise
from vitsee_core.similarity.hsic_sums import without_value
from vitsee_core.tables.columns import site_columns
from vitsee_core.tables.replicates import WORD
from vitsee_core.truth.labels.changed_outputs import compare_outputs
from vitsee_core.types import Float, Float32
from vitsee_stores.errors import SiteError, StoreMismatch
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Slab, Store

PIECE_BYTES = 64 << 20  # of tokens of one store that are compared at a time
COSINE = "cosine"
LOGITS = "logits"
OUTPUTS_OF = "extract with --sites head, or a model with a classifier"


@dataclass(frozen=True)
class ReadChange:
    """(metric, site) -> (images,) numbers of the images that count, NaN for images without a label.

    Attributes:
        logits: of the base and of the changed store; None: outputs are not compared.
        labelled: whether labels are the classes of the logits.
        sites: features of corresponding tokens in both, for their cosines.
    """

    logits: tuple[SiteFeatures, SiteFeatures] | None
    labelled: bool
    sites: tuple[tuple[SiteFeatures, SiteFeatures], ...]

    @property
    def slab_bytes(self) -> int:
        """Memory of a slab of both stores while it is read."""
        of_sites = [
            sum(min(own.slab_bytes, 2 * PIECE_BYTES) for own in pair)
            for pair in self.sites
        ]
        of_logits = 4 * sum(own.slab_bytes for own in self.logits or ())
        return max([*of_sites, of_logits], default=0)

    def __call__(self, base: Slab, changed: Slab) -> dict[tuple[str, str], Float]:
        found: dict[tuple[str, str], Float] = {}
        if self.logits is not None:
            ours, theirs = (
                own.of_slab(slab, slice(0, 1))[:, 0].astype(np.float64)
                for own, slab in zip(self.logits, (base, changed), strict=True)
            )
            labels = (
                base.store.samples.label[base.rows][base.valid] if self.labelled else None
            )
            outputs = compare_outputs(ours, theirs, labels)
            found = {(metric, ""): values for metric, values in outputs.items()}
        for pair in self.sites:
            found[COSINE, pair[0].site.name] = _cosines(*pair, base, changed)
        return found


def _cosines(
    ours: SiteFeatures, theirs: SiteFeatures, base: Slab, changed: Slab
) -> Float:
    """(images,) mean over tokens of the cosine of each token with the same one."""
    n_rows = max(1, base.rows.stop - base.rows.start)
    total = np.zeros(int(base.valid.sum()))
    for part in ours.groups(max(1, PIECE_BYTES // (4 * ours.dim * n_rows))):
        total += cosines(ours.of_slab(base, part), theirs.of_slab(changed, part)).sum(1)
    return total / len(ours.tokens)


def cosines(a: Float32, b: Float32) -> Float:
    """(images, tokens) of tokens (images, tokens, dim); 0 where one of both is 0, 1 where both are:
    nothing changed there."""

    def dot(x: Float32, y: Float32) -> Float:
        return np.einsum("itd,itd->it", x, y, dtype=np.float64)

    aa = dot(a, a)
    bb = dot(b, b)
    # One root of the product: a token with itself has exactly 1.
    norms = np.sqrt(aa * bb)
    found = np.divide(dot(a, b), norms, out=np.zeros_like(norms), where=norms > 0)
    return np.where((aa == 0) & (bb == 0), 1.0, found)


def pairs_of_sites(
    stores: Sequence[Store], sites: Sequence[str]
) -> dict[str, list[SiteSpec]]:
    """Label -> the sites of the base that a changed store holds, too.

    Raises:
        SiteError: there is none.
    """
    if not sites:
        return {}
    try:
        selected = select_each(stores, sites, sites_of)
    except SiteError as error:
        raise SiteError(f"{error} (--sites none compares the outputs alone)") from None
    base, *others = selected.members
    pairs = {}
    for store, own in others:
        names = {site.name for site in own}
        pairs[store.label] = [site for site in base[1] if site.name in names]
        if not pairs[store.label]:
            raise SiteError(
                f"{store.label} has none of the sites of {base[0].label}, "
                f"{abbreviate([site.name for site in base[1]])}; it has "
                f"{abbreviate(sorted(names))} "
                "(--sites none compares the outputs alone)"
            )
    return pairs


def outputs_of_both(
    base: Store, changed: Store, remarks: list[str]
) -> tuple[SiteFeatures, SiteFeatures] | None:
    """The logits of both; None, with a remark, where one keeps none.

    Raises:
        StoreMismatch: they are of other classes.
    """
    for store in (base, changed):
        if LOGITS not in store.sites:
            remark = f"no outputs: {store.label} keeps no logits ({OUTPUTS_OF})"
            remarks += [remark] if remark not in remarks else []
            return None
    ours, theirs = (choose_features(s, s.sites[LOGITS]) for s in (base, changed))
    if ours.dim != theirs.dim:
        raise StoreMismatch(
            f"{base.label} has outputs of {ours.dim} classes, {changed.label} of {theirs.dim}; "
            "expected the same classes"
        )
    return ours, theirs


def alike_sites(
    base: Store,
    changed: Store,
    pairs: dict[str, list[SiteSpec]],
    tokens: str,
    remarks: list[str],
) -> tuple[tuple[SiteFeatures, SiteFeatures], ...]:
    """The features of the sites whose tokens correspond; the others are left out with a remark."""
    found = []
    left = []
    for site in pairs.get(changed.label, ()):
        both = [choose_features(s, s.sites[site.name], tokens) for s in (base, changed)]
        names = [[token.name for token in own.tokens] for own in both]
        if names[0] == names[1] and both[0].dim == both[1].dim:
            found.append((both[0], both[1]))
        else:
            left.append(site.name)
    if left:
        remarks.append(
            f"{changed.label}: no cosine at {abbreviate(left)}, whose tokens or channels "
            "are not those of "
            f"{base.label}"
        )
    return tuple(found)


def cka_rows(
    base: Store,
    changed: Sequence[Store],
    pairs: dict[str, list[SiteSpec]],
    tokens: str,
    execution: Execution,
    remarks: list[str],
    estimator: Estimator,
    options: GramOptions,
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Label -> a row of CKA for each site; and what is to be said of them."""
    if not pairs:
        return {}, {}
    sites = {site.name: site for own in pairs.values() for site in own}
    ours = [Representation(base, site, tokens) for site in sites.values()]
    sides = [(store, site) for store in changed for site in pairs[store.label]]
    theirs = [
        Representation(store, store.sites[site.name], tokens) for store, site in sides
    ]
    h = hsic(
        ours,
        theirs,
        estimator=estimator,
        images=execution.images,
        seed=execution.seed,
        options=options,
        progress=execution.progress,
    )
    of_both = [
        (f"{r.store.label} {r.site.name}" for r in side) for side in (ours, theirs)
    ]
    for names, own in zip(of_both, (h.rows, h.cols), strict=True):
        remarks += without_value([*names], own)
    similarity = summarise(h)
    places = {name: i for i, name in enumerate(sites)}
    found: dict[str, list[dict[str, Any]]] = {store.label: [] for store in changed}
    for j, (store, site) in enumerate(sides):
        at = (places[site.name], j)
        numbers = {"value": similarity.cka, "std": similarity.std}
        numbers |= {"low": similarity.low, "high": similarity.high}
        found[store.label].append(
            site_columns(store, store.sites[site.name])
            | {"metric": "cka", "spread": h.spread, "n_images": h.n_images}
            | {name: float(of[at]) for name, of in numbers.items()}
            | {WORD: None if similarity.without is None else similarity.without[:, *at]}
        )
    return found, h.notes
