"""Every analysis on small extracted stores of clips: of a model of clips, and of an image model
frame by frame. What applies gives values of clips; what does not says so in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.extractions import extracted
from vitsee_core.demo.moving import DIRECTIONS, clips
from vitsee_core.runtime import registry
from vitsee_core.study.catalogue import needs_of_analyses
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import VitseeError

N, FRAMES = 24, 8
VIDEO = (
    "transformers:VideoMAEModel?image_size=32&patch_size=8&num_frames=8&tubelet_size=2"
    "&hidden_size=32&num_hidden_layers=2&num_attention_heads=2&intermediate_size=32&random-init=0"
)
MORE = ("--sites", "blocks", "--sites", "blocks.0.attn.heads")
IMAGES_ONLY = {
    *("localize", "erf", "dense-probe", "keypoints", "saliency"),
    *("head-importance", "logit-attribution"),
}
ASKED: dict[str, dict[str, Any]] = {
    "keypoints": {"pairs": "none"},
    "saliency": {"masks": "none"},
}
# Analysis -> its options, for a store or for two of the same clips.
ONE: dict[str, dict[str, Any]] = {
    "cka": {},
    "spectrum": {},
    "norms": {},
    "normratio": {},
    "probe": {"holdout": 0.5},
    "cluster": {},
    "retrieve": {"truth": "labels"},
    "concepts": {"k": 2},
    "attn_dist": {},
    "head_types": {},
    "spatial": {},
}
TWO: dict[str, dict[str, Any]] = {
    "cka": {"tokens": "mean"},
    "similarity": {},
    "effect": {"other_transform": True},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of the same clips, as they are and shuffled, by two models; and other clips."""
    pytest.importorskip("transformers", minversion="5.20")
    root = tmp_path_factory.mktemp("clips")
    for name, seed in (("test", 5), ("train", 6)):
        for i, (direction, frames) in enumerate(clips(N, seed)):
            folder = root / name / direction / f"{name}{i}"
            folder.mkdir(parents=True)
            for k, frame in enumerate(frames):
                Image.fromarray(frame).save(folder / f"{k}.png")
    for label, model in (("video", VIDEO), ("image", "demo:vit")):
        for end, words in (
            ("", ("test",)),
            ("-train", ("train",)),
            ("-shuffled", ("test", "--time", "shuffled")),
        ):
            data = root / words[0], "--frames", FRAMES, *words[1:], *MORE
            extracted(model, "--data", *data, "-o", root / f"{label}{end}.zarr")
    return root


def run(name: str, *stores: Path, **options: Any) -> Table:
    table: Table = registry.load(name).run(*stores, **options)
    return table


def opened(path: Path) -> Store:
    return open_store(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("label", ["video", "image"])
def test_one_store_in_one_call(root: Path, label: str, name: str) -> None:
    table = run(name, root / f"{label}.zarr", **ONE[name])
    frame = table.frame
    assert len(frame) > 0
    assert frame["value"].is_finite().any()
    if "n_images" in frame.columns and name != "probe":
        assert frame["n_images"].max() == N  # clips, and not their frames
    registry.load(name).plot(table)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("label", ["video", "image"])
def test_clips_beside_themselves_shuffled(root: Path, label: str, name: str) -> None:
    pair = root / f"{label}.zarr", root / f"{label}-shuffled.zarr"
    table = run(name, *pair, **TWO[name])
    values = table.frame.filter(metric="cka")["value"] if name == "cka" else None
    if values is not None and label == "image":
        # The mean over frames that are seen one by one is blind to their order.
        store, shuffled = opened(pair[0]), opened(pair[1])
        for site in ("blocks.0.out", "blocks.5.out"):
            np.testing.assert_allclose(
                store.pooled(site)[:], shuffled.pooled(site)[:], atol=1e-4
            )
    registry.load(name).plot(table)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["video", "image"])
def test_training_clips_and_others(root: Path, label: str) -> None:
    stores = root / f"{label}-train.zarr", root / f"{label}.zarr"
    for name in ("knn", "probe"):
        table = run(name, *stores, **({"ks": [3]} if name == "knn" else {}))
        tops = table.frame.filter(metric="top1")
        assert tops["value"].is_between(0, 1).all()
        assert tops["n_images"].max() == N
    assert opened(stores[0]).class_names == sorted(DIRECTIONS)


@pytest.mark.slow
def test_heads_beside_sites(root: Path) -> None:
    table = run("cka_heads", root / "video.zarr", root / "image.zarr")
    assert table.frame["value"].is_finite().any()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(IMAGES_ONLY))
def test_what_is_of_images_says_so(root: Path, name: str) -> None:
    module = name.replace("-", "_")
    assert "images" in needs_of_analyses()[name]
    for label in ("video", "image"):
        with pytest.raises(VitseeError) as error:
            run(module, root / f"{label}.zarr", **ASKED.get(name, {}))
        assert str(error.value) == (
            f"{name} is of images, and {label} holds clips of 8 frames; expected a store of the "
            "frames, extracted as images"
        )


@pytest.mark.slow
def test_other_refusals(root: Path) -> None:
    with pytest.raises(
        VitseeError, match="reads one frame, and the store holds clips frame by"
    ):
        run("lens", root / "image.zarr")
    with pytest.raises(VitseeError, match="srss compares masks with images"):
        run("spatial", root / "image.zarr", masks=[root])


@pytest.mark.slow
def test_the_catalogue_knows() -> None:
    pytest.importorskip("transformers", minversion="5.20")
    from vitsee_core.study.catalogue import survey

    found = survey("video", VIDEO.replace("&random-init=0", ""))
    assert found.lacks["images"] == "it takes clips, and the analysis is of images"
    assert found.lack(("grid", "images")) and found.lack(("grid", "attention")) is None
    assert survey("vit", "demo:vit").lacks["images"] is None
