"""Which analyses there are: vitsee's own, and guests, which other installed packages add.

A package adds one by an entry point, `[project.entry-points."vitsee.analyses"]`,
`token_norm = "mypackage.token_norm"`: the name of the command, and a module that declares an
`ANALYSIS` as our own do (docs/guide/guests.md). Names come from the packages' metadata; a module is
imported when its analysis is used. A guest whose name cannot be a command's is refused, and one
that cannot be imported is left out where it is one among others: each with a warning.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import keyword
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsee_core.runtime.parameters import DeclarationError
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from importlib.metadata import EntryPoint

GROUP = "vitsee.analyses"  # of the entry points
OWN = "vitsee_core.analyses"
OURS = ("vitsee", "vitsee_cli", "vitsee_core", "vitsee_stores")
# Commands that are no analyses, and what else `import vitsee` gives: no guest can have these names.
RESERVED = frozenset(
    (
        *(
            "cache",
            "demo",
            "encode",
            "explore",
            "export",
            "extract",
            "findings",
            "help",
            "import",
        ),
        *("info", "models", "plot", "report", "rerun", "sites", "study", "validate"),
        *("api", "open_store"),
    )
)
PAGE = "see docs/guide/guests.md"  # of error messages
MOST_SOURCE = 1 << 20  # characters of a module that is read for its line in the help

log = logging.getLogger(__name__)


class GuestError(VitseeError):
    """A guest that cannot be used: it is not installed, cannot be imported, or is no analysis."""


@dataclass(frozen=True)
class Guest:
    """An analysis of another package. name: with `_`; module: that defines it; package, version,
    summary: of the distribution."""

    name: str
    module: str
    package: str
    version: str
    summary: str

    @property
    def command(self) -> str:
        return self.name.replace("_", "-")

    @property
    def by(self) -> str:
        """`mypackage 0.3`."""
        return f"{self.package} {self.version}"

    def about(self) -> dict[str, Any]:
        """The entry of sidecars."""
        return {"package": {"name": self.package, "version": self.version}}

    def source(self) -> str:
        """The text of the module, which is not imported; "" if it is not found, or too long."""
        try:
            spec = _spec(self.module)
            loader: Any = spec.loader if spec is not None else None
            text = loader.get_source(self.module)
        except Exception:  # of another package's files and import hooks
            return ""
        if isinstance(text, str) and len(text) <= MOST_SOURCE:
            return text
        return ""


def own_names() -> list[str]:
    """vitsee's own analyses, `attn_dist`, ..., sorted."""
    found = modules_in(tuple(importlib.import_module(OWN).__path__))
    return sorted(name for name in found if not name.startswith("_"))


@functools.cache
def modules_in(folders: tuple[str, ...]) -> frozenset[str]:
    """The names of the modules of a package in these folders, which are listed once."""
    return frozenset(module.name for module in pkgutil.iter_modules(folders))


def names() -> list[str]:
    """All analyses, sorted: vitsee's own and the guests."""
    return sorted([*own_names(), *guests()])


def guests() -> dict[str, Guest]:
    """Name -> guest, of what is installed on `sys.path`; none of them is imported."""
    return _found(tuple(sys.path))[0]


def refused() -> dict[str, str]:
    """Name as a package has it -> why it is no analysis here, in a line."""
    return _found(tuple(sys.path))[1]


def warn_refused(*only: str) -> None:
    """Log why guests are refused, each once. only: of these names."""
    for name, line in refused().items():
        if not only or name in only:
            _warn_once(line)


def load(name: str) -> Any:
    """The declaration of an analysis, an `Analysis`, whose module is imported.

    Raises:
        GuestError: there is no such analysis, or it is a guest that cannot be used.
    """
    if name in own_names():
        return importlib.import_module(f"{OWN}.{name}").ANALYSIS
    if (guest := guests().get(name)) is None:
        raise GuestError(refused().get(name, f"no analysis {name!r} is installed"))
    whose = f"{guest.command} of the package {guest.by}"
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            module = importlib.import_module(guest.module)
    except DeclarationError as error:
        raise GuestError(f"{whose} is not an analysis: {error}; {PAGE}") from error
    except (Exception, SystemExit) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise GuestError(
            f"{whose} cannot be imported: {why} (python -c 'import {guest.module}' shows where)"
        ) from error
    analysis: Any = vars(module).get("ANALYSIS")
    if not hasattr(analysis, "check_table"):
        raise GuestError(
            f"{whose} is not an analysis: {guest.module} has no ANALYSIS; expected "
            f"ANALYSIS = vitsee.api.Analysis(...); {PAGE}"
        )
    if not analysis.help.strip():
        raise GuestError(
            f"{whose} is not an analysis: {guest.module}: help is empty; expected the text of "
            f"vitsee {guest.command} --help; {PAGE}"
        )
    return analysis


def loaded() -> Iterator[tuple[str, Any]]:
    """(name, declaration) of every analysis; guests that cannot be used are left out with a
    warning."""
    warn_refused()
    for name in names():
        try:
            yield name, load(name)
        except GuestError as error:
            _warn_once(f"left out: {error}")


def guest_of(module: str) -> Guest | None:
    """The guest that a module defines, or is a part of."""
    if module.partition(".")[0] in OURS:
        return None
    owners = (g for g in guests().values() if f"{module}.".startswith(f"{g.module}."))
    return max(owners, key=lambda guest: len(guest.module), default=None)


def declaration_of(module: str) -> Any:
    """The declaration, an `Analysis`, of the analysis whose `run` is in this module, which is
    imported; None if there is none."""
    guest = guest_of(module)
    declaring = sys.modules.get(module if guest is None else guest.module)
    return getattr(declaring, "ANALYSIS", None)


def name_of(module: str) -> str:
    """The name of the analysis whose `run` is in this module."""
    guest = guest_of(module)
    if guest is not None:
        return guest.name
    return module.rpartition(".")[2]


@contextlib.contextmanager
def blamed(module: str) -> Iterator[None]:
    """Context for the code of an analysis: the traceback of a guest's bug names its package."""
    try:
        yield
    except VitseeError:
        raise
    except Exception as error:
        if (guest := guest_of(module)) is not None:
            note = f"{guest.command} is an analysis of the package {guest.by}, not of vitsee itself"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


@functools.cache
def code_digest(module: str) -> str:
    """SHA-256, shortened, of the source files of the package that a module is in, found without
    importing it; "missing" where there is none. Files are read once a process."""
    import hashlib  # OpenSSL is loaded where something is digested, not for --help

    code = hashlib.sha256()
    try:
        for file, name in _files_of(module):
            code.update(f"{name}\0".encode() + file.read_bytes())
    except Exception:  # of another package's files and import hooks
        return "missing"
    return code.hexdigest()[:12]


def _files_of(module: str) -> list[tuple[Path, str]]:
    """The source files beside a module: those of its outermost package that is a folder of its own;
    else the module's own file. With their places in it."""
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:n]))
        if spec is None:
            raise ModuleNotFoundError(module)
        if (
            spec.origin is None or not spec.has_location
        ):  # a namespace, which others share
            continue
        file = Path(spec.origin)
        if spec.submodule_search_locations is None:
            return [(file, file.name)]
        folder = file.parent
        found = sorted(folder.rglob("*.py"))
        return [(file, file.relative_to(folder).as_posix()) for file in found]
    raise ModuleNotFoundError(module)


def _spec(module: str) -> ModuleSpec | None:
    """The place of a module. Unlike `importlib.util.find_spec`, this imports no package on the
    way."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        path = list(spec.submodule_search_locations)
        found = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((one for one in found if one is not None), None)
    return spec


# ------------------------------------------------------------------------------- what is installed


@functools.lru_cache(maxsize=4)
def _found(_path: tuple[str, ...]) -> tuple[dict[str, Guest], dict[str, str]]:
    """The guests on this path, and those that are refused."""
    found: dict[str, Guest] = {}
    no: dict[str, str] = {}
    own = own_names()
    for guest in sorted(
        map(_guest, _entries()), key=lambda g: (g.package.lower(), g.name)
    ):
        plain = re.sub(r"\W+", "_", guest.name.lower()).strip("_")
        if not re.fullmatch("[a-z][a-z0-9_]*", guest.name) or keyword.iskeyword(
            guest.name
        ):
            hint = f", as {plain}" if re.fullmatch("[a-z][a-z0-9_]*", plain) else ""
            why = f"its name is no Python identifier in lower-case letters, digits and _{hint}"
        elif guest.name in own or guest.name in RESERVED:
            why = "vitsee has that name itself"
        elif not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", guest.module):
            why = f"{guest.module!r} is no module; expected {guest.name} = 'mypackage.{guest.name}'"
        elif guest.name in found:
            why = f"{found[guest.name].by} has that name, too, and comes first"
        else:
            found[guest.name] = guest
            continue
        line = f"the analysis {guest.name} of the package {guest.by} is left out: {why}"
        no[guest.name] = "; ".join(filter(None, [no.get(guest.name), line]))
    return dict(sorted(found.items())), no


def _entries() -> list[EntryPoint]:
    """The entry points of the group. Damaged metadata of a package is as if it were not there."""
    if not any(map(_names_the_group, sys.path)):
        return []
    from importlib import (
        metadata,  # this and its search take 50 ms, which every command would wait
    )

    try:
        return list(metadata.entry_points(group=GROUP))
    except Exception:
        found = []
        for package in metadata.distributions():
            with contextlib.suppress(Exception):
                found += [entry for entry in package.entry_points if entry.group == GROUP]
        return found


def _names_the_group(folder: str) -> bool:
    """Whether the entry points of a package that is installed in this folder of `sys.path` name the
    group; True of an archive, and of eggs, which `importlib.metadata` looks into."""
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return os.path.isfile(folder)
    for name in names:
        if name.endswith(".egg"):
            return True
        if name.endswith((".dist-info", ".egg-info")):
            with contextlib.suppress(OSError):
                if GROUP.encode() in Path(folder, name, "entry_points.txt").read_bytes():
                    return True
    return False


def _guest(entry: EntryPoint) -> Guest:
    package = "unknown"
    version = ""
    summary = ""
    with contextlib.suppress(Exception):  # METADATA may lack, or be anything
        assert entry.dist is not None
        package = str(entry.dist.name)
        version = str(entry.dist.version)
        summary = str(entry.dist.metadata["Summary"] or "")
    return Guest(entry.name, entry.value.strip(), package, version, summary)


_warned: set[str] = set()


def _warn_once(line: str) -> None:
    if line not in _warned:
        _warned.add(line)
        log.warning("%s", line)
