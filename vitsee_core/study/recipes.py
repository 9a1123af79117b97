"""How a study runs each analysis: on which models together, with which options, and what their
stores have to hold for it. An analysis that is not in `RECIPES` runs with its defaults on all
models together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter
from itertools import combinations

from vitsee_core.runtime.parameters import options_of
from vitsee_core.runtime.registry import guests, load
from vitsee_core.study.catalogue import SurveyedModel
from vitsee_core.study.step_makers import (
    MakeSteps,
    Models,
    each,
    each_trained,
    labels_of,
    step,
    together,
)
from vitsee_core.study.steps import Step, Study

# Contents of a store that extract writes beyond pooled vectors, by the words of `Recipe.contents`.
TOKENS = "tokens"  # every token of a site, not only its mean and class token
HEADS = "heads"  # the outputs of the first block's heads
FIELDS = "fields"  # effective receptive fields
PIXELS = "pixels"  # the images as the model sees them
ATTENTION = "attention"  # summaries of attention over images
ROWS = "rows"  # attention of single images
RESIDUAL = "residual"  # products of skips and branches
MORE_SITES = "more sites"  # sites within blocks

# Needs of an analysis that the data has to meet, by the words of `Recipe.data_needs`.
LABELS = "labels"
TRAIN = "train"
USER_OPTION = "user option"  # the user has to set `Recipe.required_option`

N_NEIGHBOURS = 10  # the default --k of similarity
N_VOTERS = 20  # the default --k of knn
MIN_CKA_IMAGES = 4  # debiased HSIC divides by n - 3
# With n models, all pairs are n (n - 1) / 2 steps; above this n each is compared with the first.
MAX_ALL_PAIRS = 4
MAX_ABLATED_IMAGES = 64  # head-importance runs the model once for each head

EXPLORE = "explore"  # not an analysis: a page beside the report
# Images of that page, for each model; the page holds tables of every image and every model.
MAX_EXPLORED = 12
MIN_EXPLORED = 4
MAX_EXPLORED_OF_ALL_MODELS = 36


@dataclass(frozen=True)
class Recipe:
    """How a study runs an analysis.

    Attributes:
        steps: yields the steps for the models that offer what the analysis needs.
        contents: what the stores have to hold beyond pooled vectors (`TOKENS`, ...).
        data_needs: what the data has to meet: `LABELS`, `TRAIN`, `USER_OPTION`.
        required_option: an option of the analysis, and what it names in words. With `USER_OPTION`
            no study runs the analysis unless the user sets it; with `LABELS` it can stand for them.
        min_images: with fewer images the analysis has no value.
        reason_without_steps: why `steps` may yield none; "" if it always yields one.
    """

    steps: MakeSteps
    contents: tuple[str, ...] = (TOKENS,)
    data_needs: tuple[str, ...] = ()
    required_option: tuple[str, str] = ("", "")
    min_images: int = 1
    reason_without_steps: str = ""


def _pairs(models: Models) -> list[tuple[SurveyedModel, SurveyedModel]]:
    """Return the pairs of models that are compared: all of a few, else each with the first."""
    if len(models) <= MAX_ALL_PAIRS:
        return list(combinations(models, 2))
    return [(models[0], model) for model in models[1:]]


def _cka(study: Study, models: Models) -> Iterator[Step]:
    """Yield CKA of block outputs: within each model, of pairs, and of all models' last layers."""
    yield from each("cka", "--sites", "blocks")(study, models)
    for pair in _pairs(models):
        labels = labels_of(pair)
        yield step(
            study,
            "cka",
            variant="-".join(labels),
            labels=labels,
            options=("--sites", "blocks"),
        )
    if study.thorough:
        yield from _cka_within_blocks(study, models)
    # Of two models, the pair above has the last layers already.
    if len(models) > 2:
        yield step(
            study,
            "cka",
            variant="last-layers",
            labels=labels_of(models),
            options=("--sites", "last", "--tokens", "mean-all"),
        )


def _cka_within_blocks(study: Study, models: Models) -> Iterator[Step]:
    """Yield CKA of sites within blocks (Raghu et al. 2021, Figs. 1, 2, 12; Walmer et al. 2023,
    Figs. 20 to 23)."""
    # Each model's norms with each other, and its branches with its skips.
    for model in models:
        if "norms" in model.more_groups:
            yield step(
                study,
                "cka",
                variant=f"norms-{model.label}",
                labels=[model.label],
                options=("--sites", "norms"),
            )
        if "residual" in model.more_groups:
            yield step(
                study,
                "cka",
                variant=f"branches-{model.label}",
                labels=[model.label],
                options=("--pairs", "branch"),
            )
    # All layers, within each model and between two.
    pairs = _pairs(models)
    for compared in [*[(model,) for model in models], *pairs]:
        options = ["--sites", "blocks"]
        offered_groups = {group for model in compared for group in model.more_groups}
        if "norms" in offered_groups:
            options += ["--sites", "norms"]
        if "hidden" in offered_groups:
            options += ["--sites", "hidden"]
        labels = labels_of(compared)
        yield step(
            study,
            "cka",
            variant=f"all-{'-'.join(labels)}",
            labels=labels,
            options=options,
        )
    for pair in pairs:
        labels = labels_of(pair)
        yield step(
            study,
            "cka",
            variant=f"depth-{'-'.join(labels)}",
            labels=labels,
            options=("--pairs", "same-depth"),
        )


def _similarity(study: Study, models: Models) -> Iterator[Step]:
    """Yield mutual nearest neighbours of pairs of models; of one model, between its layers."""
    options = ["--sites", "blocks", "--tokens", "mean-all", "--metric", "mutual_knn"]
    n_images = study.n_images()
    # Of 20 images, ten neighbours are most of the others, so that any two layers would agree.
    if n_images <= 2 * N_NEIGHBOURS:
        options += ["--k", str((n_images - 1) // 2)]
    compared = [labels_of(pair) for pair in _pairs(models)]
    if len(models) == 1:
        compared = [labels_of(models)]
    for labels in compared:
        yield step(
            study, "similarity", variant="-".join(labels), labels=labels, options=options
        )


def _attn_map(study: Study, models: Models) -> Iterator[Step]:
    """Yield attention maps of each kind; a thorough study has rollout, too."""
    with_cls = [model for model in models if model.class_token]
    if with_cls:
        yield from _maps_of_kind("mean-cls", with_cls)(study, with_cls)
    if models:
        yield from _maps_of_kind("aligned", models)(study, models)
    yield from together("attn-map", "--kind", "sink", variant="sink")(study, models)
    if study.thorough:
        yield from each("attn-map", "--kind", "rollout", variant="rollout")(study, models)


def _maps_of_kind(kind: str, models: Models) -> MakeSteps:
    """Return a maker of attention maps: of many models side by side in one figure, of a few each
    in its own."""
    make_steps = together if len(models) > MAX_ALL_PAIRS else each
    return make_steps("attn-map", "--kind", kind, variant=kind)


def _cka_heads(study: Study, models: Models) -> Iterator[Step]:
    """Yield, for each transformer, its heads against the first model without attention (Raghu et
    al. 2021, Fig. 5)."""
    transformers = labels_of(models)
    without_attention = [label for label in study.models if label not in transformers]
    if not without_attention:
        return
    for transformer in transformers:
        labels = [transformer, without_attention[0]]
        yield step(study, "cka-heads", variant="-".join(labels), labels=labels)


def _erf(study: Study, models: Models) -> Iterator[Step]:
    """Yield receptive fields of block outputs; a thorough study has those of branches, too."""
    yield from together("erf", "--sites", "blocks")(study, models)
    if not study.thorough:
        return
    residual = [model for model in models if "residual" in model.more_groups]
    if residual:
        make_steps = together("erf", "--sites", "residual", variant="residual")
        yield from make_steps(study, residual)


def _logit_attribution(study: Study, models: Models) -> Iterator[Step]:
    """Yield the step in a thorough study: only its stores hold the branches that are added up."""
    if study.thorough:
        yield from together("logit-attribution")(study, models)


def _normratio(study: Study, models: Models) -> Iterator[Step]:
    """Yield norm ratios of patches, and of class tokens if a model has one."""
    tokens = ["--tokens", "patches"]
    if any(model.class_token for model in models):
        tokens += ["--tokens", "cls"]
    yield from together("normratio", *tokens)(study, models)


def _localize(study: Study, models: Models) -> Iterator[Step]:
    """Yield localization of all sites, and of a corner and the centre of each ViT's grid."""
    yield from together("localize", "--summary", "site")(study, models)
    for model in models:
        if model.grid is None or min(model.grid) < 2:
            continue
        # The last grid of a CNN is too coarse for positions of its first.
        if not model.class_token:
            continue
        n_rows, n_columns = model.grid
        centre = f"{n_rows // 2},{n_columns // 2}"
        options = ["--sites", "first,depth:0.5,last"]
        options += ["--tokens", "0,0", "--tokens", centre]
        yield step(
            study,
            "localize",
            variant=f"tokens-{model.label}",
            labels=[model.label],
            options=options,
        )


def _knn(study: Study, models: Models) -> Iterator[Step]:
    """Yield nearest neighbours of each model; of few training images, half of them vote."""
    options = []
    n_train = study.n_images("train")
    if n_train < N_VOTERS:
        options = ["--k", str(max(1, n_train // 2))]
    yield from each_trained("knn", *options)(study, models)


def _probe(study: Study, models: Models) -> Iterator[Step]:
    """Yield linear probes, on the study's training images or on a part that is held out."""
    if study.train is not None:
        yield from each_trained("probe")(study, models)
    else:
        yield from each("probe", "--holdout", "0.3")(study, models)
    if study.thorough:
        yield from _token_probes(study, models)


def _token_probes(study: Study, models: Models) -> Iterator[Step]:
    """Yield probes of tokens (Raghu et al. 2021): of single ones (Figs. 11, D.4, F.3), and of the
    mean of all, where CNNs are read at the grid of their last stage (Fig. 13).

    They train on a part of the study's images, as stores of training images keep no tokens.
    """
    with_cls = [model for model in models if model.class_token]
    holdout = ("--holdout", "0.3")
    single = each("probe", *holdout, "--tokens", "each", variant="each")
    yield from single(study, with_cls)
    kinds = ("--tokens", "first", "--tokens", "mean-all", "--tokens", "rest")
    yield from each("probe", *holdout, *kinds, variant="tokens")(study, with_cls)
    mean = ("--tokens", "mean-all", "--match-last-stage")
    yield from each("probe", *holdout, *mean, variant="mean")(study, models)


def _effect(study: Study, models: Models) -> Iterator[Step]:
    """Yield a comparison of a model's variants (`NAME?OPTION=VALUE`) with the first of its name."""
    variants: dict[str, list[SurveyedModel]] = {}
    for model in models:
        name = model.name.partition("?")[0]
        variants.setdefault(name, []).append(model)
    for same_name in variants.values():
        if len(same_name) > 1:
            labels = labels_of(same_name)
            yield step(
                study,
                "effect",
                variant=labels[0],
                labels=labels,
                options=("--replicates",),
            )


def _head_importance(study: Study, models: Models) -> Iterator[Step]:
    """Yield the step if it is asked for, over few images: the model runs once for each head."""
    if study.thorough or "head-importance" in study.analyses:
        n_images = min(study.n_images(), MAX_ABLATED_IMAGES)
        yield from each("head-importance", "--images", str(n_images))(study, models)


def _explore(study: Study, models: Models) -> Iterator[Step]:
    """Yield the step of the page, over so few images that the page stays small."""
    stores = [study.store(model.label) for model in models]
    n_images = min(MAX_EXPLORED, MAX_EXPLORED_OF_ALL_MODELS // len(models))
    n_images = max(MIN_EXPLORED, n_images)
    options = ("--images", str(n_images), "--recompute")
    page = study.folder / f"{EXPLORE}.html"
    words = [EXPLORE, *map(str, stores), *study.with_settings(EXPLORE, options)]
    if study.note:
        words += ["--note", study.note]
    words += ["-o", str(page), "--force"]
    yield Step(EXPLORE, tuple(words), inputs=tuple(stores), outputs=(page,))


RECIPES: dict[str, Recipe] = {
    EXPLORE: Recipe(_explore, contents=(TOKENS, ATTENTION)),
    "attn-dist": Recipe(together("attn-dist"), contents=(ATTENTION,)),
    "attn-map": Recipe(_attn_map, contents=(ATTENTION,)),
    "head-types": Recipe(each("head-types"), contents=(ATTENTION,)),
    "cka": Recipe(_cka, min_images=MIN_CKA_IMAGES),
    "similarity": Recipe(_similarity, min_images=MIN_CKA_IMAGES),
    "cka-heads": Recipe(
        _cka_heads,
        contents=(ATTENTION, HEADS, TOKENS),
        min_images=MIN_CKA_IMAGES,
        reason_without_steps="it compares models of two kinds, with and without attention",
    ),
    "effect": Recipe(
        _effect,
        min_images=MIN_CKA_IMAGES,
        reason_without_steps="it compares variants of a model (NAME?random-init=0)",
    ),
    "head-importance": Recipe(
        _head_importance,
        contents=(ATTENTION, PIXELS),
        reason_without_steps=(
            "it runs the model once for each head: ask with --analyses or --thorough"
        ),
    ),
    "normratio": Recipe(_normratio, contents=(RESIDUAL,)),
    "localize": Recipe(_localize, contents=(TOKENS, PIXELS), min_images=MIN_CKA_IMAGES),
    "erf": Recipe(_erf, contents=(FIELDS,)),
    "weights": Recipe(together("weights"), contents=()),
    "spectrum": Recipe(together("spectrum"), contents=()),
    "cluster": Recipe(
        together("cluster"),
        contents=(),
        data_needs=(LABELS,),
        required_option=("--masks", "masks"),
    ),
    "retrieve": Recipe(
        together("retrieve", "--truth", "labels"),
        contents=(),
        data_needs=(LABELS,),
        required_option=("--truth", "a ground truth"),
    ),
    "knn": Recipe(_knn, contents=(), data_needs=(LABELS, TRAIN)),
    "probe": Recipe(_probe, contents=(), data_needs=(LABELS,)),
    "lens": Recipe(together("lens"), data_needs=(LABELS,)),
    "logit-attribution": Recipe(
        _logit_attribution,
        reason_without_steps="it needs sites within blocks: --thorough",
    ),
    "dense-probe": Recipe(
        each("dense-probe", "--holdout", "0.3"),
        data_needs=(USER_OPTION,),
        required_option=("--masks", "class maps"),
    ),
    "pca": Recipe(together("pca"), contents=(TOKENS, PIXELS)),
    "cosine-map": Recipe(together("cosine-map"), contents=(TOKENS, PIXELS)),
    "saliency": Recipe(
        together("saliency"),
        contents=(ROWS,),
        data_needs=(USER_OPTION,),
        required_option=("--masks", "masks of objects"),
    ),
    "propagate": Recipe(
        together("propagate"),
        data_needs=(USER_OPTION,),
        required_option=("--masks", "masks of the frames of videos"),
    ),
    "keypoints": Recipe(
        together("keypoints"),
        data_needs=(USER_OPTION,),
        required_option=("--pairs", "keypoints of pairs of images"),
    ),
}

# What a model has to offer beyond the `NEEDS` of an analysis for the study's step to make sense.
MORE_NEEDS = {
    "lens": ("classifier",),
    "logit-attribution": ("classifier",),
    "head-importance": ("classifier",),
}

# A need of a guest's analysis (`catalogue.offers`) -> contents of stores that it reads.
CONTENTS_FOR_NEED = {
    "sites": (TOKENS,),
    "grid": (TOKENS,),
    "attention": (ATTENTION,),
    "heads": (ATTENTION, HEADS, TOKENS),
    "residual": (RESIDUAL,),
    "images": (),
}


def recipe_of(command: str) -> Recipe:
    """Return the recipe of an analysis, which ships with vitsee or is a guest's."""
    if command in RECIPES:
        return RECIPES[command]
    if command.replace("-", "_") in guests():
        return _guest_recipe(command)
    return Recipe(together(command))


def _no_steps(_study: Study, _models: Models) -> Iterator[Step]:
    """Yield nothing."""
    return iter(())


def _guest_recipe(command: str) -> Recipe:
    """Return the recipe that follows from a guest's signature and what it `NEEDS`."""
    analysis = load(command.replace("-", "_"))
    stores = analysis.stores()
    if len(stores) > 1:
        # A study cannot know which of its stores is which.
        make_steps: MakeSteps = _no_steps
    elif stores[0].kind is Parameter.VAR_POSITIONAL:
        make_steps = together(command)
    else:
        make_steps = each(command)
    # A dict in place of a set: the order of contents has to be the same in every process.
    contents: dict[str, None] = {}
    for need in analysis.needs or ():
        contents |= dict.fromkeys(CONTENTS_FOR_NEED[need])
    data_needs: tuple[str, ...] = ()
    required_option = ("", "")
    for parameter in options_of(analysis.run).values():
        if parameter.default is Parameter.empty:
            flag = getattr(parameter.metadata, "flag", "")
            flag = flag or f"--{parameter.name.replace('_', '-')}"
            required_option = (flag, parameter.name)
            data_needs = (USER_OPTION,)
            break
    names = ", ".join(store.name for store in stores)
    return Recipe(
        make_steps,
        contents=tuple(contents),
        data_needs=data_needs,
        required_option=required_option,
        reason_without_steps=f"it takes stores of several kinds ({names})",
    )
