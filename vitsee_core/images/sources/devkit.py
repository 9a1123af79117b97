"""The labels of ImageNet's validation images as its development kit has them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from vitsee_core.images.errors import DataError
from vitsee_stores.errors import reason

META = "meta.mat"
MOST_BYTES = 1 << 24
# Where the images are, from the folder of the labels (ILSVRC2012_devkit_t12/data).
FOLDERS = (
    "",
    "val",
    "../../val",
    "../../ILSVRC2012_img_val",
    "../..",
    "../../ILSVRC/Data/CLS-LOC/val",
)


def ground_truth(path: Path) -> dict[str, list[str]] | None:
    """Paths, ids and labels (WordNet ids) of ILSVRC2012_validation_ground_truth.txt, which has the
    number of a class per line, in the order of the images' names, and meta.mat beside it, which
    says what the numbers mean; None for any other file.

    Raises:
        DataError: meta.mat cannot be read, or lacks a number.
    """
    meta = path.with_name(META)
    if path.suffix.lower() != ".txt" or not meta.is_file():
        return None
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        lines = path.read_text("utf-8-sig").split()
    except (OSError, UnicodeDecodeError):
        return None  # said by whoever reads it as a list
    if not lines or not all(re.fullmatch(r"\d+", line) for line in lines):
        return None
    names = _wordnet_ids(meta)
    unknown = next((line for line in lines if int(line) not in names), None)
    if unknown is not None:
        raise DataError(f"{path} has the class {unknown}, which {meta} does not name")
    ids = [f"ILSVRC2012_val_{k:08d}.JPEG" for k in range(1, len(lines) + 1)]
    folder = path.absolute().parent
    inner = next((f for f in FOLDERS if (folder / f / ids[0]).exists()), "")
    paths = [os.path.join(inner, name) for name in ids]
    return {"path": paths, "id": ids, "label": [names[int(line)] for line in lines]}


def _wordnet_ids(meta: Path) -> dict[int, str]:
    """ILSVRC2012_ID -> WNID, of the array `synsets`."""
    from scipy.io import loadmat

    try:
        if meta.stat().st_size > MOST_BYTES:
            raise DataError(
                f"{meta} has more than {MOST_BYTES} bytes; expected ImageNet's meta.mat"
            )
        synsets: Any = loadmat(meta, squeeze_me=True, struct_as_record=False)["synsets"]
        return {int(one.ILSVRC2012_ID): str(one.WNID) for one in synsets.ravel()}
    except OSError as error:
        raise DataError(f"cannot read {meta}: {reason(error)}") from None
    except DataError:
        raise
    except Exception as error:  # whatever scipy meets in a file of another kind
        raise DataError(
            f"{meta} is not ImageNet's meta.mat ({type(error).__name__}: {error}); expected "
            "synsets with ILSVRC2012_ID and WNID"
        ) from None
