"""README's commands: what it marks as tested is run, everything else at least parses."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from vitsee_cli.main import main

README = (Path(__file__).parents[1] / "README.md").read_text()
TESTED = re.findall(r"<!-- tested -->\n```(\w+)\n(.*?)```", README, re.DOTALL)
SHELL = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)


def vitsee_lines() -> list[str]:
    text = "\n".join(SHELL).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line.startswith("vitsee ")]


@pytest.mark.parametrize("line", vitsee_lines())
def test_every_vitsee_line_parses(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    words = words[: min((words.index(w) for w in ("|", ">") if w in words), default=len(words))]
    command = main.get_command(click.Context(main), words[0])
    assert command is not None
    command.make_context(words[0], words[1:], parent=click.Context(main))


def run_in_shell(command: list[str], folder: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def run_here(line: str) -> None:
    """`vitsee ... > FILE` in this process, which has imported torch already."""
    words = shlex.split(line, comments=True)
    words, target = (words[:-2], words[-1]) if ">" in words else (words, os.devnull)
    assert words[0] == "vitsee" and not {"|", ">", "&&", ";"} & {*words}
    done = CliRunner().invoke(main, words[1:])
    assert done.exit_code == 0, f"{line}: {done.stderr}"
    Path(target).write_text(done.stdout)


def test_what_is_marked_as_tested_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes and other programs in a shell, our commands in this process."""
    assert {language for language, _ in TESTED} == {"sh", "python"}
    monkeypatch.chdir(tmp_path)
    for language, text in TESTED:
        if language == "python":
            run_in_shell([sys.executable, "-c", text], tmp_path)
            continue
        for line in text.replace("\\\n", " ").strip().splitlines():
            words = shlex.split(line, comments=True)
            if "|" in words or words[0] != "vitsee":
                run_in_shell(["bash", "-euo", "pipefail", "-c", line], tmp_path)
            else:
                run_here(line)
    for picture in ("dist.png", "cka.png", "branch.png", "models.png", "heads.png", "all.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    header = (tmp_path / "dist.csv").read_text().splitlines()[0]
    assert header.startswith("store,model,site,block,depth,rel_depth,head,metric,value")


def test_the_two_commands_stand_in_readme() -> None:
    assert "make demo" in README
    assert "make test" in README
