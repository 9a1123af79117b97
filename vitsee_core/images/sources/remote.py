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
    """The files at these URLs: globs and folders stand for what they have. All are of one bucket,
    server or data set. Raises DataError: another kind of URL, nothing found, or no answer."""
    places = [_parsed(url) for url in urls]
    parts = [place.key.split("/") for place in places]
    common = os.path.commonpath(["/".join(_without_glob(own)) for own in parts])
    fixed = [part for part in common.split("/") if part]
    if len({(place.scheme, place.bucket) for place in places}) > 1:
        raise DataError(
            f"{urls[0]} and {urls[-1]} are not in one place; expected one bucket"
        )
    root = Url(places[0].scheme, places[0].bucket, common)
    files = open_files(root)
    names = list[str]()
    listed: list[str] | None = None
    try:
        for url, own in zip(urls, parts, strict=True):
            below = own[len(fixed) :]
            pattern = "/".join(below)
            if GLOBS & set(pattern) or not os.path.splitext(pattern)[1]:
                listed = listed if listed is not None else sorted(files.listed())
                names += (found := _matching(listed, pattern))
                if not found:
                    raise DataError(f"{url} matches nothing; expected files there")
            else:
                names.append(pattern)
    except NoAnswer as error:
        raise no_answer(root, error) from None
    except OSError as error:
        raise DataError(f"{root} cannot be listed: {reason(error)}") from None
    return MatchedFiles(files, names, str(root).rstrip("/"), given=pattern != "")


def open_files(root: Url) -> Objects:
    """The files below a URL. Raises DataError: obstore is not installed."""
    if importlib.util.find_spec("obstore") is None:
        raise DataError(f"{root} needs obstore; run: pip install 'vitsee[remote]'")
    from vitsee_core.images.sources.remote_files import Hub, Web
    from vitsee_stores.objects import Objects

    kinds: dict[str, type[Objects]] = {"https": Web, "http": Web, "hf": Hub}
    return kinds.get(root.scheme, Objects)(root)


def _parsed(text: str) -> Url:
    """Raises DataError: another kind of URL, or one without a bucket, or with a query."""
    scheme, _, rest = text.partition("://")
    if scheme not in SCHEMES:
        expected = ", ".join(f"{known}://" for known in SCHEMES)
        raise DataError(f"{text}: images are read at URLs with {expected}")
    bucket, *parts = (
        (part for part in rest.split("/") if part) if rest.strip("/") else ("",)
    )
    if scheme == "hf":
        if bucket != "datasets" or len(parts) < 2:
            raise DataError(f"{text} names no data set; expected {_HUB}")
        return Url(scheme, "/".join((bucket, *parts[:2])), "/".join(parts[2:]))
    if not bucket or {".", ".."} & {*parts}:
        raise DataError(f"{text} names no files; expected {scheme}://PLACE/FOLDER/FILES")
    if "#" in rest or ("?" in rest and scheme in ("https", "http")):
        raise DataError(f"{text}: URLs with a query (?) or a part (#) are not supported")
    return Url(scheme, bucket, "/".join(parts))


def _without_glob(parts: Sequence[str]) -> list[str]:
    """The folders of a key before the first with a pattern; of a file its folder."""
    fixed: list[str] = []
    for part in parts[: len(parts) - bool(os.path.splitext(parts[-1])[1])]:
        if GLOBS & set(part):
            break
        fixed.append(part)
    return [part for part in fixed if part]


def _matching(names: Sequence[str], pattern: str) -> list[str]:
    """Names that a pattern stands for: `*` within a folder, `**` through folders; "" for all."""
    if not pattern:
        return list(names)
    depth = pattern.count("/")
    return [
        name
        for name in names
        if fnmatch.fnmatchcase(name, pattern)
        and ("**" in pattern or name.count("/") == depth)
    ]
