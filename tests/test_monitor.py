"""`vitsee.Monitor`: a training with it equals one without it to the bit, and what it measures is
what extraction and the commands give."""

from __future__ import annotations

import copy
import functools
import random
import signal
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import nn
from torch.nn.utils import prune

import vitsee
from tests.extractions import plant_images
from vitsee_core.extraction.options import OptionError
from vitsee_core.extraction.outcome import Interrupted
from vitsee_core.models.hook_points import ModelError
from vitsee_core.tables.results import Table
from vitsee_core.training.measurements import scalars
from vitsee_core.training.module_copy import cpu_copy, preserve_rng_and_modes, unwrapped
from vitsee_core.training.series import Series
from vitsee_stores.errors import VitseeError

N = 12
INPUT: dict[str, Any] = {"input_size": (3, 32, 48), "mean": (0.5,) * 3, "std": (0.5,) * 3}
CNN: dict[str, Any] = {"input_size": (3, 16, 16)}
OF_CNN: dict[str, Any] = {"analyses": {"spectrum": {"sites": "modules", "tokens": "mean"}},
                          "sites": "modules", "transform": CNN}  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("photos"), N)


@pytest.fixture
def vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", img_size=(32, 48), patch_size=8, drop_rate=0.2)


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5)),
        *(
            nn.Conv2d(8, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.Flatten(),
            nn.Linear(72, 2),
        ),
    )


def monitored(
    model: nn.Module, data: Path, output: Path, **options: Any
) -> vitsee.Monitor:
    given = {
        "every": 1,
        "analyses": ["attn-dist"],
        "transform": INPUT,
        "say": lambda line: None,
    }
    return vitsee.Monitor(model, data, output, **{**given, **options})


def steps(output: Path) -> Table:
    return Table.read(output / "steps.csv")


# ------------------------------------------------------------------------------ the training


class Trained:
    """A short training with dropout, batch norm, and random numbers of all three sources, and all
    that it leaves behind."""

    def __init__(self, measure: Any) -> None:
        self.called: list[str] = []
        self.model = cnn()
        self.model[0].register_forward_hook(self.hook)
        self.model[6].register_forward_pre_hook(lambda *_: self.called.append("before"))
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        before = process_state()
        self.losses: list[float] = []
        for step in range(4):
            x = torch.randn(6, 3, 16, 16) * random.uniform(0.5, 2) + np.random.normal()
            self.model[4].eval() if step == 1 else self.model.train()
            with torch.autocast("cpu", torch.bfloat16):
                loss = self.model(x).square().mean()
                loss.backward()
                if measure is not None:
                    measure(self.model, step)
                assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
            optimizer.step()
            if step % 2:
                optimizer.zero_grad()
            self.losses.append(float(loss.detach()))
        assert process_state() == before
        self.random = (random.getstate(), np.random.get_state()[1].tolist(),  # type: ignore[index]
                       torch.get_rng_state().tolist())  # fmt: skip
        self.state = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.grads = [p.grad for p in self.model.parameters()]
        self.modes = [module.training for module in self.model.modules()]
        self.optimizer = optimizer.state_dict()

    def hook(self, *_: Any) -> None:
        self.called.append("conv")


def process_state() -> tuple[Any, ...]:
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        list(warnings.filters),
        *handlers,
    )


def test_training_with_it_equals_training_without_to_the_bit(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Trained(None)
    found: list[Any] = []
    real = Series._extract_step

    def careless(self: Series, *args: Any) -> Any:
        """A measurement that takes from every source of random numbers and changes settings."""
        torch.rand(3), np.random.rand(), random.random()
        torch.set_num_threads(torch.get_num_threads() + 1)
        warnings.simplefilter("ignore")
        return real(self, *args)

    monkeypatch.setattr(Series, "_extract_step", careless)

    def measure(model: nn.Module, step: int) -> None:
        if not found:
            found.append(monitored(model, photos, tmp_path / "run", **OF_CNN))
        found.append(found[0](step))

    watched = Trained(measure)
    assert all(table is not None for table in found[1:]) and len(found) == 5
    assert watched.losses == plain.losses and watched.random == plain.random
    assert watched.called == plain.called and watched.modes == plain.modes
    assert all(torch.equal(a, plain.state[k]) for k, a in watched.state.items())
    for a, b in zip(watched.grads, plain.grads, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))  # type: ignore[arg-type]
    for k, own in watched.optimizer["state"].items():
        assert all(torch.equal(x, plain.optimizer["state"][k][n]) for n, x in own.items())


def test_undisturbed_restores_what_it_changes() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            threads, state = torch.get_num_threads(), torch.get_rng_state()
            with preserve_rng_and_modes():
                assert torch.zeros(1).dtype == torch.float32 and torch.is_grad_enabled()
                assert not torch.is_autocast_enabled("cpu")
                torch.set_num_threads(threads + 1)
                torch.manual_seed(99)
            assert torch.get_num_threads() == threads and torch.is_autocast_enabled("cpu")
            assert (
                torch.equal(torch.get_rng_state(), state) and not torch.is_grad_enabled()
            )
            assert torch.zeros(1).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------ the numbers


@pytest.mark.slow
def test_numbers_are_those_of_extraction_and_command(
    vit: nn.Module, photos: Path, tmp_path: Path
) -> None:
    """The monitor measures the weights as they are at each step, in evaluation mode; its tables
    have the steps in front, and the command's plot draws them."""
    vit.train()
    monitor = monitored(vit, photos, tmp_path / "run", every=2, name="mine", images=8,
                        analyses=["attn_dist", "cka:first", "cka:previous"])  # fmt: skip
    weights: dict[int, nn.Module] = {}
    for step in range(5):
        for parameter in vit.parameters():
            parameter.data.mul_(1.1)
        weights[step] = copy.deepcopy(vit)
        assert (monitor(step) is not None) == (step % 2 == 0)
        assert monitor(step) is None  # the same step again, as with accumulated gradients
    for step in (0, 2, 4):
        vitsee.extract(weights[step], str(photos), tmp_path / f"mine-step{step}.zarr",
                       transform=INPUT, images=8, name="mine")  # fmt: skip
    stores = [tmp_path / f"mine-step{step}.zarr" for step in (0, 2, 4)]
    expected = vitsee.attn_dist(*stores)
    found = Table.read(tmp_path / "run/results/attn-dist.csv")
    assert found.frame.columns == ["step", *expected.written.columns]
    rows = expected.frame["store"].cast(str).str.extract(r"(\d+)$").cast(int).to_list()
    order = np.argsort(rows, kind="stable")
    assert found["step"].tolist() == np.array(rows)[order].tolist()
    for name in ("value", "low", "high"):
        assert np.array_equal(found[name], expected[name][order])
    assert found.analysis == "attn_dist"
    first = Table.read(tmp_path / "run/results/cka-first.csv")
    alone = vitsee.cka(stores[0], stores[2], pairs="same-depth")
    assert set(first["step"]) == {2, 4}
    assert np.array_equal(first.filter(step=4)["value"], alone["value"])
    previous = Table.read(tmp_path / "run/results/cka-previous.csv").filter(step=4)
    assert set(previous["store_a"]) == {"mine-step2"}
    # Of the stores those are left that the next step will be compared with.
    left = sorted(path.name for path in (tmp_path / "run/stores").glob("*.zarr"))
    assert left == ["mine-step0.zarr", "mine-step4.zarr"]
    assert steps(tmp_path / "run")["status"].tolist() == ["measured"] * 3


def test_autocast_around_it_changes_nothing(
    vit: nn.Module, photos: Path, tmp_path: Path
) -> None:
    plain = monitored(vit, photos, tmp_path / "a")(0)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        within = monitored(vit, photos, tmp_path / "b")(0)
    assert plain is not None and within is not None
    assert np.array_equal(plain["attn-dist"]["value"], within["attn-dist"]["value"])


def test_scalars_are_means_over_heads() -> None:
    """By hand: two heads of a block, one without a value in the second block, a baseline, and two
    values of k."""
    rows = [
        {
            "site": "blocks.0",
            "head": 0,
            "k": 1,
            "metric": "d",
            "value": 1.0,
            "baseline": None,
        },
        {
            "site": "blocks.0",
            "head": 1,
            "k": 1,
            "metric": "d",
            "value": 4.0,
            "baseline": None,
        },
        {
            "site": "blocks.1",
            "head": 0,
            "k": 1,
            "metric": "d",
            "value": 5.0,
            "baseline": None,
        },
        {
            "site": "blocks.1",
            "head": 1,
            "k": 1,
            "metric": "d",
            "value": None,
            "baseline": None,
        },
        {
            "site": "blocks.1",
            "head": 0,
            "k": 1,
            "metric": "d",
            "value": 9.0,
            "baseline": "random",
        },
    ]
    assert scalars("x", Table.from_rows(rows)) == {
        "x/d/blocks.0": 2.5,
        "x/d/blocks.1": 5.0,
    }
    rows.append(rows[0] | {"k": 20, "value": 7.0})
    found = scalars("x", Table.from_rows(rows))
    assert found["x/d/blocks.0/k=1"] == 2.5 and found["x/d/blocks.0/k=20"] == 7.0
    pair = {
        "site_a": "blocks.0.out",
        "site_b": "blocks.1.out",
        "metric": "cka",
        "value": 0.5,
    }
    pairs = Table.from_rows([pair, pair | {"site_b": "blocks.0.out", "value": 1.0}])
    assert scalars("cka", pairs) == {
        "cka/cka/blocks.0.out ~ blocks.1.out": 0.5,
        "cka/cka/blocks.0.out": 1.0,
    }


def test_a_logger_gets_every_number_of_a_step(
    vit: nn.Module, photos: Path, tmp_path: Path
) -> None:
    got: dict[tuple[str, int], float] = {}

    def log(name: str, value: float, step: int) -> None:
        got[name, step] = value

    monitor = monitored(vit, photos, tmp_path / "run", every=5, unit="epoch", log=log)
    tables = monitor(5)
    assert tables is not None
    rows = tables["attn-dist"].filter(site="blocks.0", metric="distance_px")
    assert got["attn-dist/distance_px/blocks.0", 5] == pytest.approx(
        rows["value"].mean(), rel=1e-12
    )
    assert got["diverged", 5] == 0.0 and {step for _, step in got} == {5}
    assert Table.read(tmp_path / "run/results/attn-dist.csv").frame.columns[0] == "epoch"


def test_classifiers_learn_from_images_of_their_own(
    vit: nn.Module, photos: Path, tmp_path: Path
) -> None:
    others = tmp_path / "others"
    for i in range(6):  # other pictures of the same classes
        (others / f"class{i % 2}").mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(50 + i).integers(
            0, 256, (32, 48, 3), dtype=np.uint8
        )
        from PIL import Image

        Image.fromarray(pixels).save(others / f"class{i % 2}" / f"{i}.png")
    monitor = monitored(
        vit, photos, tmp_path / "run", train=others, analyses={"knn": {"ks": [3]}}
    )
    found = monitor(0)
    assert found is not None and found["knn"]["n_images"].tolist()[0] == N
    assert not list((tmp_path / "run/stores").iterdir())


# ------------------------------------------------------------------------------ wrapped models


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_the_module_below_wrappers_is_measured(
    vit: nn.Module, photos: Path, tmp_path: Path, process_group: None
) -> None:
    plain = monitored(vit, photos, tmp_path / "plain")(0)
    compiled = copy.deepcopy(vit)
    compiled.compile(backend="eager")  # in place
    inner: Any = copy.deepcopy(vit)
    inner.blocks[0] = torch.compile(inner.blocks[0], backend="eager")
    average = torch.optim.swa_utils.AveragedModel(vit)
    wrapped = {
        "compiled": torch.compile(vit, backend="eager"),
        "in-place": compiled,
        "inner": inner,
        "ddp": nn.parallel.DistributedDataParallel(vit),
        "both": torch.compile(nn.parallel.DistributedDataParallel(vit), backend="eager"),
        "average": average,
        "timm": ModelEmaV3(vit),
    }
    assert plain is not None
    for name, model in wrapped.items():
        found = monitored(model, photos, tmp_path / name)(0)
        assert found is not None, name
        assert np.array_equal(found["attn-dist"]["value"], plain["attn-dist"]["value"]), (
            name
        )
    assert unwrapped(wrapped["both"]) is vit and unwrapped(average) is average.module


def test_only_the_first_process_measures(
    vit: nn.Module, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert monitored(vit, photos, tmp_path / "run")(0) is None
    assert not (tmp_path / "run").exists()


def test_a_copy_runs_nothing_of_the_model_itself(vit: Any) -> None:
    """Hooks are left behind (a bound method would bring its owner along), those that prune are
    kept; a forward that accelerate wrapped in autocast is that below; a function is refused."""
    calls: list[int] = []
    vit.register_forward_hook(lambda *_: calls.append(1))
    prune.l1_unstructured(vit.head, "weight", 0.5)
    vit(torch.randn(1, 3, 32, 48))  # leaves a pruned weight that is no parameter
    n = len(calls)
    vit.eval()
    x = torch.randn(2, 3, 32, 48)
    expected = vit(x)
    own = vit.forward
    vit._original_forward = own
    wrapped = torch.autocast("cpu", torch.bfloat16)(own.__func__)
    vit.forward = types.MethodType(wrapped, vit)
    copied: Any = cpu_copy(vit)
    assert torch.equal(copied(x), expected) and len(calls) == n + 1
    assert copied.forward.__self__ is copied and not copied.head.weight.is_leaf
    with torch.no_grad():
        vit.head.weight_orig.mul_(2)
    assert torch.equal(copied(x), expected)
    del vit._original_forward
    vit.blocks[1].forward = functools.partial(type(vit.blocks[1]).forward, vit.blocks[1])
    with pytest.raises(
        ModelError, match=r"forward of blocks\.1 is replaced by a function"
    ):
        cpu_copy(vit)


# ------------------------------------------------------------------------------ what goes wrong


def test_a_step_that_diverged_is_a_row_and_the_next_is_measured(
    vit: Any, photos: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    got: dict[tuple[str, int], float] = {}

    def log(name: str, value: float, step: int) -> None:
        got[name, step] = value

    monitor = monitored(vit, photos, tmp_path / "run", say=said.append, log=log)
    weight, sound = (
        vit.blocks[1].mlp.fc1.weight,
        vit.blocks[1].mlp.fc1.weight.detach().clone(),
    )
    assert monitor(0) is not None
    weight.data[0, 0] = float("nan")
    assert monitor(1) is None
    weight.data.fill_(3e38)  # finite weights, activations that are not
    assert monitor(2) is None
    weight.data.copy_(sound)
    assert monitor(3) is not None
    found = steps(tmp_path / "run")
    assert found["status"].tolist() == ["measured", "diverged", "diverged", "measured"]
    notes = found["note"].tolist()
    assert (
        notes[1].endswith("weights: blocks.1.mlp.fc1.weight") and "NaN or inf" in notes[2]
    )
    assert any(line.startswith("step 1: diverged: ") for line in said)
    assert [got["diverged", step] for step in range(4)] == [0, 1, 1, 0]
    table = Table.read(tmp_path / "run/results/attn-dist.csv")
    assert set(table["step"]) == {0, 3}
    assert not list((tmp_path / "run/stores").iterdir())


def test_a_failure_later_is_a_row_the_first_one_an_error(
    vit: nn.Module, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(VitseeError, match="nowhere"):
        monitored(vit, tmp_path / "nowhere", tmp_path / "a")(0)
    monitor = monitored(vit, photos, tmp_path / "b")
    assert monitor(0) is not None

    def broken(*_: Any) -> Any:
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(Series, "_extract_step", broken)
        assert monitor(1) is None
    (photos / "class0" / "more.png").write_bytes(
        (photos / "class0" / "000.png").read_bytes()
    )
    try:
        assert monitor(2) is None
    finally:
        (photos / "class0" / "more.png").unlink()
    assert monitor(3) is not None
    notes = steps(tmp_path / "b")["note"].tolist()
    assert notes[1] == "ValueError: a bug" and "has other images now" in notes[2]


def test_a_signal_reaches_the_trainings_own_handler(
    vit: nn.Module, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that extraction caught: as a scheduler sends before it takes the machine away."""
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        monitor = monitored(vit, photos, tmp_path / "run")
        assert monitor(0) is not None

        def stopped(*_: Any) -> Any:
            raise Interrupted("stopped by SIGTERM", "SIGTERM")

        with monkeypatch.context() as patch:
            patch.setattr(Series, "_extract_step", stopped)
            assert monitor(1) is None
        assert caught == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert steps(tmp_path / "run")["status"].tolist() == ["measured", "failed"]


def test_cost_is_limited(
    vit: nn.Module, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock of ours: 10 s of training per step, 2 s of measuring, at most 10 %: after the first
    (2 s), a second would fit from 40 s of training on, a third from 60 s on."""
    now = [0.0]
    monkeypatch.setattr("vitsee_core.training.monitor.time.perf_counter", lambda: now[0])
    real = Series._extract_step

    def slow(self: Series, *args: Any) -> Any:
        now[0] += 2.0
        return real(self, *args)

    monkeypatch.setattr(Series, "_extract_step", slow)
    said: list[str] = []
    monitor = monitored(vit, photos, tmp_path / "run", most=0.1, say=said.append)
    done = []
    for step in range(7):
        done.append(monitor(step) is not None)
        now[0] += 10.0
    assert done == [True, False, False, False, True, False, True]
    found = steps(tmp_path / "run")
    assert found["status"].tolist()[3:5] == ["skipped", "measured"]
    assert found["training_seconds"].tolist() == [0, 10, 20, 30, 40, 50, 60]
    assert found["seconds"].tolist() == [2, 0, 0, 0, 2, 0, 2]
    assert found["share"].tolist()[4:] == [0.1, 0.08, 0.1]
    skipped = "step 1: skipped: would bring measuring to 40.0 % of the training time, most is 0.1"
    assert skipped in said
    assert (
        "step 6: measured in 2.0 s; 6.0 s of measuring, 10 % of 60.0 s of training"
        in said
    )
    assert monitor.share == pytest.approx(6 / 70)


@pytest.mark.slow
def test_going_on_after_a_restart(vit: nn.Module, photos: Path, tmp_path: Path) -> None:
    """Rows from the first step that is measured again are replaced, those before are kept."""
    place = tmp_path / "run"
    first = monitored(vit, photos, place, keep="stores", images=6)
    for step in (0, 1, 2):
        first(step)
    before = Table.read(place / "results/attn-dist.csv").filter(step=0)["value"]
    with pytest.raises(VitseeError, match="has 3 steps of a model: give resume=True"):
        monitored(vit, photos, place, keep="stores", images=6)
    with pytest.raises(
        VitseeError, match=r"was made with options .*'images': 6.* choose another"
    ):
        monitored(vit, photos, place, images=7, resume=True)
    vit.blocks[0].mlp.fc1.weight.data.mul_(2)  # type: ignore[index, union-attr]
    said: list[str] = []
    again = monitored(
        vit, photos, place, keep="stores", images=6, resume=True, say=said.append
    )
    again(1)
    assert said[0] == "step 1 to 2 of the training before the restart: measured anew"
    table = Table.read(place / "results/attn-dist.csv")
    assert set(table["step"]) == {0, 1} and np.array_equal(
        table.filter(step=0)["value"], before
    )
    assert steps(place)["step"].tolist() == [0, 1]
    assert sorted(p.name for p in (place / "stores").iterdir()) == [
        "model-step0.zarr",
        "model-step1.zarr",
    ]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"analyses": ["atn-dist"]},
            "no analysis 'atn-dist'; expected the name of a command",
        ),
        (
            {"analyses": {"attn-dist": {"metric": 1}}},
            "attn-dist has no keyword 'metric'; it has",
        ),
        ({"analyses": ["cka:lst"]}, "expected cka, or with : one of first, previous"),
        ({"analyses": ["knn"]}, "knn learns from images: give train="),
        ({"analyses": "knn"}, "expected a list of names of commands"),
        ({"every": 0}, "every is 0; expected a whole number above 0"),
        ({"most": 2}, "most is 2; expected a share above 0, at most 1"),
        ({"keep": "all"}, "keep is 'all'; expected tables or stores"),
        ({"imges": 3}, "no option 'imges' of extract; did you mean images"),
    ],
)
def test_wrong_options_are_refused_at_once(
    vit: nn.Module, photos: Path, tmp_path: Path, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(OptionError, match=line):
        monitored(vit, photos, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
