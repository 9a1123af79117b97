"""A model whose blocks run several times, or on views of an image, is refused with the reason in
place of a store that has next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.test_batch_independence import TRANSFORM, vit
from vitsee_core.extraction.options import KeepOptions
from vitsee_core.extraction.plan import choose
from vitsee_core.models.load import model_from_module
from vitsee_core.models.site_tables import site_table
from vitsee_stores.errors import VitseeError


class Around(nn.Module):
    """A model inside another one's code."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.function = vit(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.model, x)


def both_sides(model: Any, x: Tensor) -> Tensor:
    first, second = model(torch.cat([x, x.flip(-1)])).chunk(2)
    return (first + second) / 2


def four_corners(model: Any, x: Tensor) -> Tensor:
    corners = [x, x.roll(8, -1), x.roll(8, -2), x.flip(-2)]
    averaged: Tensor = (
        model(torch.stack(corners, 1).flatten(0, 1)).unflatten(0, (-1, 4)).mean(1)
    )
    return averaged


def one_after_the_other(model: Any, x: Tensor) -> Tensor:
    output: Tensor = model(x) + model(x.flip(-1))
    return output


class Repeated(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = self.block(x)
        return x


def shared(in_a_list: bool) -> Any:
    module = vit()
    block = module.blocks[0]
    module.blocks = nn.Sequential(*[block] * 5) if in_a_list else Repeated(block)
    return module


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "doubled": (lambda: Around(both_sides), "its first dimension is 4 for 2 images"),
    "cropped": (lambda: Around(four_corners), "its first dimension is 8 for 2 images"),
    "two passes": (
        lambda: Around(one_after_the_other),
        "called 2 times in one forward pass",
    ),
    "shared by a loop": (lambda: shared(False), "called 5 times in one forward pass"),
    "shared by a list": (lambda: shared(True), "called 5 times in one forward pass"),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_that_no_store_would_have_are_said(case: str) -> None:
    make, reason = CASES[case]
    model = model_from_module(make(), TRANSFORM, name="mine")
    table = site_table(model)
    with pytest.raises(
        VitseeError, match="the model's blocks cannot be captured"
    ) as error:
        choose(KeepOptions(), {}, table, model.input_size)
    assert reason in str(error.value)
    if table.sites:
        name = table.sites[-1].name
        chosen = choose(KeepOptions(sites=(name,)), {}, table, model.input_size)
        assert name in [site.name for site in chosen.sites]


def test_a_network_without_blocks_that_shares_its_activation_is_kept() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
            self.act, self.pool, self.head = nn.ReLU(), nn.MaxPool2d(2), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(self.act(self.first(x)))
            x = self.pool(self.act(self.second(x)))
            output: Tensor = self.head(x.mean((2, 3)))
            return output

    model = model_from_module(Plain().eval(), TRANSFORM, name="mine")
    assert choose(KeepOptions(), {}, site_table(model), model.input_size).sites
