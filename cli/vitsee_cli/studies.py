"""A study on the command line: its plan shown or executed, each step as its own command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitsee_cli import console, signals
from vitsee_cli.declared import a_number
from vitsee_cli.performing import RESUME_LINE, Performer, Workers, n_workers
from vitsee_cli.recipe_steps import check_steps
from vitsee_cli.study_settings import commands_of
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.extraction.options import ModelOptions
    from vitsee_core.models.provenance import NamedModel
    from vitsee_core.study.catalogue import SurveyedModel
    from vitsee_core.study.recipe_file import RecipeFile
    from vitsee_core.study.steps import Plan, Step, Study

jobs_option = a_number(
    "-j",
    "--jobs",
    help="Analyses to run at a time, each in a process with its share of the cores; results do not "
    "depend on it. 1: one after the other, in this process.  "
    "[default: the cores of this process; 3 at most, 8 where --memory leaves room for them]",
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
    """Plan a study, log its cost, and execute it; ends with the path of its report.

    Args:
        ctx: of the command.
        study: the request.
        dry_run: only print the steps as commands.
        at_once: how many analyses are run at a time, see `n_workers`.
        extend: adds steps to a plan.

    Raises:
        VitseeError: an unknown model, foreign files would be replaced, or some steps failed (all
            others were done).
    """
    from vitsee_core.study import cost, planning, running

    ctx.meta[console.RESUMES] = "repeat the command to go on"
    planning.check_choice(study)
    check_train(study)
    record = running.Record.read(study.folder)
    known = record.surveyed(study.models)
    models = _survey(study.models) if known is None else known
    study, labelled = _counted(study)

    def planned(of: Sequence[SurveyedModel]) -> tuple[Plan, Plan]:
        found = planning.plan(study, of, labelled=labelled)
        return found, found if extend is None else extend(study, found)

    own, plan = planned(models)
    if known and not record.finished(
        plan.extractions
    ):  # a model is run: what it is now counts
        models = _survey(study.models)
        own, plan = planned(models)
    if not plan.steps:
        raise VitseeError(f"nothing to do: {'; '.join(plan.reasons())}")
    planning.check_kept(own, models, record.steps)

    def of_those(failed: Sequence[Step]) -> Plan:
        made = [m for m in models if study.store(m.label) not in _outputs(failed)]
        if not made:
            raise VitseeError(f"no model was extracted; see {running.record_path(study)}")
        return planned(made)[1] if len(made) < len(models) else plan

    needed = cost.cost(
        own, *cost.stores_of(study, models), cost.measured_speed(study.device)
    )
    about = needed.describe(len(models), study.n_images())
    _execute(ctx, study, plan, models, of_those, about, dry_run=dry_run, at_once=at_once)


def run_recipe(
    ctx: click.Context,
    study: Study,
    recipe: RecipeFile,
    data: str | None,
    *,
    dry_run: bool,
    at_once: int | None = None,
) -> None:
    """The same of a study that is written as a file.

    Args:
        ctx: of the command.
        study: its folder, choice of analyses, settings, seed and device.
        recipe: of the models and numbers of images that were asked for.
        data: where its sets of images are; None for the bundled miniatures.
        dry_run: only print the steps as commands.
        at_once: how many analyses are run at a time, see `n_workers`.

    Raises:
        VitseeError: as `run_study`; or the recipe needs other data.
    """
    from vitsee_core.study import cost, planning, recipe_plan, running

    ctx.meta[console.RESUMES] = "repeat the command to go on"
    planning.check_choice(study)
    places = None if data is None else recipe_plan.data_places(recipe, data)
    plan = recipe_plan.plan_recipe(recipe, study, places)
    check_steps(ctx, study, plan.steps)
    steps = {step.outputs[0]: step for step in plan.extractions if step.make is None}
    names = {place: step.words[1] for place, step in steps.items()}
    record = running.Record.read(study.folder)
    known = record.surveyed(own := {name: name for name in names.values()})
    if known is None or not record.finished(plan.extractions):
        known = _survey(own)
    surveyed = {model.name: model for model in known}
    models = {place: surveyed[name] for place, name in names.items()}
    n_images = {place: recipe_plan.n_images(step) for place, step in steps.items()}
    needed = cost.cost(plan, models, n_images, cost.measured_speed(study.device))
    about = needed.describe(len(surveyed), max(n_images.values(), default=0))
    study = replace(study, models={place.stem: name for place, name in names.items()})
    _execute(
        ctx, study, plan, known, lambda _: plan, about, dry_run=dry_run, at_once=at_once
    )


def run_checkpoints(
    ctx: click.Context,
    models: Mapping[str, str],
    pattern: str,
    *,
    data: str,
    train: str | None,
    output: Path,
    images: int,
    train_images: int | None,
    analyses: Sequence[str],
    keep: str,
    seed: int,
    device: str,
    dry_run: bool,
) -> None:
    """The same of the checkpoints of one model, each a step of every table; ends with the path of
    its report.

    Raises:
        VitseeError: no checkpoints, or some could not be read (all others were done).
        click.UsageError: several models.
    """
    from vitsee_core.images import open_source
    from vitsee_core.study import cost
    from vitsee_core.tables.steps import RECORD
    from vitsee_core.training import checkpoints
    from vitsee_core.training.series import (
        FIRST,
        LAST,
        MEASURED,
        PREVIOUS,
        Series,
        measurements,
    )

    ctx.meta[console.RESUMES] = "repeat the command to go on"
    if len(models) > 1:
        raise click.UsageError(
            "--checkpoints are of one model: give one, and others their own -o"
        )
    ((label, name),) = models.items()
    options = model_options_of(name)
    checkpoints.check_name(options)
    unit, files, without = checkpoints.find_checkpoints(pattern)
    (model,) = _survey(models)
    sources = [
        open_source(place).labels for place in (data, *([] if train is None else [train]))
    ]
    labelled = all(bool((labels >= 0).any()) for labels in sources)
    apply, left_out = checkpoints.applicable(
        model, with_train=train is not None and labelled
    )
    chosen = measurements(
        analyses or apply, (FIRST, LAST, PREVIOUS), with_train=train is not None
    )
    for what, why in {**({} if analyses else left_out), **without}.items():
        console.say(f"left out: {what}: {why}")
    n_images = min(images, len(sources[0]))
    n_train = None
    if train is not None:
        n_train = min(images if train_images is None else train_images, len(sources[1]))
    speed = cost.measured_speed(device)
    console.say(checkpoints.cost_line(model, len(files), n_images, keep, speed))
    if dry_run:
        console.out("\n".join(f"{unit} {file.step}: {file.path}" for file in files))
        return
    series = Series(
        output,
        data,
        chosen,
        name=label,
        unit=unit,
        train=train,
        train_images=n_train,
        keep=keep,
        resume=True,
        options={"images": n_images, "seed": seed, "device": device},
    )
    failed = checkpoints.run(series, options, files, console.say)
    page = output / "report.html"
    if series.steps_of(MEASURED):
        group = ctx.find_root().command
        assert isinstance(group, click.Group)
        report = group.get_command(ctx, "report")
        assert report is not None
        ctx.invoke(
            report, folder=output, output=page, title=f"{label} over training", force=True
        )
        console.out(str(page))
    if lost := [file.path.name for file in failed] + [*without]:
        raise VitseeError(
            f"{len(lost)} of {len(files) + len(without)} checkpoints were not measured: "
            f"{', '.join(lost)}; see {output / RECORD}"
        )


def _execute(
    ctx: click.Context,
    study: Study,
    plan: Plan,
    models: Sequence[SurveyedModel],
    of_those: Callable[[Sequence[Step]], Plan],
    about: str,
    *,
    dry_run: bool,
    at_once: int | None,
) -> None:
    """Log what a plan takes, and do it, or print it. models: as surveyed; of_those: what is left
    after extractions failed."""
    from vitsee_core.models.provenance import naming
    from vitsee_core.study import running

    words = console.command_line()
    before = running.Record.read(study.folder)
    running.check_outputs(study, [*plan.steps, report_step(study)], before)
    if not dry_run:
        running.make_folders(study)
    console.say(about)
    for line in (*plan.notes, *(f"left out: {x}" for x in plan.reasons())):
        console.say(line)
    if dry_run:
        folders = shlex.join(["mkdir", "-p", *map(str, running.folders(study))])
        lines = [step.line for step in (*plan.steps, report_step(study))]
        console.out("\n".join([folders, *lines]))
        return
    ctx.meta[console.RESUMES] = RESUME_LINE
    record = running.begin(study, words, plan, models)
    perform = Performer(ctx)
    total = len(plan.steps) + 1
    named_models = _models_by_store(plan.steps)
    workers = None
    try:
        with naming(named_models):
            failed = running.carry_out(
                plan.extractions, record, perform, console.say, total=total
            )
            again = of_those(failed)
            steps = [*again.analyses, report_step(study)]
            record.outdate(report_step(study))
            running.check_outputs(study, again.analyses, record)
            first = len(plan.extractions) + 1
            n = min(n_workers(at_once, _memory_of(study)), len(again.analyses))
            workers = Workers(perform, named_models, n) if n > 1 else None
            failed += running.carry_out(
                steps,
                record,
                perform,
                console.say,
                first=first,
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
    if record.steps[report_step(study).name].status == running.DONE:
        console.out(str(study.folder / "report.html"))
    if failed:
        bad = [f"{step.name} ({record.steps[step.name].reason})" for step in failed]
        raise VitseeError(f"{len(bad)} of {total} steps failed: {'; '.join(bad)}")


def _memory_of(study: Study) -> int | None:
    """The largest --memory of a step; None without any."""
    given = [
        int(setting.words[1])
        for settings in study.settings.values()
        for setting in settings
        if setting.words[0] == "--memory"
    ]
    return max(given, default=None)


def report_step(study: Study) -> Step:
    """The last step: the page."""
    from vitsee_core.study.steps import Step

    page = study.folder / "report.html"
    words = ("report", str(study.folder), "-o", str(page), "--force")
    return Step("report", words, (), (page,))


def _outputs(steps: Sequence[Step]) -> set[object]:
    return {path for step in steps for path in step.outputs}


def check_train(study: Study) -> None:
    """Refuse the images themselves as those to train on."""
    if study.train is None:
        return
    places = [Path(data).expanduser() for data in (study.data, study.train)]
    same = all(place.exists() for place in places) and places[0].samefile(places[1])
    if same or study.data == study.train:
        raise VitseeError(
            f"--train {study.train} has the images of --data: what learns from them cannot be "
            "tested on them; leave --train out, or name other images of the same classes"
        )


def _survey(models: Mapping[str, str]) -> list[SurveyedModel]:
    """Survey all models before any work starts, and name all that are unknown."""
    from vitsee_core.study.catalogue import survey

    found = []
    unknown = []
    for label, name in models.items():
        try:
            found.append(survey(label, name, vars(model_options_of(name))))
        except VitseeError as error:
            unknown.append(str(error))
    if unknown:
        raise VitseeError("; ".join(unknown))
    return found


def model_options_of(name: str) -> ModelOptions:
    """The options in a model's name, as extract reads them."""
    return _extracted([name, "--data", "images", "-o", "store"])


def _extracted(words: Sequence[str]) -> ModelOptions:
    """The model of a command line of extract, without the command's name."""
    from vitsee_cli.model_options import model_of

    ctx = click.get_current_context()
    extract = commands_of(ctx)("extract")
    assert extract is not None
    return model_of(extract.make_context("extract", [*words], ctx).params)


def _models_by_store(steps: Sequence[Step]) -> dict[Path, NamedModel]:
    """The folder of each store that the steps extract -> the model that their words name."""
    from vitsee_core.models.provenance import NamedModel

    found = {}
    for step in steps:
        if step.command == "extract" and step.make is None:
            try:
                own = _extracted(step.words[1:])
            except (click.ClickException, VitseeError):
                continue  # the step itself says what is wrong
            code = own.trust_remote_code
            found[step.outputs[0]] = NamedModel(own.name, own.model_args, code)
    return found


def _counted(study: Study) -> tuple[Study, bool]:
    """The study with the numbers of its images; and whether they have labels."""
    from vitsee_core.images import open_source

    named = [data for data in (study.data, study.train) if data is not None]
    labels = {data: open_source(data).labels for data in named}
    there = {data: len(found) for data, found in labels.items()}
    labelled = all(bool((found >= 0).any()) for found in labels.values())
    return replace(study, there=there), labelled


def named(models: Sequence[str]) -> dict[str, str]:
    """Label -> model, of `NAME=MODEL` or `MODEL`; labels as `check_labels` demands."""
    from vitsee_core.study.steps import check_labels, label_of

    pairs = []
    for text in models:
        label, sign, name = text.partition("=")
        given = sign and not {"/", ":", "?"} & set(label)
        pairs.append((label, name) if given else (label_of(text), text))
    return check_labels(pairs)
