"""What is written of a ground truth: the list of its queries for `vitsee extract`, and its
JSON.

The benchmark crops queries to their boxes. The list has the box of each query, so that an
extraction from it makes a store of cropped queries.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitsee_core.analyses.retrieve.truth import (
    LABELS,
    SETTINGS_BY_KEYS,
    RetrievalTruth,
    read_truth,
)
from vitsee_core.tables.files import check_new_files, write_files
from vitsee_stores.errors import VitseeError, reason

log = logging.getLogger(__name__)

Size = tuple[int, int]  # height, width

# Where ROxford and RParis have their images, beside the ground truth; names lack the
# ending.
_FOLDERS = ("jpg", "images", "")
_IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", "")


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
        source: the file of the ground truth.
        queries: path of the list that is written, see `queries_list`.
        truth: path of the JSON that is written.
        force: replace existing files.

    Raises:
        VitseeError: no such ground truth, an image of a query is missing, or a file
            exists.
    """
    output_paths = [path for path in (queries, truth) if path is not None]
    if not output_paths:
        return
    if str(source) == LABELS:
        raise VitseeError(
            "labels are no ground truth in a file: there is nothing to export"
        )
    check_new_files(output_paths, force=force, inputs=[source])
    parsed_truth = read_truth(source)
    files: dict[Path, bytes] = {}
    if truth is not None:
        files[truth] = (json.dumps(truth_to_json(parsed_truth)) + "\n").encode()
    if queries is not None:
        files[queries] = queries_list(parsed_truth, source, queries)
    write_files(files, force=force)


def truth_to_json(truth: RetrievalTruth) -> dict[str, Any]:
    """Return the ground truth in the format that `parse_revisited` reads.

    Raises:
        VitseeError: the ground truth has no such boxes and lists.
    """
    if truth.settings not in SETTINGS_BY_KEYS.values():
        raise VitseeError(
            f"{truth.source} is no ground truth of the form of ROxford or RParis; only "
            "such is "
            "written as JSON"
        )
    entries = []
    for query in truth.queries:
        lists = {name: list(indices) for name, indices in query.lists.items()}
        entries.append({"bbx": list(query.box or ()), **lists})
    return {
        "imlist": list(truth.images),
        "qimlist": [query.name for query in truth.queries],
        "gnd": entries,
    }


def queries_list(truth: RetrievalTruth, source: Path, list_path: Path) -> bytes:
    """Return a CSV list for `vitsee extract`: path, id and box of each query.

    The images are looked for beside the ground truth, in jpg/ and images/.

    Args:
        truth: a ground truth with boxes.
        source: its file.
        list_path: where the list will be written; paths in it are relative to this folder.

    Raises:
        VitseeError: the ground truth has no boxes, or an image is missing.
    """
    from vitsee_core.images.placement import box_pixels, box_text

    if not truth.has_boxes:
        raise VitseeError(
            f"{source} has no boxes of its queries; expected one of ROxford's form"
        )
    boxes = []
    for query in truth.queries:
        image_path = _query_image_path(query.name, source)
        assert query.box is not None  # a file of this form has a box for each query
        boxes.append(_QueryBox.read(query.name, image_path, query.box))
    upright = _boxes_are_upright(source, boxes)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("path", "id", "box"))
    for box in boxes:
        height, width = box.upright_size if upright else box.size
        x0, y0, x1, y1 = box.corners
        # Boxes of the benchmark may reach over the image's border by some pixels.
        clipped_box = (
            max(0.0, x0),
            max(0.0, y0),
            min(float(width), x1),
            min(float(height), y1),
        )
        box_pixels(clipped_box, (height, width))  # refuses an empty box
        relative_path = os.path.relpath(
            box.image_path.absolute(), list_path.absolute().parent
        )
        writer.writerow((relative_path, box.query, box_text(clipped_box)))
    return text.getvalue().encode()


class _QueryBox(NamedTuple):
    """The box of a query in its image.

    Attributes:
        query: the query's name.
        image_path: the image's file.
        corners: x0, y0, x1, y1 in pixels.
        size: (height, width) of the image as it is read without --exif.
        upright_size: the same where its EXIF orientation is applied.
        oriented: whether it has one.
    """

    query: str
    image_path: Path
    corners: tuple[float, ...]
    size: Size
    upright_size: Size
    oriented: bool

    @classmethod
    def read(cls, query: str, path: Path, corners: tuple[float, ...]) -> _QueryBox:
        """Return a query's box with the sizes of its image, from the file's header alone.

        Raises:
            VitseeError: the file cannot be read.
        """
        from PIL import Image

        from vitsee_core.images.formats import readable_formats
        from vitsee_core.images.picture_remarks import orientation_of, size_when_loaded

        try:
            with Image.open(path, formats=readable_formats()) as image:
                return cls(
                    query=query,
                    image_path=path,
                    corners=corners,
                    size=size_when_loaded(image, exif=False),
                    upright_size=size_when_loaded(image, exif=True),
                    oriented=orientation_of(image) != 1,
                )
        except Exception as error:  # Pillow can raise anything
            why = type(error).__name__
            if isinstance(error, OSError) and error.errno is not None:
                why = reason(error)
            raise VitseeError(f"cannot read {path}: {why}") from None

    def overhang(self, size: Size) -> float:
        """Return by how many pixels the box reaches over the right and lower border."""
        height, width = size
        return max(0.0, self.corners[2] - width) + max(0.0, self.corners[3] - height)


def _boxes_are_upright(source: Path, boxes: Sequence[_QueryBox]) -> bool:
    """Return whether boxes are of images turned upright by their EXIF orientation.

    The benchmark's own code does not turn images; other people's boxes may be of turned ones,
    which then reach less over the border of these. How to extract the list is logged.

    Raises:
        VitseeError: some boxes fit the turned images alone, and others the stored ones alone.
    """
    n_oriented = sum(box.oriented for box in boxes)
    if not n_oriented:
        return False
    excess = [box.overhang(box.size) - box.overhang(box.upright_size) for box in boxes]
    n_upright = sum(pixels > 0 for pixels in excess)
    n_stored = sum(pixels < 0 for pixels in excess)
    if n_upright and n_stored:
        raise VitseeError(
            f"{source}: boxes of {n_upright} queries fit their images when these are turned "
            f"upright by their EXIF orientation, and boxes of {n_stored} as they are stored; "
            "expected all of one kind"
        )
    how = "upright: extract the list with --exif"
    if not n_upright:
        how = "as they are stored: extract the list without --exif"
    log.warning(
        "%d of %d images of queries have an EXIF orientation; the boxes are taken for those of "
        "images %s",
        n_oriented,
        len(boxes),
        how,
    )
    return n_upright > 0


def _query_image_path(name: str, source: Path) -> Path:
    """Return the image file of a query, which lies beside the ground truth or in its folders."""
    # A ground truth may be a stranger's: its names must not lead out of its folder.
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
