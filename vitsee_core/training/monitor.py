"""`vitsee.Monitor`: measures a model while it is trained, as it is in memory. The training goes on
as if nothing had happened: what is measured is a copy of the model, in a context that restores what
measuring may change in the process."""

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

from vitsee_core.extraction.keywords import check_options, loaded
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

    What is measured is a copy in evaluation mode and float32, outside of autocast. The training
    goes on to the same weights, bit for bit, as without the monitor: mode, gradients, buffers,
    hooks, random states and signal handlers are as before. `run.zarrs/results/` gets a table per
    analysis, as its command writes it with the step as first column; `run.zarrs/steps.csv` a row
    per step: what was measured, what diverged, failed or was skipped, and what it cost.

    Args:
        model: the torch module that is trained, or its moving average. Of one that is wrapped
            (torch.compile, DistributedDataParallel, `AveragedModel`) the module below is measured.
            Under torch.distributed the first process measures, and the others do nothing.
        data: the images, as for `vitsee extract --data`.
        output: the folder to fill.
        every: the interval, in what the calls count: steps or epochs.
        analyses: names of commands, or name -> the analysis' keywords. `cka:first` compares every
            step with the first one, `cka:previous` with the one before.
        transform: how images are prepared, as for `vitsee.extract`; timm's modules need none.
        name: of the model, in tables.
        unit: what the calls count: the first column of the tables.
        train: images of the same classes, which `knn` and `probe` learn from; train_images: how
            many of them.
        keep: "tables" removes a step's store once its results are there, but for those that
            others are compared with; "stores" keeps all.
        most: the largest share of the training time that measuring may take, such as 0.02: a step
            that would exceed it is skipped. The first is always measured.
        log: a logger's function, called with name, value and step for every number: the mean over
            heads and classes for each metric and site.
        resume: go on in a folder that has steps, after a restart; rows from the first step that is
            measured on are replaced.
        say: receives a line for each step; by default it goes to stderr.
        options: of `vitsee.extract`: images, sites, tokens, device, batch_size, ...; by default
            on the model's device, with images loaded by one thread.

    Raises:
        OptionError: an unknown analysis or keyword, or values that do not go together.
        VitseeError: the folder cannot be used; see `Series`.
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
        several = distributed.is_available() and distributed.is_initialized()
        if not several or distributed.get_rank() == 0:
            check_options(options)
            chosen = measurements(
                analyses, (FIRST, PREVIOUS), with_train=train is not None
            )
            self._series = Series(
                Path(output),
                os.fspath(data),
                chosen,
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
        """Time since the first call, without that of measuring."""
        if self._begun is None:
            return 0.0
        return time.perf_counter() - self._begun - self.seconds

    @property
    def share(self) -> float:
        """Measuring time as a share of the training time; infinite before any training."""
        trained = self.trained_seconds
        return self.seconds / trained if trained > 0 else float("inf")

    def __call__(self, step: int, *, now: bool = False) -> dict[str, Table] | None:
        """Measure the model if `step` is a multiple of the interval.

        Args:
            step: the number of this step, or epoch.
            now: measure in any case, as after the last step.

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
                tables = self._measured(self._series, step, start)
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

    def _measured(
        self, series: Series, step: int, start: float
    ) -> dict[str, Table] | None:
        """The tables of a step; None if it diverged or failed, which the record says."""
        if self._n_measured == 0 and (gone := series.drop_from(step)):
            again = f"{gone[0]} to {gone[-1]}" if len(gone) > 1 else str(gone[0])
            self._say(
                f"{self.unit} {again} of the training before the restart: measured anew"
            )

        def cells() -> dict[str, Any]:
            return self._cells(time.perf_counter() - start)

        try:
            tables, failed = series.measure(self._loaded(series), step, cells=cells)
        except NotFinite as error:
            series.record(step, DIVERGED, str(error), **cells())
            self._say(f"{self.unit} {step}: diverged: {error}")
            self._send({}, step)
            return None
        except Interrupted as error:
            series.record(step, FAILED, str(error), **cells())
            signal.raise_signal(
                signal.Signals[error.signal_name]
            )  # for the training's own handler
            return None
        except Exception as error:
            if self._n_measured == 0:
                raise
            log.debug("measuring failed", exc_info=True)
            own = isinstance(error, VitseeError)
            text = str(error) if own else f"{type(error).__name__}: {error}"
            series.record(step, FAILED, text, **cells())
            self._say(f"{self.unit} {step}: not measured: {text}")
            return None
        for stem, why in failed.items():
            if self._n_measured == 0:
                raise VitseeError(f"{stem}: {why}")
            self._say(f"{self.unit} {step}: {stem} failed: {why}")
        return tables

    def _loaded(self, series: Series) -> LoadedModel:
        """The model as it is now, copied; by default it is measured on its own device."""
        module = unwrapped(self.model)
        device = next((str(p.device) for p in module.parameters()), "cpu")
        series.options.setdefault("device", device)
        values = check_options(series.options)
        return loaded(cpu_copy(module), self._transform, series.name, values, copied=True)

    def _would_exceed(self, step: int) -> bool:
        """Whether measuring would take more than `most` of the training time; this is recorded."""
        if self.most is None or self._n_measured == 0:
            return False
        expected = self.seconds + self._latest
        trained = self.trained_seconds
        if expected <= self.most * trained:
            return False
        share = f"{100 * expected / trained:.1f} %" if trained > 0 else "all"
        note = f"would bring measuring to {share} of the training time, most is {self.most:g}"
        assert self._series is not None
        self._series.record(step, SKIPPED, note, **self._cells(0.0))
        self._say(f"{self.unit} {step}: skipped: {note}")
        return True

    def _cells(self, spent: float) -> dict[str, float]:
        """The cost until now, for the record; spent: seconds of a measurement that still runs."""
        trained = self.trained_seconds - spent
        share = (self.seconds + spent) / trained if self._n_measured else float("nan")
        return {
            **{"seconds": round(spent, 3), "training_seconds": round(trained, 3)},
            "share": round(share, 6),
        }

    def _cost(self) -> str:
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
    """The module below torch.compile, DistributedDataParallel, DataParallel and the averages of
    torch and timm. Raises ModelError: its parameters are sharded over processes."""
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
                f"{name} is sharded over processes (FSDP), and one of them cannot measure the "
                "model; expected a module with whole parameters, as under DistributedDataParallel"
            )
    return module


def cpu_copy(module: nn.Module) -> nn.Module:
    """A copy of a module on the CPU, with its parameters and buffers but without gradients, hooks
    and compiled calls. The module itself is only read; on a GPU it takes no memory.

    Hooks that belong to torch (weight norm, spectral norm, pruning) compute weights and are kept.

    Raises:
        ModelError: the module cannot be copied, or a function replaces a `forward`: that of the
            copy might run the module itself.
    """
    memo: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> None:
        """Have this tensor copied to the CPU, cut off from its graph."""
        own = tensor.detach().to("cpu", copy=True)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = (
            nn.Parameter(own, own.is_floating_point()) if is_parameter else own
        )

    forwards: list[tuple[str, str]] = []
    for name, child in module.named_modules():
        if "_orig_mod" in child._modules:
            continue
        for value in (
            *child._parameters.values(),
            *child._buffers.values(),
            *vars(child).values(),
        ):
            if isinstance(value, torch.Tensor):
                keep(value)
        for key, value in vars(child).items():
            if key in HOOKS and value:
                kinds = {k: type(hook).__module__ for k, hook in value.items()}
                kept = [
                    k for k, kind in kinds.items() if kind.startswith("torch.nn.utils.")
                ]
                memo[id(value)] = OrderedDict((k, value[k]) for k in kept)
        if "forward" in vars(child):
            forwards.append((name.replace("._orig_mod", ""), _plain_forward(name, child)))
    try:
        # In place of what is compiled comes a copy of the module below it, the innermost first.
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
    """The attribute with the `forward` that a module runs in its copy: without the autocast that
    accelerate puts around it. Raises ModelError: no method, which the copy would share."""
    key = "_original_forward" if "_original_forward" in vars(module) else "forward"
    if getattr(vars(module)[key], "__self__", None) is not module:
        raise ModelError(
            f"forward of {name or 'the model'} is replaced by a function, and a copy of the model "
            "would run it on the model itself; expected a method (types.MethodType)"
        )
    return key


@contextmanager
def preserve_rng_and_modes() -> Iterator[None]:
    """Context with autocast off, gradients on and float32 as the default type, at whose end the
    process is as before: random state (Python, NumPy, torch on the CPU and on GPUs), default type
    and device, torch's threads, and filters of warnings."""
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
