"""Tensors in a file of weights that are not the model's: counters, copies that lack tensors,
adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.test_models_weights_rule import holds, opened, trained, under, unfit

AVERAGED = {"initted": torch.tensor(True), "step": torch.tensor([4])}
COUNTERS = [
    "initted", "step", "n_averaged", "num_updates", "decay", "iteration", "epoch", "global_step",
    "ema_step", "train_iter",
]  # fmt: skip


def two_copies(first: str, second: str) -> dict[str, Tensor]:
    averaged = {name: x + 1 for name, x in trained().items()}
    return under(first)(trained()) | under(second)(averaged)


def test_a_state_dict_of_ema_pytorch(tmp_path: Path) -> None:
    copies = two_copies("online_model.", "ema_model.")
    whole = copies | AVERAGED
    model = opened(tmp_path, whole)
    assert holds(model, trained()) and model.weights["other_keys"] == ["ema_model"]
    inner = under("ema.")(whole) | under("net.")(trained())
    assert holds(opened(tmp_path, inner), trained())
    only_average = under("ema_model.")(trained()) | AVERAGED
    assert holds(opened(tmp_path, only_average), trained())


@pytest.mark.parametrize("name", COUNTERS)
def test_counters_beside_the_model(name: str, tmp_path: Path) -> None:
    """As a number and as a vector of one; with and without a prefix before the model's names."""
    for content in (trained(), under("module.")(trained())):
        for number in (torch.tensor(3), torch.tensor([0.5])):
            model = opened(tmp_path, {**content, name: number})
            assert holds(model, trained())
            assert model.weights["unexpected"] != []


def test_what_is_not_a_counter(tmp_path: Path) -> None:
    """Two numbers, a number in a layer of the model, and one of another name."""
    others = {
        "step": torch.zeros(2),
        "blocks.0.attn.step": torch.tensor(1),
        "temperature": torch.tensor(1.0),
    }
    for name, x in others.items():
        assert f"left over: 1 ({name})" in unfit(tmp_path, {**trained(), name: x})


def test_a_copy_that_lacks_a_block(tmp_path: Path) -> None:
    averaged = {name: x for name, x in trained().items() if "blocks.1." not in name}
    content = under("a.")(trained()) | under("b.")(averaged)
    text = unfit(tmp_path, content)
    assert text.endswith("; expected one copy of the model: --checkpoint-key a")
    assert holds(opened(tmp_path, content, checkpoint_key="a"), trained())
    for prefix in ("b.", "ema_"):
        text = unfit(tmp_path, trained() | under(prefix)(averaged))
        assert "left over: " in text
        assert text.endswith("one copy of the model: save the state dict of one alone")


def test_an_adapter_is_to_be_merged(tmp_path: Path) -> None:
    layer = "blocks.0.attn.qkv"
    state = trained()
    matrices = {
        f"{layer}.lora_A.default.weight": torch.zeros(2, 24),
        f"{layer}.lora_B.default.weight": torch.zeros(72, 2),
    }
    wrapped = {name.replace(layer, f"{layer}.base_layer"): x for name, x in state.items()}
    alone = {name.replace(".default", ""): x for name, x in matrices.items()}
    for content in (wrapped | matrices, alone):
        text = unfit(tmp_path, under("base_model.model.")(content))
        assert "2 tensors of an adapter (" in text
        assert text.endswith("model.merge_and_unload().state_dict()")
