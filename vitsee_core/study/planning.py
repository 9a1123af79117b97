"""From what a study is asked for to its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vitsee_core.catalogue import needs_of_analyses
from vitsee_core.machine import counted
from vitsee_core.study.kept import kept
from vitsee_core.study.recipes import (
    ATTENTION,
    FIELDS,
    HEADS,
    LABELS,
    MORE_NEEDS,
    PIXELS,
    RESIDUAL,
    TOKENS,
    TRAIN,
    recipe_of,
)
from vitsee_core.study.steps import Plan, Step, Study
from vitsee_core.study.surveyed import SurveyedModel
from vitsee_stores.errors import VitseeError

FIELD_IMAGES = (
    64  # over which receptive fields are averaged; 256 are smoother, at four times the cost
)
SCORES = ("knn", "probe", "cluster", "retrieve")
BEST = "best-layer"


def check_choice(study: Study) -> None:
    """Whether the analyses that are asked for exist.

    Raises:
        VitseeError: one does not, or none is left.
    """
    known = [*needs_of_analyses(), BEST]
    for name in (*study.analyses, *study.skip):
        if name not in known:
            raise VitseeError(f"no analysis {name!r}; analyses of a study: {', '.join(known)}")
    if not any(study.takes(name) for name in known):
        raise VitseeError("--skip leaves no analysis of those asked for")


def plan(study: Study, models: Sequence[SurveyedModel], *, labelled: bool) -> Plan:
    """The steps of a study of these models.

    Args:
        study: what is asked for.
        models: those that could be read (of an earlier plan: that were extracted).
        labelled: the images have labels.

    Raises:
        VitseeError: see `check_choice` and `check_names`.
    """
    check_choice(study)
    study = replace(study, models={model.label: model.name for model in models})
    found = Plan()
    able: dict[str, list[SurveyedModel]] = {}
    for command, needs in needs_of_analyses().items():
        if not study.takes(command):
            continue
        if reason := _unfit(study, command, labelled):
            found.left_out[command] = reason
        elif offering := _offering(command, needs, models, found.left_out):
            able[command] = offering
    for command, offering in able.items():
        steps = list(recipe_of(command).steps(study, offering))
        if not steps:
            found.left_out[command] = "it compares models of two kinds, with and without attention"
        found.analyses += steps
    found.analyses += _best(study, found.analyses)
    if study.takes(BEST) and not any(s.command == BEST for s in found.analyses):
        found.left_out[BEST] = f"none of its inputs is made ({', '.join(SCORES)})"
    found.keeps = {what for step in found.analyses for what in _keeps(step.command)}
    used = {path for step in found.analyses for path in step.inputs}
    for model in models:
        for images in ("", "train"):
            place = study.store(model.label, images)
            if place in used:
                before = set() if images else kept(place, model) or set()
                found.extractions.append(extraction(study, model, images, found.keeps | before))
    check_names(found)
    return found


def check_names(found: Plan) -> None:
    """Whether each step has a name, and with it a result, of its own.

    Raises:
        VitseeError: two have one: `a-b`, and `a` with `b`.
    """
    names = Counter(step.name for step in found.steps)
    if twice := [name for name, times in names.items() if times > 1]:
        raise VitseeError(
            f"two results of this study would be called {twice[0]}; give a model another name "
            "(NAME=MODEL)"
        )


def extraction(study: Study, model: SurveyedModel, images: str, keeps: set[str]) -> Step:
    """The step that makes a model's store, of the study's images or of those to train on."""
    data = study.train if images == "train" else study.data
    assert data is not None
    place = study.store(model.label, images)
    words = ["extract", model.name, "--data", data, "--images", str(study.asked(images))]
    words += ["-o", str(place)]
    if study.seed:
        words += ["--seed", str(study.seed)]
    if study.device != "auto":
        words += ["--device", study.device]
    if images == "train":
        words += ["--tokens", "pooled", "--attention", "none", "--no-residual"]
    else:
        if HEADS in keeps and model.heads is not None:
            words += ["--sites", "blocks", "--sites", "head", "--sites", model.heads]
        words += [] if keeps & {TOKENS, HEADS} else ["--tokens", "pooled"]
        words += [] if ATTENTION in keeps else ["--attention", "none"]
        words += [] if RESIDUAL in keeps else ["--no-residual"]
        words += ["--inputs"] if PIXELS in keeps else []
        if FIELDS in keeps and model.lacks["grid"] is None:
            words += ["--erf", str(min(FIELD_IMAGES, study.n_images()))]
    name = f"extract-{model.label}{f'-{images}' if images else ''}"
    return Step(name, tuple(words), (), (place,))


def _keeps(command: str) -> tuple[str, ...]:
    return () if command == BEST else recipe_of(command).keeps


def _offering(
    command: str,
    needs: Sequence[str],
    models: Sequence[SurveyedModel],
    left_out: dict[str, str],
) -> list[SurveyedModel]:
    """The models that offer what an analysis needs; the others are left out, with the reason."""
    wanted = (*needs, *MORE_NEEDS.get(command, ()))
    reasons = {model.label: model.lack(wanted) for model in models}
    offering = [model for model in models if reasons[model.label] is None]
    if not offering and models:
        left_out[command] = next(iter(reasons.values())) or ""
        return []
    left_out |= {
        f"{command} of {label}": reason for label, reason in reasons.items() if reason is not None
    }
    return offering


def _unfit(study: Study, command: str, labelled: bool) -> str:
    """Why these data do not do for an analysis, if they do not."""
    recipe = recipe_of(command)
    if recipe.refusal:
        return recipe.refusal
    if study.n_images() < recipe.least:
        there = counted(study.n_images(), "images")
        return f"{there} of {study.data}; expected at least {recipe.least}"
    if LABELS in recipe.wants and not labelled:
        return f"the images of {study.data} have no labels"
    if TRAIN in recipe.wants and study.train is None:
        return "it learns from other images than it is tested on: name them with --train"
    return ""


def _best(study: Study, steps: Sequence[Step]) -> list[Step]:
    """best-layer on all scores."""
    scored = [step for step in steps if step.command in SCORES]
    if not scored or not study.takes(BEST):
        return []
    tables = tuple(step.outputs[0] for step in scored)
    table = study.result(BEST)
    picture = table.with_suffix(".png")
    words = (BEST, *map(str, tables), "-o", str(table), "--png", str(picture), "--force")
    return [Step(BEST, words, tables, (table, picture), partial=True)]


def reasons(left_out: Mapping[str, str]) -> list[str]:
    """`what, what: reason`, one line a reason."""
    together: dict[str, list[str]] = {}
    for what, reason in left_out.items():
        together.setdefault(reason, []).append(what)
    return [f"{', '.join(some)}: {reason}" for reason, some in together.items()]
