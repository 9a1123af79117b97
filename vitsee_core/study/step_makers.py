"""Make the steps of an analysis from models: one on all of them together, or one for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vitsee_core.study.catalogue import SurveyedModel
from vitsee_core.study.steps import Step, Study

Models = Sequence[SurveyedModel]
MakeSteps = Callable[[Study, Models], Iterator[Step]]


def step(
    study: Study,
    command: str,
    *,
    variant: str,
    labels: Sequence[str],
    options: Sequence[str] = (),
    train: str = "",
) -> Step:
    """Return a step that runs a command on the stores of models.

    Args:
        study: its folder, and the options that the user sets.
        command: the analysis.
        variant: tells the command's steps apart; "" if there is one.
        labels: models of the study.
        options: of the command; the user's options replace them.
        train: label of the model whose store of training images is the command's first; "" for
            none.
    """
    # In the order of the command line: training images come first.
    stores = [study.store(label) for label in labels]
    if train:
        stores.insert(0, study.store(train, "train"))
    name = f"{command}-{variant}" if variant else command
    table = study.result(name, command)
    picture = table.with_suffix(".png")
    words = [command, *map(str, stores), *study.with_settings(command, options)]
    # --force: `check_outputs` has refused files that the study did not write.
    words += ["-o", str(table), "--png", str(picture), "--force"]
    return Step(name, tuple(words), inputs=tuple(stores), outputs=(table, picture))


def together(command: str, *options: str, variant: str = "") -> MakeSteps:
    """Return a maker of one step on all models.

    Args:
        command: the analysis.
        options: of the command.
        variant: tells the command's steps apart; "" if there is one.
    """

    def steps(study: Study, models: Models) -> Iterator[Step]:
        """Yield the step on the stores of all models."""
        yield step(
            study, command, variant=variant, labels=labels_of(models), options=options
        )

    return steps


def each(command: str, *options: str, variant: str = "") -> MakeSteps:
    """Return a maker of one step for each model.

    Args:
        command: the analysis.
        options: of the command.
        variant: before the model's label in the step's name; "" if there is one step for a model.
    """

    def steps(study: Study, models: Models) -> Iterator[Step]:
        """Yield a step for each model, named by its label."""
        for model in models:
            yield step(
                study,
                command,
                variant=f"{variant}-{model.label}" if variant else model.label,
                labels=[model.label],
                options=options,
            )

    return steps


def each_trained(command: str, *options: str) -> MakeSteps:
    """Return a maker of one step for each model, which learns from the store of its training
    images and is tested on the other."""

    def steps(study: Study, models: Models) -> Iterator[Step]:
        """Yield a step for each model, with replicates for paired comparisons of models."""
        for model in models:
            yield step(
                study,
                command,
                variant=model.label,
                labels=[model.label],
                options=(*options, "--replicates"),
                train=model.label,
            )

    return steps


def labels_of(models: Models) -> list[str]:
    """Return the models' labels."""
    return [model.label for model in models]
