"""The demo's studies: of vitsee's own models, images and miniature sets, every command at least
once; and of models of real size on photographs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from vitsee_core import demo
from vitsee_core.study.real.photographs import PHOTOGRAPHS
from vitsee_core.study.recipe_file import read_recipe
from vitsee_core.study.recipe_plan import plan_recipe
from vitsee_core.study.steps import STORES, Plan, Step, Study
from vitsee_stores import open_store

IMAGES = 1000
QUICK_IMAGES = 500
CHANGED_IMAGES = 100
QUICK_MODELS = ("vit", "resnet")
# Where these pages lead.
NOTE = (
    "Small models on images of 28 x 28 pixels. The same pages of a ViT-S/14 and two CNNs on "
    "photographs: make demo-real, or vitsee demo --real -o real-out."
)
# The analyses of the pictures in docs/.
QUICK = (
    "attn-dist",
    "attn-map",
    "cka",
    "similarity",
    "normratio",
    "norms",
    "localize",
    "erf",
    "spatial",
    "spectrum",
    "lens",
    "knn",
    "probe",
    "weights",
    "best-layer",
    "explore",
)
# Of the bundled models: how they pool, what they were taught by.
FULL_MODELS = ("vit", "resnet", "vit-gap", "vit-masked")
# Of timm, from its hub: taught by labels, by itself, and a CNN.
PRETRAINED = {
    "vit": "vit_base_patch16_224.augreg_in21k_ft_in1k",
    "dino": "vit_small_patch16_224.dino",
    "resnet": "resnet50.a1_in1k",
}


def demo_study(folder: Path, *, quick: bool = False) -> Study:
    """The study of the demo. quick: only the analyses of the pictures in docs/, of fewer models."""
    names = [
        name for name in (QUICK_MODELS if quick else FULL_MODELS) if name in demo.models()
    ]
    return Study(
        folder=folder,
        models={name: f"demo:{name}" for name in names},
        data="demo:test",
        train="demo:train",
        images=QUICK_IMAGES if quick else IMAGES,
        analyses=QUICK if quick else (),
        note=NOTE,
    )


def real_study(folder: Path, models: Mapping[str, Path], photographs: Path) -> Study:
    """All analyses that take no labels, of what `vitsee_core.study.real` made;
    without models, of timm's own."""
    return Study(
        folder=folder,
        models={name: f"local-dir:{place}" for name, place in models.items()}
        or PRETRAINED,
        data=str(photographs),
        images=len(PHOTOGRAPHS),
    )


def with_sets(study: Study, found: Plan, *, quick: bool = False) -> Plan:
    """The plan with the tasks of the miniature sets and, unless `quick`, a tour of the commands
    that make no result."""
    sets = plan_recipe(
        read_recipe("miniatures"), replace(study, analyses=(), skip=()), None
    )
    analyses = [*found.analyses, *sets.analyses, *([] if quick else tour(study))]
    answered = {step.command for step in sets.analyses}
    left_out = {what: why for what, why in found.left_out.items() if what not in answered}
    return Plan(
        [*found.extractions, *sets.extractions], analyses, left_out, found.contents
    )


def tour(study: Study) -> list[Step]:
    """The commands that make no figure of their own."""
    label, name = next(iter(study.models.items()))
    store = study.store(label)
    table = study.result("models")
    drawn = study.result("cka-vit-resnet")
    array = study.folder / "pooled.npy"
    picture = study.folder / "cka-dark.svg"
    theirs = study.folder / STORES / "imported.zarr"
    axes = study.folder / "axes.safetensors"
    codes = study.folder / STORES / "codes.zarr"
    again = study.folder / "cka-again.csv"
    found = study.folder / "findings.csv"
    return [
        Step("models", ("models", name, "-o", str(table), "--force"), (), (table,)),
        Step("sites", ("sites", name, "--sites", "blocks")),
        Step("info", ("info", *(str(study.store(label)) for label in study.models))),
        Step("validate", ("validate", str(store))),
        _axes(store, axes),
        Step(
            "export",
            ("export", str(store), "pooled", "-o", str(array), "--force"),
            (store,),
            (array,),
        ),
        Step(
            "encode",
            (
                "encode",
                str(store),
                "--dictionary",
                str(axes),
                "-o",
                str(codes),
                "--force",
            ),
            (store, axes),
            (codes,),
        ),
        Step(
            "import",
            ("import", str(array), "--like", str(store), "-o", str(theirs)),
            (array, store),
            (theirs,),
        ),
        Step(
            "findings",
            (
                "findings",
                str(store),
                "--finding",
                "distance-rises",
                "-o",
                str(found),
                "--force",
            ),
            (store,),
            (found,),
        ),
        *_changed(study, name),
        Step("cache", ("cache", "ls", str(store))),
        Step(
            "rerun",
            ("rerun", f"{drawn}.json", "-o", str(again), "--force"),
            (drawn,),
            (again,),
        ),
        Step(
            "plot",
            ("plot", str(drawn), "-o", str(picture), "--theme", "dark", "--force"),
            (drawn,),
            (picture,),
        ),
    ]


def _changed(study: Study, name: str) -> Iterator[Step]:
    """A model with its class token replaced, and what its layers and heads do for the answer."""
    whole, changed = (study.folder / STORES / f"{x}.zarr" for x in ("whole", "cls-mean"))
    data = ("extract", name, "--data", study.data, "--images", str(CHANGED_IMAGES))
    kept = [
        word for group in ("blocks", "head", "residual") for word in ("--sites", group)
    ]
    other = f"cls@depth:0.5=mean:{whole}"
    yield Step("extract-whole", (*data, *kept, "-o", str(whole)), (), (whole,))
    words = (*data, "--replace", other, "-o", str(changed))
    yield Step("extract-cls-mean", words, (whole,), (changed,))
    for command, stores in (
        ("effect", (whole, changed)),
        ("logit-attribution", (whole,)),
        ("head-importance", (whole,)),
    ):
        table = study.result(command, command)
        drawn = ("-o", str(table), "--png", str(table.with_suffix(".png")), "--force")
        yield Step(command, (command, *map(str, stores), *drawn), stores, (table,))


def _axes(store: Path, place: Path) -> Step:
    """The step that writes a dictionary, anew each time."""

    def write() -> None:
        from vitsee_core.analyses import concepts

        place.unlink(missing_ok=True)
        concepts.run(open_store(store), method="pca", save=place)

    call = f"vitsee.concepts({str(store)!r}, method='pca', save={str(place)!r})"
    return Step(
        "axes", ("python", "-c", f"import vitsee; {call}"), (store,), (place,), make=write
    )
