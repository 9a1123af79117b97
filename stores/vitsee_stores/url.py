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
    """A folder of an object store, as in `s3://BUCKET/runs/b16.zarr`.

    It has a path's `name`, `stem` and `absolute()`, so that callers treat both alike.

    Attributes:
        scheme: one of SCHEMES.
        bucket: name of the bucket.
        key: everything after the bucket, without slashes at its ends.
    """

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    @property
    def name(self) -> str:
        """The last component, like a path's name."""
        return PurePosixPath(self.key).name

    @property
    def stem(self) -> str:
        """The last component without its suffix, like a path's stem."""
        return PurePosixPath(self.key).stem

    def absolute(self) -> Url:
        """Return the URL itself; no URL is relative."""
        return self


# Where a store lies: a folder of this machine, or of an object store.
Place = Path | Url


def is_url(text: str) -> bool:
    """Return whether the text has the form of a URL, with a supported scheme or not."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def parse_place(location: str | os.PathLike[str] | Url) -> Place:
    """Return the Path or Url that a user's path or URL names.

    Raises:
        StoreError: the URL's scheme is not supported, or it names no folder in a bucket.
    """
    if isinstance(location, Url):
        return location
    text = os.fspath(location)
    if isinstance(location, Path):
        # Path("s3://b/k") reads "s3:/b/k": pathlib merges slashes. The lost one is put back.
        text = re.sub(rf"^({'|'.join(SCHEMES)}):/(?!/)", r"\1://", text)
    if not is_url(text):
        return Path(location)
    scheme, _, bucket_and_key = text.partition("://")
    if scheme not in SCHEMES:
        expected = ", ".join(f"{supported}://" for supported in SCHEMES)
        raise StoreError(f"{text}: stores are in folders or at URLs with {expected}")
    components = [name for name in bucket_and_key.split("/") if name]
    bucket = components[0] if components else ""
    folders = components[1:]
    # Object stores know no "." and ".."; "?" and "#" would begin a query or a fragment.
    has_dots = "." in folders or ".." in folders
    if not folders or has_dots or re.search(r"[?#]", bucket_and_key):
        raise StoreError(
            f"{text} names no store; expected {scheme}://BUCKET/FOLDER/NAME.zarr"
        )
    return Url(scheme, bucket, "/".join(folders))


def require_folder(location: Place) -> Path:
    """Return the path of a store in a folder.

    Raises:
        StoreError: the store is at a URL.
    """
    if isinstance(location, Url):
        raise StoreError(f"{location} is in no folder of this machine")
    return location
