"""Models of clips: every stored site and attention against the library's own, clips in a batch
against each alone, where a bright patch shows, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from tests.clip_files import write_frames
from tests.extractions import extracted
from tests.models_helpers import captured, redraw, refusal
from vitsee_core.analyses import attn_dist
from vitsee_core.images.transform import make_recipe, normalise
from vitsee_core.models.attention_watch import AttentionEvent, KernelCall
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model, model_from_module
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table, sketch
from vitsee_core.models.sources.processors import Processor
from vitsee_core.models.sources.transformers_classes import clip_frames
from vitsee_core.models.sources.transformers_inputs import take_images_alone
from vitsee_core.models.tokens.clip_order import (
    ClipCalls,
    ClipCodes,
    ClipOrder,
    find_order,
)
from vitsee_core.models.tokens.clips import accept_clips, clip_cells, frames_of, recognise
from vitsee_core.models.tokens.packed_order import window_of
from vitsee_stores import open_store

transformers: Any = pytest.importorskip("transformers", minversion="5.20")

DEPTH, HEADS, DIM, SIDE = 3, 4, 48, 32
SMALL = {"hidden_size": DIM, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
MORE = {"intermediate_size": 96, "image_size": SIDE}
PREDICTOR = {
    "pred_hidden_size": 48,
    "pred_num_attention_heads": 4,
    "pred_num_hidden_layers": 1,
}
# Of a class: its configuration, and the cells of a clip in time, rows and columns.
CLASSES: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "VideoMAEModel": (
        {**SMALL, **MORE, "patch_size": 8, "num_frames": 6, "tubelet_size": 2},
        (3, 4, 4),
    ),
    "VJEPA2Model": (
        {
            **{**SMALL, "crop_size": SIDE, "patch_size": 8, "frames_per_clip": 6},
            **{"tubelet_size": 2, **PREDICTOR},
        },
        (3, 4, 4),
    ),
    "VivitModel": (
        {**SMALL, **MORE, "num_frames": 6, "tubelet_size": [2, 8, 8]},
        (3, 4, 4),
    ),
    "TimesformerModel": ({**SMALL, **MORE, "patch_size": 8, "num_frames": 3}, (3, 4, 4)),
    "VideoPrismVisionModel": (
        {
            **{"hidden_size": DIM, "num_spatial_layers": 2, "num_temporal_layers": 1},
            **{"num_attention_heads": HEADS, "intermediate_size": 96, "image_size": SIDE},
            **{"num_frames": 3, "tubelet_size": [1, 8, 8]},
        },
        (3, 4, 4),
    ),
}
JOINT = ["VideoMAEModel", "VJEPA2Model", "VivitModel"]


def library_model(name: str, attention: str = "sdpa", **more: Any) -> Any:
    """A tiny model of the library as it is, weights and norms redrawn."""
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = kind.config_class(**{**CLASSES[name][0], **more})
    config._attn_implementation = attention
    torch.manual_seed(0)
    try:
        model = kind(config)
    except ValueError:  # it has eager attention alone
        config._attn_implementation = "eager"
        model = kind(config)
    model.eval().requires_grad_(False)
    redraw(model)
    return model


def adapted(name: str, **more: Any) -> LoadedModel:
    """The same model as one of clips."""
    module = library_model(name, **more)
    take_images_alone(module, False, name)
    frames = clip_frames(module)
    assert frames is not None
    accept_clips(module, frames)
    return LoadedModel(name, module, (3, SIDE, SIDE), {}, {}, name)


def clips(model: LoadedModel, n: int = 2, seed: int = 1) -> Tensor:
    """Random clips of the model's own number of frames."""
    frames = frames_of(model.module)
    assert frames is not None
    shape = n, frames, *model.input_size
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def library_states(name: str, x: Tensor) -> list[Tensor]:
    """The library's states before the first block and behind each, as they are."""
    states: list[Tensor] = []

    def keep(_: nn.Module, args: Any, output: Any) -> None:
        states.extend([args[0]] if not states else [])
        states.append(output[0] if isinstance(output, tuple) else output)

    model = library_model(name)
    blocks = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    for one in blocks[: 2 if name.startswith("VideoPrism") else 1]:
        for block in one:
            block.register_forward_hook(keep)
    with torch.inference_mode():
        model(x)
    return states


def in_order(name: str, x: Tensor, cells: tuple[int, int, int], block: int) -> Tensor:
    """A state of the library as (clips, tokens, dim): cells time by time, row by row, by loops."""
    times, rows, cols = cells
    if name == "TimesformerModel":  # class token, then frames fastest
        found = [x[:, 0]]
        for t in range(times):
            for i in range(rows):
                found += [x[:, 1 + (i * cols + j) * times + t] for j in range(cols)]
        return torch.stack(found, 1)
    if name == "VideoPrismVisionModel" and block < 3:  # (clips x times, places, dim)
        return torch.stack(
            [torch.cat([*x[i : i + times]]) for i in range(0, len(x), times)]
        )
    if name == "VideoPrismVisionModel":  # (clips x places, times, dim)
        places = rows * cols
        return torch.stack(
            [
                torch.stack(
                    [x[start + p, t] for t in range(times) for p in range(places)]
                )
                for start in range(0, len(x), places)
            ]
        )
    return x


def close(x: Tensor, y: Tensor, allowed: float = 1e-5) -> bool:
    return x.shape == y.shape and float((x - y).abs().max()) <= allowed * float(
        y.abs().max()
    )


@pytest.mark.parametrize("name", CLASSES)
def test_sites_against_the_librarys_own_states(name: str) -> None:
    model, cells = adapted(name), CLASSES[name][1]
    x = clips(model)
    table = site_table(model)
    seen = captured(model, table, x)
    outs = [site for site in table.sites if site.block and site.part == "out"]
    states = library_states(name, x)
    assert len(states) == len(outs) + 1 == DEPTH + 1
    sites = [table["embed"], *outs]
    for i, (site, state) in enumerate(zip(sites, states, strict=True)):
        assert close(seen.tokens(site.name), in_order(name, state, cells, i)), site.name
        layout, prefix = (
            site.layout,
            (("cls",) if name in ("VivitModel", "TimesformerModel") else ()),
        )
        assert layout is not None and (layout.body, layout.prefix) == (cells, prefix)
        assert (layout.stride_px, layout.offset_px) == ((8.0, 8.0), (0.0, 0.0))
        assert layout.stride_frames == len(x[0]) / 3
    has_sums = name != "TimesformerModel"
    assert len(table.sublayers) == has_sums * 2 * DEPTH
    assert (table.residual_refusal is None) == has_sums
    for (
        sublayer
    ) in table.sublayers:  # their skips and branches add up (proven), here to the states
        z, f = seen.branches[sublayer.name]
        if sublayer.kind == "mlp":
            total = seen.tokens(sublayer.name.replace(".mlp", ".out"))
            assert close(z + f, total)
    output = library_model(name)(x).last_hidden_state
    assert close(model.module(x), output)


@pytest.mark.parametrize("name", JOINT)
def test_joint_attention_against_the_librarys_own(name: str) -> None:
    model = adapted(name)
    x = clips(model)
    table = site_table(model)
    seen = captured(model, table, x)
    eager = library_model(name, "eager")
    with torch.inference_mode():
        found = eager(x, output_attentions=True).attentions
    assert [(b.name, b.window) for b in table.attention] == [
        (f"blocks.{i}", None) for i in range(DEPTH)
    ]
    assert table.rollout_refusal is None
    for i, weights in enumerate(found):
        got = seen.scores[f"blocks.{i}"].softmax(-1)
        assert float((got - weights).abs().max()) < 1e-5


def own_attention(qkv: Tensor) -> Tensor:
    """(batch, heads, tokens, tokens) of queries, keys and values side by side."""
    query, key, _ = qkv.unflatten(-1, (3, HEADS, DIM // HEADS)).unbind(2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / (DIM // HEADS) ** 0.5
    return scores.softmax(-1)


def test_the_two_attentions_of_a_timesformer_block() -> None:
    """Over time at a place and over places within a frame, against its own modules, by loops."""
    name, (times, rows, cols) = "TimesformerModel", (3, 4, 4)
    model = adapted(name)
    x = clips(model)
    table = site_table(model)
    seen = captured(model, table, x)
    assert [(b.name, b.window, b.layout.prefix, b.index) for b in table.attention] == [
        one
        for i in range(DEPTH)
        for one in (
            (f"blocks.{i}.time", (3, 1, 1), (), i),
            (f"blocks.{i}.space", (1, 4, 4), ("cls",), i),
        )
    ]
    assert table.rollout_refusal == "attention is divided between time and space"
    library, kept = library_model(name), {}

    def keep(place: str, output: Tensor) -> None:
        kept[place] = output

    for i, layer in enumerate(library.encoder.layer):
        for kind, module in (
            ("time", layer.temporal_attention),
            ("space", layer.attention),
        ):
            module.attention.qkv.register_forward_hook(
                lambda _m, _a, y, place=f"blocks.{i}.{kind}": keep(place, y)
            )
    with torch.inference_mode():
        library(x)
    places = rows * cols
    for i in range(DEPTH):
        time = own_attention(
            kept[f"blocks.{i}.time"]
        )  # (clips x places, heads, times, times)
        expected = torch.zeros(2, HEADS, times * places, times * places)
        for clip in range(2):
            for p in range(places):
                for t in range(times):
                    for u in range(times):
                        a = time[clip * places + p, :, t, u]
                        expected[clip, :, t * places + p, u * places + p] = a
        got = seen.scores[f"blocks.{i}.time"].softmax(-1)
        assert float((got - expected).abs().max()) < 1e-5
        space = own_attention(
            kept[f"blocks.{i}.space"]
        )  # (clips x times, heads, 1 + places, ...)
        n = 1 + times * places
        expected = torch.zeros(2, HEADS, n, n)
        for clip in range(2):
            for t in range(times):
                a = space[clip * times + t]
                own = slice(1 + t * places, 1 + (t + 1) * places)
                expected[clip, :, own, own] = a[:, 1:, 1:]
                expected[clip, :, own, 0] = a[:, 1:, 0]
                # The class token's copies are averaged after the attention.
                expected[clip, :, 0, own] += a[:, 0, 1:] / times
                expected[clip, :, 0, 0] += a[:, 0, 0] / times
        got = seen.scores[f"blocks.{i}.space"].softmax(-1)
        assert float((got - expected).abs().max()) < 1e-5


def test_the_attention_of_a_factorised_encoder() -> None:
    """VideoPrism: within frames in the first blocks, over time at a place in the last, against the
    library's eager weights."""
    name, (times, rows, cols) = "VideoPrismVisionModel", (3, 4, 4)
    model = adapted(name)
    x = clips(model)
    table = site_table(model)
    seen = captured(model, table, x)
    assert [b.window for b in table.attention] == [(1, 4, 4), (1, 4, 4), (3, 1, 1)]
    library, kept = library_model(name, "eager"), []
    for module in library.modules():
        if type(module).__name__ == "VideoPrismAttention":
            module.register_forward_hook(lambda _m, _a, y: kept.append(y[1]))
    with torch.inference_mode():
        library(x)
    n = times * rows * cols
    time = torch.arange(n) // (rows * cols)
    place = torch.arange(n) % (rows * cols)
    for block, weights in zip(table.attention, kept, strict=True):
        got = seen.scores[block.name].softmax(-1)
        part, entry = (time, place) if block.window == (1, 4, 4) else (place, time)
        folds = int(part.max()) + 1
        for q in range(0, n, 5):
            for k in range(0, n, 3):
                for clip in range(2):
                    inside = part[q] == part[k]
                    own = weights[clip * folds + part[q], :, entry[q], entry[k]]
                    expected = own if inside else torch.zeros(HEADS)
                    assert float((got[clip, :, q, k] - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("name", CLASSES)
def test_a_clip_in_a_batch_equals_itself_alone(name: str) -> None:
    model = adapted(name)
    x = clips(model, 3)
    table = site_table(model)
    together = captured(model, table, x)
    for i in range(3):
        alone = captured(model, table, x[i : i + 1])
        assert alone.sites.keys() == together.sites.keys()
        for site in alone.sites:
            assert close(alone.sites[site][1], together.sites[site][1][i : i + 1]), site
        for block, scores in alone.scores.items():
            weights, others = (
                scores.softmax(-1),
                together.scores[block][i : i + 1].softmax(-1),
            )
            assert float((weights - others).abs().max()) < 1e-5


@pytest.mark.parametrize("name", CLASSES)
def test_a_bright_patch_of_one_frame_lights_its_own_cell(name: str) -> None:
    model, cells = adapted(name), CLASSES[name][1]
    n_frames = frames_of(model.module)
    assert n_frames is not None
    x = torch.zeros(3, n_frames, *model.input_size)
    places = [(0, 0, 0), (1, 2, 3), (2, 3, 1)]  # frame, row and column of cells
    frames = [0, n_frames // 2, n_frames - 1]
    for i, ((_, row, col), frame) in enumerate(zip(places, frames, strict=True)):
        x[i, frame, :, row * 8 : row * 8 + 8, col * 8 : col * 8 + 8] = 3.0
    table = site_table(model)
    seen, dark = captured(model, table, x), captured(model, table, torch.zeros_like(x))
    change = (seen.sites["embed"][1] - dark.sites["embed"][1]).abs().amax(-1)
    assert change.shape == (3, *cells)
    for i, place in enumerate(places):
        assert float(change[i][place]) > 1e-3
        change[i][place] = 0
    assert float(change.max()) == 0


def test_folded_attention_by_hand() -> None:
    """Two frames of two places and a class token: one clip, one head, scores of one number each."""
    # Rows of a clip: class token and places of frame 0, then of frame 1.
    order = ClipOrder((2, 1, 2), torch.tensor([1, 2, 4, 5]), torch.tensor([[0, 3]]), 6, 2)
    key = torch.zeros(2, 1, 3, 1)
    key[1, 0, :, 0] = torch.tensor(
        [0.0, 0.0, 1.0]
    ).log1p()  # frame 1: its second place, doubly
    query, value = torch.ones(2, 1, 3, 1), torch.arange(6.0).reshape(2, 1, 3, 1)
    value[1, 0, 0] = value[0, 0, 0]  # copies of the class token
    output = functional.scaled_dot_product_attention(query, key, value, scale=1.0)
    given = {"query": query, "key": key, "value": value, "scale": 1.0}
    event = ClipCalls(order, 1).add(
        AttentionEvent((2, 1, 3), 3, call=KernelCall(given, output))
    )
    assert (event.query, event.n_keys, event.window) == ((1, 1, 5), 5, (1, 1, 2))
    assert event.call is not None
    a = event.call.scores(slice(None))[0, 0].softmax(-1)
    third, quarter = 1 / 3, 1 / 4
    expected = torch.tensor(
        [
            # class token: the mean of (1/3, 1/3, 1/3) and (1/4, 1/4, 1/2)
            [(third + quarter) / 2, third / 2, third / 2, quarter / 2, 2 * quarter / 2],
            [third, third, third, 0, 0],
            [third, third, third, 0, 0],
            [quarter, 0, 0, quarter, 2 * quarter],
            [quarter, 0, 0, quarter, 2 * quarter],
        ]
    )
    assert torch.allclose(a, expected)
    assert torch.allclose(a @ event.call.value[0, 0], event.call.output[0, 0])


def test_windows_of_clips_are_tiles() -> None:
    """By hand: frames, places, and parts that are neither."""
    number = torch.arange(24).reshape(2, 3, 4)
    assert window_of(number // 12) == (1, 3, 4)
    assert window_of(number % 12) == (2, 1, 1)
    assert window_of(torch.zeros_like(number)) is None  # all in one
    assert window_of((number // 12) ^ (number % 2)) is None  # a chessboard in time


def test_an_order_is_read_where_each_cell_is_there_once() -> None:
    """Rows in any order, in folds and with copies of a class token; not with a cell twice, missing,
    or mixed of two, or copies at several places."""
    codes, grid = ClipCodes((2, 3, 3)), (2, 3, 3)
    n, generator = len(codes.contents), torch.Generator().manual_seed(0)
    vectors = torch.randn(18, 4, 8, generator=generator)  # of each cell and content
    shown = codes.contents.flatten(1)
    cells = torch.stack([vectors[torch.arange(18), shown[i]] for i in range(n)])
    turn = torch.randperm(18, generator=generator)
    found = find_order(cells[:, turn], codes)
    assert (
        found is not None
        and found.grid == grid
        and torch.equal(found.index, turn.argsort())
    )
    assert torch.equal(found.to_grid_order(cells[:, turn]), cells)
    still = torch.randn(8, generator=generator).expand(n, 1, 8)
    first = torch.cat([still, cells], 1)
    found = find_order(first, codes)
    assert (
        found is not None
        and found.plain
        and torch.equal(found.to_grid_order(first), first)
    )
    folded = torch.cat([still, cells[:, :9], still, cells[:, 9:]], 1).reshape(
        2 * n, 10, 8
    )
    found = find_order(folded, codes)
    assert found is not None and (found.folds, found.prefix.tolist()) == (2, [[0, 10]])
    assert torch.allclose(found.to_grid_order(folded), first)
    as_map = cells.unflatten(1, grid).movedim(-1, 1)
    found = find_order(as_map, codes)
    assert (
        found is not None
        and found.channels
        and torch.equal(found.to_grid_order(as_map), cells)
    )
    twice = cells.clone()
    twice[:, 3] = twice[:, 4]
    mixed = cells + 0.3 * cells.roll(1, 1)
    # A class token first in one half and last in the other is no copy of one token.
    apart = torch.cat([still, cells, still], 1).reshape(2 * n, 10, 8)
    for wrong in (twice, mixed, cells[:, :17], apart):
        assert find_order(wrong, codes) is None


class Own(nn.Module):
    """A user's own module: one attention over the tokens of all frames, columns before rows."""

    def __init__(self, channels_first: bool, images: bool = False) -> None:
        super().__init__()
        self.channels_first, self.images = channels_first, images
        self.embed = nn.Conv3d(3, 16, (2, 8, 8), (2, 8, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(2).expand(-1, -1, 4, -1, -1) if self.images else x
        x = x if self.channels_first or self.images else x.transpose(1, 2)
        if x.shape[1] != 3:
            raise ValueError(f"expected 3 channels, not {x.shape[1]}")
        x = self.embed(x).transpose(-1, -2).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


@pytest.mark.parametrize("channels_first", [False, True])
def test_a_users_own_module(channels_first: bool) -> None:
    torch.manual_seed(0)
    module = Own(channels_first).eval().requires_grad_(False)
    recognise(module, 4, (3, 32, 24), "own.py:build")
    assert frames_of(module) == 4
    model = model_from_module(module, {"input_size": (3, 32, 24)}, name="own")
    table = site_table(model)
    layout = table["blocks.0.out"].layout
    assert layout is not None and (layout.body, layout.stride_frames) == ((2, 4, 3), 2)
    x = clips(model)
    seen = captured(model, table, x)
    embed = module.embed(x.transpose(1, 2)).movedim(1, -1)
    assert close(seen.sites["embed"][1], embed)
    assert [b.name for b in table.attention] == ["blocks.0", "blocks.1"]


def test_a_module_of_images_stays_one() -> None:
    module = Own(False, images=True)
    recognise(module, 4, (3, 32, 24), "own.py:build")
    assert frames_of(module) is None


def test_what_takes_neither_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"takes neither images .* nor clips of 4 frames"
    ) as error:
        recognise(Own(True), 4, (5, 32, 24), "own.py:build")
    assert "\n" not in str(error.value)
    with pytest.raises(
        ModelError, match="does not run on clips of 4 frames of 30 x 30 pixels"
    ):
        clip_cells(library_model("VideoMAEModel"), 4, (3, 30, 30))


SAVED = [
    ("VideoMAEForVideoClassification", "VideoMAEModel", "VideoMAEImageProcessor"),
    ("VideoMAEModel", "VideoMAEModel", "VideoMAEVideoProcessor"),
    ("VJEPA2ForVideoClassification", "VJEPA2Model", "VJEPA2VideoProcessor"),
    ("VivitModel", "VivitModel", "VivitImageProcessor"),
    ("VivitForVideoClassification", "VivitModel", "VivitVideoProcessor"),
    (
        "TimesformerForVideoClassification",
        "TimesformerModel",
        "TimesformerVideoProcessor",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SAVED, ids=lambda case: f"{case[0]} {case[2]}")
def test_a_folder_with_its_processor(case: tuple[str, str, str], tmp_path: Path) -> None:
    """`load_model` alone gives the same pixels as the library's own processor, and the same logits
    or states."""
    name, configured, processor_name = case
    kind, processor_kind = (
        getattr(transformers, n, None) for n in (name, processor_name)
    )
    if kind is None or processor_kind is None:
        lacking = name if kind is None else processor_name
        pytest.skip(f"transformers {transformers.__version__} has no {lacking}")
    torch.manual_seed(0)
    labels = {0: "left", 1: "right", 2: "up"}
    library = kind(kind.config_class(**CLASSES[configured][0], id2label=labels)).eval()
    redraw(library)
    library.save_pretrained(tmp_path)
    sizes = {"size": {"shortest_edge": 37}, "crop_size": {"height": SIDE, "width": SIDE}}
    processor = processor_kind(**sizes)
    processor.save_pretrained(tmp_path)
    assert not Processor(
        processor, name
    ).cuts_tiles  # a clip of one frame is no image in tiles
    model = load_model(f"transformers:{tmp_path}")
    frames = frames_of(model.module)
    assert frames is not None
    rng = np.random.default_rng(0)
    clip = rng.integers(0, 256, (frames, 41, 50, 3), np.uint8)
    recipe = make_recipe(model.transform)
    pixels = torch.from_numpy(np.stack([recipe.apply(Image.fromarray(x)) for x in clip]))
    given = normalise(pixels, model.transform, "cpu").unsqueeze(0)
    if processor_name.endswith("VideoProcessor"):
        made = processor(videos=[clip], return_tensors="pt")
    else:
        made = processor(images=list(clip), return_tensors="pt")
    own = next(iter(made.values()))
    assert close(given, own.reshape(given.shape))
    with torch.inference_mode():
        output = library(given)
        states = getattr(output, "logits", None)
        states = output.last_hidden_state if states is None else states
        assert close(model.module(given), states)
    table = site_table(model)
    seen = captured(model, table, given)
    if name.endswith("Classification"):
        assert model.class_names == list(labels.values())
        assert close(seen.sites["logits"][1], states)
    assert len([s for s in table.sites if s.block and s.part == "out"]) == DEPTH


def test_frames_other_than_the_configurations_own() -> None:
    arguments = CLASSES["VideoMAEModel"][0]
    name = "transformers:VideoMAEModel"
    model = load_model(name, random_init=0, model_args=arguments, frames=4)
    layout = site_table(model)["blocks.0.out"].layout
    assert layout is not None and (layout.body, layout.stride_frames) == ((2, 4, 4), 2.0)
    model = load_model(name, random_init=0, model_args=arguments, frames=5)
    with pytest.raises(
        ModelError, match=r"makes 2 x 4 x 4 tokens of 5 frames .* do not divide"
    ):
        site_table(model)


def test_interventions_are_refused() -> None:
    arguments = CLASSES["VideoMAEModel"][0]
    why = refusal(
        "transformers:VideoMAEModel",
        random_init=0,
        model_args=arguments,
        replace=["all@blocks.0.out=zero"],
    )
    assert "takes clips" in why


@pytest.mark.slow
def test_a_store_of_divided_attention(tmp_path: Path) -> None:
    """TimeSformer through `extract`: tokens as captured, and the numbers in time by loops over the
    stored attention."""
    times, rows, cols = CLASSES["TimesformerModel"][1]
    pictures = np.random.default_rng(0).integers(0, 256, (3, 7, 40, 40, 3), np.uint8)
    for i in range(3):
        write_frames(tmp_path / "clips" / f"c{i}", list(pictures[i]))
    arguments = CLASSES["TimesformerModel"][0]
    words = "&".join(f"{key}={value}" for key, value in arguments.items())
    path, name = tmp_path / "t.zarr", f"transformers:TimesformerModel?{words}"
    options = [
        "--random-init",
        0,
        "--attention",
        "full",
        "--dtype",
        "float32",
        "--inputs",
    ]
    result = extracted(name, "--data", tmp_path / "clips", *options, "-o", path)
    assert "rollout: attention is divided between time and space" in result.output
    store = open_store(path)
    groups = {group.blocks[0]: group for group in store.plan.attention}
    assert {
        name: (g.prefix, g.window, g.layout.prefix) for name, g in groups.items()
    } == {
        "blocks.0.time": ("", (3, 1, 1), ()),
        "blocks.0.space": ("grid_3x4x4_window_1x4x4", (1, 4, 4), ("cls",)),
    }
    n = times * rows * cols
    time = np.arange(n) // (rows * cols)
    apart = np.abs(time[:, None] - time)
    for block, group in groups.items():
        a = np.asarray(store.array(f"attention/full/{block}")[:], np.float64)
        a = a[:, :, group.layout.n_prefix :, group.layout.n_prefix :]
        a /= a.sum(-1, keepdims=True)
        found = {
            name: np.asarray(store.array(group.folder + name)[:])[:, 0]
            for name in ("distance_frames", "frame_mass")
        }
        assert found["distance_frames"] == pytest.approx(
            (a * apart).sum(-1).mean(-1), abs=2e-3
        )
        assert found["frame_mass"] == pytest.approx(
            (a * (apart == 0)).sum(-1).mean(-1), abs=2e-3
        )
        by_offset = np.asarray(store.array(group.folder + "aligned_frames")[:]).sum(0)[0]
        for dt in range(1 - times, times):
            pairs = (time - time[:, None]) == dt
            mine = (a * pairs).sum((-2, -1)).sum(0) / n
            assert by_offset[:, dt + times - 1] == pytest.approx(mine, abs=5e-3)
    model = load_model(
        "transformers:TimesformerModel", random_init=0, model_args=arguments
    )
    pixels = torch.from_numpy(np.asarray(store.array("input")[:]))
    seen = captured(model, site_table(model), normalise(pixels, model.transform, "cpu"))
    for site in ("embed", "blocks.0.out", "blocks.2.out"):
        stored = torch.from_numpy(np.asarray(store.array(f"acts/{site}/grid")[:]))
        assert stored.shape == (3, times, rows, cols, DIM)
        assert close(stored, seen.sites[site][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINT)
def test_distances_of_a_store_are_those_of_the_librarys_attention(
    name: str, tmp_path: Path
) -> None:
    """`extract`, then `attn-dist`, of a saved model: distances in space and in time and the share
    within the frame, from the library's own maps of the stored pixels, by hand."""
    times, rows, cols = CLASSES[name][1]
    pictures = np.random.default_rng(0).integers(0, 256, (3, 7, SIDE, SIDE, 3), np.uint8)
    for i in range(3):
        write_frames(tmp_path / "clips" / f"c{i}", list(pictures[i]))
    library = library_model(name, "eager")
    library.save_pretrained(tmp_path / "model")
    processor = {
        "VideoMAEModel": "VideoMAEImageProcessor",
        "VJEPA2Model": "VJEPA2VideoProcessor",
    }
    sizes = {
        "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
    }
    kind = getattr(transformers, processor.get(name, "VivitImageProcessor"))
    kind(**sizes).save_pretrained(tmp_path / "model")
    path = tmp_path / "s.zarr"
    words = (
        "--data",
        tmp_path / "clips",
        "--sites",
        "blocks.0.out",
        "--inputs",
        "-o",
        path,
    )
    extracted(f"transformers:{tmp_path / 'model'}", *words)
    store = open_store(path)
    pixels = torch.from_numpy(np.asarray(store.array("input")[:]))
    given = normalise(pixels, store.manifest.transform, "cpu")
    more = {"skip_predictor": True} if name == "VJEPA2Model" else {}
    with torch.inference_mode():
        maps = library(given, output_attentions=True, **more).attentions
    t, y, x = (place.ravel() for place in np.indices((times, rows, cols)))
    far = {
        "distance_px": SIDE / rows * np.hypot(y[:, None] - y, x[:, None] - x),
        "distance_frames": 2.0 * np.abs(t[:, None] - t),
        "frame_mass": (t[:, None] == t).astype(float),
    }
    table = attn_dist.run(store).frame
    for block, attention in enumerate(maps):
        a = attention.double().numpy()[:, :, -len(t) :, -len(t) :]
        a = a / a.sum(-1, keepdims=True)
        for metric, distance in far.items():
            found = table.filter(site=f"blocks.{block}", metric=metric).sort("head")[
                "value"
            ]
            mine = (a * distance).sum(-1).mean((0, 2))
            assert found.to_list() == pytest.approx(mine.tolist(), rel=1e-4)


@pytest.mark.slow
def test_sites_without_values_are_those_of_the_trial() -> None:
    """From shapes alone: the same sites, layouts and attention as the proven table has."""
    for name in CLASSES:
        model = adapted(name)
        proven = site_table(model)
        empty = copy.deepcopy(model.module).to("meta")
        found = sketch(empty, model.input_size)
        assert [(s.name, s.layout) for s in found.sites] == [
            (s.name, s.layout) for s in proven.sites
        ]
        assert found.attention == proven.attention
        with pytest.raises(ModelError, match="for values to show"):
            sketch(empty, model.input_size, allow_ambiguous_axes=False)
