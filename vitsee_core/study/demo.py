"""The demo's studies: of vitsee's own models, images and miniature sets, every command at least
once; and of models of real size on photographs."""

from __future__ import annotations

from collections.abc import Mapping
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
REPLACEMENT_IMAGES = 100  # the model runs once for each of its heads
QUICK_MODELS = ("vit", "resnet")
# Says in the report where pages of real models are to be had.
NOTE = (
    "Small models on images of 28 x 28 pixels. The same pages of a ViT-S/14 and two "
    "CNNs on photographs: make demo-real, or vitsee demo --real -o real-out."
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
# Bundled models that differ in how they pool, and in whether labels taught them.
FULL_MODELS = ("vit", "resnet", "vit-gap", "vit-masked")
# timm's models, from its hub: a ViT taught by labels, one taught without, and a CNN.
PRETRAINED = {
    "vit": "vit_base_patch16_224.augreg_in21k_ft_in1k",
    "dino": "vit_small_patch16_224.dino",
    "resnet": "resnet50.a1_in1k",
}


def demo_study(folder: Path, *, quick: bool = False) -> Study:
    """Return the study of the demo.

    Args:
        folder: where it writes.
        quick: run only the analyses of the pictures in docs/, on fewer models and images.
    """
    names = QUICK_MODELS if quick else FULL_MODELS
    # A package may have been built without some models.
    installed = demo.models()
    return Study(
        folder=folder,
        models={name: f"demo:{name}" for name in names if name in installed},
        data="demo:test",
        train="demo:train",
        images=QUICK_IMAGES if quick else IMAGES,
        analyses=QUICK if quick else (),
        note=NOTE,
    )


def real_study(folder: Path, models: Mapping[str, Path], photographs: Path) -> Study:
    """Return the study of models of real size; it runs all analyses that take no labels.

    Args:
        folder: where it writes.
        models: label -> folder of a model that `vitsee_core.study.real` made; timm's pretrained
            models if empty.
        photographs: folder of the images.
    """
    names = {label: f"local-dir:{path}" for label, path in models.items()}
    return Study(
        folder=folder,
        models=names or PRETRAINED,
        data=str(photographs),
        images=len(PHOTOGRAPHS),
    )


def with_sets(study: Study, base: Plan, *, quick: bool = False) -> Plan:
    """Return the plan with the steps of the miniature sets.

    Args:
        study: the demo's study.
        base: the plan of its models.
        quick: leave out the tour of the commands that make no result.
    """
    # The user's choice of analyses is of the models' study; the sets are small.
    sets_study = replace(study, analyses=(), skip=())
    sets = plan_recipe(read_recipe("miniatures"), sets_study, None)
    analyses = [*base.analyses, *sets.analyses]
    if not quick:
        analyses += tour(study)
    # What needs masks or keypoints is left out of the base plan, and done on the sets.
    done_on_sets = {step.command for step in sets.analyses}
    left_out = {
        command: reason
        for command, reason in base.left_out.items()
        if command not in done_on_sets
    }
    return Plan(
        extractions=[*base.extractions, *sets.extractions],
        analyses=analyses,
        left_out=left_out,
        contents=base.contents,
    )


def tour(study: Study) -> list[Step]:
    """Return the steps that show the commands without a figure, most of them on the first model."""
    label, name = next(iter(study.models.items()))
    store = study.store(label)
    all_stores = [str(study.store(label)) for label in study.models]
    models_table = study.result("models")
    cka_table = study.result("cka-vit-resnet")
    array = study.folder / "pooled.npy"
    picture = study.folder / "cka-dark.svg"
    imported = study.folder / STORES / "imported.zarr"
    axes = study.folder / "axes.safetensors"
    codes = study.folder / STORES / "codes.zarr"
    repeated_table = study.folder / "cka-again.csv"
    findings = study.folder / "findings.csv"
    encode = ["encode", str(store), "--dictionary", str(axes)]
    encode += ["-o", str(codes), "--force"]
    find = ["findings", str(store), "--finding", "distance-rises"]
    find += ["-o", str(findings), "--force"]
    return [
        Step(
            "models",
            ("models", name, "-o", str(models_table), "--force"),
            outputs=(models_table,),
        ),
        Step("sites", ("sites", name, "--sites", "blocks")),
        Step("info", ("info", *all_stores)),
        Step("validate", ("validate", str(store))),
        _dictionary_step(store, axes),
        Step(
            "export",
            ("export", str(store), "pooled", "-o", str(array), "--force"),
            inputs=(store,),
            outputs=(array,),
        ),
        Step("encode", tuple(encode), inputs=(store, axes), outputs=(codes,)),
        Step(
            "import",
            ("import", str(array), "--like", str(store), "-o", str(imported)),
            inputs=(array, store),
            outputs=(imported,),
        ),
        Step("findings", tuple(find), inputs=(store,), outputs=(findings,)),
        *_replacement_steps(study, name),
        Step("cache", ("cache", "ls", str(store))),
        Step(
            "rerun",
            ("rerun", f"{cka_table}.json", "-o", str(repeated_table), "--force"),
            inputs=(cka_table,),
            outputs=(repeated_table,),
        ),
        Step(
            "plot",
            ("plot", str(cka_table), "-o", str(picture), "--theme", "dark", "--force"),
            inputs=(cka_table,),
            outputs=(picture,),
        ),
    ]


def _replacement_steps(study: Study, name: str) -> list[Step]:
    """Return the steps that extract a model as it is and with its class token replaced halfway by
    the token's mean over images, and that compare both and weigh its layers and heads."""
    unchanged = study.folder / STORES / "whole.zarr"
    changed = study.folder / STORES / "cls-mean.zarr"
    extract = ["extract", name, "--data", study.data, "--images", str(REPLACEMENT_IMAGES)]
    # Branches, for logit-attribution.
    sites = ["--sites", "blocks", "--sites", "head", "--sites", "residual"]
    replacement = f"cls@depth:0.5=mean:{unchanged}"
    extract_unchanged = [*extract, *sites, "-o", str(unchanged)]
    extract_changed = [*extract, "--replace", replacement, "-o", str(changed)]
    steps = [
        Step("extract-whole", tuple(extract_unchanged), outputs=(unchanged,)),
        Step(
            "extract-cls-mean",
            tuple(extract_changed),
            inputs=(unchanged,),
            outputs=(changed,),
        ),
    ]
    inputs_of_command = {
        "effect": (unchanged, changed),
        "logit-attribution": (unchanged,),
        "head-importance": (unchanged,),
    }
    for command, stores in inputs_of_command.items():
        table = study.result(command, command)
        words = [command, *map(str, stores)]
        words += ["-o", str(table), "--png", str(table.with_suffix(".png")), "--force"]
        steps.append(Step(command, tuple(words), inputs=stores, outputs=(table,)))
    return steps


def _dictionary_step(store: Path, path: Path) -> Step:
    """Return the step that writes a dictionary of PCA; in Python, as in a notebook."""

    def write() -> None:
        """Write the dictionary anew: `save` refuses to replace one of an earlier run."""
        from vitsee_core.analyses import concepts

        path.unlink(missing_ok=True)
        concepts.run(open_store(store), method="pca", save=path)

    call = f"vitsee.concepts({str(store)!r}, method='pca', save={str(path)!r})"
    words = ("python", "-c", f"import vitsee; {call}")
    return Step("axes", words, inputs=(store,), outputs=(path,), make=write)
