"""`vitsee.Monitor`: measures a model while it is trained, as it is in memory.

The training goes on as if nothing had happened: a copy of the model is measured, in a context
that restores what measuring may change in the process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitsee_core.extraction.keywords import check_options, load_module
from vitsee_core.extraction.options import OptionError
from vitsee_core.extraction.outcome import Interrupted
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.selfcheck import NotFinite
from vitsee_core.tables.results import Table
from vitsee_core.training.measurements import FIRST, PREVIOUS, measurements, scalars
from vitsee_core.training.module_copy import cpu_copy, preserve_rng_and_modes, unwrapped
from vitsee_core.training.series import (
    DIVERGED,
    FAILED,
    SKIPPED,
    TABLES,
    Series,
    without_remarks,
)
from vitsee_stores.errors import VitseeError

log = logging.getLogger(__name__)
Log = Callable[[str, float, int], object]

# Without labels, without a second store, and fast.
DEFAULT_ANALYSES = ("attn-dist", "normratio", "spectrum")


def _to_stderr(line: str) -> None:
    """Write a line to stderr as it is at the call, which notebooks and tests replace."""
    sys.stderr.write(f"{line}\n")


class Monitor:
    """Measures a model every N steps of its training, on images that stay the same. Experimental.

        monitor = vitsee.Monitor(model, "photos", "run.zarrs", every=1000, images=512,
                                 analyses=["attn-dist", "spectrum", "cka:first"], most=0.02)
        for step, batch in enumerate(loader):
            ...  # forward, backward, optimizer.step()
            monitor(step)

    A copy of the model is measured, in evaluation mode and float32, outside of autocast. The
    training goes on to the same weights, bit for bit, as without the monitor: mode, gradients,
    buffers, hooks, random states and signal handlers are as before.

    `run.zarrs/results/` gets a table for each analysis, as its command writes it, with the
    step as first column. `run.zarrs/steps.csv` gets a row for each step: whether it was
    measured, diverged, failed or was skipped, and how long it took.

    Args:
        model: the torch module that is trained, or its moving average. If it is wrapped
            (torch.compile, DistributedDataParallel, `AveragedModel`), the module below is
            measured. Under torch.distributed the first process measures, and the others do
            nothing.
        data: images, as for `vitsee extract --data`.
        output: folder to fill.
        every: number of steps, or of epochs, between two measurements.
        analyses: names of commands, or name -> keywords of the analysis. `cka:first` compares
            every step with the first one, `cka:previous` with the one before.
        transform: how images are prepared, as for `vitsee.extract`; timm's modules need none.
        name: name of the model in tables.
        unit: what the calls count, "step" or "epoch": the first column of the tables.
        train: images of the same classes, which `knn` and `probe` learn from.
        train_images: number of images of `train` to use; None for all.
        keep: "tables" removes a step's store once its results are written, except stores that
            others are compared with; "stores" keeps all.
        most: largest share of the training time that measuring may take, such as 0.02. A step
            that would exceed it is skipped; the first is always measured.
        log: function of a logger, called with name, value and step for every number: the mean
            over heads and classes for each metric and site.
        resume: whether to go on in a folder that has steps, after a restart. Rows from the
            first step that is measured on are replaced.
        say: receives a line for each step; by default it goes to stderr.
        options: keywords of `vitsee.extract`: images, sites, tokens, device, batch_size, ...
            By default the copy runs on the model's device, and one thread loads images.

    Raises:
        OptionError: an unknown analysis or keyword, or values that do not go together.
        VitseeError: the folder has steps and `resume` is False, or something else.

    Examples:
        >>> import vitsee
        >>> import timm, torch
        >>> model = timm.create_model("test_vit", img_size=32, patch_size=8, num_classes=10)
        >>> prepare = {"input_size": (3, 32, 32), "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
        >>> monitor = vitsee.Monitor(
        ...     model,
        ...     "demo:test",
        ...     "run.zarrs",
        ...     every=5,
        ...     images=20,
        ...     transform=prepare,
        ...     analyses=["spectrum"],
        ...     say=lambda line: None,
        ... )
        >>> for step in range(6):  # in a training: after optimizer.step()
        ...     tables = monitor(step)
        >>> sorted(set(vitsee.Table.read("run.zarrs/results/spectrum.csv")["step"].tolist()))
        [0, 5]
    """

    def __init__(
        self,
        model: nn.Module,
        data: str | os.PathLike[str],
        output: str | os.PathLike[str],
        *,
        every: int,
        analyses: Sequence[str] | Mapping[str, Mapping[str, Any]] = DEFAULT_ANALYSES,
        transform: Any = None,
        name: str = "model",
        unit: str = "step",
        train: str | os.PathLike[str] | None = None,
        train_images: int | None = None,
        keep: str = TABLES,
        most: float | None = None,
        log: Log | None = None,
        resume: bool = False,
        say: Callable[[str], object] = _to_stderr,
        **options: Any,
    ) -> None:
        if type(every) is not int or every < 1:
            raise OptionError(f"every is {every!r}; expected a whole number above 0")
        if most is not None and not 0 < most <= 1:
            raise OptionError(f"most is {most!r}; expected a share above 0, at most 1")
        self.model = model
        self.every = every
        self.unit = unit
        self.most = most
        self._transform = transform
        self._log = log
        self._say = say
        self._begun: float | None = None
        self.seconds = 0.0
        self._latest = 0.0  # seconds of the latest measurement
        self._n_measured = 0
        self._step: int | None = None
        self._series: Series | None = None
        distributed = torch.distributed
        is_distributed = distributed.is_available() and distributed.is_initialized()
        # Other processes have no series, and their calls return at once.
        if not is_distributed or distributed.get_rank() == 0:
            check_options(options)
            self._series = Series(
                Path(output),
                os.fspath(data),
                measurements(analyses, (FIRST, PREVIOUS), with_train=train is not None),
                name=name,
                unit=unit,
                train=None if train is None else os.fspath(train),
                train_images=train_images,
                keep=keep,
                resume=resume,
                # No worker processes beside those of the training.
                options={"workers": 0, **options},
            )

    @property
    def trained_seconds(self) -> float:
        """Seconds since the first call, without those of measuring."""
        if self._begun is None:
            return 0.0
        return time.perf_counter() - self._begun - self.seconds

    @property
    def share(self) -> float:
        """Measuring time as a share of the training time; infinite before any training."""
        trained = self.trained_seconds
        if trained > 0:
            return self.seconds / trained
        return float("inf")

    def __call__(self, step: int, *, now: bool = False) -> dict[str, Table] | None:
        """Measure the model if `step` is a multiple of the interval.

        Args:
            step: number of this step, or epoch.
            now: whether to measure in any case, as after the last step.

        Returns:
            The tables of this step by analysis; None if nothing was measured.

        Raises:
            VitseeError: the first measurement failed. Later failures are rows of the record, and
                the training goes on.
        """
        if (
            self._series is None
            or step == self._step
            or not (now or step % self.every == 0)
        ):
            return None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # Queued training steps would count as measuring otherwise.
            torch.cuda.synchronize()
        if self._begun is None:
            self._begun = time.perf_counter()
        # Set before measuring: a second call with this step does nothing, even after an error.
        self._step = step
        if not now and self._would_exceed(step):
            return None
        start = time.perf_counter()
        tables: dict[str, Table] | None = None
        try:
            with preserve_rng_and_modes(), without_remarks(self._n_measured > 0):
                tables = self._measure_step(self._series, step, start)
        finally:
            self._latest = time.perf_counter() - start
            self.seconds += self._latest
            self._n_measured += 1
        if tables is not None:
            self._say(
                f"{self.unit} {step}: measured in {self._latest:.1f} s; {self._cost()}"
            )
            self._send(tables, step)
        return tables

    def _measure_step(
        self, series: Series, step: int, start: float
    ) -> dict[str, Table] | None:
        """Measure the model as it is now.

        Args:
            series: the steps.
            step: number of this step.
            start: when the measurement began, by `time.perf_counter`.

        Returns:
            The tables by analysis; None if the step diverged or failed, which is recorded.
        """
        if self._n_measured == 0:
            # After a restart the training repeats the steps since its last checkpoint.
            dropped = series.drop_from(step)
            if dropped:
                steps = str(dropped[0])
                if len(dropped) > 1:
                    steps = f"{dropped[0]} to {dropped[-1]}"
                self._say(
                    f"{self.unit} {steps} of the training before the restart: measured "
                    "anew"
                )

        def cells() -> dict[str, Any]:
            """Return the cells of the record about the cost until this call."""
            return self._cost_cells(time.perf_counter() - start)

        try:
            model = self._copy_model(series)
            tables, failed = series.measure(model, step, cells=cells)
        except NotFinite as error:
            series.record(step, DIVERGED, str(error), **cells())
            self._say(f"{self.unit} {step}: diverged: {error}")
            self._send({}, step)
            return None
        except Interrupted as error:
            series.record(step, FAILED, str(error), **cells())
            # The extraction caught the signal, which is meant for the training's handler.
            signal.raise_signal(signal.Signals[error.signal_name])
            return None
        except Exception as error:
            # A failure at the first step is a mistake of the user, later ones must not end
            # the training.
            if self._n_measured == 0:
                raise
            log.debug("measuring failed", exc_info=True)
            text = str(error)
            if not isinstance(error, VitseeError):
                text = f"{type(error).__name__}: {error}"
            series.record(step, FAILED, text, **cells())
            self._say(f"{self.unit} {step}: not measured: {text}")
            return None
        # An analysis that fails at the first step fails at all: the user is told at once.
        for stem, why in failed.items():
            if self._n_measured == 0:
                raise VitseeError(f"{stem}: {why}")
            self._say(f"{self.unit} {step}: {stem} failed: {why}")
        return tables

    def _copy_model(self, series: Series) -> LoadedModel:
        """Return a copy of the model as it is now, for the device that it is measured on."""
        module = unwrapped(self.model)
        # A module without parameters is measured on the CPU.
        device = next((str(p.device) for p in module.parameters()), "cpu")
        series.options.setdefault("device", device)
        values = check_options(series.options)
        return load_module(
            cpu_copy(module), self._transform, series.name, values, copied=True
        )

    def _would_exceed(self, step: int) -> bool:
        """Return whether measuring would take more than `most` of the training time.

        If so the step is recorded as skipped.
        """
        if self.most is None or self._n_measured == 0:
            return False
        # The next measurement is taken to last as long as the latest one.
        expected = self.seconds + self._latest
        trained = self.trained_seconds
        if expected <= self.most * trained:
            return False
        percent = "all"
        if trained > 0:
            percent = f"{100 * expected / trained:.1f} %"
        note = (
            f"would bring measuring to {percent} of the training time, "
            f"most is {self.most:g}"
        )
        assert self._series is not None
        self._series.record(step, SKIPPED, note, **self._cost_cells(0.0))
        self._say(f"{self.unit} {step}: skipped: {note}")
        return True

    def _cost_cells(self, spent: float) -> dict[str, float]:
        """Return the cost until now as cells of the record.

        Args:
            spent: seconds of the measurement that still runs.
        """
        trained = self.trained_seconds - spent
        share = float("nan")  # before the first step nothing was trained
        if self._n_measured:
            share = (self.seconds + spent) / trained
        return {
            "seconds": round(spent, 3),
            "training_seconds": round(trained, 3),
            "share": round(share, 6),
        }

    def _cost(self) -> str:
        """Describe the cost of measuring until now."""
        total = f"{self.seconds:.1f} s of measuring"
        if self._n_measured == 1:
            return f"{total} before any training"
        percent = f"{100 * self.share:.2g} %"
        return f"{total}, {percent} of {self.trained_seconds:,.1f} s of training"

    def _send(self, tables: Mapping[str, Table], step: int) -> None:
        """Give the numbers of a step to the logger; `diverged` is 1 for a step without any."""
        if self._log is None:
            return
        for stem, table in tables.items():
            for name, value in scalars(stem, table).items():
                self._log(name, value, step)
        self._log("diverged", 0.0 if tables else 1.0, step)
        self._log("monitor_share", self.share, step)
