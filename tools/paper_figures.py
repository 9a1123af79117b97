"""The figures of the papers, and the commands that make each: what tools/papers_page.py prints.

A figure's commands name stores; `STORES` says how each store is made from the checkpoint that is
nearest to the paper's, and which of the demo's models takes its place where the commands are tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LAYERS = "--sites blocks --sites norms --sites hidden"
IMAGENET = "--data imagenet/val --images 10240"
IMAGENET50 = "--data imagenet50 --per-class 100 --crop-pct 1"
POOLED = "--tokens pooled --attention none --no-residual"
TRAIN = f"--data imagenet/train {POOLED}"
CIFAR = "--attention none --no-residual --order dataset"
FRAMES = (
    "--data DAVIS/JPEGImages/480p --only DAVIS/ImageSets/2017/val.txt --order dataset "
    "--attention none --no-residual"
)


@dataclass(frozen=True)
class Made:
    """How a store is made.

    model: the checkpoint, as `extract` takes it; options: what the store keeps, and of which
    images; demo: the bundled model that stands in for it.
    """

    model: str
    options: str
    demo: str


@dataclass(frozen=True)
class Figure:
    """Figures that are made alike.

    names: as the paper numbers them; commands: without `vitsee` and outputs; note: what differs
    from the paper, or what cannot be had.
    """

    names: str
    commands: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Paper:
    """A paper: its stores by name, its figures in order, and what holds for all of them."""

    title: str
    note: str
    stores: dict[str, Made]
    figures: tuple[Figure, ...]
    left_out: tuple[str, ...] = field(default=())


RAGHU = Paper(
    "Raghu et al. 2021, Do Vision Transformers See Like Convolutional Neural Networks?",
    "The paper's models were trained on JFT-300M, which nobody outside has; their nearest public "
    "relatives were trained on ImageNet-21k by the same recipes. `--preset raghu` is the paper's "
    "estimator (minibatches of 1,024 out of 10,240 images, 20 times); without it CKA is exact.",
    {
        "b16": Made(
            "vit_base_patch16_224.orig_in21k",
            f"{IMAGENET} {LAYERS} --sites residual --sites blocks.0.attn.heads --erf 256",
            "demo:vit",
        ),
        "b32": Made("vit_base_patch32_224.orig_in21k", f"{IMAGENET} {LAYERS} --inputs", "demo:vit"),
        "l16": Made(
            "vit_large_patch16_224.orig_in21k", f"{IMAGENET} {LAYERS} --inputs", "demo:vit-seed1"
        ),
        "h14": Made("vit_huge_patch14_224.orig_in21k", f"{IMAGENET} {LAYERS}", "demo:vit-masked"),
        "r50": Made(
            "resnetv2_50x1_bit.goog_in21k",
            f"{IMAGENET} --sites blocks --sites norms --sites residual --inputs --erf 256",
            "demo:resnet",
        ),
        "r152": Made(
            "resnetv2_152x2_bit.goog_in21k",
            f"{IMAGENET} --sites blocks --sites norms",
            "demo:resnet",
        ),
        "gap": Made("vit_medium_patch16_gap_240.sw_in12k", f"{IMAGENET} --inputs", "demo:vit-gap"),
        "in1k": Made("vit_base_patch16_224.augreg_in1k", IMAGENET, "demo:vit-10pct"),
        "in21k": Made("vit_base_patch16_224.augreg_in21k", IMAGENET, "demo:vit"),
        "tuned": Made("vit_base_patch16_224.augreg_in21k_ft_in1k", IMAGENET, "demo:vit-seed1"),
        "noskip": Made(
            "vit_base_patch16_224.orig_in21k",
            f"{IMAGENET} --ablate-skip blocks.1.attn",
            "demo:vit",
        ),
        "mixer": Made("mixer_b16_224.goog_in21k", f"{IMAGENET} {LAYERS}", "demo:mixer"),
        "train": Made(
            "vit_base_patch32_224.orig_in21k",
            "--data imagenet/train --per-class 10 --attention none --no-residual",
            "demo:vit",
        ),
        "gap-train": Made(
            "vit_medium_patch16_gap_240.sw_in12k",
            "--data imagenet/train --per-class 10 --attention none --no-residual",
            "demo:vit-gap",
        ),
        "r50-train": Made(
            "resnetv2_50x1_bit.goog_in21k",
            "--data imagenet/train --per-class 10 --residual",
            "demo:resnet",
        ),
        "cifar": Made("vit_base_patch32_224.orig_in21k", f"--data cifar10 {CIFAR}", "demo:vit"),
    },
    (
        Figure(
            "1, B.1 top",
            (
                *tuple(f"cka {x}.zarr {LAYERS} --preset raghu" for x in ("l16", "h14")),
                "cka r50.zarr --sites blocks --sites norms --preset raghu",
            ),
        ),
        Figure(
            "2, B.1 bottom",
            (
                f"cka l16.zarr r50.zarr {LAYERS} --preset raghu",
                f"cka h14.zarr r50.zarr {LAYERS} --preset raghu",
                f"cka b32.zarr r50.zarr {LAYERS} --preset raghu",
                f"cka h14.zarr r152.zarr {LAYERS} --preset raghu",
            ),
            "a group that a model lacks (hidden of a CNN) is left out with a remark",
        ),
        Figure("3, C.5", ("attn-dist l16.zarr", "attn-dist h14.zarr")),
        Figure(
            "4, C.6",
            ("attn-dist in21k=in21k.zarr in1k=in1k.zarr",),
            "L/16 and H/14 trained on ImageNet alone were not published",
        ),
        Figure("5", ("cka-heads b16.zarr r50.zarr",), "subset size: --window, --cumulative"),
        Figure("6, C.2", ("erf b16.zarr r50.zarr",)),
        Figure(
            "C.1, C.3, C.4",
            ("erf b16.zarr --sites residual", "erf r50.zarr --sites residual"),
            "C.4 is of the branches, before they join the stream",
        ),
        Figure("7 left, E.1", ("normratio b16.zarr",)),
        Figure("7 right, E.2", ("normratio b16.zarr r50.zarr --tokens cls --tokens patches",)),
        Figure(
            "8",
            ("cka noskip.zarr",),
            "the skip is taken out of a trained model; as published, of a model trained without "
            "it, whose weights `--checkpoint` takes beside `--ablate-skip`",
        ),
        Figure(
            "9, D.1, D.2",
            (
                "localize b32.zarr --sites last --tokens 0,0 --tokens 2,1 --tokens 4,2 "
                "--tokens 4,4",
                "localize r50.zarr --sites last --tokens 0,0",
                "localize l16.zarr --sites last --tokens 0,0 --tokens 2,3 --tokens 2,7 "
                "--tokens 4,5",
            ),
            "r50's further tokens: 2,1, 4,2 and 4,4",
        ),
        Figure("D.3", ("localize r50.zarr --sites first --sites depth:0.5 --tokens 0,0",)),
        Figure("10", ("localize gap.zarr --sites last --tokens 0,0 --tokens 2,1",)),
        Figure(
            "11 left, D.4",
            (
                "probe train.zarr b32.zarr --tokens each --shots 10",
                "probe gap-train.zarr gap.zarr --tokens each --shots 10",
            ),
        ),
        Figure(
            "11 right, F.3",
            (
                "probe train.zarr b32.zarr --tokens first --tokens mean-all --tokens rest "
                "--shots 10",
            ),
        ),
        Figure(
            "12, G.1",
            ("cka in21k.zarr in1k.zarr --pairs same-depth",),
            "fractions of JFT cannot be had: checkpoints of two sets of images",
        ),
        Figure("G.2", ("cka in21k.zarr tuned.zarr --pairs same-depth",)),
        Figure(
            "13",
            (
                "probe train.zarr b32.zarr --preset raghu",
                "probe r50-train.zarr r50.zarr --preset raghu",
            ),
        ),
        Figure(
            "F.1, F.2",
            ("probe cifar.zarr --preset raghu --holdout 0.1",),
            "the paper trains on the first 45,000 images and tests on 5,000 of CIFAR's 50,000",
        ),
        Figure(
            "H.1, H.2",
            (
                f"cka mixer.zarr {LAYERS} --preset raghu",
                f"cka mixer.zarr b32.zarr {LAYERS} --preset raghu",
                f"cka mixer.zarr r50.zarr {LAYERS} --preset raghu",
            ),
        ),
        Figure(
            "slides: initialisations",
            ("cka in21k.zarr tuned.zarr",),
            "two runs of one recipe: any two checkpoints",
        ),
        Figure(
            "slides: redundancy",
            (
                "cka b32.zarr -o self.csv",
                "probe train.zarr b32.zarr --preset raghu -o accuracy.csv",
                "best-layer accuracy.csv self.csv",
            ),
        ),
    ),
    ("Tables of training recipes and of accuracies after training: no activations.",),
)

_VITS = "fs.zarr clip.zarr dino.zarr moco.zarr mae.zarr beit.zarr"
_GROUPS = (
    "FS/B/16=fs.zarr CLIP/B/16=clip.zarr DINO/B/16=dino.zarr MoCo/B/16=moco.zarr "
    "MAE/B/16=mae.zarr BEiT/B/16=beit.zarr"
)
WALMER = Paper(
    "Walmer et al. 2023, Teaching Matters: Investigating the Role of Supervision in Vision "
    "Transformers",
    "Every model sees the same picture, its short side at 224 pixels and the middle of it: "
    "`--crop-pct 1`. ImageNet-50 is the first 100 images of 50 classes; FS is fully supervised. "
    "B/16 stands here for all sizes of the paper (also S/16, S/8, B/32, B/8, L/16, L/14, H/14): "
    "their stores go beside these, labelled `DINO/S/8=...`. Figures of stores labelled GROUP/NAME "
    "have a panel per kind of supervision, a size one colour and a patch size one stroke in all of "
    "them; where the page has one store of DINO's, the others go beside it, labelled alike, or "
    "`vitsee plot DINO.csv MoCo.csv -o ALL.png` makes one figure of their results.",
    {
        "fs": Made("vit_base_patch16_224.augreg_in21k_ft_in1k", IMAGENET50, "demo:vit"),
        "clip": Made("vit_base_patch16_clip_quickgelu_224.openai", IMAGENET50, "demo:vit-seed1"),
        "dino": Made(
            "vit_base_patch16_224.dino",
            f"{IMAGENET50} --attention full --sites blocks --sites norms --sites residual",
            "demo:vit",
        ),
        "moco": Made(
            "vit_base_patch16_224 --checkpoint vit-b-300ep.pth.tar", IMAGENET50, "demo:vit-10pct"
        ),
        "mae": Made("vit_base_patch16_224.mae", IMAGENET50, "demo:vit-masked"),
        "beit": Made(
            "beit_base_patch16_224 --checkpoint beit_base_patch16_224_pt22k.pth",
            IMAGENET50,
            "demo:vit-seed1",
        ),
        "train": Made("vit_base_patch16_224.dino", f"{TRAIN} --crop-pct 1", "demo:vit"),
        "val": Made(
            "vit_base_patch16_224.dino",
            f"--data imagenet/val {POOLED} --crop-pct 1",
            "demo:vit",
        ),
        "objects": Made(
            "vit_base_patch16_224.dino",
            "--data coco/val2017 --short-side 448 --tiles --attention none",
            "demo:vit",
        ),
        "masked": Made(
            "vit_base_patch16_224.dino",
            "--data coco/val2017 --attention rows --crop-pct 1",
            "demo:vit",
        ),
        "oxford": Made(
            "vit_base_patch16_224.dino", f"--data roxford5k/jpg {POOLED} --crop-pct 1", "demo:vit"
        ),
        "normal": Made("vit_base_patch16_224.dino", f"{FRAMES} --crop-mode squash", "demo:vit"),
        "dense": Made(
            "vit_base_patch16_224.dino", f"{FRAMES} --short-side 448 --tiles", "demo:vit"
        ),
        "pairs": Made(
            "vit_base_patch16_224.dino",
            "--data SPair-71k/JPEGImages --crop-mode border --fill black --crop-pct 1 "
            "--attention none --no-residual",
            "demo:vit",
        ),
    },
    (
        Figure("1 left, 6, 19: class token", (f"cka {_VITS} --sites last --tokens cls",)),
        Figure("6, 19: patches", (f"cka {_VITS} --sites last --tokens patches",)),
        Figure(
            "1 right, Tables 1, 5",
            (
                "knn train.zarr dino=val.zarr --sites blocks,!embed -o knn.csv",
                "retrieve dino=oxford.zarr --truth roxford5k/gnd_roxford5k.pkl --sites "
                "blocks,!embed -o ox.csv",
                "keypoints dino=pairs.zarr --pairs SPair-71k --preset walmer --sites "
                "blocks,!embed -o pck.csv",
                "best-layer knn.csv ox.csv pck.csv --table best.png",
            ),
            "the other models' stores beside dino's in each command, each named alike",
        ),
        Figure("1 top, 17", (f"attn-map {_GROUPS} --kind mean-cls",)),
        Figure("2", (f"attn-map {_GROUPS} --kind mean-cls --heads 0,1,2",)),
        Figure("3, 14, 18", (f"attn-map {_GROUPS} --kind aligned", "head-types dino.zarr")),
        Figure("4 left", (f"attn-dist {_VITS} --metric distance_unit",)),
        Figure("4 right, 15", (f"attn-dist {_GROUPS} --metric distance_unit",)),
        Figure(
            "5, 16",
            ("saliency DINO/B/16=masked.zarr --masks coco/annotations/instances_val2017.json",),
        ),
        Figure("7 left, 24", (f"cluster {_GROUPS} --k 50 --tokens cls",)),
        Figure("7 right, 25", (f"cluster {_GROUPS} --k 50 --tokens mean",)),
        Figure(
            "8, 26, 27",
            (
                "cluster DINO/B/16=objects.zarr --masks coco/annotations/instances_val2017.json "
                "--preset walmer --k 3",
            ),
            "the paper's k is 80, the preset's; parts: `--masks` of each of PartImageNet's files",
        ),
        Figure("9 left, 28", ("knn train.zarr DINO/B/16=val.zarr",)),
        Figure(
            "9 right, 29",
            ("retrieve DINO/B/16=oxford.zarr --truth roxford5k/gnd_roxford5k.pkl",),
            "RParis6k alike",
        ),
        Figure("10 left, 30", ("propagate DINO/B/16=dense.zarr --masks DAVIS --preset walmer",)),
        Figure(
            "10 right, 31",
            ("keypoints DINO/B/16=pairs.zarr --pairs SPair-71k --preset walmer",),
        ),
        Figure("11, 12", (f"attn-map {_GROUPS} --image 0 --sites blocks",)),
        Figure(
            "13",
            (
                f"attn-map {_GROUPS} --image 0 --image 1 --heads 0",
                f"attn-map {_GROUPS} --kind mean-cls --sites last --heads 0",
            ),
            "rows of images; the row of means is the second command",
        ),
        Figure("20 to 22", ("cka dino.zarr --sites norms",)),
        Figure("23", ("cka dino.zarr --pairs branch",)),
        Figure("Table 4", ("propagate normal=normal.zarr dense=dense.zarr --masks DAVIS",)),
        Figure("Table 6", ("probe train.zarr val.zarr --solver sgd --batch-norm --sites last",)),
    ),
    ("Tables 2 and 3 list models and prose.",),
)

DOSOVITSKIY = Paper(
    "Dosovitskiy et al. 2021, An Image is Worth 16x16 Words",
    "Of the paper's models those trained on ImageNet-21k are public.",
    {
        "l16": Made(
            "vit_large_patch16_224.orig_in21k", "--data imagenet/val --images 128", "demo:vit"
        ),
        "l32": Made(
            "vit_large_patch32_224.orig_in21k", "--data imagenet/val --images 128", "demo:vit"
        ),
        "hybrid": Made(
            "vit_base_r50_s16_224.orig_in21k",
            "--data imagenet/val --images 128",
            "demo:vit-seed1",
        ),
        "train": Made("vit_base_patch16_224.orig_in21k", TRAIN, "demo:vit"),
        "val": Made("vit_base_patch16_224.orig_in21k", f"--data imagenet/val {POOLED}", "demo:vit"),
    },
    (
        Figure(
            "4, 8, 12, Table 8",
            ("probe train.zarr val.zarr --preset big_vision --shots 5",),
            "one point per checkpoint",
        ),
        Figure("6, 13", ("attn-map l16.zarr --image 0", "attn-map l16.zarr --kind rollout")),
        Figure("7 left and centre, 9", ("weights l32.zarr",)),
        Figure("7 right, 10", ("attn-dist l16.zarr", "attn-dist hybrid.zarr")),
    ),
    ("Figures 2, 3, 5, 11 and Tables 2 to 7, 9 are about training, fine-tuning and speed.",),
)

PAPERS = (RAGHU, WALMER, DOSOVITSKIY)
