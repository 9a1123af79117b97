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
    "coco": "coco",
    "DAVIS": "davis",
    "roxford5k": "revisited",
    "SPair-71k": "spair",
    "ssv2": "moving",
}
ABSENT = "it is not among --models"
RESULT = re.compile(r"[\w.+-]+\.(csv|png)")


def data_places(recipe: RecipeFile, data: str) -> dict[str, Path]:
    """Return the folder of each set of images of a recipe.

    Args:
        recipe: its `data` names the sets.
        data: the folder in which all are, or `NAME=FOLDER` of each, with commas between.

    Raises:
        RecipeError: the recipe has no such set.
    """
    if "=" not in data:
        return {name: Path(data).expanduser() / name for name in recipe.data}
    folders = {}
    for text in data.split(","):
        name, _, folder = text.partition("=")
        if name not in recipe.data:
            raise RecipeError(
                f"--data {data}: {recipe.name} has no {name!r}; expected FOLDER, or "
                f"NAME=FOLDER of {', '.join(recipe.data)}"
            )
        folders[name] = Path(folder).expanduser()
    return folders


def plan_recipe(
    recipe: RecipeFile, study: Study, folders: Mapping[str, Path] | None
) -> Plan:
    """Return the steps of a recipe, and what it leaves out as its images or models are not there.

    Args:
        recipe: the file, with its models and numbers of images chosen.
        study: its folder, choice of analyses, settings, seed and device.
        folders: set of images -> its folder; None for the bundled miniatures, which steps write.

    Raises:
        RecipeError: no step is left, or two results have one name.
    """
    plan = _RecipePlanner(recipe, study, folders).make_plan()
    if not plan.steps:
        reasons = "; ".join(dict.fromkeys(plan.left_out.values()))
        raise RecipeError(
            f"{recipe.name}: nothing to do: {reasons or 'no figure takes these'}"
        )
    return plan


def n_images(step: Step) -> int:
    """Return the number of images that an extraction reads; 0 if they are not there yet."""
    options = dict(pairwise(step.words))
    try:
        labels = open_source(options["--data"]).labels
    except VitseeError:
        return 0
    # A number that is none is refused by extract.
    per_class = options.get("--per-class", "")
    if per_class.isdecimal():
        counts = np.unique(labels[labels >= 0], return_counts=True)[1]
        return int(np.minimum(counts, int(per_class)).sum())
    requested = options.get("--images", "")
    if requested.isdecimal():
        return min(len(labels), int(requested))
    return len(labels)


class _RecipePlanner:
    """Makes the steps of a recipe: those of a figure, and on demand the stores and the sets of
    images that it reads."""

    def __init__(
        self, recipe: RecipeFile, study: Study, folders: Mapping[str, Path] | None
    ) -> None:
        """Prepare a plan. folders: set of images -> its folder; None for the miniatures."""
        self._recipe = recipe
        self._study = study
        self._writes_sets = folders is None
        if folders is None:
            folders = {name: study.folder / SETS / name for name in MINIATURES}
        self._folders = folders
        self._extractions: dict[str, Step] = {}  # store -> the step that makes it
        self._set_steps: dict[str, Step] = {}  # set of images -> the step that writes it
        self._result_names: set[str] = set()
        self._plan = Plan()

    def make_plan(self) -> Plan:
        """Return the plan; called once."""
        # Store -> why it cannot be made, "" if it can. Stores name only those above them.
        lacks: dict[str, str] = {}
        for name, store in self._recipe.stores.items():
            reasons = [lacks.get(other, ABSENT) for other in store.stores_read]
            reasons.append(self._absent_images(shlex.split(store.options)))
            lacks[name] = next(filter(None, reasons), "")
        for figure in self._recipe.figures:
            self._add_figure(figure, lacks)
        # In the file's order, whichever figure needs a store first.
        stores = [name for name in self._recipe.stores if name in self._extractions]
        extractions = [self._extractions[name] for name in stores]
        self._plan.extractions = [*self._set_steps.values(), *extractions]
        return self._plan

    def _add_figure(self, figure: FigureRecipe, lacks: Mapping[str, str]) -> None:
        """Add a figure's steps and its section of the report to the plan.

        Args:
            figure: the figure.
            lacks: store -> why it cannot be made, "" if it can.

        Raises:
            RecipeError: a result's name is taken, or the disk cannot have it.
        """
        steps: list[Step] = []
        for number, command in enumerate(figure.commands, 1):
            analysis = command.words[0]
            if not self._study.takes(analysis):
                continue
            name = f"{figure.stem}-{analysis}"
            if len(figure.commands) > 1:
                name += f"-{number}"
            if "-o" in command.words:
                name = stem_of(Path(_value_of(command.words, "-o")))
            self._check_result_name(name, figure)
            command, reason = self._on_available_stores(command, lacks, steps)
            if reason:
                self._plan.left_out[f"{figure.title} ({analysis})"] = reason
            else:
                steps.append(self._analysis_step(name, command))
        self._plan.analyses += steps
        if steps:
            section = {
                "title": figure.title,
                "note": figure.note,
                "results": [step.outputs[0].stem for step in steps],
                "printed": [msgspec.structs.asdict(number) for number in figure.printed],
            }
            self._plan.sections.append(section)

    def _check_result_name(self, name: str, figure: FigureRecipe) -> None:
        """Refuse the name of a result that the disk cannot have, or that another has.

        Raises:
            RecipeError: names the figure.
        """
        where = f"{self._recipe.name}: {figure.title[:MAX_SHOWN_CHARS]}"
        try:
            check_name(name, f"{where}: its result")
        except ValueError as error:
            raise RecipeError(str(error)) from None
        if name in self._result_names:
            raise RecipeError(
                f"{where}: another result is called {name}; say -o NAME.csv of both"
            )
        self._result_names.add(name)

    def _on_available_stores(
        self, command: Command, lacks: Mapping[str, str], figure_steps: Sequence[Step]
    ) -> tuple[Command, str]:
        """Return the command on the stores that can be made, and why it cannot run ("" if it can).

        Args:
            command: the command.
            lacks: store -> why it cannot be made, "" if it can.
            figure_steps: the figure's steps before, which are not in the plan yet.
        """
        # Word of the command that names a store -> why that cannot be made.
        lack_of_word = {
            word: lacks.get(store_in(word), ABSENT)
            for word in command.words
            if store_in(word)
        }
        words = tuple(
            word
            for word in command.words
            if word not in command.optional_stores or not lack_of_word.get(word)
        )
        reasons = [lack_of_word[w] for w in words if lack_of_word.get(w)]
        if command.optional_stores and command.optional_stores.isdisjoint(words):
            reasons = [*lack_of_word.values()]
        results: set[str] = set()
        for step in (*self._plan.analyses, *figure_steps):
            results.update(path.name for path in step.outputs)
        for before, word in pairwise(words):
            # Results that an option names are written, those without one are read.
            is_read = RESULT.fullmatch(word) and not before.startswith("-")
            if is_read and word not in results:
                reasons.append(f"{word} is not made")
        absent_images = self._absent_images(words)
        if absent_images:
            reasons.append(absent_images)
        reason = reasons[0] if reasons else ""
        return Command(words, command.optional_stores), reason

    def _analysis_step(self, name: str, command: Command) -> Step:
        """Return the step of a command, whose words name files where the study has them.

        Args:
            name: of the step and its result.
            command: on stores that can be made; steps that make them are added.
        """
        output = self._study.result(name, command.words[0])
        if "-o" in command.words:
            output = output.with_name(_value_of(command.words, "-o"))
        picture = output.with_suffix(".png")
        inputs: list[Path] = []
        outputs = [output, picture]
        words: list[str] = []
        for before, word in pairwise(("", *command.words)):
            if "-o" in (before, word):
                continue
            store = store_in(word)
            if store:
                path = self._store_path(store)
                inputs.append(path)
                word = _with_path(word, store, path)
            elif RESULT.fullmatch(word):
                path = output.with_name(word)
                # An option names a file that the command writes beside its table.
                if before.startswith("--"):
                    outputs.append(path)
                else:
                    inputs.append(path)
                word = str(path)
            else:
                word = self._with_set_folder(word)
            words.append(word)
        # Behind the stores are options, which the user's settings replace.
        n_before = next(
            (i for i, w in enumerate(words) if w.startswith("--")), len(words)
        )
        options = self._study.with_settings(words[0], words[n_before:])
        words = [*words[:n_before], *options]
        words += ["-o", str(output), "--png", str(picture), "--force"]
        return Step(
            name,
            tuple(words),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            partial=bool(command.optional_stores),
        )

    def _store_path(self, name: str) -> Path:
        """Return the path of a store, which a step of the plan makes from now on."""
        store_path = self._study.store(name)
        if name in self._extractions:
            return store_path
        store = self._recipe.stores[name]
        words = [self._with_set_folder(word) for word in shlex.split(store.options)]
        # Stores that this one reads, as those of replacements: `=mean:b16.zarr`.
        read_stores = [self._store_path(other) for other in store.stores_read]
        for i, word in enumerate(words):
            other = store_in(word)
            if other:
                words[i] = _with_path(word, other, self._study.store(other))
        if self._study.seed:
            words += ["--seed", str(self._study.seed)]
        if self._study.device != "auto":
            words += ["--device", self._study.device]
        words = [*self._study.with_settings("extract", words)]
        set_folders = [step.outputs[0] for step in self._set_steps.values()]
        read_folders = [
            folder
            for folder in set_folders
            if any(word.startswith(str(folder)) for word in words)
        ]
        self._extractions[name] = Step(
            f"extract-{name}",
            ("extract", store.model, *words, "-o", str(store_path)),
            inputs=(*read_folders, *read_stores),
            outputs=(store_path,),
        )
        return store_path

    def _image_set(self, word: str) -> str:
        """Return the set of images of a path that begins with its name, "" for other words."""
        name = word.partition("/")[0]
        return name if name in self._recipe.data else ""

    def _absent_images(self, words: Sequence[str]) -> str:
        """Return which set of images of a command is not there, "" if all are."""
        for word in words:
            name = self._image_set(word)
            if not name or (self._writes_sets and name in MINIATURES):
                continue
            folder = self._folders.get(name)
            if folder is None:
                where = "not given with --data"
            elif not (folder / word[len(name) + 1 :]).exists():
                where = f"not at {folder}"
            else:
                continue
            return f"{word} ({self._recipe.data[name]}) is {where}"
        return ""

    def _with_set_folder(self, word: str) -> str:
        """Return a word with the path of its set of images; from now on a step of the plan writes
        the set if it is a miniature."""
        name = self._image_set(word)
        if not name:
            return word
        folder = self._folders[name]
        if self._writes_sets and name not in self._set_steps:
            self._set_steps[name] = _write_step(folder, MINIATURES[name])
        return str(folder / word[len(name) + 1 :])


def _value_of(words: Sequence[str], option: str) -> str:
    """Return the word behind an option."""
    return words[words.index(option) + 1]


def _with_path(word: str, store: str, path: Path) -> str:
    """Return `LABEL=b16.zarr` with the store's path: `LABEL=out/stores/b16.zarr`."""
    return f"{word.removesuffix(f'{store}.zarr')}{path}"


def _write_step(folder: Path, module: str) -> Step:
    """Return the step that writes a miniature set. module: of `vitsee_core.demo`."""

    def write() -> None:
        """Write the set."""
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

    code = f"from vitsee_core.demo.{module} import write_{module}; "
    code += f"write_{module}({str(folder)!r})"
    return Step(
        f"set-{folder.name}", ("python", "-c", code), outputs=(folder,), make=write
    )
