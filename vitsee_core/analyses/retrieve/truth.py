"""Which images answer a query: by the names of the images, and what is scored with it.

    revisited   ROxford and RParis (Radenovic et al. 2018): for each query the images that show its
                building clearly (easy), hardly (hard), and those that are neither counted as right
                nor as wrong (junk)
    oxford      the same with one list `ok` in place of two (Philbin et al. 2007)
    list        right images for each query; with a use for each query that of GLDv2 (Weyand et al.
                2020)
    labels      right are the images of the query's class

An image that is in no list of a query is wrong.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitsee_core.analyses.retrieve.plain_pickle import load_plain, read_at_most
from vitsee_core.tables.files import check_new_files, write_files
from vitsee_core.tables.text import visible
from vitsee_stores.errors import VitseeError, reason, reason_of_text

JUNK = "junk"
LABELS = "labels"
FORMS = ("trapezoid", "plain")
MOST_PLACES = 1 << 24  # in all lists of a file


@dataclass(frozen=True)
class Setting:
    """One averaged score.

    Attributes:
        suffix: of the metrics' names.
        positives: the lists whose images are right; those of the others are left out of the
            ranking.
        use: only queries of this use (any but `ignored` if empty).
        top: only this many nearest images count (0 for all).
    """

    suffix: str
    positives: tuple[str, ...]
    use: str = ""
    top: int = 0

    @property
    def map(self) -> str:
        """The name of its mean average precision."""
        return f"map{f'@{self.top}' if self.top else ''}{self.suffix}"


@dataclass(frozen=True)
class Query:
    """A query image and its lists of images."""

    name: str
    # name -> places in `RetrievalTruth.images`, ascending
    lists: dict[str, tuple[int, ...]] = field(default_factory=dict)
    box: tuple[float, ...] | None = (
        None  # x0, y0, x1, y1 of the searched object, in pixels
    )
    use: str = ""  # of queries that are scored separately


@dataclass(frozen=True)
class RetrievalTruth:
    """Which images are searched, and with which queries."""

    source: str  # in words
    images: tuple[str, ...]  # names of the searched images
    queries: tuple[Query, ...]
    settings: tuple[Setting, ...]
    form: str  # default form of the average precision
    more: bool = (
        False  # all other images of the store except the queries are searched, too
    )

    @property
    def boxed(self) -> bool:
        return any(query.box is not None for query in self.queries)


REVISITED = (
    Setting("_easy", ("easy",)),
    Setting("_medium", ("easy", "hard")),
    Setting("_hard", ("hard",)),
)
OXFORD = (Setting("", ("ok",)),)
RELEVANT = "relevant"
ONE = (Setting("", (RELEVANT,)),)
LANDMARKS = (
    Setting("", (RELEVANT,), top=100),
    Setting("_public", (RELEVANT,), "public", 100),
    Setting("_private", (RELEVANT,), "private", 100),
)
KEYS = {
    frozenset(("bbx", "easy", "hard", JUNK)): REVISITED,
    frozenset(("bbx", "ok", JUNK)): OXFORD,
}
EXPECTED = (
    "expected imlist and qimlist, lists of names, and gnd, a list of one {bbx, easy, hard, junk} "
    "for each query (bbx: 4 numbers, the others: places in imlist)"
)


def revisited(value: Any, source: str) -> RetrievalTruth:
    """The ground truth of a file in the format of ROxford, RParis or Oxford5k. Raises VitseeError:
    names what is wrong."""
    if not isinstance(value, dict) or {*map(_key, value)} != {"imlist", "qimlist", "gnd"}:
        held = (
            ", ".join(sorted(map(_key, value))[:6])
            if isinstance(value, dict)
            else _kind(value)
        )
        raise VitseeError(f"{source} has {held or 'nothing'}; {EXPECTED}")
    images = _names(value["imlist"], "imlist", source)
    queries = _names(value["qimlist"], "qimlist", source)
    truth = value["gnd"]
    if not isinstance(truth, list) or len(truth) != len(queries):
        n = len(truth) if isinstance(truth, list) else "no"
        raise VitseeError(
            f"{source} has {n} entries in gnd for {len(queries)} queries; {EXPECTED}"
        )
    # A pickle may share one list among all queries at no cost.
    n_places = sum(
        len(one)
        for entry in truth
        if isinstance(entry, dict)
        for one in entry.values()
        if isinstance(one, list)
    )
    if n_places > MOST_PLACES:
        raise VitseeError(
            f"{source} has {n_places} places in its lists, expected at most {MOST_PLACES}"
        )
    settings: tuple[Setting, ...] | None = None
    made = []
    for name, entry in zip(queries, truth, strict=True):
        where = f"{source}: query {name!r}"
        keys = frozenset(map(_key, entry)) if isinstance(entry, dict) else frozenset()
        if keys not in KEYS or (settings is not None and KEYS[keys] is not settings):
            held = ", ".join(sorted(keys)[:6]) or _kind(entry)
            raise VitseeError(f"{where} has {held}; {EXPECTED}")
        settings = KEYS[keys]
        given = {key: entry[key] for key in sorted(keys - {"bbx"})}
        lists = {
            key: _places(one, len(images), f"{where}, {key}")
            for key, one in given.items()
        }
        _check_apart(lists, images, where)
        made.append(Query(name, lists, _box(entry["bbx"], where)))
    if settings is None:
        raise VitseeError(f"{source} has no query; {EXPECTED}")
    parsed = RetrievalTruth(source, images, tuple(made), settings, "trapezoid")
    check_queries_apart(parsed)
    return parsed


def as_json(truth: RetrievalTruth) -> dict[str, Any]:
    """The ground truth in the format that `revisited` reads. Raises VitseeError: it has no such
    boxes and lists."""
    if truth.settings not in KEYS.values():
        raise VitseeError(
            f"{truth.source} is no ground truth of the form of ROxford or RParis; only such is "
            "written as JSON"
        )
    return {
        "imlist": list(truth.images),
        "qimlist": [query.name for query in truth.queries],
        "gnd": [
            {"bbx": list(query.box or ())}
            | {key: list(one) for key, one in query.lists.items()}
            for query in truth.queries
        ],
    }


def check_queries_apart(truth: RetrievalTruth) -> None:
    """Refuse a query that is among the searched images, unless it is its own junk: it would find
    itself. Raises VitseeError: names it."""
    place = {name: i for i, name in enumerate(truth.images)}
    for query in truth.queries:
        own = place.get(query.name)
        if own is not None and own not in query.lists.get(JUNK, ()):
            raise VitseeError(
                f"{truth.source}: the query {query.name!r} is among the images that are searched; "
                "expected it to be left out of them, or in its list junk"
            )


def _key(key: Any) -> str:
    return visible(key[:40]) if isinstance(key, str) else _kind(key)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _names(value: Any, key: str, source: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise VitseeError(
            f"{source} has {_kind(value)} without names as {key}; {EXPECTED}"
        )
    names = [one.decode("latin1") if isinstance(one, bytes) else one for one in value]
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise VitseeError(f"{source}: entry {i} of {key} is no name; {EXPECTED}")
    if len({*names}) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise VitseeError(f"{source} has {twice[:80]!r} twice in {key}")
    return tuple(names)


def _places(value: Any, n: int, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise VitseeError(f"{where} is {_kind(value)}; {EXPECTED}")
    for one in value:
        if isinstance(one, bool) or not isinstance(one, int):
            raise VitseeError(
                f"{where} has {_kind(one)} where a place in imlist was expected"
            )
        if not 0 <= one < n:
            shown = one if abs(one) < 10**12 else "a number"
            raise VitseeError(
                f"{where} has {shown}, which is no place in imlist (0 to {n - 1})"
            )
    if len({*value}) < len(value):
        raise VitseeError(f"{where} has a place twice")
    return tuple(sorted(value))


def _check_apart(
    lists: dict[str, tuple[int, ...]], images: Sequence[str], where: str
) -> None:
    owner: dict[int, str] = {}
    for name, places in lists.items():
        for one in places:
            if one in owner:
                raise VitseeError(
                    f"{where} has image {one} ({visible(images[one])}) in both {owner[one]} and "
                    f"{name}"
                )
            owner[one] = name


def _box(value: Any, where: str) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != 4 or not all(map(_finite, value)):
        raise VitseeError(f"{where} has a bbx that is no 4 finite numbers x0, y0, x1, y1")
    x0, y0, x1, y1 = map(float, value)
    if x0 >= x1 or y0 >= y1:
        raise VitseeError(f"{where} has an empty bbx {x0:g} {y0:g} {x1:g} {y1:g}")
    return x0, y0, x1, y1


def _finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 1e9 and math.isfinite(value)


# ---------------------------------------------------------------- files
#
# .pkl and .json of ROxford and RParis, .csv of GLDv2; and exports from them.


ENDINGS = (".pkl", ".json", ".csv")
MOST_BYTES = 256 << 20
USES = ("public", "private", "ignored")
_NONE = "None"  # what GLDv2 has for queries without right images
_FOLDERS = ("jpg", "images", "")
_IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", "")


def read_truth(path: Path) -> RetrievalTruth:
    """The ground truth in a file. Raises VitseeError: another ending, or not a ground truth; names
    what is wrong."""
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise VitseeError(
            f"{path} is no ground truth by its ending; expected {', '.join(ENDINGS)}, or the word "
            "labels"
        )
    if ending == ".pkl":
        return revisited(load_plain(path), str(path))
    try:
        text = read_at_most(path, MOST_BYTES, "ground truth is").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise VitseeError(f"{path} is no text in UTF-8") from None
    if ending == ".csv":
        return _solution(text, str(path))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = reason_of_text(error)[:120]
        raise VitseeError(f"{path} is not JSON: {why}") from None
    return revisited(value, str(path))


def digest(path: Path) -> str:
    """sha256 of the file's bytes."""
    return hashlib.sha256(read_at_most(path, MOST_BYTES, "ground truth is")).hexdigest()


def _solution(text: str, source: str) -> RetrievalTruth:
    """The ground truth of a table `id,images` or, as in GLDv2, `id,images,Usage`, whose images are
    names of right ones separated by spaces. Raises VitseeError: names the line that is wrong."""
    lines = [line for line in text.splitlines() if line.strip()]
    header = _cells(lines[0]) if lines else []
    if header not in (["id", "images"], ["id", "images", "Usage"]):
        held = ",".join(header)[:80]
        raise VitseeError(
            f"{source} begins with {held!r}; expected id,images or id,images,Usage"
        )
    places: dict[str, int] = {}
    queries: dict[str, Query] = {}
    for number, line in enumerate(lines[1:], 2):
        cells = _cells(line)
        if len(cells) != len(header) or not cells[0]:
            raise VitseeError(
                f"line {number} of {source} has {len(cells)} cells; expected {','.join(header)}"
            )
        name = cells[0]
        names = cells[1].split()
        use = cells[-1].lower() if cells[2:] else ""
        if use and use not in USES:
            raise VitseeError(
                f"line {number} of {source} has the Usage {cells[-1][:40]!r}; expected Public, "
                "Private or Ignored"
            )
        if name in queries:
            raise VitseeError(
                f"line {number} of {source} has the query {name[:80]!r} again"
            )
        if len({*names}) < len(names):
            raise VitseeError(f"line {number} of {source} names an image twice")
        right = [] if names == [_NONE] or use == "ignored" else names
        own = sorted(places.setdefault(one, len(places)) for one in right)
        queries[name] = Query(name, {RELEVANT: tuple(own)}, use=use)
    if not queries:
        raise VitseeError(f"{source} has a header and no queries below it")
    settings: tuple[Setting, ...] = LANDMARKS if len(header) == 3 else ONE
    used = [
        use
        for use in ("public", "private")
        if any(q.use == use for q in queries.values())
    ]
    settings = tuple(one for one in settings if not one.use or one.use in used)
    truth = RetrievalTruth(
        source, tuple(places), tuple(queries.values()), settings, "plain", more=True
    )
    check_queries_apart(truth)
    return truth


def _cells(line: str) -> list[str]:
    return [
        cell.strip().removeprefix('"').removesuffix('"').strip()
        for cell in line.split(",")
    ]


def export(
    source: Path,
    queries: Path | None = None,
    truth: Path | None = None,
    *,
    force: bool = False,
) -> None:
    """Write the list of a ground truth's queries, its JSON, or both; nothing if neither is
    requested.

    Args:
        source: the ground truth.
        queries: path of the list, see `queries_list`.
        truth: path of the JSON.
        force: replace existing files.

    Raises:
        VitseeError: no such ground truth, an image of a query is missing, or a file exists.
    """
    wanted = [path for path in (queries, truth) if path is not None]
    if not wanted:
        return
    if str(source) == LABELS:
        raise VitseeError(
            "labels are no ground truth in a file: there is nothing to export"
        )
    check_new_files(wanted, force=force, inputs=[source])
    known = read_truth(source)
    files: dict[Path, bytes] = {}
    if truth is not None:
        files[truth] = (json.dumps(as_json(known)) + "\n").encode()
    if queries is not None:
        files[queries] = queries_list(known, source, queries)
    write_files(files, force=force)


def queries_list(truth: RetrievalTruth, source: Path, to: Path) -> bytes:
    """A list for extract: path, id and box of each query. The images are looked for beside the
    ground truth, in jpg/ and images/.

    Args:
        truth: with boxes.
        source: its file.
        to: the future list: paths are relative to its folder.

    Raises:
        VitseeError: no boxes, or a missing image.
    """
    from PIL import Image

    from vitsee_core.images.formats import readable_formats
    from vitsee_core.images.placement import box_pixels, box_text

    if not truth.boxed:
        raise VitseeError(
            f"{source} has no boxes of its queries; expected one of ROxford's form"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("path", "id", "box"))
    for query in truth.queries:
        image = _image_of(query.name, source)
        assert query.box is not None
        try:
            with Image.open(image, formats=readable_formats()) as opened:
                width, height = opened.size
        except Exception as error:  # Pillow can raise anything
            why = type(error).__name__
            if isinstance(error, OSError) and error.errno is not None:
                why = reason(error)
            raise VitseeError(f"cannot read {image}: {why}") from None
        x0, y0, x1, y1 = query.box
        inside = (
            max(0.0, x0),
            max(0.0, y0),
            min(float(width), x1),
            min(float(height), y1),
        )
        box_pixels(inside, (height, width))
        path = os.path.relpath(image.absolute(), to.absolute().parent)
        writer.writerow((path, query.name, box_text(inside)))
    return text.getvalue().encode()


def _image_of(name: str, source: Path) -> Path:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise VitseeError(
            f"{source}: the query {name[:80]!r} is no name below its folder"
        )
    for folder in _FOLDERS:
        for ending in _IMAGE_ENDINGS:
            path = source.parent / folder / f"{name}{ending}"
            if path.is_file():
                return path
    raise VitseeError(
        f"the image of the query {name!r} is not beside {source}; expected it in "
        f"{source.parent / _FOLDERS[0]}"
    )
