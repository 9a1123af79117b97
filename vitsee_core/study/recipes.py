"""How a study runs each analysis: on which models together, with which options, from what extract
has to keep. An analysis without a recipe of its own runs with its defaults on all models together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter
from itertools import combinations

from vitsee_core.runtime.parameters import options_of
from vitsee_core.runtime.registry import guests, load
from vitsee_core.study.catalogue import SurveyedModel
from vitsee_core.study.steps import Step, Study

Models = Sequence[SurveyedModel]
# What extract keeps beyond pooled vectors: every token, the parts of the first block's heads,
# receptive fields, pixels, attention summaries, attention of single images, products of skips and
# branches, sites within blocks.
TOKENS = "tokens"
HEADS = "heads"
FIELDS = "fields"
PIXELS = "pixels"
ATTENTION = "attention"
ROWS = "rows"
RESIDUAL = "residual"
MORE_SITES = "more sites"
LABELS = "labels"
TRAIN = "train"
GIVEN = "given"
# of similarity and of knn, where there are images enough
NEIGHBOURS = 10
VOTERS = 20
CKA_IMAGES = 4  # debiased HSIC divides by n - 3
FEW = 4  # models that are all compared with each other; more are compared with the first
ABLATED = 64  # images of head-importance
EXPLORE = "explore"  # no analysis: a page beside the report
# images of that page, of all models together
EXPLORED = 12
FEWEST_EXPLORED = 4
OF_ALL = 36


@dataclass(frozen=True)
class Recipe:
    """How a study runs an analysis.

    Attributes:
        steps: yields the steps for the models that offer what the analysis needs.
        keeps: what extract has to keep in the stores.
        wants: what the data has to have: `LABELS`, `TRAIN`, or what `asks` names.
        asks: an option of the analysis, and what it names. No study runs the analysis without the
            option, unless labels can stand for it.
        least: number of images, with fewer of which the analysis has no value.
        alone: why there may be no step for the given models; "" if there always is one.
    """

    steps: Callable[[Study, Models], Iterator[Step]]
    keeps: tuple[str, ...] = (TOKENS,)
    wants: tuple[str, ...] = ()
    asks: tuple[str, str] = ("", "")
    least: int = 1
    alone: str = ""


def step(
    study: Study,
    command: str,
    variant: str,
    labels: Sequence[str],
    *options: str,
    train: str = "",
) -> Step:
    """A step on the stores of these models. train: the model whose training images come first."""
    stores = [study.store(label) for label in labels]
    stores = [study.store(train, "train"), *stores] if train else stores
    name = f"{command}-{variant}" if variant else command
    table = study.result(name, command)
    picture = table.with_suffix(".png")
    options = study.with_settings(command, options)
    words = (
        command,
        *map(str, stores),
        *options,
        "-o",
        str(table),
        "--png",
        str(picture),
    )
    return Step(name, (*words, "--force"), tuple(stores), (table, picture))


def together(
    command: str, *options: str, variant: str = ""
) -> Callable[..., Iterator[Step]]:
    """One step on all models."""

    def steps(study: Study, models: Models) -> Iterator[Step]:
        yield step(study, command, variant, [model.label for model in models], *options)

    return steps


def each(command: str, *options: str, variant: str = "") -> Callable[..., Iterator[Step]]:
    """A step for each model."""

    def steps(study: Study, models: Models) -> Iterator[Step]:
        for model in models:
            name = f"{variant}-{model.label}" if variant else model.label
            yield step(study, command, name, [model.label], *options)

    return steps


def _pairs(models: Models) -> list[tuple[SurveyedModel, SurveyedModel]]:
    if len(models) <= FEW:
        return list(combinations(models, 2))
    return [(models[0], other) for other in models[1:]]


def _cka(study: Study, models: Models) -> Iterator[Step]:
    yield from each("cka", "--sites", "blocks")(study, models)
    pairs = [[a, b] for a, b in _pairs(models)]
    for some in pairs:
        labels = _labels(some)
        yield step(study, "cka", "-".join(labels), labels, "--sites", "blocks")
    if study.thorough:
        yield from _more_cka(study, models, pairs)
    if len(models) > 2:
        last = ("--sites", "last", "--tokens", "mean-all")
        yield step(study, "cka", "last-layers", [model.label for model in models], *last)


def _more_cka(
    study: Study, models: Models, pairs: Sequence[Sequence[SurveyedModel]]
) -> Iterator[Step]:
    """CKA of sites within blocks (Raghu et al. 2021, Figs. 1, 2, 12; Walmer et al. 2023, Figs. 20
    to 23)."""
    for model in models:
        if "norms" in model.more_groups:
            yield step(
                study, "cka", f"norms-{model.label}", [model.label], "--sites", "norms"
            )
        if "residual" in model.more_groups:
            yield step(
                study,
                "cka",
                f"branches-{model.label}",
                [model.label],
                "--pairs",
                "branch",
            )
    for some in (*([model] for model in models), *pairs):
        groups = ["blocks", *(g for g in ("norms", "hidden") if _any_has(some, g))]
        sites = [word for group in groups for word in ("--sites", group)]
        yield step(study, "cka", f"all-{'-'.join(_labels(some))}", _labels(some), *sites)
    for pair in pairs:
        labels = _labels(pair)
        yield step(
            study, "cka", f"depth-{'-'.join(labels)}", labels, "--pairs", "same-depth"
        )


def _any_has(models: Models, group: str) -> bool:
    return any(group in model.more_groups for model in models)


def _similarity(study: Study, models: Models) -> Iterator[Step]:
    options: tuple[str, ...] = ("--sites", "blocks", "--tokens", "mean-all")
    options += ("--metric", "mutual_knn")
    if study.n_images() <= 2 * NEIGHBOURS:  # of so few, ten are most of the others
        options += ("--k", str((study.n_images() - 1) // 2))
    for a, b in _pairs(models):
        yield step(
            study, "similarity", f"{a.label}-{b.label}", [a.label, b.label], *options
        )
    if len(models) == 1:
        yield step(study, "similarity", models[0].label, [models[0].label], *options)


def _attn_map(study: Study, models: Models) -> Iterator[Step]:
    with_cls = [model for model in models if model.class_token]
    # Many models stand side by side in one figure.
    for kind, some in (("mean-cls", with_cls), ("aligned", models)):
        steps = together if len(some) > FEW else each
        if some:
            yield from steps("attn-map", "--kind", kind, variant=kind)(study, some)
    yield from together("attn-map", "--kind", "sink", variant="sink")(study, models)
    if study.thorough:
        yield from each("attn-map", "--kind", "rollout", variant="rollout")(study, models)


def _cka_heads(study: Study, models: Models) -> Iterator[Step]:
    """Heads of each transformer against the first model without attention, as in the paper."""
    others = [label for label in study.models if label not in _labels(models)]
    for model in models:
        for other in others[:1]:
            names = [model.label, other]
            yield step(study, "cka-heads", "-".join(names), names)


def _labels(models: Models) -> list[str]:
    return [model.label for model in models]


def _erf(study: Study, models: Models) -> Iterator[Step]:
    yield from together("erf", "--sites", "blocks")(study, models)
    if within := [
        model for model in models if study.thorough and "residual" in model.more_groups
    ]:
        yield from together("erf", "--sites", "residual", variant="residual")(
            study, within
        )


def _logit_attribution(study: Study, models: Models) -> Iterator[Step]:
    if study.thorough:
        yield from together("logit-attribution")(study, models)


def _normratio(study: Study, models: Models) -> Iterator[Step]:
    words = ["patches", *(["cls"] if any(model.class_token for model in models) else [])]
    tokens = [option for word in words for option in ("--tokens", word)]
    yield from together("normratio", *tokens)(study, models)


def _localize(study: Study, models: Models) -> Iterator[Step]:
    yield from together("localize", "--summary", "site")(study, models)
    for model in models:
        if model.grid is None or min(model.grid) < 2:
            continue
        centre = f"{model.grid[0] // 2},{model.grid[1] // 2}"
        options = (
            "--sites",
            "first,depth:0.5,last",
            "--tokens",
            "0,0",
            "--tokens",
            centre,
        )
        if model.class_token:  # a CNN's last grid is too coarse for places of the first
            yield step(
                study, "localize", f"tokens-{model.label}", [model.label], *options
            )


def _trained(command: str, *options: str) -> Callable[..., Iterator[Step]]:
    """A step for each model, from the store of its training images."""

    def steps(study: Study, models: Models) -> Iterator[Step]:
        for model in models:
            more = (*options, "--replicates")
            yield step(
                study, command, model.label, [model.label], *more, train=model.label
            )

    return steps


def _knn(study: Study, models: Models) -> Iterator[Step]:
    n_train = study.n_images("train")
    few = ("--k", str(max(1, n_train // 2))) if n_train < VOTERS else ()
    yield from _trained("knn", *few)(study, models)


def _probe(study: Study, models: Models) -> Iterator[Step]:
    if study.train is not None:
        yield from _trained("probe")(study, models)
    else:
        yield from each("probe", "--holdout", "0.3")(study, models)
    if study.thorough:
        yield from _token_probes(study, models)


def _token_probes(study: Study, models: Models) -> Iterator[Step]:
    """Which tokens know the classes (Raghu et al. 2021, Figs. 11, D.4, F.3), and models by the mean
    of all tokens, CNNs at the last stage's grid (Fig. 13), of the tokens that a thorough study
    keeps."""
    own = ("--holdout", "0.3")
    with_cls = [model for model in models if model.class_token]
    ways = [
        word for token in ("first", "mean-all", "rest") for word in ("--tokens", token)
    ]
    yield from each("probe", *own, "--tokens", "each", variant="each")(study, with_cls)
    yield from each("probe", *own, *ways, variant="tokens")(study, with_cls)
    mean = ("--tokens", "mean-all", "--match-last-stage")
    yield from each("probe", *own, *mean, variant="mean")(study, models)


def _effect(study: Study, models: Models) -> Iterator[Step]:
    """Variants of a model (`NAME?OPTION=VALUE`) against the first of the same name."""
    for first in models:
        same = [
            m for m in models if m.name.partition("?")[0] == first.name.partition("?")[0]
        ]
        if same[0] is first and len(same) > 1:
            yield step(study, "effect", first.label, _labels(same), "--replicates")


def _head_importance(study: Study, models: Models) -> Iterator[Step]:
    """The step of head-importance, over few images: the model runs once for each head."""
    if study.thorough or "head-importance" in study.analyses:
        most = ("--images", str(min(study.n_images(), ABLATED)))
        yield from each("head-importance", *most)(study, models)


def _explore(study: Study, models: Models) -> Iterator[Step]:
    """A page; of so many images that it stays small."""
    stores = [study.store(model.label) for model in models]
    images = max(FEWEST_EXPLORED, min(EXPLORED, OF_ALL // len(models)))
    options = study.with_settings(EXPLORE, ("--images", str(images), "--recompute"))
    page = study.folder / f"{EXPLORE}.html"
    note = ("--note", study.note) if study.note else ()
    words = (EXPLORE, *map(str, stores), *options, *note, "-o", str(page), "--force")
    yield Step(EXPLORE, words, tuple(stores), (page,))


RECIPES: dict[str, Recipe] = {
    EXPLORE: Recipe(_explore, (TOKENS, ATTENTION)),
    "attn-dist": Recipe(together("attn-dist"), (ATTENTION,)),
    "attn-map": Recipe(_attn_map, (ATTENTION,)),
    "head-types": Recipe(each("head-types"), (ATTENTION,)),
    "cka": Recipe(_cka, least=CKA_IMAGES),
    "similarity": Recipe(_similarity, least=CKA_IMAGES),
    "cka-heads": Recipe(
        _cka_heads,
        keeps=(ATTENTION, HEADS, TOKENS),
        least=CKA_IMAGES,
        alone="it compares models of two kinds, with and without attention",
    ),
    "effect": Recipe(
        _effect,
        least=CKA_IMAGES,
        alone="it compares variants of a model (NAME?random-init=0)",
    ),
    "head-importance": Recipe(
        _head_importance,
        keeps=(ATTENTION, PIXELS),
        alone="it runs the model once for each head: ask with --analyses or --thorough",
    ),
    "normratio": Recipe(_normratio, (RESIDUAL,)),
    "localize": Recipe(_localize, (TOKENS, PIXELS), least=CKA_IMAGES),
    "erf": Recipe(_erf, (FIELDS,)),
    "weights": Recipe(together("weights"), ()),
    "spectrum": Recipe(together("spectrum"), ()),
    "cluster": Recipe(together("cluster"), (), (LABELS,), ("--masks", "masks")),
    "retrieve": Recipe(
        together("retrieve", "--truth", "labels"),
        (),
        (LABELS,),
        ("--truth", "a ground truth"),
    ),
    "knn": Recipe(_knn, (), (LABELS, TRAIN)),
    "probe": Recipe(_probe, (), (LABELS,)),
    "lens": Recipe(together("lens"), (TOKENS,), (LABELS,)),
    "logit-attribution": Recipe(
        _logit_attribution,
        alone="it needs sites within blocks: --thorough",
    ),
    "dense-probe": Recipe(
        each("dense-probe", "--holdout", "0.3"),
        (TOKENS,),
        (GIVEN,),
        ("--masks", "class maps"),
    ),
    "pca": Recipe(together("pca"), (TOKENS, PIXELS)),
    "cosine-map": Recipe(together("cosine-map"), (TOKENS, PIXELS)),
    "saliency": Recipe(
        together("saliency"), (ROWS,), (GIVEN,), ("--masks", "masks of objects")
    ),
    "propagate": Recipe(
        together("propagate"),
        (TOKENS,),
        (GIVEN,),
        ("--masks", "masks of the frames of videos"),
    ),
    "keypoints": Recipe(
        together("keypoints"),
        (TOKENS,),
        (GIVEN,),
        ("--pairs", "keypoints of pairs of images"),
    ),
}
# What a model has to offer beyond an analysis' NEEDS for its recipe to make sense.
MORE_NEEDS = dict.fromkeys(
    ("lens", "logit-attribution", "head-importance"), ("classifier",)
)


# What extract has to keep for an analysis that needs this of a model.
KEPT_FOR = {
    "sites": (TOKENS,),
    "grid": (TOKENS,),
    "attention": (ATTENTION,),
    "heads": (ATTENTION, HEADS, TOKENS),
    "residual": (RESIDUAL,),
    "images": (),
}


def recipe_of(command: str) -> Recipe:
    """The recipe of an analysis of vitsee's own, or of a guest; that of a guest follows from its
    signature and what it `NEEDS`."""
    name = command.replace("-", "_")
    if command in RECIPES or name not in guests():
        return RECIPES.get(command, Recipe(together(command)))
    analysis = load(name)
    stores = analysis.stores()
    several = stores[0].kind is Parameter.VAR_POSITIONAL
    steps = together(command) if several else each(command)
    asks = [
        (getattr(own.metadata, "flag", "") or f"--{own.name.replace('_', '-')}", own.name)
        for own in options_of(analysis.run).values()
        if own.default is Parameter.empty
    ]
    return Recipe(
        (lambda _study, _models: iter(())) if len(stores) > 1 else steps,
        tuple({what: None for need in analysis.needs or () for what in KEPT_FOR[need]}),
        (GIVEN,) if asks else (),
        asks[0] if asks else ("", ""),
        alone=f"it takes stores of several kinds ({', '.join(own.name for own in stores)})",
    )
