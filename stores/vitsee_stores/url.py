"""Locations of stores: a folder or an object store's URL, parsed only here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vitsee_stores.errors import StoreError

SCHEMES = ("s3", "gs", "az")


@dataclass(frozen=True)
class Url:
    """A folder of an object store: `s3://BUCKET/runs/b16.zarr`. key: the part after the bucket,
    without slashes at its ends."""

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    @property
    def name(self) -> str:
        """The last part, like a path's name."""
        return PurePosixPath(self.key).name

    @property
    def stem(self) -> str:
        """The last part without its suffix, like a path's stem."""
        return PurePosixPath(self.key).stem

    def absolute(self) -> Url:
        return self


Place = Path | Url


def is_url(text: str) -> bool:
    """Whether the text has the form of a URL, of a supported kind or not."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def parse_place(place: str | os.PathLike[str] | Url) -> Place:
    """Parse a path or URL. A Path that pathlib made from a URL's text, and so lost one of its
    slashes, is treated as that URL. Raises StoreError: an unsupported URL, or one that names no
    folder in a bucket."""
    if isinstance(place, Url):
        return place
    text = os.fspath(place)
    if isinstance(place, Path):
        text = re.sub(rf"^({'|'.join(SCHEMES)}):/(?!/)", r"\1://", text)
    if not is_url(text):
        return Path(place)
    scheme, _, rest = text.partition("://")
    if scheme not in SCHEMES:
        expected = ", ".join(f"{known}://" for known in SCHEMES)
        raise StoreError(f"{text}: stores are in folders or at URLs with {expected}")
    bucket, *parts = (
        (part for part in rest.split("/") if part) if rest.strip("/") else ("",)
    )
    if not bucket or not parts or {".", ".."} & {*parts} or re.search(r"[?#]", rest):
        raise StoreError(
            f"{text} names no store; expected {scheme}://BUCKET/FOLDER/NAME.zarr"
        )
    return Url(scheme, bucket, "/".join(parts))


def folder_of(place: Place) -> Path:
    """The path of a place that is a folder. Raises StoreError: it is a URL."""
    if isinstance(place, Url):
        raise StoreError(f"{place} is in no folder of this machine")
    return place
