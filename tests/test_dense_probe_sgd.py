"""The heads of DINOv3 on stored tokens, against plain loops of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.test_dense_probe import Array, made
from tests.test_dense_probe_depth import made_depths, values
from vitsee_core.analyses.dense_probe import run
from vitsee_core.analyses.dense_probe.sgd import (
    NO_CLASS,
    Batch,
    ClassRecipe,
    DepthRecipe,
    Recipe,
    train,
)

SITE = "blocks.0.out"
IMAGES, ROWS, COLS, DIM, N, SIDE = 5, 3, 4, 6, 3, 4
STEPS = 130  # both parts of the schedule; depth without and with its variance


def bilinear(n: int, cells: int) -> Array:
    """(n, cells) weights, by torch."""
    eye = torch.eye(cells)[None]
    return np.asarray(
        nn.functional.interpolate(eye, n, mode="linear", align_corners=False)[0].T
    )


def batches(of_depth: bool) -> Iterator[Batch]:
    random = torch.Generator().manual_seed(3)
    size = IMAGES, ROWS * SIDE, COLS * SIDE
    while True:
        tokens = torch.randn(IMAGES, ROWS, COLS, DIM, generator=random) + 2
        labels = torch.randint(0, N, size, generator=random)
        labels[torch.rand(size, generator=random) < 0.2] = NO_CLASS
        if of_depth:
            labels = torch.rand(size, generator=random) * 9 + 0.5
            labels[torch.rand(size, generator=random) < 0.2] = torch.nan
        down, across = (torch.from_numpy(bilinear(n * SIDE, n)) for n in (ROWS, COLS))
        every = torch.ones(IMAGES, ROWS, COLS, dtype=torch.bool)
        yield Batch(
            tokens,
            every,
            labels,
            down.expand(IMAGES, -1, -1),
            across.expand(IMAGES, -1, -1),
        )


class Head(nn.Module):
    """Dropout of channels, batch norm, 1 x 1 convolution, as in the released code."""

    def __init__(self, n: int, dropout: float) -> None:
        super().__init__()
        self.dropout, self.norm = nn.Dropout2d(dropout), nn.BatchNorm2d(DIM)
        self.conv = nn.Conv2d(DIM, n, 1)

    def forward(self, tokens: Tensor) -> Any:
        return self.conv(self.norm(self.dropout(tokens.permute(0, 3, 1, 2))))


def depths_of(scores: Tensor) -> Tensor:
    shares = torch.relu(scores) + 0.1
    shares = shares / shares.sum(1, keepdim=True)
    return torch.einsum("nkhw,k->nhw", shares, torch.linspace(0.001, 10, 256))[:, None]


def loss_of(scores: Tensor, labels: Tensor, step: int, of_depth: bool) -> Tensor:
    size = labels.shape[1:]
    if not of_depth:
        pixels = nn.functional.interpolate(
            scores, size, mode="bilinear", align_corners=False
        )
        each = nn.functional.cross_entropy(
            pixels, labels, ignore_index=-100, reduction="none"
        )
        return each.mean()
    found = nn.functional.interpolate(
        depths_of(scores), size, mode="bilinear", align_corners=False
    )[:, 0]
    there = torch.isfinite(labels)
    g = torch.log(found[there] + 0.001) - torch.log(labels[there] + 0.001)
    square = 0.15 * g.mean() ** 2
    return torch.sqrt(square + (torch.var(g) if step >= 100 else 0))


@pytest.mark.parametrize("of_depth", [False, True])
def test_steps_equal_those_of_a_plain_loop(of_depth: bool) -> None:
    recipe: Recipe = DepthRecipe((0.001, 10.0)) if of_depth else ClassRecipe(N)
    device = torch.device("cpu")
    *losses, scores = train(batches(of_depth), DIM, recipe, STEPS, 7, device)
    assert callable(scores)
    torch.manual_seed(7)
    head = Head(256 if of_depth else N, 0.0 if of_depth else 0.1)
    torch.manual_seed(7)
    nn.init.normal_(head.conv.weight, 0, 0.01)
    nn.init.zeros_(head.conv.bias)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=3e-4 if of_depth else 1e-3, weight_decay=1e-4 if of_depth else 1e-3,
        betas=(0.9, 0.99 if of_depth else 0.999),
    )  # fmt: skip
    for step, batch in zip(range(STEPS), batches(of_depth), strict=False):
        share, momentum = recipe.schedule(step, STEPS)
        group = optimizer.param_groups[0]
        group["lr"] = recipe.rate * share
        group["betas"] = (momentum, group["betas"][1])
        optimizer.zero_grad()
        loss = loss_of(head(batch.tokens), batch.labels, step, of_depth)
        loss.backward()
        if of_depth:
            nn.utils.clip_grad_norm_(head.parameters(), 35)
        optimizer.step()
        assert losses[step] == pytest.approx(float(loss.detach()), rel=1e-4)
    head.eval()
    tokens = next(batches(of_depth)).tokens[:1]
    with torch.no_grad():
        expected = head(tokens)
        expected = (
            (depths_of(expected) if of_depth else expected)[0].permute(1, 2, 0).numpy()
        )
    found = scores(tokens[0].double().numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_cells_beside_the_image_have_no_part() -> None:
    """Whatever such cells hold, the probe is the same."""
    found = []
    for value in (0.0, 50.0):

        def spoilt(value: float = value) -> Iterator[Batch]:
            for batch in batches(False):
                down = batch.row_weights.clone()
                down[:, :, 1] += down[:, :, 2]
                down[:, :, 2] = 0
                batch.on_image[:, 2] = False
                batch.tokens[:, 2] = value
                yield Batch(
                    batch.tokens, batch.on_image, batch.labels, down, batch.col_weights
                )

        *_, scores = train(spoilt(), DIM, ClassRecipe(N), 5, 0, torch.device("cpu"))
        assert callable(scores)
        found.append(scores(np.ones((1, 1, DIM))))
    assert (found[0] == found[1]).all()


def test_the_rate_rises_and_falls() -> None:
    """By hand: a warm-up of 1,500 of 40,000 steps, and a third of those of depth."""
    rates = [
        ClassRecipe(2).schedule(step, 40_000)[0] for step in (0, 1, 751, 1501, 39_999)
    ]
    expected = [1e-6, 1e-6, 0.5 * (1 - 750 / 40_000), 0.9965, 0]
    np.testing.assert_allclose(rates, expected, atol=1e-4)
    rate, momentum = DepthRecipe((0.001, 10)).schedule(0, 38_400)
    assert (rate, momentum) == (0.001, 0)
    assert DepthRecipe((0.001, 10)).schedule(12_800, 38_400)[1] == 0.85


@pytest.mark.slow
def test_tokens_that_say_the_class_are_learnt(tmp_path: Path) -> None:
    """And groups of slabs in memory in turn serve as all of them do."""
    store, masks = made(tmp_path, 20, classes=(0, 1, 2))
    choice: dict[str, Any] = {
        "masks": masks, "holdout": 0.4, "sites": [SITE], "metrics": ["miou"], "solver": "sgd",
    }  # fmt: skip
    table = run(store, steps=40, **choice)
    again = run(store, steps=40, jobs=3, **choice)
    assert table["value"].tolist() == again["value"].tolist()
    assert run(store, steps=40, memory=20_000, **choice)["value"].tolist() != []
    losses = table.notes["train"]["loss_of_the_last_steps"]
    assert 0.3 < losses[SITE] < 1.2
    assert table.notes["solver"]["steps"] == 40


@pytest.mark.slow
def test_depths_are_learnt(tmp_path: Path) -> None:
    """The mean depth at least: random tokens know no more."""
    store, depths = made_depths(tmp_path, 16)
    choice: dict[str, Any] = {"depth": depths, "depth_scale": 1000, "max_depth": 10}
    table = run(store, holdout=0.4, solver="sgd", steps=150, sites=[SITE], **choice)
    rmse, blind = values(table)[0], values(table, "mean")[0]
    assert rmse < 1.3 * blind
    protocol = run(store, holdout=0.4, preset="dinov3", steps=2, sites=[SITE], **choice)
    unlike = protocol.notes["protocol"]["differences"]
    assert "no augmentation in training, and no flip in testing" in unlike
    assert not any("sliding" in line for line in unlike)
