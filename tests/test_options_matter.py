"""Every option of every analysis has an effect: two values of it give two tables.

An option that is parsed, documented and then ignored passes all tests of the command's result, as
its default is what they use. Here each option has a pair of command lines that differ in it alone.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import click
import pytest

from tests.every_command import vitsee
from vitsee_cli.main import main
from vitsee_core.runtime import registry

# Options of all commands: where results go, and what the work may use; no number depends on them.
OUTPUTS = {
    "--output",
    "--png",
    "--force",
    "--if-changed",
    "--replicates",
    "--verbose",
    "--quiet",
}
RESOURCES = {"--jobs", "--dask", "--memory", "--device", "--cache", "--no-cache"}
# Where what a store was made from lies now: the numbers are the same from there.
SOURCES = {
    "--data",
    "--checkpoint",
    "--checkpoint-key",
    "--trust-store",
    "--allow-partial",
}
# Figures alone.
DRAWN = {"--scale", "--show"}
ELSEWHERE = {
    "--x": "of stores that are steps: tests/test_over_training.py",
    "--panoptic": "a folder beside a panoptic .json: tests/test_segment_masks.py",
    "--crowd": "crowds are in COCO files alone: tests/test_segment_masks.py",
    "--allow-shared": "turns a refusal into a result: tests/test_knn.py, tests/test_probe.py",
}
PLANTED = "types of heads that random models lack: tests/test_head_types.py"
BY_ID = "turns a refusal into a result: tests/test_pairing_by_id.py"
COARSE = "accuracy of 8 images is too coarse: tests/test_probe.py"
EXCEPTIONS = {
    ("cka", "--pair-by"): BY_ID,
    ("similarity", "--pair-by"): BY_ID,
    ("cka", "--precision"): "of GPUs: tests/test_precision.py",
    ("cka-heads", "--precision"): "of GPUs: tests/test_precision.py",
    ("cluster", "--void"): "three categories: tests/test_segment_masks.py",
    ("cluster", "--preset"): "80 clusters of segments: tests/test_segment_accuracy.py",
    ("dense-probe", "--void"): "plain masks: tests/test_dense_probe.py",
    ("erf", "--images"): "whole slabs: tests/test_erf.py",
    ("erf", "--seed"): "whole slabs: tests/test_erf.py",
    ("head-types", "--strict"): PLANTED,
    ("head-types", "--repetition"): PLANTED,
    ("head-types", "--keys"): PLANTED,
    ("knn", "--metric"): "top5 needs six classes: tests/test_knn.py",
    (
        "lens",
        "--metric",
    ): "the others need labels of the classifier's: tests/test_lens.py",
    ("pca", "--align"): "signs alone, of the rows of an image: tests/test_pca.py",
    ("pca", "--reference"): "signs alone, of the rows of an image: tests/test_pca.py",
    ("propagate", "--masks"): "other masks of the same videos: tests/test_propagate.py",
    ("propagate", "--void"): "masks of other values: tests/test_propagate_command.py",
    ("propagate", "--only"): "a store of several videos: tests/test_propagate.py",
    ("best-layer", "--paired"): "needs replicates: tests/test_paired.py",
    ("best-layer", "--best-token"): "results of several tokens: tests/test_best_layer.py",
    ("best-layer", "--table"): "a further file: tests/test_best_table.py",
    ("concepts", "--save"): "a further file: tests/test_dictionaries.py",
    ("propagate", "--save"): "a further folder: tests/test_propagate.py",
    ("retrieve", "--export-queries"): "a further file: tests/test_retrieval_truth.py",
    ("retrieve", "--export-truth"): "a further file: tests/test_retrieval_truth.py",
    ("retrieve", "--queries"): "needs a list of queries: tests/test_retrieve.py",
    (
        "retrieve",
        "--ap",
    ): "differs where answers stand between junk: tests/test_retrieve.py",
    (
        "effect",
        "--other-transform",
    ): "turns a refusal into a result: tests/test_effect_transforms.py",
    ("dense-probe", "--depth"): "depth maps: tests/test_dense_probe_depth.py",
    ("dense-probe", "--depth-scale"): "depth maps: tests/test_dense_probe_depth.py",
    ("dense-probe", "--max-depth"): "depth maps: tests/test_dense_probe_depth.py",
    ("dense-probe", "--eigen-crop"): "depth maps: tests/test_dense_probe_depth.py",
    ("dense-probe", "--split"): "a data set with splits: tests/test_dense_probe.py",
    ("probe", "--seeds"): COARSE,
    ("probe", "--intercept"): COARSE,
    ("probe", "--epochs"): COARSE,
    ("probe", "--match-last-stage"): "CNNs of TRAIN and TEST: tests/test_probe.py",
    ("probe", "--test-split"): "a data set with splits: tests/test_probe.py",
    ("probe", "--response-ids"): "rows in another order: tests/test_probe_response.py",
    (
        "weights",
        "--weights-size",
    ): "a checkpoint of another grid: tests/test_models_weights_rule.py",
    (
        "weights",
        "--resample-patches",
    ): "the same of patches: tests/test_models_weights_rule.py",
}

Lines = dict[str, str | tuple[str, str]]
FEW = "vit.zarr --estimator minibatch --examples 8"
FEW_HEADS = "vit.zarr cnn.zarr --block blocks.0 --estimator minibatch --batch 4"
FEW_OWN = "vit.zarr --sites blocks.0.out --summary site --estimator minibatch"
SPLIT = "train.zarr vit.zarr --sites blocks.0.out"
SGD = "train.zarr vit.zarr --solver sgd --epochs 2 --batch 4"
RESPONSE = "vit.zarr --response responses.csv --folds 2 --sites blocks.0.out"
OBJECTS = "vit.zarr --masks maps --sites blocks.0.out"
OBJECT_PAIR = "train.zarr vit.zarr --k 3 --masks maps --sites blocks.0.out"
OBJECT_PROBE = "train.zarr vit.zarr --masks maps --sites blocks.0.out"
MAPS = f"{SPLIT} --masks maps"
SPAIR = "pairs.zarr --pairs pairs --sites blocks.0.out"
VIDEO = "videos.zarr --masks videos --sites blocks.0.out"
LABELS = "vit.zarr --truth labels --sites blocks.0.out"
FIT = "vit.zarr --sites blocks.0.out --k 3"
KEYS = "vit.zarr --sites blocks.0.out"
MINIBATCH: Lines = {
    "--estimator": "--estimator biased",
    "--batch": (f"{FEW} --batch 4", f"{FEW} --batch 8"),
    "--examples": (
        "vit.zarr --estimator minibatch --batch 4 --examples 8",
        "vit.zarr --estimator minibatch --batch 4 --examples 4",
    ),
    "--repeats": (f"{FEW} --batch 4", f"{FEW} --batch 4 --repeats 3"),
}
SUBSET: Lines = {
    "--images": "--images 6",
    "--seed": ("ordered.zarr --images 4", "ordered.zarr --images 4 --seed 1"),
}
# Command -> the words of a command line, and option -> the words that are added to it, or two
# command lines that differ in the option alone.
EFFECTS: dict[str, tuple[str, Lines]] = {
    "attn-dist": (
        "vit.zarr",
        {**SUBSET, "--metric": "--metric distance_unit", "--sites": "--sites blocks.0"},
    ),
    "attn-map": (
        "vit.zarr --kind mean-cls",
        {
            "--kind": ("vit.zarr --kind mean-cls", "vit.zarr --kind entropy"),
            "--image": ("vit.zarr --image 0", "vit.zarr --image 1"),
            "--query": ("vit.zarr --image 0", "vit.zarr --image 0 --query 0,1"),
            "--sites": "--sites blocks.0",
            "--heads": ("vit.zarr --kind entropy", "vit.zarr --kind entropy --heads 0"),
            "--coverage": (
                "vit.zarr --kind aligned",
                "vit.zarr --kind aligned --coverage",
            ),
            "--rollout-residual": (
                "vit.zarr --kind rollout",
                "vit.zarr --kind rollout --no-rollout-residual",
            ),
            "--images": "--images 4",
            "--seed": (
                "ordered.zarr --kind mean-cls --images 4",
                "ordered.zarr --kind mean-cls --images 4 --seed 3",
            ),
        },
    ),
    "best-layer": ("both.csv", {"--metric": "--metric pixel_accuracy"}),
    "cka": (
        "vit.zarr",
        {
            **MINIBATCH,
            "--sites": "--sites norms",
            "--sites-a": "--sites-a blocks.0.out",
            "--sites-b": ("vit.zarr cnn.zarr", "vit.zarr cnn.zarr --sites-b stem"),
            "--tokens": "--tokens mean",
            "--pairs": "--pairs branch",
            "--preset": "--preset walmer",
            "--images": "--images 6",
            "--seed": (f"{FEW} --batch 4", f"{FEW} --batch 4 --seed 1"),
        },
    ),
    "cka-heads": (
        "vit.zarr cnn.zarr --block blocks.0",
        {
            "--block": (
                "vit.zarr cnn.zarr --block blocks.0",
                "vit.zarr cnn.zarr --block blocks.1",
            ),
            "--window": "--window 2",
            "--cumulative": "--cumulative",
            "--sites-b": "--sites-b stem",
            "--estimator": "--estimator biased",
            "--batch": (FEW_HEADS, FEW_HEADS.replace("--batch 4", "--batch 8")),
            "--examples": (f"{FEW_HEADS} --examples 8", f"{FEW_HEADS} --examples 4"),
            "--repeats": (FEW_HEADS, f"{FEW_HEADS} --repeats 3"),
            "--preset": "--preset raghu",
            "--images": "--images 6",
            "--seed": (FEW_HEADS, f"{FEW_HEADS} --seed 1"),
        },
    ),
    "cluster": (
        f"{KEYS} --k 2",
        {
            "--masks": "--masks maps",
            "--background": (OBJECTS, f"{OBJECTS} --background 1"),
            "--weights": (OBJECTS, f"{OBJECTS} --weights any"),
            "--segments": (OBJECTS, f"{OBJECTS} --segments 5"),
            "--sites": ("vit.zarr --k 2", "vit.zarr --k 2 --sites blocks.0.out"),
            "--tokens": "--tokens mean-all",
            "--k": (f"{KEYS} --k 2", f"{KEYS} --k 3"),
            "--seeds": (f"{KEYS} --k 4", f"{KEYS} --k 4 --seeds 9"),
            "--metric": "--metric nmi",
            "--baseline": "--baseline none",
            **SUBSET,
        },
    ),
    "concepts": (
        FIT,
        {
            "--method": "--method nmf --clamp",
            "--k": (f"{KEYS} --k 2", FIT),
            "--sites": ("vit.zarr --k 3", FIT),
            "--epochs": (f"{FIT} --epochs 1", f"{FIT} --epochs 9"),
            "--clamp": "--clamp",
            "--metric": "--metric r2",
            "--top": "--top 2",
            "--images": "--images 6",
            "--seed": "--seed 1",
        },
    ),
    "cosine-map": (
        KEYS,
        {
            "--image": (f"{KEYS} --at 0,1", f"{KEYS} --at 0,1 --image 1"),
            "--at": "--at 0,1",
            "--to": (f"{KEYS} --at 0,1", f"{KEYS} --at 0,1 --to 3"),
            "--offsets": "--offsets",
            "--sites": ("vit.zarr", KEYS),
            "--images": (f"{KEYS} --offsets", f"{KEYS} --offsets --images 6"),
            "--seed": (
                "ordered.zarr --offsets --images 4",
                "ordered.zarr --offsets --images 4 --seed 1",
            ),
        },
    ),
    "dense-probe": (
        MAPS,
        {
            "--masks": (MAPS, f"{SPLIT} --masks masks"),
            "--holdout": (
                "vit.zarr --sites blocks.0.out --masks maps --holdout 0.25",
                "vit.zarr --sites blocks.0.out --masks maps --holdout 0.5",
            ),
            "--ignore": "--ignore 2",
            "--solver": "--solver knn",
            "--preset": "--preset hummingbird",
            "--resolution": "--resolution patch",
            "--l2-relative": (f"{MAPS} --l2-relative 1e-6", f"{MAPS} --l2-relative 1e6"),
            "--balanced": "--balanced",
            "--k": (f"{MAPS} --solver knn", f"{MAPS} --solver knn --k 3"),
            "--distance": (
                f"{MAPS} --solver knn --k 3",
                f"{MAPS} --solver knn --k 3 --distance l2",
            ),
            "--bank": (
                f"{MAPS} --solver knn --k 1",
                f"{MAPS} --solver knn --k 1 --bank 20",
            ),
            "--steps": (
                f"{MAPS} --solver sgd --steps 2",
                f"{MAPS} --solver sgd --steps 9",
            ),
            "--metric": "--metric pixel_accuracy",
            "--sites": ("train.zarr vit.zarr --masks maps", MAPS),
            "--concat": (
                "train.zarr vit.zarr --masks maps",
                "train.zarr vit.zarr --masks maps --concat last2",
            ),
            "--untrained": "--untrained random-train.zarr --untrained random.zarr",
            "--per-class": "--per-class",
            "--train-images": "--train-images 5",
            "--images": "--images 5",
            "--seed": (
                f"{MAPS} --solver sgd --steps 2",
                f"{MAPS} --solver sgd --steps 2 --seed 1",
            ),
        },
    ),
    "effect": (
        "vit.zarr cut.zarr",
        {
            "--sites": "--sites blocks.0.out",
            "--metric": "--metric kl",
            "--tokens": "--tokens mean",
            "--estimator": "--estimator biased",
            "--images": "--images 6",
            "--seed": (
                "ordered.zarr ordered-cut.zarr --images 4",
                "ordered.zarr ordered-cut.zarr --images 4 --seed 1",
            ),
        },
    ),
    "erf": (
        "vit.zarr",
        {
            "--metric": "--metric offset_px",
            "--sites": "--sites blocks.0.out",
        },
    ),
    "head-importance": (
        "vit.zarr --sites blocks.0",
        {
            "--sites": ("vit.zarr", "vit.zarr --sites blocks.0"),
            "--ablation": "--ablation zero",
            "--metric": "--metric kl",
            "--images": "--images 6",
            "--seed": (
                "ordered.zarr --sites blocks.0 --images 4",
                "ordered.zarr --sites blocks.0 --images 4 --seed 1",
            ),
        },
    ),
    "head-types": (
        "vit.zarr",
        {
            "--sites": "--sites blocks.0",
            "--focus": "--focus 0.001",
            "--offset": "--focus 0.001 --offset 0.001",
            "--elongation": "--focus 0.001 --elongation 1.01",
            "--radius": "--radius 1",
            "--images": "--images 4",
            "--seed": ("ordered.zarr --images 4", "ordered.zarr --images 4 --seed 3"),
        },
    ),
    "keypoints": (
        SPAIR,
        {
            "--pairs": (
                SPAIR,
                SPAIR.replace("--pairs pairs", "--pairs pairs/Layout/small/test.txt"),
            ),
            "--split": "--split trn",
            "--sites": ("pairs.zarr --pairs pairs", SPAIR),
            "--alpha": "--alpha 0.3",
            "--match": "--match token",
            "--alpha-of": "--alpha-of image",
            "--candidates": "--candidates box",
            "--by-group": "--by-group class",
            "--pairs-per-class": "--pairs-per-class 2",
            "--preset": "--preset walmer",
            "--metric": "--metric pck_point",
            "--baseline": "--baseline random",
            "--seed": (
                f"{SPAIR} --baseline random",
                f"{SPAIR} --baseline random --seed 1",
            ),
        },
    ),
    "knn": (
        f"{SPLIT} --k 3",
        {
            "--masks": (OBJECT_PAIR.replace(" --masks maps", ""), OBJECT_PAIR),
            "--background": (OBJECT_PAIR, f"{OBJECT_PAIR} --background 1"),
            "--void": (
                OBJECT_PAIR,
                f"{OBJECT_PAIR} --void 2",
            ),
            "--weights": (OBJECT_PAIR, f"{OBJECT_PAIR} --weights any"),
            "--segments": (OBJECT_PAIR, f"{OBJECT_PAIR} --segments 5"),
            "--sites": ("train.zarr vit.zarr --k 3", f"{SPLIT} --k 3"),
            "--tokens": "--tokens mean-all",
            "--k": (f"{SPLIT} --k 3", f"{SPLIT} --k 1"),
            "--vote": (
                "train.zarr vit.zarr --k 5",
                "train.zarr vit.zarr --k 5 --vote majority",
            ),
            "--temperature": (
                "train.zarr vit.zarr --k 8",
                "train.zarr vit.zarr --k 8 --temperature 9",
            ),
            "--baseline": "--baseline random",
            "--per-class": "--per-class",
            "--train-images": "--train-images 5",
            "--images": "--images 5",
            "--seed": (
                f"{SPLIT} --k 3 --baseline random",
                f"{SPLIT} --k 3 --baseline random --seed 1",
            ),
        },
    ),
    "lens": (
        "vit.zarr",
        {
            "--sites": "--sites blocks.0.out",
            "--patches": ("cnn.zarr", "cnn.zarr --patches"),
            "--images": "--images 6",
            "--seed": ("ordered.zarr --images 3", "ordered.zarr --images 3 --seed 1"),
        },
    ),
    "localize": (
        KEYS,
        {
            "--sites": ("vit.zarr", KEYS),
            "--tokens": "--tokens cls",
            "--summary": "--summary token",
            "--metric": "--summary site --metric own_cka",
            "--estimator": "--estimator biased",
            "--batch": (f"{FEW_OWN} --batch 4", f"{FEW_OWN} --batch 8"),
            "--examples": (
                f"{FEW_OWN} --batch 4 --examples 8",
                f"{FEW_OWN} --batch 4 --examples 4",
            ),
            "--repeats": (f"{FEW_OWN} --batch 4", f"{FEW_OWN} --batch 4 --repeats 3"),
            "--preset": "--preset raghu",
            "--images": "--images 6",
            "--seed": (f"{FEW_OWN} --batch 4", f"{FEW_OWN} --batch 4 --seed 1"),
        },
    ),
    "logit-attribution": (
        "vit.zarr",
        {
            "--by-head": "--by-head",
            "--target": ("vit.zarr --class 1", "vit.zarr --target predicted"),
            "--by-class": "--by-class",
            "--class": "--class 3",
            "--raw": "--raw",
            "--patches": "--patches --image 0",
            "--image": ("vit.zarr --patches --image 0", "vit.zarr --patches --image 1"),
            **SUBSET,
        },
    ),
    "normratio": (
        "vit.zarr",
        {
            "--metric": "--metric cos_branch",
            "--sites": "--sites attn",
            "--tokens": "--tokens cls",
            **SUBSET,
        },
    ),
    "norms": (
        "vit.zarr",
        {
            "--metric": "--metric norm_median",
            "--sites": "--sites blocks.0.out",
            "--tokens": "--tokens cls",
            "--threshold": "--threshold 0.5",
            **SUBSET,
        },
    ),
    "pca": (
        "vit.zarr --sites blocks.0.out",
        {
            "--image": (f"{KEYS} --image 0", f"{KEYS} --image 1"),
            "--sites": ("vit.zarr", KEYS),
            "--components": "--components 5",
            "--normalise": "--normalise",
            "--foreground": "--foreground centre",
            "--fit-shown": "--fit-shown --image 0",
            "--images": "--images 6",
            "--seed": ("ordered.zarr --images 4", "ordered.zarr --images 4 --seed 1"),
        },
    ),
    "probe": (
        SPLIT,
        {
            "--holdout": (f"{KEYS} --holdout 0.25", f"{KEYS} --holdout 0.5"),
            "--train-images": "--train-images 5",
            "--masks": (OBJECT_PROBE.replace(" --masks maps", ""), OBJECT_PROBE),
            "--background": (OBJECT_PROBE, f"{OBJECT_PROBE} --background 1"),
            "--void": (
                OBJECT_PROBE,
                f"{OBJECT_PROBE} --void 2",
            ),
            "--weights": (OBJECT_PROBE, f"{OBJECT_PROBE} --weights any"),
            "--segments": (OBJECT_PROBE, f"{OBJECT_PROBE} --segments 5"),
            "--response": (KEYS + " --holdout 0.5", RESPONSE),
            "--folds": (RESPONSE.replace("--folds 2", "--holdout 0.5"), RESPONSE),
            "--by-column": (RESPONSE, f"{RESPONSE} --by-column"),
            "--sites": ("train.zarr vit.zarr", SPLIT),
            "--tokens": "--tokens mean-all",
            "--l2": ("train.zarr vit.zarr --l2 1e-6", "train.zarr vit.zarr --l2 1e6"),
            "--standardise": "--standardise",
            "--preset": "--preset big_vision",
            "--shots": "--shots 2",
            "--solver": (SPLIT, SGD),
            "--batch-norm": (SGD, f"{SGD} --batch-norm"),
            "--lr": (SGD, f"{SGD} --lr 3"),
            "--batch": (SGD, SGD.replace("--batch 4", "--batch 2")),
            "--baseline": "--baseline random",
            "--per-class": "--per-class",
            "--metric": (RESPONSE, f"{RESPONSE} --metric r2"),
            "--images": "--images 5",
            "--seed": (SGD, f"{SGD} --seed 1"),
        },
    ),
    "propagate": (
        f"{VIDEO} --only val.txt",
        {
            "--sites": (
                "videos.zarr --masks videos --only val.txt",
                f"{VIDEO} --only val.txt",
            ),
            "--preset": "--preset dinov3",
            "--context": "--context 1",
            "--radius": "--radius 1",
            "--neighbourhood": "--neighbourhood circle --radius 2",
            "--topk": "--topk 1",
            "--temperature": "--temperature 5",
            "--first-labels": "--first-labels area",
            "--upsample": "--upsample nearest",
            "--metric": "--metric j",
            "--baseline": "--baseline none",
            "--per-video": "--per-video",
            "--seed": "--baseline random --seed 1",
        },
    ),
    "retrieve": (
        LABELS,
        {
            "--truth": (LABELS, "vit.zarr --truth truth.json --sites blocks.0.out"),
            "--distractors": "--distractors train.zarr",
            "--sites": ("vit.zarr --truth labels", LABELS),
            "--tokens": "--tokens mean-all",
            "--cutoff": "--cutoff 2",
            "--metric": "--metric map",
            "--baseline": "--baseline random",
            "--per-query": "--per-query",
            "--images": "--images 6",
            "--seed": (
                f"{LABELS} --baseline random",
                f"{LABELS} --baseline random --seed 1",
            ),
        },
    ),
    "saliency": (
        "vit.zarr --masks masks",
        {
            "--masks": ("vit.zarr --masks masks", "vit.zarr --masks maps"),
            "--tokens": "--tokens mean",
            "--mass": "--mass 0.3",
            "--foreground": (
                "vit.zarr --masks maps",
                "vit.zarr --masks maps --foreground any",
            ),
            "--background": "--background 1",
            "--void": ("vit.zarr --masks maps", "vit.zarr --masks maps --void 2"),
            "--best": "--best image",
            "--sites": "--sites blocks.0",
            "--images": "--images 6",
            "--seed": (
                "ordered.zarr --masks masks --images 4",
                "ordered.zarr --masks masks --images 4 --seed 1",
            ),
        },
    ),
    "similarity": (
        "vit.zarr --measure mutual_knn --k 2",
        {
            "--measure": ("vit.zarr --measure cka", "vit.zarr --measure rsa"),
            "--k": (
                "vit.zarr --measure mutual_knn --k 2",
                "vit.zarr --measure mutual_knn --k 3",
            ),
            "--rdm": ("vit.zarr --measure rsa", "vit.zarr --measure rsa --rdm euclidean"),
            "--ridge": ("vit.zarr --measure gulp", "vit.zarr --measure gulp --ridge 3"),
            "--variance": (
                "vit.zarr --measure svcca",
                "vit.zarr --measure svcca --variance 0.5",
            ),
            "--calibrate": "--calibrate 19",
            "--sites": "--sites norms",
            "--sites-a": "--sites-a blocks.0.out",
            "--sites-b": (
                "vit.zarr cnn.zarr --measure cka",
                "vit.zarr cnn.zarr --measure cka --sites-b stem",
            ),
            "--tokens": "--tokens mean",
            "--pairs": "--pairs branch",
            "--preset": (
                "vit.zarr cut.zarr --k 2",
                "vit.zarr cut.zarr --k 2 --preset platonic",
            ),
            "--images": "--images 6",
            "--seed": (
                "vit.zarr --measure mutual_knn --k 2 --calibrate 19",
                "vit.zarr --measure mutual_knn --k 2 --calibrate 19 --seed 1",
            ),
        },
    ),
    "spatial": (
        KEYS,
        {
            "--metric": "--metric lds",
            "--sites": ("vit.zarr", KEYS),
            "--masks": "--masks maps",
            "--background": (OBJECTS, f"{OBJECTS} --background 1"),
            "--void": (
                OBJECTS,
                f"{OBJECTS} --void 2",
            ),
            **SUBSET,
        },
    ),
    "spectrum": (
        KEYS,
        {
            "--metric": "--metric rankme",
            "--sites": ("vit.zarr", KEYS),
            "--tokens": "--tokens all",
            **SUBSET,
        },
    ),
    "weights": (
        "test_vit --random-init 0",
        {
            "--what": "--what positions",
            "--components": "--components 3",
            "--query-stride": (
                "test_vit --random-init 0 --what positions",
                "test_vit --random-init 0 --what positions --query-stride 3",
            ),
            "--random-init": ("test_vit --random-init 0", "test_vit --random-init 1"),
            "--img-size": (
                "test_vit --random-init 0 --what positions",
                "test_vit --random-init 0 --what positions --img-size 64",
            ),
            "--model-arg": "--model-arg patch_size=8",
        },
    ),
}


def words_of(
    option: str, base: str, lines: str | tuple[str, str]
) -> tuple[list[str], list[str]]:
    """Return the two command lines, as words, that differ in this option."""
    if isinstance(lines, tuple):
        without, with_option = lines
    else:
        without, with_option = base, f"{base} {lines}"
    assert option in with_option.split() or f"--no-{option[2:]}" in with_option.split()
    return without.split(), with_option.split()


def analysis_options(command: str) -> list[str]:
    """Return the options of an analysis' command that decide its numbers."""
    with click.Context(main) as context:
        declared = main.get_command(context, command)
    assert declared is not None
    options = [
        max(p.opts, key=len) for p in declared.params if isinstance(p, click.Option)
    ]
    passed_over = OUTPUTS | RESOURCES | SOURCES | DRAWN | ELSEWHERE.keys()
    return [option for option in options if option not in passed_over]


COMMANDS = [name.replace("_", "-") for name in registry.builtin_names()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_pair_of_command_lines(command: str) -> None:
    expected = {o for o in analysis_options(command) if (command, o) not in EXCEPTIONS}
    assert set(EFFECTS[command][1]) == expected


def test_exceptions_name_tests_that_are_there() -> None:
    for reason in [*ELSEWHERE.values(), *EXCEPTIONS.values()]:
        for path in reason.split(": ")[1].split(", "):
            assert (Path(__file__).parents[1] / path).is_file(), path


@pytest.fixture(scope="module")
def stores(everything: Path) -> Path:
    """The folder of small stores, and in it: stores in the order of the data, where a seed draws
    images, untrained ones, and responses."""
    vit = ["test_vit", "--img-size", "32", "--model-arg", "patch_size=8"]
    kept = ["--sites", "all", "--slab", "4", "--attention", "full", "--erf", "4"]
    runs = {
        "ordered.zarr": [
            *kept,
            "--random-init",
            "0",
            "--data",
            "data",
            "--order",
            "dataset",
        ],
        "ordered-cut.zarr": [
            *kept,
            "--random-init",
            "0",
            "--data",
            "data",
            "--order",
            "dataset",
            "--ablate-skip",
            "blocks.0",
        ],
        "random.zarr": [*kept, "--random-init", "7", "--data", "data"],
        "random-train.zarr": [*kept, "--random-init", "7", "--data", "other"],
    }
    with contextlib.chdir(everything):
        for name, words in runs.items():
            if not Path(name).exists():
                vitsee("extract", *vit, *words, "-o", name)
        ids = [f"class{i % 2}/{i}.png" for i in range(8)]
        rows = [f"{name},{i * i % 5},{i}" for i, name in enumerate(ids)]
        Path("responses.csv").write_text("\n".join(["id,first,second", *rows, ""]))
        truth = {
            "imlist": ids,
            "qimlist": ids[:2],
            "gnd": [
                {"bbx": [0, 0, 32, 32], "easy": [2, 3], "hard": [4], "junk": [0]},
                {"bbx": [0, 0, 32, 32], "easy": [5], "hard": [6, 7], "junk": [1]},
            ],
        }
        Path("truth.json").write_text(json.dumps(truth))
        # best-layer reads results, here of two metrics.
        maps = ["train.zarr", "vit.zarr", "--masks", "maps"]
        metrics = ["--metric", "miou", "--metric", "pixel_accuracy"]
        vitsee("dense-probe", *maps, *metrics, "-o", "both.csv", "--force")
    return everything


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_changes_the_table(command: str, stores: Path) -> None:
    base, lines = EFFECTS[command]
    tables: dict[str, str] = {}
    errors = []

    def table_of(words: list[str]) -> str:
        line = " ".join(words)
        if line not in tables:
            tables[line] = vitsee(command, *words, "-q")
        return tables[line]

    ignored = []
    with contextlib.chdir(stores):
        for option, pair in lines.items():
            without, with_option = words_of(option, base, pair)
            try:
                same = table_of(without) == table_of(with_option)
            except AssertionError as error:
                errors.append(
                    f"{option}: {str(error).splitlines()[-1] if str(error) else error}"
                )
                continue
            if same:
                ignored.append(option)
    assert (ignored, errors) == ([], [])
