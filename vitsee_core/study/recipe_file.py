"""Studies that are written as files, and their steps: models, stores, figures in an order.

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

import importlib
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from vitsee_core.images import open_source
from vitsee_core.report.study_record import Printed
from vitsee_core.study.steps import SETS, Plan, Step, Study
from vitsee_stores.errors import VitseeError, reason
from vitsee_stores.schema import checked

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
    def title(self) -> str:
        """`Figure 3, C.5`, `Table 4`."""
        return f"Figure {self.names}" if re.match(r"([A-Z]\.)?\d", self.names) else self.names


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
                raise RecipeError(f"{self.name} has no {name!r}; expected {', '.join(self.stores)}")
            found[name] = replace(self.stores[name], **({"model": model} if model else {}))
        return replace(self, stores={name: found[name] for name in self.stores if name in found})

    def of_images(self, n_images: int) -> RecipeFile:
        """The same over fewer images, or more: what `--images` says of each store, and `--erf` of
        no more."""

        def scaled(options: str) -> str:
            options = re.sub(r"--images \d+", f"--images {n_images}", options)
            return re.sub(r"--erf (\d+)", lambda m: f"--erf {min(int(m[1]), n_images)}", options)

        return self._with_options(scaled)

    def of_the_demo(self) -> RecipeFile:
        """The same of the small models and bundled images that the file names for it. Raises
        RecipeError: it does not say which."""
        bundled = {name: store.quick or store.model for name, store in self.stores.items()}
        none = [name for name, store in self.stores.items() if not store.quick]
        if lacks := [name for name in none if not bundled[name].startswith("demo:")]:
            raise RecipeError(f"{self.name} says no `quick` model, demo:..., of {', '.join(lacks)}")

        def replaced(options: str) -> str:
            for real, stand_in in self.quick.items():
                options = options.replace(real, stand_in)
            return options

        quick = self._with_options(replaced)
        stores = {name: replace(store, model=bundled[name]) for name, store in quick.stores.items()}
        return replace(quick, stores=stores)

    def _with_options(self, change: Callable[[str], str]) -> RecipeFile:
        stores = {
            name: replace(store, options=change(store.options))
            for name, store in self.stores.items()
        }
        return replace(self, stores=stores)


def store_in(word: str) -> str:
    """`b16` of `b16.zarr`, `LABEL=b16.zarr` and `cls@last=mean:b16.zarr`, "" of other words."""
    name = re.split("[=:]", word)[-1]
    return name.removesuffix(".zarr") if name.endswith(".zarr") else ""


def bundled_recipes() -> list[str]:
    """Names of the recipes that ship with vitsee."""
    return sorted(
        item.name.removesuffix(SUFFIX) for item in BUNDLED.iterdir() if item.name.endswith(SUFFIX)
    )


def is_recipe(text: str) -> bool:
    """Whether this names a recipe, a bundled one or a file."""
    return text.endswith(SUFFIX) or text in bundled_recipes()


def read_recipe(name: str) -> RecipeFile:
    """A recipe by its name or its path. Raises RecipeError: the file cannot be read, or is no
    recipe."""
    place: Any = Path(name).expanduser() if name.endswith(SUFFIX) else BUNDLED / f"{name}{SUFFIX}"
    try:
        return _recipe(name, checked(read_toml(place, name), _File))
    except ValueError as error:
        raise RecipeError(f"{name}: {error}") from None


def read_toml(place: Any, name: str) -> dict[str, Any]:
    """A TOML file, of a path or a resource. name: in messages. Raises RecipeError: it cannot be
    read, or is something else."""
    try:
        return tomllib.loads(place.read_text("utf-8"))
    except OSError as error:
        raise RecipeError(f"{name} cannot be read: {reason(error)}") from None
    except ValueError as error:
        raise RecipeError(f"{name} is no TOML: {error}") from None


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
        given = checked(value, _Store, where)
        options = str(_command(given.options, where, file.words))
        made = StoreRecipe(given.model, options, given.quick)
        if unknown := [one for one in made.stores if one not in stores]:
            raise ValueError(f"{where} names {unknown[0]}.zarr, expected stores above it")
        stores[store] = made
    figures = []
    for i, figure in enumerate(file.figures):
        where = f"figures[{i}]"
        commands = tuple(_command(text, where, file.words) for text in figure.commands)
        if unknown := [one for command in commands for one in command.stores if one not in stores]:
            raise ValueError(f"{where} names {unknown[0]}.zarr, expected stores of [stores]")
        figures.append(FigureRecipe(figure.names, commands, figure.note, tuple(figure.printed)))
    texts = file.title, file.note, file.left_out, file.data, file.quick
    return RecipeFile(name, *texts, stores, tuple(figures))


def _command(text: str, where: str, words: Mapping[str, str | list[str]]) -> Command:
    """A command with its {NAME}s put in."""
    found, some = list[str](), set[str]()
    for part in re.split(r"(\{[\w-]+\})", text):
        value: str | list[str] = part
        if part.startswith("{"):
            if part[1:-1] not in words:
                known = ", ".join(words)
                raise ValueError(f"{where} has {part}, expected one of [words], {known}")
            value = words[part[1:-1]]
        if isinstance(value, list):
            some |= {*value}
            value = " ".join(value)
        found.append(value)
    try:
        return Command(tuple(shlex.split("".join(found))), frozenset(some))
    except ValueError as error:
        raise ValueError(f"{where} is {text}, expected words of a shell ({error})") from None


# The bundled miniature of a set of images -> the module of `demo` that writes it.
MINIATURES = {"coco": "coco", "DAVIS": "davis", "roxford5k": "revisited", "SPair-71k": "spair"}
ABSENT = "it is not among --models"
RESULT = re.compile(r"[\w.+-]+\.(csv|png)")


def data_places(recipe: RecipeFile, given: str) -> dict[str, Path]:
    """Set of images -> where it is. given: the folder in which all are, or `NAME=FOLDER` of each,
    with commas between. Raises RecipeError: the recipe has no such set."""
    if "=" not in given:
        return {name: Path(given).expanduser() / name for name in recipe.data}
    pairs = [part.partition("=") for part in given.split(",")]
    if unknown := [name for name, _, _ in pairs if name not in recipe.data]:
        raise RecipeError(
            f"--data {given}: {recipe.name} has no {unknown[0]!r}; expected FOLDER, or NAME=FOLDER "
            f"of {', '.join(recipe.data)}"
        )
    return {name: Path(place).expanduser() for name, _, place in pairs}


def plan_recipe(recipe: RecipeFile, study: Study, places: Mapping[str, Path] | None) -> Plan:
    """The steps of a recipe. What needs images or models that are not there is left out.

    Args:
        recipe: of these models and numbers of images.
        study: its folder, choice of analyses, settings, seed and device.
        places: set of images -> its folder; None for the bundled miniatures, which steps write.

    Raises:
        RecipeError: nothing is left.
    """
    plan = _Planned(recipe, study, places).plan()
    if not plan.steps:
        reasons = "; ".join(dict.fromkeys(plan.left_out.values()))
        raise RecipeError(f"{recipe.name}: nothing to do: {reasons or 'no figure takes these'}")
    return plan


def n_images(step: Step) -> int:
    """How many images an extraction is of, 0 where they are not there yet."""
    given = dict(pairwise(step.words))
    try:
        labels = open_source(given["--data"]).labels
    except VitseeError:
        return 0
    if (most := given.get("--per-class")) is not None:
        counts = np.unique(labels[labels >= 0], return_counts=True)[1]
        return int(np.minimum(counts, int(most)).sum())
    return min(len(labels), int(given.get("--images", len(labels))))


class _Planned:
    def __init__(self, recipe: RecipeFile, study: Study, places: Mapping[str, Path] | None) -> None:
        self.recipe, self.study = recipe, study
        sets = study.folder / SETS
        self.places = {name: sets / name for name in MINIATURES} if places is None else places
        self.writes = places is None
        self.made: dict[str, Step] = {}  # store -> its step
        self.sets: dict[str, Step] = {}
        self.plan_ = Plan()

    def plan(self) -> Plan:
        lacking = dict[str, str]()
        for name, store in self.recipe.stores.items():
            before = [lacking.get(one, ABSENT) for one in store.stores]
            lacking[name] = next(filter(None, before), self._lacks(shlex.split(store.options)))
        for figure in self.recipe.figures:
            self._figure(figure, lacking)
        # In the file's order.
        stores = [self.made[name] for name in self.recipe.stores if name in self.made]
        self.plan_.extractions = [*self.sets.values(), *stores]
        return self.plan_

    def _figure(self, figure: FigureRecipe, lacking: Mapping[str, str]) -> None:
        steps = list[Step]()
        stem = re.sub(r"[^a-z0-9.]+", "-", figure.title.lower()).strip("-")
        for number, command in enumerate(figure.commands, 1):
            if not self.study.takes(command.words[0]):
                continue
            name = f"{stem}-{command.words[0]}"
            name += f"-{number}" if len(figure.commands) > 1 else ""
            if "-o" in command.words:
                name = Path(command.words[command.words.index("-o") + 1]).stem
            there, reason = self._there(command, lacking, steps)
            if reason:
                self.plan_.left_out[f"{figure.title} ({command.words[0]})"] = reason
            else:
                steps.append(self._step(name, there))
        self.plan_.analyses += steps
        if steps:
            self.plan_.sections.append({
                "title": figure.title, "note": figure.note,
                "results": [step.outputs[0].stem for step in steps],
                "printed": [msgspec.structs.asdict(number) for number in figure.printed],
            })  # fmt: skip

    def _there(
        self, command: Command, lacking: Mapping[str, str], before: Sequence[Step]
    ) -> tuple[Command, str]:
        """The command on the stores that can be made; and why it cannot be run, or ""."""
        known = {word: lacking.get(name, ABSENT)
                 for word in command.words if (name := store_in(word))}  # fmt: skip
        words = tuple(w for w in command.words if w not in command.some or not known.get(w))
        reasons = [why for word in words if (why := known.get(word))]
        if command.some and not {*words} & command.some:
            reasons = [*known.values()]
        made = {path.name for step in (*self.plan_.analyses, *before) for path in step.outputs}
        missing = [word for word in self._tables(words) if word not in made]
        reasons += [f"{word} is not made" for word in missing]
        reasons += [why for why in [self._lacks(words)] if why]
        return Command(words, command.some), reasons[0] if reasons else ""

    @staticmethod
    def _tables(words: Sequence[str]) -> list[str]:
        """Results of earlier commands that a command reads."""
        pairs = pairwise(words)
        return [word for before, word in pairs
                if RESULT.fullmatch(word) and not before.startswith("-")]  # fmt: skip

    def _step(self, name: str, command: Command) -> Step:
        inputs, words, more = list[Path](), list[str](), list[Path]()
        output = self.study.result(name, command.words[0])
        if "-o" in command.words:
            output = output.with_name(command.words[command.words.index("-o") + 1])
        for before, word in pairwise(("", *command.words)):
            if "-o" in (before, word):
                continue
            if store := store_in(word):
                path = self._store(store)
                inputs.append(path)
                word = f"{word.removesuffix(f'{store}.zarr')}{path}"
            elif RESULT.fullmatch(word):
                path = output.with_name(word)
                (more if before.startswith("--") else inputs).append(path)
                word = str(path)
            else:
                word = self._placed(word)
            words.append(word)
        options = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        own = self.study.with_settings(words[0], words[options:])
        picture = output.with_suffix(".png")
        ending = ("-o", str(output), "--png", str(picture), "--force")
        return Step(
            name, (*words[:options], *own, *ending), tuple(inputs), (output, picture, *more),
            partial=bool(command.some),
        )  # fmt: skip

    def _store(self, name: str) -> Path:
        """A store, that a step makes."""
        place = self.study.store(name)
        if name not in self.made:
            store = self.recipe.stores[name]
            words = [self._placed(word) for word in shlex.split(store.options)]
            read = [self._store(one) for one in store.stores]
            for number, word in enumerate(words):
                if one := store_in(word):
                    words[number] = f"{word.removesuffix(f'{one}.zarr')}{self.study.store(one)}"
            words += ["--seed", str(self.study.seed)] if self.study.seed else []
            words += ["--device", self.study.device] if self.study.device != "auto" else []
            words = [*self.study.with_settings("extract", words)]
            inputs = tuple(step.outputs[0] for step in self.sets.values())
            self.made[name] = Step(
                f"extract-{name}",
                ("extract", store.model, *words, "-o", str(place)),
                (*(p for p in inputs if any(w.startswith(str(p)) for w in words)), *read),
                (place,),
            )
        return place

    def _set_of(self, word: str) -> str:
        name = word.partition("/")[0]
        return name if name in self.recipe.data else ""

    def _lacks(self, words: Sequence[str]) -> str:
        """Why words cannot be run: a set of images is not there."""
        for word in words:
            if not (name := self._set_of(word)) or (self.writes and name in MINIATURES):
                continue
            place = self.places.get(name)
            if place is None or not (place / word[len(name) + 1 :]).exists():
                where = "not given with --data" if place is None else f"not at {place}"
                return f"{word} ({self.recipe.data[name]}) is {where}"
        return ""

    def _placed(self, word: str) -> str:
        """A word with its set of images where that is; a step writes it if it is a miniature."""
        if not (name := self._set_of(word)):
            return word
        if self.writes and name not in self.sets:
            self.sets[name] = _written(self.places[name], MINIATURES[name])
        return str(self.places[name] / word[len(name) + 1 :])


def _written(folder: Path, module: str) -> Step:
    def write() -> None:
        made_by: Any = importlib.import_module(f"vitsee_core.demo.{module}")
        writer: Callable[[Path], None] = vars(made_by)[f"write_{module}"]
        writer(folder)

    text = f"from vitsee_core.demo.{module} import write_{module}; "
    words = ("python", "-c", f"{text}write_{module}({str(folder)!r})")
    return Step(f"set-{folder.name}", words, (), (folder,), make=write)
