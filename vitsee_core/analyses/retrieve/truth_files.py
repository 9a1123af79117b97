"""Ground-truth files of retrieval: .pkl and .json of ROxford and RParis, .csv of GLDv2; and exports
from them."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from pathlib import Path

from vitsee_core.analyses.retrieve.plain_pickle import load_plain, read_at_most
from vitsee_core.analyses.retrieve.retrieval_truth import (
    LABELS,
    LANDMARKS,
    ONE,
    RELEVANT,
    Query,
    RetrievalTruth,
    Setting,
    as_json,
    check_queries_apart,
    revisited,
)
from vitsee_core.tables.files import check_new_files, write_files
from vitsee_stores.errors import VitseeError, reason

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
    text = _text(path)
    if ending == ".csv":
        return _solution(text, str(path))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise VitseeError(f"{path} is not JSON: {str(error)[:120]}") from None
    return revisited(value, str(path))


def digest(path: Path) -> str:
    """sha256 of the file's bytes."""
    return hashlib.sha256(read_at_most(path, MOST_BYTES, "ground truth is")).hexdigest()


def _text(path: Path) -> str:
    try:
        return read_at_most(path, MOST_BYTES, "ground truth is").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise VitseeError(f"{path} is no text in UTF-8") from None


def _solution(text: str, source: str) -> RetrievalTruth:
    """`id,images` or, as in GLDv2, `id,images,Usage`: names of right images separated by spaces."""
    lines = [line for line in text.splitlines() if line.strip()]
    header = _cells(lines[0]) if lines else []
    if header not in (["id", "images"], ["id", "images", "Usage"]):
        held = ",".join(header)[:80]
        raise VitseeError(f"{source} begins with {held!r}; expected id,images or id,images,Usage")
    places: dict[str, int] = {}
    queries: dict[str, Query] = {}
    for number, line in enumerate(lines[1:], 2):
        cells = _cells(line)
        if len(cells) != len(header) or not cells[0]:
            raise VitseeError(
                f"line {number} of {source} has {len(cells)} cells; expected {','.join(header)}"
            )
        name, names, use = cells[0], cells[1].split(), cells[-1].lower() if cells[2:] else ""
        if use and use not in USES:
            raise VitseeError(
                f"line {number} of {source} has the Usage {cells[-1][:40]!r}; expected Public, "
                "Private or Ignored"
            )
        if name in queries:
            raise VitseeError(f"line {number} of {source} has the query {name[:80]!r} again")
        if len({*names}) < len(names):
            raise VitseeError(f"line {number} of {source} names an image twice")
        right = [] if names == [_NONE] or use == "ignored" else names
        own = sorted(places.setdefault(one, len(places)) for one in right)
        queries[name] = Query(name, {RELEVANT: tuple(own)}, use=use)
    if not queries:
        raise VitseeError(f"{source} has a header and no queries below it")
    settings: tuple[Setting, ...] = LANDMARKS if len(header) == 3 else ONE
    used = [use for use in ("public", "private") if any(q.use == use for q in queries.values())]
    settings = tuple(one for one in settings if not one.use or one.use in used)
    truth = RetrievalTruth(
        source, tuple(places), tuple(queries.values()), settings, "plain", more=True
    )
    check_queries_apart(truth)
    return truth


def _cells(line: str) -> list[str]:
    return [cell.strip().removeprefix('"').removesuffix('"').strip() for cell in line.split(",")]


def export(
    source: Path, queries: Path | None = None, truth: Path | None = None, *, force: bool = False
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
        raise VitseeError("labels are no ground truth in a file: there is nothing to export")
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

    from vitsee_core.images.boxes import box_pixels, box_text

    if not truth.boxed:
        raise VitseeError(f"{source} has no boxes of its queries; expected one of ROxford's form")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("path", "id", "box"))
    for query in truth.queries:
        image = _image_of(query.name, source)
        assert query.box is not None
        try:
            with Image.open(image) as opened:
                width, height = opened.size
        except Exception as error:  # Pillow can raise anything
            why = type(error).__name__
            if isinstance(error, OSError) and error.errno is not None:
                why = reason(error)
            raise VitseeError(f"cannot read {image}: {why}") from None
        x0, y0, x1, y1 = query.box
        inside = (max(0.0, x0), max(0.0, y0), min(float(width), x1), min(float(height), y1))
        box_pixels(inside, (height, width))
        path = os.path.relpath(image.absolute(), to.absolute().parent)
        writer.writerow((path, query.name, box_text(inside)))
    return text.getvalue().encode()


def _image_of(name: str, source: Path) -> Path:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise VitseeError(f"{source}: the query {name[:80]!r} is no name below its folder")
    for folder in _FOLDERS:
        for ending in _IMAGE_ENDINGS:
            path = source.parent / folder / f"{name}{ending}"
            if path.is_file():
                return path
    raise VitseeError(
        f"the image of the query {name!r} is not beside {source}; expected it in "
        f"{source.parent / _FOLDERS[0]}"
    )
