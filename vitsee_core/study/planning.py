"""The steps of a study, from its request and what its models offer."""

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
    HEADS,
    LABELS,
    MORE_NEEDS,
    MORE_SITES,
    PIXELS,
    RESIDUAL,
    ROWS,
    TOKENS,
    TRAIN,
    USER_OPTION,
    recipe_of,
)
from vitsee_core.study.steps import OPTIONS_BEYOND_POOLED, Plan, Step, Study
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError

# Images that receptive fields are averaged over: 256 are smooth, and take four times as long as 64.
MIN_FIELD_IMAGES = 4
MAX_FIELD_IMAGES = 64
SMOOTH_FIELD_IMAGES = 256

SCORES = ("knn", "probe", "cluster", "retrieve")  # analyses whose tables best-layer reads
BEST = "best-layer"

# Contents of stores, in the words of messages and in the order that messages have.
DESCRIPTIONS = {
    TOKENS: "every token",
    HEADS: "parts of heads",
    FIELDS: "receptive fields",
    PIXELS: "pixels",
    ATTENTION: "attention summaries",
    ROWS: "attention of single images",
    RESIDUAL: "products of skips and branches",
    MORE_SITES: "sites within blocks",
}
# Contents of stores -> what a model has to offer to have them; those that are absent any model has.
NEEDS_OF_CONTENTS = {
    FIELDS: "grid",
    HEADS: "heads",
    RESIDUAL: "residual",
    ATTENTION: "attention",
    ROWS: "attention",
}


def study_analyses() -> list[str]:
    """Return the analyses that a study can run, and the page that it can make."""
    return [*needs_of_analyses(), BEST, EXPLORE]


def check_choice(study: Study) -> None:
    """Refuse analyses that do not exist, and a choice that leaves none.

    Raises:
        VitseeError: names the analysis and those that exist.
    """
    # By name: a mistyped one would else be an analysis that never applies.
    analyses = study_analyses()
    for name in (*study.analyses, *study.skip):
        if name not in analyses:
            raise VitseeError(
                f"no analysis {name!r}; analyses of a study: {', '.join(analyses)}"
            )
    if not any(study.takes(name) for name in analyses):
        raise VitseeError("--skip leaves no analysis of those asked for")


def plan(study: Study, models: Sequence[SurveyedModel], *, labelled: bool) -> Plan:
    """Return the steps of a study of these models, and what it leaves out with the reasons.

    Args:
        study: the request.
        models: those that could be read; of an earlier plan, those that were extracted.
        labelled: whether the images have labels.

    Raises:
        VitseeError: an analysis does not exist, none is left, or two results have one name.
    """
    check_choice(study)
    study = replace(study, models={model.label: model.name for model in models})
    plan = Plan()
    # All analyses are checked before the first step is made, so that reasons come in this order:
    # of the data and the models, then of recipes without a step.
    models_of_command: dict[str, list[SurveyedModel]] = {}
    for command, needs in (needs_of_analyses() | {EXPLORE: ("grid",)}).items():
        if not study.takes(command):
            continue
        reason = _reason_of_data(study, command, labelled)
        if reason:
            plan.left_out[command] = reason
            continue
        able_models = _models_that_offer(command, needs, models, plan.left_out)
        if able_models:
            models_of_command[command] = able_models
    for command, able_models in models_of_command.items():
        recipe = recipe_of(command)
        steps = list(recipe.steps(study, able_models))
        if not steps:
            plan.left_out[command] = recipe.reason_without_steps
        plan.analyses += steps
    if study.takes(BEST):
        _add_best_layer(study, plan)
    plan.contents = _contents_for(study, plan.analyses)
    plan.extractions = _extractions(study, models, plan)
    plan.notes = _notes(study, plan)
    check_names(plan)
    return plan


def check_names(plan: Plan) -> None:
    """Refuse two results with one name: `a-b`, and `a` with `b`.

    Raises:
        VitseeError: names the result.
    """
    n_steps = Counter(step.name for step in plan.steps)
    repeated = [name for name, count in n_steps.items() if count > 1]
    if repeated:
        raise VitseeError(
            f"two results of this study would be called {repeated[0]}; give a model "
            "another name (NAME=MODEL)"
        )


def _contents_for(study: Study, steps: Sequence[Step]) -> set[str]:
    """Return what stores have to hold.

    Args:
        study: a thorough one has the contents for all figures of the papers.
        steps: the analyses that read the stores.
    """
    contents: set[str] = set()
    for step in steps:
        # best-layer reads tables, no stores.
        if step.command != BEST:
            contents.update(recipe_of(step.command).contents)
    if study.thorough:
        contents |= {TOKENS, MORE_SITES}
    return contents


def _extractions(study: Study, models: Sequence[SurveyedModel], plan: Plan) -> list[Step]:
    """Return the steps that make stores, model by model.

    Args:
        study: the request.
        models: of the study.
        plan: its analyses say which stores are read, its contents what these have to hold.
    """
    read_stores = {path for step in plan.analyses for path in step.inputs}
    extractions = []
    for model in models:
        store = study.store(model.label)
        if store in read_stores:
            # An earlier study may have written more: a store that lost it would be another one.
            contents = plan.contents | (stored_contents(store, model) or set())
            extractions.append(extraction(study, model, "", contents))
        if study.store(model.label, "train") in read_stores:
            extractions.append(extraction(study, model, "train", plan.contents))
    return extractions


def extraction(
    study: Study, model: SurveyedModel, images: str, contents: set[str]
) -> Step:
    """Return the step that makes a model's store.

    Args:
        study: the request.
        model: the model.
        images: "train" for the images that classifiers train on, "" for the study's images.
        contents: what the store has to hold beyond pooled vectors; what the model does not offer
            is left out. Stores of training images hold pooled vectors alone.
    """
    data = study.train if images == "train" else study.data
    assert data is not None
    store = study.store(model.label, images)
    words = ["--data", data, "--images", str(study.n_requested(images)), "-o", str(store)]
    if study.seed:
        words += ["--seed", str(study.seed)]
    if study.device != "auto":
        words += ["--device", study.device]
    ignored_settings: tuple[str, ...] = ()
    if images == "train":
        words += ["--tokens", "pooled", "--attention", "none", "--no-residual"]
        ignored_settings = OPTIONS_BEYOND_POOLED
        name = f"extract-{model.label}-train"
    else:
        words += _options_for_contents(study, model, contents)
        name = f"extract-{model.label}"
    words = [
        "extract",
        model.name,
        *study.with_settings("extract", words, ignored_settings),
    ]
    return Step(name, tuple(words), inputs=(), outputs=(store,))


def _options_for_contents(
    study: Study, model: SurveyedModel, contents: set[str]
) -> list[str]:
    """Return the options of extract with which a store holds these contents, and not more.

    Args:
        study: the request.
        model: what it does not offer is left out.
        contents: beyond pooled vectors.
    """
    words: list[str] = []
    sites = ["blocks", "head"]  # the default of extract
    if HEADS in contents and model.heads is not None:
        sites.append(model.heads)
    if MORE_SITES in contents:
        sites += model.more_groups
    if len(sites) > 2:
        for site in sites:
            words += ["--sites", site]
    if not contents & {TOKENS, HEADS}:
        words += ["--tokens", "pooled"]
    # The default of extract are summaries; rows hold them, too.
    if ROWS in contents and model.lacks["attention"] is None:
        words += ["--attention", "rows"]
    elif ATTENTION not in contents:
        words += ["--attention", "none"]
    if RESIDUAL not in contents:
        words.append("--no-residual")
    if PIXELS in contents:
        words.append("--inputs")
    if FIELDS in contents and model.lacks["grid"] is None:
        words += ["--erf", str(n_field_images(study, model))]
    return words


def n_field_images(study: Study, model: SurveyedModel) -> int:
    """Return the number of images that receptive fields are averaged over: so many that their
    backward passes, one for each site, take no longer than the forward pass of all images."""
    if study.thorough:
        return min(SMOOTH_FIELD_IMAGES, study.n_images())
    affordable = max(MIN_FIELD_IMAGES, study.n_images() // model.n_fields)
    return min(MAX_FIELD_IMAGES, affordable, study.n_images())


def _notes(study: Study, plan: Plan) -> list[str]:
    """Return remarks on defaults of the plan that a user may want to change."""
    if study.sets("extract", "--erf"):
        return []
    n_images = set()
    for step in plan.extractions:
        if "--erf" in step.words:
            value = int(step.words[step.words.index("--erf") + 1])
            if value < SMOOTH_FIELD_IMAGES:
                n_images.add(value)
    # Fields that are averaged over all images cannot be smoother.
    if not n_images or min(n_images) == study.n_images():
        return []
    number = str(min(n_images))
    if len(n_images) > 1:
        number = f"{min(n_images)} to {max(n_images)}"
    return [
        f"receptive fields are averaged over {number} images, so that they take no "
        "longer than the rest of an extraction; smooth ones: --set "
        f"extract.erf={SMOOTH_FIELD_IMAGES}"
    ]


def _models_that_offer(
    command: str,
    needs: Sequence[str],
    models: Sequence[SurveyedModel],
    left_out: dict[str, str],
) -> list[SurveyedModel]:
    """Return the models that offer what an analysis needs, and enter the others.

    Args:
        command: the analysis.
        needs: what it declares to need of a model.
        models: of the study.
        left_out: receives the reason for each of the others, or one for the analysis if no model
            offers what it needs.
    """
    all_needs = (*needs, *MORE_NEEDS.get(command, ()))
    able_models = []
    reasons: dict[str, str] = {}
    for model in models:
        reason = model.lack(all_needs)
        if reason is None:
            able_models.append(model)
        else:
            reasons[model.label] = reason
    if able_models:
        for label, reason in reasons.items():
            left_out[f"{command} of {label}"] = reason
    elif models:
        left_out[command] = reasons[models[0].label]
    return able_models


def _reason_of_data(study: Study, command: str, labelled: bool) -> str:
    """Return why the study's data do not suffice for an analysis; "" if they do.

    Args:
        study: the request.
        command: the analysis.
        labelled: whether the images have labels.
    """
    recipe = recipe_of(command)
    option, description = recipe.required_option
    is_set = bool(option) and study.sets(command, option)
    image_word = "clips" if study.sets("extract", "--frames") else "images"
    if USER_OPTION in recipe.data_needs and not is_set:
        setting = f"{command}.{option.removeprefix('--')}=PATH"
        request = f"name them with --set {setting}"
        return f"it needs {description} beside the {image_word}; {request}"
    if study.n_images() < recipe.min_images:
        number = plural(study.n_images(), image_word)
        return f"{number} of {study.data}; expected at least {recipe.min_images}"
    if LABELS in recipe.data_needs and not labelled and not is_set:
        return f"the {image_word} of {study.data} have no labels"
    if TRAIN in recipe.data_needs and study.train is None:
        return (
            f"it learns from other {image_word} than it is tested on: name them with "
            "--train"
        )
    return ""


def _add_best_layer(study: Study, plan: Plan) -> None:
    """Add the step that finds the best layer in the plan's tables of scores, or the reason why
    there is none."""
    tables = tuple(step.outputs[0] for step in plan.analyses if step.command in SCORES)
    if not tables:
        plan.left_out[BEST] = f"none of its inputs is made ({', '.join(SCORES)})"
        return
    table = study.result(BEST)
    picture = table.with_suffix(".png")
    words = [BEST, *map(str, tables), *study.with_settings(BEST, ())]
    words += ["-o", str(table), "--png", str(picture), "--force"]
    # partial: where one score fails, the others still have a best layer.
    plan.analyses.append(
        Step(BEST, tuple(words), inputs=tables, outputs=(table, picture), partial=True)
    )


def stored_contents(
    path: Path, model: SurveyedModel, *, complete: bool = False
) -> set[str] | None:
    """Return what a store holds beyond pooled vectors.

    Args:
        path: of the store.
        model: its sites within blocks and heads have the model's names.
        complete: read a complete store only.

    Returns:
        Contents in the words of `Recipe.contents`; None without a readable store.
    """
    try:
        identity = open_store(path, allow_partial=not complete).manifest.identity
    except (VitseeError, OSError):
        return None
    # Any JSON may stand in the identity of a stranger's store.
    tokens = identity.get("tokens")
    sites = identity.get("sites")
    attention = identity.get("attention")
    holds = {
        TOKENS: isinstance(tokens, dict) and tokens.get("default") == "all",
        HEADS: isinstance(sites, list) and model.heads in sites,
        FIELDS: bool(identity.get("erf")),
        PIXELS: identity.get("inputs") is True,
        ATTENTION: attention not in (None, "none"),
        ROWS: attention in ("rows", "full"),
        MORE_SITES: isinstance(sites, list) and {*model.more_sites} <= {*sites},
        RESIDUAL: identity.get("residual") is True,
    }
    return {content for content, is_there in holds.items() if is_there}


def check_stored(
    plan: Plan, models: Sequence[SurveyedModel], earlier_steps: Mapping[str, StudyStep]
) -> None:
    """Check that complete stores of an earlier study hold what the analyses of this one need.

    Args:
        plan: of this study.
        models: its models.
        earlier_steps: name -> step of the earlier study; a store is trusted if its command is
            the same.

    Raises:
        VitseeError: a store holds less.
    """
    extractions = {step.name: step for step in plan.extractions}
    for model in models:
        step = extractions.get(f"extract-{model.label}")
        if step is None:
            continue
        earlier_step = earlier_steps.get(step.name)
        if earlier_step is not None and earlier_step.command == step.line:
            continue
        path = step.outputs[0]
        contents = stored_contents(path, model, complete=True)
        # extract makes a store that is not there, and finishes one that is not complete.
        if contents is None:
            continue
        missing = _contents_of_model(plan, model) - contents
        if missing:
            names = [text for word, text in DESCRIPTIONS.items() if word in missing]
            raise VitseeError(
                f"{path} was extracted for fewer analyses and lacks {', '.join(names)}; "
                "remove it to extract anew, or choose another -o"
            )


def _contents_of_model(plan: Plan, model: SurveyedModel) -> set[str]:
    """Return the contents that the plan's stores hold and that this model can have."""
    contents = set()
    for content in plan.contents:
        need = NEEDS_OF_CONTENTS.get(content)
        if need is None or model.lacks[need] is None:
            contents.add(content)
    return contents
