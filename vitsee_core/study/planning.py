"""The steps of a study, from what it is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vitsee_core.pages.report.study_record import StudyStep
from vitsee_core.runtime.machine import plural
from vitsee_core.study.catalogue import SurveyedModel, needs_of_analyses
from vitsee_core.study.recipes import (
    ATTENTION,
    EXPLORE,
    FIELDS,
    GIVEN,
    HEADS,
    LABELS,
    MORE_NEEDS,
    MORE_SITES,
    PIXELS,
    RESIDUAL,
    ROWS,
    TOKENS,
    TRAIN,
    recipe_of,
)
from vitsee_core.study.steps import KEPT, Plan, Step, Study
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError

# Over which receptive fields are averaged: 256 are smooth, and take four times as long as 64.
FEWEST_FIELDS = 4
FIELD_IMAGES = 64
SMOOTH_FIELDS = 256
SCORES = ("knn", "probe", "cluster", "retrieve")
BEST = "best-layer"


def known_analyses() -> list[str]:
    """The analyses that a study can run, and the page that it can make."""
    return [*needs_of_analyses(), BEST, EXPLORE]


def check_choice(study: Study) -> None:
    """Refuse analyses that do not exist, and a choice that leaves none."""
    known = known_analyses()
    for name in (*study.analyses, *study.skip):
        if name not in known:
            raise VitseeError(
                f"no analysis {name!r}; analyses of a study: {', '.join(known)}"
            )
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
    for command, needs in (needs_of_analyses() | {EXPLORE: ("grid",)}).items():
        if not study.takes(command):
            continue
        if reason := _unfit(study, command, labelled):
            found.left_out[command] = reason
        elif offering := _offering(command, needs, models, found.left_out):
            able[command] = offering
    for command, offering in able.items():
        steps = list(recipe_of(command).steps(study, offering))
        if not steps:
            found.left_out[command] = recipe_of(command).alone
        found.analyses += steps
    found.analyses += _best(study, found.analyses)
    if study.takes(BEST) and not any(s.command == BEST for s in found.analyses):
        found.left_out[BEST] = f"none of its inputs is made ({', '.join(SCORES)})"
    found.keeps = {what for step in found.analyses for what in _keeps(step.command)}
    found.keeps |= {TOKENS, MORE_SITES} if study.thorough else set()
    used = {path for step in found.analyses for path in step.inputs}
    for model in models:
        for images in ("", "train"):
            place = study.store(model.label, images)
            if place in used:
                before = set() if images else kept(place, model) or set()
                found.extractions.append(
                    extraction(study, model, images, found.keeps | before)
                )
    found.notes = _notes(study, found)
    check_names(found)
    return found


def check_names(found: Plan) -> None:
    """Refuse two results with one name: `a-b`, and `a` with `b`."""
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
        sites = ["blocks", "head"]
        if HEADS in keeps and model.heads is not None:
            sites.append(model.heads)
        sites += model.more_groups if MORE_SITES in keeps else ()
        if len(sites) > 2:
            words += [word for site in sites for word in ("--sites", site)]
        words += [] if keeps & {TOKENS, HEADS} else ["--tokens", "pooled"]
        level = "rows" if ROWS in keeps and model.lacks["attention"] is None else "none"
        words += [] if ATTENTION in keeps and level == "none" else ["--attention", level]
        words += [] if RESIDUAL in keeps else ["--no-residual"]
        words += ["--inputs"] if PIXELS in keeps else []
        if FIELDS in keeps and model.lacks["grid"] is None:
            words += ["--erf", str(n_fields(study, model))]
    own = study.with_settings("extract", words[2:], KEPT if images == "train" else ())
    words = [*words[:2], *own]
    name = f"extract-{model.label}{f'-{images}' if images else ''}"
    return Step(name, tuple(words), (), (place,))


def n_fields(study: Study, model: SurveyedModel) -> int:
    """The number of images that receptive fields are taken over: so many that their backward
    passes, for each site, take no longer than the forward pass of all images."""
    if study.thorough:
        return min(SMOOTH_FIELDS, study.n_images())
    most = max(FEWEST_FIELDS, study.n_images() // model.n_fields)
    return min(FIELD_IMAGES, most, study.n_images())


def _notes(study: Study, found: Plan) -> list[str]:
    """Remarks on defaults of the plan that somebody may want otherwise."""
    at = [
        (step.words, step.words.index("--erf") + 1)
        for step in found.extractions
        if "--erf" in step.words
    ]
    few = sorted({int(words[i]) for words, i in at if int(words[i]) < SMOOTH_FIELDS})
    if not few or study.sets("extract", "--erf") or few[0] == study.n_images():
        return []
    number = f"{few[0]} to {few[-1]}" if len(few) > 1 else f"{few[0]}"
    return [
        f"receptive fields are averaged over {number} images, so that they take no longer than the "
        f"rest of an extraction; smooth ones: --set extract.erf={SMOOTH_FIELDS}"
    ]


def _keeps(command: str) -> tuple[str, ...]:
    return () if command == BEST else recipe_of(command).keeps


def _offering(
    command: str,
    needs: Sequence[str],
    models: Sequence[SurveyedModel],
    left_out: dict[str, str],
) -> list[SurveyedModel]:
    """The models that offer what an analysis needs; others are left out with the reason."""
    wanted = (*needs, *MORE_NEEDS.get(command, ()))
    reasons = {model.label: model.lack(wanted) for model in models}
    offering = [model for model in models if reasons[model.label] is None]
    if not offering and models:
        left_out[command] = next(iter(reasons.values())) or ""
        return []
    left_out |= {
        f"{command} of {label}": reason
        for label, reason in reasons.items()
        if reason is not None
    }
    return offering


def _unfit(study: Study, command: str, labelled: bool) -> str:
    """Why these data do not do for an analysis, if they do not."""
    recipe = recipe_of(command)
    option, what = recipe.asks
    what_rows = "clips" if study.sets("extract", "--frames") else "images"
    given = bool(option) and study.sets(command, option)
    if GIVEN in recipe.wants and not given:
        place = f"{command}.{option.removeprefix('--')}=PATH"
        return f"it needs {what} beside the {what_rows}; name them with --set {place}"
    if study.n_images() < recipe.least:
        there = plural(study.n_images(), what_rows)
        return f"{there} of {study.data}; expected at least {recipe.least}"
    if LABELS in recipe.wants and not labelled and not given:
        return f"the {what_rows} of {study.data} have no labels"
    if TRAIN in recipe.wants and study.train is None:
        return f"it learns from other {what_rows} than it is tested on: name them with --train"
    return ""


def _best(study: Study, steps: Sequence[Step]) -> list[Step]:
    scored = [step for step in steps if step.command in SCORES]
    if not scored or not study.takes(BEST):
        return []
    tables = tuple(step.outputs[0] for step in scored)
    table = study.result(BEST)
    picture = table.with_suffix(".png")
    options = study.with_settings(BEST, ())
    words = (
        BEST,
        *map(str, tables),
        *options,
        "-o",
        str(table),
        "--png",
        str(picture),
        "--force",
    )
    return [Step(BEST, words, tables, (table, picture), partial=True)]


NAMES = {
    TOKENS: "every token",
    HEADS: "parts of heads",
    FIELDS: "receptive fields",
    PIXELS: "pixels",
    ATTENTION: "attention summaries",
    ROWS: "attention of single images",
    RESIDUAL: "products of skips and branches",
    MORE_SITES: "sites within blocks",
}


def kept(place: Path, model: SurveyedModel, *, complete: bool = False) -> set[str] | None:
    """Contents of a store beyond pooled vectors, in the words of `recipes`; None without a readable
    store. complete: only of a complete one."""
    try:
        about = open_store(place, allow_partial=not complete).manifest.identity
    except (VitseeError, OSError):
        return None
    tokens = about.get("tokens")
    sites = about.get("sites")
    holds = {
        TOKENS: isinstance(tokens, dict) and tokens.get("default") == "all",
        HEADS: isinstance(sites, list) and model.heads in sites,
        FIELDS: bool(about.get("erf")),
        PIXELS: about.get("inputs") is True,
        ATTENTION: about.get("attention") not in (None, "none"),
        ROWS: about.get("attention") in ("rows", "full"),
        MORE_SITES: isinstance(sites, list) and {*model.more_sites} <= {*sites},
        RESIDUAL: about.get("residual") is True,
    }
    return {what for what, there in holds.items() if there}


def check_kept(
    plan: Plan, models: Sequence[SurveyedModel], steps: Mapping[str, StudyStep]
) -> None:
    """Check that complete stores of an earlier study hold what the analyses of this one need.

    Args:
        plan: of this study.
        models: its models.
        steps: of the earlier study, by name: results of its own command are trusted.

    Raises:
        VitseeError: one holds less.
    """
    for model in models:
        step = next(
            (s for s in plan.extractions if s.name == f"extract-{model.label}"), None
        )
        if step is None or (step.name in steps and steps[step.name].command == step.line):
            continue
        place = step.outputs[0]
        holds = kept(place, model, complete=True)
        lacks = (
            []
            if holds is None
            else [what for what in NAMES if what in _wanted(plan, model)]
        )
        if lacks := [NAMES[what] for what in lacks if what not in (holds or ())]:
            raise VitseeError(
                f"{place} was extracted for fewer analyses and lacks {', '.join(lacks)}; remove it "
                "to extract anew, or choose another -o"
            )


def _wanted(plan: Plan, model: SurveyedModel) -> set[str]:
    """The parts of a store that the plan keeps and this model can provide."""
    needs = {FIELDS: "grid", HEADS: "heads", RESIDUAL: "residual"}
    needs |= dict.fromkeys((ATTENTION, ROWS), "attention")
    return {
        what
        for what in plan.keeps
        if what not in needs or model.lacks[needs[what]] is None
    }
