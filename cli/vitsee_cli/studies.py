"""A study on the command line: its plan shown or executed, each step as its own command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from vitsee_cli import console, signals
from vitsee_cli.declared import a_number
from vitsee_cli.performing import RESUME_LINE, Performer, Workers, n_workers
from vitsee_cli.study_settings import commands_of
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.extraction.options import ModelOptions
    from vitsee_core.models.provenance import NamedModel
    from vitsee_core.study.catalogue import SurveyedModel
    from vitsee_core.study.recipe_file import RecipeFile
    from vitsee_core.study.record import Record
    from vitsee_core.study.steps import Plan, Step, Study

jobs_option = a_number(
    "-j",
    "--jobs",
    help="Analyses to run at a time, each in a process with its share of the cores; "
    "results do not depend on it. 1: one after the other, in this process.  "
    "[default: the cores of this process; 3 at most, 8 where --memory leaves room for "
    "them]",
)
dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    help="Print the steps as commands, and what they take.  [default: run them]",
)
Extend = Callable[["Study", "Plan"], "Plan"]


def run_study(
    ctx: click.Context,
    study: Study,
    *,
    dry_run: bool,
    extend: Extend | None = None,
    at_once: int | None = None,
) -> None:
    """Plan a study, log its cost, carry it out, and print the path of its report.

    Args:
        ctx: context of the command.
        study: the request.
        dry_run: only print the steps as commands.
        extend: adds steps to a plan; None for none.
        at_once: how many analyses are run at a time; None for the default of `n_workers`.

    Raises:
        VitseeError: an unknown model, foreign files would be replaced, or some steps failed (all
            others were done).
    """
    from vitsee_core.study import cost, planning
    from vitsee_core.study import record as study_record

    ctx.meta[console.RESUMES] = "repeat the command to go on"
    planning.check_choice(study)
    check_train(study)
    record = study_record.Record.read(study.folder)
    # Surveying a model imports torch: what the record has of it is enough while all of its
    # extractions are finished.
    recorded_models = record.surveyed(study.models)
    models = survey_models(study.models) if recorded_models is None else recorded_models
    study, labelled = _with_image_counts(study)

    def plan_for(models: Sequence[SurveyedModel]) -> _Plans:
        """Return the plan for these models, without and with the added steps."""
        base = planning.plan(study, models, labelled=labelled)
        extended = base if extend is None else extend(study, base)
        return _Plans(base, extended)

    plans = plan_for(models)
    if recorded_models and not record.finished(plans.extended.extractions):
        # A model is going to be run, and may have changed since it was recorded.
        models = survey_models(study.models)
        plans = plan_for(models)
    base_plan = plans.base
    plan = plans.extended
    if not plan.steps:
        raise VitseeError(f"nothing to do: {'; '.join(plan.reasons())}")
    planning.check_stored(base_plan, models, record.steps)

    def plan_without(failed: Sequence[Step]) -> Plan:
        """Return the plan for the models that were extracted."""
        failed_paths = {path for step in failed for path in step.outputs}
        extracted = [
            model for model in models if study.store(model.label) not in failed_paths
        ]
        if not extracted:
            raise VitseeError(
                f"no model was extracted; see {study_record.record_path(study)}"
            )
        if len(extracted) == len(models):
            return plan
        return plan_for(extracted).extended

    needed = cost.cost(
        base_plan, *cost.stores_of(study, models), cost.measured_speed(study.device)
    )
    _execute(
        ctx,
        study,
        plan,
        models=models,
        plan_without=plan_without,
        cost_line=needed.describe(len(models), study.n_images()),
        dry_run=dry_run,
        at_once=at_once,
    )


def run_recipe(
    ctx: click.Context,
    study: Study,
    recipe: RecipeFile,
    data: str | None,
    *,
    dry_run: bool,
    at_once: int | None = None,
) -> None:
    """Do the same as `run_study` for a study that is written as a file.

    Args:
        ctx: context of the command.
        study: folder, choice of analyses, settings, seed and device.
        recipe: the file, with the models and numbers of images that the user chose.
        data: where its sets of images are; None for the bundled miniatures.
        dry_run: only print the steps as commands.
        at_once: how many analyses are run at a time; None for the default of `n_workers`.

    Raises:
        VitseeError: an unknown model, foreign files would be replaced, the recipe needs other
            data, or some steps failed (all others were done).
    """
    # Both import NumPy, which `demo --help` does without.
    from vitsee_cli.recipe_steps import check_steps
    from vitsee_core.study import cost, planning, recipe_plan
    from vitsee_core.study import record as study_record

    ctx.meta[console.RESUMES] = "repeat the command to go on"
    planning.check_choice(study)
    data_folders = None if data is None else recipe_plan.data_places(recipe, data)
    plan = recipe_plan.plan_recipe(recipe, study, data_folders)
    check_steps(ctx, study, plan.steps)
    # Store -> its extraction, and the model in the words of that: `extract MODEL --data ...`.
    steps = {step.outputs[0]: step for step in plan.extractions if step.make is None}
    model_names = {store: step.words[1] for store, step in steps.items()}
    # `survey_models` takes labels: here a model is surveyed once, under its name.
    models_by_name = {name: name for name in model_names.values()}
    record = study_record.Record.read(study.folder)
    surveyed = record.surveyed(models_by_name)
    if surveyed is None or not record.finished(plan.extractions):
        surveyed = survey_models(models_by_name)
    survey_of_name = {model.name: model for model in surveyed}
    models = {store: survey_of_name[name] for store, name in model_names.items()}
    n_images = {store: recipe_plan.n_images(step) for store, step in steps.items()}
    needed = cost.cost(plan, models, n_images, cost.measured_speed(study.device))
    cost_line = needed.describe(len(survey_of_name), max(n_images.values(), default=0))
    labels = {store.stem: name for store, name in model_names.items()}
    _execute(
        ctx,
        replace(study, models=labels),
        plan,
        models=surveyed,
        # Steps of a recipe name their stores: one whose store is missing fails by itself.
        plan_without=lambda failed: plan,
        cost_line=cost_line,
        dry_run=dry_run,
        at_once=at_once,
    )


class _Plans(NamedTuple):
    """The plan of a study, and the same with the steps that its command adds."""

    base: Plan
    extended: Plan


def _execute(
    ctx: click.Context,
    study: Study,
    plan: Plan,
    *,
    models: Sequence[SurveyedModel],
    plan_without: Callable[[Sequence[Step]], Plan],
    cost_line: str,
    dry_run: bool,
    at_once: int | None,
) -> None:
    """Carry out a plan, or print it.

    Args:
        ctx: context of the command.
        study: the request.
        plan: all of its steps.
        models: the models as surveyed, for the record.
        plan_without: returns the plan that is left when these extractions have failed.
        cost_line: what the plan takes, which is logged first.
        dry_run: only print the steps as commands.
        at_once: how many analyses are run at a time; None for the default of `n_workers`.

    Raises:
        VitseeError: foreign files would be replaced, or some steps failed.
    """
    from vitsee_core.study import record as study_record

    command_words = console.command_line()
    last_step = report_step(study)
    previous_record = study_record.Record.read(study.folder)
    study_record.check_outputs(study, [*plan.steps, last_step], previous_record)
    if not dry_run:
        study_record.make_folders(study)
    console.say(cost_line)
    for note in plan.notes:
        console.say(note)
    for reason in plan.reasons():
        console.say(f"left out: {reason}")
    if dry_run:
        folders = shlex.join(["mkdir", "-p", *map(str, study_record.folders(study))])
        steps = [*plan.steps, last_step]
        console.out("\n".join([folders, *(step.line for step in steps)]))
        return
    ctx.meta[console.RESUMES] = RESUME_LINE
    record = study_record.begin(study, command_words, plan, models)
    failed = _carry_out(
        ctx,
        study,
        plan,
        record=record,
        last_step=last_step,
        plan_without=plan_without,
        at_once=at_once,
    )
    if record.steps[last_step.name].status == study_record.DONE:
        console.out(str(study.folder / "report.html"))
    if failed:
        lines = [f"{step.name} ({record.steps[step.name].reason})" for step in failed]
        total = len(plan.steps) + 1
        raise VitseeError(f"{len(lines)} of {total} steps failed: {'; '.join(lines)}")


def _carry_out(
    ctx: click.Context,
    study: Study,
    plan: Plan,
    *,
    record: Record,
    last_step: Step,
    plan_without: Callable[[Sequence[Step]], Plan],
    at_once: int | None,
) -> list[Step]:
    """Do the steps of a plan: extractions, analyses, the report; exit if the user interrupts them.

    Args:
        ctx: context of the command.
        study: the request.
        plan: all of its steps but the last.
        record: says of each step how it ended; is written after every step.
        last_step: the step that writes the report.
        plan_without: returns the plan that is left when these extractions have failed.
        at_once: how many analyses are run at a time; None for the default of `n_workers`.

    Returns:
        The steps that failed.
    """
    from vitsee_core.models.provenance import naming
    from vitsee_core.study import record as study_record
    from vitsee_core.study import running

    perform = Performer(ctx)
    total = len(plan.steps) + 1
    named_models = _models_by_store(plan.steps)
    workers = None
    try:
        with naming(named_models):
            # One after the other: an extraction takes the whole machine.
            failed = running.carry_out(
                plan.extractions, record, perform, console.say, total=total
            )
            # What compares several models is planned anew for those that were extracted.
            analyses = plan_without(failed).analyses
            record.outdate(last_step)
            study_record.check_outputs(study, analyses, record)
            n = min(n_workers(at_once, _largest_memory(study)), len(analyses))
            if n > 1:
                workers = Workers(perform, named_models, n)
            failed += running.carry_out(
                [*analyses, last_step],
                record,
                perform,
                console.say,
                first=len(plan.extractions) + 1,
                total=total,
                before=failed,
                workers=workers,
            )
    except running.Stopped as stopped:
        console.fail(f"vitsee {ctx.info_name}: interrupted; {RESUME_LINE}")
        ctx.exit(signals.EXIT_RESUMABLE if stopped.code else 1)
    finally:
        if workers is not None:
            workers.close()
    return failed


def _largest_memory(study: Study) -> int | None:
    """Return the largest --memory of a step, in bytes; None if no step has one."""
    sizes = [
        int(setting.words[1])
        for settings in study.settings.values()
        for setting in settings
        if setting.words[0] == "--memory"
    ]
    return max(sizes, default=None)


def report_step(study: Study) -> Step:
    """Return the last step of a study, which writes the report."""
    from vitsee_core.study.steps import Step

    page = study.folder / "report.html"
    words = ("report", str(study.folder), "-o", str(page), "--force")
    return Step("report", words, (), (page,))


def check_train(study: Study) -> None:
    """Refuse to train on the images of the study themselves.

    Raises:
        VitseeError: --train and --data are the same.
    """
    if study.train is None:
        return
    data = Path(study.data).expanduser()
    train = Path(study.train).expanduser()
    are_same = study.data == study.train
    if data.exists() and train.exists():
        are_same = are_same or data.samefile(train)
    if are_same:
        raise VitseeError(
            f"--train {study.train} has the images of --data: what learns from them "
            "cannot be tested on them; leave --train out, or name other images of the "
            "same classes"
        )


def survey_models(models: Mapping[str, str]) -> list[SurveyedModel]:
    """Return what each model offers to analyses, looked up before any work starts.

    models: label -> name.

    Raises:
        VitseeError: models are unknown; names all of them.
    """
    from vitsee_core.study.catalogue import survey

    surveyed = []
    errors = []
    for label, name in models.items():
        try:
            surveyed.append(survey(label, name, vars(model_options_of(name))))
        except VitseeError as error:
            errors.append(str(error))
    if errors:
        raise VitseeError("; ".join(errors))
    return surveyed


def model_options_of(name: str) -> ModelOptions:
    """Return the options in a model's name, as extract reads them."""
    return _model_of_extract([name, "--data", "images", "-o", "store"])


def _model_of_extract(words: Sequence[str]) -> ModelOptions:
    """Return the model of a command line of extract, without the command's name."""
    from vitsee_cli.model_options import make_model_options

    ctx = click.get_current_context()
    extract = commands_of(ctx)("extract")
    assert extract is not None
    return make_model_options(extract.make_context("extract", [*words], ctx).params)


def _models_by_store(steps: Sequence[Step]) -> dict[Path, NamedModel]:
    """Return the folder of each store that the steps extract -> the model in the step's words.

    Analyses that recompute something may then load these models: the user named them.
    """
    from vitsee_core.models.provenance import NamedModel

    models = {}
    for step in steps:
        if step.command == "extract" and step.make is None:
            try:
                options = _model_of_extract(step.words[1:])
            except (click.ClickException, VitseeError):
                continue  # the step itself says what is wrong
            models[step.outputs[0]] = NamedModel(
                options.name, options.model_args, options.trust_remote_code
            )
    return models


def _with_image_counts(study: Study) -> tuple[Study, bool]:
    """Return the study with the numbers of its images, and whether all sets have labels."""
    from vitsee_core.images import open_source

    data_sets = [study.data]
    if study.train is not None:
        data_sets.append(study.train)
    labels_of = {data: open_source(data).labels for data in data_sets}
    n_images = {data: len(labels) for data, labels in labels_of.items()}
    # A label below 0 stands for none.
    are_labelled = all(bool((labels >= 0).any()) for labels in labels_of.values())
    return replace(study, n_available=n_images), are_labelled


def models_by_label(models: Sequence[str]) -> dict[str, str]:
    """Return label -> model of arguments `NAME=MODEL` or `MODEL`.

    Raises:
        VitseeError: a label cannot be a file's name, or stands for two models.
    """
    from vitsee_core.study.steps import check_labels, label_of

    pairs = []
    for text in models:
        label, sign, name = text.partition("=")
        # In `hub:OWNER/NAME?checkpoint=x.pth` the sign belongs to an option.
        is_label = sign and not {"/", ":", "?"} & set(label)
        pairs.append((label, name) if is_label else (label_of(text), text))
    return check_labels(pairs)
