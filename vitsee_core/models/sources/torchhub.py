"""Models of a repository with a hubconf.py: `torchhub:OWNER/REPO:ENTRY`, of a branch or tag
`torchhub:OWNER/REPO:REF:ENTRY`, of a local clone `torchhub:/path:ENTRY`.

The repository's code runs because the user typed its name.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.errors import one_line
from vitsee_core.models.sources.python_file import FileSource, run_file

PREFIX = "torchhub:"
CONF = "hubconf.py"


class TorchhubSource(FileSource):
    """An entry of a hubconf.py."""

    kind = "torchhub"

    @property
    def parts(self) -> tuple[str, str]:
        """The repository, as OWNER/REPO, OWNER/REPO:REF or a folder, and the entry."""
        repository, _, entry = self.name.removeprefix(PREFIX).rpartition(":")
        return repository, entry

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
        remote = repository.partition(":")[0].count("/") == 1 and not repository.startswith(
            (".", "/")
        )
        if not entry.isidentifier() or not (remote or folder.is_dir()):
            raise ModelError(
                f"{self.name!r} names no entry of a repository on this machine or on GitHub; "
                "expected torchhub:OWNER/REPO:ENTRY or torchhub:FOLDER:ENTRY"
            )
        if folder.is_dir() and not (folder / CONF).is_file():
            raise ModelError(f"{folder} has no {CONF}; expected a clone that torch.hub can load")

    def placed(self, folder: Path) -> str:
        repository, entry = self.parts
        own = folder / Path(repository).expanduser()
        return f"{PREFIX}{own}:{entry}" if own.is_dir() else self.name

    @property
    def label(self) -> str:
        return self.parts[1]

    def architecture(self, module: Any) -> str:
        repository, entry = self.parts
        return f"{PREFIX}{Path(repository).name}:{entry}"

    def _entry(self) -> Any:
        path, entry = self.place
        if not path.is_file():
            self._fetch()
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
            own = [k for k, x in vars(module).items() if callable(x) and not k.startswith("_")]
            raise ModelError(f"{path} has no entry {entry!r}; it has: {', '.join(own) or 'none'}")
        return found

    def _fetch(self) -> None:
        """The repository into torch.hub's folder."""
        repository, _ = self.parts
        try:
            torch.hub.list(repository, trust_repo=True, skip_validation=True, verbose=False)
        except Exception as error:
            raise ModelError(
                f"{repository} is not in {torch.hub.get_dir()}, and cannot be fetched from GitHub: "
                f"{one_line(error)}; give a local clone as torchhub:FOLDER:ENTRY"
            ) from error


SOURCE = TorchhubSource
