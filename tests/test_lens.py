"""The model's own classifier on every block: against the model's modules, and by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.extractions import RESNET, VIT, extracted, plant_images
from tests.stores import write_sites
from vitsee_cli.main import main
from vitsee_core.analyses.lens import METRICS, plot, run
from vitsee_core.analyses.lens.store_lens import token_scores
from vitsee_core.models import provenance
from vitsee_core.models.load import load_model
from vitsee_core.models.provenance import model_of
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, SiteError, VitseeError

Array = NDArray[Any]

N = 7
ARGS: dict[str, dict[str, Any]] = {
    "class token": {},
    "mean, then norm": {"global_pool": "avg", "class_token": False},
    "norm, then mean": {"global_pool": "avg", "fc_norm": False},
}


def store_of(
    folder: Path, args: dict[str, Any], *more: object, n_classes: int = 2
) -> Store:
    folder.mkdir(exist_ok=True)
    images = plant_images(folder / "images", N)
    words = [w for key, value in args.items() for w in ("--model-arg", f"{key}={value}")]
    options = [
        "--model-arg",
        f"num_classes={n_classes}",
        "--dtype",
        "float32",
        "--slab",
        "4",
    ]
    path = folder / "a.zarr"
    extracted(*VIT, *words, *options, "--data", images, *more, "-o", path)
    return open_store(path)


def module_of(args: dict[str, Any]) -> Any:
    more = {"patch_size": 8, "num_classes": 2, **args}
    return load_model(
        "test_vit", random_init=0, img_size=(32, 48), model_args=more
    ).module


def of_model(module: Any, tokens: Array, pooled: bool) -> Array:
    """(images, [tokens,] classes): the model's own head on a block's tokens, or on each alone."""
    with torch.inference_mode():
        x = torch.from_numpy(tokens)
        if pooled:
            return np.asarray(module.forward_head(module.norm(x)))
        normed = module.norm(x)
        return np.asarray(module.head(module.fc_norm(normed)))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    return {
        name: store_of(tmp_path_factory.mktemp("lens"), args)
        for name, args in ARGS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGS)
def test_against_the_models_modules(name: str, stores: dict[str, Store]) -> None:
    store, module = stores[name], module_of(ARGS[name])
    table = run(store, patches=True)
    labels = store.samples.label
    output = store.vectors("logits")[:].argmax(1)
    n_prefix = 0 if name == "mean, then norm" else 1
    for (site,), rows in table.frame.group_by("site", maintain_order=True):
        acts = store.acts(site)[:]
        logits = of_model(module, acts, pooled=True)
        whole = rows.filter(pl.col("token").is_null(), pl.col("row").is_null())
        value = dict(whole.select("metric", "value").rows())
        first = logits.argmax(1)
        # rank 1 or 2 of two classes
        expected = {
            "lens_top1": (first == labels).mean(),
            "lens_agreement": (first == output).mean(),
            "lens_rank": 1 + (first != labels).mean(),
        }
        assert value == pytest.approx(expected), site
        alone = of_model(module, acts[:, n_prefix:], pooled=False).argmax(-1)
        right = (alone == labels[:, np.newaxis]).mean(0)
        cells = rows.filter(pl.col("row").is_not_null(), metric="lens_top1")
        assert cells["value"].to_numpy() == pytest.approx(right)
        assert cells["col"].to_list()[:7] == [0, 1, 2, 3, 4, 5, 0]
        mean = rows.filter(metric="lens_top1", token="patches")["value"][0]
        assert mean == pytest.approx(right.mean())
    # As if the model ended where it does.
    last = table.filter(metric="lens_agreement", site=table["site"][-1])
    assert last["value"][0] == 1
    plot(table)


def test_scores_by_hand() -> None:
    logits = np.array([[[1.0, 3.0, 3.0]], [[2.0, 0.0, 1.0]], [[5.0, 0.0, 0.0]]])
    found = token_scores(logits, np.array([2, 1, -1]), np.array([1, 2, 0]))
    # of equal logits the first is the answer, and the best rank counts
    assert found["lens_top1"][:2, 0].tolist() == [0, 0]
    assert found["lens_rank"][:2, 0].tolist() == [1, 3]
    assert found["lens_agreement"][:, 0].tolist() == [1, 0, 1]
    assert math.isnan(found["lens_top1"][2, 0]) and math.isnan(found["lens_rank"][2, 0])


@pytest.mark.slow
def test_pooled_stores(stores: dict[str, Store], tmp_path: Path) -> None:
    """A class token is enough; a mean of normalised tokens is not."""
    whole = run(stores["class token"])
    few = store_of(tmp_path / "few", {}, "--tokens", "pooled")
    assert np.array_equal(run(few)["value"], whole["value"])
    with pytest.raises(MissingInput, match="pooled only"):
        run(few, patches=True)
    mean = store_of(tmp_path / "mean", ARGS["norm, then mean"], "--tokens", "pooled")
    with pytest.raises(MissingInput, match="pooled only"):
        run(mean)


def test_replicates_and_jobs(stores: dict[str, Store]) -> None:
    store = stores["class token"]
    table = run(store)
    again = run(store, jobs=2)
    assert np.array_equal(table["value"], again["value"])
    assert table.replicates is not None
    value = table.filter(metric="lens_rank")["value"]
    # seven blocks of one image: the mean of the means without each is the mean
    own = table.replicates[table["metric"] == "lens_rank"][:, :N]
    assert own.mean(1) == pytest.approx(value)


@pytest.mark.slow
def test_other_classes_and_no_head(tmp_path: Path) -> None:
    store = store_of(tmp_path, {}, n_classes=3)
    table = run(store)
    said = "a has labels of 2 classes, its classifier 3: not the same classes"
    assert table.notes["remarks"] == [said]
    assert [*dict.fromkeys(table["metric"])] == ["lens_agreement"]
    plot(table)
    with pytest.raises(VitseeError, match="not the same classes: no lens_top1"):
        run(store, metrics=["lens_top1"])
    with pytest.raises(VitseeError, match="no metric 'top1'; metrics of lens: lens_top1"):
        run(store, metrics=["top1"])
    with pytest.raises(SiteError, match="the classifier of a reads cls of 64 channels"):
        run(store, sites=["head"])
    bare = write_sites(tmp_path / "bare.zarr", {"embed": np.ones((3, 7, 4))})
    with pytest.raises(MissingInput, match="bare has no weights of the classifier"):
        run(bare)


@pytest.mark.slow
def test_a_head_that_the_store_lacks_is_the_models(
    stores: dict[str, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = store_of(tmp_path / "without", {}, "--no-head-weights")
    built = []

    def counted(store: Store, *args: Any, **kwargs: Any) -> Any:
        built.append(store.label)
        return model_of(store, *args, **kwargs)

    monkeypatch.setattr(provenance, "model_of", counted)
    table = run(without, sites=["blocks.0.out", "last"])
    assert built == ["a"]  # once, for all sites
    whole = run(stores["class token"], sites=["blocks.0.out", "last"])
    assert np.array_equal(table["value"], whole["value"])
    assert built == ["a"]


@pytest.mark.slow
def test_attention_pooling(tmp_path: Path) -> None:
    args = {"global_pool": "map"}
    store, module = store_of(tmp_path, args), module_of(args)
    table = run(store, patches=True, jobs=2)
    assert table.notes["head"]["a"]["pool"] == "attention"
    labels = store.samples.label
    for (site,), rows in table.frame.group_by("site", maintain_order=True):
        acts = torch.from_numpy(store.acts(site)[:])
        with torch.inference_mode():
            logits = np.asarray(module.forward_head(module.norm(acts)))
            # each patch as if it were all that there is
            body = module.norm(acts[:, 1:]).flatten(0, 1).unsqueeze(1)
            alone = np.asarray(module.head(module.fc_norm(module.attn_pool(body))))
        own = rows.filter(metric="lens_top1")
        assert own["value"][0] == pytest.approx((logits.argmax(1) == labels).mean()), site
        right = alone.argmax(-1).reshape(N, -1) == labels[:, np.newaxis]
        assert own.filter(token="patches")["value"][0] == pytest.approx(right.mean())
    last = table.filter(
        pl.col("row").is_null(), metric="lens_agreement", site=table["site"][-1]
    )
    assert last["value"][0] == 1


@pytest.mark.slow
def test_neither_store_nor_model_has_a_head(tmp_path: Path) -> None:
    store = store_of(tmp_path, {}, n_classes=0)
    with pytest.raises(MissingInput) as caught:
        run(store)
    said = "a has no weights of the classifier: the model has no classifier; nor has its model one"
    assert said in str(caught.value)
    # A model that is gone: both reasons, in one line.
    (tmp_path / "b").mkdir()
    options = ["--no-head-weights"]
    checkpoint = tmp_path / "w.pth"
    torch.save(module_of({}).state_dict(), checkpoint)
    images = plant_images(tmp_path / "b" / "images", N)
    words = ["test_vit", "--checkpoint", checkpoint, "--img-size", "32x48"]
    words += ["--model-arg", "patch_size=8", "--model-arg", "num_classes=2"]
    extracted(*words, *options, "--data", images, "-o", tmp_path / "b.zarr")
    checkpoint.rename(tmp_path / "moved.pth")
    moved = open_store(tmp_path / "b.zarr")
    with pytest.raises(
        MissingInput, match=r"not asked for.*; the model of b cannot be loaded"
    ):
        run(moved)
    given = ["--checkpoint", str(tmp_path / "moved.pth")]
    found = CliRunner().invoke(main, ["lens", str(moved.path), *given])
    assert found.exit_code == 0, found.output
    assert "b: the classifier is that of its model" in found.stderr
    kept = store_of(tmp_path / "c", {})
    found = CliRunner().invoke(main, ["lens", str(kept.path), *given])
    assert "the checkpoint is not read: the stores keep their classifiers" in found.stderr


@pytest.mark.slow
def test_the_command_leaves_narrow_stages_out(tmp_path: Path) -> None:
    images = plant_images(tmp_path / "images", N)
    extracted(
        *RESNET,
        "--data",
        images,
        "--model-arg",
        "num_classes=2",
        "-o",
        tmp_path / "r.zarr",
    )
    out = [
        "-o",
        str(tmp_path / "l.csv"),
        "--png",
        str(tmp_path / "l.png"),
        "--replicates",
    ]
    result = CliRunner().invoke(
        main, ["lens", str(tmp_path / "r.zarr"), "--patches", *out]
    )
    assert result.exit_code == 0, result.output
    assert "r: the classifier cannot read stem, " in result.stderr
    table = Table.read(tmp_path / "l.csv")
    assert set(table["metric"]) == set(METRICS)
    assert all(site.startswith("layer4") for site in table["site"])
    last = table.filter(site=table["site"][-1], metric="lens_agreement")
    assert last["value"][0] == 1
