"""Settings of a study beside its models: a file of options, and options of its steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli.values import parse_path
from vitsee_core.runtime.registry import GuestError
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.study.steps import Setting

MODELS = "models"
SET = "set"
NO_KEYS = ("file", "help", "of_models")  # of a file
# What a study decides for each of its steps.
DECIDED = frozenset(
    (
        *(
            "output",
            "png",
            "force",
            "replicates",
            "stores",
            "tables",
            "data",
            "images",
            "train",
        ),
        *("seed", "device", "memory", "model_name", "dry_run", "plan", "shard"),
        *("verbose", "quiet", "help"),
    )
)


def file_option(command: Any) -> Any:
    """--file: options of the command from a TOML file, as defaults of the command line."""
    return click.option(
        "--file",
        metavar="TOML",
        type=parse_path,
        is_eager=True,
        expose_value=False,
        callback=_read_file,
        help="Take options from this file: their names are keys, [models] has NAME = MODEL, "
        "[set.ANALYSIS] has OPTION = VALUE. The command line wins.  [default: none]",
    )(command)


def _read_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Use the file's values as defaults of the other options."""
    if path is None:
        return
    from vitsee_core.study.recipe_file import read_toml

    found = read_toml(path, str(path))
    params = [param for param in ctx.command.params if param.name not in NO_KEYS]
    known = {param.opts[-1].removeprefix("--"): param for param in params}
    defaults: dict[str, Any] = {}
    for key, value in found.items():
        if key not in known or key in ("verbose", "quiet"):
            expected = ", ".join(
                name for name in known if name not in ("verbose", "quiet")
            )
            raise VitseeError(f"{path}: no key {key!r}; expected {expected}")
        param = known[key]
        several = getattr(param, "multiple", False) or param.nargs == -1
        if key == SET:
            value = [
                f"{name}.{option}={_text(one)}"
                for name, options in _table(value, path, SET).items()
                for option, given in _table(options, path, f"{SET}.{name}").items()
                for one in _several(given)
            ]
        elif key == MODELS and isinstance(value, Mapping):
            value = [f"{name}={_text(model)}" for name, model in value.items()]
        elif isinstance(value, Mapping) or (isinstance(value, list) and not several):
            raise VitseeError(f"{path}: {key} takes one value, and is {value}")
        elif several:
            value = [_text(one) for one in _several(value)]
        elif not isinstance(value, bool):
            value = _text(value)
        defaults[str(param.name)] = value
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _table(value: Any, path: Path, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise VitseeError(f"{path}: {name} is {value!r}; expected a table, [{name}]")
    return value


# ------------------------------------------------------------------------------- options of steps

Commands = Callable[[str], click.Command | None]


def commands_of(ctx: click.Context) -> Commands:
    """Name -> command of the group that `ctx` belongs to."""
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    return lambda name: group.get_command(ctx, name)


def settings(
    texts: Sequence[str], memory: int | None, ctx: click.Context, analyses: Iterable[str]
) -> dict[str, list[Setting]]:
    """Command -> its options set by `ANALYSIS.OPTION=VALUE`, and --memory of those that have it.
    Raises click.UsageError: no such analysis or option, one that the study decides, or an invalid
    value."""
    from vitsee_core.study.steps import Setting

    command_of = commands_of(ctx)
    known = [*analyses, "extract"]
    values: dict[tuple[str, str], list[str]] = {}
    for text in texts:
        match = re.fullmatch(r"([a-z0-9-]+)\.([a-z0-9-]+)=(.+)", text, re.DOTALL)
        if match is None or match[1] not in known:
            raise click.UsageError(
                f"--set {text!r}; expected ANALYSIS.OPTION=VALUE, ANALYSIS one of "
                f"{', '.join(known)}"
            )
        values.setdefault((match[1], match[2]), []).append(match[3])
    found: dict[str, list[Setting]] = {}
    for (name, option), given in values.items():
        command = command_of(name)
        assert command is not None
        params = {
            word: param
            for param in command.params
            if isinstance(param, click.Option) and param.name not in DECIDED
            for word in param.opts
            if word.startswith("--")
        }
        param = params.get(f"--{option}")
        if param is None:
            expected = ", ".join(word.removeprefix("--") for word in params)
            raise click.UsageError(
                f"--set {name}.{option}: expected an option of {expected}"
            )
        if len(given) > 1 and not param.multiple:
            raise click.UsageError(
                f"--set {name}.{option} is given as {' and '.join(given)}"
            )
        try:
            setting = _setting(param, f"--{option}", given, ctx)
        except click.BadParameter as error:
            raise click.UsageError(f"--set {name}.{option}: {error.message}") from None
        found.setdefault(name, []).append(setting)
    for name in known if memory is not None else ():
        try:
            command = command_of(name)
        except GuestError:  # its own step reports it
            continue
        if command is not None and any(
            param.name == "memory" for param in command.params
        ):
            own = Setting(("--memory",), ("--memory", str(memory)))
            found.setdefault(name, []).append(own)
    return found


def _setting(
    param: click.Option, option: str, given: list[str], ctx: click.Context
) -> Setting:
    from vitsee_core.study.steps import Setting

    spellings = (*param.opts, *param.secondary_opts)
    value = param.type_cast_value(ctx, given if param.multiple else given[0])
    if param.is_flag:
        words = [option] if value else list(param.secondary_opts[:1])
        return Setting(spellings, tuple(words))
    return Setting(spellings, tuple(word for one in given for word in (option, one)))


def in_a_study(text: str, command: click.Command, own: click.Command) -> str:
    """A message of a step's command with its options as the study has them: its own unchanged,
    those of a model's name after `?`, others by --set."""
    from vitsee_cli.model_options import NAMED_OPTIONS

    kept = {word for param in own.params for word in param.opts}
    options = {word: param for param in command.params for word in param.opts}

    def replaced(match: re.Match[str]) -> str:
        word = match[1]
        value = match[2]
        if word in kept or word not in options or options[word].name in DECIDED:
            return match[0]
        key = word.removeprefix("--")
        if re.search(r"\bextract\b[^;]*$", text[: match.start()]):
            return f"--set extract.{key}={value or 'VALUE'}"
        if command.name == "extract" and options[word].name in NAMED_OPTIONS:
            return f"MODEL?{key}={value or 'VALUE'}"
        flag = getattr(options[word], "is_flag", False)
        return f"--set {command.name}.{key}=" + ("true" if flag else value or "VALUE")

    value = r"[A-Z0-9][\w,:.]*|[\w.]+=\w+|all\b"
    return re.sub(rf"(--[a-z][a-z-]*)(?: ({value}))?", replaced, text)
