"""Files that exist only when they are whole: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
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
    check_new_files(contents, force=force)
    partial: dict[Path, Path] = {}
    try:
        for path, data in contents.items():
            place = path.resolve()
            # Without the file's own name, which may be as long as names can be.
            name = f".vitsee-{os.getpid()}-{secrets.token_hex(4)}.partial"
            partial[path] = place.with_name(name)
            with open(partial[path], "xb") as file:
                file.write(data)
        for path, temporary in partial.items():
            os.replace(temporary, path.resolve())
    except OSError as error:
        raise VitseeError(
            f"cannot write {', '.join(map(str, contents))}: {reason(error)}"
        ) from error
    finally:
        for temporary in partial.values():
            temporary.unlink(missing_ok=True)
