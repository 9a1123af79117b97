"""The search of one model: a ground truth or labels, as rows of the model's stores.

An image is known by its index: the searched images of the store count from 0 in the
store's order, and those of the distractors follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.retrieve.image_names import RowsByName, first_names
from vitsee_core.analyses.retrieve.truth import (
    JUNK,
    RELEVANT,
    RELEVANT_ONLY,
    RetrievalTruth,
    Setting,
)
from vitsee_core.features import (
    SiteFeatures,
    check_alike,
    choose_features,
    require_comparable,
)
from vitsee_core.runtime.machine import plural
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.truth.labels.labelled_rows import (
    LabelledRows,
    check_label_spaces,
    labelled_rows,
    random_pieces,
    shared_ids,
)
from vitsee_core.types import Float32, Integers, Mask
from vitsee_stores.errors import StoreMismatch, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store


# ---------------------------------------------------------------- the vectors that are
# compared


@dataclass(frozen=True)
class RandomFeatures:
    """Standard normal vectors in place of a store's features, one for each of its rows.

    Attributes:
        store: the store whose rows they stand for.
        dim: number of channels.
        seed: seed of the draw.
        selection: stands for the tokens that are chosen of a store; there are none.
    """

    store: Store
    dim: int
    seed: tuple[int, ...]
    selection: str = ""

    def vectors(self, rows: Mask, *, jobs: int, memory: int) -> Iterator[Float32]:
        """Yield (images, dim) of the rows in a mask, in pieces, as `SiteFeatures.vectors`
        does.

        All rows are drawn, whichever are wanted, so that a row's vector does not depend on
        the others.
        """
        start = 0
        for piece in random_pieces(len(rows), self.dim, self.seed):
            yield piece[rows[start : start + len(piece)]]
            start += len(piece)


@dataclass(frozen=True)
class Features:
    """The vectors of one site in the stores of a search, one per image.

    Attributes:
        name: the site's name, or "random features".
        images: vectors of the searched images.
        queries: vectors of the queries.
        distractors: vectors of each store of distractors.
    """

    name: str
    images: SiteFeatures | RandomFeatures
    queries: SiteFeatures | RandomFeatures
    distractors: tuple[SiteFeatures | RandomFeatures, ...]

    @classmethod
    def random(cls, search: Search, dim: int, seed: int) -> Features:
        """Return random vectors; a store has the same ones as images and as queries."""
        # A store's seed is its position among the distinct stores of the search.
        store_ids = list(
            dict.fromkeys(store.manifest.store_id for store in search.stores)
        )
        images, queries, *distractors = (
            RandomFeatures(store, dim, (seed, store_ids.index(store.manifest.store_id)))
            for store in search.stores
        )
        return cls("random features", images, queries, tuple(distractors))

    @classmethod
    def from_site(cls, search: Search, site: SiteSpec, tokens: str | None) -> Features:
        """Return the same tokens of a site in each store of the search.

        Raises:
            MissingInput: a store lacks the site or the tokens.
            StoreMismatch: a store has another number of channels there.
            SiteError: the tokens are several vectors per image.
        """
        images, queries, *distractors = (
            choose_features(store, site, tokens, among=search.stores, one_vector=True)
            for store in search.stores
        )
        for features in (queries, *distractors):
            check_alike(images, features)
        return cls(site.name, images, queries, tuple(distractors))


# ---------------------------------------------------------------- the search


@dataclass(frozen=True)
class Search:
    """Queries and searched images, all of one model.

    Attributes:
        store: the store of the searched images.
        rows: (images,) their rows in `store`, ascending.
        query_store: the store of the queries; `store` itself where images are queries.
        query_rows: (queries,) rows in `query_store`.
        query_names: (queries,) names.
        lists: (queries,) of dictionaries: name of a list -> indices of its images,
            ascending.
        settings: the scores that are computed.
        uses: (queries,) the use of each query, as in `Query.use`.
        image_blocks: if the queries are the searched images, each its own junk: the
            images' blocks of the jackknife. None otherwise.
        distractors: stores of images that are wrong for all queries.
        remarks: for the user.
        description: for the sidecar.
    """

    store: Store
    rows: Integers
    query_store: Store
    query_rows: Integers
    query_names: list[str]
    lists: Sequence[Mapping[str, Integers]]
    settings: tuple[Setting, ...]
    uses: list[str]
    image_blocks: Blocks | None = None
    distractors: tuple[Store, ...] = ()
    remarks: tuple[str, ...] = ()
    description: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stores(self) -> tuple[Store, ...]:
        """The stores of the images, of the queries and of the distractors, in this order."""
        return (self.store, self.query_store, *self.distractors)

    @property
    def n_images(self) -> int:
        """Number of searched images, with the distractors."""
        return len(self.rows) + sum(int(store.valid.sum()) for store in self.distractors)

    @property
    def is_readable(self) -> Mask:
        """(images,) which of the store's searched images could be read."""
        return self.store.valid[self.rows]

    def count_images(self, setting: Setting) -> tuple[Integers, Integers]:
        """Return how many images are right, and how many are ranked, for each query.

        Images of lists that are not right in this setting are not ranked.

        Returns:
            (queries,) right images; (queries,) right and wrong images.
        """
        lengths = self._list_lengths
        n_listed = sum(lengths.values())
        n_right = np.zeros_like(lengths[JUNK])
        for name in setting.positives:
            n_right = n_right + lengths[name]
        return n_right, self.n_images - n_listed + n_right

    @property
    def max_listed(self) -> int:
        """Largest number of images in the lists of one query."""
        n_listed = sum(self._list_lengths.values(), np.zeros(1, np.int64))
        return int(n_listed.max(initial=0))

    @cached_property
    def _list_lengths(self) -> dict[str, Integers]:
        """Name of a list -> (queries,) number of its images."""
        names = {name for setting in self.settings for name in setting.positives} | {JUNK}
        # All queries have the same lists.
        for lists in self.lists[:1]:
            names.update(lists)
        lengths = {name: np.zeros(len(self.lists), np.int64) for name in names}
        for i, lists in enumerate(self.lists):
            for name, indices in lists.items():
                lengths[name][i] = len(indices)
        return lengths

    def has_score(self, setting: Setting) -> Mask:
        """Return (queries,) which are scored: those of the setting's use with a right image."""
        has_use = [not setting.use or use == setting.use for use in self.uses]
        n_right, _ = self.count_images(setting)
        return np.array(has_use, bool) & (n_right > 0)


def search_by_labels(
    store: Store, query_store: Store | None, images: int | None, seed: int
) -> Search:
    """Return the search in which a query's right images are the others of its class.

    Args:
        store: the searched images, with labels.
        query_store: the queries, with labels; None if each searched image is a query.
        images: how many images are selected; None for all.
        seed: seed of this selection and of the blocks of the jackknife.

    Raises:
        MissingInput: a store has no labels.
        StoreMismatch: the stores have different classes.
        VitseeError: no class has two images.
    """
    data = labelled_rows(store, images, seed)
    description = {"images": data.describe()}
    blocks = None
    if query_store is None:
        query_data = data
        remarks = _remark_on_twins(store, data)
        blocks = data.jackknife(seed)
    else:
        query_data = labelled_rows(query_store, images, seed)
        remarks = check_label_spaces(data, query_data)
        description["queries"] = query_data.describe()
    query_names = query_data.store.samples.id[query_data.rows].tolist()
    return Search(
        store=store,
        rows=data.rows,
        query_store=query_data.store,
        query_rows=query_data.rows,
        query_names=query_names,
        lists=_ClassLists(
            data.labels, query_data.labels, queries_are_images=query_store is None
        ),
        settings=RELEVANT_ONLY,
        uses=[""] * len(query_names),
        image_blocks=blocks,
        remarks=tuple(remarks),
        description=description,
    )


def _remark_on_twins(store: Store, data: LabelledRows) -> list[str]:
    """Return a remark on images that occur again; the list is empty if there are none.

    Equal bytes have equal pixels, so that the latter are the more.
    """
    n_by_bytes = len(data) - len(np.unique(data.hashes))
    pixel_hashes = _hashes(store, "pixel_hash", data.rows)
    n_twins = n_by_bytes
    if pixel_hashes is not None:
        n_twins = len(data) - len(np.unique(pixel_hashes))
    if not n_twins:
        return []
    how = "equal bytes"
    if n_twins > n_by_bytes:
        how = f"equal pixels, {n_by_bytes} of them equal bytes"
    return [f"{store.label}: {plural(n_twins, 'images')} occur again ({how})"]


class _ClassLists(Sequence[dict[str, Integers]]):
    """The lists of queries with labels, made on demand.

    Together they would take the square of the number of images.
    """

    def __init__(
        self, labels: Integers, query_labels: Integers, *, queries_are_images: bool
    ) -> None:
        """Sort the images by class.

        Args:
            labels: (images,) class numbers.
            query_labels: (queries,) class numbers.
            queries_are_images: query i is image i, and so its own junk.
        """
        self._query_labels = query_labels.tolist()
        self._queries_are_images = queries_are_images
        self._indices_by_class = {
            int(c): np.flatnonzero(labels == c) for c in np.unique(query_labels)
        }

    def __len__(self) -> int:
        return len(self._query_labels)

    def __getitem__(self, i: Any) -> Any:
        """Return the lists of query i, name -> image indices; of a slice, a list of these."""
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        right = self._indices_by_class[self._query_labels[i]]
        if not self._queries_are_images:
            return {RELEVANT: right}
        return {RELEVANT: right[right != i], JUNK: np.array([i], np.int64)}


def search_by_truth(
    truth: RetrievalTruth, store: Store, query_store: Store | None
) -> Search:
    """Return the search for the images and queries that a ground truth names.

    Args:
        truth: the ground truth.
        store: the searched images.
        query_store: the queries; None if they are in `store`, too.

    Raises:
        MissingInput: a name is not in the store, or is ambiguous.
        VitseeError: a query could not be read.
    """
    queries_are_images = query_store is None
    if query_store is None:
        query_store = store
    queries = [query for query in truth.queries if query.use != "ignored"]
    query_names = [query.name for query in queries]
    # Rows of the truth's images, in its order; the searched ones in the store's order.
    truth_rows = RowsByName(store, truth.images).require_rows(
        truth.images, f"of the {plural(len(truth.images), 'images')}", truth.source
    )
    query_rows = RowsByName(query_store, query_names).require_rows(
        query_names, f"of the {plural(len(query_names), 'queries')}", truth.source
    )
    _require_readable_queries(query_store, query_names, query_rows, truth.source)
    searched_rows = np.sort(truth_rows)
    if truth.searches_unlisted:
        is_searched = store.committed.repeat(store.plan.slab)[: store.n_images].copy()
        if queries_are_images:
            ignored = [query.name for query in truth.queries if query.use == "ignored"]
            is_searched[query_rows] = False
            is_searched[RowsByName(store, ignored).existing_rows(ignored)] = False
        # A truth's image stays, although it is a query, too: it is its own junk.
        is_searched[truth_rows] = True
        searched_rows = np.flatnonzero(is_searched)

    # Index in the truth -> index among the searched images.
    search_index = np.searchsorted(searched_rows, truth_rows)
    lists = [
        {name: np.sort(search_index[list(v)]) for name, v in query.lists.items()}
        for query in queries
    ]
    unreadable = np.flatnonzero(~store.valid[searched_rows])
    remarks = []
    if len(unreadable):
        names = first_names(store.samples.id[searched_rows[unreadable]].tolist())
        remarks.append(
            f"{store.label}: {plural(len(unreadable), 'images')} could not be read, last "
            "in every "
            f"ranking ({names})"
        )
    return Search(
        store=store,
        rows=searched_rows,
        query_store=query_store,
        query_rows=query_rows,
        query_names=query_names,
        lists=lists,
        settings=truth.settings,
        uses=[query.use for query in queries],
        remarks=tuple(remarks),
        description={
            "images": {"rows": len(searched_rows), "unreadable": len(unreadable)}
        },
    )


def _require_readable_queries(
    store: Store, names: Sequence[str], rows: Integers, source: str
) -> None:
    """Refuse queries whose images could not be read: they have no vectors."""
    unreadable = [
        name for name, row in zip(names, rows, strict=True) if not store.valid[row]
    ]
    if unreadable:
        raise VitseeError(
            f"{store.label} has {plural(len(unreadable), 'queries')} of {source} that "
            "could not be "
            f"read ({first_names(unreadable)}); extract it from images that can"
        )


# ---------------------------------------------------------------- what is refused


def check_search(search: Search) -> list[str]:
    """Refuse invalid searches; return remarks on equal ids.

    Raises:
        StoreMismatch: stores of other models or transforms, a query that is among the
            searched images and not in its junk, or a distractor that is a right image or a
            query.
        VitseeError: no query has a right image.
    """
    if not any(search.has_score(setting).any() for setting in search.settings):
        raise VitseeError(
            f"no query of {search.store.label} has a right image to be found"
        )
    require_comparable(search.store, search.stores[1:])
    if search.image_blocks is None:
        _check_queries_apart(search)
    if search.distractors:
        _check_distractors(search)
    return _remarks_on_ids(search)


def _remarks_on_ids(search: Search) -> list[str]:
    """Return remarks on queries, and distractors, that may be searched images saved anew."""
    remarks = []
    if search.image_blocks is None:
        remarks += shared_ids(
            search.store,
            search.rows,
            search.query_store,
            search.query_rows,
            "queries",
        )
    for store in search.distractors:
        rows = np.flatnonzero(store.valid)
        remarks += shared_ids(search.store, search.rows, store, rows, "distractors")
    return remarks


def _check_queries_apart(search: Search) -> None:
    """Refuse queries that are searched images outside of their own junk, by bytes and by pixels."""
    for kind, words in KINDS_OF_HASH.items():
        image_hashes = _hashes(search.store, kind, search.rows)
        query_hashes = _hashes(search.query_store, kind, search.query_rows)
        if image_hashes is None or query_hashes is None:
            continue
        indices_by_hash: dict[int, list[int]] = {}
        is_shared = np.isin(image_hashes, query_hashes) & search.is_readable
        for i in np.flatnonzero(is_shared).tolist():
            indices_by_hash.setdefault(int(image_hashes[i]), []).append(i)
        for name, query_hash, lists in zip(
            search.query_names, query_hashes.tolist(), search.lists, strict=True
        ):
            for i in indices_by_hash.get(query_hash, ()):
                if i not in lists.get(JUNK, ()):
                    sample = search.store.samples.id[search.rows[i]]
                    raise StoreMismatch(
                        f"the query {name} is among the images of {search.store.label} "
                        "that are "
                        f"searched ({sample}, equal {words}); leave it out of one of them"
                    )


def _check_distractors(search: Search) -> None:
    """Refuse distractors that are queries or images of their lists, by bytes and by pixels."""
    is_listed = np.zeros(len(search.rows), bool)
    for lists in search.lists:
        for indices in lists.values():
            is_listed[indices] = True
    listed_rows = search.rows[is_listed & search.is_readable]
    for store in search.distractors:
        is_shared = np.zeros(store.n_images, bool)
        for kind in KINDS_OF_HASH:
            distractor_hashes = _hashes(store, kind)
            listed_hashes = _hashes(search.store, kind, listed_rows)
            query_hashes = _hashes(search.query_store, kind, search.query_rows)
            if distractor_hashes is None:
                continue
            if listed_hashes is not None:
                is_shared |= np.isin(distractor_hashes, listed_hashes)
            if query_hashes is not None:
                is_shared |= np.isin(distractor_hashes, query_hashes)
        # Images that could not be read have equal pixels by their hash, 0.
        is_shared &= store.valid
        n_shared = int(is_shared.sum())
        if n_shared:
            verb = "is" if n_shared == 1 else "are"
            names = first_names(store.samples.id[is_shared].tolist())
            raise StoreMismatch(
                f"{plural(n_shared, 'distractors')} of {store.label} {verb} among the "
                "queries and "
                f"the images of their lists ({names}), by bytes or pixels; leave them out"
            )


# Arrays of a store by which images are the same -> what is equal then, in words.
KINDS_OF_HASH = {"hash": "bytes", "pixel_hash": "pixels"}


def _hashes(
    store: Store, kind: str, rows: Integers | None = None
) -> NDArray[np.uint64] | None:
    """Return hashes of images, of all rows by default; None if the store has none of this
    kind.

    Read as an array rather than from `samples`, whose names take far more memory.
    """
    if kind == "pixel_hash" and not store.plan.pixel_hashes:
        return None
    hashes: NDArray[np.uint64] = store.array(kind)[:]
    return hashes if rows is None else hashes[rows]
