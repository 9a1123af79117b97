"""The sites and outputs that a base and a changed store share, their CKA, and the numbers per image
that one slab of each gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.similarity import Estimator, GramOptions, Representation, hsic, summarise
from vitsee_core.similarity.hsic_sums import without_value
from vitsee_core.tables.columns import REPLICATES, site_columns
from vitsee_core.truth.labels.changed_outputs import compare_outputs
from vitsee_core.types import Float, Float32
from vitsee_stores.errors import SiteError, StoreMismatch
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Slab, Store

# Tokens of one store that are compared at a time; a slab of all tokens may not fit into memory.
PIECE_BYTES = 64 << 20
COSINE = "cosine"
LOGITS = "logits"
# What brings logits into a store, for messages.
OUTPUTS_OF = "extract with --sites head, or a model with a classifier"


class FeaturesOfBoth(NamedTuple):
    """The features of one site in both stores, of corresponding tokens."""

    base: SiteFeatures
    changed: SiteFeatures


class LogitsOfBoth(NamedTuple):
    """The logits of both stores, of the same classes."""

    base: SiteFeatures
    changed: SiteFeatures


@dataclass(frozen=True)
class ReadChange:
    """A reader of one slab of the base and of a changed store, for `BlockMeans`.

    Attributes:
        logits: the logits of both; None if outputs are not compared.
        labelled: whether the base's labels are the classes of the logits.
        sites: the sites whose tokens are compared by their cosines.
    """

    logits: LogitsOfBoth | None
    labelled: bool
    sites: tuple[FeaturesOfBoth, ...]

    @property
    def slab_bytes(self) -> int:
        """The memory that a slab of both stores takes while it is read."""
        site_bytes = [
            min(pair.base.slab_bytes, 2 * PIECE_BYTES)
            + min(pair.changed.slab_bytes, 2 * PIECE_BYTES)
            for pair in self.sites
        ]
        logit_bytes = 0
        if self.logits is not None:
            # Twice for float64, twice for the probabilities.
            logit_bytes = 4 * (
                self.logits.base.slab_bytes + self.logits.changed.slab_bytes
            )
        return max([*site_bytes, logit_bytes])

    def __call__(self, base: Slab, changed: Slab) -> dict[tuple[str, str], Float]:
        """Return (metric, site) -> (images,) numbers of the slab's images that count.

        Metrics of the outputs have the site "". Images without a label have NaN in those that need
        one.
        """
        numbers: dict[tuple[str, str], Float] = {}
        if self.logits is not None:
            labels = None
            if self.labelled:
                labels = base.store.samples.label[base.rows][base.valid]
            outputs = compare_outputs(
                _read_logits(self.logits.base, base),
                _read_logits(self.logits.changed, changed),
                labels,
            )
            for metric, values in outputs.items():
                numbers[metric, ""] = values
        for pair in self.sites:
            numbers[COSINE, pair.base.site.name] = _mean_cosines(pair, base, changed)
        return numbers


def _read_logits(logits: SiteFeatures, slab: Slab) -> Float:
    """Return the slab's logits, (images, classes)."""
    # Logits are a site with a single token.
    return logits.of_slab(slab, slice(0, 1))[:, 0].astype(np.float64)


def _mean_cosines(pair: FeaturesOfBoth, base: Slab, changed: Slab) -> Float:
    """Return (images,): the mean over tokens of each token's cosine with the same one."""
    n_rows = max(1, base.rows.stop - base.rows.start)
    token_bytes = 4 * pair.base.dim * n_rows
    total = np.zeros(int(base.valid.sum()))
    for tokens in pair.base.groups(max(1, PIECE_BYTES // token_bytes)):
        # (images, tokens of the group, dim)
        before = pair.base.of_slab(base, tokens)
        after = pair.changed.of_slab(changed, tokens)
        total += cosines(before, after).sum(1)
    return total / len(pair.base.tokens)


def cosines(a: Float32, b: Float32) -> Float:
    """Return the cosine of each token in `a` with the same one in `b`, (images, tokens).

    A token that is 0 in one of them has 0; one that is 0 in both has 1, as nothing changed there.

    Args:
        a: tokens, (images, tokens, dim).
        b: as many tokens of as many channels.
    """
    aa = _dot_products(a, a)
    bb = _dot_products(b, b)
    # One root of the product, not a product of roots: a token with itself has exactly 1.
    norms = np.sqrt(aa * bb)
    cosine = np.zeros_like(norms)
    np.divide(_dot_products(a, b), norms, out=cosine, where=norms > 0)
    return np.where((aa == 0) & (bb == 0), 1.0, cosine)


def _dot_products(x: Float32, y: Float32) -> Float:
    """Return the dot product of each token, (images, tokens), added up in float64."""
    return np.einsum("itd,itd->it", x, y, dtype=np.float64)


def pairs_of_sites(
    stores: Sequence[Store], sites: Sequence[str]
) -> dict[str, list[SiteSpec]]:
    """Return label of a changed store -> the sites of the base that it holds, too.

    Args:
        stores: the base, then the changed stores.
        sites: patterns of sites; the result is empty if there are none.

    Raises:
        SiteError: a changed store has none of the sites of the base.
    """
    if not sites:
        return {}
    try:
        selected = select_each(stores, sites, sites_of)
    except SiteError as error:
        raise SiteError(f"{error} (--sites none compares the outputs alone)") from None
    base, *others = selected.members
    base_store, base_sites = base
    pairs = {}
    for store, store_sites in others:
        names = {site.name for site in store_sites}
        pairs[store.label] = [site for site in base_sites if site.name in names]
        if not pairs[store.label]:
            raise SiteError(
                f"{store.label} has none of the sites of {base_store.label}, "
                f"{abbreviate([site.name for site in base_sites])}; it has "
                f"{abbreviate(sorted(names))} "
                "(--sites none compares the outputs alone)"
            )
    return pairs


def outputs_of_both(
    base: Store, changed: Store, remarks: list[str]
) -> LogitsOfBoth | None:
    """Return the logits of both stores; None, with a remark added, if one of them keeps none.

    Raises:
        StoreMismatch: the logits are of different numbers of classes.
    """
    for store in (base, changed):
        if LOGITS not in store.sites:
            remark = f"no outputs: {store.label} keeps no logits ({OUTPUTS_OF})"
            if remark not in remarks:
                remarks.append(remark)
            return None
    logits = LogitsOfBoth(
        base=choose_features(base, base.sites[LOGITS]),
        changed=choose_features(changed, changed.sites[LOGITS]),
    )
    if logits.base.dim != logits.changed.dim:
        raise StoreMismatch(
            f"{base.label} has outputs of {logits.base.dim} classes, {changed.label} of "
            f"{logits.changed.dim}; expected the same classes"
        )
    return logits


def alike_sites(
    base: Store,
    changed: Store,
    pairs: dict[str, list[SiteSpec]],
    tokens: str,
    remarks: list[str],
) -> tuple[FeaturesOfBoth, ...]:
    """Return the features of the sites whose tokens correspond.

    The other sites are left out, and a remark that names them is added.

    Args:
        base: store of the unchanged model.
        changed: store of a changed model.
        pairs: label of a changed store -> sites that it shares with the base.
        tokens: which tokens of a site are compared.
        remarks: the list that the remark is added to.
    """
    alike = []
    left_out = []
    for site in pairs.get(changed.label, ()):
        pair = FeaturesOfBoth(
            base=choose_features(base, base.sites[site.name], tokens),
            changed=choose_features(changed, changed.sites[site.name], tokens),
        )
        base_tokens = [token.name for token in pair.base.tokens]
        changed_tokens = [token.name for token in pair.changed.tokens]
        # A token is compared with the one of the same name, and channel by channel.
        if base_tokens == changed_tokens and pair.base.dim == pair.changed.dim:
            alike.append(pair)
        else:
            left_out.append(site.name)
    if left_out:
        remarks.append(
            f"{changed.label}: no cosine at {abbreviate(left_out)}, whose tokens or "
            f"channels are not those of {base.label}"
        )
    return tuple(alike)


def cka_rows(
    base: Store,
    changed: Sequence[Store],
    pairs: dict[str, list[SiteSpec]],
    *,
    tokens: str,
    execution: Execution,
    remarks: list[str],
    estimator: Estimator,
    options: GramOptions,
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Return label of a changed store -> a row of CKA for each site, and the notes on CKA.

    Both are empty if `pairs` is.

    Args:
        base: store of the unchanged model.
        changed: stores of the changed models.
        pairs: label of a changed store -> sites that it shares with the base.
        tokens: which tokens of a site are compared.
        execution: images, seed and progress.
        remarks: the list that remarks on sites without a value are added to.
        estimator: estimator of CKA.
        options: where Gram matrices are computed and kept.
    """
    if not pairs:
        return {}, {}
    # Stores may share other sites with the base: each of them once.
    sites = {site.name: site for shared in pairs.values() for site in shared}
    base_sides = [Representation(base, site, tokens) for site in sites.values()]
    columns = [(store, site) for store in changed for site in pairs[store.label]]
    changed_sides = [
        Representation(store, store.sites[site.name], tokens) for store, site in columns
    ]
    # All sites of the base against all of the changed stores: each Gram matrix is made once.
    products = hsic(
        base_sides,
        changed_sides,
        estimator=estimator,
        images=execution.images,
        seed=execution.seed,
        options=options,
        progress=execution.progress,
    )
    remarks += without_value(_site_names(base_sides), products.rows)
    remarks += without_value(_site_names(changed_sides), products.cols)
    similarity = summarise(products)
    row_indices = {name: i for i, name in enumerate(sites)}
    rows: dict[str, list[dict[str, Any]]] = {store.label: [] for store in changed}
    for j, (store, site) in enumerate(columns):
        # Of the matrix (base sites, changed sites) only a site with itself is asked for.
        i = row_indices[site.name]
        replicates = None
        if similarity.without is not None:
            replicates = similarity.without[:, i, j]
        row = site_columns(store, store.sites[site.name])
        row.update(metric="cka", spread=products.spread, n_images=products.n_images)
        row.update(
            value=float(similarity.cka[i, j]),
            std=float(similarity.std[i, j]),
            low=float(similarity.low[i, j]),
            high=float(similarity.high[i, j]),
        )
        row[REPLICATES] = replicates
        rows[store.label].append(row)
    return rows, products.notes


def _site_names(representations: Sequence[Representation]) -> list[str]:
    """Return store and site of each representation, as remarks name them."""
    return [f"{r.store.label} {r.site.name}" for r in representations]
