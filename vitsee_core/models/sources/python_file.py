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
from vitsee_core.models.sources.base import Choices, Source, make_seeded, one_line
from vitsee_core.models.sources.several_modules import choose, sort_out
from vitsee_core.models.sources.transforms import ASSUMED, author_transform, changed, pair
from vitsee_core.models.weights.watching import Loads, require_same, watched_loads

# Names that a builder's parameter for the image size may have.
SIZE_PARAMETERS = ("img_size", "image_size", "input_size")
PRETRAINED_PARAMETER = "pretrained"  # switches a model's own weights on or off
PREFIX = "torchhub:"
HUBCONF = "hubconf.py"


class FileSource(Source):
    """A callable of a Python file that makes a model.

    Attributes:
        kind: the source's name in records.
        author_values: the transform and the class names that came with the module, None for either
            that did not; set by `make`.
        assumes_transform: whether neither the author nor the user says how images are prepared;
            set by `transform`.
        network_note: which of several networks the module is, None where it is the only one.
    """

    arguments_in_name = True
    kind = "file"
    any_module = True

    def __init__(self, name: str, choices: Choices | None = None) -> None:
        super().__init__(name, choices)
        self.author_values: tuple[Any, list[str] | None] = (None, None)
        self.assumes_transform = False
        self.network_note: str | None = None

    @property
    def network_name(self) -> str:
        """The index, name or path behind `#`; "" without one."""
        return self.name.rpartition(":")[2].partition("#")[2]

    @property
    def path_and_entry(self) -> tuple[Path, str]:
        """The file, and the name of the callable in it, "" where the name has none."""
        if ".py:" not in self.name:
            return Path(self.name).expanduser(), ""
        path, _, entry = self.name.rpartition(":")
        return Path(path).expanduser(), entry.partition("#")[0]

    def _with_network_name(self, name: str) -> str:
        """Return a name with what stands behind `#` in the source's."""
        return f"{name}#{self.network_name}" if self.network_name else name

    def check(self) -> None:
        """Check the name like `Source.check`; the file is not run."""
        path, entry = self.path_and_entry
        if not entry.isidentifier():
            raise ModelError(
                f"{self.name!r} names no function; expected FILE.py:NAME, where NAME() "
                "gives a torch module, as in model.py:build"
            )
        if not path.is_file():
            raise ModelError(f"no file {path} (of {self.name}); expected FILE.py:NAME")

    def placed(self, folder: Path) -> str:
        """Return the name with the path of the file made absolute."""
        path, entry = self.path_and_entry
        return self._with_network_name(f"{folder / path}:{entry}")

    @property
    def label(self) -> str:
        """The file's name without its ending."""
        path, _ = self.path_and_entry
        return path.stem

    def make(
        self,
        *,
        pretrained: bool,
        seed: int,
        arguments: dict[str, Any],
        foreign: bool = False,
    ) -> nn.Module:
        """Make the module like `Source.make`, and set `author_values` and `network_note`.

        Where the code did not load all of the module by `load_state_dict`, it runs once more under
        another seed: what differs then is random, and is not called the file's weights.
        """
        module, loads = self._make_watched(
            pretrained=pretrained, seed=seed, arguments=arguments
        )
        if not pretrained:
            return module
        names = loads.never_filled(module)
        if names:
            values_and_note = (self.author_values, self.network_note)
            reseeded, _ = self._make_watched(
                pretrained=True, seed=seed + 1, arguments=arguments
            )
            self.author_values, self.network_note = values_and_note
            require_same(module, reseeded, names, self.name)
        return module

    def _make_watched(
        self, *, pretrained: bool, seed: int, arguments: dict[str, Any]
    ) -> tuple[nn.Module, Loads]:
        """Run the user's code; return the module, and what of it was loaded.

        Raises:
            ModelError: the code fails, gives no module, or leaves parameters random that the
                weights it loads lack; the module is on the meta device.
        """
        self.check()

        def make_network() -> Any:
            """Call the user's function, and choose the network that the name means."""
            path, _ = self.path_and_entry
            with importing_from(path.resolve().parent):
                built = sort_out(build(**keywords))
            if not built.networks or len(built.others) > 2:
                n_things = len(built.networks) + len(built.others)
                raise ModelError(
                    f"{self.name} gives {n_things} things; expected a module, or (module, "
                    "transform), or (module, transform, class names)"
                )
            transform, names = [*built.others, None, None][:2]
            self.author_values = transform, names
            chosen = choose(built, self.network_name, self.name)
            self.network_note = chosen.remark
            return chosen.network

        with watched_loads(self.name) as loads:
            # The file may make and load its model when it is run, outside of the function.
            build = self._load_entry()
            keywords = self._builder_keywords(build, arguments, pretrained=pretrained)
            module = make_seeded(seed, make_network, self.name)
        if pretrained and not _is_meta(module):
            loads.require_all(module, self.name)
        if _is_meta(module) and torch.get_default_device().type != "meta":
            raise ModelError(
                f"{self.name} gives parameters on the meta device, which have no values; "
                "expected a module on the CPU"
            )
        return module, loads

    def without_weights(self, arguments: dict[str, Any]) -> nn.Module:
        """Return the module on the meta device, or with its weights on the CPU where the user's
        code cannot make it there."""
        try:
            return super().without_weights(arguments)
        except ModelError:
            # Places of sites do not depend on weights: random ones are not refused.
            module, _ = self._make_watched(pretrained=True, seed=0, arguments=arguments)
            return module

    def transform(
        self,
        module: nn.Module,
        img_size: tuple[int, int] | None,
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the author's transform with the user's settings, and set `assumes_transform`."""
        transform, _ = self.author_values
        has_transform = transform is not None or bool(
            getattr(module, "pretrained_cfg", None)
        )
        user_says_all = (
            img_size is not None
            and settings["mean"] is not None
            and settings["std"] is not None
        )
        self.assumes_transform = not has_transform and not user_says_all
        config = author_transform(transform, module, self.name)
        return changed(config, img_size, settings, self.name)

    def architecture(self, module: nn.Module) -> str:
        """Return file, function and class of the module."""
        path, entry = self.path_and_entry
        name = self._with_network_name(f"{path.name}:{entry}")
        return f"{name} ({type(module).__qualname__})"

    def class_names(self, module: nn.Module) -> list[str] | None:
        """Return the class names that came with the module.

        Raises:
            ModelError: they are not a list of words.
        """
        _, names = self.author_values
        if names is None:
            return None
        if isinstance(names, str) or not all(isinstance(label, str) for label in names):
            raise ModelError(
                f"{self.name} gives class names {str(names)[:40]!r}; expected a list"
            )
        return list(names)

    def pretrained_record(
        self, module: nn.Module, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the source's kind and the name."""
        return {"source": self.kind, "pretrained": self.name}

    def origin(self) -> dict[str, Any]:
        """Return the kind, the file's hash, and notes on network and assumed transform."""
        path, _ = self.path_and_entry
        record: dict[str, Any] = {
            "kind": self.kind,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        notes = []
        if self.network_note:
            notes.append(self.network_note)
        if self.assumes_transform:
            notes.append(ASSUMED)
        if notes:
            record["notes"] = notes
        return record

    def _load_entry(self) -> Callable[..., Any]:
        """Run the file and return the callable that the name means.

        Raises:
            ModelError: the file raises, or has no such function.
        """
        path, entry = self.path_and_entry
        module = run_file(path, self.name)
        build = getattr(module, entry, None)
        if not callable(build):
            functions = []
            for key, value in vars(module).items():
                # Imported functions are not meant.
                if inspect.isfunction(value) and value.__module__ == module.__name__:
                    functions.append(key)
            hint = ", and no function at all"
            if functions:
                hint = f"; its functions: {', '.join(functions)}"
            raise ModelError(f"{path} has no function {entry!r}{hint}")
        return build  # type: ignore[no-any-return]

    def _builder_keywords(
        self, build: Callable[..., Any], arguments: Mapping[str, Any], *, pretrained: bool
    ) -> dict[str, Any]:
        """Return the keywords of the user's function.

        An image size has the name of its parameter there, and is dropped where it has none. The
        switch `pretrained`, where it has one, is off for random weights.
        """
        keywords = dict(arguments)
        size = keywords.pop("img_size", None)
        try:
            parameters = inspect.signature(build).parameters
        except (TypeError, ValueError):  # a callable in C
            return keywords
        size_parameters = [name for name in SIZE_PARAMETERS if name in parameters]
        if size is not None and size_parameters and size_parameters[0] not in keywords:
            rows, cols = pair(size)
            keywords[size_parameters[0]] = rows if rows == cols else (rows, cols)
        has_switch = PRETRAINED_PARAMETER in parameters
        if has_switch and PRETRAINED_PARAMETER not in keywords and not pretrained:
            keywords[PRETRAINED_PARAMETER] = False
        return keywords

    def depends_on_seed(
        self, module: nn.Module, seed: int, arguments: dict[str, Any]
    ) -> bool:
        """Return whether another seed gives other weights; code that loads its own, or sets the
        seed itself, gives the same weights again.

        Without a parameter `pretrained` of the builder, the module is made once more, with
        seed + 1; with one it is trusted.

        Raises:
            ModelError: the user's argument `pretrained` asks for trained weights.
        """
        if arguments.get(PRETRAINED_PARAMETER):
            raise ModelError(
                f"{self.name}: random weights (--random-init) and the argument "
                f"pretrained={arguments[PRETRAINED_PARAMETER]!r} exclude each other; "
                "expected one of them: leave the other out"
            )
        if _is_meta(module):
            return True
        build = self._load_entry()
        keywords = self._builder_keywords(build, arguments, pretrained=False)
        if PRETRAINED_PARAMETER in keywords:
            return True
        author_values = self.author_values
        reseeded = self.make(pretrained=False, seed=seed + 1, arguments=arguments)
        self.author_values = author_values
        pairs = zip(module.parameters(), reseeded.parameters(), strict=False)
        return any(x.shape != y.shape or not torch.equal(x, y) for x, y in pairs)


def run_file(path: Path, name: str) -> Any:
    """Run a Python file anew and return its module; it may import from its own folder.

    Raises:
        ModelError: the file of the model `name` raises.
    """
    # The folder is part of the module's name: two files `model.py` are two modules.
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
    """Return a context in which modules of a folder can be imported."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _is_meta(module: nn.Module) -> bool:
    """Return whether a parameter has no values."""
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
    def path_and_entry(self) -> tuple[Path, str]:
        """The path that hubconf.py has on this machine, fetched or not, and the entry."""
        repository, entry = self.parts
        folder = Path(repository).expanduser()
        if not folder.is_dir():
            # torch.hub's folder of a repository is OWNER_REPO_REF.
            owner_and_name, _, ref = repository.partition(":")
            stem = owner_and_name.replace("/", "_")
            branches = [ref.replace("/", "_")] if ref else ["main", "master"]
            hub = Path(torch.hub.get_dir())
            folders = [hub / f"{stem}_{branch}" for branch in branches]
            folder = next((path for path in folders if path.is_dir()), folders[0])
        return folder / HUBCONF, entry

    def check(self) -> None:
        """Check the name like `Source.check`; nothing is fetched."""
        repository, entry = self.parts
        folder = Path(repository).expanduser()
        n_slashes = repository.partition(":")[0].count("/")
        is_remote = n_slashes == 1 and not repository.startswith((".", "/"))
        if not entry.isidentifier() or not (is_remote or folder.is_dir()):
            raise ModelError(
                f"{self.name!r} names no entry of a repository on this machine or on "
                "GitHub; expected torchhub:OWNER/REPO:ENTRY or torchhub:FOLDER:ENTRY"
            )
        if folder.is_dir() and not (folder / HUBCONF).is_file():
            raise ModelError(
                f"{folder} has no {HUBCONF}; expected a clone that torch.hub can load"
            )

    def placed(self, folder: Path) -> str:
        """Return the name with the path of a local clone made absolute."""
        repository, entry = self.parts
        clone = folder / Path(repository).expanduser()
        if clone.is_dir():
            return self._with_network_name(f"{PREFIX}{clone}:{entry}")
        return self.name

    @property
    def label(self) -> str:
        """The entry."""
        return self.parts[1]

    def architecture(self, module: Any) -> str:
        """Return repository, without its owner, and entry."""
        repository, entry = self.parts
        return self._with_network_name(f"{PREFIX}{Path(repository).name}:{entry}")

    def _load_entry(self) -> Any:
        """Run hubconf.py, fetched if it is not here, and return the entry.

        Raises:
            ModelError: it cannot be fetched, needs packages that are not installed, raises, or has
                no such entry.
        """
        path, entry = self.path_and_entry
        if not path.is_file():
            repository, _ = self.parts
            try:  # lists entries, which fetches the repository
                torch.hub.list(
                    repository, trust_repo=True, skip_validation=True, verbose=False
                )
            except Exception as error:
                raise ModelError(
                    f"{repository} is not in {torch.hub.get_dir()}, and cannot be "
                    f"fetched from GitHub: {one_line(error)}; give a local clone as "
                    f"torchhub:FOLDER:ENTRY"
                ) from error
            path, _ = self.path_and_entry
        module = run_file(path, self.name)
        packages = getattr(module, "dependencies", ())
        lacking = [package for package in packages if find_spec(package) is None]
        if lacking:
            raise ModelError(
                f"{self.name} needs packages that are not installed: {', '.join(lacking)} "
                f"(pip install {' '.join(lacking)})"
            )
        build = getattr(module, entry, None)
        if not callable(build):
            entries = []
            for key, value in vars(module).items():
                if callable(value) and not key.startswith("_"):
                    entries.append(key)
            raise ModelError(
                f"{path} has no entry {entry!r}; it has: {', '.join(entries) or 'none'}"
            )
        return build
