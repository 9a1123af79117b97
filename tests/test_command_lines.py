"""Command lines less some options, and the one that resumes a store."""

from __future__ import annotations

import shlex

import pytest

from vitsee_core.runtime.command_lines import resuming, without_options


def test_options_in_every_form() -> None:
    words = [
        "vitsee",
        "extract",
        "m",
        "--plan",
        "slurm",
        "-v",
        "--data=x",
        "-oa",
        "--shard=0/2",
    ]
    kept = ("vitsee", "extract", "m", "-v", "--data=x")
    assert without_options(words, ["--plan", "--shard", "-o"]) == kept
    assert without_options(["x", "--plan"], ["--plan"]) == ("x",)
    assert without_options(
        ["--planned", "y", "-p", "--output", "a"], ["--plan", "-o"]
    ) == (*("--planned", "y", "-p", "--output", "a"),)


@pytest.mark.parametrize("output", ["-o old.zarr", "-oold.zarr", "--output=old.zarr"])
def test_what_resumes_a_store_deletes_nothing_and_does_all(output: str) -> None:
    line = resuming(
        f"vitsee -q extract m --data 'my images' {output} --force --shard 1/8", "a b"
    )
    assert line == "vitsee -q extract m --data 'my images' -o 'a b'"


def test_a_store_names_no_second_command() -> None:
    line = resuming("vitsee extract m -o s ; rm -rf $HOME `id`", "s")
    assert line is not None
    assert shlex.split(line)[3:8] == [";", "rm", "-rf", "$HOME", "`id`"]
    assert line == "vitsee extract m ';' rm -rf '$HOME' '`id`' -o s"


@pytest.mark.parametrize(
    "command",
    ["", "vitsee.extract", "rm -rf x", "vitsee info s", "vitsee extract 'm", "vitsee"],
)
def test_what_no_command_line_made(command: str) -> None:
    assert resuming(command, "s") is None
