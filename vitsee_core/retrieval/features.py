"""What is read of one site in the stores of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitsee_core.features import SiteFeatures, check_alike, choose_features
from vitsee_core.retrieval.rows import Search

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec


@dataclass(frozen=True)
class Features:
    """One vector per image, of the images, the queries and the distractors."""

    images: SiteFeatures
    queries: SiteFeatures
    distractors: tuple[SiteFeatures, ...]

    @classmethod
    def of(cls, search: Search, site: SiteSpec, tokens: str | None) -> Features:
        """The same tokens of a site in every store.

        Raises:
            MissingInput: a store lacks the site or the tokens.
            StoreMismatch: it has other channels there.
            SiteError: the tokens are several vectors per image.
        """
        images = choose_features(search.store, site, tokens, one_vector=True)
        word = images.selection
        queries, *distractors = (
            choose_features(store, site, word, one_vector=True)
            for store in (search.query_store, *search.distractors)
        )
        for other in (queries, *distractors):
            check_alike(images, other)
        return cls(images, queries, tuple(distractors))
