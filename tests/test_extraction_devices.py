"""What only happens beside a GPU: memory that runs out, first passes that take long, halves."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.extractions import plant_images
from tests.models_helpers import images, small
from vitsee_core.extraction import outcome
from vitsee_core.extraction.erf import ErfPasses
from vitsee_core.extraction.loop import _batch_fits
from vitsee_core.extraction.options import (
    DataOptions,
    KeepOptions,
    ModelOptions,
    Request,
    RunOptions,
)
from vitsee_core.extraction.outcome import Clock, Outcome
from vitsee_core.extraction.run import extract
from vitsee_core.extraction.sharding import Shard
from vitsee_core.extraction.slab import check_peaks
from vitsee_core.models.selfcheck import NotFinite
from vitsee_core.models.site_tables import site_table
from vitsee_core.runtime.machine import is_out_of_memory
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import SiteSpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (
            RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
            True,
        ),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"
            ),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("derivative for aten::_fused is not implemented"), False),
    ],
)
def test_the_ways_of_being_out_of_memory(error: BaseException, told: bool) -> None:
    assert is_out_of_memory(error) == told


def passes_of_a_vit() -> tuple[ErfPasses, Tensor]:
    model = small("test_vit", (32, 48), patch_size=8)
    table = site_table(model)
    return ErfPasses(model, table, [table["blocks.0.out"]], CPU), images(model, 2)


def test_no_memory_for_a_field_is_not_the_models_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes, x = passes_of_a_vit()
    tried = []

    def full(*args: Any, **kwargs: Any) -> Any:
        tried.append(args)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.autograd, "grad", full)
    with pytest.raises(torch.OutOfMemoryError):
        passes.probe(x)
    assert len(tried) == 1 and not passes.plain_attention  # which would take more memory


def test_the_cost_of_fields_leaves_out_what_the_first_pass_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes, x = passes_of_a_vit()
    fields, clock = passes.fields, [0.0]
    calls: list[int] = []

    def slow_at_first(pixels: Tensor) -> Any:
        clock[0] += 0.5 if calls else 100.0
        calls.append(len(pixels))
        return fields(pixels)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(passes, "fields", slow_at_first)
    assert passes.probe(x).seconds == 50.0  # of one image
    calls.clear()
    passes._device = CUDA
    assert passes.probe(x).seconds == 0.25
    assert calls == [2, 2]


def test_an_output_that_is_not_finite_names_what_else_to_try() -> None:
    sites = [SiteSpec("embed", "", None, (), "rows", 4, (2, 4), None, 0, 0.0)]
    peaks = {"embed": torch.tensor(float("inf"))}
    with pytest.raises(NotFinite, match="try --precision bf16 or fp32"):
        check_peaks(peaks, sites, "images 0 to 3", {"embed"}, precision="fp16")
    with pytest.raises(NotFinite, match=r"the model's own output is broken$"):
        check_peaks(peaks, sites, "images 0 to 3", {"embed"}, precision="bf16")


def test_what_a_run_waits_for() -> None:
    clock = Clock()
    clock.add("model", 3.0)
    clock.add("reductions", 1.5)
    clock.add("loading", 4.0)
    clock.add("writing", 9.0)  # beside the model
    assert clock.limit() == "the model and its summaries"
    clock.add("loading", 1.0)
    assert clock.limit().startswith("loading (")
    clock.add("waiting for the writer", 6.0)
    assert clock.limit().startswith("writing")


def test_each_moment_is_in_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: a clock that shows 0, 1, 3, 6, 10, 15, ... when it is looked at."""
    looks = itertools.accumulate(itertools.count())
    own = SimpleNamespace(perf_counter=lambda: float(next(looks)))
    monkeypatch.setattr(outcome, "time", own)
    clock = Clock()
    with clock("the rest"):  # 0
        with clock("model"):  # 1
            with clock("reductions"), clock("grams"):  # 3, 6
                pass  # 10, 15
            with pytest.raises(ValueError), clock("reductions"):  # 21
                raise ValueError  # 28
        # 36
        thread = threading.Thread(target=_timed, args=(clock, "writing"))
        thread.start()  # 45, 55
        thread.join()
    # 66
    assert clock.seconds == {
        "the rest": (1 - 0) + (66 - 36),
        "model": (3 - 1) + (21 - 15) + (36 - 28),
        "reductions": (6 - 3) + (15 - 10) + (28 - 21),
        "grams": 10 - 6,
    }
    assert sum(clock.seconds.values()) == 66
    assert clock.beside == {"writing": 55 - 45}


def _timed(clock: Clock, stage: str) -> None:
    with clock(stage):
        pass


@pytest.mark.slow
def test_stages_of_an_extraction_add_up(tmp_path: Path) -> None:
    data = DataOptions(str(plant_images(tmp_path / "images", 4)))
    model, run = ModelOptions("test_vit", random_init=0), RunOptions(tmp_path / "s.zarr")
    outcome = extract(Request(model, data, KeepOptions(slab=2), run), Shard())
    stages = {"loading", "model", "reductions", "waiting for the writer", "setting up"}
    assert set(outcome.clock) == stages and set(outcome.beside) == {"writing"}
    # What is outside is the end of the progress bar.
    assert 0.5 * outcome.seconds < sum(outcome.clock.values()) <= outcome.seconds
    assert outcome.stages().partition("; beside these ")[2].startswith("writing ")


def test_stages_in_words() -> None:
    one = Outcome(True, 4, 0, 3.0, {"model": 2.0, "the rest": 1.0}, {"writing": 0.5})
    assert one.stages() == "model 2.0 s, the rest 1.0 s; beside these writing 0.5 s"
    one.add(Outcome(True, 4, 0, 3.0, {"model": 3.0}, {"writing": 1.0}))
    one.seconds = 3.5  # of two workers at once
    assert one.stages() == (
        "all workers together: model 5.0 s, the rest 1.0 s; beside these writing 1.5 s"
    )


def test_too_large_a_batch_is_said_with_one_to_try() -> None:
    with (
        pytest.raises(
            VitseeError, match=r"^out of memory on cuda with 64 images at once; try --ba"
        ),
        _batch_fits(64, CUDA),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(VitseeError, match=r"with 1 image at once$"), _batch_fits(1, CUDA):
        raise MemoryError
    with pytest.raises(RuntimeError, match="shapes"), _batch_fits(64, CUDA):
        raise RuntimeError("shapes do not fit")
