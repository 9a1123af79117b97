"""What a study plans: its steps, what extraction keeps for them, what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.studies import NO_ATTENTION, cnn, model, study
from vitsee_core.study.catalogue import needs_of_analyses, survey
from vitsee_core.study.cost import (
    EFFICIENCY,
    STEP_SECONDS,
    TOKEN_RATE,
    Cost,
    cost,
    stores_of,
)
from vitsee_core.study.planning import BEST, check_choice, plan
from vitsee_core.study.recipes import EXPLORE
from vitsee_core.study.steps import (
    LARGE_TABLES,
    Plan,
    Setting,
    Step,
    check_labels,
    label_of,
    with_controls,
)
from vitsee_stores.errors import VitseeError

ERF = Setting(("--erf",), ("--erf", "9"))
NO_INPUTS = Setting(("--inputs", "--no-inputs"), ("--no-inputs",))


def lines(steps: Sequence[Step]) -> list[str]:
    return [step.line for step in steps]


def named(found: Plan, name: str) -> Step:
    return next(step for step in found.steps if step.name == name)


def test_every_analysis_is_a_step_or_has_a_reason() -> None:
    found = plan(study(), [model("vit"), cnn("cnn")], labelled=True)
    known = {*needs_of_analyses(), BEST, EXPLORE}
    assert {step.command for step in found.analyses} | {*found.left_out} >= known
    assert {"saliency", "propagate", "keypoints", "dense-probe"} < {*found.left_out}
    assert found.left_out["attn-dist of cnn"] == NO_ATTENTION
    assert "head-types" not in found.left_out
    names = [step.name for step in found.steps]
    assert len({*names}) == len(names)
    outputs = [path for step in found.steps for path in step.outputs]
    assert len({*outputs}) == len(outputs), "no step writes over another's result"
    assert named(found, "pca").outputs[0] == Path("out/results/pca.parquet")
    large = {
        s.command for s in found.steps for path in s.outputs if path.suffix == ".parquet"
    }
    assert large == LARGE_TABLES and named(found, "cka-vit").outputs[0].suffix == ".csv"


def test_extraction_keeps_what_the_analyses_need() -> None:
    found = plan(study(), [model("vit"), cnn("cnn")], labelled=True)
    assert lines(found.extractions) == [
        "vitsee extract demo:vit --data photos --images 2000 -o out/stores/vit.zarr "
        "--sites blocks --sites head --sites blocks.0.attn.heads --inputs --erf 64",
        "vitsee extract demo:vit --data others --images 2000 -o out/stores/vit-train.zarr "
        "--tokens pooled --attention none --no-residual",
        "vitsee extract demo:cnn --data photos --images 2000 -o out/stores/cnn.zarr "
        "--inputs --erf 64",
        "vitsee extract demo:cnn --data others --images 2000 -o out/stores/cnn-train.zarr "
        "--tokens pooled --attention none --no-residual",
    ]
    found = plan(
        study(analyses=("knn",), images=9, seed=3), [model("vit")], labelled=True
    )
    assert lines(found.extractions)[0] == (
        "vitsee extract demo:vit --data photos --images 9 -o out/stores/vit.zarr --seed 3 "
        "--tokens pooled --attention none --no-residual"
    )
    found = plan(
        study(analyses=("normratio",), device="cuda"), [model("vit")], labelled=True
    )
    assert lines(found.extractions) == [
        "vitsee extract demo:vit --data photos --images 2000 -o out/stores/vit.zarr "
        "--device cuda --tokens pooled --attention none"
    ]


def test_steps_on_two_kinds_of_models() -> None:
    found = plan(study(), [model("vit"), cnn("cnn")], labelled=True)
    heads = named(found, "cka-heads-vit-cnn")
    assert heads.words[1:3] == ("out/stores/vit.zarr", "out/stores/cnn.zarr")
    compared = [s.name for s in found.analyses if s.command == "cka"]
    assert compared == ["cka-vit", "cka-cnn", "cka-vit-cnn"]
    stores = ("out/stores/cnn-train.zarr", "out/stores/cnn.zarr")
    assert named(found, "knn-cnn").words[1:3] == stores
    best = named(found, BEST)
    assert {path.name for path in best.inputs} == {
        "knn-vit.csv", "knn-cnn.csv", "probe-vit.csv", "probe-cnn.csv", "cluster.csv",
        "retrieve.csv",
    }  # fmt: skip
    assert found.analyses.index(best) == len(found.analyses) - 1
    assert "localize-tokens-vit" in [s.name for s in found.analyses]
    assert named(found, "localize-tokens-vit").words[6:8] == ("--tokens", "2,3")
    alone = plan(study(Path("out"), "vit"), [model("vit")], labelled=True)
    assert alone.left_out["cka-heads"].startswith("it compares models of two kinds")
    five = [model(f"m{i}") for i in range(5)]
    pairs = [
        s.name
        for s in plan(study(), five, labelled=True).analyses
        if s.command == "similarity"
    ]
    assert pairs == [f"similarity-m0-m{i}" for i in range(1, 5)]
    assert "cka-last-layers" in [
        s.name for s in plan(study(), five, labelled=True).analyses
    ]


def test_images_without_labels_or_without_others_to_train_on() -> None:
    found = plan(study(), [model("vit")], labelled=False)
    for command in ("knn", "probe", "cluster", "retrieve", "lens"):
        assert found.left_out[command] == "the images of photos have no labels"
    assert found.left_out[BEST].startswith("none of its inputs is made")
    assert [step.name for step in found.extractions] == ["extract-vit"]
    frames = {"extract": [Setting(("--frames",), ("--frames", "8"))]}
    of_clips = plan(study(settings=frames), [model("vit")], labelled=False)
    assert of_clips.left_out["knn"] == "the clips of photos have no labels"
    found = plan(study(train=None), [model("vit")], labelled=True)
    assert "name them with --train" in found.left_out["knn"]
    assert named(found, "probe-vit").words[2:4] == ("--holdout", "0.3")


def test_attribution_needs_the_branches_of_a_thorough_study() -> None:
    found = plan(study(), [model("vit")], labelled=True)
    assert (
        found.left_out["logit-attribution"] == "it needs sites within blocks: --thorough"
    )


def test_a_model_without_a_classifier_or_any_grid() -> None:
    lacks = {**model("x").lacks, "classifier": "it has no classifier", "grid": "no grid"}
    found = plan(
        study(), [model("x", lacks=lacks, grid=None, class_token=False)], labelled=True
    )
    assert found.left_out["lens"] == "it has no classifier"
    assert found.left_out["erf"] == found.left_out["spatial"] == "no grid"
    assert "--erf" not in found.extractions[0].words


def test_receptive_fields_take_no_longer_than_the_other_passes() -> None:
    """Of three sites: a third of the images, at least 4, at most 64."""
    for images, fields in ((3, 3), (9, 4), (60, 20), (190, 63), (2000, 64)):
        found = plan(
            study(images=images, analyses=("erf",)), [model("vit")], labelled=True
        )
        words = found.extractions[0].words
        assert words[words.index("--erf") + 1] == str(fields)
        said = f"over {fields} images, so that they take no longer than the rest of an extraction; "
        said += "smooth ones: --set extract.erf=256"
        assert [said in note for note in found.notes] == [True] * (images > fields)
    asked = study(images=60, analyses=("erf",), settings={"extract": [ERF]})
    found = plan(asked, [model("vit")], labelled=True)
    assert found.extractions[0].line.endswith("--erf 9") and found.notes == []


def test_what_the_user_sets_takes_the_place_of_what_a_study_chooses() -> None:
    tokens = Setting(("--tokens",), ("--tokens", "cls"))
    settings = {"normratio": [tokens], "extract": [tokens, NO_INPUTS], "erf": [tokens]}
    found = plan(study(settings=settings), [model("vit")], labelled=True)
    words = named(found, "normratio").words
    assert words[1:4] == ("out/stores/vit.zarr", "--tokens", "cls") and words[4] == "-o"
    assert named(found, "erf").words[2:6] == ("--sites", "blocks", "--tokens", "cls")
    own, train = found.extractions
    assert own.line.endswith("-o out/stores/vit.zarr --erf 64 --tokens cls --no-inputs")
    assert train.line.endswith("--tokens pooled --attention none --no-residual"), (
        "pooled alone"
    )


def test_masks_pairs_and_a_truth_are_named_by_settings() -> None:
    """Without labels too; of attention, saliency reads that of single images."""
    options = {"saliency": "--masks", "propagate": "--masks", "keypoints": "--pairs"}
    options |= {"dense-probe": "--masks"}
    options |= {"cluster": "--masks", "retrieve": "--truth"}
    without = plan(study(analyses=(*options,)), [model("vit")], labelled=True)
    assert without.left_out == {
        name: f"it needs {what} beside the images; name them with --set {name}.{option}=PATH"
        for name, option, what in (
            ("saliency", "masks", "masks of objects"),
            ("propagate", "masks", "masks of the frames of videos"),
            ("keypoints", "pairs", "keypoints of pairs of images"),
            ("dense-probe", "masks", "class maps"),
        )
    }
    settings = {
        name: [Setting((option,), (option, "x"))] for name, option in options.items()
    }
    asked = study(analyses=(*options,), settings=settings)
    found = plan(asked, [model("vit"), cnn("cnn")], labelled=False)
    assert {step.command for step in found.analyses} == {*options}
    for step in found.analyses:
        assert options[step.command] in step.words and step.words.count("--truth") <= 1
    levels = ["rows" in step.words for step in found.extractions]
    assert levels == [True, False] and "none" in found.extractions[1].words


def test_a_thorough_study_keeps_the_sites_of_all_figures() -> None:
    asked = study(thorough=True, images=400)
    models = [model("vit"), cnn("cnn")]
    found = plan(asked, models, labelled=True)
    sites = "--sites blocks --sites head --sites blocks.0.attn.heads --sites norms --sites hidden "
    assert f"{sites}--sites residual --inputs --erf 256" in found.extractions[0].line
    assert (
        "--sites head --sites norms --sites residual --inputs"
        in found.extractions[2].line
    )
    names = {step.name for step in found.analyses}
    assert names - {step.name for step in plan(study(), models, labelled=True).analyses} == {
        "cka-all-vit", "cka-all-cnn", "cka-all-vit-cnn", "cka-norms-vit", "cka-norms-cnn",
        "cka-branches-vit", "cka-branches-cnn", "cka-depth-vit-cnn", "erf-residual",
        "head-importance-vit", "logit-attribution",
        "attn-map-rollout-vit", "probe-each-vit", "probe-tokens-vit", "probe-mean-vit",
        "probe-mean-cnn",
    }  # fmt: skip
    assert "hidden" not in named(found, "cka-all-cnn").words
    assert "hidden" in named(found, "cka-all-vit-cnn").words
    less = replace(asked, thorough=False)
    sizes = [
        cost(
            plan(one, models, labelled=True), *stores_of(one, models), speed=1e6
        ).size_bytes
        for one in (asked, less)
    ]
    assert sizes[0] - sizes[1] == 2 * 400 * 5000


def test_attention_maps_of_many_models_are_one_figure() -> None:
    two = ["attn-map-aligned-m0", "attn-map-aligned-m1"]
    for n, names in ((2, two), (5, ["attn-map-aligned"])):
        models = [model(f"m{i}") for i in range(n)]
        found = plan(
            study(Path("out"), *(m.label for m in models)), models, labelled=True
        )
        steps = [
            step for step in found.analyses if step.name.startswith("attn-map-aligned")
        ]
        assert [step.name for step in steps] == names
        assert len(steps[0].inputs) == (1 if n == 2 else n)


def test_choosing_analyses() -> None:
    found = plan(
        study(analyses=("cka", "erf"), skip=("erf",)), [model("vit")], labelled=True
    )
    assert {step.command for step in found.analyses} == {"cka"} and found.left_out == {}
    with pytest.raises(
        VitseeError, match="no analysis 'ckaa'; analyses of a study: attn-dist"
    ):
        check_choice(study(analyses=("ckaa",)))
    with pytest.raises(VitseeError, match="--skip leaves no analysis"):
        check_choice(study(analyses=("cka",), skip=("cka",)))


def test_what_it_takes() -> None:
    models = [model("vit")]
    found = plan(study(images=100), models, labelled=True)
    needed = cost(found, *stores_of(study(images=100), models), speed=1e6)
    grams = (
        2 * (2 + 1) * 4 * 100**2
    )  # of cka and similarity, of two blocks and the embedding
    assert needed.size_bytes == 100 * (1000 + 3 * 8 * 12) + 100 * 10 + grams
    # forward passes of both stores, and the backward ones of 33 images for each of three sites
    assert needed.seconds == pytest.approx((100 + 33 * 3 + 100) / EFFICIENCY)
    assert Cost(1000, 5, 170).describe(2, 5) == (
        "2 models over 5 images: about 1.0 kB on disk, less than a minute of extraction and about "
        "3 minutes of analyses on this machine"
    )
    assert "about 2.0 hours of analyses" in Cost(1, 1, 7200).describe(1, 1)


def test_what_analyses_take() -> None:
    """weights: no token is read; norms: those of both models; cka: also products of all pairs of
    100 images, 500 values of each model, for every step's models."""

    def seconds(*analyses: str) -> float:
        asked = study(images=100, analyses=analyses)
        models = [model("vit"), cnn("cnn")]
        found = plan(asked, models, labelled=True)
        return cost(found, *stores_of(asked, models), speed=1e6).analyses

    read = 100 * 1000 / TOKEN_RATE
    assert seconds("weights") == STEP_SECONDS
    assert seconds("norms") == pytest.approx(STEP_SECONDS + 2 * read)
    products = 500 * 100**2 / (EFFICIENCY * 1e6)
    assert seconds("cka") == pytest.approx(3 * STEP_SECONDS + 4 * (read + products))


def test_untrained_twins() -> None:
    """Of the same geometry; none of what is untrained already."""
    named = {
        "a": "vit?checkpoint=x.pth&checkpoint-key=ema&img-size=64",
        "b": "vit?random-init=3",
    }
    assert with_controls({**named, "c": "resnet50"}, 7) == {
        **{
            "a": named["a"],
            "a-untrained": "vit?img-size=64&random-init=7",
            "b": named["b"],
        },
        **{"c": "resnet50", "c-untrained": "resnet50?random-init=7"},
    }
    with pytest.raises(VitseeError, match="two models are called 'c-untrained'"):
        with_controls({"c": "resnet50", "c-untrained": "resnet50?random-init=1"}, 0)


@pytest.mark.slow
def test_what_shapes_say_of_a_model() -> None:
    vit, resnet = survey("vit", "demo:vit"), survey("resnet", "demo:resnet")
    assert vit.class_token and vit.heads == "blocks.0.attn.heads" and vit.grid == (8, 8)
    assert (
        set(vit.lacks.values()) == {None}
        and vit.size == (3, 32, 32)
        and vit.n_blocks == 6
    )
    assert not resnet.class_token and resnet.heads is None
    assert resnet.lacks["attention"] is not None and resnet.lacks["residual"] is None
    # 65 tokens, 6 blocks of width 96 with 192 hidden: 4 D^2 + 2 D H weights, two products with A
    weights = 2 * 65 * 6 * (4 * 96**2 + 2 * 96 * 192)
    products = 2 * 6 * 2 * 65 * 65 * 96
    patches_and_head = 2 * 64 * 96 * 3 * 16 + 2 * 96 * 10
    assert vit.flops == weights + products + patches_and_head


@pytest.mark.parametrize(
    ("name", "label"),
    [("vit_base_patch16_224.augreg_in21k", "vit_base_patch16_224"), ("demo:vit-gap", "vit-gap"),
     ("hf-hub:timm/resnet50.a1", "resnet50"), ("local-dir:runs/my.model/", "my.model"),
     ("local-dir:a b", "a_b"), (":", "model")],
)  # fmt: skip
def test_labels(name: str, label: str) -> None:
    assert label_of(name) == label


def test_labels_that_are_refused() -> None:
    assert check_labels([("a", "x"), ("b", "x")]) == {"a": "x", "b": "x"}
    for pairs, expected in (
        ([("a", "x"), ("a", "y")], "two models are called 'a': x and y"),
        ([("../a", "x")], "'../a' cannot name a store"),
        ([("a-train", "x")], "no -train at its end"),
        ([("", "x")], "'' cannot name a store"),
    ):
        with pytest.raises(VitseeError, match=expected.replace("?", r"\?")):
            check_labels(pairs)


def test_few_images() -> None:
    """Of what is there: cost, neighbours, and what has no value of so few."""
    few = study(images=100, n_available={"photos": 12, "others": 9})
    models = [model("vit"), cnn("cnn")]
    found = plan(few, models, labelled=True)
    assert (
        "--images 100" in found.extractions[0].line
        and "--erf 4" in found.extractions[0].line
    )
    assert "--k 5" in named(found, "similarity-vit-cnn").line
    assert "--k 4" in named(found, "knn-vit").line
    grams = 2 * 2 * (2 + 1) * 4 * 12**2
    needed = cost(found, *stores_of(few, models), speed=1e6)
    assert needed.size_bytes == 2 * (12 * (1000 + 3 * 8 * 12) + 9 * 10) + grams
    assert (few.n_images(), few.n_images("train")) == (12, 9)
    more = study(images=100, train_images=300, n_available={"photos": 12, "others": 200})
    of = plan(more, models, labelled=True)
    assert [step.words[5] for step in of.extractions] == ["100", "300"] * 2
    assert (more.n_images(), more.n_images("train")) == (12, 200)
    many = plan(study(n_available={"photos": 21, "others": 20}), models, labelled=True)
    assert (
        "--k"
        not in named(many, "knn-vit").words + named(many, "similarity-vit-cnn").words
    )
    three = plan(study(n_available={"photos": 3}), models, labelled=True)
    for command in ("cka", "cka-heads", "similarity", "localize"):
        assert three.left_out[command] == "3 images of photos; expected at least 4"


def test_results_of_one_name_are_refused() -> None:
    """`cka` of a-b, and of a against b."""
    with pytest.raises(
        VitseeError, match="two results of this study would be called cka-a-b; "
    ):
        plan(study(Path("out"), "a", "b", "a-b"), [model("a"), model("b"), model("a-b")],
             labelled=True)  # fmt: skip
