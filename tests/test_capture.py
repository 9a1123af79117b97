"""What an observer is shown, and that showing it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models_helpers import VIT, Keeper, captured, images, small
from vitsee_core.models.attention_watch import AttentionCall, AttentionWatch
from vitsee_core.models.capture import Capture
from vitsee_core.models.hook_points import CaptureError
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import AttentionBlock, SiteTable, Sublayer
from vitsee_stores.layout import SiteSpec, select_names


@pytest.fixture(scope="module")
def vit() -> tuple[LoadedModel, SiteTable]:
    model = small("vit_tiny_patch16_224", (32, 48), **VIT)
    return model, site_table(model)


@pytest.fixture(scope="module")
def resnet() -> tuple[LoadedModel, SiteTable]:
    model = small("resnet18", 32)
    return model, site_table(model)


def n_hooks(module: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()
    )


def test_hooks_stay_for_many_batches_and_go(vit: tuple[LoadedModel, SiteTable]) -> None:
    model, table = vit
    assert n_hooks(model.module) == 0
    chosen = select_names(["blocks", "head"], table.sites)
    everything = Capture(
        model, table, sites=chosen, sublayers=table.sublayers, attention=table.attention
    )
    with torch.inference_mode(), everything as capture:
        installed = n_hooks(model.module)
        for n in (3, 1, 2):
            x, keeper = images(model, n, seed=n), Keeper()
            assert torch.equal(capture.run(x, keeper), model.module(x))
            assert list(keeper.sites) == [site.name for site in chosen]
            prefix, body = keeper.sites["blocks.1.out"]
            assert prefix is not None and prefix.shape == (n, 1, 48)
            assert body.shape == (n, 4, 6, 48)
            assert keeper.branches["blocks.1.mlp"][0].shape == (n, 25, 48)
            assert keeper.scores["blocks.1"].shape == (n, 3, 25, 25)
        assert n_hooks(model.module) == installed
    assert n_hooks(model.module) == 0


def test_a_batch_does_not_depend_on_its_neighbours(
    vit: tuple[LoadedModel, SiteTable],
) -> None:
    model, table = vit
    x, chosen = (
        images(model, 3),
        {"sites": [table["blocks.1.mid"]], "attention": table.attention},
    )
    together, alone = (captured(model, table, part, **chosen) for part in (x, x[1:2]))
    torch.testing.assert_close(
        together.tokens("blocks.1.mid")[1:2], alone.tokens("blocks.1.mid")
    )
    torch.testing.assert_close(together.scores["blocks.2"][1:2], alone.scores["blocks.2"])


class Pointers:
    """Notes where the tensors it is shown live."""

    def __init__(self) -> None:
        self.storage: dict[str, int] = {}

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        self.storage[site.name] = body.untyped_storage().data_ptr()
        if prefix is not None:
            assert prefix.untyped_storage().data_ptr() == self.storage[site.name]

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        self.storage[f"{sublayer.name} f"] = f.untyped_storage().data_ptr()

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        self.storage[f"{block.name} v"] = call.value.untyped_storage().data_ptr()


def test_tensors_are_shown_without_copies(
    vit: tuple[LoadedModel, SiteTable], resnet: tuple[LoadedModel, SiteTable]
) -> None:
    """Site and branch of one tensor share its memory."""
    for (model, table), name in ((vit, "blocks.1.mlp"), (resnet, "layer2.0")):
        seen, sites = Pointers(), [table[f"{name}.branch"]]
        capture = Capture(model, table, sites=sites, sublayers=table.sublayers)
        with torch.inference_mode(), capture:
            capture.run(images(model), seen)
        assert seen.storage[f"{name}.branch"] == seen.storage[f"{name} f"]


def test_aliases_are_not_delivered(vit: tuple[LoadedModel, SiteTable]) -> None:
    model, table = vit
    keeper = captured(
        model, table, images(model), sites=[table["blocks.1.in"], table["blocks.0.out"]]
    )
    assert list(keeper.sites) == ["blocks.0.out"]


def test_branches_come_before_the_in_place_sum(
    resnet: tuple[LoadedModel, SiteTable],
) -> None:
    model, table = resnet
    blocks = select_names(["blocks"], table.sites)
    keeper = captured(
        model, table, images(model), sites=blocks, sublayers=table.sublayers
    )
    for sublayer in table.sublayers:
        z, f = keeper.branches[sublayer.name]
        assert torch.equal((z + f).relu(), keeper.tokens(f"{sublayer.name}.out"))


def test_nothing_chosen_is_the_plain_pass(vit: tuple[LoadedModel, SiteTable]) -> None:
    model, table = vit
    x = images(model)
    with torch.inference_mode(), Capture(model, table, sites=()) as capture:
        assert torch.equal(capture.run(x, Keeper()), model.module(x))


def test_run_outside_the_context_is_an_error(vit: tuple[LoadedModel, SiteTable]) -> None:
    model, table = vit
    capture = Capture(model, table, sites=table.sites)
    with pytest.raises(CaptureError, match="hooks are not installed"):
        capture.run(images(model), Keeper())


class Stopping(Keeper):
    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        raise KeyboardInterrupt


def test_an_observer_that_stops_leaves_no_trace(
    vit: tuple[LoadedModel, SiteTable],
) -> None:
    model, table = vit
    x, keeper = images(model), Keeper()
    capture = Capture(
        model, table, sites=[table["blocks.0.out"]], attention=table.attention
    )
    with torch.inference_mode(), capture:
        with pytest.raises(KeyboardInterrupt):
            capture.run(x, Stopping())
        capture.run(x, keeper)
    assert list(keeper.scores) == [block.name for block in table.attention]
    assert n_hooks(model.module) == 0


def test_gradients_reach_the_input(vit: tuple[LoadedModel, SiteTable]) -> None:
    """Receptive fields need a backward pass through what is captured."""
    model, table = vit
    kept: list[Tensor] = []

    class Live(Keeper):
        def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
            kept.append(body)

    x = images(model).requires_grad_()
    with Capture(model, table, sites=[table["blocks.1.out"]]) as capture:
        capture.run(x, Live())
    kept[0][:, 2, 3].sum().backward()
    assert x.grad is not None and float(x.grad.abs().sum()) > 0


def test_autocast_keeps_the_models_own_types(vit: tuple[LoadedModel, SiteTable]) -> None:
    from vitsee_core.models.selfcheck import self_check

    model, table = vit

    def half() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    stored = [site for site in table.sites if site.alias_of is None]
    chosen: dict[str, Any] = {
        "sites": stored,
        "sublayers": table.sublayers,
        "attention": table.attention,
    }
    result = self_check(model, table, images(model), autocast=half, **chosen)
    assert result.failures == []


class Busy(Keeper):
    """Calls functions that no model calls, at every site, branch and attention."""

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        torch.special.erfcx(body)

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        torch.special.erfcx(z)

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        torch.special.erfcx(call.value)


def test_an_observers_functions_pass_unwatched(
    vit: tuple[LoadedModel, SiteTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch costs some microseconds a call, and summaries are thousands of calls."""
    model, table = vit
    watched = AttentionWatch.__torch_function__
    seen = []

    def noted(self: AttentionWatch, func: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(func)
        return watched(self, func, *args, **kwargs)

    monkeypatch.setattr(AttentionWatch, "__torch_function__", noted)
    chosen: dict[str, Any] = {"sublayers": table.sublayers, "attention": table.attention}
    capture = Capture(model, table, sites=select_names(["blocks"], table.sites), **chosen)
    with torch.inference_mode(), capture:
        capture.run(images(model, 2), Busy())
    assert torch.nn.functional.scaled_dot_product_attention in seen
    assert torch.special.erfcx not in seen
