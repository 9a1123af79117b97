"""Ground truths of retrieval: which images answer a query, and which scores are made of
them.

Images are known by their names. The forms of a ground truth:

    revisited   ROxford and RParis (Radenovic et al. 2018): for each query the images that
    show its
                building clearly (easy), hardly (hard), and those that are neither counted
                as right nor as wrong (junk)
    oxford      the same with one list `ok` in place of two (Philbin et al. 2007)
    list        right images for each query; with a use for each query that of GLDv2
    (Weyand et al.
                2020)
    labels      right are the images of the query's class

An image that is in no list of a query is wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitsee_core.analyses.retrieve.plain_pickle import load_plain, read_at_most
from vitsee_core.tables.text import visible
from vitsee_stores.errors import VitseeError, reason_of_text

JUNK = "junk"
LABELS = "labels"
FORMS = ("trapezoid", "plain")
MAX_LIST_ENTRIES = 1 << 24  # in all lists of a file


@dataclass(frozen=True)
class Setting:
    """One averaged score.

    Attributes:
        suffix: the end of its metrics' names.
        positives: names of the lists whose images are right; images of the other lists are
            left out of the ranking.
        use: only queries with this use are scored; "" for all except `ignored`.
        top: only this many nearest images count; 0 for all.
    """

    suffix: str
    positives: tuple[str, ...]
    use: str = ""
    top: int = 0

    @property
    def map_name(self) -> str:
        """Name of its mean average precision, for instance "map@100_public"."""
        cutoff = f"@{self.top}" if self.top else ""
        return f"map{cutoff}{self.suffix}"


@dataclass(frozen=True)
class Query:
    """A query image and its lists of images.

    Attributes:
        name: the image's name.
        lists: name of a list -> its images as indices into `RetrievalTruth.images`,
            ascending.
        box: x0, y0, x1, y1 of the object that is searched for, in pixels; None for the
            whole image.
        use: "public", "private" or "ignored" in GLDv2, whose uses are scored separately;
            else "".
    """

    name: str
    lists: dict[str, tuple[int, ...]] = field(default_factory=dict)
    box: tuple[float, ...] | None = None
    use: str = ""


@dataclass(frozen=True)
class RetrievalTruth:
    """Which images are searched, with which queries, and what is right.

    Attributes:
        source: where it comes from, in words.
        images: names of the searched images.
        queries: the queries with their lists.
        settings: the scores that are computed.
        form: default form of the average precision, one of `FORMS`.
        searches_unlisted: whether all other images of the store, except the queries, are
            searched too.
    """

    source: str
    images: tuple[str, ...]
    queries: tuple[Query, ...]
    settings: tuple[Setting, ...]
    form: str
    searches_unlisted: bool = False

    @property
    def has_boxes(self) -> bool:
        """Whether any query has a box."""
        return any(query.box is not None for query in self.queries)


REVISITED = (
    Setting("_easy", ("easy",)),
    Setting("_medium", ("easy", "hard")),
    Setting("_hard", ("hard",)),
)
OXFORD = (Setting("", ("ok",)),)
RELEVANT = "relevant"
RELEVANT_ONLY = (Setting("", (RELEVANT,)),)
LANDMARKS = (
    Setting("", (RELEVANT,), top=100),
    Setting("_public", (RELEVANT,), "public", 100),
    Setting("_private", (RELEVANT,), "private", 100),
)
# The keys of a query's entry say which benchmark the file belongs to.
SETTINGS_BY_KEYS = {
    frozenset(("bbx", "easy", "hard", JUNK)): REVISITED,
    frozenset(("bbx", "ok", JUNK)): OXFORD,
}
EXPECTED = (
    "expected imlist and qimlist, lists of names, and gnd, a list of one {bbx, easy, "
    "hard, junk} "
    "for each query (bbx: 4 numbers, the others: places in imlist)"
)


def parse_revisited(value: Any, source: str) -> RetrievalTruth:
    """Return the ground truth of a file in the format of ROxford, RParis or Oxford5k.

    Args:
        value: what the pickle or JSON file holds.
        source: the file's path, for messages.

    Raises:
        VitseeError: the value does not have this format; the message names what is wrong.
    """
    if not isinstance(value, dict):
        raise VitseeError(f"{source} has {_type_words(value)}; {EXPECTED}")
    if {*map(_key_words, value)} != {"imlist", "qimlist", "gnd"}:
        keys_found = ", ".join(sorted(map(_key_words, value))[:6])
        raise VitseeError(f"{source} has {keys_found or 'nothing'}; {EXPECTED}")
    images = _parse_names(value["imlist"], "imlist", source)
    query_names = _parse_names(value["qimlist"], "qimlist", source)
    entries = value["gnd"]
    if not isinstance(entries, list) or len(entries) != len(query_names):
        n_entries = len(entries) if isinstance(entries, list) else "no"
        raise VitseeError(
            f"{source} has {n_entries} entries in gnd for {len(query_names)} queries; "
            f"{EXPECTED}"
        )
    _limit_list_entries(entries, source)

    settings: tuple[Setting, ...] | None = None
    queries = []
    for name, entry in zip(query_names, entries, strict=True):
        where = f"{source}: query {name!r}"
        keys = (
            frozenset(map(_key_words, entry)) if isinstance(entry, dict) else frozenset()
        )
        is_known = keys in SETTINGS_BY_KEYS
        # One file is one benchmark: all entries have the keys of the first.
        if not is_known or (
            settings is not None and SETTINGS_BY_KEYS[keys] is not settings
        ):
            keys_found = ", ".join(sorted(keys)[:6]) or _type_words(entry)
            raise VitseeError(f"{where} has {keys_found}; {EXPECTED}")
        settings = SETTINGS_BY_KEYS[keys]
        lists = {
            key: _parse_indices(entry[key], len(images), f"{where}, {key}")
            for key in sorted(keys - {"bbx"})
        }
        _require_disjoint_lists(lists, images, where)
        queries.append(Query(name, lists, _parse_box(entry["bbx"], where)))
    if settings is None:
        raise VitseeError(f"{source} has no query; {EXPECTED}")
    truth = RetrievalTruth(
        source=source,
        images=images,
        queries=tuple(queries),
        settings=settings,
        form="trapezoid",
    )
    require_queries_apart(truth)
    return truth


def _limit_list_entries(entries: list[Any], source: str) -> None:
    """Refuse lists whose indices would take much memory once they are copied.

    A pickle may share one list among all queries at no cost, so the file's size is no
    bound.
    """
    n_places = 0
    for entry in entries:
        if isinstance(entry, dict):
            n_places += sum(len(v) for v in entry.values() if isinstance(v, list))
    if n_places > MAX_LIST_ENTRIES:
        raise VitseeError(
            f"{source} has {n_places} places in its lists, expected at most "
            f"{MAX_LIST_ENTRIES}"
        )


def require_queries_apart(truth: RetrievalTruth) -> None:
    """Refuse a query that is among the searched images, unless it is its own junk.

    It would find itself first.

    Raises:
        VitseeError: names the query.
    """
    index_by_name = {name: i for i, name in enumerate(truth.images)}
    for query in truth.queries:
        index = index_by_name.get(query.name)
        if index is not None and index not in query.lists.get(JUNK, ()):
            raise VitseeError(
                f"{truth.source}: the query {query.name!r} is among the images that are "
                "searched; "
                "expected it to be left out of them, or in its list junk"
            )


def _key_words(key: Any) -> str:
    """Return a key of a dictionary as messages show it."""
    return visible(key[:40]) if isinstance(key, str) else _type_words(key)


def _type_words(value: Any) -> str:
    """Return "nothing" or the type of a value, for messages."""
    return "nothing" if value is None else f"a {type(value).__name__}"


def _parse_names(value: Any, key: str, source: str) -> tuple[str, ...]:
    """Return the names of a list, which are distinct and not empty.

    Pickles of Python 2 have names as bytes.
    """
    if not isinstance(value, list) or not value:
        raise VitseeError(
            f"{source} has {_type_words(value)} without names as {key}; {EXPECTED}"
        )
    names = [n.decode("latin1") if isinstance(n, bytes) else n for n in value]
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise VitseeError(f"{source}: entry {i} of {key} is no name; {EXPECTED}")
    names_before: set[str] = set()
    for name in names:
        if name in names_before:
            raise VitseeError(f"{source} has {name[:80]!r} twice in {key}")
        names_before.add(name)
    return tuple(names)


def _parse_indices(value: Any, n_images: int, where: str) -> tuple[int, ...]:
    """Return the image indices of a list, distinct and ascending."""
    if not isinstance(value, list):
        raise VitseeError(f"{where} is {_type_words(value)}; {EXPECTED}")
    for index in value:
        if isinstance(index, bool) or not isinstance(index, int):
            raise VitseeError(
                f"{where} has {_type_words(index)} where a place in imlist was expected"
            )
        if not 0 <= index < n_images:
            # An integer of a pickle may have thousands of digits.
            text = index if abs(index) < 10**12 else "a number"
            raise VitseeError(
                f"{where} has {text}, which is no place in imlist (0 to {n_images - 1})"
            )
    if len({*value}) < len(value):
        raise VitseeError(f"{where} has a place twice")
    return tuple(sorted(value))


def _require_disjoint_lists(
    lists: dict[str, tuple[int, ...]], images: Sequence[str], where: str
) -> None:
    """Refuse an image that is in two lists of a query."""
    list_of_image: dict[int, str] = {}
    for name, indices in lists.items():
        for i in indices:
            if i in list_of_image:
                raise VitseeError(
                    f"{where} has image {i} ({visible(images[i])}) in both "
                    f"{list_of_image[i]} and "
                    f"{name}"
                )
            list_of_image[i] = name


def _parse_box(value: Any, where: str) -> tuple[float, ...]:
    """Return x0, y0, x1, y1 of a box, in pixels."""
    is_box = (
        isinstance(value, list) and len(value) == 4 and all(map(_is_coordinate, value))
    )
    if not is_box:
        raise VitseeError(f"{where} has a bbx that is no 4 finite numbers x0, y0, x1, y1")
    x0, y0, x1, y1 = map(float, value)
    if x0 >= x1 or y0 >= y1:
        raise VitseeError(f"{where} has an empty bbx {x0:g} {y0:g} {x1:g} {y1:g}")
    return x0, y0, x1, y1


def _is_coordinate(value: Any) -> bool:
    """Whether a value is a finite number that a pixel may have."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    # The bound comes first: float() of a larger int may overflow.
    return abs(value) < 1e9 and math.isfinite(value)


# ---------------------------------------------------------------- files
#
# .pkl and .json of ROxford and RParis, .csv of GLDv2


ENDINGS = (".pkl", ".json", ".csv")
MAX_BYTES = 256 << 20
USES = ("public", "private", "ignored")
_NO_IMAGES = "None"  # what GLDv2 has for queries without right images


def read_truth(path: Path) -> RetrievalTruth:
    """Return the ground truth of a file.

    Raises:
        VitseeError: the ending is not one of `ENDINGS`, or the file is not a ground truth;
            the message names what is wrong.
    """
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise VitseeError(
            f"{path} is no ground truth by its ending; expected {', '.join(ENDINGS)}, or "
            "the word "
            "labels"
        )
    if ending == ".pkl":
        return parse_revisited(load_plain(path), str(path))
    try:
        text = read_at_most(path, MAX_BYTES, "ground truth is").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise VitseeError(f"{path} is no text in UTF-8") from None
    if ending == ".csv":
        return _parse_solution(text, str(path))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = reason_of_text(error)[:120]
        raise VitseeError(f"{path} is not JSON: {why}") from None
    return parse_revisited(value, str(path))


def digest(path: Path) -> str:
    """Return the sha256 of a ground truth's bytes, for a sidecar."""
    return hashlib.sha256(read_at_most(path, MAX_BYTES, "ground truth is")).hexdigest()


def _parse_solution(text: str, source: str) -> RetrievalTruth:
    """Return the ground truth of a table `id,images` or, as in GLDv2, `id,images,Usage`.

    The cell `images` has the names of the right images, separated by spaces.

    Raises:
        VitseeError: names the line that is wrong.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    header = _split_cells(lines[0]) if lines else []
    if header not in (["id", "images"], ["id", "images", "Usage"]):
        header_text = ",".join(header)[:80]
        raise VitseeError(
            f"{source} begins with {header_text!r}; expected id,images or id,images,Usage"
        )
    # Image name -> its index, in the order of the first mention.
    index_by_name: dict[str, int] = {}
    queries: dict[str, Query] = {}
    for line_number, line in enumerate(lines[1:], 2):
        where = f"line {line_number} of {source}"
        cells = _split_cells(line)
        if len(cells) != len(header) or not cells[0]:
            raise VitseeError(
                f"{where} has {len(cells)} cells; expected {','.join(header)}"
            )
        name = cells[0]
        image_names = cells[1].split()
        use = cells[2].lower() if len(cells) == 3 else ""
        if use and use not in USES:
            raise VitseeError(
                f"{where} has the Usage {cells[2][:40]!r}; expected Public, Private or "
                "Ignored"
            )
        if name in queries:
            raise VitseeError(f"{where} has the query {name[:80]!r} again")
        if len({*image_names}) < len(image_names):
            raise VitseeError(f"{where} names an image twice")
        if image_names == [_NO_IMAGES] or use == "ignored":
            image_names = []
        indices = [index_by_name.setdefault(n, len(index_by_name)) for n in image_names]
        queries[name] = Query(name, {RELEVANT: tuple(sorted(indices))}, use=use)
    if not queries:
        raise VitseeError(f"{source} has a header and no queries below it")
    truth = RetrievalTruth(
        source=source,
        images=tuple(index_by_name),
        queries=tuple(queries.values()),
        settings=_solution_settings(queries.values(), has_uses=len(header) == 3),
        form="plain",
        searches_unlisted=True,
    )
    require_queries_apart(truth)
    return truth


def _solution_settings(
    queries: Iterable[Query], *, has_uses: bool
) -> tuple[Setting, ...]:
    """Return the scores of a table: those of GLDv2 whose use occurs, or one over all queries."""
    if not has_uses:
        return RELEVANT_ONLY
    uses = {query.use for query in queries}
    return tuple(
        setting for setting in LANDMARKS if not setting.use or setting.use in uses
    )


def _split_cells(line: str) -> list[str]:
    """Return the cells of a line of CSV, without quotes; names of GLDv2 have no commas."""
    return [
        cell.strip().removeprefix('"').removesuffix('"').strip()
        for cell in line.split(",")
    ]
