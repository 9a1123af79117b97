"""Products are as precise as they are said to be, whatever is switched on around them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.attention_calls import Call, random_scores
from vitsee_core.analyses.probe.fit import train_linear
from vitsee_core.analyses.probe.options import Training
from vitsee_core.models.selfcheck import SelfCheck, _judge_output
from vitsee_core.runtime.device import current_precision, no_autocast, precision_context
from vitsee_core.summaries import (
    AttentionReducer,
    activations,
    residual_products,
    rollout,
)
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NEW = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # torch 2.9 and later
HALF_SUMS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def switches() -> dict[str, Any]:
    """Everything that decides how float32 is multiplied, by name."""
    matmul, backends = torch.backends.cuda.matmul, torch.backends
    found = {name: getattr(matmul, name) for name in HALF_SUMS}
    if not NEW:
        return {**found, "matmul": matmul.allow_tf32, "conv": backends.cudnn.allow_tf32}
    cuda: Any = backends.cudnn
    cpu: Any = backends.mkldnn
    places = {
        "matmul": matmul,
        "conv": cuda.conv,
        "rnn": cuda.rnn,
        "cpu matmul": cpu.matmul,
        "cpu conv": cpu.conv,
    }
    return found | {name: place.fp32_precision for name, place in places.items()}


def _medium() -> None:
    torch.set_float32_matmul_precision("medium")


def _older() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def _newer() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def _general(value: str = "tf32") -> None:
    backends: Any = torch.backends
    backends.fp32_precision = value


def _as_torch_starts() -> None:
    if NEW:
        _general("none")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


@pytest.fixture(params=[_medium, _older] + ([_newer, _general] if NEW else []))
def loosened(request: pytest.FixtureRequest) -> Iterator[None]:
    """Single precision given up in one of the ways that a user, a library or an environment has."""
    _as_torch_starts()  # whatever earlier tests of this process left
    request.param()
    yield
    _as_torch_starts()


@pytest.mark.usefixtures("loosened")
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_fp32_is_fp32_and_the_switches_are_put_back(device: torch.device) -> None:
    before = switches()
    with pytest.raises(RuntimeError, match="inside"), precision_context(device, "fp32"):
        found = switches()
        raise RuntimeError("inside")
    assert {found.pop(name) for name in HALF_SUMS} == {False}
    assert set(found.values()) <= {"ieee", False}
    assert switches() == before


@pytest.mark.usefixtures("loosened")
def test_a_product_on_the_cpu_is_single_precision() -> None:
    """`medium` lets oneDNN round the factors to bfloat16 where the processor multiplies those."""
    x = random(256, 2048)
    want = x.double() @ x.double().T
    with precision_context(CPU, "fp32"):
        found = x @ x.T
    assert float((found - want).abs().max() / want.abs().max()) < 1e-6


def test_tf32_and_halves_are_what_they_are_called() -> None:
    with precision_context(CUDA, "tf32"):
        found = switches()
        assert current_precision(CUDA) == "tf32"
    assert {found[name] for name in HALF_SUMS} == {False}
    assert found["matmul"] in ("tf32", True) and found["conv"] in ("tf32", True)
    for word, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with precision_context(CPU, word):
            assert torch.get_autocast_dtype("cpu") == dtype
            assert torch.mm(random(2, 2), random(2, 2)).dtype == dtype
            assert current_precision(CPU) == "half"
    assert current_precision(CPU) == "fp32"
    with pytest.raises(VitseeError, match="CUDA only"), precision_context(CPU, "tf32"):
        pass


@pytest.mark.usefixtures("loosened")
def test_threads_do_not_put_the_switches_back_while_others_work() -> None:
    """Two threads enter, the first leaves first; a context within one leaves the other's alone."""
    before, entered, left = switches(), threading.Event(), threading.Event()
    found: list[dict[str, Any]] = []

    def second() -> None:
        with precision_context(CUDA, "fp32"):
            entered.set()
            assert left.wait(10)
            found.append(switches())
            with precision_context(CUDA, "fp32"):
                pass
            found.append(switches())

    thread = threading.Thread(target=second)
    with precision_context(CUDA, "fp32"):
        wanted = switches()
        thread.start()
        assert entered.wait(10)
    left.set()
    thread.join()
    assert found == [wanted, wanted] and wanted != before
    assert switches() == before


def test_contexts_lie_in_each_other() -> None:
    """A slab's fp32 sums within a run of tf32."""
    with precision_context(CUDA, "tf32"):
        with precision_context(CUDA, "fp32"):
            assert current_precision(CUDA) == "fp32"
        assert current_precision(CUDA) == "tf32"


def test_no_autocast_works_on_devices_that_have_none() -> None:
    with torch.autocast("cpu", torch.bfloat16), no_autocast(CPU):
        assert torch.mm(random(2, 2), random(2, 2)).dtype == torch.float32
    with no_autocast(torch.device("meta")):
        pass


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rollout_is_single_precision_under_autocast(device: str) -> None:
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0))
    means = [torch.softmax(random(2, 13, 13, seed=i), -1).to(device) for i in range(3)]
    for residual in (True, False):
        want = rollout(means, layout, residual)
        with torch.autocast("cpu", torch.bfloat16):
            found = rollout(means, layout, residual)
        assert found.dtype == torch.float32
        assert device == "meta" or torch.equal(found, want)


def test_residual_products_are_single_precision_under_autocast() -> None:
    """Both ways to them: the one for CPUs, and the one that a GPU takes."""
    z, f = random(2, 5, 256), random(2, 5, 256, seed=1)
    want = torch.stack(
        [(a.double() * b.double()).sum(-1) for a, b in ((z, z), (f, f), (z, f))], -1
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = residual_products(z, f)
        at_once = torch.empty(2, 5, 3)
        activations._multiply_at_once(z, f, at_once)
        on_meta = residual_products(z.to("meta"), f.to("meta"))
    # Sums of 256 float32 products; bfloat16 is wrong by 1e-1 here.
    for value in (found, at_once):
        np.testing.assert_allclose(value.double(), want, rtol=1e-5, atol=1e-4)
    assert on_meta.dtype == torch.float32 and on_meta.shape == (2, 5, 3)


def test_products_above_the_range_of_halves() -> None:
    z = torch.full((1, 2, 256), 300.0)
    out = torch.empty(1, 2, 3)
    with torch.autocast("cpu", torch.float16):
        activations._multiply_at_once(z, z, out)
    assert torch.all(out == 256 * 300.0**2)


def test_attention_summaries_are_single_precision_under_autocast() -> None:
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0))
    scores, valid = random_scores(layout), torch.ones(2, dtype=torch.bool)
    want = AttentionReducer(layout, "cpu").reduce(Call(scores), valid)
    with torch.autocast("cpu", torch.bfloat16):
        found = AttentionReducer(layout, "cpu").reduce(Call(scores), valid)
    for name, value in vars(want).items():
        if value is not None:
            torch.testing.assert_close(
                getattr(found, name), value, rtol=0, atol=0, msg=name
            )


@pytest.mark.usefixtures("loosened")
def test_the_trained_probe_is_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    true_loss = torch.nn.functional.cross_entropy

    def loss(*args: Any) -> Tensor:
        seen.append(switches()["matmul"])
        return true_loss(*args)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", loss)
    x = random(16, 4).numpy()
    train_linear(x, np.arange(16) % 2, 2, Training(epochs=1, batch=8), 0)
    assert seen and set(seen) <= {"ieee", False}


@pytest.mark.parametrize(
    ("tolerance", "gap", "ok"),
    [(1e-5, 4e-3, False), (1e-2, 4e-3, True), (1e-2, 4e-2, False), (1e-5, 5e-6, True)],
)
def test_a_kernel_chosen_anew_is_judged_by_the_precision(
    tolerance: float, gap: float, ok: bool
) -> None:
    plain = torch.ones(2, 3, device="cpu")
    check = SelfCheck()
    moved = plain * (1 + gap)
    _judge_output(check, _elsewhere(plain), _elsewhere(moved), tolerance)
    assert check.ok == ok
    exact = SelfCheck()
    _judge_output(exact, plain, moved, tolerance)
    assert not exact.ok  # on a CPU nothing may move


class _Elsewhere(Tensor):
    """A tensor that says it is on a GPU."""

    device = CUDA  # type: ignore[assignment]


def _elsewhere(x: Tensor) -> Tensor:
    return x.as_subclass(_Elsewhere)
