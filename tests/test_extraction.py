"""`vitsee extract`: what is in a store, against a forward pass written out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.data.transforms_factory import create_transform

from tests import reference
from tests.extractions import (
    RESNET,
    VIT,
    extract,
    extracted,
    plant_bright,
    plant_images,
)
from vitsee_core.models.load import load_model
from vitsee_stores import IncompleteStore, Store, open_store

N, SLAB = 10, 4
HALF: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}  # one rounding to float16
SINGLE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), N)


@pytest.fixture(scope="module")
def vit_store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vit") / "vit.zarr"
    extracted(
        *VIT,
        *("--data", folder, "-o", path, "--slab", SLAB, "--batch-size", 3),
        *("--sites", "all", "--attention", "full", "--inputs"),
    )
    return path


@pytest.mark.slow
def test_every_number_of_a_vit_store_against_a_forward_pass_by_hand(
    vit_store: Path, folder: Path
) -> None:
    store = open_store(vit_store)
    model = load_model(
        "test_vit", random_init=0, img_size=(32, 48), model_args={"patch_size": 8}
    ).module
    cfg = store.manifest.transform
    transform = create_transform(**{**cfg, "input_size": tuple(cfg["input_size"])})
    layout = store.layout("blocks.0.out")
    assert layout is not None
    assert layout.prefix == ("cls",)
    assert layout.grid == (4, 6)
    assert layout.stride_px == (8.0, 8.0)
    sums = dict.fromkeys(("aligned", "received", "cls_map"), 0.0)
    for row, name in enumerate(store.samples.id):
        pixels = transform(Image.open(folder / name).convert("RGB"))[None]
        np.testing.assert_allclose(
            store.inputs()[row], pixels[0].numpy(), rtol=0, atol=1e-6
        )
        with torch.inference_mode():
            head_means = _compare_image(store, model, pixels, row, sums)
            expected = model(pixels)[0]
        np.testing.assert_allclose(store.vectors("logits")[row], expected, **SINGLE)
        np.testing.assert_allclose(
            store.attention("rollout")[row], reference.rollout(head_means, 1, 0), **SINGLE
        )
    for name, value in sums.items():
        kept = np.asarray(store.attention_sums(name)).sum(axis=0)
        np.testing.assert_allclose(kept, value, rtol=1e-4, atol=1e-5)


def _compare_image(
    store: Store, model: Any, pixels: torch.Tensor, row: int, sums: dict[str, Any]
) -> list[NDArray[np.float64]]:
    """One image through the model's own layers, block by block; every site on the way."""

    def same(site: str, value: torch.Tensor) -> None:
        np.testing.assert_allclose(
            store.acts(site)[row], value[0].numpy(), **HALF, err_msg=site
        )

    x = model.norm_pre(model._pos_embed(model.patch_embed(pixels)))
    same("embed", x)
    head_means = []
    for b, block in enumerate(model.blocks):
        same(f"blocks.{b}.in", x)
        y = block.norm1(x)
        same(f"blocks.{b}.norm1", y)
        n, dim = y.shape[1:]
        heads = block.attn.num_heads
        q, k, v = block.attn.qkv(y).reshape(n, 3, heads, dim // heads).permute(1, 2, 0, 3)
        attention = (q @ k.transpose(1, 2) * (dim // heads) ** -0.5).softmax(-1)
        joined = (attention @ v).transpose(0, 1).reshape(1, n, dim)
        same(f"blocks.{b}.attn.heads", joined)
        branch = block.ls1(block.attn.proj(joined))
        same(f"blocks.{b}.attn.branch", branch)
        _compare_products(store, f"blocks.{b}.attn", row, x, branch)
        x = x + branch
        same(f"blocks.{b}.mid", x)
        hidden = block.mlp.act(block.mlp.fc1(block.norm2(x)))
        same(f"blocks.{b}.mlp.hidden", hidden)
        branch = block.ls2(block.mlp.fc2(hidden))
        _compare_products(store, f"blocks.{b}.mlp", row, x, branch)
        x = x + branch
        same(f"blocks.{b}.out", x)
        np.testing.assert_allclose(
            store.pooled(f"blocks.{b}.out", "cls")[row], x[0, 0], **SINGLE
        )
        np.testing.assert_allclose(
            store.pooled(f"blocks.{b}.out", "mean")[row], x[0, 1:].mean(0), **SINGLE
        )
        summary = reference.attention(
            attention.double().numpy(), 1, (4, 6), (8.0, 8.0), 0
        )
        for field in dataclasses.fields(summary):
            if field.name in sums:
                stack = np.zeros((len(model.blocks), *getattr(summary, field.name).shape))
                stack[b] = getattr(summary, field.name)
                sums[field.name] = sums[field.name] + stack
            elif field.name in ("distance_frames", "frame_mass", "aligned_frames"):
                assert not store.has(f"attention/{field.name}"), "clips alone have it"
            elif field.name != "head_mean":
                kept = store.attention(field.name)[row, b]
                np.testing.assert_allclose(
                    kept,
                    getattr(summary, field.name),
                    rtol=2e-4,
                    atol=1e-5,
                    err_msg=field.name,
                )
        np.testing.assert_allclose(
            store.attention("cls_rows")[row, b], attention[:, 0], **HALF
        )
        np.testing.assert_allclose(
            store.attention(f"full/blocks.{b}")[row], attention, **HALF
        )
        head_means.append(attention.double().mean(0).numpy())
    same("norm", model.norm(x))
    return head_means


def _compare_products(
    store: Store, name: str, row: int, z: torch.Tensor, f: torch.Tensor
) -> None:
    expected = reference.residual_products(z.double().numpy(), f.double().numpy())[0]
    np.testing.assert_allclose(store.residual(name)[row], expected, rtol=1e-4, atol=1e-4)


def test_a_resnet_store_holds_the_blocks_own_outputs(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "resnet.zarr"
    extracted(*RESNET, "--data", folder, "-o", path, "--slab", SLAB)
    store = open_store(path)
    model = load_model("test_resnet", random_init=0, img_size=(64, 64))
    seen: dict[str, torch.Tensor] = {}
    for name in ("layer1.0", "layer2.0", "layer4.0"):
        model.module.get_submodule(name).register_forward_hook(
            lambda _m, _i, out, name=name: seen.update({name: out.clone()})
        )
    cfg = model.transform
    transform = create_transform(**{**cfg, "input_size": tuple(cfg["input_size"])})
    for row, image in enumerate(store.samples.id[:3]):
        with torch.inference_mode():
            model.module(transform(Image.open(folder / image).convert("RGB"))[None])
        for name, out in seen.items():
            kept = store.acts(f"{name}.out", tokens="patches")[row]
            np.testing.assert_allclose(kept, out[0].permute(1, 2, 0), **HALF)
    assert "attention" in store.manifest.left_out


@pytest.mark.slow
@pytest.mark.slow
def test_batch_size_and_workers_do_not_change_rows(
    folder: Path, vit_store: Path, tmp_path: Path
) -> None:
    path = tmp_path / "other.zarr"
    extracted(
        *VIT,
        *(
            "--data",
            folder,
            "-o",
            path,
            "--slab",
            SLAB,
            "--batch-size",
            2,
            "--workers",
            2,
        ),
        *("--sites", "all", "--attention", "full", "--inputs"),
    )
    a, b = open_store(vit_store), open_store(path)
    assert list(a.samples.id) == list(b.samples.id)
    for site in ("embed", "blocks.5.out", "blocks.2.mlp.hidden"):
        np.testing.assert_allclose(a.acts(site)[:], b.acts(site)[:], rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(
        a.attention("distance_px")[:], b.attention("distance_px")[:], rtol=1e-5
    )


@pytest.mark.slow
def test_slab_size_does_not_change_sums_over_all_images(
    folder: Path, vit_store: Path, tmp_path: Path
) -> None:
    path = tmp_path / "other.zarr"
    extracted(*VIT, "--data", folder, "-o", path, "--slab", 7, "--tokens", "pooled")
    a, b = open_store(vit_store), open_store(path)
    for name in ("aligned", "cls_map", "received"):
        one, other = (np.asarray(s.attention_sums(name)).sum(axis=0) for s in (a, b))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert "acts" not in {p.name for p in path.iterdir()}


@pytest.mark.slow
def test_unreadable_images_are_nan_rows_and_named(folder: Path, tmp_path: Path) -> None:
    data = plant_images(tmp_path / "data", N)
    (data / "class0" / "004.png").write_bytes(b"no picture")
    good, bad = tmp_path / "good.zarr", tmp_path / "bad.zarr"
    extracted(*VIT, "--data", folder, "-o", good, "--slab", SLAB)
    said = extracted(*VIT, "--data", data, "-o", bad, "--slab", SLAB).stderr
    assert "1 of 10 images could not be read" in said
    assert "class0/004.png" in said
    a, b = open_store(good), open_store(bad)
    assert list(a.samples.id) == list(b.samples.id)  # rows never shift
    row = list(b.samples.id).index("class0/004.png")
    assert (a.samples.size == (50, 60)).all() and b.samples.size[row].tolist() == [0, 0]
    assert (np.delete(b.samples.size, row, 0) == (50, 60)).all()
    rest = [i for i in range(N) if i != row]
    assert b.valid.tolist() == [i != row for i in range(N)]
    outs = b.acts("blocks.1.out")[:]
    assert np.isnan(outs[row]).all()
    assert np.isnan(b.attention("distance_px")[row]).all()
    assert (b.attention("received_argmax")[row] == -1).all()
    assert (b.attention("n_queries")[row] == 0).all()
    np.testing.assert_allclose(
        outs[rest], a.acts("blocks.1.out")[:][rest], rtol=2e-3, atol=1e-4
    )
    slab = row // SLAB
    others = np.flatnonzero((np.arange(N) // SLAB == slab) & (np.arange(N) != row))
    mass = np.asarray(b.attention_sums("aligned"))[slab].sum(axis=(-1, -2))
    np.testing.assert_allclose(mass, len(others), rtol=1e-5)  # one image's map has mass 1
    failed = extract(
        *VIT, "--data", data, "-o", tmp_path / "x.zarr", "--on-error", "fail"
    )
    assert failed.exit_code == 1
    assert "class0/004.png" in failed.stderr
    assert failed.stdout == ""


@pytest.mark.slow
def test_dry_run_prints_the_arrays_and_makes_nothing(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "no.zarr"
    options = [*VIT, "--data", folder, "-o", path, "--slab", SLAB]
    short, long = (extracted(*options, "--dry-run", *more) for more in ([], ["-v"]))
    assert not path.exists()
    (total, folders), (same, arrays) = (
        dry_run_rows(result.stdout) for result in (short, long)
    )
    assert same == total
    assert arrays["acts/blocks.0.out/grid"][:2] == ["10x4x6x64", "float16"]
    assert set(folders) >= {"acts/", "attention/", "residual/", "pooled/", "valid"}
    sizes = [int(row[2]) for row in folders.values()]
    assert sizes == sorted(sizes, reverse=True)
    extracted(*options)
    for name, (_, _, size, per_image, n_files) in (folders | arrays).items():
        files = [file for file in (path / name).rglob("*") if file.is_file()]
        chunks = [file for file in files if file.name != "zarr.json"]
        assert sum(f.stat().st_size for f in chunks) == int(size), name
        assert int(per_image) == round(int(size) / N)
        groups = [
            f for f in files if f.name == "zarr.json" and not list(f.parent.glob("c.*"))
        ]
        assert int(n_files) == len(files) - len(groups), name
    everything = [file for file in path.rglob("*") if file.is_file()]
    assert int(total[4]) == len(everything)
    chunks = [file for file in everything if file.name != "zarr.json"]
    assert int(total[2]) == sum(file.stat().st_size for file in chunks)
    last = short.stderr.splitlines()[-1]
    assert f" in {len(everything)} files for 10 images in slabs of {SLAB}, " in last
    assert last.endswith("nothing was written")


def dry_run_rows(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """The sum, and by name what follows it."""
    header, first, *lines = (line.split(",") for line in text.splitlines())
    assert header == ["array", "shape", "dtype", "bytes", "bytes_per_image", "files"]
    assert first[:3] == ["total", "", ""]
    return first[1:], {line[0]: line[1:] for line in lines}


@pytest.mark.slow
def test_a_site_that_overflows_float16_is_stored_in_float32(
    folder: Path, tmp_path: Path
) -> None:
    path, checkpoint = tmp_path / "big.zarr", tmp_path / "big.pt"
    state = load_model(
        "test_vit", random_init=0, img_size=(32, 48), model_args={"patch_size": 8}
    ).module.state_dict()
    state["blocks.3.mlp.fc2.bias"][0] = 1e5
    torch.save(state, checkpoint)
    options = [VIT[0], "--checkpoint", checkpoint, *VIT[3:], "--data", folder, "-o", path]
    said = extracted(*options).stderr
    assert "blocks.3.out" in said
    assert "float32" in said
    store = open_store(path)
    assert store.acts("blocks.2.out").dtype == np.float16
    assert store.acts("blocks.3.out").dtype == np.float32
    assert np.isfinite(store.acts("blocks.3.out")[:]).all()
    assert "is complete" in extracted(*options).stderr  # the same command still agrees


@pytest.mark.slow
def test_an_overflow_after_the_first_images_stops_with_the_option_that_helps(
    tmp_path: Path,
) -> None:
    path = tmp_path / "late.zarr"
    options = [*plant_bright(tmp_path), "-o", path]
    result = extract(*options)
    assert result.exit_code == 1
    assert "--dtype embed=float32" in result.stderr
    assert len(result.stderr.strip().splitlines()[-1].split("vitsee extract: ")) == 2
    assert extract(*options).exit_code == 1  # resuming meets it again
    with pytest.raises(IncompleteStore):
        open_store(path)


@pytest.mark.slow
def test_weights_and_pixels_that_are_not_used_are_named(
    folder: Path, tmp_path: Path
) -> None:
    model = load_model(
        "test_vit", random_init=0, img_size=(32, 48), model_args={"patch_size": 8}
    )
    state = {
        k: v for k, v in model.module.state_dict().items() if not k.startswith("head.")
    }
    torch.save(
        {**state, "decoder_embed.weight": torch.zeros(3)}, tmp_path / "headless.pt"
    )
    data = ["--data", folder, "--images", 2, "--sites", "embed", "-o"]
    headless = [VIT[0], "--checkpoint", tmp_path / "headless.pt", *VIT[3:]]
    said = extracted(*headless, *data, tmp_path / "a.zarr").stderr
    assert "not in these weights, so random: head.weight, head.bias" in said
    assert "left over: decoder_embed.weight" in said
    assert "never seen" not in said
    uneven = ["vit_tiny_patch16_224", "--random-init", "0", "--img-size", "34x48"]
    uneven += ["--model-arg", "patch_size=8", "--model-arg", "depth=1"]
    said = extracted(*uneven, *data, tmp_path / "b.zarr").stderr
    assert "patches cover 32x48 of 34x48 input pixels" in said


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares CUDA with the CPU")
def test_cuda_agrees_with_the_cpu(folder: Path, vit_store: Path, tmp_path: Path) -> None:
    path = tmp_path / "cuda.zarr"
    extracted(
        *VIT,
        *("--data", folder, "-o", path, "--slab", SLAB, "--device", "cuda"),
        *("--sites", "all", "--attention", "full", "--inputs"),
    )
    a, b = open_store(vit_store), open_store(path)
    for site in ("embed", "blocks.2.out", "blocks.-1.out"):
        np.testing.assert_allclose(a.acts(site)[:], b.acts(site)[:], rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(
        a.attention("distance_px")[:], b.attention("distance_px")[:], rtol=1e-4
    )
