"""What a built distribution holds, and that the metadata says what was tried."""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import release
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"vitsee", "vitsee_cli", "vitsee_core", "vitsee_stores"}
FOLDERS = {
    "vitsee": ROOT / "cli" / "vitsee",
    "vitsee_cli": ROOT / "cli" / "vitsee_cli",
    "vitsee_core": ROOT / "vitsee_core",
    "vitsee_stores": ROOT / "stores" / "vitsee_stores",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    # The build tools of this environment: no download.
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


@pytest.mark.slow
def test_top_level_names(wheel: zipfile.ZipFile) -> None:
    names = {name.split("/")[0] for name in wheel.namelist()}
    assert {n for n in names if not n.endswith(".dist-info")} == PACKAGES


@pytest.mark.slow
def test_every_file_of_the_packages_ships(wheel: zipfile.ZipFile) -> None:
    """Modules and data alike: a pattern in .gitignore can drop either without an error."""
    shipped = set(wheel.namelist())
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert f"{package}/{file.relative_to(folder).as_posix()}" in shipped


@pytest.mark.slow
def test_data_files_ship(wheel: zipfile.ZipFile) -> None:
    shipped = set(wheel.namelist())
    assert "vitsee_stores/FORMAT.md" in shipped
    assert "vitsee_core/demo/fashion_mnist.npz" in shipped
    for model in ("vit", "resnet"):
        for name in ("config.json", "model.safetensors", "training.json"):
            assert f"vitsee_core/demo/{model}/{name}" in shipped
    assert {f"{package}/py.typed" for package in PACKAGES} <= shipped


@pytest.mark.slow
def test_the_wheel_is_small(built: Path) -> None:
    assert next(built.glob("*.whl")).stat().st_size < 15e6


@pytest.mark.slow
def test_metadata(wheel: zipfile.ZipFile) -> None:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Author-email"] is None
    required = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert all(">=" in r for r in required), "every dependency has a lower bound"
    license_text = wheel.read(name.replace("METADATA", "licenses/LICENSE")).decode()
    assert "Copyright (c) 2026 the vitsee authors" in license_text


@pytest.mark.slow
def test_the_page_of_the_package_leads_somewhere(wheel: zipfile.ZipFile) -> None:
    """README's links and pictures, which are relative in the repository."""
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    text = str(email.message_from_bytes(wheel.read(name)).get_payload())
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert (
        len(targets) > 50
        and [t for t in targets if not t.startswith(("https:", "#"))] == []
    )
    assert (
        "https://raw.githubusercontent.com/OWNER/vitsee/main/docs/explore.png" in targets
    )


@pytest.mark.slow
def test_the_wheel_works_alone(built: Path, tmp_path: Path) -> None:
    """Away from the repository, with the dependencies that are here."""
    place, out = tmp_path / "site", tmp_path / "out"
    wheel = next(built.glob("*.whl"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(place),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(place)}
    code = "import vitsee, vitsee_cli, vitsee_core, vitsee_stores as s; print(s.__file__)"
    for words in (["-c", code], ["-m", "vitsee_cli", "demo", "--quick", "-o", str(out)]):
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        assert str(tmp_path) in done.stdout
    assert (out / "report.html").stat().st_size > 1e6


def test_what_a_release_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = release.project()["version"]
    assert release.lacks(release.project(), "v0")[0].startswith("the tag is v0, ")
    for name in ("pyproject.toml", "CHANGES.md", "CITATION.cff"):
        text = (ROOT / name).read_text().replace("OWNER", "someone")
        (tmp_path / name).write_text(
            text.replace(f"{version} (unreleased)", f"{version} (2027-01-31)")
        )
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert release.lacks(release.project(), f"v{version}") == []
    (tmp_path / "CITATION.cff").write_text("version: 7\n")
    assert release.lacks(release.project(), f"v{version}") == [
        f"CITATION.cff has not the version {version}"
    ]


def test_the_owner_is_set_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(release, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="cannot be an account's name"):
        release.set_owner("a/b")
    release.set_owner("some-lab")
    urls = release.project()["urls"]
    assert urls["Repository"] == "https://github.com/some-lab/vitsee"
    assert "OWNER" not in path.read_text()
    with pytest.raises(SystemExit, match="the owner is set"):
        release.set_owner("other")


def test_the_recipe_for_conda() -> None:
    about = release.project()
    found = yaml.safe_load(
        release.recipe(about, "0" * 64).replace("${{", "").replace("}}", "")
    )
    run = found["requirements"]["run"]
    assert len(run) == len(about["dependencies"]) + 1
    assert (
        "pytorch >=2.6" in run
        and "matplotlib-base >=3.10" in run
        and "timm >=1.0.26" in run
    )
    assert found["build"]["python"]["entry_points"] == [
        "vitsee = vitsee_cli.__main__:main"
    ]


@pytest.mark.slow
def test_console_script(wheel: zipfile.ZipFile) -> None:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(name).decode())
    assert dict(entry_points["console_scripts"]) == {"vitsee": "vitsee_cli.__main__:main"}


@pytest.mark.slow
def test_the_sdist_holds_what_its_tests_need(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    expected = {"pyproject.toml", "Makefile", "LICENSE", "README.md", "CHANGES.md"}
    assert expected | {"tests/conftest.py", "tests/test_packaging.py"} <= names


FAKE_PYTHON = """#!/bin/sh
echo "$0 $*" >> "$CALLS"
case "$*" in
  --version) echo "Python 3.12.9" ;;
  "-m venv --clear .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the Makefile, and interpreters that only note how they were called."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name, text in (("shim", "#!/bin/sh\nexit 127\n"), ("good", FAKE_PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Under `make PYTHON=... test` its flags and variables would reach the makes of these tests.
OF_AN_OUTER_MAKE = (
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "MAKEOVERRIDES",
    "PYTHON",
    "PYTHONS",
)


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in OF_AN_OUTER_MAKE}
    return subprocess.run(
        ["make", *arguments], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_takes_an_interpreter_that_runs_and_installs_once(clone: Path) -> None:
    candidates = f"PYTHONS={clone}/missing {clone}/shim {clone}/good"
    done = make("env", candidates)
    assert done.returncode == 0, done.stderr
    calls = (clone / "calls").read_text()
    assert "good -m venv --clear .venv" in calls
    assert ".venv/bin/python -m pip install" in calls
    make("env", candidates)
    assert (clone / "calls").read_text() == calls, "the second run installs nothing"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_says_what_is_missing(clone: Path) -> None:
    done = make("env", f"PYTHONS={clone}/shim")
    assert done.returncode != 0
    assert "vitsee needs Python >= 3.11" in done.stderr
    assert not (clone / ".venv").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_what_make_is_given_stays_in_it(clone: Path) -> None:
    """`make PYTHON=... test` runs tests that run make themselves: with their own interpreters."""
    tools = clone / ".venv" / "bin"
    tools.mkdir(parents=True)
    inner = '#!/bin/sh\nenv | grep -E "^(PYTHONS?|MAKEFLAGS)=" >> "$CALLS"; echo ran >> "$CALLS"\n'
    for name in ("ruff", "mypy", "lint-imports", "pytest"):
        (tools / name).write_text(inner)
        (tools / name).chmod(0o755)
    (clone / ".venv" / "installed").touch()
    done = make("test", f"PYTHON={clone}/good")
    assert done.returncode == 0, done.stderr
    lines = (clone / "calls").read_text().splitlines()
    assert lines.count("ran") == 5
    assert not any("good" in line for line in lines), lines


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_takes_the_interpreter_that_is_named(clone: Path) -> None:
    done = make("env", f"PYTHON={clone}/good", f"PYTHONS={clone}/shim")
    assert done.returncode == 0, done.stderr
    assert "good -m venv --clear .venv" in (clone / "calls").read_text()
