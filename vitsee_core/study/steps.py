"""The request for a study, and the steps of its plan."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from vitsee_core.extraction.options import split_model
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import by_reason

STORES = "stores"
RESULTS = "results"
SETS = "sets"
# Commands whose tables have a row for each pixel, patch or bin of a histogram: up to a million.
LARGE_TABLES = frozenset({"attn-map", "cosine-map", "erf", "norms", "pca", "weights"})


# Options of extract that a store to train on does not share: it keeps pooled vectors alone.
KEPT = (
    "--sites",
    "--tokens",
    "--attention",
    "--residual",
    "--inputs",
    "--grams",
    "--erf",
)


class Setting(NamedTuple):
    """An option of a command that the user sets. options: all its spellings; words: on a command
    line."""

    options: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """The request.

    Attributes:
        models: label -> name, as for extract.
        data, train: as for --data, the images of the analyses and those that classifiers train on.
        images: number of each.
        analyses: only these commands, all if empty.
        skip: not these.
        there: data -> its number of images, if known.
        train_images: of `train`, unless `images`.
        settings: command -> its options that the user sets.
        thorough: store the sites of all figures of the papers.
        title, note: of the report, in place of its models, and what holds for all its figures.
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
    there: Mapping[str, int] = field(default_factory=dict)
    train_images: int | None = None
    settings: Mapping[str, Sequence[Setting]] = field(default_factory=dict)
    thorough: bool = False
    title: str = ""
    note: str = ""

    def with_settings(
        self, command: str, words: Sequence[str], without: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """The options of a command, the user's replacing the study's. without: not these."""
        settings = [
            s for s in self.settings.get(command, ()) if not {*s.options} & {*without}
        ]
        replaced = {option for setting in settings for option in setting.options}
        kept = []
        own = True
        for word in words:
            if word.startswith("--"):
                own = word not in replaced
            if own:
                kept.append(word)
        return (*kept, *(word for setting in settings for word in setting.words))

    def sets(self, command: str, option: str) -> bool:
        """Whether the user sets this option of a command."""
        return any(
            option in setting.options for setting in self.settings.get(command, ())
        )

    def asked(self, images: str = "") -> int:
        """Requested number of images of a store. images: "train", or the study's own."""
        own = images != "train" or self.train_images is None
        return self.images if own else self.train_images or 0

    def n_images(self, images: str = "") -> int:
        """Number of images that a store will have. images: "train", or the study's own."""
        data = self.train if images == "train" else self.data
        return min(self.asked(images), self.there.get(data or "", self.asked(images)))

    def store(self, label: str, images: str = "") -> Path:
        """Path of a model's store; images: "train", or the set, unless the study's own."""
        return self.folder / STORES / f"{label}{f'-{images}' if images else ''}.zarr"

    def result(self, name: str, command: str = "") -> Path:
        """The table of a step; Parquet, a twentieth of the size, where the command makes large
        ones."""
        ending = ".parquet" if command in LARGE_TABLES else ".csv"
        return self.folder / RESULTS / f"{name}{ending}"

    def takes(self, command: str) -> bool:
        return command not in self.skip and (
            not self.analyses or command in self.analyses
        )


@dataclass(frozen=True)
class Step:
    """A command line of the study.

    Attributes:
        name: unique, and the stem of its result.
        words: without `vitsee`.
        inputs: must exist before.
        outputs: exist afterwards.
        make: performs the words if they are not a command of vitsee.
        partial: the existing ones of its inputs suffice.
    """

    name: str
    words: tuple[str, ...]
    inputs: tuple[Path, ...] = ()
    outputs: tuple[Path, ...] = ()
    make: Callable[[], None] | None = None
    partial: bool = False

    def without(self, missing: Sequence[Path]) -> Step:
        """The same step on its other inputs."""
        gone = {str(path) for path in missing}
        words = tuple(word for word in self.words if word.rpartition("=")[2] not in gone)
        return replace(
            self, words=words, inputs=tuple(x for x in self.inputs if x not in missing)
        )

    @property
    def command(self) -> str:
        return self.words[0]

    @property
    def line(self) -> str:
        return shlex.join(self.words if self.make else ("vitsee", *self.words))


@dataclass
class Plan:
    """The steps in order."""

    extractions: list[Step] = field(default_factory=list)
    analyses: list[Step] = field(default_factory=list)
    # command, or command and model -> why it is not a step
    left_out: dict[str, str] = field(default_factory=dict)
    keeps: set[str] = field(
        default_factory=set
    )  # what stores have to hold for these analyses
    notes: list[str] = field(default_factory=list)  # remarks about its steps
    # Of a study that is written as a file: its figures in order, with the results of each.
    sections: list[dict[str, Any]] = field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        return [*self.extractions, *self.analyses]

    def reasons(self) -> list[str]:
        """`what, what: reason` of all that is left out, one line a reason."""
        return by_reason(self.left_out, len(self.left_out))


def label_of(name: str) -> str:
    """A model's default label in a study: `vit_base_patch16_224` for a name with a tag, `vit` for
    `demo:vit`, the folder of `local-dir:models/mine`."""
    from vitsee_core.models.sources import source_of

    label = source_of(name.partition("?")[0]).label
    return re.sub(r"[^\w.+-]", "_", label).lstrip(".-") or "model"


def with_controls(models: Mapping[str, str], seed: int) -> dict[str, str]:
    """The models, each followed by the same with random weights unless it has these already. Raises
    VitseeError: see `check_labels`."""
    found: list[tuple[str, str]] = []
    for label, text in models.items():
        found.append((label, text))
        name, options = split_model(text)
        if "random-init" not in options:
            own = [(key, value) for key, values in options.items() for value in values]
            kept = [
                f"{key}={value}" for key, value in own if not key.startswith("checkpoint")
            ]
            twin = f"{name}?{'&'.join([*kept, f'random-init={seed}'])}"
            found.append((f"{label}-untrained", twin))
    return check_labels(found)


def check_labels(models: Mapping[str, str] | list[tuple[str, str]]) -> dict[str, str]:
    """Label -> model; refuses two with one label, and labels that cannot name a store."""
    found: dict[str, str] = {}
    for label, name in models.items() if isinstance(models, Mapping) else models:
        if label in found:
            raise VitseeError(
                f"two models are called {label!r}: {found[label]} and {name}; "
                f"name them: first={found[label]} second={name}"
            )
        if not re.fullmatch(r"[\w+][\w.+-]*", label) or label.endswith(
            ("-train", ".zarr")
        ):
            raise VitseeError(
                f"{label!r} cannot name a store: expected letters, digits, _, +, . and -, and no "
                "-train at its end"
            )
        found[label] = name
    return found
