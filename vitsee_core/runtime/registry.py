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
BUILTIN_PACKAGE = "vitsee_core.analyses"
VITSEE_PACKAGES = ("vitsee", "vitsee_cli", "vitsee_core", "vitsee_stores")
# Commands that are not analyses, and what else `import vitsee` gives: names that no guest can have.
RESERVED = frozenset(
    (
        "api",
        "cache",
        "demo",
        "encode",
        "explore",
        "export",
        "extract",
        "findings",
        "help",
        "import",
        "info",
        "models",
        "open_store",
        "plot",
        "report",
        "rerun",
        "sites",
        "study",
        "validate",
    )
)
PAGE = "see docs/guide/guests.md"  # of error messages
MAX_SOURCE_CHARS = 1 << 20  # characters of a module that is read for its line in the help

log = logging.getLogger(__name__)


class GuestError(VitseeError):
    """A guest that cannot be used: not installed, not to be imported, or not an analysis."""


@dataclass(frozen=True)
class Guest:
    """An analysis of another package.

    Attributes:
        name: its name in Python, with `_`.
        module: the module that declares it.
        package: the distribution's name.
        version: the distribution's version.
        summary: the distribution's description, a line.
    """

    name: str
    module: str
    package: str
    version: str
    summary: str

    @property
    def command(self) -> str:
        """The name of its command, with `-`."""
        return self.name.replace("_", "-")

    @property
    def by(self) -> str:
        """`mypackage 0.3`."""
        return f"{self.package} {self.version}"

    def sidecar_entry(self) -> dict[str, Any]:
        """Return the entry in sidecars of tables, which names the package."""
        return {"package": {"name": self.package, "version": self.version}}

    def source(self) -> str:
        """Return the text of the module without importing it; "" if it is missing or too long."""
        try:
            spec = _find_spec(self.module)
            loader: Any = spec.loader if spec is not None else None
            text = loader.get_source(self.module)
        except Exception:  # of another package's files and import hooks
            return ""
        if isinstance(text, str) and len(text) <= MAX_SOURCE_CHARS:
            return text
        return ""


def builtin_names() -> list[str]:
    """Return the sorted names of vitsee's own analyses: `attn_dist`, ..."""
    modules = modules_in(tuple(importlib.import_module(BUILTIN_PACKAGE).__path__))
    return sorted(name for name in modules if not name.startswith("_"))


@functools.cache
def modules_in(folders: tuple[str, ...]) -> frozenset[str]:
    """Return the names of the modules in these folders, which are listed once per process."""
    return frozenset(module.name for module in pkgutil.iter_modules(folders))


def names() -> list[str]:
    """Return the sorted names of all analyses: vitsee's own and the guests."""
    return sorted([*builtin_names(), *guests()])


def guests() -> dict[str, Guest]:
    """Return name -> guest for all packages installed on `sys.path`; none of them is imported."""
    return _guests_and_refusals(tuple(sys.path))[0]


def refused() -> dict[str, str]:
    """Return the name that a package gives its analysis -> a line that says why it is refused."""
    return _guests_and_refusals(tuple(sys.path))[1]


def warn_refused(*only: str) -> None:
    """Log once for each refused guest why it is refused; only: names to be told about."""
    for name, line in refused().items():
        if not only or name in only:
            _warn_once(line)


def load(name: str) -> Any:
    """Import the module of an analysis and return its declaration, an `Analysis`.

    Raises:
        GuestError: there is no such analysis, or it is a guest that cannot be used.
    """
    if name in builtin_names():
        return importlib.import_module(f"{BUILTIN_PACKAGE}.{name}").ANALYSIS
    guest = guests().get(name)
    if guest is None:
        raise GuestError(refused().get(name, f"no analysis {name!r} is installed"))
    title = f"{guest.command} of the package {guest.by}"
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            module = importlib.import_module(guest.module)
    except DeclarationError as error:
        raise GuestError(f"{title} is not an analysis: {error}; {PAGE}") from error
    except (Exception, SystemExit) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise GuestError(
            f"{title} cannot be imported: {why} (python -c 'import {guest.module}' "
            "shows where)"
        ) from error
    analysis: Any = vars(module).get("ANALYSIS")
    if not hasattr(analysis, "check_table"):
        raise GuestError(
            f"{title} is not an analysis: {guest.module} has no ANALYSIS; expected "
            f"ANALYSIS = vitsee.api.Analysis(...); {PAGE}"
        )
    if not analysis.help.strip():
        raise GuestError(
            f"{title} is not an analysis: {guest.module}: help is empty; expected the "
            f"text of vitsee {guest.command} --help; {PAGE}"
        )
    return analysis


def loaded() -> Iterator[tuple[str, Any]]:
    """Yield (name, declaration) of every analysis.

    Guests that cannot be used are left out with a warning.
    """
    warn_refused()
    for name in names():
        try:
            yield name, load(name)
        except GuestError as error:
            _warn_once(f"left out: {error}")


def guest_of(module: str) -> Guest | None:
    """Return the guest whose module this is, or is a part of; None for vitsee's own modules."""
    if module.partition(".")[0] in VITSEE_PACKAGES:
        return None
    # A package may have several guests: the longest prefix is the closest one.
    owners = (g for g in guests().values() if f"{module}.".startswith(f"{g.module}."))
    return max(owners, key=lambda guest: len(guest.module), default=None)


def declaration_of(module: str) -> Any:
    """Return the declaration, an `Analysis`, of the analysis whose `run` is in this module.

    None if the module declares none, or is not imported yet.
    """
    guest = guest_of(module)
    declaring = sys.modules.get(module if guest is None else guest.module)
    return getattr(declaring, "ANALYSIS", None)


def name_of(module: str) -> str:
    """Return the name of the analysis whose `run` is in this module."""
    guest = guest_of(module)
    if guest is not None:
        return guest.name
    return module.rpartition(".")[2]


@contextlib.contextmanager
def blamed(module: str) -> Iterator[None]:
    """Context for the code of an analysis: the traceback of a guest's bug names its package.

    Otherwise its users would report the bug to vitsee.
    """
    try:
        yield
    except VitseeError:
        raise
    except Exception as error:
        guest = guest_of(module)
        if guest is not None:
            note = f"{guest.command} is an analysis of the package {guest.by}, "
            note += "not of vitsee itself"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


@functools.cache
def code_digest(module: str) -> str:
    """Return a shortened SHA-256 of the source files of a module's package.

    The package is found without importing it; "missing" if it is not installed here. Two machines
    with the same digest run the same code. Files are read once per process.
    """
    import hashlib  # OpenSSL is loaded where something is digested, not for --help

    code = hashlib.sha256()
    try:
        for file, name in _source_files(module):
            code.update(f"{name}\0".encode() + file.read_bytes())
    except Exception:  # of another package's files and import hooks
        return "missing"
    return code.hexdigest()[:12]


def _source_files(module: str) -> list[tuple[Path, str]]:
    """Return (path, path relative to the package) of the source files that belong to a module.

    These are the files of its outermost package that has a folder of its own, or else the
    module's file alone.

    Raises:
        ModuleNotFoundError: the module is not installed.
    """
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:n]))
        if spec is None:
            raise ModuleNotFoundError(module)
        if spec.origin is None or not spec.has_location:
            continue  # a namespace package, which other distributions share
        path = Path(spec.origin)
        if spec.submodule_search_locations is None:
            return [(path, path.name)]
        folder = path.parent
        return [
            (file, file.relative_to(folder).as_posix())
            for file in sorted(folder.rglob("*.py"))
        ]
    raise ModuleNotFoundError(module)


def _find_spec(module: str) -> ModuleSpec | None:
    """Return the import spec of a module; None if it is not installed.

    Unlike `importlib.util.find_spec`, this does not import the packages that it is in.
    """
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        path = list(spec.submodule_search_locations)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path)
            if spec is not None:
                break
        else:
            return None
    return spec


# ------------------------------------------------------------------------------- what is installed


@functools.lru_cache(maxsize=4)
def _guests_and_refusals(
    _path: tuple[str, ...],
) -> tuple[dict[str, Guest], dict[str, str]]:
    """Return name -> guest, and name -> why it is refused, for the packages on this path.

    _path: `sys.path`, the key under which the result is cached.
    """
    accepted: dict[str, Guest] = {}
    refusals: dict[str, str] = {}
    builtins = builtin_names()
    # Sorted, so that of two packages with the same name always the same one wins.
    for guest in sorted(
        map(_guest, _entry_points()), key=lambda g: (g.package.lower(), g.name)
    ):
        is_identifier = re.fullmatch("[a-z][a-z0-9_]*", guest.name) is not None
        if not is_identifier or keyword.iskeyword(guest.name):
            suggestion = re.sub(r"\W+", "_", guest.name.lower()).strip("_")
            why = "its name is no Python identifier in lower-case letters, digits and _"
            if re.fullmatch("[a-z][a-z0-9_]*", suggestion):
                why += f", as {suggestion}"
        elif guest.name in builtins or guest.name in RESERVED:
            why = "vitsee has that name itself"
        elif not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", guest.module):
            why = f"{guest.module!r} is no module; "
            why += f"expected {guest.name} = 'mypackage.{guest.name}'"
        elif guest.name in accepted:
            why = f"{accepted[guest.name].by} has that name, too, and comes first"
        else:
            accepted[guest.name] = guest
            continue
        line = f"the analysis {guest.name} of the package {guest.by} is left out: {why}"
        # Several packages may have the same wrong name.
        if guest.name in refusals:
            line = f"{refusals[guest.name]}; {line}"
        refusals[guest.name] = line
    return dict(sorted(accepted.items())), refusals


def _entry_points() -> list[EntryPoint]:
    """Return the entry points of the group `vitsee.analyses`.

    A package with damaged metadata counts as one without entry points.
    """
    if not any(map(_names_the_group, sys.path)):
        return []
    # Imported here: this and its search take 50 ms, for which every command would wait.
    from importlib import metadata

    try:
        return list(metadata.entry_points(group=GROUP))
    except Exception:
        # One damaged package makes the search of all fail: they are read one by one.
        entries = []
        for package in metadata.distributions():
            with contextlib.suppress(Exception):
                entries += [
                    entry for entry in package.entry_points if entry.group == GROUP
                ]
        return entries


def _names_the_group(folder: str) -> bool:
    """Return whether a package in this folder of `sys.path` has entry points of the group.

    True also for an archive and for eggs, where only `importlib.metadata` can look.
    """
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
    """Return the guest of an entry point, with "unknown" for metadata that is missing."""
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
    """Log a warning that this process has not logged yet."""
    if line not in _warned:
        _warned.add(line)
        log.warning("%s", line)
