"""The answers of the model's own classifier for every patch of the shown images, site by site: the
class with the largest logit and its share of the softmax (the logit lens, see `vitsee lens`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_core.explore.coarse import coarse_layout, pooled
from vitsee_core.models.provenance import Classifiers, Provenance
from vitsee_core.models.weights import Classifier, stored_classifier
from vitsee_core.patch_maps.photos import Shown
from vitsee_core.types import Float
from vitsee_stores.errors import MissingInput

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store

SHARE_MOST = 255
MOST_CLASSES = 1 << 16


@dataclass(frozen=True)
class SiteAnswers:
    """classes: (images, 1 + cells) of the tokens pooled as the model does, then of each patch
    alone; shares: of the softmax, in parts of `SHARE_MOST`."""

    classes: NDArray[np.uint16]
    shares: NDArray[np.uint8]


def answers_of(shown: Shown, origin: Provenance | None) -> dict[str, SiteAnswers]:
    """Site -> answers, of those sites that the classifier can read.

    Args:
        shown: which images and sites.
        origin: where the weights are now, to build the model of a store that keeps no classifier;
            None: do not.

    Raises:
        MissingInput: no classifier, or none that reads these sites.
    """
    store = shown.store
    head = stored_classifier(store) if origin is None else Classifiers(origin)(store)
    if head.n_classes > MOST_CLASSES:
        raise MissingInput(f"the classifier of {store.label} has {head.n_classes} classes")
    found = {site.name: _answers(store, head, site, shown.rows) for site in _readable(shown, head)}
    if not found:
        raise MissingInput(
            f"the classifier of {store.label} reads {head.width} channels, which none of the shown "
            "sites has"
        )
    return found


def _readable(shown: Shown, head: Classifier) -> Iterator[SiteSpec]:
    for site in shown.sites:
        layout = shown.store.site(site.name).layout
        past_norm = "head" in site.groups and site.name != head.site
        needs_cls = head.pool == "cls" and (layout is None or layout.cls is None)
        if site.dim == head.width and not past_norm and not needs_cls:
            yield site


def _answers(store: Store, head: Classifier, site: SiteSpec, rows: list[int]) -> SiteAnswers:
    layout = store.site(site.name).layout
    assert layout is not None
    tokens = store.acts(site.name, partial=True)[rows]
    kind = head.pooled_kind
    whole = (
        head.logits(tokens, layout)
        if kind is None
        else head.of_tokens(store.pooled(site.name, kind)[rows])
    )
    n, cells = len(rows), coarse_layout(layout).n_body
    classes, shares = np.zeros((n, 1 + cells), np.uint16), np.zeros((n, 1 + cells), np.uint8)
    classes[:, 0], shares[:, 0] = _first(whole)
    for i in range(n):  # an image at a time: logits are wide
        body = tokens[i : i + 1, layout.n_prefix :].astype(np.float32)
        shown, _ = pooled(body, np.ones((1, layout.n_body), bool), layout)
        classes[i, 1:], shares[i, 1:] = _first(head.of_tokens(shown[0]))
    return SiteAnswers(classes, shares)


def _first(logits: Float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(...,) the class of the largest logit, and its softmax in parts of `SHARE_MOST`; 0 where a
    logit is not finite."""
    known = np.asarray(np.isfinite(logits).all(-1))
    safe = np.where(known[..., np.newaxis], logits, 0)
    top = safe.max(-1, keepdims=True)
    share = 1 / np.exp(safe - top).sum(-1)
    return safe.argmax(-1), np.rint(np.where(known, share, 0) * SHARE_MOST).astype(np.int64)
