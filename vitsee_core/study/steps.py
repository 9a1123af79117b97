"""The request for a study, and the steps of its plan."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from vitsee_core.extraction.options import split_model
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import by_reason

# Folders of a study: stores, tables with their figures, and bundled sets of images.
STORES = "stores"
RESULTS = "results"
SETS = "sets"

# Commands whose tables have a row for each pixel, patch or bin of a histogram: up to a million.
LARGE_TABLES = frozenset({"attn-map", "cosine-map", "erf", "norms", "pca", "weights"})

# Options of extract that a store of training images does not share: it holds pooled vectors alone.
OPTIONS_BEYOND_POOLED = (
    "--sites",
    "--tokens",
    "--attention",
    "--residual",
    "--inputs",
    "--grams",
    "--erf",
)


class Setting(NamedTuple):
    """An option of a command that the user sets.

    Attributes:
        options: all spellings of the option.
        words: the option with its value, as on a command line.
    """

    options: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """The request.

    In the methods, `images` is "train" for the images that classifiers train on, "" for the others.

    Attributes:
        folder: where the study writes.
        models: label -> name, as for extract.
        data: the images of the analyses, as for --data.
        train: the images that classifiers train on, as for --data; None without.
        images: number of images to read, of each set.
        seed: of the sample of images and all that is random.
        device: where models run.
        analyses: run these commands alone; all if empty.
        skip: do not run these commands.
        n_available: set of images, as for --data -> its number of images, where that is known.
        train_images: number of images to read of `train`; `images` if None.
        settings: command -> its options that the user sets.
        thorough: store the sites of all figures of the papers.
        title: of the report; its models if empty.
        note: what holds for all figures of the report.
    """

    folder: Path
    models: Mapping[str, str]
    data: str
    train: str | None = None
    images: int = 2000
    seed: int = 0
    device: str = "auto"
    analyses: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    n_available: Mapping[str, int] = field(default_factory=dict)
    train_images: int | None = None
    settings: Mapping[str, Sequence[Setting]] = field(default_factory=dict)
    thorough: bool = False
    title: str = ""
    note: str = ""

    def with_settings(
        self, command: str, words: Sequence[str], without: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Return the options of a command, with the user's in place of the study's.

        Args:
            command: the command.
            words: the study's options of it, with their values.
            without: options that the user cannot set here.
        """
        settings = [
            setting
            for setting in self.settings.get(command, ())
            if not {*setting.options} & {*without}
        ]
        replaced = {option for setting in settings for option in setting.options}
        merged = []
        is_replaced = False
        for word in words:
            # The values behind an option share its fate.
            if word.startswith("--"):
                is_replaced = word in replaced
            if not is_replaced:
                merged.append(word)
        for setting in settings:
            merged += setting.words
        return tuple(merged)

    def sets(self, command: str, option: str) -> bool:
        """Return whether the user sets this option of a command."""
        return any(
            option in setting.options for setting in self.settings.get(command, ())
        )

    def n_requested(self, images: str = "") -> int:
        """Return the number of images that a store is asked to have."""
        if images == "train" and self.train_images is not None:
            return self.train_images
        return self.images

    def n_images(self, images: str = "") -> int:
        """Return the number of images that a store will have: fewer than requested if the set has
        fewer."""
        data = self.train if images == "train" else self.data
        n_requested = self.n_requested(images)
        return min(n_requested, self.n_available.get(data or "", n_requested))

    def store(self, label: str, images: str = "") -> Path:
        """Return the path of a model's store. images: also the name of a set of the demo."""
        ending = f"-{images}" if images else ""
        return self.folder / STORES / f"{label}{ending}.zarr"

    def result(self, name: str, command: str = "") -> Path:
        """Return the path of a step's table: CSV, or Parquet, which takes a twentieth of the
        space, if the command makes large ones."""
        ending = ".parquet" if command in LARGE_TABLES else ".csv"
        return self.folder / RESULTS / f"{name}{ending}"

    def takes(self, command: str) -> bool:
        """Return whether the user's choice of analyses has this command."""
        if command in self.skip:
            return False
        return not self.analyses or command in self.analyses


@dataclass(frozen=True)
class Step:
    """A command line of the study.

    Attributes:
        name: unique, and the stem of its result.
        words: the command line, without `vitsee`.
        inputs: files and stores that must exist before.
        outputs: files and stores that exist afterwards.
        make: does the work if the words are not a command of vitsee.
        partial: whether the step can run on those of its inputs that exist.
    """

    name: str
    words: tuple[str, ...]
    inputs: tuple[Path, ...] = ()
    outputs: tuple[Path, ...] = ()
    make: Callable[[], None] | None = None
    partial: bool = False

    def without(self, missing: Sequence[Path]) -> Step:
        """Return the same step on its other inputs."""
        missing_paths = {str(path) for path in missing}
        # An input may have a label before it: LABEL=PATH.
        words = [w for w in self.words if w.rpartition("=")[2] not in missing_paths]
        inputs = [path for path in self.inputs if path not in missing]
        return replace(self, words=tuple(words), inputs=tuple(inputs))

    @property
    def command(self) -> str:
        """The command, the first word."""
        return self.words[0]

    @property
    def line(self) -> str:
        """The command line to run the step in a shell."""
        if self.make is not None:
            return shlex.join(self.words)
        return shlex.join(("vitsee", *self.words))


@dataclass
class Plan:
    """The steps in order.

    Attributes:
        extractions: steps that make stores, and the images that they need.
        analyses: steps that read stores, and tables of earlier steps.
        left_out: command, or command and model -> why it is not a step.
        contents: what the stores have to hold for the analyses, in the words of `recipes`.
        notes: remarks about the steps.
        sections: of a study that is written as a file, its figures in order: `title`, `note`,
            `results` (stems of files) and `printed` (numbers of the paper).
    """

    extractions: list[Step] = field(default_factory=list)
    analyses: list[Step] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    contents: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    sections: list[dict[str, Any]] = field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        """All steps in order."""
        return [*self.extractions, *self.analyses]

    def reasons(self) -> list[str]:
        """Return a line for each reason of `left_out`: `COMMAND, COMMAND: reason`."""
        return by_reason(self.left_out, len(self.left_out))


def label_of(name: str) -> str:
    """Return a model's default label in a study: `vit_base_patch16_224` for a name with a tag,
    `vit` for `demo:vit`, the folder's name for `local-dir:models/mine`."""
    from vitsee_core.models.sources import source_of

    label = source_of(name.partition("?")[0]).label
    return re.sub(r"[^\w.+-]", "_", label).lstrip(".-") or "model"


def with_controls(models: Mapping[str, str], seed: int) -> dict[str, str]:
    """Return the models, each followed by the same with random weights unless it has these already.

    Args:
        models: label -> name, as for extract.
        seed: of the random weights.

    Raises:
        VitseeError: two models have one label.
    """
    labelled_models: list[tuple[str, str]] = []
    for label, text in models.items():
        labelled_models.append((label, text))
        name, options = split_model(text)
        if "random-init" in options:
            continue
        # A control loads no checkpoint; its other options shape the model.
        query = []
        for key, values in options.items():
            if not key.startswith("checkpoint"):
                query += [f"{key}={value}" for value in values]
        query.append(f"random-init={seed}")
        labelled_models.append((f"{label}-untrained", f"{name}?{'&'.join(query)}"))
    return check_labels(labelled_models)


def check_labels(labelled_models: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return label -> model of pairs of both.

    Raises:
        VitseeError: two models have one label, or a label cannot name a store.
    """
    models: dict[str, str] = {}
    for label, name in labelled_models:
        if label in models:
            raise VitseeError(
                f"two models are called {label!r}: {models[label]} and {name}; "
                f"name them: first={models[label]} second={name}"
            )
        # NAME-train.zarr is the store of NAME's training images.
        is_reserved = label.endswith(("-train", ".zarr"))
        if not re.fullmatch(r"[\w+][\w.+-]*", label) or is_reserved:
            raise VitseeError(
                f"{label!r} cannot name a store: expected letters, digits, _, +, . and "
                "-, and no -train at its end"
            )
        models[label] = name
    return models
