"""Images at URLs: ranged reads through the same files as stores, which retry.

s3://, gs:// and az:// are listed by the bucket, hf://datasets/OWNER/NAME by the hub; https://
has no list, and names files one by one. Nothing is downloaded whole but the images themselves.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitsee_core.images.errors import DataError
from vitsee_core.images.sources.base import MatchedFiles, no_answer
from vitsee_stores.errors import reason
from vitsee_stores.files import NoAnswer
from vitsee_stores.url import SCHEMES as BUCKETS
from vitsee_stores.url import Url

if TYPE_CHECKING:
    from vitsee_stores.objects import Objects

SCHEMES = (*BUCKETS, "https", "http", "hf")
GLOBS = frozenset("*?[")
_HUB = "hf://datasets/OWNER/NAME/FILES"


def find_remote(urls: Sequence[str]) -> MatchedFiles:
    """Return the files at these URLs, among them all files of folders and those that globs match.

    Args:
        urls: URLs of files, folders or globs in the same bucket, server or data set.

    Raises:
        DataError: another kind of URL, nothing found, or a server that does not answer.
    """
    parsed = [_parse_url(url) for url in urls]
    keys = [url.key.split("/") for url in parsed]
    common = os.path.commonpath(["/".join(_folders_without_glob(key)) for key in keys])
    n_common = sum(1 for folder in common.split("/") if folder)
    if len({(url.scheme, url.bucket) for url in parsed}) > 1:
        raise DataError(
            f"{urls[0]} and {urls[-1]} are not in one place; expected one bucket"
        )
    root = Url(parsed[0].scheme, parsed[0].bucket, common)
    files = open_files(root)
    names = list[str]()
    listed: list[str] | None = None  # a server is asked for its list at most once
    try:
        for url, key in zip(urls, keys, strict=True):
            pattern = "/".join(key[n_common:])
            if not GLOBS & set(pattern) and os.path.splitext(pattern)[1]:
                names.append(pattern)
                continue
            if listed is None:
                listed = sorted(files.listed())
            matches = _matching_names(listed, pattern)
            if not matches:
                raise DataError(f"{url} matches nothing; expected files there")
            names += matches
    except NoAnswer as error:
        raise no_answer(root, error) from None
    except OSError as error:
        raise DataError(f"{root} cannot be listed: {reason(error)}") from None
    return MatchedFiles(files, names, str(root).rstrip("/"), explicit=pattern != "")


def open_files(root: Url) -> Objects:
    """Return the files below a URL. Raises DataError: obstore is not installed."""
    if importlib.util.find_spec("obstore") is None:
        raise DataError(f"{root} needs obstore; run: pip install 'vitsee[remote]'")
    from vitsee_core.images.sources.remote_files import Hub, Web
    from vitsee_stores.objects import Objects

    kinds: dict[str, type[Objects]] = {"https": Web, "http": Web, "hf": Hub}
    return kinds.get(root.scheme, Objects)(root)


def _parse_url(text: str) -> Url:
    """Return a URL's scheme, bucket (server, data set) and key.

    Raises:
        DataError: another kind of URL, or one without a bucket or with a query.
    """
    scheme, _, rest = text.partition("://")
    if scheme not in SCHEMES:
        expected = ", ".join(f"{name}://" for name in SCHEMES)
        raise DataError(f"{text}: images are read at URLs with {expected}")
    names = [name for name in rest.split("/") if name]
    bucket = names[0] if names else ""
    key = names[1:]
    if scheme == "hf":
        if bucket != "datasets" or len(key) < 2:
            raise DataError(f"{text} names no data set; expected {_HUB}")
        owner, dataset, *path = key
        return Url(scheme, f"{bucket}/{owner}/{dataset}", "/".join(path))
    if not bucket or {".", ".."} & {*key}:
        raise DataError(f"{text} names no files; expected {scheme}://PLACE/FOLDER/FILES")
    if "#" in rest or ("?" in rest and scheme in ("https", "http")):
        raise DataError(f"{text}: URLs with a query (?) or a part (#) are not supported")
    return Url(scheme, bucket, "/".join(key))


def _folders_without_glob(key: Sequence[str]) -> list[str]:
    """Return the folders of a key before the first one with a pattern, without a file's name."""
    is_file = os.path.splitext(key[-1])[1] != ""
    names = key[:-1] if is_file else key
    folders: list[str] = []
    for name in names:
        if GLOBS & set(name):
            break
        folders.append(name)
    return [name for name in folders if name]


def _matching_names(names: Sequence[str], pattern: str) -> list[str]:
    """Return the names that a pattern matches: `*` in a folder, `**` in folders, "" for all."""
    if not pattern:
        return list(names)
    # fnmatch's `*` matches slashes too, so the number of folders is compared.
    depth = pattern.count("/")
    return [
        name
        for name in names
        if fnmatch.fnmatchcase(name, pattern)
        and ("**" in pattern or name.count("/") == depth)
    ]
