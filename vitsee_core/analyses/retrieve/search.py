"""A ground truth in the rows of one model's stores: what is searched, with what, what is right."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.retrieve.truth import (
    JUNK,
    ONE,
    RELEVANT,
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
from vitsee_stores.errors import MissingInput, StoreMismatch, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store


# ---------------------------------------------------------------- the vectors that are compared


@dataclass(frozen=True)
class RandomFeatures:
    """Standard normal vectors of `dim` channels instead of a store's, one for each of its rows."""

    store: Store
    dim: int
    seed: tuple[int, ...]
    selection: str = ""

    def vectors(self, rows: Mask, *, jobs: int, memory: int) -> Iterator[Float32]:
        """(images, dim) of the rows in a mask, in pieces; see `SiteFeatures.vectors`."""
        start = 0
        for piece in random_pieces(len(rows), self.dim, self.seed):
            yield piece[rows[start : start + len(piece)]]
            start += len(piece)


@dataclass(frozen=True)
class Features:
    """The vectors of one site in the stores of a search: one per image, for the images, the
    queries and the distractors. name: in words."""

    name: str
    images: SiteFeatures | RandomFeatures
    queries: SiteFeatures | RandomFeatures
    distractors: tuple[SiteFeatures | RandomFeatures, ...]

    @classmethod
    def random(cls, search: Search, dim: int, seed: int) -> Features:
        """Random vectors; a store has the same ones as images and as queries."""
        order = list(dict.fromkeys(store.manifest.store_id for store in search.stores))
        images, queries, *distractors = (
            RandomFeatures(store, dim, (seed, order.index(store.manifest.store_id)))
            for store in search.stores
        )
        return cls("random features", images, queries, tuple(distractors))

    @classmethod
    def of(cls, search: Search, site: SiteSpec, tokens: str | None) -> Features:
        """The same tokens of a site in every store.

        Raises:
            MissingInput: a store lacks the site or the tokens.
            StoreMismatch: it has other channels there.
            SiteError: the tokens are several vectors per image.
        """
        images, queries, *distractors = (
            choose_features(store, site, tokens, among=search.stores, one_vector=True)
            for store in search.stores
        )
        for other in (queries, *distractors):
            check_alike(images, other)
        return cls(site.name, images, queries, tuple(distractors))


# ---------------------------------------------------------------- in the rows of stores


SHOWN = 3
_BOX = re.compile(r"#[-+\d.e]+(,[-+\d.e]+){3}$")


@dataclass(frozen=True)
class Search:
    """Queries and searched images, of one model.

    Attributes:
        rows: (images,) of `store`, ascending: an image's place is its number here, and the
            distractors' follow.
        queries: of `query_store`, (queries,) rows with their names.
        lists: of each query, name -> places.
        settings: what is scored.
        uses: of each query.
        itself: the queries are the searched images, each its own junk, in these blocks of the
            jackknife.
    """

    store: Store
    rows: Integers
    query_store: Store
    queries: Integers
    names: list[str]
    lists: Sequence[Mapping[str, Integers]]
    settings: tuple[Setting, ...]
    uses: list[str]
    itself: Blocks | None = None
    distractors: tuple[Store, ...] = ()
    remarks: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stores(self) -> tuple[Store, ...]:
        """The images', the queries' and the distractors', in this order."""
        return (self.store, self.query_store, *self.distractors)

    @property
    def n_images(self) -> int:
        """Number of searched images, with the distractors."""
        return len(self.rows) + sum(int(store.valid.sum()) for store in self.distractors)

    @property
    def readable(self) -> Mask:
        """(images,) which could be read."""
        return self.store.valid[self.rows]

    def counts(self, setting: Setting) -> tuple[Integers, Integers]:
        """(queries,) right images, and all that count: without those of the other lists."""
        lengths = self._lengths
        n_right = sum(
            (lengths[n] for n in setting.positives), np.zeros_like(lengths[JUNK])
        )
        return n_right, self.n_images - sum(lengths.values()) + n_right

    @property
    def most_listed(self) -> int:
        """Images in the lists of the query that has most."""
        return int(sum(self._lengths.values(), np.zeros(1, np.int64)).max(initial=0))

    @cached_property
    def _lengths(self) -> dict[str, Integers]:
        """Name of a list -> (queries,) number of its images."""
        names = {name for setting in self.settings for name in setting.positives} | {JUNK}
        names |= {name for own in self.lists[:1] for name in own}
        lengths = {name: np.zeros(len(self.lists), np.int64) for name in names}
        for i, own in enumerate(self.lists):
            for name, places in own.items():
                lengths[name][i] = len(places)
        return lengths

    def scored(self, setting: Setting) -> Mask:
        """(queries,) which count: those of the setting's use with a right image."""
        used = [not setting.use or use == setting.use for use in self.uses]
        return np.array(used, bool) & (self.counts(setting)[0] > 0)


def by_labels(
    store: Store, queries: Store | None, images: int | None, seed: int
) -> Search:
    """Every image with a label is a query (those of `queries` if given), and the others of its
    class are right.

    Raises:
        MissingInput: no labels.
        StoreMismatch: other classes.
        VitseeError: no class has two images.
    """
    data = labelled_rows(store, images, seed)
    own = data if queries is None else labelled_rows(queries, images, seed)
    remarks = [] if queries is None else check_label_spaces(data, own)
    lists = _OfClass(data.labels, own.labels, itself=queries is None)
    if queries is None:
        remarks += _twins(store, data)
    names = own.store.samples.id[own.rows].tolist()
    about = {"images": data.describe()} | (
        {} if queries is None else {"queries": own.describe()}
    )
    return Search(
        store,
        data.rows,
        own.store,
        own.rows,
        names,
        lists,
        ONE,
        [""] * len(names),
        itself=data.jackknife(seed) if queries is None else None,
        remarks=tuple(remarks),
        about=about,
    )


def _twins(store: Store, data: LabelledRows) -> list[str]:
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


class _OfClass(Sequence[dict[str, Integers]]):
    """The lists of queries with labels, made on demand: together they would take the square of the
    number of images. labels: (images,); queries: (queries,) their labels."""

    def __init__(self, labels: Integers, queries: Integers, *, itself: bool) -> None:
        self._queries = queries.tolist()
        self._itself = itself
        self._places = {int(c): np.flatnonzero(labels == c) for c in np.unique(queries)}

    def __len__(self) -> int:
        return len(self._queries)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[one] for one in range(*i.indices(len(self)))]
        right = self._places[self._queries[i]]
        if not self._itself:
            return {RELEVANT: right}
        return {RELEVANT: right[right != i], JUNK: np.array([i], np.int64)}


def by_truth(truth: RetrievalTruth, store: Store, queries: Store | None) -> Search:
    """The images and queries that a ground truth names.

    Raises:
        MissingInput: a name that is not in the store, or is ambiguous.
        VitseeError: a query that could not be read.
    """
    own = store if queries is None else queries
    ids = _Ids(store, truth.images)
    rows = ids.rows(
        truth.images, f"of the {plural(len(truth.images), 'images')}", truth.source
    )
    query_names = [query.name for query in truth.queries if query.use != "ignored"]
    query_rows = _Ids(own, query_names).rows(
        query_names, f"of the {plural(len(query_names), 'queries')}", truth.source
    )
    bad = [
        n for n, row in zip(query_names, query_rows, strict=True) if not own.valid[row]
    ]
    if bad:
        raise VitseeError(
            f"{own.label} has {plural(len(bad), 'queries')} of {truth.source} that could not be "
            f"read ({_some(bad)}); extract it from images that can"
        )
    searched = np.sort(rows)
    if truth.more:
        every = store.committed.repeat(store.plan.slab)[: store.n_images].copy()
        if queries is None:
            ignored = [query.name for query in truth.queries if query.use == "ignored"]
            every[query_rows] = False
            every[_Ids(store, ignored).found(ignored)] = False
        every[rows] = True
        searched = np.flatnonzero(every)
    # Of the truth's images, in its order.
    place = np.searchsorted(searched, rows)
    kept = [query for query in truth.queries if query.use != "ignored"]
    lists = [
        {name: np.sort(place[list(own_)]) for name, own_ in query.lists.items()}
        for query in kept
    ]
    lost = np.flatnonzero(~store.valid[searched])
    remarks = []
    if len(lost):
        some = _some(store.samples.id[searched[lost]].tolist())
        remarks.append(
            f"{store.label}: {plural(len(lost), 'images')} could not be read, last in every "
            f"ranking ({some})"
        )
    return Search(
        store,
        searched,
        own,
        query_rows,
        query_names,
        lists,
        truth.settings,
        [query.use for query in kept],
        remarks=tuple(remarks),
        about={"images": {"rows": len(searched), "unreadable": len(lost)}},
    )


def check_search(search: Search) -> list[str]:
    """Refuse invalid searches; return remarks.

    Raises:
        StoreMismatch: stores of other models or transforms, a query that is among the searched
            images and not in its junk, or a distractor that is a right image or a query.
        VitseeError: no query has a right image.
    """
    if not any(search.scored(setting).any() for setting in search.settings):
        raise VitseeError(
            f"no query of {search.store.label} has a right image to be found"
        )
    require_comparable(search.store, search.stores[1:])
    if search.itself is None:
        _check_queries_apart(search)
    if search.distractors:
        _check_distractors(search)
    return _remarks_on_ids(search)


def _remarks_on_ids(search: Search) -> list[str]:
    """Return remarks on queries, and distractors, that may be searched images saved anew."""
    remarks = []
    if search.itself is None:
        remarks += shared_ids(
            search.store, search.rows, search.query_store, search.queries, "queries"
        )
    for store in search.distractors:
        rows = np.flatnonzero(store.valid)
        remarks += shared_ids(search.store, search.rows, store, rows, "distractors")
    return remarks


def _check_queries_apart(search: Search) -> None:
    """Refuse queries that are searched images outside of their own junk, by bytes and by pixels."""
    for kind, words in KINDS_OF_HASH.items():
        searched = _hashes(search.store, kind, search.rows)
        queries = _hashes(search.query_store, kind, search.queries)
        if searched is None or queries is None:
            continue
        places: dict[int, list[int]] = {}
        is_shared = np.isin(searched, queries) & search.readable
        for place in np.flatnonzero(is_shared).tolist():
            places.setdefault(int(searched[place]), []).append(place)
        for name, hash_, lists in zip(
            search.names, queries.tolist(), search.lists, strict=True
        ):
            for place in places.get(hash_, ()):
                if place not in lists.get(JUNK, ()):
                    sample = search.store.samples.id[search.rows[place]]
                    raise StoreMismatch(
                        f"the query {name} is among the images of {search.store.label} that are "
                        f"searched ({sample}, equal {words}); leave it out of one of them"
                    )


def _check_distractors(search: Search) -> None:
    """Refuse distractors that are queries or images of their lists, by bytes and by pixels."""
    is_listed = np.zeros(len(search.rows), bool)
    for lists in search.lists:
        for places in lists.values():
            is_listed[places] = True
    listed_rows = search.rows[is_listed & search.readable]
    for store in search.distractors:
        is_shared = np.zeros(store.n_images, bool)
        for kind in KINDS_OF_HASH:
            listed = _hashes(search.store, kind, listed_rows)
            queries = _hashes(search.query_store, kind, search.queries)
            distractors = _hashes(store, kind)
            if distractors is None:
                continue
            for known in (listed, queries):
                if known is not None:
                    is_shared |= np.isin(distractors, known)
        is_shared &= store.valid
        n = int(is_shared.sum())
        if n:
            raise StoreMismatch(
                f"{plural(n, 'distractors')} of {store.label} {'is' if n == 1 else 'are'} among "
                f"the queries and the images of their lists "
                f"({_some(store.samples.id[is_shared].tolist())}), by bytes or pixels; leave them "
                "out"
            )


# Arrays of a store by which images are the same -> what is equal then, in words.
KINDS_OF_HASH = {"hash": "bytes", "pixel_hash": "pixels"}


def _hashes(
    store: Store, kind: str, rows: Integers | None = None
) -> NDArray[np.uint64] | None:
    """Return hashes of images, of all rows by default; None if the store has none of this kind.

    Read as an array rather than from `samples`, whose names take far more memory.
    """
    if kind == "pixel_hash" and not store.plan.pixel_hashes:
        return None
    hashes: NDArray[np.uint64] = store.array(kind)[:]
    return hashes if rows is None else hashes[rows]


class _Ids:
    """Rows by name: a sample's id, its id without ending, the last part of its path with and
    without ending, whichever exists first; boxes that lists add to ids are ignored."""

    def __init__(self, store: Store, wanted: Iterable[str]) -> None:
        self.store = store
        names = {*wanted}
        self._rows: list[dict[str, list[int]]] = [{}, {}, {}, {}]
        committed = store.committed.repeat(store.plan.slab)
        for row, sample in enumerate(store.samples.id.tolist()):
            whole = _BOX.sub("", sample)
            file = whole.rpartition("/")[2]
            forms = (sample, os.path.splitext(whole)[0], file, os.path.splitext(file)[0])
            for of, name in zip(self._rows, forms, strict=True):
                if name in names and committed[row]:
                    of.setdefault(name, []).append(row)

    def _of(self, name: str) -> list[int]:
        return next((of[name] for of in self._rows if name in of), [])

    def found(self, names: Sequence[str]) -> Integers:
        """The rows of those names that exist."""
        return np.array([row for name in names for row in self._of(name)], np.int64)

    def rows(self, names: Sequence[str], what: str, source: str) -> Integers:
        """The row of each name. Raises MissingInput: a name without a row, or with several."""
        rows = [self._of(name) for name in names]
        if missing := [name for name, own in zip(names, rows, strict=True) if not own]:
            first = self.store.samples.id[0]
            raise MissingInput(
                f"{self.store.label} lacks {len(missing)} {what} of {source} ({_some(missing)}); "
                f"its ids look like {first}"
            )
        twice = next(
            ((n, own) for n, own in zip(names, rows, strict=True) if len(own) > 1), None
        )
        if twice is not None:
            ids = self.store.samples.id[twice[1]].tolist()
            raise MissingInput(
                f"{self.store.label} has {len(ids)} images that may be {twice[0]} of {source} "
                f"({_some(ids)}); expected one"
            )
        return np.array([own[0] for own in rows], np.int64)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(str, names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")
