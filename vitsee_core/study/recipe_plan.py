"""The steps of a study that is written as a file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from vitsee_core.images import open_source
from vitsee_core.study.recipe_file import (
    Command,
    FigureRecipe,
    RecipeError,
    RecipeFile,
    store_in,
)
from vitsee_core.study.steps import SETS, Plan, Step, Study
from vitsee_core.tables.formats import stem_of
from vitsee_stores.errors import VitseeError
from vitsee_stores.schema import MAX_SHOWN_CHARS, check_name

# The bundled miniature of a set of images -> the module of `demo` that writes it.
MINIATURES = {
    **{"coco": "coco", "DAVIS": "davis", "roxford5k": "revisited", "SPair-71k": "spair"},
    "ssv2": "moving",
}
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


def plan_recipe(
    recipe: RecipeFile, study: Study, places: Mapping[str, Path] | None
) -> Plan:
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
        raise RecipeError(
            f"{recipe.name}: nothing to do: {reasons or 'no figure takes these'}"
        )
    return plan


def n_images(step: Step) -> int:
    """How many images an extraction is of, 0 where they are not there yet."""
    options = dict(pairwise(step.words))
    try:
        labels = open_source(options["--data"]).labels
    except VitseeError:
        return 0
    if (per_class := options.get("--per-class", "")).isdecimal():
        counts = np.unique(labels[labels >= 0], return_counts=True)[1]
        return int(np.minimum(counts, int(per_class)).sum())
    asked = options.get("--images", "")  # what is not a number is refused by extract
    if asked.isdecimal():
        return min(len(labels), int(asked))
    return len(labels)


class _Planned:
    def __init__(
        self, recipe: RecipeFile, study: Study, places: Mapping[str, Path] | None
    ) -> None:
        self.recipe = recipe
        self.study = study
        sets = study.folder / SETS
        self.places = (
            {name: sets / name for name in MINIATURES} if places is None else places
        )
        self.writes = places is None
        self.made: dict[str, Step] = {}  # store -> its step
        self.sets: dict[str, Step] = {}
        self.results: set[str] = set()  # the names of the steps of figures
        self.plan_ = Plan()

    def plan(self) -> Plan:
        lacking = dict[str, str]()
        for name, store in self.recipe.stores.items():
            before = [lacking.get(one, ABSENT) for one in store.stores]
            lacking[name] = next(
                filter(None, before), self._lacks(shlex.split(store.options))
            )
        for figure in self.recipe.figures:
            self._figure(figure, lacking)
        # In the file's order.
        stores = [self.made[name] for name in self.recipe.stores if name in self.made]
        self.plan_.extractions = [*self.sets.values(), *stores]
        return self.plan_

    def _figure(self, figure: FigureRecipe, lacking: Mapping[str, str]) -> None:
        steps = list[Step]()
        for number, command in enumerate(figure.commands, 1):
            if not self.study.takes(command.words[0]):
                continue
            name = f"{figure.stem}-{command.words[0]}"
            name += f"-{number}" if len(figure.commands) > 1 else ""
            if "-o" in command.words:
                name = stem_of(Path(command.words[command.words.index("-o") + 1]))
            self._check_new(name, figure)
            there, reason = self._there(command, lacking, steps)
            if reason:
                self.plan_.left_out[f"{figure.title} ({command.words[0]})"] = reason
            else:
                steps.append(self._step(name, there))
        self.plan_.analyses += steps
        if steps:
            self.plan_.sections.append(
                {
                    "title": figure.title,
                    "note": figure.note,
                    "results": [step.outputs[0].stem for step in steps],
                    "printed": [
                        msgspec.structs.asdict(number) for number in figure.printed
                    ],
                }
            )

    def _check_new(self, name: str, figure: FigureRecipe) -> None:
        """Refuse the name of a result that the disk cannot have, or that another has. Raises
        RecipeError: names the figure."""
        where = f"{self.recipe.name}: {figure.title[:MAX_SHOWN_CHARS]}"
        try:
            check_name(name, f"{where}: its result")
        except ValueError as error:
            raise RecipeError(str(error)) from None
        if name in self.results:
            raise RecipeError(
                f"{where}: another result is called {name}; say -o NAME.csv of both"
            )
        self.results.add(name)

    def _there(
        self, command: Command, lacking: Mapping[str, str], before: Sequence[Step]
    ) -> tuple[Command, str]:
        """The command on the stores that can be made; and why it cannot be run, or ""."""
        known = {
            word: lacking.get(name, ABSENT)
            for word in command.words
            if (name := store_in(word))
        }
        words = tuple(
            w for w in command.words if w not in command.some or not known.get(w)
        )
        reasons = [why for word in words if (why := known.get(word))]
        if command.some and not {*words} & command.some:
            reasons = [*known.values()]
        made = {
            path.name for step in (*self.plan_.analyses, *before) for path in step.outputs
        }
        missing = [word for word in self._tables(words) if word not in made]
        reasons += [f"{word} is not made" for word in missing]
        reasons += [why for why in [self._lacks(words)] if why]
        return Command(words, command.some), reasons[0] if reasons else ""

    @staticmethod
    def _tables(words: Sequence[str]) -> list[str]:
        """Results of earlier commands that a command reads."""
        pairs = pairwise(words)
        return [
            word
            for before, word in pairs
            if RESULT.fullmatch(word) and not before.startswith("-")
        ]

    def _step(self, name: str, command: Command) -> Step:
        inputs = list[Path]()
        words = list[str]()
        more = list[Path]()
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
        options = next(
            (i for i, word in enumerate(words) if word.startswith("--")), len(words)
        )
        own = self.study.with_settings(words[0], words[options:])
        picture = output.with_suffix(".png")
        ending = ("-o", str(output), "--png", str(picture), "--force")
        return Step(
            name,
            (*words[:options], *own, *ending),
            tuple(inputs),
            (output, picture, *more),
            partial=bool(command.some),
        )

    def _store(self, name: str) -> Path:
        """A store, that a step makes."""
        place = self.study.store(name)
        if name not in self.made:
            store = self.recipe.stores[name]
            words = [self._placed(word) for word in shlex.split(store.options)]
            read = [self._store(one) for one in store.stores]
            for number, word in enumerate(words):
                if one := store_in(word):
                    words[number] = (
                        f"{word.removesuffix(f'{one}.zarr')}{self.study.store(one)}"
                    )
            words += ["--seed", str(self.study.seed)] if self.study.seed else []
            words += (
                ["--device", self.study.device] if self.study.device != "auto" else []
            )
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
        # Imported when a set is written: planning needs none of them.
        from vitsee_core.demo import coco, davis, moving, revisited, spair

        writers: dict[str, Callable[[Path], None]] = {
            "coco": coco.write_coco,
            "davis": davis.write_davis,
            "moving": moving.write_moving,
            "revisited": revisited.write_revisited,
            "spair": spair.write_spair,
        }
        writers[module](folder)

    text = f"from vitsee_core.demo.{module} import write_{module}; "
    words = ("python", "-c", f"{text}write_{module}({str(folder)!r})")
    return Step(f"set-{folder.name}", words, (), (folder,), make=write)
