"""From a path or URL to the files of a store."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from vitsee_stores.errors import StoreError
from vitsee_stores.files import Files
from vitsee_stores.folder import Folder
from vitsee_stores.metadata import ZARR_JSON
from vitsee_stores.url import Url, parse_place


def files_at(place: str | os.PathLike[str] | Url, *, durable: bool = True) -> Files:
    """The files at a path or URL, whether or not a store exists there. durable: False skips every
    fsync, in a folder.

    Raises:
        StoreError: a URL that names no store, or that nothing installed can open.
    """
    parsed = parse_place(place)
    if isinstance(parsed, Url):
        if importlib.util.find_spec("obstore") is None:
            raise StoreError(f"{parsed} needs obstore; run: pip install 'vitsee[remote]'")
        from vitsee_stores.objects import Objects

        return Objects(parsed)
    return Folder(parsed, durable=durable)


def store_around(path: Path) -> Path | None:
    """The store (a folder with a zarr.json) that contains a path; None if there is none."""
    folders = reversed(path.resolve().parents)  # the root's zarr.json, not a nested group's
    return next((folder for folder in folders if (folder / ZARR_JSON).is_file()), None)
