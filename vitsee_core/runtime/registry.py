"""Which analyses there are: vitsee's own, and guests, which other installed packages add.

A package adds one by an entry point, `[project.entry-points."vitsee.analyses"]`,
`token_norm = "mypackage.token_norm"`: the name of the command, and a module of the shape of our
own analyses (docs/guide/guests.md). Names come from the packages' metadata; a module is imported
when its analysis is used. A guest whose name cannot be a command's is refused, and one that cannot
be imported is left out where it is one among others: each with a warning.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from importlib.metadata import EntryPoint
    from types import ModuleType

GROUP = "vitsee.analyses"  # of the entry points
OWN = "vitsee_core.analyses"
OURS = ("vitsee", "vitsee_cli", "vitsee_core", "vitsee_stores")
# Commands that are no analyses, and what else `import vitsee` gives: no guest can have these names.
RESERVED = frozenset(
    (
        *("cache", "demo", "encode", "explore", "export", "extract", "findings", "help", "import"),
        *("info", "models", "plot", "report", "rerun", "sites", "study", "validate"),
        *("api", "open_store"),
    )
)
NEEDS = ("sites", "grid", "attention", "heads", "residual", "images")
TEXTS = ("HELP", "READING", "SOURCE")
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
        return text if isinstance(text, str) and len(text) <= MOST_SOURCE else ""


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


def load(name: str) -> ModuleType:
    """The module of an analysis, imported.

    Raises:
        GuestError: there is no such analysis, or it is a guest that cannot be used.
    """
    if name in own_names():
        return importlib.import_module(f"{OWN}.{name}")
    if (guest := guests().get(name)) is None:
        raise GuestError(refused().get(name, f"no analysis {name!r} is installed"))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            module = importlib.import_module(guest.module)
    except (Exception, SystemExit) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise GuestError(
            f"{guest.command} of the package {guest.by} cannot be imported: {why} "
            f"(python -c 'import {guest.module}' shows where)"
        ) from error
    if lacks := _lacks(module):
        raise GuestError(
            f"{guest.command} of the package {guest.by} is no analysis: {guest.module} {lacks}; "
            "see docs/guide/guests.md"
        )
    return module


def over_training() -> Callable[..., Any]:
    """The function that draws a table over a training, whichever analysis made it."""
    module = importlib.import_module("vitsee_core.figures.training_charts")
    found: Callable[..., Any] = module.draw_over_training
    return found


def loaded() -> Iterator[tuple[str, ModuleType]]:
    """(name, module) of every analysis; guests that cannot be used are left out with a warning."""
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


def name_of(module: str) -> str:
    """The name of the analysis whose `run` is in this module."""
    guest = guest_of(module)
    return guest.name if guest is not None else module.rpartition(".")[2]


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


def check_table(guest: Guest, table: Any) -> None:
    """Check what a guest's `run` returned; columns that its COLUMNS do not name are a warning.
    Raises GuestError: it is no table."""
    if not hasattr(table, "written"):
        raise GuestError(
            f"{guest.command} of the package {guest.by} returned a {type(table).__name__}; "
            "expected a vitsee.api.Table"
        )
    module = vars(sys.modules[guest.module])
    named = {column for name in module if name.endswith("COLUMNS") for column in module[name]}
    if unnamed := [name for name in table.written.columns if name not in named]:
        log.warning("%s: its COLUMNS do not name %s", guest.command, ", ".join(unnamed))


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
        if spec.origin is None or not spec.has_location:  # a namespace, which others share
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
        name, path = f"{name}.{part}", list(spec.submodule_search_locations)
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
    for guest in sorted(map(_guest, _entries()), key=lambda g: (g.package.lower(), g.name)):
        plain = re.sub(r"\W+", "_", guest.name.lower()).strip("_")
        if not re.fullmatch("[a-z][a-z0-9_]*", guest.name) or keyword.iskeyword(guest.name):
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
    from importlib import metadata  # this and its search take 50 ms, which every command would wait

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
    package, version, summary = "unknown", "", ""
    with contextlib.suppress(Exception):  # METADATA may lack, or be anything
        assert entry.dist is not None
        package, version = str(entry.dist.name), str(entry.dist.version)
        summary = str(entry.dist.metadata["Summary"] or "")
    return Guest(entry.name, entry.value.strip(), package, version, summary)


# ------------------------------------------------------------------------------- the shape


def _lacks(module: ModuleType) -> str:
    """The first thing that an imported module lacks to be an analysis, "" if nothing."""
    from vitsee_core.runtime.options import QUESTIONS, declared, options_of

    given = vars(module)
    for name in ("run", "plot"):
        if not callable(given.get(name)):
            return f"has no function {name}"
    for name in TEXTS:
        if not isinstance(given.get(name), str):
            return f"has no text {name}"
    columns: Any = given.get("COLUMNS")
    if not _words(columns) or not {"metric", "value"} <= {*columns}:
        return "has no COLUMNS; expected a tuple of names with metric and value among them"
    needs: Any = given.get("NEEDS", ())
    if not _words(needs) or not {*needs} <= {*NEEDS}:
        return f"has NEEDS = {needs!r}; expected some of {', '.join(NEEDS)}"
    if given.get("QUESTION", QUESTIONS[0]) not in QUESTIONS:
        return f"has QUESTION = {given['QUESTION']!r}; expected one of vitsee.api"
    if not hasattr(module.run, "__wrapped__"):
        return "has a run without the decorator @analysis"
    try:
        parameters = declared(module.run)
        options_of(module.run), options_of(module.plot)
    except Exception as error:
        return f"has parameters that cannot be read ({type(error).__name__}: {error})"
    if all(own.annotation != "Store" for own in parameters.values()):
        return "has a run without a parameter of the type Store"
    if "execution" not in parameters:
        return "has a run without the parameter execution"
    return ""


def _words(value: Any) -> bool:
    sequence = isinstance(value, Sequence) and not isinstance(value, str)
    return sequence and all(isinstance(word, str) for word in value)


_warned: set[str] = set()


def _warn_once(line: str) -> None:
    if line not in _warned:
        _warned.add(line)
        log.warning("%s", line)
