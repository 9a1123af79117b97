"""A model measured while Lightning trains it.

    monitor = MonitorCallback("photos", "run.zarrs", every=1000, images=512, most=0.02)
    Trainer(callbacks=[monitor]).fit(module, loader)

The network is `module.model` unless `network` names another attribute; numbers go to the module's
logger.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning

import vitsee


class MonitorCallback(lightning.Callback):  # type: ignore[misc]
    """`vitsee.Monitor` of a LightningModule's network.

    Args:
        data, output, every, options: as of `vitsee.Monitor`; a training that goes on from a
            checkpoint goes on in the same folder.
        network: the attribute of the LightningModule that is measured, "ema" for an average.
        epochs: count epochs, not optimizer steps.
    """

    def __init__(
        self,
        data: str,
        output: str,
        *,
        every: int,
        network: str = "model",
        epochs: bool = False,
        **options: Any,
    ) -> None:
        self.network, self.epochs = network, epochs
        unit = "epoch" if epochs else "step"
        self.given = {
            "data": data,
            "output": output,
            "every": every,
            "unit": unit,
            **options,
        }
        self.monitor: vitsee.Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def log(name: str, value: float, step: int) -> None:
            if trainer.logger is not None:
                trainer.logger.log_metrics({name: value}, step=step)

        done = trainer.current_epoch if self.epochs else trainer.global_step
        network = getattr(pl_module, self.network)
        self.monitor = vitsee.Monitor(network, resume=done > 0, log=log, **self.given)
        self.monitor(done, now=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert self.monitor is not None
        if not self.epochs:
            # With accumulated gradients several batches make a step, which is measured once.
            self.monitor(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.monitor is not None
        if self.epochs:
            self.monitor(trainer.current_epoch + 1)
