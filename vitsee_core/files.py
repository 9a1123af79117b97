"""Files that exist only when they are whole: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from vitsee_stores.errors import VitseeError, reason


def check_new_files(paths: Iterable[Path], *, force: bool = False) -> None:
    """Refuse, before any work, files that could not or should not be written.

    Args:
        paths: the files to come.
        force: existing files may be replaced.

    Raises:
        VitseeError: a file exists and `force` is off, is a folder or no ordinary file (`force` or
            not), lies in a folder that is missing or read-only, or is named twice.
    """
    seen: set[Path] = set()
    for path in paths:
        folder = path.absolute().parent
        if path.resolve() in seen:
            raise VitseeError(f"{path} is named for two outputs; give each its own name")
        seen.add(path.resolve())
        if path.exists() and not path.is_file():
            raise VitseeError(f"cannot write {path}: it exists and is no ordinary file")
        if path.exists() and not force:
            raise VitseeError(f"{path} exists; give another name, or --force to replace it")
        if not folder.is_dir():
            raise VitseeError(f"cannot write {path}: there is no folder {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise VitseeError(f"cannot write {path}: the folder {folder} is not writable")


def write_files(contents: Mapping[Path, bytes], *, force: bool = False) -> None:
    """Write all the files or none: each under a temporary name beside its place, then renamed.

    A link is followed, so that the file it names is replaced and not the link. The files appear in
    the order given; a file that belongs to another comes before it.

    Raises:
        VitseeError: as `check_new_files`; or the disk refused them, and nothing is left behind.
    """
    with new_files(list(contents), force=force) as partial:
        for temporary, data in zip(partial, contents.values(), strict=True):
            with open(temporary, "xb") as file:
                file.write(data)


@contextmanager
def new_files(paths: Sequence[Path], *, force: bool = False) -> Iterator[list[Path]]:
    """Names to write files under, one for each of `paths`, which have them at the end; see
    `write_files`.

    Raises:
        VitseeError: as `write_files`.
    """
    check_new_files(paths, force=force)
    places = [path.resolve() for path in paths]
    try:
        with renamed(partial := {_hidden_name(place): place for place in places}):
            yield list(partial)
    except OSError as error:
        raise VitseeError(f"cannot write {', '.join(map(str, paths))}: {reason(error)}") from error


@contextmanager
def renamed(places: Mapping[Path, Path]) -> Iterator[None]:
    """While the caller writes files under temporary names. At the end they are renamed, in order;
    none is left under its temporary name, whatever happens.

    Args:
        places: temporary name -> place, on one file system. Emptied meanwhile: nothing is renamed.

    Raises:
        OSError: a file cannot be renamed, or was not written; those before it were renamed.
    """
    partial = tuple(places)
    try:
        yield
        for temporary, place in places.items():
            os.replace(temporary, place)
    finally:
        for temporary in partial:
            temporary.unlink(missing_ok=True)


def _hidden_name(place: Path) -> Path:
    """A new name beside a file, without the file's own, which may be as long as names can be."""
    return place.with_name(f".vitsee-{os.getpid()}-{secrets.token_hex(4)}.partial")
