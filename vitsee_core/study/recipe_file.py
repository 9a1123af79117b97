"""Studies that are written as files: models, what their stores keep, figures in an order.

A paper's figures are such a file (`recipe_files/`), and users write their own, in TOML:

    title = "..."                    # of the report
    note = "..."                     # what holds for all figures
    left_out = "..."                 # what the study does not show
    [data]                           # folders below --data -> what lies in them
    imagenet = "train/ and val/, a folder of each class"
    [words]                          # NAME -> text that {NAME} stands for; a list: such stores
    val = "--data imagenet/val"      # of it as there are
    [quick]                          # with --quick: text -> what takes its place
    "--data imagenet/val" = "--data demo:test --images 64"
    [stores.b16]                     # b16.zarr in commands
    model = "vit_base_patch16_224"   # as for extract
    options = "{val} --inputs"       # of extract; may name stores above, as in =mean:b16.zarr
    quick = "demo:vit"               # with --quick: the model, unless it is one of the demo; or
                                     # a class with arguments that make it small
    [[figures]]
    names = "3, C.5"                 # as the paper numbers them
    commands = ["attn-dist b16.zarr"]
    note = "..."                     # what differs, or cannot be had
    [[figures.printed]]              # a number of the paper, for the report to show beside ours
    what = "mean distance in the last layer"
    paper = 120.0
    result = "attn-dist"             # the command whose rows have it, or the stem of its -o
    where = {metric = "distance_px"} # of these rows the largest value
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from msgspec import Struct

from vitsee_core.pages.report.study_record import Printed
from vitsee_core.study.recipe_checks import (
    check_analysis,
    check_images,
    check_model_name,
    check_store_name,
)
from vitsee_stores.disk import read_regular
from vitsee_stores.errors import VitseeError, reason, reason_of_text
from vitsee_stores.schema import checked

LONGEST_ERROR = 500  # characters of what is wrong with a file in a message
MAX_FILE_BYTES = 4 << 20
# The parser's time grows with the square of a key's parts: 50,000 took a minute.
MAX_KEY_PARTS = 64
_KEY_PART = r"""(?:(?<![\w-])[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*"""
_LONG_KEY = re.compile(rf"{_KEY_PART}(?:\.[ \t]*{_KEY_PART}){{{MAX_KEY_PARTS}}}")
BUNDLED = files(__package__) / "recipe_files"
SUFFIX = ".toml"


class RecipeError(VitseeError):
    """A file that is no recipe of a study, or does not have what is asked for."""


@dataclass(frozen=True)
class Command:
    """A figure's command. words: without `vitsee`, `--png` and, mostly, `-o`; some: those of them
    that are stores of which it takes as many as there are."""

    words: tuple[str, ...]
    some: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def stores(self) -> list[str]:
        return [name for name in map(store_in, self.words) if name]


@dataclass(frozen=True)
class StoreRecipe:
    """How a store is made: see the module."""

    model: str
    options: str
    quick: str = ""

    @property
    def stores(self) -> list[str]:
        return [name for name in map(store_in, shlex.split(self.options)) if name]


@dataclass(frozen=True)
class FigureRecipe:
    """Figures that are made alike: see the module."""

    names: str
    commands: tuple[Command, ...] = ()
    note: str = ""
    printed: tuple[Printed, ...] = ()

    @property
    def stem(self) -> str:
        """The beginning of its results' names: `figure-3-c.5`, `table-4`."""
        return re.sub(r"[^a-z0-9.]+", "-", self.title.lower()).strip("-.") or "figure"

    @property
    def title(self) -> str:
        """`Figure 3, C.5`, `Table 4`."""
        if re.match(r"([A-Z]\.)?\d", self.names):
            return f"Figure {self.names}"
        return self.names


@dataclass(frozen=True)
class RecipeFile:
    """A study as a file has it, with all texts put in: see the module."""

    name: str
    title: str
    note: str
    left_out: str
    data: Mapping[str, str]
    quick: Mapping[str, str]
    stores: Mapping[str, StoreRecipe]
    figures: tuple[FigureRecipe, ...]

    def of_models(self, asked: Sequence[str]) -> RecipeFile:
        """The same of fewer or other models. asked: NAME of a store, or NAME=MODEL for another
        model; all stores if empty. Raises RecipeError: there is no such store."""
        if not asked:
            return self
        found = {}
        for text in asked:
            name, _, model = text.partition("=")
            if name not in self.stores:
                raise RecipeError(
                    f"{self.name} has no {name!r}; expected {', '.join(self.stores)}"
                )
            found[name] = replace(
                self.stores[name], **({"model": model} if model else {})
            )
        return replace(
            self, stores={name: found[name] for name in self.stores if name in found}
        )

    def of_images(self, n_images: int) -> RecipeFile:
        """The same over fewer images, or more: what `--images` says of each store, and `--erf` of
        no more."""

        def scaled(options: str) -> str:
            options = re.sub(r"--images \d+", f"--images {n_images}", options)
            return re.sub(
                r"--erf (\d+)", lambda m: f"--erf {min(int(m[1]), n_images)}", options
            )

        return self._with_options(scaled)

    def of_the_demo(self) -> RecipeFile:
        """The same of the small models and bundled images that the file names for it. Raises
        RecipeError: it does not say which."""
        bundled = {
            name: store.quick or store.model for name, store in self.stores.items()
        }
        none = [name for name, store in self.stores.items() if not store.quick]
        if lacks := [name for name in none if not bundled[name].startswith("demo:")]:
            raise RecipeError(
                f"{self.name} says no `quick` model, demo:..., of {', '.join(lacks)}"
            )

        def replaced(options: str) -> str:
            for real, stand_in in self.quick.items():
                options = options.replace(real, stand_in)
            return options

        quick = self._with_options(replaced)
        stores = {
            name: replace(store, model=bundled[name])
            for name, store in quick.stores.items()
        }
        return replace(quick, stores=stores)

    def _with_options(self, change: Callable[[str], str]) -> RecipeFile:
        """The recipe with other options of its stores. Raises RecipeError: they are no words of a
        shell, or name no images."""
        stores = dict[str, StoreRecipe]()
        for name, store in self.stores.items():
            try:
                words = _words(change(store.options), f"stores.{name}.options")
                check_images(words, f"stores.{name}.options")
            except ValueError as error:
                raise RecipeError(f"{self.name}: {error}") from None
            stores[name] = replace(store, options=shlex.join(words))
        return replace(self, stores=stores)


def store_in(word: str) -> str:
    """`b16` of `b16.zarr`, `LABEL=b16.zarr` and `cls@last=mean:b16.zarr`, "" of other words."""
    name = re.split("[=:]", word)[-1]
    if name.endswith(".zarr"):
        return name.removesuffix(".zarr")
    return ""


def bundled_recipes() -> list[str]:
    """Names of the recipes that ship with vitsee."""
    return sorted(
        item.name.removesuffix(SUFFIX)
        for item in BUNDLED.iterdir()
        if item.name.endswith(SUFFIX)
    )


def is_recipe(text: str) -> bool:
    """Whether this names a recipe, a bundled one or a file."""
    return text.endswith(SUFFIX) or text in bundled_recipes()


def read_recipe(name: str) -> RecipeFile:
    """A recipe by its name or its path. Raises RecipeError: the file cannot be read, or is no
    recipe."""
    place: Any = (
        Path(name).expanduser() if name.endswith(SUFFIX) else BUNDLED / f"{name}{SUFFIX}"
    )
    try:
        return _recipe(name, checked(read_toml(place, name), _File))
    except ValueError as error:
        raise RecipeError(f"{name}: {str(error)[:LONGEST_ERROR]}") from None


def read_toml(place: Any, name: str) -> dict[str, Any]:
    """A TOML file, of a path or a resource. name: in messages. Raises RecipeError: it cannot be
    read, or is something else."""
    try:
        is_path = isinstance(place, Path)
        data = read_regular(place, MAX_FILE_BYTES) if is_path else place.read_bytes()
        text = data.decode("utf-8-sig")
        if _LONG_KEY.search(text):
            raise ValueError(f"a key has more than {MAX_KEY_PARTS} parts")
        return tomllib.loads(text)
    except OSError as error:
        raise RecipeError(f"{name} cannot be read: {reason(error)}") from None
    except RecursionError:
        raise RecipeError(f"{name} is no TOML: it is nested too deeply") from None
    except ValueError as error:
        raise RecipeError(f"{name} is no TOML: {reason_of_text(error)}") from None


class _Store(Struct, forbid_unknown_fields=True):
    model: str
    options: str
    quick: str = ""


class _Figure(Struct, forbid_unknown_fields=True):
    names: str
    commands: list[str]
    note: str = ""
    printed: list[Printed] = []


class _File(Struct, forbid_unknown_fields=True):
    """A file as it is written: see the module."""

    title: str
    stores: dict[str, Any]
    figures: list[_Figure]
    note: str = ""
    left_out: str = ""
    data: dict[str, str] = {}
    words: dict[str, str | list[str]] = {}
    quick: dict[str, str] = {}


def _recipe(name: str, file: _File) -> RecipeFile:
    """The recipe in a file. Raises ValueError: names the place of a wrong store or word."""
    stores: dict[str, StoreRecipe] = {}
    for store, value in file.stores.items():
        where = f"stores.{store}"
        check_store_name(store)
        fields = checked(value, _Store, where)
        check_model_name(fields.model, f"{where}.model")
        check_model_name(fields.quick or fields.model, f"{where}.quick")
        options = _command(fields.options, where, file.words).words
        check_images(options, f"{where}.options")
        recipe = StoreRecipe(fields.model, shlex.join(options), fields.quick)
        if unknown := [other for other in recipe.stores if other not in stores]:
            raise ValueError(f"{where} names {unknown[0]}.zarr, expected stores above it")
        stores[store] = recipe
    figures = []
    for i, figure in enumerate(file.figures):
        where = f"figures[{i}]"
        commands = tuple(_command(text, where, file.words) for text in figure.commands)
        for number, command in enumerate(commands):
            check_analysis(command.words, f"{where}.commands[{number}]")
        if unknown := [
            one for command in commands for one in command.stores if one not in stores
        ]:
            raise ValueError(
                f"{where} names {unknown[0]}.zarr, expected stores of [stores]"
            )
        figures.append(
            FigureRecipe(figure.names, commands, figure.note, tuple(figure.printed))
        )
    return RecipeFile(
        name=name,
        title=file.title,
        note=file.note,
        left_out=file.left_out,
        data=file.data,
        quick=file.quick,
        stores=stores,
        figures=tuple(figures),
    )


def _command(text: str, where: str, words: Mapping[str, str | list[str]]) -> Command:
    """A command with its {NAME}s put in."""
    texts = list[str]()
    some = set[str]()
    for piece in re.split(r"(\{[\w-]+\})", text):
        value: str | list[str] = piece
        if piece.startswith("{"):
            if piece[1:-1] not in words:
                known = ", ".join(words)
                raise ValueError(f"{where} has {piece}, expected one of [words], {known}")
            value = words[piece[1:-1]]
        if isinstance(value, list):
            some |= {*value}
            value = " ".join(value)
        texts.append(value)
    return Command(_words("".join(texts), where), frozenset(some))


def _words(text: str, where: str) -> tuple[str, ...]:
    """The words of a command line; `--option=value` as two. Raises ValueError: a quote is open, or
    a character is not printable."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(
            f"{where} is {text}, expected words of a shell ({error})"
        ) from None
    if not "".join(words).isprintable():
        raise ValueError(
            f"{where} is {text!r}, expected words without control characters"
        )
    separate = list[str]()
    for word in words:
        option, equals, value = word.partition("=")
        separate += [option, value] if equals and word.startswith("--") else [word]
    return tuple(separate)
