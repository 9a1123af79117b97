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
# Lines on stderr where the machine has not enough of something.
OUT_OF_MEMORY = (
    "out of memory; give it more, or use less: --memory, --batch-size, --slab, --jobs"
)
LIMITED_MEMORY = (
    "out of memory, as this process may take only so much (ulimit -v, or a job's limit); "
    "give it more: ulimit -v unlimited"
)
OUT_OF_THREADS = (
    "the system starts no more threads or processes; raise the limit (ulimit -u, or that "
    "of the container or job), or use fewer: --jobs 1, OMP_NUM_THREADS=1, "
    "POLARS_MAX_THREADS=1"
)


class CommandGroup(click.Group):
    """A group whose commands are the analyses, and the files of `vitsee_cli.commands`.

    `vitsee_core/analyses/knn.py` is `vitsee knn`, whose command `signature.command_of` makes from
    the declaration; `commands/info.py` holds the click command `command`. `QUESTION` of either is
    the heading of the help that lists it. `vitsee_core.runtime.registry` finds analyses of other
    packages. Every command also takes the group's -v and -q.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, vitsee's own and those of other packages."""
        return sections.names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None if there is none of that name."""
        # The metadata of all installed packages is read only for a name that is not built in.
        is_builtin = cmd_name in sections.builtin_names()
        if not is_builtin and cmd_name not in self.list_commands(ctx):
            return None
        command = sections.command_named(cmd_name)
        command.name = cmd_name
        if not any(p.name == "verbose" for p in command.params):
            options.verbosity(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands below the questions that they answer, all in one column.

        On stderr stands why analyses of other packages are left out.
        """
        for line in registry.refused().values():
            console.fail(f"warning: {line}")
        names = self.list_commands(ctx)
        # The same width below every heading, which click would choose for each alone.
        width = max(map(len, names), default=0)
        for question, commands in sections.commands_by_question(names).items():
            rows = [
                (name.ljust(width), _purpose(command))
                for name, command in commands.items()
            ]
            if rows:
                with formatter.section(question):
                    formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the matching commands and options, without importing any command."""
        items = []
        for name in self.list_commands(ctx):
            if name.startswith(incomplete):
                command, _ = sections.described(name)
                items.append(CompletionItem(name, help=_purpose(command)))
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command's name, the command, and the words behind its name, as click does.

        Raises:
            click.UsageError: the command is unknown (the message has near matches), or an option
                with a single value is given twice.
        """
        name = args[0]
        if not ctx.resilient_parsing:
            registry.warn_refused(name, name.replace("-", "_"))
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            names = self.list_commands(ctx)
            matches = difflib.get_close_matches(name.replace("_", "-"), names, n=3)
            if matches:
                hint = f"did you mean {' or '.join(matches)}?"
            else:
                hint = f"commands: {', '.join(names)}"
            raise click.UsageError(f"no command {name!r}; {hint}", ctx)
        command_name, command, words = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            options.refuse_twice(command, click.Context(command, ctx, name), words)
        return command_name, command, words

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program as click does, on streams that take any text."""
        console.prepare_streams()
        try:
            return super().main(*args, **kwargs)
        except (VitseeError, OSError) as error:
            # Errors of --help and --version; `invoke` reports those of commands.
            line = _user_error_line(error)
            if line is None or not kwargs.get("standalone_mode", True):
                raise
            console.fail(f"vitsee: {line}")
            sys.exit(1)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words as click does, and keep them for `console.command_line`.

        `vitsee help` and `vitsee help COMMAND` are --help.
        """
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
        """Run the command and return its result.

        Errors that a user can cause become one line on stderr, and the exit code; a bug keeps its
        traceback.
        """
        try:
            with signals.RaisingSignals(_command_word(ctx)):
                result = super().invoke(ctx)
            sys.stdout.flush()
        except click.NoSuchOption as error:
            # click offers options that are spelled alike, for --l2 the option --help.
            advice = _advice_on_unknown_option(error)
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
            line = _user_error_line(error)
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
        except BaseException as error:  # a panic of polars is not an Exception
            if not is_out_of_threads(error):
                raise
            _fail(ctx, OUT_OF_THREADS, 1)
        return result


def _advice_on_unknown_option(error: click.NoSuchOption) -> str:
    """Return a sentence about what was meant by an unknown option; "" if nothing is alike.

    It names longer options (--l2-grid for --l2, --sites for --site), or else the argument of that
    name (STORE for --store).
    """
    context = error.ctx
    if context is None:
        return ""
    typed = error.option_name
    params = context.command.params
    longer_options = [
        option
        for param in params
        if isinstance(param, click.Option)
        for option in param.opts
        if option.startswith(f"{typed}-") or option == f"{typed}s"
    ]
    if longer_options:
        return f"Did you mean {' or '.join(longer_options)}?"
    name = typed.lstrip("-")
    for param in params:
        if isinstance(param, click.Argument) and name in (param.name, f"{param.name}s"):
            usage = " ".join(context.command.collect_usage_pieces(context))
            command_line = f"{context.command_path} {usage}"
            return f"{name.rstrip('s').upper()} is an argument: {command_line}"
    return ""


def _purpose(command: click.Command) -> str:
    """Return the first sentence of a command's help, uncut."""
    return command.get_short_help_str(limit=1000)


def _command_word(ctx: click.Context) -> str:
    """Return the first word that is not an option: the command, if one was typed; else ""."""
    for word in ctx.meta[console.ARGUMENTS]:
        if not word.startswith("-"):
            return word
    return ""


def _fail(ctx: click.Context, line: str, exit_code: int) -> None:
    """Print `vitsee COMMAND: line` on stderr and exit; with -v after the traceback.

    A nested command (a step of a study) leaves the line to the outer command.
    """
    name = f"vitsee {ctx.invoked_subcommand}" if ctx.invoked_subcommand else "vitsee"
    console.debug_traceback()
    ctx.meta[console.REASON] = line
    if ctx.parent is None:
        console.fail(f"{name}: {line}")
    ctx.exit(exit_code)


def _user_error_line(error: Exception) -> str | None:
    """Return the line that reports this error to a user; None for a bug."""
    text = " ".join(str(error).split())
    if isinstance(error, VitseeError):
        return text
    if isinstance(error, OSError) and error.errno in PATH_ERRNOS:
        if error.filename is None:
            return reason(error)
        return f"{error.filename}: {reason(error)}"
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY
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
    """Return whether the reader of our output is gone (`| head`), which is not an error.

    If so, stdout is bound to the null device: the interpreter flushes it at exit.
    """
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # stdout is not a file, as in tests
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
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
