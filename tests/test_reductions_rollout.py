"""Rollout of one row against the whole product."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import reference
from tests.attention_calls import PREFIXES
from vitsee_core.summaries import rollout
from vitsee_stores.layout import TokenLayout


def random_means(
    layout: TokenLayout, n_blocks: int = 4, n_images: int = 2
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (n_images, layout.n_tokens, layout.n_tokens)
    return [torch.randn(shape, generator=generator).softmax(-1) for _ in range(n_blocks)]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_agrees_with_the_whole_product(prefix: tuple[str, ...], residual: bool) -> None:
    layout = TokenLayout(prefix, (2, 3), stride_px=(16.0, 16.0))
    means = random_means(layout)
    found = rollout(means, layout, residual=residual)
    assert found.shape == (2, layout.n_tokens) and found.dtype == torch.float32
    for image, row in enumerate(found):
        matrices = [mean[image].double().numpy() for mean in means]
        want = reference.rollout(matrices, layout.n_prefix, layout.cls, residual)
        np.testing.assert_allclose(row.numpy(), want, rtol=1e-5)


def test_the_order_of_blocks_counts() -> None:
    """Two tokens by hand: block 0 mixes, block 1 lets the class token look at the patch only."""
    layout = TokenLayout(("cls",), (1, 1), stride_px=(16.0, 16.0))
    mix = torch.tensor([[[0.5, 0.5], [0.2, 0.8]]])
    look = torch.tensor([[[0.0, 1.0], [0.0, 1.0]]])
    # 0.5 look + 0.5 I has the row (0.5, 0.5); 0.5 mix + 0.5 I the rows (.75, .25) and (.1, .9).
    torch.testing.assert_close(
        rollout([mix, look], layout), torch.tensor([[0.425, 0.575]])
    )
    # Last block mix: row (.75, .25); first block look: rows (0.5, 0.5) and (0, 1).
    torch.testing.assert_close(
        rollout([look, mix], layout), torch.tensor([[0.375, 0.625]])
    )
    torch.testing.assert_close(
        rollout([mix, look], layout, residual=False), torch.tensor([[0.2, 0.8]])
    )


def test_identity_attention_keeps_the_class_token() -> None:
    layout = TokenLayout(("dist", "cls"), (2, 2), stride_px=(16.0, 16.0))
    found = rollout([torch.eye(6).expand(3, 6, 6)] * 5, layout)
    assert torch.equal(found, torch.eye(6)[1].expand(3, 6))


def test_rows_are_renormalised() -> None:
    layout = TokenLayout(("cls",), (2, 3), stride_px=(16.0, 16.0))
    for residual in (True, False):
        found = rollout(
            [0.3 * mean for mean in random_means(layout)], layout, residual=residual
        )
        torch.testing.assert_close(found.sum(1), torch.ones(2))


def test_images_are_independent() -> None:
    layout = TokenLayout(("cls",), (2, 3), stride_px=(16.0, 16.0))
    means = random_means(layout, n_images=3)
    means[1][1] = torch.nan
    found = rollout(means, layout)
    assert found[1].isnan().all() and not found[[0, 2]].isnan().any()


def test_the_head_means_are_not_written() -> None:
    layout = TokenLayout(("cls",), (2, 3), stride_px=(16.0, 16.0))
    means = random_means(layout)
    before = [mean.clone() for mean in means]
    rollout(means, layout)
    assert all(torch.equal(a, b) for a, b in zip(means, before, strict=True))


def test_no_blocks_are_refused() -> None:
    layout = TokenLayout(("cls",), (2, 3), stride_px=(16.0, 16.0))
    with pytest.raises(ValueError, match="at least one block"):
        rollout([], layout)
