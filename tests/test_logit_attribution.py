"""Logit attribution: against hooks on the models themselves, by hand, and what has no such sum."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from torch import nn

from tests.extractions import VIT, extracted, plant_images
from tests.stores import Site, write_sites
from tests.tables import groups_of, having, unique
from vitsee_cli.main import main
from vitsee_core.analyses.logit_attribution import headline, plot, run
from vitsee_core.analyses.logit_attribution.contributions import Readout
from vitsee_core.images import normalise
from vitsee_core.models import provenance
from vitsee_core.models.load import load_model
from vitsee_core.models.provenance import Provenance
from vitsee_core.models.weights import HeadWeights
from vitsee_core.tables.results import Table
from vitsee_stores import Store, TokenLayout, open_store
from vitsee_stores.errors import MissingInput, NotOffered, VitseeError

Array = NDArray[Any]

N = 7
SITES = ["--sites", "blocks", "--sites", "head", "--sites", "residual"]
TWO = {"num_classes": 2}
RANDOM = ["--random-init", "0"]
WHOLE = ("bias", "residue", "logit")


def words_of(args: dict[str, Any]) -> list[str]:
    return [w for key, value in args.items() for w in ("--model-arg", f"{key}={value}")]


def store_of(
    folder: Path, *words: object, dtype: str = "float32", name: str = "a"
) -> Store:
    images = plant_images(folder / "images", N)
    path = folder / f"{name}.zarr"
    extracted(*words, *SITES, "--dtype", dtype, "--slab", 4, "--data", images, "-o", path)
    return open_store(path)


# Model, its options and arguments, where its stream begins, and how many sublayers are added.
FAMILIES: dict[str, tuple[list[str], dict[str, Any], str, int]] = {
    "class token": (VIT, TWO, "embed", 12),
    "mean, then norm": (VIT, {"global_pool": "avg", "class_token": False, **TWO}, "embed", 12),
    "norm, then mean": (VIT, {"global_pool": "avg", "fc_norm": False, **TWO}, "embed", 12),
    "registers and layer scale": (VIT, {"reg_tokens": 2, "init_values": 0.1, **TWO}, "embed", 12),
    "mixer": (["mixer_s32_224", *RANDOM, "--img-size", "96"], TWO, "embed", 16),
    "last stage of a CNN": (
        ["test_convnext", *RANDOM, "--img-size", "64"], TWO, "stages.3.blocks.0.in", 2
    ),
    "a scale parameter behind the sums (BEiT)": (
        ["beit_base_patch16_224", *RANDOM, "--img-size", "32"],
        {"depth": 2, "embed_dim": 48, "num_heads": 3, **TWO}, "embed", 4,
    ),
    "rms norm": ([*VIT, "--model-arg", "norm_layer=rmsnorm"], TWO, "embed", 12),
}  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    class Made(dict[str, Store]):
        def __missing__(self, name: str) -> Store:
            words, args, *_ = FAMILIES[name]
            more = ["--sites", "heads"] if name in HEADED else []
            folder = tmp_path_factory.mktemp("attribution")
            if name == "mixer":  # timm's is 0 at first
                words = [*words[:1], "--checkpoint", str(mixer(folder, args)), *words[3:]]
            label = name.replace(" ", "-").replace(",", "")
            words = [*words, *words_of(args), *more, "--inputs"]
            self[name] = store_of(folder, *words, name=label)
            return self[name]

    return Made()


def mixer(folder: Path, args: dict[str, Any]) -> Path:
    """A checkpoint of a Mixer with a classifier that is not 0."""
    module: Any = load_model(
        "mixer_s32_224", random_init=0, img_size=(96, 96), model_args=args
    ).module
    torch.manual_seed(0)
    nn.init.normal_(module.head.weight, std=0.1)
    torch.save(module.state_dict(), folder / "mixer.pt")
    return folder / "mixer.pt"


HEADED = ("class token", "norm, then mean", "registers and layer scale")


def values_of(table: Table, **where: Any) -> dict[tuple[str, str], float]:
    """(site, part) -> value."""
    rows = having(table, **where)
    keys = zip(rows["site"].tolist(), rows["part"].tolist(), strict=True)
    return dict(zip(keys, rows["value"].astype(float).tolist(), strict=True))


SLOW = ("mixer", "registers and layer scale", "a scale parameter behind the sums (BEiT)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in FAMILIES]
)
def test_parts_add_up_to_the_logits(name: str, stores: dict[str, Store]) -> None:
    """Of every class, raw and less the mean over classes: relative to the largest logit less the
    classifier's bias, of images, classes and the mean alike."""
    store = stores[name]
    *_, base, n = FAMILIES[name]
    logits = store.vectors("logits")[:].astype(np.float64)
    for raw in (True, False):
        table = run(store, classes=("class0", "class1"), raw=raw)
        assert table.notes["residue"][store.label]["largest"] < 1e-5
        for c, own in groups_of(table, "class"):
            parts = values_of(own)
            expected = logits if raw else logits - logits.mean(1, keepdims=True)
            whole = expected[:, int(str(c)[-1])].mean()
            assert parts.pop(("logits", "logit")) == pytest.approx(
                whole, rel=1e-9, abs=1e-12
            )
            assert abs(parts.pop(("logits", "residue"))) < 1e-5 * np.abs(logits).max()
            assert sum(parts.values()) == pytest.approx(
                whole, abs=1e-5 * np.abs(logits).max()
            )
            assert ([*parts][:1], [*parts][-1]) == ([(base, "input")], ("logits", "bias"))
            assert len(parts) == n + 2
    labels = [" ".join(axes.get_ylabel().split()) for axes in plot(table).axes]
    assert labels == [f"part of the logit of class{c}" for c in (0, 1)]


# ------------------------------------------------------------------- a slow loop with hooks


def branches_by_hooks(module: nn.Module, x: Any, names: list[str]) -> dict[str, Array]:
    """What these modules give in a forward pass; "" the logits, "in" what enters the first."""
    kept: dict[str, Array] = {}

    def keep(name: str, values: Any) -> None:
        kept[name] = values.double().numpy()

    for name in names:
        part = module.get_submodule(name)
        part.register_forward_hook(lambda _m, _i, output, name=name: keep(name, output))
    first = module.get_submodule(names[0].rpartition(".")[0])
    first.register_forward_pre_hook(lambda _m, args: keep("in", args[0]))
    with torch.inference_mode():
        keep("", module(x))
    return kept


@dataclass(frozen=True)
class Slow:
    """A ViT with what its hooks kept, and the frozen norm token by token."""

    module: Any
    kept: dict[str, Array]
    read: tuple[int, ...]  # tokens that the classifier reads

    def part(self, branch: Array, c: int) -> float:
        """Mean over images of what a branch (images, tokens, dim) adds to a class' logit."""
        norm, head = self.module.norm, self.module.head
        weight, kernel = (x.weight.detach().double().numpy() for x in (norm, head))
        stream = np.sum([x for name, x in self.kept.items() if name], axis=0)
        found = []
        for i in range(N):
            parts = []
            for t in self.read:
                deviation = np.sqrt(stream[i, t].var() + norm.eps)
                b = branch[i, t]
                parts.append(kernel[c] @ (weight * (b - b.mean()) / deviation))
            found.append(np.mean(parts))
        return float(np.mean(found))


@pytest.fixture(scope="module", params=HEADED)
def slow(request: pytest.FixtureRequest, stores: dict[str, Store]) -> tuple[Store, Slow]:
    name = request.param
    store = stores[name]
    args = {"patch_size": 8, **FAMILIES[name][1]}
    module: Any = load_model(
        "test_vit", random_init=0, img_size=(32, 48), model_args=args
    ).module
    pixels = torch.from_numpy(store.array("input")[:])
    x = normalise(pixels, store.manifest.transform, torch.device("cpu"))
    # what leaves the layer scale, an Identity without one
    kept = branches_by_hooks(
        module, x, [f"blocks.{i}.ls{k}" for i in range(6) for k in (1, 2)]
    )
    assert kept[""] == pytest.approx(store.vectors("logits")[:], abs=1e-5)
    n_tokens = kept["in"].shape[1]
    return store, Slow(
        module, kept, tuple(range(1, n_tokens)) if "mean" in name else (0,)
    )


def test_sublayers_against_hooks_on_the_model(slow: tuple[Store, Slow]) -> None:
    """Every image, class and sublayer, token by token."""
    store, model = slow
    table = run(store, classes=("0", "1"), raw=True)
    for c in (0, 1):
        found = values_of(table, **{"class": f"class{c}"})
        for i in range(6):
            for end, kind in (("ls1", "attn"), ("ls2", "mlp")):
                expected = model.part(model.kept[f"blocks.{i}.{end}"], c)
                assert found[f"blocks.{i}.{kind}", kind] == pytest.approx(
                    expected, abs=2e-6
                )
        expected = model.part(model.kept["in"], c)
        assert found["embed", "input"] == pytest.approx(expected, abs=2e-6)


def test_heads_against_hooks_on_the_model(slow: tuple[Store, Slow]) -> None:
    """One head: the projection of what it gave, the others' set to 0. All with the projection's
    bias: the attention."""
    store, model = slow
    table = run(store, by_head=True, classes=("0",), raw=True)
    for i in range(6):
        rows = having(table, site=f"blocks.{i}.attn")
        inner = rows.filter(pl.col("part") != "attn")
        assert inner["part"].tolist() == ["head"] * (len(inner) - 1) + ["projection_bias"]
        whole = rows.filter(part="attn")["value"][0]
        assert inner["value"].astype(float).sum() == pytest.approx(whole, abs=2e-6)
    block = model.module.blocks[3]
    n_heads = block.attn.num_heads
    z = store.acts("blocks.3.attn.heads")[:].astype(np.float64)
    z[..., : z.shape[-1] // n_heads * (n_heads - 1)] = 0
    alone = z @ block.attn.proj.weight.detach().double().numpy().T
    if hasattr(block.ls1, "gamma"):
        alone = alone * block.ls1.gamma.detach().double().numpy()
    last = having(table, site="blocks.3.attn", head=n_heads - 1)
    assert last["value"][0] == pytest.approx(model.part(alone, 0), abs=2e-6)


# ------------------------------------------------------------------------------- patches


def moved_by_hand(slow: Slow, i: int, image: int) -> Array:
    """(tokens,) what block i's attention moves from each token to the class token, as part of the
    logit of class 0: from the norm's output by q, k and v, head by head."""
    block = slow.module.blocks[i]
    attn = block.attn
    before = [slow.kept["in"]] + [
        slow.kept[f"blocks.{b}.ls{k}"] for b in range(i) for k in (1, 2)
    ]
    x = torch.from_numpy(np.sum(before, axis=0)[image]).float()
    with torch.inference_mode():
        qkv = attn.qkv(block.norm1(x)).double().numpy()
    q, k, v = qkv.reshape(len(x), 3, attn.num_heads, -1).transpose(1, 2, 0, 3)
    projection = attn.proj.weight.detach().double().numpy()
    if hasattr(block.ls1, "gamma"):
        projection = projection * block.ls1.gamma.detach().double().numpy()[:, np.newaxis]
    wide = q.shape[-1]
    found = np.zeros(len(x))
    for head in range(attn.num_heads):
        scores = k[head] @ q[head][0] / np.sqrt(wide)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        for token in range(len(x)):
            written = projection[:, head * wide : (head + 1) * wide] @ v[head][token]
            branch = np.zeros_like(slow.kept["in"])
            branch[image, 0] = weights[token] * written
            found[token] += N * slow.part(branch, 0)
    return found


def test_patches_against_hooks_on_the_model(slow: tuple[Store, Slow]) -> None:
    """Own tokens, or what attention moves to the class token; with the rest they are the logit."""
    store, model = slow
    table = run(store, patches=True, image=("3",), classes=("0",), raw=True)
    name = str(store.samples.id[3])
    assert unique(table, "image") == [name] and unique(table, "class") == ["class0"]
    kept = model.kept
    n_tokens = kept["in"].shape[1]
    cells = range(n_tokens - 4 * 6, n_tokens)
    for i in (0, 3):
        found = having(table, site=f"blocks.{i}.attn")
        if model.read == (0,):
            expected = moved_by_hand(model, i, 3)[list(cells)]
        else:
            expected = np.zeros(len(cells))
            for n, t in enumerate(cells):
                branch = np.zeros_like(kept["in"])
                branch[3, t] = kept[f"blocks.{i}.ls1"][3, t]
                expected[n] = N * model.part(branch, 0)
        assert found["value"].astype(float) == pytest.approx(expected, abs=2e-6)
        assert found["row"].tolist()[5:7] == [0, 1] and found["col"].tolist()[5:7] == [
            5,
            0,
        ]
    parts = dict(groups_of(table, "part"))
    total = parts["patches"]["value"].astype(float)
    inner = table.filter(~pl.col("part").is_in(["patches", "rest", "logit"]))
    by_cell = inner["value"].astype(float).reshape(-1, len(cells)).sum(0)
    assert total == pytest.approx(by_cell)
    logit = parts["logit"]["value"][0]
    assert logit == pytest.approx(kept[""][3, 0], abs=1e-5)
    assert total.sum() + parts["rest"]["value"][0] == pytest.approx(logit)
    if model.read != (0,):  # all but the biases, which are 0 here
        assert parts["rest"]["value"][0] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_maps_of_several_models_and_of_a_cnn(stores: dict[str, Store]) -> None:
    """The same images, at their places; less the mean over classes the maps of two are opposite."""
    some = [stores["class token"], stores["last stage of a CNN"]]
    table = run(*(store for store in some), patches=True, classes=("0", "1"))
    values = [rows["value"].astype(float) for _, rows in groups_of(table, "class")]
    assert values[0] == pytest.approx(-values[1], abs=1e-12)
    assert len(unique(table, "image")) == 4
    plot(table)
    plot(table, scale="map")


# ------------------------------------------------------------------------------- by hand


def tiny(
    folder: Path,
    patch: pytest.MonkeyPatch,
    shift: float = 0.0,
    labels: tuple[int, ...] = (0, 1),
) -> Store:
    """Two channels, no norm, two images of a class token and a patch: x = embed + branch."""
    layout = TokenLayout(("cls",), (1, 1), stride_px=(16.0, 16.0))
    embed = np.array([[[1.0, 2.0], [9, 9]], [[0, 1], [9, 9]]])
    branch = np.array([[[3.0, 0.0], [9, 9]], [[1, 1], [9, 9]]])
    kernel = np.array([[1.0, 0.0], [0.0, 2.0]]) + shift
    bias = np.array([0.5, 0.0])
    logits = (embed + branch)[:, 0] @ kernel.T + bias
    sites: dict[str, Site] = {
        "embed": embed,
        "blocks.0.in": "embed",
        "blocks.0.branch": branch,
    }
    store = write_sites(
        folder / "t.zarr", {**sites, "blocks.0.out": embed + branch, "logits": (logits, None)},
        layout=layout, as_extracted=True, labels=np.array(labels), class_names=["cat", "dog"],
    )  # fmt: skip
    arrays = {
        "head_kernel": kernel.astype(np.float32),
        "head_bias": bias.astype(np.float32),
    }
    head = HeadWeights(arrays, "blocks.0.out", "cls", "none", 0.0, True)
    patch.setattr(provenance, "stored_classifier", lambda _store: head)
    return store


def test_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Image 0, class cat: 1 of the embedding, 3 of the branch, 0.5 of the bias; less the mean over
    the classes (embedding 1 and 4, branch 3 and 0, bias 0.5 and 0)."""
    store = tiny(tmp_path, monkeypatch)
    raw = values_of(run(store, classes=("cat",), images=2, raw=True))
    assert raw[("embed", "input")] == pytest.approx((1 + 0) / 2)
    assert raw[("blocks.0", "block")] == pytest.approx((3 + 1) / 2)
    assert raw[("logits", "bias")] == 0.5 and raw[("logits", "logit")] == pytest.approx(
        3.0
    )
    # image 0 of cat: 1 - 2.5 = -1.5; image 1 of dog: 2 - 1 = 1
    table = run(store)
    own = values_of(table)
    assert own[("embed", "input")] == pytest.approx((-1.5 + 1) / 2)
    # 3 - 1.5; 2 - 1.5
    assert own[("blocks.0", "block")] == pytest.approx((1.5 + 0.5) / 2)
    # 0.5 - 0.25; 0 - 0.25
    assert own[("logits", "bias")] == pytest.approx(0)
    assert own[("logits", "residue")] == pytest.approx(0, abs=1e-7)
    assert own[("logits", "logit")] == pytest.approx((0.25 + 1.25) / 2)
    assert table["n_images"].tolist() == [2] * 5
    by_class = run(store, by_class=True).filter(site="embed")
    assert dict(zip(by_class["class"], by_class["value"], strict=True)) == {
        "cat": -1.5,
        "dog": 1,
    }
    assert plot(table).axes[0].get_ylabel().split()[-2:] == ["the", "label"]
    assert (
        by_class["n_images"].tolist() == [1, 1]
        and np.isnan(by_class["low"].astype(float)).all()
    )
    said = dict(headline(table))["t"]
    assert said.startswith("of a logit of 0.75, blocks.0 writes most: 1")


def test_a_constant_for_all_classes_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    plain = run(tiny(tmp_path, monkeypatch))
    moved = run(tiny(tmp_path / "b", monkeypatch, shift=3.0))
    assert moved["value"].astype(float) == pytest.approx(
        plain["value"].astype(float), abs=1e-5
    )


def test_predictions_and_images_without_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both images are predicted to be dogs (logits 4.5 and 4, 1.5 and 4 of cat and dog)."""
    store = tiny(tmp_path, monkeypatch, labels=(0, -1))
    assert run(store)["n_images"].tolist() == [1] * 5
    predicted = run(store, target="predicted")
    assert predicted["n_images"].tolist() == [2] * 5
    logits = store.vectors("logits")[:]
    own = (logits.max(1) - logits.mean(1)).mean()
    assert values_of(predicted)[("logits", "logit")] == pytest.approx(own)


def test_the_readout_of_an_affine_norm() -> None:
    numbers = {
        "head_kernel": [[1, 2]],
        "head_norm_scale": [2, 3],
        "head_norm_bias": [1, 1],
    }
    arrays = {name: np.array(own, np.float32) for name, own in numbers.items()}
    found = Readout.from_head(HeadWeights(arrays, "x", "mean", "affine", 0.0, False))
    assert found.vectors.tolist() == [[2.0, 6.0]] and found.offset.tolist() == [3.0]


# ------------------------------------------------------- precision, pieces, and other processes


@pytest.mark.slow
def test_half_precision_is_said_and_class_tokens_are_exact(tmp_path: Path) -> None:
    """A class token is in float32 in any store; of tokens in float16 the residue is a row."""
    cls = store_of(tmp_path, *VIT, *words_of(TWO), "--tokens", "pooled", dtype="float16")
    assert run(cls).notes["residue"]["a"]["largest"] < 1e-5
    args = words_of(FAMILIES["norm, then mean"][1])
    mean = store_of(tmp_path, *VIT, *args, dtype="float16", name="b")
    notes = run(mean).notes["residue"]["b"]
    assert 1e-5 < notes["largest"] < notes["expected"] == 0.01


def test_threads_and_fewer_images(stores: dict[str, Store]) -> None:
    store = stores["class token"]
    table = run(store)
    again = run(store, jobs=2)
    assert np.array_equal(table["value"], again["value"])
    assert set(run(store, images=5)["n_images"].tolist()) == {5}


@pytest.mark.slow
def test_last_stages_need_their_own_branches_alone(tmp_path: Path) -> None:
    words = ["test_convnext", *RANDOM, "--img-size", "64", *words_of(TWO)]
    path = tmp_path / "c.zarr"
    extracted(*words, "--sites", "head", "--sites", "stages.3.blocks.*", "--dtype", "float32",
              "--data", plant_images(tmp_path / "images", N), "-o", path)  # fmt: skip
    table = run(open_store(path))
    assert table["site"].tolist()[:3] == [
        *("stages.3.blocks.0.in", "stages.3.blocks.0", "stages.3.blocks.1")
    ]


@pytest.mark.slow
def test_a_model_of_transformers(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 48, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    config = transformers.ViTConfig(**sizes, id2label={0: "a", 1: "b"}, num_labels=2)
    model = transformers.ViTForImageClassification(config)
    model.save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(
        tmp_path / "vit"
    )
    words = [f"transformers:{tmp_path / 'vit'}", "--sites", "heads"]
    store = store_of(tmp_path, *words)
    table = run(store, by_head=True, origin=Provenance(trust=True))
    assert table.notes["residue"]["a"]["largest"] < 1e-5
    assert (table["part"] == "head").sum() == 6


# ------------------------------------------------------------------------------ wrong input


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["test_resnet", *RANDOM, "--img-size", "64"],
         r"layer4.0.out is not the sum of layer4.0.shortcut, layer4.0.branch .*: an activation"),
        (["deit_tiny_distilled_patch16_224", *RANDOM, "--img-size", "32", *words_of(
            {"depth": 1, "embed_dim": 48})], "2 classifiers, whose logits are averaged"),
        (["cait_xxs24_224", *RANDOM, "--img-size", "32", *words_of({"depth": 1, "embed_dim": 48})],
         "its classifier reads norm, which is no block's output"),
        ([*VIT, *words_of({"global_pool": "map", "class_token": "false"})],
         "through attention pooling, which is not linear"),
        ([*VIT, *words_of({"global_pool": "max", **TWO})],
         "through their maximum, which is not linear"),
        ([*VIT, *words_of(TWO), "--ablate-skip", "blocks.3.mlp"],
         "it was extracted without the skip connections blocks.3.mlp"),
    ],
)  # fmt: skip
def test_what_is_no_sum_of_branches(
    words: list[str], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(NotOffered, match=expected):
        run(store_of(tmp_path, *words))


@pytest.mark.slow
def test_missing_branches_and_heads(tmp_path: Path, stores: dict[str, Store]) -> None:
    images = plant_images(tmp_path / "images", N)
    words = [*VIT, *words_of(TWO), "--data", images, "-o"]
    extracted(*words, tmp_path / "plain.zarr")
    with pytest.raises(
        MissingInput, match=r"lacks the branches of blocks.5: extract with"
    ):
        run(open_store(tmp_path / "plain.zarr"))
    extracted(*words, tmp_path / "no.zarr", "--no-head-weights", "--no-residual")
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    with pytest.raises(
        MissingInput, match=r"lacks the branches of blocks.5: extract with"
    ):
        run(open_store(tmp_path / "no.zarr"))
    with pytest.raises(MissingInput, match=r"lacks blocks.0.attn.heads: extract with"):
        run(stores["mean, then norm"], by_head=True)
    with pytest.raises(MissingInput, match="has no attention among its branches"):
        run(stores["last stage of a CNN"], by_head=True)
    # pooled alone is not enough where tokens are normalised one by one
    args = words_of(FAMILIES["norm, then mean"][1])
    (tmp_path / "elsewhere").rename(tmp_path / "images")
    pooled = store_of(tmp_path, *VIT, *args, "--tokens", "pooled", name="pooled")
    with pytest.raises(MissingInput, match="pooled only"):
        run(pooled)


@pytest.mark.slow
def test_wrong_options(stores: dict[str, Store], tmp_path: Path) -> None:
    store = stores["class token"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"classes": ("dog",)}, "no class 'dog'; expected class0, class1 or a number"),
        ({"classes": ("2",)}, r"no class '2'; .* from 0 to 1"),
        (
            {"classes": ("0",), "by_class": True},
            "--by-class each image's own: give one of them",
        ),
        ({"classes": ("0",), "target": "label"}, "--target each image's own"),
        ({"patches": True, "by_head": True}, "leave --by-head and --by-class out"),
        ({"patches": True, "by_class": True}, "leave --by-head and --by-class out"),
        ({"image": ("0",)}, "--image names images to map: give --patches"),
        ({"patches": True, "image": ("dog",)}, "has no image 'dog'"),
    ]
    for options, phrase in wrong:
        with pytest.raises(VitseeError, match=phrase):
            run(store, **options)
    other = store_of(tmp_path, *VIT, *words_of({"num_classes": 3}))
    with pytest.raises(
        VitseeError, match=r"labels of 2 classes, its classifier 3: .* --target p"
    ):
        run(other, target="label")
    assert run(other).notes["target"] == {"a": "predicted"}
    done = CliRunner().invoke(
        main, ["logit-attribution", str(store.path), "--target", "mine"]
    )
    assert (
        done.exit_code == 2 and "'mine' is not one of 'label', 'predicted'" in done.output
    )


@pytest.mark.slow
def test_the_command(stores: dict[str, Store], tmp_path: Path) -> None:
    out = tmp_path / "r.csv"
    words = [
        str(stores["class token"].path),
        "--by-head",
        "-o",
        str(out),
        "--png",
        str(out) + ".png",
    ]
    done = CliRunner().invoke(main, ["logit-attribution", *words])
    assert done.exit_code == 0, done.output
    notes = json.loads((tmp_path / "r.csv.json").read_text())["notes"]
    assert notes["target"] == {"class-token": "label"}
    again = CliRunner().invoke(
        main, ["plot", str(out), "-o", str(tmp_path / "again.png")]
    )
    assert again.exit_code == 0, again.output
