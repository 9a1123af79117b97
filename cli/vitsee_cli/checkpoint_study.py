"""A study of the checkpoints of one model, on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click

from vitsee_cli import console
from vitsee_cli.studies import model_options_of, survey_models
from vitsee_cli.study_settings import commands_of
from vitsee_stores.errors import VitseeError


@dataclass(frozen=True, kw_only=True)
class CheckpointStudy:
    """A study of the checkpoints of one model, as the command line has it.

    Attributes:
        models: label -> model; one is expected.
        pattern: glob of the checkpoints' files.
        data: the images.
        train: images that probes learn from; None for none.
        output: the folder of the study.
        images: how many of `data`.
        train_images: how many of `train`; None for as many.
        analyses: names of the analyses; () for all that apply.
        keep: "tables" to remove each store once its results are there, or "stores".
        seed: of everything random.
        device: where the model runs.
    """

    models: Mapping[str, str]
    pattern: str
    data: str
    train: str | None
    output: Path
    images: int
    train_images: int | None
    analyses: Sequence[str]
    keep: str
    seed: int
    device: str


class _ImageCounts(NamedTuple):
    """The numbers of images of a study, and whether they can be used to train probes."""

    n_images: int
    n_train: int | None  # None without images to train on
    are_labelled: bool  # both sets have labels


def run_checkpoints(ctx: click.Context, study: CheckpointStudy, *, dry_run: bool) -> None:
    """Measure the checkpoints of one model, each a step of every table; print the report's path.

    Raises:
        VitseeError: there are no checkpoints, or some could not be read (all others were done).
        click.UsageError: several models are given.
    """
    from vitsee_core.study import cost
    from vitsee_core.tables.steps import RECORD
    from vitsee_core.training import checkpoints
    from vitsee_core.training.measurements import FIRST, LAST, PREVIOUS, measurements
    from vitsee_core.training.series import MEASURED, Series

    ctx.meta[console.RESUMES] = "repeat the command to go on"
    if len(study.models) > 1:
        raise click.UsageError(
            "--checkpoints are of one model: give one, and others their own -o"
        )
    ((label, name),) = study.models.items()
    options = model_options_of(name)
    checkpoints.check_name(options)
    unit, files, unreadable = checkpoints.find_checkpoints(study.pattern)
    (model,) = survey_models(study.models)
    counts = _count_images(study)

    # The analyses, and why others are not done.
    has_train = study.train is not None
    applicable, left_out = checkpoints.applicable(
        model, with_train=has_train and counts.are_labelled
    )
    measured = measurements(
        study.analyses or applicable, (FIRST, LAST, PREVIOUS), with_train=has_train
    )
    # Analyses that the user named are done, or fail: none of them is left out.
    reasons = {**unreadable} if study.analyses else {**left_out, **unreadable}
    for subject, reason in reasons.items():
        console.say(f"left out: {subject}: {reason}")
    speed = cost.measured_speed(study.device)
    console.say(
        checkpoints.cost_line(model, len(files), counts.n_images, study.keep, speed)
    )
    if dry_run:
        console.out("\n".join(f"{unit} {file.step}: {file.path}" for file in files))
        return

    series = Series(
        study.output,
        study.data,
        measured,
        name=label,
        unit=unit,
        train=study.train,
        train_images=counts.n_train,
        keep=study.keep,
        resume=True,
        options={"images": counts.n_images, "seed": study.seed, "device": study.device},
    )
    failed = checkpoints.run(series, options, files, console.say)
    if series.steps_of(MEASURED):
        _write_report(ctx, study.output, f"{label} over training")
    not_measured = [file.path.name for file in failed] + [*unreadable]
    if not_measured:
        raise VitseeError(
            f"{len(not_measured)} of {len(files) + len(unreadable)} checkpoints were not "
            f"measured: {', '.join(not_measured)}; see {study.output / RECORD}"
        )


def _count_images(study: CheckpointStudy) -> _ImageCounts:
    """Return how many images there are to use, of those that the user asked for."""
    from vitsee_core.images import open_source

    # A label below 0 stands for none.
    labels = open_source(study.data).labels
    are_labelled = bool((labels >= 0).any())
    n_images = min(study.images, len(labels))
    if study.train is None:
        return _ImageCounts(n_images, None, are_labelled)
    train_labels = open_source(study.train).labels
    are_labelled = are_labelled and bool((train_labels >= 0).any())
    max_train = study.images if study.train_images is None else study.train_images
    return _ImageCounts(n_images, min(max_train, len(train_labels)), are_labelled)


def _write_report(ctx: click.Context, folder: Path, title: str) -> None:
    """Write the report of a folder by its command, and print the path."""
    page = folder / "report.html"
    report = commands_of(ctx)("report")
    assert report is not None
    ctx.invoke(report, folder=folder, output=page, title=title, force=True)
    console.out(str(page))
