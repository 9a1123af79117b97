"""The group: finding commands, translating errors, verbosity, start-up, stderr."""

from __future__ import annotations

import ast
import errno
import json
import logging
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from vitsee_cli import commands, console, options
from vitsee_cli.__main__ import share_cores
from vitsee_cli.main import CommandGroup, main
from vitsee_cli.sections import OTHER_COMMANDS, QUESTIONS, SectionedCommand, section
from vitsee_core import analyses
from vitsee_stores.errors import VitseeError

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
MODULES = [*pkgutil.iter_modules(analyses.__path__)]
HEAVY = (
    "torch",
    "torchvision",
    "timm",
    "matplotlib",
    "scipy",
    "zarr",
    "rich",
    "PIL",
    "polars",
)


class Resumable(VitseeError):
    exit_code = 75


def run(body: Callable[[], Any], *args: str) -> Result:
    """`vitsee probe ARGS` where the command's body is `body`."""

    class OneCommand(CommandGroup):
        def list_commands(self, ctx: click.Context) -> list[str]:
            return ["probe"]

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
            return options.verbosity(click.Command("probe", callback=body))  # type: ignore[no-any-return]

    group = OneCommand("vitsee", params=options.verbosity(click.Command(None)).params)
    return CliRunner().invoke(group, args or ["probe"])


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (VitseeError("no site 'x'\n  here"), "vitsee probe: no site 'x' here"),
        (Resumable("stopped by SIGTERM"), "vitsee probe: stopped by SIGTERM"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/a/b"),
            "/a/b: permission denied",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "probe: no space left on device",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/a"), "read-only file system"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/a"),
            "/a: no such",
        ),
        (MemoryError(), "vitsee probe: out of memory"),
        (KeyboardInterrupt(), "vitsee probe: interrupted"),
    ],
)
def test_what_a_user_can_cause_is_one_line(error: BaseException, line: str) -> None:
    result = run(raising(error))
    assert result.exit_code == {Resumable: 75, KeyboardInterrupt: 130}.get(type(error), 1)
    assert line in result.stderr and result.stderr.startswith("vitsee probe: ")
    assert len(result.stderr.splitlines()) == 1 and result.stdout == ""


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), KeyError("x"), OSError(errno.EBADF, "Bad")]
)
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    assert run(raising(error)).exception is error


def test_a_broken_pipe_to_a_worker_is_not_taken_for_head() -> None:
    result = run(raising(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    assert isinstance(result.exception, RuntimeError)
    assert result.exit_code == 1


def test_verbose_shows_the_traceback_of_a_users_mistake_too() -> None:
    for args in (["-v", "probe"], ["probe", "-v"]):
        result = run(raising(VitseeError("no such site")), *args)
        assert result.exit_code == 1
        assert "Traceback" in result.stderr
        assert result.stderr.splitlines()[-1] == "vitsee probe: no such site"


def test_head_ends_quietly(tmp_path: Path) -> None:
    """The reader of stdout goes away while a command writes: nothing is said, nothing failed."""
    script = tmp_path / "many.py"
    script.write_text(
        "import click, sys\n"
        "from vitsee_cli.main import CommandGroup\n"
        "class Group(CommandGroup):\n"
        "    def get_command(self, ctx, name): return many\n"
        "@click.command()\n"
        "def many():\n"
        "    for i in range(200_000): sys.stdout.write(f'{i}\\n')\n"
        "Group('vitsee')(['many'])\n"
    )
    command = f"{sys.executable} {script} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "0"]
    assert done.stderr == ""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_rich_does_not_end_the_program_on_a_broken_pipe(
    tmp_path: Path, stream: str
) -> None:
    """rich would exit with 1: to `vitsee info X | head -1`, to an extraction `2>&1 | head -1`."""
    script = tmp_path / "many.py"
    script.write_text(
        "import click\n"
        "from vitsee_cli import console\n"
        "from vitsee_cli.main import CommandGroup\n"
        "class Group(CommandGroup):\n"
        "    def get_command(self, ctx, name): return many\n"
        "@click.command()\n"
        "def many():\n"
        "    console.setup(0)\n"
        f"    for i in range(30): console.{stream}().print('a line ' * 2000)\n"
        f"    open({str(tmp_path / 'end')!r}, 'w')\n"
        "Group('vitsee')(['many'])\n"
    )
    pipe = "|" if stream == "stdout" else "2>&1 >/dev/null |"
    command = f"{sys.executable} {script} {pipe} true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
    # What is written for nobody ends at once; the command whose remarks nobody reads does its work.
    assert (tmp_path / "end").exists() == (stream == "stderr")


def shell(
    command: str, store: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `vitsee` is this one and $S the store; its status is the result's."""
    script = f'vitsee() {{ "{sys.executable}" -m vitsee_cli "$@"; }}; {command}'
    return subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**ENVIRONMENT, "S": str(store), **environment},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["vitsee info $S", "vitsee info $S --json", "vitsee attn-dist $S", "vitsee --help"],
)
def test_closed_stdout_is_said(make_store: Callable[..., Path], command: str) -> None:
    done = shell(f"{command} >&-", make_store())
    assert done.returncode == 1
    assert done.stderr.endswith("stdout is closed (>&-): the result has nowhere to go\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_closed_streams_that_nobody_needs(
    make_store: Callable[..., Path], tmp_path: Path
) -> None:
    store = make_store()
    # Quiet: on a slow machine its progress is said.
    done = shell(f"vitsee -q attn-dist $S -o {tmp_path}/r.csv >&- <&-", store)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "r.csv").read_text().startswith("store,")
    done = shell("vitsee info $S 2>&-", store)
    assert done.returncode == 0
    assert "complete" in done.stdout


def test_a_full_disk_behind_stdout(make_store: Callable[..., Path]) -> None:
    done = shell("vitsee info $S --json > /dev/full", make_store())
    assert done.returncode == 1
    assert done.stderr == "vitsee info: no space left on device\n"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_full_disk_behind_what_click_prints(tmp_path: Path, option: str) -> None:
    done = shell(f"vitsee {option} > /dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (1, "vitsee: no space left on device\n")


def test_help_for_a_reader_that_is_gone(tmp_path: Path) -> None:
    done = shell("vitsee --help | true; echo ${PIPESTATUS[0]}", tmp_path)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_the_package_is_the_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vitsee", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
    )
    assert done.stdout.startswith("vitsee ")


class PanicException(BaseException):
    """polars raises one of this kind."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        PanicException(
            "could not spawn threads: ThreadPoolBuildError { code: 11, WouldBlock }"
        ),
        PanicException("OS can't spawn worker thread: Resource temporarily unavailable"),
    ],
)
def test_a_limit_of_threads_is_one_line(error: BaseException) -> None:
    for raised in (error, _caused_by(error)):
        result = run(raising(raised))
        assert result.exit_code == 1
        assert result.stderr.startswith("vitsee probe: the system starts no more threads")
        assert "ulimit -u" in result.stderr and len(result.stderr.splitlines()) == 1


def _caused_by(error: BaseException) -> BaseException:
    try:
        try:
            raise error
        except BaseException as cause:
            raise ImportError("polars") from cause
    except ImportError as outer:
        return outer


def test_other_panics_keep_their_traceback() -> None:
    error = PanicException("index out of bounds")
    with pytest.raises(PanicException):
        run(raising(error))
    full = BlockingIOError(errno.EAGAIN, "write could not complete without blocking")
    assert run(raising(full)).exception is full


@pytest.mark.slow
def test_a_terminal_without_the_letters(make_store: Callable[..., Path]) -> None:
    store = make_store("größe.zarr")
    for command in (
        "vitsee info $S",
        "vitsee attn-dist größe=$S | head -2",
        "vitsee info $S/nö",
    ):
        done = shell(command, store, PYTHONIOENCODING="ascii", LC_ALL="C")
        assert "Traceback" not in done.stderr
        assert r"gr\xf6\xdfe" in done.stdout + done.stderr


def test_what_a_store_says_steers_no_terminal(make_store: Callable[..., Path]) -> None:
    text = "\x1b]0;owned\x07\x9b2J\u202e"
    for result in (
        run(lambda: console.out(text + "\n" + text)),
        run(lambda: console.say(text)),
        run(lambda: console.warn(text)),
        run(raising(VitseeError(text))),
    ):
        shown = result.stdout + result.stderr
        assert shown.count(r"\x1b]0;owned\x07\x9b2J\u202e") >= 1
        assert all(c.isprintable() or c == "\n" for c in shown)


# ---------------------------------------------------------------- commands


@pytest.mark.slow
def test_demo_into_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    for output in (tmp_path / "taken", tmp_path / "taken" / "below"):
        result = CliRunner().invoke(main, ["demo", "-o", str(output)])
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.startswith(f"vitsee demo: cannot make the folder {output}: ")
        assert result.stderr.count("\n") == 1


def test_help_lists_every_command_file_and_analysis() -> None:
    result = CliRunner().invoke(main, ["--help"])
    opening = " ".join(result.stdout.split(QUESTIONS[0])[0].split())
    for source in ("timm", "transformers", "open_clip", "torchvision", "your own"):
        assert source in opening
    for package in (commands, analyses):
        for module in pkgutil.iter_modules(package.__path__):
            assert f"\n  {module.name.replace('_', '-')} " in result.stdout
    assert "..." not in result.stdout.split(QUESTIONS[0])[1], (
        "a summary is too long for its line"
    )


def test_help_groups_the_commands_by_question() -> None:
    """Each command once, below the question of its own file, the names in one column."""
    blocks = CliRunner().invoke(main, ["--help"]).stdout.split("\n\n")
    listed: dict[str, list[str]] = {}
    columns = set()
    for heading, *lines in (block.splitlines() for block in blocks):
        if heading[:-1] in (*QUESTIONS, OTHER_COMMANDS):
            listed[heading[:-1]] = [line.split()[0] for line in lines]
            columns |= {re.match(r"  \S+ +", line).end() for line in lines}  # type: ignore[union-attr]
    assert tuple(listed) == QUESTIONS, "their order, and no command without a question"
    attention = ["attn-dist", "attn-map", "head-importance", "head-types", "saliency"]
    assert listed["Where attention looks"] == attention
    assert sorted(
        name for names in listed.values() for name in names
    ) == main.list_commands(click.Context(main))
    assert len(columns) == 1


def test_a_command_without_a_question_is_listed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read from the file, which is not imported: a command's own imports cost the list nothing."""
    (tmp_path / "my_own.py").write_text(
        'raise ImportError\ndef command():\n    """Do it. So."""'
    )
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    shown = CliRunner().invoke(main, ["--help"]).stdout
    assert re.search(r"Other commands:\n  my-own +Do it.\n", shown)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("validat", "did you mean validate?"),
        ("attn_dist", "attn-dist"),
        ("zzzz", "commands: "),
    ],
)
def test_unknown_command_suggests(typed: str, hint: str) -> None:
    result = CliRunner().invoke(main, [typed])
    assert result.exit_code == 2
    assert f"no command {typed!r}; " in result.stderr
    assert hint in result.stderr
    assert result.stdout == ""


@pytest.mark.slow
def test_help_is_a_command_too() -> None:
    def shown(*words: str) -> str:
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert shown("help") == shown("--help")
    assert shown("help", "cka") == shown("cka", "--help")
    assert shown("help", "cache", "rm") == shown("cache", "rm", "--help")
    assert "Start here: `vitsee demo --quick`" in shown("help")
    result = CliRunner().invoke(main, ["help", "validat"])
    assert result.exit_code == 2 and "did you mean validate?" in result.stderr


@pytest.mark.parametrize("name", main.list_commands(click.Context(main)))
def test_every_command_documents_itself(name: str) -> None:
    """An example, and for every option what it does and what happens without it."""
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert f"vitsee {name}" in (command.help or ""), "no example"
    for option in command.params:
        if not isinstance(option, click.Option) or option.name in (
            "verbose",
            "quiet",
            "help",
        ):
            continue
        assert option.help, f"{option.opts} is not described"
        shown = "[default" in option.help or option.show_default or option.required
        assert shown or option.is_flag, f"{option.opts} does not say its default"


def heavy(code: str, modules: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of the modules a fresh interpreter has imported after `code`."""
    code += f"\nimport sys; print(*[m for m in {modules!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1].split()


def shown(*arguments: str) -> str:
    """Code that runs `vitsee ARGUMENTS`."""
    return f"from vitsee_cli.main import main; main({arguments!r}, standalone_mode=False)"


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    """A command's own help may import its analysis, which is NumPy and what reads images."""
    light = "\n".join(
        shown(*words, "--help") for words in ((), ("info",), ("validate",), ("demo",))
    )
    assert heavy(light, ("numpy", *HEAVY)) == []
    helps = "\n".join(
        shown(name, "--help") for name in main.list_commands(click.Context(main))
    )
    loaded = "".join(
        f"\nassert '{analyses.__name__}.{m.name}' in sys.modules" for m in MODULES
    )
    assert set(heavy(f"{helps}\nimport sys{loaded}", (*HEAVY, "sklearn"))) <= {"PIL"}


def test_completion_imports_nothing_heavy() -> None:
    code = "from click.shell_completion import ShellComplete; from vitsee_cli.main import main\n"
    code += "print(ShellComplete(main, {}, 'vitsee', '_C').get_completions([], 'attn')[1].help)"
    assert heavy(code, ("numpy", *HEAVY)) == []


def test_a_command_shows_and_takes_the_defaults_of_its_analysis() -> None:
    def run(store: str, mass: float = 0.6, kinds: tuple[str, ...] = ("a", "b")) -> None:
        pass

    def plot(
        table: str, deep: bool = True, n: int | None = None, scale: str = "shared"
    ) -> None:
        pass

    @click.command()
    @options.defaults_of(run, plot)
    @click.option("--mass", type=float)
    @click.option(
        "--kind", "kinds", multiple=True, type=click.Choice("abc"), show_default="both"
    )
    @click.option("--deep/--shallow")
    @click.option("--n", type=int, show_default="all")
    @click.option("--scale", default="head", show_default=True)
    def command(**values: Any) -> None:
        console.out(repr(values))

    values = ast.literal_eval(CliRunner().invoke(command).stdout)
    assert values == {
        **{"mass": 0.6, "kinds": ("a", "b"), "deep": True, "n": None},
        "scale": "head",
    }
    text = CliRunner().invoke(command, ["--help"]).stdout
    for default in ("0.6", "(both)", "deep", "(all)", "head"):
        assert f"[default: {default}]" in text
    given = (
        CliRunner().invoke(command, ["--mass", "1", "--kind", "c", "--shallow"]).stdout
    )
    assert ast.literal_eval(given) == values | {
        "mass": 1.0,
        "kinds": ("c",),
        "deep": False,
    }


def test_a_switch_takes_the_default_of_its_analysis_with_older_releases_of_click() -> (
    None
):
    """They give a switch without a default False, newer ones their own word for none."""

    def run(residual: bool = True) -> None:
        pass

    @click.command()
    @options.defaults_of(run)
    @click.option("--residual/--no-residual", default=False)
    def command(**values: Any) -> None:
        console.out(repr(values))

    assert ast.literal_eval(CliRunner().invoke(command).stdout) == {"residual": True}


# ---------------------------------------------------------------- stderr


@pytest.mark.parametrize(
    ("flags", "seen"),
    [
        ([], ["remark", "warning: careful"]),
        (["-q"], ["warning: careful"]),
        (["-v"], None),
    ],
)
def test_verbosity(flags: list[str], seen: list[str] | None) -> None:
    def body() -> None:
        logging.getLogger("vitsee_core.somewhere").debug("detail")
        console.say("remark")
        console.warn("careful")
        console.out("result")

    for args in ([*flags, "probe"], ["probe", *flags]):
        result = run(body, *args)
        assert result.stdout == "result\n"
        assert result.stderr.splitlines() == (
            seen or ["detail", "remark", "warning: careful"]
        )


def test_remarks_are_printed_as_they_are() -> None:
    """Neither cut at the terminal's width nor read as markup."""
    line = "[bold]x[/bold] " + "word " * 60 + "end"
    assert run(lambda: console.say(line)).stderr == line + "\n"


def test_progress_in_a_file_is_lines() -> None:
    def body() -> None:
        reporter = console.Reporter("b16.zarr", show_after=0.0, line_interval=0.0)
        reporter.start(96, 32)
        reporter.advance(32)
        reporter.advance(0, 5_000_000)
        reporter.advance(32)
        reporter.stop()

    lines = run(body).stderr.splitlines()
    assert lines[0].startswith("b16.zarr: 64/96 images, ")
    assert " images/s, " in lines[0]
    assert lines[0].endswith(" left")
    assert "B/s" in lines[1]
    assert lines[-1].startswith("b16.zarr: 96/96 images")
    assert run(body, "probe", "-q").stderr == ""


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    def body() -> None:
        monkeypatch.setattr(
            console,
            "stderr",
            lambda: Console(stderr=True, force_terminal=True, width=100),
        )
        reporter = console.Reporter("b16.zarr", show_after=0.0)
        reporter.start(64)
        reporter.advance(64, 1000)
        console.say("a remark above the bar")
        reporter.stop()

    monkeypatch.setenv("TERM", "xterm")
    result = run(body)
    assert result.exit_code == 0, result.output
    assert "64/64" in result.stderr
    assert "images/s" in result.stderr
    assert "a remark above the bar" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "own", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}]
)
def test_idle_threads_of_torch_sleep_unless_the_user_says_otherwise(
    own: dict[str, str],
) -> None:
    environ = {"HOME": "/home/x", **own}
    share_cores(environ)
    assert environ == {"HOME": "/home/x", **(own or {"GOMP_SPINCOUNT": "1000"})}


def test_command_line_is_what_was_typed() -> None:
    result = run(
        lambda: console.out(json.dumps(console.command_line())), "-q", "probe", "-v"
    )
    assert json.loads(result.stdout) == ["vitsee", "-q", "probe", "-v"]


def test_options_under_headings() -> None:
    """Every option once, below its heading, in the order in which they were given."""

    @click.command("x", cls=SectionedCommand)
    @section(
        "First", [click.option("--one", help="One."), click.option("--two", help="Two.")]
    )
    @click.option("--loose", help="Loose.")
    @section("Second", [click.option("--three", help="Three.")])
    def command() -> None:
        """Say nothing."""

    lines = [
        line.strip()
        for line in CliRunner().invoke(command, ["--help"]).stdout.splitlines()
    ]
    words = [
        line.split()[0] for line in lines if line.startswith("-") or line.endswith(":")
    ]
    assert words == [
        "First:",
        "--one",
        "--two",
        "Second:",
        "--three",
        "Other",
        "--loose",
        "--help",
    ]
