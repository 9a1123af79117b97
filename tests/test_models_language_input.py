"""The input of a vision-language model's language model, against the library's own
`get_image_features`; which weights are read for it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.extractions import extract, extracted, plant_images
from tests.models_helpers import captured, redraw, refusal
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sources.transformers_inputs import as_patches
from vitsee_stores import open_store

transformers: Any = pytest.importorskip("transformers", minversion="5.20")

TEXT = {
    **{
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    },
    **{
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 900,
        "pad_token_id": 0,
    },
}
VISION = {
    **{"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"intermediate_size": 96, "image_size": 64, "patch_size": 8},
}
PACKED = {
    **{"depth": 3, "hidden_size": 48, "num_heads": 4, "intermediate_size": 96},
    **{"out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]},
}
FULL = {"layer_types": ["full_attention"] * 2}
CLIP, LLAMA = {"model_type": "clip_vision_model"}, {"model_type": "llama"}
TILES = {"image_grid_pinpoints": [[64, 128], [128, 128]]}
# What a model is called, its class, its vision and text parts, and more of its configuration.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": ("Llava", CLIP, LLAMA, {}),
    "llava_next": (
        "LlavaNext",
        {"model_type": "clip_vision_model"},
        {"model_type": "llama"},
        TILES,
    ),
    "internvl": (
        "InternVL",
        {"image_size": [64, 64], "patch_size": [8, 8]},
        {"model_type": "qwen2"},
        {},
    ),
    "idefics3": ("Idefics3", {}, LLAMA, {}),
    "smolvlm": ("SmolVLM", {}, LLAMA, {}),
    "gemma3": ("Gemma3", {}, {}, {"mm_tokens_per_image": 16}),
    "paligemma": (
        "PaliGemma",
        {"model_type": "siglip_vision_model"},
        {"model_type": "gemma"},
        {"projection_dim": 64},
    ),
    "lfm2_vl": (
        "Lfm2Vl",
        {"model_type": "siglip2_vision_model", "num_patches": 64},
        FULL,
        {},
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", PACKED, FULL, {}),
}
HALF = ("internvl", "idefics3", "smolvlm", "gemma3", "lfm2_vl", "qwen2_5_vl")


def saved(kind: str, folder: Path) -> Path:
    """A tiny model with random weights, none of them all 0, in files of at most 100 KB."""
    name, vision, text, more = MODELS[kind]
    own = getattr(transformers, f"{name}Config")
    parts = vision if kind == "qwen2_5_vl" else {**VISION, **vision}
    config = own(vision_config=parts, text_config={**TEXT, **text}, **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    redraw(model)
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.any():
                weight.normal_(std=0.2)
    model.save_pretrained(folder / kind, max_shard_size="100KB")
    return folder / kind


def whole(place: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(place)
    return transformers.MODEL_MAPPING[type(config)].from_pretrained(place).eval()


def library_features(kind: str, model: Any, x: Tensor) -> Tensor:
    """(images, tokens, dim) of the library's own features of images."""
    given: Mapping[str, Any] = {}
    images = x
    if kind in ("idefics3", "smolvlm"):
        images = x[:, None]
    elif kind == "lfm2_vl":
        images, given = as_patches(x, (8, 8))
    elif kind == "qwen2_5_vl":
        from tests.test_models_towers import patches_by_loop

        grid = x.shape[2] // 14, x.shape[3] // 14
        images = patches_by_loop(x, 14, 2, 2)
        given = {"image_grid_thw": torch.tensor([[1, *grid]] * len(x))}
    with torch.inference_mode():
        found = model.get_image_features(images, **given).pooler_output
    return found if isinstance(found, Tensor) else torch.stack([*found])


def features_of(place: Path, **options: Any) -> tuple[Any, Any, Tensor]:
    """The loaded model, its table, and what it gives as language-in of random images."""
    model = load_model(f"transformers:{place}#language-in", **options)
    table = site_table(model)
    x = torch.randn((2, *model.input_size), generator=torch.Generator().manual_seed(1))
    return model, table, captured(model, table, x).tokens("language-in")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k for k in MODELS if k != "llava_next"])
def test_language_in_against_the_librarys_own_features(kind: str, tmp_path: Path) -> None:
    place = saved(kind, tmp_path)
    size = {"img_size": (112, 168)} if kind == "qwen2_5_vl" else {}
    model, table, got = features_of(place, **size)
    own = whole(place)
    x = torch.randn((2, *model.input_size), generator=torch.Generator().manual_seed(1))
    expected = library_features(kind, own, x)
    assert got.shape == expected.shape and got.shape[-1] == 64
    assert float((got - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    weights = own.state_dict()
    assert all(
        torch.equal(x, weights[name]) for name, x in model.module.state_dict().items()
    )
    assert not any("layers.1.mlp.gate" in name for name in model.module.state_dict())
    layout, tower = table["language-in"].layout, table["blocks.0.out"].layout
    assert layout is not None and tower is not None and layout.prefix == ()
    step = 2 if kind in HALF else 1
    assert layout.grid == tuple(n // step for n in tower.grid)
    assert layout.stride_px == tuple(n * step for n in tower.stride_px)
    assert table["language-in"].depth == 3 and "head" in table["language-in"].groups


@pytest.mark.slow
def test_a_class_that_joins_tiles_gives_those_of_each(tmp_path: Path) -> None:
    """LLaVA-NeXT: an image is a tile; the library's projector of three tiles of one image."""
    place = saved("llava_next", tmp_path)
    model, table, got = features_of(place)
    assert table["language-in"].layout.grid == (8, 8)
    own, seen = whole(place), list[Tensor]()
    own.multi_modal_projector.register_forward_hook(
        lambda _m, _a, left: seen.append(left)
    )
    x = torch.randn((2, *model.input_size), generator=torch.Generator().manual_seed(1))
    tiles = torch.cat([x, x[:1]])[None]
    with torch.inference_mode():
        own.get_image_features(tiles, torch.tensor([[64, 128]]))
    assert seen[0].shape == (3, 64, 64)
    assert float((got - seen[0][:2]).abs().max()) <= 1e-5 * float(got.abs().max())


@pytest.mark.slow
def test_a_bright_patch_lights_its_own_cell(tmp_path: Path) -> None:
    """InternVL's pixel shuffle: where attention is each token's own, a patch of row 2, column 5
    shows in the cell of row 1, column 2 alone."""
    from vitsee_core.models.tokens.packed_order import SelfOnlyAttention

    model = load_model(f"transformers:{saved('internvl', tmp_path)}#language-in")
    x = torch.zeros(2, *model.input_size)
    x[1, :, 16:24, 40:48] = 3.0
    with SelfOnlyAttention(), torch.inference_mode():
        dark, bright = model.module(x).reshape(2, 4, 4, -1)
    change = (bright - dark).abs().amax(-1)
    assert float(change[1, 2]) > 1e-3
    change[1, 2] = 0
    assert float(change.max()) < 1e-6


def renamed(place: Path, new: Callable[[str], str]) -> None:
    """The checkpoint's tensors by other names."""
    index = place / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    for file in {*found["weight_map"].values()}:
        tensors = {new(name): x for name, x in load_file(place / file).items()}
        save_file(tensors, place / file, {"format": "pt"})
    found["weight_map"] = {new(name): file for name, file in found["weight_map"].items()}
    index.write_text(json.dumps(found))


@pytest.mark.slow
def test_the_language_model_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that hold only the language model stay closed, and none of its tensors is read; also
    for checkpoints with the hub's older names, which have one more level in the tower's."""
    place = saved("llava", tmp_path)
    _, _, expected = features_of(place)
    inner = "vision_tower.vision_model."
    renamed(place, lambda name: name.replace("vision_tower.", inner))
    import safetensors

    opened, plain = list[str](), safetensors.safe_open

    def counted(path: str, framework: str) -> Any:
        opened.append(Path(path).name)
        return plain(path, framework)  # type: ignore[arg-type]

    monkeypatch.setattr(safetensors, "safe_open", counted)
    model, _, got = features_of(place)
    assert torch.equal(got, expected) and "missing" not in model.weights
    files = json.loads((place / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {
        file for name, file in files.items() if inner in name or "projector" in name
    }
    assert {*opened} == needed and {*files.values()} - needed


@pytest.mark.slow
def test_other_names_are_read_by_the_library(tmp_path: Path) -> None:
    place = saved("llava", tmp_path)
    _, _, expected = features_of(place)
    for file in [*place.glob("*.safetensors*")]:
        file.unlink()
    torch.save(whole_state(saved("llava", tmp_path / "b")), place / "pytorch_model.bin")
    model, _, got = features_of(place)
    assert torch.equal(got, expected)
    assert {name for name, _ in model.module.named_children()} == {
        "vision_tower",
        "multi_modal_projector",
    }


def whole_state(place: Path) -> dict[str, Tensor]:
    kind = transformers.LlavaForConditionalGeneration
    return dict(kind.from_pretrained(place).state_dict())


@pytest.mark.slow
def test_random_weights_by_the_command(tmp_path: Path) -> None:
    """A class with arguments of its parts; the site is stored by default, beside the tower's."""
    sizes = (
        "hidden_size=48&num_hidden_layers=2&num_attention_heads=4&intermediate_size=96"
    )
    name = f"transformers:LlavaModel#language-in?{sizes}&text_config.hidden_size=40"
    data = plant_images(tmp_path / "data", 4, (70, 90))
    path = tmp_path / "a.zarr"
    extracted(f"{name}&img-size=56&random-init=0", "--data", data, "-o", path)
    store = open_store(path)
    sites = {site.name: site for site in store.manifest.plan.sites}
    assert sites["language-in"].layout.grid == (4, 4) and sites["language-in"].dim == 40  # type: ignore
    assert sites["blocks.1.out"].layout.prefix == ("cls",)  # type: ignore[union-attr]
    assert store.acts("language-in").shape == (4, 16, 40)
    args = {"text_config.hidden": 40}
    wrong = refusal("transformers:LlavaModel#language-in", random_init=0, model_args=args)
    assert "LlamaConfig has no 'hidden'" in wrong


PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "internvl": ("GotOcr2ImageProcessor", {"size": {"height": 64, "width": 64}}),
    "llava_next": (
        "LlavaNextImageProcessor",
        {
            "size": {"shortest_edge": 64},
            "crop_size": {"height": 64, "width": 64},
            "image_grid_pinpoints": TILES["image_grid_pinpoints"],
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROCESSORS)
def test_the_thumbnail_and_tiles(kind: str, tmp_path: Path) -> None:
    """By default an image is the whole image as the processor makes it for one tile; with --tiles
    each cell is that of its tile, an image of 64 x 64 pixels."""
    place = saved(kind, tmp_path)
    name, given = PROCESSORS[kind]
    own = getattr(transformers, name)(**given)
    own.save_pretrained(place)
    data = plant_images(tmp_path / "data", 3, (64, 96))
    words = [
        f"transformers:{place}#language-in",
        "--data",
        data,
        "--sites",
        "blocks,head",
    ]
    result = extracted(*words, "-o", tmp_path / "a.zarr")
    cuts = "it gets the whole image alone" in result.output
    assert cuts == (kind == "llava_next")
    store = open_store(tmp_path / "a.zarr")
    photos = [Image.open(data / name).convert("RGB") for name in store.samples.id]
    thumbnails = torch.stack(
        [
            (x[0] if x.ndim == 4 else x)
            for x in (own(p, return_tensors="pt")["pixel_values"][0] for p in photos)
        ]
    )
    model = load_model(f"transformers:{place}#language-in")

    def features(x: Tensor) -> Tensor:
        with torch.inference_mode():
            found: Tensor = model.module(x)
        return found.reshape(len(x), -1, found.shape[-1])

    stored = torch.from_numpy(np.asarray(store.acts("language-in")))
    assert torch.allclose(
        stored.float(), features(thumbnails), rtol=2e-3, atol=2e-3
    )  # float16
    extracted(
        *words, "--short-side", 64, "--multiple", 32, "--tiles", "-o", tmp_path / "b.zarr"
    )
    tiled = open_store(tmp_path / "b.zarr")
    layout = {site.name: site.layout for site in tiled.manifest.plan.sites}["language-in"]
    side = 8 if kind == "llava_next" else 4
    assert layout is not None and layout.grid == (side, side * 3 // 2)
    mean, std = (
        torch.tensor(model.transform[key]).view(3, 1, 1) for key in ("mean", "std")
    )
    whole = torch.stack(
        [
            (torch.from_numpy(np.array(p)).permute(2, 0, 1) / 255 - mean) / std
            for p in photos
        ]
    )
    left, right = (
        features(whole[..., at : at + 64]).reshape(3, side, side, -1) for at in (0, 32)
    )
    expected = torch.cat([left, right[:, :, side // 2 :]], 2)
    got = torch.from_numpy(np.asarray(tiled.acts("language-in"))).float()
    assert torch.allclose(got.reshape(expected.shape), expected, rtol=2e-3, atol=2e-3)
    wrong = extract(*words, "--short-side", 72, "--tiles", "-o", tmp_path / "c.zarr")
    assert (wrong.exit_code == 1) == (kind == "internvl")
    assert kind == "llava_next" or "no multiple of the 16 pixels" in wrong.output


@pytest.mark.slow
def test_what_is_refused_in_one_line(tmp_path: Path) -> None:
    place = saved("llava", tmp_path)
    assert "has #vision_tower, #language-in" in refusal(f"transformers:{place}#vision")
    text = {**TEXT, "vocab_size": 99}
    transformers.CLIPConfig(vision_config=VISION, text_config=text).save_pretrained(
        tmp_path / "c"
    )
    assert "CLIPModel has no language model" in refusal(
        f"transformers:{tmp_path / 'c'}#language-in", random_init=0
    )
    transformers.ViTConfig(**VISION).save_pretrained(tmp_path / "v")
    assert (
        "ViTModel"
        in (none := refusal(f"transformers:{tmp_path / 'v'}#language-in", random_init=0))
        and "has no get_image_features" in none
    )
    resampler = {"resampler_n_latents": 8, "resampler_depth": 1, "resampler_n_heads": 4}
    resampler |= {"resampler_head_dim": 16, "num_key_value_heads": 2}
    transformers.Idefics2Config(
        vision_config=VISION,
        text_config={**TEXT, "model_type": "mistral"},
        perceiver_config=resampler,
    ).save_pretrained(tmp_path / "i")
    name = f"transformers:{tmp_path / 'i'}#language-in"
    with pytest.raises(ModelError, match="are no cells of the image's grid"):
        site_table(load_model(name, random_init=0))
