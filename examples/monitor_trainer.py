"""A model measured while transformers' Trainer trains it.

    monitor = MonitorCallback("photos", "run.zarrs", every=1000, images=512, most=0.02,
                              transform={"input_size": (3, 224, 224), "mean": (0.5, 0.5, 0.5),
                                         "std": (0.5, 0.5, 0.5)})
    Trainer(model, args, train_dataset=..., callbacks=[monitor]).train()

Measured are the steps before the first, every N, and the last.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

import vitsee


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """`vitsee.Monitor` of the model that the Trainer trains.

    Args:
        data, output, every, options: as of `vitsee.Monitor`. A Trainer that goes on from a
            checkpoint goes on in the same folder.
    """

    def __init__(self, data: str, output: str, *, every: int, **options: Any) -> None:
        self.given = {"data": data, "output": output, "every": every, **options}
        self.monitor: vitsee.Monitor | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl,
                       model: nn.Module, **_: Any) -> None:  # fmt: skip
        self.monitor = vitsee.Monitor(model, resume=state.global_step > 0, **self.given)
        self.monitor(state.global_step, now=True)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl,
                    **_: Any) -> None:  # fmt: skip
        assert self.monitor is not None
        self.monitor(state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl,
                     **_: Any) -> None:  # fmt: skip
        assert self.monitor is not None
        self.monitor(state.global_step, now=True)
