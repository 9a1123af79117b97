"""Runs the marked blocks of pages, in a folder with the stores of README's first look."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from vitsee_cli.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Return (language, text) of the blocks of a page that are marked as tested."""
    return re.findall(r"<!-- tested -->\n```(\w+)\n(.*?)```", page, re.DOTALL)


def lines_of(text: str) -> list[str]:
    """Return the command lines of a block, each in one line."""
    return [line.strip() for line in text.replace("\\\n", " ").strip().splitlines()]


def run_in_shell(command: list[str], folder: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def run_here(words: list[str], line: str) -> None:
    """Run `vitsee ... > FILE` in this process, which has imported torch already."""
    target = os.devnull
    if ">" in words:
        target = words[-1]
        words = words[:-2]
    assert words[0] == "vitsee"
    assert not {"|", ">", "&&", ";"} & {*words}
    done = CliRunner().invoke(main, words[1:])
    assert done.exit_code == 0, f"{line}: {done.stderr}"
    Path(target).write_text(done.stdout)


def run_blocks(page: str, folder: Path) -> None:
    """Run pipes and other programs in a shell, our commands and Python in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for language, text in blocks_of(page):
            if language == "python":
                exec(text, {})
                continue
            assert language == "sh"
            for line in lines_of(text):
                words = shlex.split(line, comments=True)
                if words[0] == "vitsee" and "|" not in words:
                    run_here(words, line)
                elif words[:2] == ["python", "-c"]:
                    exec(words[2], {})
                else:
                    run_in_shell(["bash", "-euo", "pipefail", "-c", line], folder)


def make_first_look(base: Path) -> Path:
    """Return the folder with what README's own blocks leave, made by one process of a test run.

    Args:
        base: the temporary folder of the test run, of all its workers.
    """
    folder = base / "first-look"
    made = base / "first-look-made"
    with open(base / "first-look.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            run_blocks(README, folder)
            made.touch()
    return folder


def link_first_look(first_look: Path, folder: Path) -> None:
    """Give a folder the stores of README's first look, and copies of its tables."""
    for path in first_look.iterdir():
        if path.suffix == ".zarr":
            (folder / path.name).symlink_to(path)
        elif ".csv" in path.name:
            shutil.copy(path, folder)
