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

# How an option begins, and a negative number does not.
OPTION = re.compile(r"--?[A-Za-z]")
MODELS = "models"
SET = "set"
# Options that a file cannot set.
OPTIONS_WITHOUT_KEY = ("file", "help", "recipe_models")
# Parameters that a study decides for each of its steps.
DECIDED = frozenset(
    (
        "data",
        "device",
        "dry_run",
        "force",
        "help",
        "images",
        "memory",
        "model_name",
        "output",
        "plan",
        "png",
        "quiet",
        "replicates",
        "seed",
        "shard",
        "stores",
        "tables",
        "train",
        "verbose",
    )
)


def file_option(command: Any) -> Any:
    """Add --file: options of the command from a TOML file, as defaults of the command line."""
    return click.option(
        "--file",
        metavar="TOML",
        type=parse_path,
        is_eager=True,
        expose_value=False,
        callback=_read_file,
        help="Take options from this file: their names are keys, [models] has NAME = "
        "MODEL, [set.ANALYSIS] has OPTION = VALUE. The command line wins.  [default: "
        "none]",
    )(command)


def _read_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Use the file's values as defaults of the other options.

    Raises:
        VitseeError: the file cannot be read, or has an unknown key or a value of another type.
    """
    if path is None:
        return
    from vitsee_core.study.recipe_file import read_toml

    settable = {
        param.opts[-1].removeprefix("--"): param
        for param in ctx.command.params
        if param.name not in OPTIONS_WITHOUT_KEY
        and param.name not in ("verbose", "quiet")
    }
    defaults: dict[str, Any] = {}
    for key, value in read_toml(path, str(path)).items():
        if key not in settable:
            raise VitseeError(f"{path}: no key {key!r}; expected {', '.join(settable)}")
        param = settable[key]
        is_repeatable = getattr(param, "multiple", False) or param.nargs == -1
        # Everything becomes the text that would be typed, which click then converts.
        if key == SET:
            value = _texts_of_set(value, path)
        elif key == MODELS and isinstance(value, Mapping):
            value = [f"{name}={_option_text(model)}" for name, model in value.items()]
        elif isinstance(value, Mapping) or (
            isinstance(value, list) and not is_repeatable
        ):
            raise VitseeError(f"{path}: {key} takes one value, and is {value}")
        elif is_repeatable:
            value = [_option_text(item) for item in _as_list(value)]
        elif not isinstance(value, bool):
            value = _option_text(value)
        defaults[str(param.name)] = value
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _texts_of_set(value: Any, path: Path) -> list[str]:
    """Return the tables [set.ANALYSIS] of a file as texts `ANALYSIS.OPTION=VALUE`."""
    texts = []
    for analysis, options in _require_table(value, path, SET).items():
        options = _require_table(options, path, f"{SET}.{analysis}")
        for option, values in options.items():
            for item in _as_list(values):
                texts.append(f"{analysis}.{option}={_option_text(item)}")
    return texts


def _as_list(value: Any) -> list[Any]:
    """Return a list as it is, and any other value as a list of one."""
    return value if isinstance(value, list) else [value]


def _option_text(value: Any) -> str:
    """Return a value of TOML as it is typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _require_table(value: Any, path: Path, name: str) -> Mapping[str, Any]:
    """Return the value if it is a table of TOML; else raise a VitseeError."""
    if not isinstance(value, Mapping):
        raise VitseeError(f"{path}: {name} is {value!r}; expected a table, [{name}]")
    return value


# ------------------------------------------------------------------------------- options of steps

Commands = Callable[[str], click.Command | None]


def commands_of(ctx: click.Context) -> Commands:
    """Return the function name -> command of the group that `ctx` belongs to."""
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    return lambda name: group.get_command(ctx, name)


def settings(
    texts: Sequence[str], memory: int | None, ctx: click.Context, analyses: Iterable[str]
) -> dict[str, list[Setting]]:
    """Return command -> the options that the user set for it.

    Args:
        texts: values of --set, `ANALYSIS.OPTION=VALUE`.
        memory: value of --memory, in bytes, for all commands that have that option.
        ctx: context of the study's command.
        analyses: names of all analyses.

    Raises:
        click.UsageError: no such analysis or option, an option that the study decides, or an
            invalid value.
    """
    from vitsee_core.study.steps import Setting

    command_of = commands_of(ctx)
    command_names = [*analyses, "extract"]
    values: dict[tuple[str, str], list[str]] = {}
    for text in texts:
        match = re.fullmatch(r"([a-z0-9-]+)\.([a-z0-9-]+)=(.+)", text, re.DOTALL)
        if match is None or match[1] not in command_names:
            raise click.UsageError(
                f"--set {text!r}; expected ANALYSIS.OPTION=VALUE, ANALYSIS one of "
                f"{', '.join(command_names)}"
            )
        if OPTION.match(match[3]):
            # A step's command would take it for the value and the next word for an input.
            raise click.UsageError(
                f"--set {match[1]}.{match[2]} has no value: {match[3]} is an option"
            )
        values.setdefault((match[1], match[2]), []).append(match[3])
    settings_of: dict[str, list[Setting]] = {}
    for (name, option), typed_values in values.items():
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
        if len(typed_values) > 1 and not param.multiple:
            raise click.UsageError(
                f"--set {name}.{option} is given as {' and '.join(typed_values)}"
            )
        try:
            setting = _make_setting(param, f"--{option}", typed_values, ctx)
        except click.BadParameter as error:
            raise click.UsageError(f"--set {name}.{option}: {error.message}") from None
        settings_of.setdefault(name, []).append(setting)
    if memory is None:
        return settings_of
    for name in command_names:
        try:
            command = command_of(name)
        except GuestError:  # its own step reports it
            continue
        if command is None:
            continue
        if any(param.name == "memory" for param in command.params):
            setting = Setting(("--memory",), ("--memory", str(memory)))
            settings_of.setdefault(name, []).append(setting)
    return settings_of


def _make_setting(
    param: click.Option, option: str, typed_values: list[str], ctx: click.Context
) -> Setting:
    """Return the words of a step's command line that set an option, after a check of the values.

    Raises:
        click.BadParameter: a value is invalid.
    """
    from vitsee_core.study.steps import Setting

    spellings = (*param.opts, *param.secondary_opts)
    converted = param.type_cast_value(
        ctx, typed_values if param.multiple else typed_values[0]
    )
    if param.is_flag:
        # OPTION=false is the other side of a switch, and nothing for a flag.
        words = [option] if converted else list(param.secondary_opts[:1])
        return Setting(spellings, tuple(words))
    words = []
    for typed_value in typed_values:
        words += [option, typed_value]
    return Setting(spellings, tuple(words))


def in_a_study(text: str, command: click.Command, study_command: click.Command) -> str:
    """Return a message of a step's command with the options as they are written in a study.

    Options of the study itself stay. Options of a model's name are written after `?`, others by
    --set.

    Args:
        text: the message.
        command: the step's command.
        study_command: the study's command.
    """
    from vitsee_cli.model_options import NAMED_OPTIONS

    study_options = {word for param in study_command.params for word in param.opts}
    step_options = {word: param for param in command.params for word in param.opts}

    def rewrite(match: re.Match[str]) -> str:
        """Return the option, with its value, as a study has it."""
        word = match[1]
        value = match[2]
        if word in study_options or word not in step_options:
            return match[0]
        param = step_options[word]
        if param.name in DECIDED:
            return match[0]
        key = word.removeprefix("--")
        # A message may advise to extract again: `run: vitsee extract ... --tokens all`.
        if re.search(r"\bextract\b[^;]*$", text[: match.start()]):
            return f"--set extract.{key}={value or 'VALUE'}"
        if command.name == "extract" and param.name in NAMED_OPTIONS:
            return f"MODEL?{key}={value or 'VALUE'}"
        if getattr(param, "is_flag", False):
            value = "true"
        return f"--set {command.name}.{key}={value or 'VALUE'}"

    value = r"[A-Z0-9][\w,:.]*|[\w.]+=\w+|all\b"
    return re.sub(rf"(--[a-z][a-z-]*)(?: ({value}))?", rewrite, text)
