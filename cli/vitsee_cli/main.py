"""The `vitsee` command: finds commands by their files, turns a user's mistake into one line."""

from __future__ import annotations

import difflib
import errno
import os
import select
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from vitsee_cli import console, options, sections, signals
from vitsee_core.runtime import registry
from vitsee_core.runtime.machine import (
    is_limited_memory,
    is_out_of_memory,
    is_out_of_threads,
)
from vitsee_stores.errors import NotOffered, VitseeError, reason

# Conditions of a path or a disk that the user named; any other OSError keeps its traceback.
PATH_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
LIMITED_MEMORY = (
    "out of memory, as this process may take only so much (ulimit -v, or a job's limit); give it "
    "more: ulimit -v unlimited"
)
OUT_OF_THREADS = (
    "the system starts no more threads or processes; raise the limit (ulimit -u, or that of the "
    "container or job), or use fewer: --jobs 1, OMP_NUM_THREADS=1, POLARS_MAX_THREADS=1"
)


class CommandGroup(click.Group):
    """A group whose commands are the analyses, and the files of `vitsee_cli.commands`.

    `vitsee_core/analyses/knn.py` is `vitsee knn`, see `signature`; `commands/info.py`
    holds the click command `command`. `QUESTION` of either is the heading of the help that lists
    it. Other packages add analyses, see `vitsee_core.runtime.registry`. Every command also takes
    the group's -v and -q.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sections.names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # Metadata of packages is read for names that are not our own.
        if (
            cmd_name not in sections.builtin_names()
            and cmd_name not in self.list_commands(ctx)
        ):
            return None
        command = sections.command_named(cmd_name)
        command.name = cmd_name
        if not any(p.name == "verbose" for p in command.params):
            options.verbosity(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands below the questions that they answer, in one column; on stderr, why analyses
        of other packages are no commands."""
        for line in registry.refused().values():
            console.fail(f"warning: {line}")
        names = self.list_commands(ctx)
        width = max(map(len, names), default=0)
        for question, some in sections.commands_by_question(names).items():
            rows = [
                (name.ljust(width), _first_line(shown)) for name, shown in some.items()
            ]
            if rows:
                with formatter.section(question):
                    formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Matching commands and options, without importing any command."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        items = [
            CompletionItem(n, help=_first_line(sections.described(n)[0])) for n in names
        ]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Like click's, with near matches in the message for an unknown command; refuses a
        single-valued option that is given twice."""
        name = args[0]
        if not ctx.resilient_parsing:
            registry.warn_refused(name, name.replace("-", "_"))
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            names = self.list_commands(ctx)
            near = difflib.get_close_matches(name.replace("_", "-"), names, n=3)
            hint = (
                f"did you mean {' or '.join(near)}?"
                if near
                else f"commands: {', '.join(names)}"
            )
            raise click.UsageError(f"no command {name!r}; {hint}", ctx)
        found_name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            options.refuse_twice(command, click.Context(command, ctx, name), rest)
        return found_name, command, rest

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Like click's, on streams that take any text."""
        console.prepare_streams()
        try:
            return super().main(*args, **kwargs)
        except (
            VitseeError,
            OSError,
        ) as error:  # of --help and --version, before any command
            line = _one_line(error)
            if line is None or not kwargs.get("standalone_mode", True):
                raise
            console.fail(f"vitsee: {line}")
            sys.exit(1)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Like click's; keeps the arguments for `console.command_line`. `help` and `help COMMAND`
        are --help."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        ctx.meta[console.ARGUMENTS] = list(args)
        try:
            return super().parse_args(ctx, args)
        except BrokenPipeError:  # of --help, which is printed here
            if not _stdout_is_closed():
                raise
            ctx.exit(0)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors that a user can cause become one line on stderr."""
        try:
            with signals.Raised(_first_word(ctx)):
                result = super().invoke(ctx)
            sys.stdout.flush()
        except (
            click.NoSuchOption
        ) as error:  # click offers what looks alike, here --help for --l2
            advice = _instead(error)
            if not advice:
                raise
            text = f"No such option {error.option_name!r}. {advice}"
            raise click.NoSuchOption(error.option_name, text, None, error.ctx) from None
        except Exception as error:
            if isinstance(error, BrokenPipeError):
                if _stdout_is_closed():
                    ctx.exit(0)
                # click would end quietly on any broken pipe, a dead worker's among them.
                raise RuntimeError("the pipe to another process broke") from error
            line = _one_line(error)
            if line is None:
                raise
            ctx.meta[console.NOT_OFFERED] = isinstance(error, NotOffered)
            _fail(ctx, line, getattr(error, "exit_code", 1))
        except KeyboardInterrupt as stop:
            resumes = ctx.meta.get(console.RESUMES)
            if ctx.invoked_subcommand in signals.RESUMABLE:
                resumes = "repeat the command"
            if resumes:
                _fail(ctx, f"interrupted; {resumes}", signals.EXIT_RESUMABLE)
            _fail(ctx, "interrupted", signals.exit_code(stop))
        except BaseException as error:  # polars' panics are no Exceptions
            if not is_out_of_threads(error):
                raise
            _fail(ctx, OUT_OF_THREADS, 1)
        return result


def _instead(error: click.NoSuchOption) -> str:
    """The options that go on like the one that was typed, or the argument of that name; "" without
    either."""
    context = error.ctx
    if context is None:
        return ""
    params = context.command.params
    options_of_command = [p for p in params if isinstance(p, click.Option)]
    longer = [
        o for p in options_of_command for o in p.opts if _continues(error.option_name, o)
    ]
    if longer:
        return f"Did you mean {' or '.join(longer)}?"
    for param in params:
        name = error.option_name.lstrip("-")
        if isinstance(param, click.Argument) and name in (param.name, f"{param.name}s"):
            usage = " ".join(context.command.collect_usage_pieces(context))
            return f"{name.rstrip('s').upper()} is an argument: {context.command_path} {usage}"
    return ""


def _continues(typed: str, option: str) -> bool:
    """Whether an option is the word that was typed with more behind it: --l2 and --l2-grid, --site
    and --sites."""
    return option.startswith(f"{typed}-") or option == f"{typed}s"


def _first_line(command: click.Command) -> str:
    """A command's purpose in one sentence, uncut."""
    return command.get_short_help_str(limit=1000)


def _first_word(ctx: click.Context) -> str:
    """The first word that is not an option: the command, if one was typed."""
    return next(
        (word for word in ctx.meta[console.ARGUMENTS] if not word.startswith("-")), ""
    )


def _fail(ctx: click.Context, line: str, exit_code: int) -> None:
    """Print `vitsee COMMAND: line` on stderr and exit; with -v after the traceback. A nested
    command (a study's step) leaves the line to the outer one."""
    name = f"vitsee {ctx.invoked_subcommand}" if ctx.invoked_subcommand else "vitsee"
    console.debug_traceback()
    ctx.meta[console.REASON] = line
    if ctx.parent is None:
        console.fail(f"{name}: {line}")
    ctx.exit(exit_code)


def _one_line(error: Exception) -> str | None:
    """The line that reports this error to a user; None for a bug, which keeps its traceback."""
    text = " ".join(str(error).split())
    if isinstance(error, VitseeError):
        return text
    if isinstance(error, OSError) and error.errno in PATH_ERRNOS:
        where = f"{error.filename}: " if error.filename is not None else ""
        return where + reason(error)
    if isinstance(error, MemoryError):
        return "out of memory; give it more, or use less: --memory, --batch-size, --slab, --jobs"
    if is_limited_memory(error):
        return LIMITED_MEMORY
    if is_out_of_memory(error):
        return (
            "out of memory on the device; use a smaller --batch-size or another --device"
        )
    if is_out_of_threads(error):
        return OUT_OF_THREADS
    return None


def _stdout_is_closed() -> bool:
    """True if the reader of our output is gone (`| head`): not an error, and nothing to report."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # no file at all, as in tests
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    # Else the interpreter's own flush at exit complains.
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return True


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    None, "-V", "--version", package_name="vitsee", message="%(prog)s %(version)s"
)
@options.verbosity
def main() -> None:
    """See what a vision transformer sees, and how it differs from a CNN.

    One command runs a model, of timm, transformers, open_clip or torchvision or your own, over
    images and keeps its activations in a store; the others compute tables and figures from stores,
    without the model.

    Start here: `vitsee demo --quick` makes a report of the models and images that ship with vitsee.

    \b
      vitsee extract vit_base_patch16_224 --data imagenet/val -o b16.zarr
      vitsee info b16.zarr
      vitsee attn-dist b16.zarr -o dist.csv --png dist.png

    Results go to stdout, or to the file named by -o; progress and remarks go to stderr.

    \b
    Exit codes: 0 done; 1 wrong input or damaged data; 2 wrong option;
    75 stopped by a signal; the same command resumes.
    """
