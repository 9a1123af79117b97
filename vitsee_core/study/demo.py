"""The study of vitsee's own models, images and miniature sets: every command at least once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

from vitsee_core import demo
from vitsee_core.study.steps import SETS, Plan, Step, Study

IMAGES, QUICK_IMAGES = 1000, 500
FINE = "videos-fine"  # the frames on a finer grid of tokens
QUICK_MODELS = ("vit", "resnet")
# The analyses of the pictures in docs/.
QUICK = (
    "attn-dist", "attn-map", "cka", "similarity", "normratio", "norms", "localize", "erf",
    "spatial", "spectrum", "lens", "knn", "probe", "weights", "best-layer", "explore",
)  # fmt: skip
# Of the bundled models: how they pool, what they were taught by.
FULL_MODELS = ("vit", "resnet", "vit-gap", "vit-masked")


def demo_study(folder: Path, *, quick: bool = False) -> Study:
    """What the demo asks for: all analyses, or those of the pictures in docs/."""
    names = [name for name in (QUICK_MODELS if quick else FULL_MODELS) if name in demo.models()]
    return Study(
        folder=folder,
        models={name: f"demo:{name}" for name in names},
        data="demo:test",
        train="demo:train",
        images=QUICK_IMAGES if quick else IMAGES,
        analyses=QUICK if quick else (),
    )


def with_sets(study: Study, found: Plan, *, quick: bool = False) -> Plan:
    """The plan with the tasks of the miniature sets and, unless `quick`, a tour of the commands
    that make no result."""
    sets = Sets(study)
    extractions = [*found.extractions, *sets.extractions()]
    analyses = [*found.analyses, *sets.tasks(), *([] if quick else tour(study))]
    answered = {"propagate", "keypoints", "saliency", "retrieve", "dense-probe"}
    left_out = {what: why for what, why in found.left_out.items() if what not in answered}
    return Plan(extractions, analyses, left_out, found.keeps)


class Sets:
    """The miniature sets of a study, and the steps on them."""

    def __init__(self, study: Study) -> None:
        """Nothing is written before a step does it."""
        self.study, self.models = study, list(QUICK_MODELS)
        base = study.folder / SETS
        self.videos, self.clothes, self.buildings, self.scenes = (
            base / name for name in ("videos", "clothes", "buildings", "scenes")
        )

    def extractions(self) -> list[Step]:
        """The sets' files, then their stores."""
        videos = (
            "--data", str(self.videos / "JPEGImages" / "480p"),
            "--only", str(self.videos / "ImageSets" / "2017" / "val.txt"), "--order", "dataset",
            "--attention", "none", "--no-residual",
        )  # fmt: skip
        fine = ("--short-side", "56", "--tiles")
        steps = [
            self._written(self.videos, "davis"),
            self._written(self.clothes, "spair"),
            self._written(self.buildings, "revisited"),
            self._written(self.scenes, "coco"),
        ]
        for model in self.models:
            plain = ("--attention", "none", "--no-residual")
            steps += [
                self._store(model, "videos", self.videos, *videos, "--crop-mode", "squash"),
                self._store(model, "clothes", self.clothes, "--data",
                            str(self.clothes / "JPEGImages"), "--crop-mode", "border", "--fill",
                            "black", "--crop-pct", "1", *plain),
                self._store(model, "buildings", self.buildings, "--data",
                            str(self.buildings / "jpg"), "--tokens", "pooled", *plain),
            ]  # fmt: skip
            if model == "vit":
                steps.append(self._store(model, FINE, self.videos, *videos, *fine))
            seen = ("--attention", "rows") if model == "vit" else ("--attention", "none")
            steps.append(
                self._store(model, "scenes", self.scenes, "--data", str(self.scenes / "val2017"),
                            *seen, "--no-residual")
            )  # fmt: skip
        return steps

    def tasks(self) -> list[Step]:
        """Masks through videos, parts of objects, buildings found again, objects, attention and
        pixels."""
        annotations = self.scenes / "annotations"
        panoptic = (
            "--masks", str(annotations / "panoptic_val2017.json"),
            "--panoptic", str(annotations / "panoptic_val2017"),
        )  # fmt: skip
        found = [
            self._task("propagate", "propagate", "videos", self.models, "--masks", self.videos,
                       more={"vit, tiles": self.study.store("vit", FINE)}),
            self._task("keypoints", "keypoints", "clothes", self.models, "--pairs", self.clothes),
            self._task("retrieve", "retrieve-buildings", "buildings", self.models,
                       "--truth", self.buildings / "gnd_roxford5k.pkl"),
            self._task("cluster", "cluster-objects", "scenes", self.models, *panoptic),
            self._task("saliency", "saliency", "scenes", self.models[:1], *panoptic),
            self._task("dense-probe", "dense-probe", "scenes", self.models[:1], *panoptic[:2],
                       "--holdout", "0.5"),
        ]  # fmt: skip
        return found

    def _written(self, folder: Path, module: str) -> Step:
        def write() -> None:
            made_by = importlib.import_module(f"vitsee_core.demo.{module}")
            writer: Callable[[Path], None] = getattr(made_by, f"write_{module}")
            writer(folder)

        text = f"from vitsee_core.demo.{module} import write_{module}; "
        words = ("python", "-c", f"{text}write_{module}({str(folder)!r})")
        return Step(f"set-{folder.name}", words, (), (folder,), make=write)

    def _store(self, model: str, images: str, of: Path, *options: str) -> Step:
        place = self.study.store(model, images)
        words = ("extract", f"demo:{model}", *options, "-o", str(place))
        return Step(f"extract-{model}-{images}", words, (of,), (place,))

    def _task(
        self,
        command: str,
        name: str,
        images: str,
        models: list[str],
        *options: str | Path,
        more: Mapping[str, Path] | None = None,
    ) -> Step:
        given = {model: self.study.store(model, images) for model in models} | dict(more or {})
        stores, named = tuple(given.values()), [f"{k}={store}" for k, store in given.items()]
        table = self.study.result(name)
        picture = table.with_suffix(".png")
        words = (command, *named, *map(str, options), "-o", str(table), "--png", str(picture))
        return Step(name, (*words, "--force"), stores, (table, picture))


def tour(study: Study) -> list[Step]:
    """The commands that make no figure of their own."""
    label, name = next(iter(study.models.items()))
    store = study.store(label)
    table, drawn = study.result("models"), study.result("cka-vit-resnet")
    array, picture = study.folder / "pooled.npy", study.folder / "cka-dark.svg"
    again, found = study.folder / "cka-again.csv", study.folder / "findings.csv"
    return [
        Step("models", ("models", name, "-o", str(table), "--force"), (), (table,)),
        Step("sites", ("sites", name, "--sites", "blocks")),
        Step("info", ("info", *(str(study.store(label)) for label in study.models))),
        Step("validate", ("validate", str(store))),
        Step("export", ("export", str(store), "pooled", "-o", str(array), "--force"),
             (store,), (array,)),
        Step("findings", ("findings", str(store), "--only", "distance-rises", "-o", str(found),
                          "--force"), (store,), (found,)),
        Step("cache", ("cache", "ls", str(store))),
        Step("rerun", ("rerun", f"{drawn}.json", "-o", str(again), "--force"), (drawn,), (again,)),
        Step("plot", ("plot", str(drawn), "-o", str(picture), "--theme", "dark", "--force"),
             (drawn,), (picture,)),
    ]  # fmt: skip
