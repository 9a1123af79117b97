"""Options that take several values take them repeated or with commas."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from vitsee_cli.declared import Listed
from vitsee_cli.main import main
from vitsee_cli.values import WholeNumber


@click.command()
@click.option(
    "--k",
    cls=Listed,
    type=WholeNumber(min=1),
    default=(20,),
    help="How many. Repeatable.",
)
def command(k: tuple[int, ...]) -> None:
    click.echo(k)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], "(20,)"),
        (["--k", "1,5"], "(1, 5)"),
        (["--k", "1", "--k", "5,9"], "(1, 5, 9)"),
    ],
)
def test_repeated_or_with_commas(words: list[str], values: str) -> None:
    assert CliRunner().invoke(command, words).output.strip() == values


@pytest.mark.parametrize("text", ["1,,5", "1,0", "1,x", "1;5"])
def test_each_value_is_checked(text: str) -> None:
    found = CliRunner().invoke(command, ["--k", text])
    assert found.exit_code == 2 and "--k" in found.output


@pytest.mark.parametrize(
    "words",
    [
        ["knn", "--k"],
        ["attn-map", "--heads"],
        ["attn-dist", "--metric"],
        ["probe", "--shots"],
        ["retrieve", "--cutoff"],
        ["best-layer", "--metric"],
        ["study", "--analyses"],
    ],
    ids=lambda words: " ".join(words),
)
def test_commands_say_so(words: list[str]) -> None:
    text = " ".join(CliRunner().invoke(main, [words[0], "--help"]).output.split())
    about = text[text.rindex(f" {words[1]} ") :]
    assert "Repeatable, or a comma list." in about[:400]
