"""The callbacks in examples/: driven by transformers' own handler of callbacks, and by Lightning's
hooks in the order that its Trainer calls them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.extractions import plant_images
from vitsee_core.tables.results import Table

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
INPUT: dict[str, Any] = {"input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3}
GIVEN: dict[str, Any] = {
    "transform": INPUT,
    "analyses": ["attn-dist"],
    "say": lambda line: None,
}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return plant_images(tmp_path / "photos", 6)


def steps(output: Path, unit: str = "step") -> list[int]:
    found: list[int] = Table.read(output / "steps.csv")[unit].tolist()
    return found


@pytest.mark.slow
def test_transformers_trainer(photos: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.trainer_callback import (
        CallbackHandler,
        TrainerControl,
        TrainerState,
    )

    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=64, num_labels=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config)
    kind = runpy.run_path(str(EXAMPLES / "monitor_trainer.py"))["MonitorCallback"]

    def trained(first: int, last: int) -> None:
        callback = kind(str(photos), str(tmp_path / "run"), every=2, **GIVEN)
        handler: Any = CallbackHandler([callback], model, None, None, None)  # type: ignore[no-untyped-call]
        state, control = TrainerState(global_step=first), TrainerControl()
        args = SimpleNamespace()
        handler.on_train_begin(args, state, control)
        for state.global_step in range(first + 1, last + 1):
            handler.on_step_end(args, state, control)
        handler.on_train_end(args, state, control)

    trained(0, 5)
    assert steps(tmp_path / "run") == [0, 2, 4, 5]
    assert Table.read(tmp_path / "run/results/attn-dist.csv")["value"].min() > 0
    trained(4, 7)  # from the checkpoint of step 4
    assert steps(tmp_path / "run") == [0, 2, 4, 6, 7]


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the package: its class of callbacks, which has nothing of its own that these
    hooks use."""
    package, pytorch = ModuleType("lightning"), ModuleType("lightning.pytorch")
    pytorch.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    package.pytorch = pytorch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", pytorch)


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "expected"), [(False, [0, 2, 4, 6]), (True, [0, 2])])
def test_lightning(
    photos: Path, tmp_path: Path, lightning: None, epochs: bool, expected: list[int]
) -> None:
    """Three epochs of four batches, two of which make a step."""
    import timm

    kind = runpy.run_path(str(EXAMPLES / "monitor_lightning.py"))["MonitorCallback"]
    logged: list[tuple[int, dict[str, float]]] = []
    logger = SimpleNamespace(
        log_metrics=lambda metrics, step: logged.append((step, metrics))
    )
    trainer = SimpleNamespace(global_step=0, current_epoch=0, logger=logger)
    model = timm.create_model("test_vit", img_size=16, patch_size=8)
    module = SimpleNamespace(model=model)
    callback = kind(str(photos), str(tmp_path / "run"), every=2, epochs=epochs, **GIVEN)
    callback.on_train_start(trainer, module)
    for trainer.current_epoch in range(3):
        for batch in range(4):
            trainer.global_step += batch % 2
            callback.on_train_batch_end(trainer, module, None, None, batch)
        callback.on_train_epoch_end(trainer, module)
    assert steps(tmp_path / "run", "epoch" if epochs else "step") == expected
    assert [step for step, metrics in logged if "diverged" in metrics] == expected
    assert any(
        name.startswith("attn-dist/distance_px/blocks.0") for _, m in logged for name in m
    )
