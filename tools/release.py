"""What a release needs beside its tag.

    python tools/release.py check v0.1.0            # is everything said that a release says?
    python tools/release.py conda SHA256 > recipe.yaml  # conda-forge's recipe, of the sdist on PyPI
    python tools/release.py owner NAME              # put the repository's owner into its address

pyproject.toml is the one place of the version, the authors and the repository's address.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "OWNER"
# What conda-forge calls differently.
CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
RECIPE = """\
schema_version: 1

context:
  version: "{version}"

package:
  name: vitsee
  version: ${{{{ version }}}}

source:
  url: https://pypi.org/packages/source/v/vitsee/vitsee-${{{{ version }}}}.tar.gz
  sha256: {sha256}

build:
  number: 0
  noarch: python
  script: ${{{{ PYTHON }}}} -m pip install . -vv --no-deps --no-build-isolation
  python:
    entry_points:
      - vitsee = {entry}

requirements:
  host:
    - python ${{{{ python_min }}}}.*
    - pip
{host}
  run:
    - python >=${{{{ python_min }}}}
{run}

tests:
  - python:
      imports: [vitsee, vitsee_core, vitsee_stores]
      python_version: ${{{{ python_min }}}}.*
  - script:
      - vitsee --version
      - vitsee extract demo:vit --data demo:test --images 20 -o vit.zarr
      - vitsee attn-dist vit.zarr -o dist.csv

about:
  homepage: {repository}
  summary: "{summary}"
  license: MIT
  license_file: LICENSE

extra:
  recipe-maintainers: [{owner}]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check").add_argument("tag")
    commands.add_parser("conda").add_argument("sha256")
    commands.add_parser("owner").add_argument("name")
    given = parser.parse_args()
    if given.command == "owner":
        set_owner(given.name)
        return
    about = project()
    if given.command == "conda":
        sys.stdout.write(recipe(about, given.sha256))
        return
    if wrong := lacks(about, given.tag):
        sys.exit("\n".join(wrong))


def set_owner(name: str) -> None:
    """Write the owner's name in place of `PLACEHOLDER` in pyproject.toml, the one place of the
    repository's address. Exits with a line if the name cannot be an owner's, or was set before."""
    if not re.fullmatch(r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}", name):
        sys.exit(
            f"{name!r} cannot be an account's name; expected letters, digits and single -"
        )
    path = ROOT / "pyproject.toml"
    text = path.read_text()
    if PLACEHOLDER not in text:
        sys.exit(f"{path} has no {PLACEHOLDER} left: the owner is set")
    path.write_text(text.replace(PLACEHOLDER, name))


def project() -> dict[str, Any]:
    """pyproject.toml's tables `project` and `build-system`."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {**found["project"], "build": found["build-system"]["requires"]}


def lacks(about: dict[str, Any], tag: str) -> list[str]:
    """What keeps this from being released as `tag`, a line each."""
    wrong = []
    if tag != f"v{about['version']}":
        wrong.append(f"the tag is {tag}, pyproject.toml's version {about['version']}")
    changes = (ROOT / "CHANGES.md").read_text()
    if not re.search(
        rf"^## {re.escape(about['version'])} \(\d{{4}}-\d\d-\d\d\)", changes, re.M
    ):
        wrong.append(f"CHANGES.md has no heading '## {about['version']} (YYYY-MM-DD)'")
    if f"version: {about['version']}\n" not in (ROOT / "CITATION.cff").read_text():
        wrong.append(f"CITATION.cff has not the version {about['version']}")
    if PLACEHOLDER in (ROOT / "pyproject.toml").read_text():
        wrong.append(
            f"pyproject.toml says {PLACEHOLDER} in place of the repository's owner"
        )
    return wrong


def recipe(about: dict[str, Any], sha256: str) -> str:
    repository = about["urls"]["Repository"]
    return RECIPE.format(
        version=about["version"],
        sha256=sha256,
        entry=about["scripts"]["vitsee"],
        host=_listed(about["build"]),
        run=_listed(about["dependencies"]),
        repository=repository,
        summary=about["description"],
        owner=repository.split("/")[-2],
    )


def _listed(requirements: list[str]) -> str:
    """`    - pytorch >=2.6`, a line each."""
    pairs = [re.split(r"(?=[<>=~!])", text, maxsplit=1) for text in requirements]
    return "\n".join(
        f"    - {CONDA.get(name, name)} {''.join(limit)}" for name, *limit in pairs
    )


if __name__ == "__main__":
    main()
