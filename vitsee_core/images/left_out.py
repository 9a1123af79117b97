"""Files of a data set that are left out because of their ending, counted and named."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

# What lies beside images and is none: labels, captions, arrays, archives, texts, programs.
_COMPANIONS = frozenset(
    f".{kind}"
    for kind in (
        *(
            "txt",
            "json",
            "jsonl",
            "csv",
            "tsv",
            "xml",
            "yaml",
            "yml",
            "toml",
            "ini",
            "cfg",
            "cls",
        ),
        *(
            "md",
            "rst",
            "html",
            "htm",
            "log",
            "lst",
            "caption",
            "ann",
            "names",
            "data",
            "xlsx",
        ),
        *(
            "npy",
            "npz",
            "mat",
            "pkl",
            "pickle",
            "pt",
            "pth",
            "safetensors",
            "h5",
            "hdf5",
            "bin",
        ),
        *(
            "zip",
            "tar",
            "gz",
            "tgz",
            "zst",
            "bz2",
            "xz",
            "7z",
            "rar",
            "parquet",
            "arrow",
            "idx",
        ),
        *(
            "db",
            "lock",
            "lmdb",
            "mdb",
            "rec",
            "tfrecord",
            "py",
            "ipynb",
            "sh",
            "md5",
            "sha256",
        ),
    )
)
_TEXTS = (
    "README",
    "LICENSE",
    "LICENCE",
    "NOTICE",
    "CHANGELOG",
    "AUTHORS",
    "COPYING",
    "MAKEFILE",
)
_NO_ENDING = "without an ending"
_ENDINGS_SHOWN = 6


def count_ending(others: Counter[str], path: str) -> None:
    """Count a file that is not of the kind that was asked for, unless it may well lie beside such
    files."""
    name = path.rpartition("/")[2]
    ending = os.path.splitext(name)[1].lower()
    if name.startswith(".") or ending in _COMPANIONS or name.upper().startswith(_TEXTS):
        return
    others[ending or _NO_ENDING] += 1


def left_out_line(data: object, others: Mapping[str, int]) -> str:
    """The sentence about them, "" where there are none."""
    if not others:
        return ""
    n_files = sum(others.values())
    kinds = sorted(others, key=lambda kind: (-others[kind], kind))
    shown = [f"{others[kind]} {kind}" for kind in kinds[:_ENDINGS_SHOWN]]
    if len(kinds) > len(shown):
        shown.append(f"{sum(others[kind] for kind in kinds[len(shown) :])} others")
    files = "1 file is" if n_files == 1 else f"{n_files} files are"
    return f"{files} left out of {data} by the ending: {', '.join(shown)}"
