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
from importlib.resources.abc import Traversable
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

MAX_ERROR_CHARS = 500  # of what is wrong with a file, which may be a stranger's
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
    """A figure's command.

    Attributes:
        words: the command line, without `vitsee`, `--png` and, mostly, `-o`.
        optional_stores: words that name stores of which the command takes as many as there are.
    """

    words: tuple[str, ...]
    optional_stores: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def stores_read(self) -> list[str]:
        """Names of the stores that the command reads."""
        return [name for name in map(store_in, self.words) if name]


@dataclass(frozen=True)
class StoreRecipe:
    """How a store is made.

    Attributes:
        model: name of the model, as for extract.
        options: options of extract, as a command line.
        quick: name of a small model in its place; "" if the model is small, or there is none.
    """

    model: str
    options: str
    quick: str = ""

    @property
    def stores_read(self) -> list[str]:
        """Names of the stores that the options read."""
        return [name for name in map(store_in, shlex.split(self.options)) if name]


@dataclass(frozen=True)
class FigureRecipe:
    """Figures that are made together, as one section of the report.

    Attributes:
        names: as the paper numbers them: `3, C.5`; or a heading.
        commands: make the figures, in order.
        note: what differs from the paper, or cannot be had.
        printed: numbers of the paper, beside which the report shows the measured ones.
    """

    names: str
    commands: tuple[Command, ...] = ()
    note: str = ""
    printed: tuple[Printed, ...] = ()

    @property
    def stem(self) -> str:
        """The beginning of the results' names: `figure-3-c.5`, `table-4`."""
        return re.sub(r"[^a-z0-9.]+", "-", self.title.lower()).strip("-.") or "figure"

    @property
    def title(self) -> str:
        """The heading: `Figure 3, C.5`, `Table 4`."""
        # A bare number is a figure's, with or without the letter of an appendix.
        if re.match(r"([A-Z]\.)?\d", self.names):
            return f"Figure {self.names}"
        return self.names


@dataclass(frozen=True)
class RecipeFile:
    """A study as a file has it, with the texts of [words] put in.

    Attributes:
        name: the name or the path that the user gives.
        title: of the report.
        note: what holds for all figures.
        left_out: what the study does not show.
        data: set of images, a folder -> what lies in it, in words.
        quick: text of options -> text that takes its place with --quick.
        stores: name -> how it is made; a store reads only those before it.
        figures: in the order of the report.
    """

    name: str
    title: str
    note: str
    left_out: str
    data: Mapping[str, str]
    quick: Mapping[str, str]
    stores: Mapping[str, StoreRecipe]
    figures: tuple[FigureRecipe, ...]

    def with_models(self, selection: Sequence[str]) -> RecipeFile:
        """Return the recipe on fewer or other models.

        Args:
            selection: NAME of a store, or NAME=MODEL for another model; all stores if empty.

        Raises:
            RecipeError: there is no such store.
        """
        if not selection:
            return self
        selected: dict[str, StoreRecipe] = {}
        for text in selection:
            name, _, model = text.partition("=")
            if name not in self.stores:
                raise RecipeError(
                    f"{self.name} has no {name!r}; expected {', '.join(self.stores)}"
                )
            store = self.stores[name]
            selected[name] = replace(store, model=model) if model else store
        # In the file's order, since a store may read those before it.
        stores = {name: selected[name] for name in self.stores if name in selected}
        return replace(self, stores=stores)

    def with_n_images(self, n_images: int) -> RecipeFile:
        """Return the recipe with every `--images N` set to n_images, and every `--erf N` capped at
        it."""

        def scale(options: str) -> str:
            """Return a store's options over n_images images."""
            options = re.sub(r"--images \d+", f"--images {n_images}", options)
            return re.sub(
                r"--erf (\d+)", lambda m: f"--erf {min(int(m[1]), n_images)}", options
            )

        return self._with_options(scale)

    def with_demo_models(self) -> RecipeFile:
        """Return the recipe on the small models and bundled images that the file names for it.

        Raises:
            RecipeError: the file names no small model for a store.
        """
        lacks = [
            name
            for name, store in self.stores.items()
            if not store.quick and not store.model.startswith("demo:")
        ]
        if lacks:
            raise RecipeError(
                f"{self.name} says no `quick` model, demo:..., of {', '.join(lacks)}"
            )

        def put_in(options: str) -> str:
            """Return a store's options with the bundled images in place of its own."""
            for text, stand_in in self.quick.items():
                options = options.replace(text, stand_in)
            return options

        quick = self._with_options(put_in)
        stores = {
            name: replace(store, model=store.quick or store.model)
            for name, store in quick.stores.items()
        }
        return replace(quick, stores=stores)

    def _with_options(self, change: Callable[[str], str]) -> RecipeFile:
        """Return the recipe with changed options of its stores.

        Args:
            change: options of a store -> its new options.

        Raises:
            RecipeError: the new options are no words of a shell, or name no images.
        """
        stores: dict[str, StoreRecipe] = {}
        for name, store in self.stores.items():
            try:
                words = _words(change(store.options), f"stores.{name}.options")
                check_images(words, f"stores.{name}.options")
            except ValueError as error:
                raise RecipeError(f"{self.name}: {error}") from None
            stores[name] = replace(store, options=shlex.join(words))
        return replace(self, stores=stores)


def store_in(word: str) -> str:
    """Return the store that a word of a command names: `b16` for `b16.zarr`, `LABEL=b16.zarr` and
    `cls@last=mean:b16.zarr`; "" for other words."""
    name = re.split("[=:]", word)[-1]
    if name.endswith(".zarr"):
        return name.removesuffix(".zarr")
    return ""


def bundled_recipes() -> list[str]:
    """Return the names of the recipes that ship with vitsee, sorted."""
    return sorted(
        item.name.removesuffix(SUFFIX)
        for item in BUNDLED.iterdir()
        if item.name.endswith(SUFFIX)
    )


def is_recipe(text: str) -> bool:
    """Return whether a word names a recipe, a bundled one or a file, and not a model."""
    return text.endswith(SUFFIX) or text in bundled_recipes()


def read_recipe(name: str) -> RecipeFile:
    """Read a recipe.

    Args:
        name: of a bundled recipe, or the path of a TOML file.

    Raises:
        RecipeError: the file cannot be read, or is no recipe.
    """
    path: Path | Traversable = BUNDLED / f"{name}{SUFFIX}"
    if name.endswith(SUFFIX):
        path = Path(name).expanduser()
    try:
        return _check_file(name, checked(read_toml(path, name), _File))
    except ValueError as error:
        raise RecipeError(f"{name}: {str(error)[:MAX_ERROR_CHARS]}") from None


def read_toml(path: Path | Traversable, name: str) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: of the file, or a resource of the package.
        name: what messages call it.

    Raises:
        RecipeError: the file cannot be read, or is not TOML.
    """
    try:
        if isinstance(path, Path):
            data = read_regular(path, MAX_FILE_BYTES)
        else:
            data = path.read_bytes()
        # utf-8-sig: editors on Windows write a mark before the text.
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
    """[stores.NAME] as it is written; an unknown key is refused, as it may be a mistyped one."""

    model: str
    options: str
    quick: str = ""


class _Figure(Struct, forbid_unknown_fields=True):
    """[[figures]] as it is written."""

    names: str
    commands: list[str]
    note: str = ""
    printed: list[Printed] = []


class _File(Struct, forbid_unknown_fields=True):
    """The file as it is written; the module's docstring has the keys."""

    title: str
    stores: dict[str, Any]  # each is checked on its own, so that messages name it
    figures: list[_Figure]
    note: str = ""
    left_out: str = ""
    data: dict[str, str] = {}
    words: dict[str, str | list[str]] = {}
    quick: dict[str, str] = {}


def _check_file(name: str, file: _File) -> RecipeFile:
    """Return the recipe that a file holds, with the texts of its [words] put in.

    Args:
        name: the name or the path that the user gives.
        file: the parsed file.

    Raises:
        ValueError: names the wrong store, figure or word.
    """
    stores: dict[str, StoreRecipe] = {}
    for store_name, value in file.stores.items():
        where = f"stores.{store_name}"
        check_store_name(store_name)
        fields = checked(value, _Store, where)
        check_model_name(fields.model, f"{where}.model")
        check_model_name(fields.quick or fields.model, f"{where}.quick")
        options = _command(fields.options, where, file.words).words
        check_images(options, f"{where}.options")
        store_recipe = StoreRecipe(fields.model, shlex.join(options), fields.quick)
        for other in store_recipe.stores_read:
            # No store can be made before itself: the order of the file is that of the steps.
            if other not in stores:
                raise ValueError(f"{where} names {other}.zarr, expected stores above it")
        stores[store_name] = store_recipe
    figures = []
    for i, figure in enumerate(file.figures):
        where = f"figures[{i}]"
        commands = [_command(text, where, file.words) for text in figure.commands]
        for number, command in enumerate(commands):
            check_analysis(command.words, f"{where}.commands[{number}]")
        for command in commands:
            for other in command.stores_read:
                if other not in stores:
                    raise ValueError(
                        f"{where} names {other}.zarr, expected stores of [stores]"
                    )
        figures.append(
            FigureRecipe(
                names=figure.names,
                commands=tuple(commands),
                note=figure.note,
                printed=tuple(figure.printed),
            )
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
    """Return a command with its {NAME}s put in.

    Args:
        text: a command line.
        where: the place in the file, for messages.
        words: NAME -> its text, or the stores that it stands for.

    Raises:
        ValueError: a {NAME} has no text, or the text is no command line.
    """
    texts: list[str] = []
    optional_stores: set[str] = set()
    # The group makes `split` return the {NAME}s between the other text.
    for piece in re.split(r"(\{[\w-]+\})", text):
        value: str | list[str] = piece
        if piece.startswith("{"):
            name = piece[1:-1]
            if name not in words:
                raise ValueError(
                    f"{where} has {piece}, expected one of [words], {', '.join(words)}"
                )
            value = words[name]
        if isinstance(value, list):
            optional_stores.update(value)
            value = " ".join(value)
        texts.append(value)
    return Command(_words("".join(texts), where), frozenset(optional_stores))


def _words(text: str, where: str) -> tuple[str, ...]:
    """Return the words of a command line, `--option=value` as two.

    Raises:
        ValueError: a quote is open, or a character is not printable.
    """
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
    # As two words an option can be replaced or scaled by its name.
    separate: list[str] = []
    for word in words:
        option, equals, value = word.partition("=")
        if equals and word.startswith("--"):
            separate += [option, value]
        else:
            separate.append(word)
    return tuple(separate)
