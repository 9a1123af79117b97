"""A user's own file, `path/model.py:build`, where build() gives a torch module, or a repository
with a hubconf.py: `torchhub:OWNER/REPO:ENTRY`, of a branch or tag `torchhub:OWNER/REPO:REF:ENTRY`,
of a local clone `torchhub:/path:ENTRY`.

Their code runs because the user typed its name. What is called may give the module alone, (module,
transform), or (module, transform, class names); the transform as `transform_config` takes it.
Of several networks, or of a larger one, `#` chooses: `model.py:build#0`, `...:ENTRY#encoder`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import Choices, Source, drawn, one_line
from vitsee_core.models.sources.several_modules import choose, sort_out
from vitsee_core.models.sources.transforms import ASSUMED, changed, pair, stated
from vitsee_core.models.weights.watching import watched_loads

SIZES = (
    "img_size",
    "image_size",
    "input_size",
)  # names of a size among a builder's parameters
WEIGHTS = "pretrained"  # the name of a switch for a model's own weights among them
PREFIX = "torchhub:"
CONF = "hubconf.py"


class FileSource(Source):
    """A callable of a Python file that makes a model."""

    arguments_in_name = True
    kind = "file"
    any_module = True

    def __init__(self, name: str, choices: Choices | None = None) -> None:
        super().__init__(name, choices)
        self.made: tuple[Any, list[str] | None] | None = None  # transform, class names
        self.assumes = False
        self.which: str | None = None  # which of several networks it is

    @property
    def part(self) -> str:
        """The index, name or path behind `#`; "" without one."""
        return self.name.rpartition(":")[2].partition("#")[2]

    @property
    def place(self) -> tuple[Path, str]:
        """The file, and the name of the callable in it."""
        path, _, entry = (
            self.name.rpartition(":") if ".py:" in self.name else (self.name, "", "")
        )
        return Path(path).expanduser(), entry.partition("#")[0]

    def _with_part(self, name: str) -> str:
        return f"{name}#{self.part}" if self.part else name

    def check(self) -> None:
        """Check the name like `Source.check`; the file is not run."""
        path, entry = self.place
        if not entry.isidentifier():
            raise ModelError(
                f"{self.name!r} names no function; expected FILE.py:NAME, where NAME() gives a "
                "torch module, as in model.py:build"
            )
        if not path.is_file():
            raise ModelError(f"no file {path} (of {self.name}); expected FILE.py:NAME")

    def placed(self, folder: Path) -> str:
        path, entry = self.place
        return self._with_part(f"{folder / path}:{entry}")

    @property
    def label(self) -> str:
        return self.place[0].stem

    def make(
        self,
        *,
        pretrained: bool,
        seed: int,
        wanted: dict[str, Any],
        foreign: bool = False,
    ) -> nn.Module:
        self.check()

        def made() -> Any:
            with importing_from(self.place[0].resolve().parent):
                found = sort_out(build(**given))
            if not found.networks or len(found.others) > 2:
                n_things = len(found.networks) + len(found.others)
                raise ModelError(
                    f"{self.name} gives {n_things} things; expected a module, or (module, "
                    "transform), or (module, transform, class names)"
                )
            transform, names = [*found.others, None, None][:2]
            self.made = transform, names
            chosen = choose(found, self.part, self.name)
            self.which = chosen.remark
            return chosen.network

        with watched_loads(self.name) as loads:
            # The file may make and load its model when it is run, outside of the function.
            build = self._entry()
            given = self._arguments(build, wanted, pretrained)
            module = drawn(seed, made, self.name)
        if pretrained and not _is_meta(module):
            loads.require_all(module, self.name)
        if _is_meta(module) and torch.get_default_device().type != "meta":
            raise ModelError(
                f"{self.name} gives parameters on the meta device, which have no values; expected "
                "a module on the CPU"
            )
        return module

    def without_weights(self, wanted: dict[str, Any]) -> nn.Module:
        """The model of `Source.without_weights`; one that its code cannot make on the meta device
        has random weights."""
        try:
            return super().without_weights(wanted)
        except ModelError:
            return self.make(pretrained=True, seed=0, wanted=wanted)

    def transform(
        self,
        module: nn.Module,
        img_size: tuple[int, int] | None,
        given: Mapping[str, Any],
    ) -> dict[str, Any]:
        own, _ = self.made or (None, None)
        stated_all = img_size is not None and None not in (given["mean"], given["std"])
        has = own is not None or bool(getattr(module, "pretrained_cfg", None))
        self.assumes = not has and not stated_all
        return changed(stated(own, module, self.name), img_size, given, self.name)

    def architecture(self, module: nn.Module) -> str:
        path, entry = self.place
        return f"{self._with_part(f'{path.name}:{entry}')} ({type(module).__qualname__})"

    def class_names(self, module: nn.Module) -> list[str] | None:
        names = self.made[1] if self.made else None
        if names is None:
            return None
        if isinstance(names, str) or not all(isinstance(label, str) for label in names):
            raise ModelError(
                f"{self.name} gives class names {str(names)[:40]!r}; expected a list"
            )
        return list(names)

    def pretrained_record(
        self, module: nn.Module, wanted: dict[str, Any]
    ) -> dict[str, Any]:
        return {"source": self.kind, "pretrained": self.name}

    def origin(self) -> dict[str, Any]:
        path, _ = self.place
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        notes = [note for note in (self.which, ASSUMED if self.assumes else None) if note]
        return {
            "kind": self.kind,
            "sha256": digest,
            **({"notes": notes} if notes else {}),
        }

    def _entry(self) -> Callable[..., Any]:
        path, entry = self.place
        module = run_file(path, self.name)
        found = getattr(module, entry, None)
        if not callable(found):
            own = [
                key
                for key, value in vars(module).items()
                if inspect.isfunction(value) and value.__module__ == module.__name__
            ]
            known = (
                f"; its functions: {', '.join(own)}"
                if own
                else ", and no function at all"
            )
            raise ModelError(f"{path} has no function {entry!r}{known}")
        return found  # type: ignore[no-any-return]

    def _arguments(
        self, build: Callable[..., Any], wanted: Mapping[str, Any], pretrained: bool
    ) -> dict[str, Any]:
        """The keywords of the callable: an image size under the name it has there, if any."""
        given = dict(wanted)
        size = given.pop("img_size", None)
        try:
            names = inspect.signature(build).parameters
        except (TypeError, ValueError):
            return given
        own = next((name for name in SIZES if name in names), None)
        if size is not None and own is not None and own not in given:
            rows, cols = pair(size)
            given[own] = rows if rows == cols else (rows, cols)
        if WEIGHTS in names and WEIGHTS not in given and not pretrained:
            given[WEIGHTS] = False
        return given

    def depends_on_seed(
        self, module: nn.Module, seed: int, wanted: dict[str, Any]
    ) -> bool:
        """Code that loads its own weights, or sets the seed itself, has the same ones again."""
        if _is_meta(module) or WEIGHTS in self._arguments(self._entry(), wanted, False):
            return True
        kept = self.made
        other = self.make(pretrained=False, seed=seed + 1, wanted=wanted)
        self.made = kept
        pairs = zip(module.parameters(), other.parameters(), strict=False)
        return any(x.shape != y.shape or not torch.equal(x, y) for x, y in pairs)


def run_file(path: Path, name: str) -> Any:
    """The module of a Python file, run anew, with its folder among those that it imports from; a
    ModelError where it raises."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"vitsee_{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up
    try:
        with importing_from(path.resolve().parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise ModelError(
            f"{name}: {path.name} raises {type(error).__name__}: {one_line(error)}{line}"
        ) from error
    return module


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """A context in which the folder's own modules can be imported."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _is_meta(module: nn.Module) -> bool:
    return any(x.is_meta for x in module.parameters())


class TorchhubSource(FileSource):
    """An entry of a hubconf.py."""

    kind = "torchhub"

    @property
    def parts(self) -> tuple[str, str]:
        """The repository, as OWNER/REPO, OWNER/REPO:REF or a folder, and the entry."""
        repository, _, entry = self.name.removeprefix(PREFIX).rpartition(":")
        return repository, entry.partition("#")[0]

    @property
    def place(self) -> tuple[Path, str]:
        """The hubconf.py on this machine, where it is there, and the entry."""
        repository, entry = self.parts
        folder = Path(repository).expanduser()
        if not folder.is_dir():
            owner, _, ref = repository.partition(":")
            stem = owner.replace("/", "_")
            wanted = [ref.replace("/", "_")] if ref else ["main", "master"]
            hub = Path(torch.hub.get_dir())
            places = [hub / f"{stem}_{branch}" for branch in wanted]
            folder = next((place for place in places if place.is_dir()), places[0])
        return folder / CONF, entry

    def check(self) -> None:
        """Check the name like `Source.check`; nothing is fetched."""
        repository, entry = self.parts
        folder = Path(repository).expanduser()
        remote = repository.partition(":")[0].count(
            "/"
        ) == 1 and not repository.startswith((".", "/"))
        if not entry.isidentifier() or not (remote or folder.is_dir()):
            raise ModelError(
                f"{self.name!r} names no entry of a repository on this machine or on GitHub; "
                "expected torchhub:OWNER/REPO:ENTRY or torchhub:FOLDER:ENTRY"
            )
        if folder.is_dir() and not (folder / CONF).is_file():
            raise ModelError(
                f"{folder} has no {CONF}; expected a clone that torch.hub can load"
            )

    def placed(self, folder: Path) -> str:
        repository, entry = self.parts
        own = folder / Path(repository).expanduser()
        if own.is_dir():
            return self._with_part(f"{PREFIX}{own}:{entry}")
        return self.name

    @property
    def label(self) -> str:
        return self.parts[1]

    def architecture(self, module: Any) -> str:
        repository, entry = self.parts
        return self._with_part(f"{PREFIX}{Path(repository).name}:{entry}")

    def _entry(self) -> Any:
        path, entry = self.place
        if not path.is_file():
            repository, _ = self.parts
            try:
                torch.hub.list(
                    repository, trust_repo=True, skip_validation=True, verbose=False
                )
            except Exception as error:
                raise ModelError(
                    f"{repository} is not in {torch.hub.get_dir()}, and cannot be fetched from "
                    f"GitHub: {one_line(error)}; give a local clone as torchhub:FOLDER:ENTRY"
                ) from error
            path, _ = self.place
        module = run_file(path, self.name)
        lacking = [x for x in getattr(module, "dependencies", ()) if find_spec(x) is None]
        if lacking:
            raise ModelError(
                f"{self.name} needs packages that are not installed: {', '.join(lacking)} "
                f"(pip install {' '.join(lacking)})"
            )
        found = getattr(module, entry, None)
        if not callable(found):
            own = [
                k
                for k, x in vars(module).items()
                if callable(x) and not k.startswith("_")
            ]
            raise ModelError(
                f"{path} has no entry {entry!r}; it has: {', '.join(own) or 'none'}"
            )
        return found
