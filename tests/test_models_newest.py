"""The newest kinds of models, on small stand-ins, against their own code with hooks of one's own:
several views, a diffusion transformer at a timestep, an encoder and its predictor, two decoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import newest_models
from tests.clip_files import write_frames
from tests.extractions import extract, extracted
from tests.models_helpers import captured, images
from tests.newest_models import SIZE, CrossBlock, MultiView
from tests.small_vits import DIM, Embedding
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import model_from_module
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.selfcheck import self_check
from vitsee_core.models.site_tables import site_table
from vitsee_stores import open_store

N_VIEWS, N_CELLS = 3, 16
CAMERAS = tuple(f"camera.{i}" for i in range(N_VIEWS))
REGISTERS = tuple(f"reg{j}.{i}" for j in range(2) for i in range(N_VIEWS))


def of_views(embed: bool = False) -> LoadedModel:
    torch.manual_seed(0)
    return model_from_module(MultiView(embed=embed), SIZE, name="views", frames=N_VIEWS)


def by_kind(x: Tensor, n_scenes: int, n_prefix: int = 3) -> Tensor:
    """(scenes, tokens, dim) of tokens view by view: each kind of prefix token of all views, then
    the cells, by loops."""
    x = x.reshape(n_scenes, N_VIEWS, n_prefix + N_CELLS, -1)
    rows = [x[:, view, kind] for kind in range(n_prefix) for view in range(N_VIEWS)]
    rows += [
        x[:, view, n_prefix + cell] for view in range(N_VIEWS) for cell in range(N_CELLS)
    ]
    return torch.stack(rows, 1)


def watched(
    model: LoadedModel, x: Tensor, names: list[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """What enters and leaves modules, by hooks of one's own."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for name in names:
        child = model.module.get_submodule(name)

        def keep(_: Any, args: Any, output: Tensor, name: str = name) -> None:
            seen[name] = args[0].clone(), output.clone()

        handles.append(child.register_forward_hook(keep))
    with torch.inference_mode():
        model.module(x)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("embed", [False, True])
def test_views_keep_their_cameras_and_registers(embed: bool) -> None:
    model = of_views(embed)
    table, x = site_table(model), images(model, 2)
    names = [f"{kind}_blocks.{i}" for i in range(2) for kind in ("frame", "global")]
    before = 2 if embed else 0
    outs = [site for site in table.sites if site.part == "out"]
    assert [site.name for site in outs[before:]] == [f"{name}.out" for name in names]
    assert [site.depth for site in outs] == list(range(1, before + 5))
    prefix = outs[-1].layout.prefix if outs[-1].layout else ()
    first = tuple(f"class.{i}" for i in range(N_VIEWS)) if embed else CAMERAS
    assert prefix == (*first, *REGISTERS)
    found, seen = captured(model, table, x), watched(model, x, names)
    for name in names:
        entered, left = seen[name]
        assert torch.equal(found.tokens(f"{name}.out"), by_kind(left, 2))
        branch = model.module.get_submodule(name).attention(  # type: ignore[operator]
            model.module.get_submodule(name).before_attention(entered)  # type: ignore[operator]
        )
        skip, stored = found.branches[f"{name}.attn"]
        assert torch.equal(skip, by_kind(entered, 2))
        assert torch.allclose(stored, by_kind(branch, 2), atol=1e-6)
    assert {s.name for s in table.sublayers} >= {
        f"{n}.{s}" for n in names for s in ("attn", "mlp")
    }
    if embed:
        layout = outs[0].layout
        assert layout is not None and layout.prefix == tuple(
            f"class.{i}" for i in range(N_VIEWS)
        )


def test_attention_within_a_view_and_over_all() -> None:
    model = of_views()
    table, x = site_table(model), images(model, 2)
    windows = {block.name: block.window for block in table.attention}
    within = (1, 4, 4)
    assert windows == {
        "frame_blocks.0": within, "global_blocks.0": None,
        "frame_blocks.1": within, "global_blocks.1": None,
    }  # fmt: skip
    found, seen = captured(model, table, x), watched(model, x, list(windows))
    order = (
        by_kind(torch.arange(N_VIEWS * 19).reshape(1, -1, 1).float(), 1).flatten().long()
    )
    for name, window in windows.items():
        block: Any = model.module.get_submodule(name)
        with torch.inference_mode():
            weights = block.probabilities(seen[name][0])
        if window is not None:  # a block on the diagonal for each view
            n = weights.shape[-1]
            whole = torch.zeros(2, weights.shape[1], N_VIEWS * n, N_VIEWS * n)
            for scene in range(2):
                for view in range(N_VIEWS):
                    at = slice(view * n, (view + 1) * n)
                    whole[scene, :, at, at] = weights[scene * N_VIEWS + view]
            weights = whole
        expected = weights[:, :, order][:, :, :, order]
        assert torch.allclose(found.scores[name].softmax(-1), expected, atol=1e-5), name
    assert "attention" not in " ".join(table.left_out)


def test_views_have_no_rollout_and_the_reason_is_true() -> None:
    reason = site_table(of_views()).rollout_refusal
    assert reason == (
        "frame_blocks.0 attends to windows of 1 x 4 x 4 cells; global_blocks.0 attends to all "
        "tokens; rollout is stored where all blocks attend to all tokens"
    )


class ThreeBranches(CrossBlock):
    """x + gate * attention, x + cross attention to a text, x + gate * MLP (PixArt); joins: the
    input is joined with another before (Hunyuan-DiT)."""

    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.randn(2, 1, 1, DIM))
        self.skip_linear = nn.Linear(2 * DIM, DIM) if joins else None

    def forward(self, x: Tensor, text: Tensor) -> Tensor:  # type: ignore[override]
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, x], -1))
        x = x + self.gates[0] * self.attn(self.norm1(x))
        x = x + self.cross_attn(x, text, text, need_weights=False)[0]
        return x + self.gates[1] * self.mlp(self.norm2(x))


class WithText(Embedding):
    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ThreeBranches(joins) for _ in range(2))
        self.text = nn.Parameter(torch.randn(1, 7, DIM))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x, self.text.expand(len(x), -1, -1))
        return self.last(x)


@pytest.mark.parametrize("joins", [False, True])
def test_three_branches_are_left_out_by_name(joins: bool) -> None:
    table = site_table(model_from_module(WithText(joins), SIZE, name="pixart"))
    assert not table.sublayers
    for block in ("blocks.0", "blocks.1"):
        assert table.left_out[f"{block} residual"] == (
            "it adds 3 branches to its stream (attn, cross_attn, mlp), and residual sites are of "
            "blocks that add one or two"
        )


def test_many_views_have_many_prefix_tokens() -> None:
    """Five tokens of eight views are forty, beyond what a single sequence has."""
    torch.manual_seed(0)
    model = model_from_module(MultiView(n_registers=4), SIZE, name="views", frames=8)
    layout = site_table(model)["global_blocks.1.out"].layout
    assert layout is not None and layout.n_prefix == 40 and layout.body == (8, 4, 4)


BUILD = """
import sys
sys.path.insert(0, {root!r})
import torch
from tests import newest_models
from tests.newest_models import *

dependencies = []

def views():
    torch.manual_seed(0)
    return MultiView(), SIZE

def at(timestep=300):
    torch.manual_seed(0)
    return AtTimestep(DiffusionTransformer(), timestep), SIZE

def vjepa_tiny(pretrained=True, **kwargs):
    torch.manual_seed(0)
    return newest_models.VideoEncoder(**kwargs), newest_models.VideoPredictor()

def stereo():
    return newest_models.TwoViews(), SIZE

def stereo_encoder():
    return EncoderAlone(newest_models.TwoViews()), SIZE
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hubconf.py").write_text(
        BUILD.format(root=str(Path(__file__).parents[1]))
    )
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", images=rng.integers(0, 256, (4, 32, 32, 3), np.uint8))
    for scene in range(2):
        frames = rng.integers(0, 256, (4, 32, 32, 3), np.uint8)
        write_frames(tmp_path / "scenes" / str(scene), list(frames))
    return tmp_path


def test_a_store_of_views(folder: Path) -> None:
    place = folder / "s.zarr"
    words = ["--data", folder / "scenes", "--frames", "3", "--sites", "blocks"]
    extracted(f"{folder}/hubconf.py:views", *words, "-o", place)
    store = open_store(place)
    layout = store.plan.sites[-1].layout
    assert layout is not None and layout.prefix == (*CAMERAS, *REGISTERS)
    assert [len(group.blocks) for group in store.plan.attention] == [2, 2]
    assert len(store.plan.sublayers) == 8
    assert store.array("acts/global_blocks.1.out/prefix").shape == (2, 9, 24)


@pytest.mark.parametrize("timestep", [0, 300, 999])
def test_a_diffusion_transformer_at_a_timestep(timestep: int) -> None:
    """Gates are read, the residual sums are exact, and branches are the gate times the layer."""
    torch.manual_seed(0)
    module = newest_models.AtTimestep(newest_models.DiffusionTransformer(), timestep)
    model = model_from_module(module, SIZE, name="dit")
    table, x = site_table(model), images(model, 4)
    assert len(table.sublayers) == 6 and len(table.attention) == 3
    assert table.rollout_refusal is None and not table.remarks
    stored = [site for site in table.sites if site.alias_of is None]
    check = self_check(model, table, x, sites=stored, sublayers=table.sublayers)
    assert check.ok and check.figures["sums"]["max"] == 0
    found = captured(model, table, x)
    names = [
        "model.blocks.1.attn",
        "model.blocks.1.mlp",
        "model.blocks.1.adaLN_modulation",
    ]
    seen = watched(model, x, names)
    gates = seen[names[2]][1].chunk(6, dim=1)
    for name, gate in (("attn", gates[2]), ("mlp", gates[5])):
        branch = gate.unsqueeze(1) * seen[f"model.blocks.1.{name}"][1]
        assert torch.allclose(found.branches[f"blocks.1.{name}"][1], branch, atol=1e-5)


def test_a_hub_entry_of_an_encoder_and_its_predictor(folder: Path) -> None:
    words = [
        "--data",
        folder / "scenes",
        "--frames",
        "4",
        "--img-size",
        "32",
        "--sites",
        "blocks",
    ]
    name = f"torchhub:{folder}:vjepa_tiny"
    refused = extract(name, *words, "-o", folder / "n.zarr")
    assert refused.exit_code == 1 and not (folder / "n.zarr").exists()
    line = " ".join(refused.output.split())
    assert (
        "gives 2 networks: 0 (VideoEncoder), 1 (VideoPredictor); name one of them" in line
    )
    extracted(f"{name}?num_frames=4#0", *words, "-o", folder / "s.zarr")
    store = open_store(folder / "s.zarr")
    layout = store.plan.sites[-1].layout
    assert layout is not None and layout.body == (2, 4, 4) and layout.stride_frames == 2
    assert len(store.plan.sublayers) == 4 and store.plan.rollout
    assert "its predictor" not in line and "masks_x" in " ".join(
        extract(f"{name}#1", *words, "-o", folder / "p.zarr").output.split()
    )


def test_two_decoders_are_refused_in_a_line_and_the_encoder_runs(folder: Path) -> None:
    words = ["--data", folder / "x.npz", "--random-init", "0"]
    refused = extract(f"{folder}/hubconf.py:stereo", *words, "-o", folder / "n.zarr")
    line = " ".join(refused.output.split())
    assert (
        refused.exit_code == 1
        and "missing 1 required positional argument: 'view2'" in line
    )
    assert "expected a module that takes a batch of images alone" in line
    extracted(f"{folder}/hubconf.py:stereo_encoder", *words, "-o", folder / "s.zarr")
    store = open_store(folder / "s.zarr")
    assert len(store.plan.sublayers) == 4 and store.plan.rollout
    pairs = newest_models.Pairs(newest_models.TwoViews())
    model = model_from_module(pairs, SIZE, name="pairs", frames=2)
    with pytest.raises(ModelError, match=r"^no block of the model gives 32 tokens"):
        site_table(model)
