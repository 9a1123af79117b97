"""`vitsee.Monitor`: measures a model while it is trained, as it is in memory.

The training goes on as if nothing had happened: a copy of the model is measured, in a context
that restores what measuring may change in the process.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitsee_core.extraction.keywords import check_options, load_module
from vitsee_core.extraction.options import OptionError
from vitsee_core.extraction.outcome import Interrupted
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.selfcheck import NotFinite
from vitsee_core.tables.results import Table
from vitsee_core.training.series import (
    DIVERGED,
    FAILED,
    FIRST,
    PREVIOUS,
    SKIPPED,
    TABLES,
    Series,
    measurements,
    scalars,
    without_remarks,
)
from vitsee_stores.errors import VitseeError

log = logging.getLogger(__name__)
Log = Callable[[str, float, int], object]

DEFAULT_ANALYSES = ("attn-dist", "normratio", "spectrum")
# The attributes of a module that hold hooks, by their keys.
HOOKS = {key for key in vars(nn.Module()) if "_hooks" in key}
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def _to_stderr(line: str) -> None:
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
            torch.cuda.synchronize()  # queued training steps would count as measuring otherwise
        if self._begun is None:
            self._begun = time.perf_counter()
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
        for stem, why in failed.items():
            if self._n_measured == 0:
                raise VitseeError(f"{stem}: {why}")
            self._say(f"{self.unit} {step}: {stem} failed: {why}")
        return tables

    def _copy_model(self, series: Series) -> LoadedModel:
        """Return a copy of the model as it is now, for the device that it is measured on."""
        module = unwrapped(self.model)
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
        expected = self.seconds + self._latest
        trained = self.trained_seconds
        if expected <= self.most * trained:
            return False
        percent = "all"
        if trained > 0:
            percent = f"{100 * expected / trained:.1f} %"
        note = f"would bring measuring to {percent} of the training time, most is {self.most:g}"
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
        return f"{total}, {100 * self.share:.2g} % of {self.trained_seconds:,.1f} s of training"

    def _send(self, tables: Mapping[str, Table], step: int) -> None:
        """Give the numbers of a step to the logger; `diverged` is 1 for a step without any."""
        if self._log is None:
            return
        for stem, table in tables.items():
            for name, value in scalars(stem, table).items():
                self._log(name, value, step)
        self._log("diverged", 0.0 if tables else 1.0, step)
        self._log("monitor_share", self.share, step)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of wrappers.

    Wrappers are torch.compile, DistributedDataParallel, DataParallel, and the moving averages
    of torch and timm.

    Raises:
        ModelError: its parameters are sharded over processes.
    """
    from timm.utils.model_ema import ModelEma, ModelEmaV2, ModelEmaV3
    from torch.optim.swa_utils import AveragedModel

    while True:
        if "_orig_mod" in module._modules:
            module = module.get_submodule("_orig_mod")
        elif isinstance(module, (*WRAPPERS, AveragedModel, ModelEmaV2, ModelEmaV3)):
            module = module.get_submodule("module")
        elif isinstance(module, ModelEma):
            module = module.ema
        else:
            break
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "full_tensor") or hasattr(parameter, "_sharded_size"):
            raise ModelError(
                f"{name} is sharded over processes (FSDP), and one of them cannot "
                "measure the model; expected a module with whole parameters, as under "
                "DistributedDataParallel"
            )
    return module


def cpu_copy(module: nn.Module) -> nn.Module:
    """Copy a module to the CPU, without gradients, hooks and compiled calls.

    Parameters and buffers are copied. The module itself is only read, and no memory of its
    GPU is taken. Hooks of torch (weight norm, spectral norm, pruning) compute weights and are
    kept.

    Raises:
        ModelError: the module cannot be copied, or a function replaces a `forward`: the copy
            might run the module itself.
    """
    # What `deepcopy` shall use in place of an object, by the object's id.
    memo: dict[int, Any] = {}

    def copy_tensor(tensor: torch.Tensor) -> None:
        """Copy a tensor to the CPU, cut off from its graph, into the memo."""
        copied = tensor.detach().to("cpu", copy=True)
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, copied.is_floating_point())
        memo[id(tensor)] = copied

    forwards: list[tuple[str, str]] = []  # (module, attribute with its forward)
    for name, child in module.named_modules():
        if "_orig_mod" in child._modules:
            continue
        for value in (
            *child._parameters.values(),
            *child._buffers.values(),
            *vars(child).values(),
        ):
            if isinstance(value, torch.Tensor):
                copy_tensor(value)
        for key, hooks in vars(child).items():
            if key in HOOKS and hooks:
                memo[id(hooks)] = OrderedDict(
                    (hook_id, hook)
                    for hook_id, hook in hooks.items()
                    if type(hook).__module__.startswith("torch.nn.utils.")
                )
        if "forward" in vars(child):
            forwards.append((name.replace("._orig_mod", ""), _plain_forward(name, child)))
    try:
        # A compiled module is replaced by a copy of the module below it, the innermost first.
        for child in reversed(list(module.modules())):
            if "_orig_mod" in child._modules:
                memo[id(child)] = copy.deepcopy(child.get_submodule("_orig_mod"), memo)
        copied = copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        kind = type(module).__name__
        raise ModelError(
            f"{kind} cannot be copied: {str(error).splitlines()[0]}"
        ) from error
    for name, key in forwards:
        child = copied.get_submodule(name)
        child.forward = vars(child).pop(key)
    return copied


def _plain_forward(name: str, module: nn.Module) -> str:
    """Return the attribute that holds the `forward` of a module whose instance has one.

    accelerate puts autocast around `forward` and keeps the plain one under another name, which
    is returned then.

    Raises:
        ModelError: it is not a method, so that the copy would share it.
    """
    key = "_original_forward" if "_original_forward" in vars(module) else "forward"
    if getattr(vars(module)[key], "__self__", None) is not module:
        raise ModelError(
            f"forward of {name or 'the model'} is replaced by a function, and a copy of "
            "the model would run it on the model itself; expected a method "
            "(types.MethodType)"
        )
    return key


@contextmanager
def preserve_rng_and_modes() -> Iterator[None]:
    """Context with autocast off, gradients on and float32 as the default type.

    At its end the process is as before: random states (Python, NumPy, torch on the CPU and on
    GPUs), default type and device, torch's number of threads, and filters of warnings.
    """
    gpus = torch.cuda.is_available() and torch.cuda.is_initialized()
    python = random.getstate()
    numpy = np.random.get_state()
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if gpus else []
    dtype = torch.get_default_dtype()
    n_threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda") if gpus else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            if torch.get_num_threads() != n_threads:
                torch.set_num_threads(n_threads)
            if gpus:
                torch.cuda.set_rng_state_all(cuda)
            torch.set_rng_state(cpu)
            np.random.set_state(numpy)
            random.setstate(python)
