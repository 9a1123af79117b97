"""Which kind of file stands where weights are expected, by its first bytes; its ending says little.

Downloads that failed leave pointers of Git LFS, pages of HTML and empty files behind, and the names
of weights in several files lead to one of them or to their index.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

HEAD_BYTES = 512
MAX_HEADER_BYTES = 100_000_000  # as safetensors itself reads
MAX_JSON_BYTES = 64 << 20
SHOWN_NAMES = 3
LFS = b"version https://git-lfs.github.com/spec/"
# torch.serialization's magic number as a pickle holds it.
LEGACY_TORCH = b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
# As huggingface_hub and transformers name the files of a model that is written in several.
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.(?:safetensors|bin|pt|pth)$")
KINDS = (
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x1f\x8b", "compressed with gzip: unpack it first"),
    (b"BZh", "compressed with bzip2: unpack it first"),
    (b"\xfd7zXZ\x00", "compressed with xz: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it first"),
    (b"Rar!", "a RAR archive: unpack it first"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as of Keras"),
    (b"GGUF", "a GGUF file, of llama.cpp"),
    (b"\x89PNG", "a picture"),
    (b"\xff\xd8\xff", "a picture"),
    (b"%PDF", "a PDF"),
)


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors does: the length of its header, and that in JSON."""
    with path.open("rb") as file:
        head = file.read(9)
    length = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and 2 <= length <= MAX_HEADER_BYTES


def kind_of_file(path: Path) -> str:
    """What a file is that holds no weights, "an HTML page", in words that follow "is"; "" if it may
    hold them."""
    if is_safetensors(path):
        return ""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(LFS):
        return _pointer(head)
    if not head.strip(b"\0"):
        return "a file of zeros, as of a download that did not end"
    if head.startswith(b"PK") and zipfile.is_zipfile(path):
        return _zip(path)
    for start, kind in KINDS:
        if head.startswith(start):
            return kind
    if head[257:262] == b"ustar":
        return "a tar archive: unpack it first"
    if head[:1] == b"\x80" and LEGACY_TORCH not in head[:32]:
        return "a plain pickle, not a file of torch.save, and is not opened"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] in (b"{", b"["):
        return _json(path)
    if text[:1] == b"<":
        page = (
            "an HTML page"
            if b"<html" in text.lower() or b"<!doctype" in text.lower()
            else "XML"
        )
        return f"{page}, as a server sends in place of a file: download it again"
    return ""


def shard_of(path: Path) -> str:
    """Which of several files with parts of one model this is by its name, in words that follow
    "is"; "" if it is not one."""
    match = SHARD.search(path.name)
    if match is None or int(match[2]) < 2:
        return ""
    return f"file {int(match[1])} of the {int(match[2])} with one model's weights"


def _pointer(head: bytes) -> str:
    size = re.search(rb"^size (\d+)", head, re.MULTILINE)
    told = f" to a file of {int(size[1]):,} bytes" if size else ""
    return f"a pointer of Git LFS{told}, not the file: run git lfs pull"


def _zip(path: Path) -> str:
    """Return the kind of a zip archive in words; "" for those of torch.save and torch.jit.save."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any(name.endswith(("/data.pkl", "/constants.pkl")) for name in names):
        return ""
    if names and all(name.endswith(".npy") for name in names):
        return "a NumPy archive"
    return f"a zip archive of {_some(names)}, none of which torch.save wrote: unpack it first"


def _json(path: Path) -> str:
    if path.stat().st_size > MAX_JSON_BYTES:
        return "JSON"
    try:
        content: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return "text"
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        return "JSON"
    names = sorted({str(name) for name in files.values()})
    return f"the index of a model's weights in {len(names)} files ({_some(names)}), not weights"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return (", ".join(name[:60] for name in names[:SHOWN_NAMES]) or "nothing") + more
