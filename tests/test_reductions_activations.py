"""Residual dot products and pooled vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import reference
from tests.attention_calls import DEVICES
from vitsee_core.runtime import threads
from vitsee_core.summaries import (
    is_by_token,
    pass_over,
    residual_products,
    take_tokens,
)
from vitsee_stores.layout import TokenLayout

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_products_agree_with_loops(dtype: torch.dtype, device: str) -> None:
    z, f = random(3, 5, 16, dtype=dtype), random(3, 5, 16, dtype=dtype, seed=1)
    found = residual_products(z.to(device), f.to(device)).cpu()
    assert found.dtype == torch.float32 and found.shape == (3, 5, 3)
    want = reference.residual_products(z.double().numpy(), f.double().numpy())
    # Sums of 16 float32 products; z.f may cancel.
    np.testing.assert_allclose(found.numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_residual_products_of_channels_first_views(device: str) -> None:
    z, f = random(3, 8, 4, 5), random(3, 8, 4, 5, seed=1)
    views = [x.to(device).flatten(2).transpose(1, 2) for x in (z, f)]
    want = reference.residual_products(*(x.cpu().double().numpy() for x in views))
    found = residual_products(*views).cpu()
    np.testing.assert_allclose(found.numpy(), want, rtol=1e-5, atol=1e-5)


def test_residual_products_by_hand() -> None:
    found = residual_products(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 2.0]]]))
    assert found.tolist() == [[[25.0, 4.0, 8.0]]]


@pytest.mark.parametrize("device", DEVICES)
def test_residual_products_of_half_precision_do_not_overflow(device: str) -> None:
    z = torch.full((1, 2, 256), 300.0, dtype=torch.float16, device=device)
    assert torch.all(residual_products(z, z).cpu() == 256 * 300.0**2)


def test_a_branch_of_zeros_has_products_of_zero() -> None:
    z = random(1, 2, 4)
    assert torch.all(residual_products(z, torch.zeros_like(z))[..., 1:] == 0)


def test_chunks_and_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    z, f = random(7, 5, 16), random(7, 5, 16, seed=1)
    for left in (
        z,
        z.transpose(1, 2).contiguous().transpose(1, 2),
    ):  # two ways to the products
        whole = residual_products(left, f)
        parts = [
            residual_products(left[part], f[part]) for part in (slice(0, 3), slice(3, 7))
        ]
        assert torch.equal(whole, torch.cat(parts))
        for n_images in (1, 2, 4):  # the first two with more than one thread
            monkeypatch.setattr(threads, "CHUNK_BYTES", n_images * 4 * 5 * 16)
            assert torch.equal(residual_products(left, f), whole)
        monkeypatch.undo()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinds", [(), ("cls",), ("reg0", "cls"), ("reg0", "reg1")])
def test_pooled_vectors(kinds: tuple[str, ...], dtype: torch.dtype, device: str) -> None:
    layout = TokenLayout(kinds, (3, 4), stride_px=(16.0, 16.0))
    body = random(2, 3, 4, 6, dtype=dtype)
    prefix = random(2, len(kinds), 6, dtype=dtype, seed=1) if kinds else None
    given = None if prefix is None else prefix.to(device)
    cls, mean, peak = pass_over(given, body.to(device), layout)
    assert mean.dtype == torch.float32
    want = reference.mean_over_cells(body.double().numpy())
    np.testing.assert_allclose(mean.cpu().numpy(), want, rtol=1e-5, atol=1e-6)
    values = [
        *body.flatten().tolist(),
        *([] if prefix is None else prefix.flatten().tolist()),
    ]
    assert peak.item() == max(map(abs, values))
    if "cls" in kinds:
        assert cls is not None and prefix is not None and cls.dtype == torch.float32
        assert torch.equal(cls.cpu(), prefix[:, kinds.index("cls")].float())
    else:
        assert cls is None


def test_pooled_vectors_of_rows_and_of_channels_first_views() -> None:
    rows = random(2, 5, 3)
    _, mean, _ = pass_over(None, rows, TokenLayout((), None, rows=5))
    np.testing.assert_allclose(
        mean, reference.mean_over_cells(rows.double().numpy()), atol=1e-6
    )
    view = random(2, 3, 4, 5).permute(0, 2, 3, 1)
    _, mean, _ = pass_over(None, view, TokenLayout((), (4, 5), stride_px=(8.0, 8.0)))
    np.testing.assert_allclose(
        mean, reference.mean_over_cells(view.double().numpy()), atol=1e-6
    )


def test_means_of_half_precision_do_not_overflow() -> None:
    body = torch.full((1, 40, 40, 2), 6e4, dtype=torch.float16)
    _, mean, _ = pass_over(None, body, TokenLayout((), (40, 40), stride_px=(8.0, 8.0)))
    torch.testing.assert_close(mean, body[:, 0, 0].float())


def test_pooled_vectors_are_copies() -> None:
    prefix, body = random(2, 1, 6), random(2, 1, 1, 6)
    cls, mean, peak = pass_over(
        prefix, body, TokenLayout(("cls",), (1, 1), stride_px=(8.0, 8.0))
    )
    assert cls is not None
    before = cls.clone(), mean.clone(), peak.clone()
    prefix.zero_(), body.zero_()
    assert all(map(torch.equal, (cls, mean, peak), before))


LAYOUT = TokenLayout(("cls",), (5, 7), stride_px=(8.0, 8.0))


def test_the_compiled_pass_is_that_of_torch() -> None:
    tokens = random(4, 36, 9)
    prefix, body = tokens[1:, :1], tokens[1:, 1:].unflatten(1, (5, 7))
    turned = body.movedim(-1, 1).contiguous().movedim(1, -1)  # the same by channel
    assert is_by_token(body) and not is_by_token(turned)
    found, want = pass_over(prefix, body, LAYOUT), pass_over(prefix, turned, LAYOUT)
    torch.testing.assert_close(found.mean, want.mean, rtol=1e-6, atol=2e-7)
    assert found.peak == want.peak


def test_only_rows_at_equal_distances_are_passed_over_at_once() -> None:
    body = random(2, 6, 8, 3)
    assert (
        is_by_token(body)
        and is_by_token(body[:, 2:4])
        and is_by_token(body.flatten(1, 2))
    )
    assert not is_by_token(body[:, :, 1:5]) and not is_by_token(body.double())
    cut = body[:, :, 1:5]
    layout = TokenLayout((), (6, 4), stride_px=(8.0, 8.0))
    torch.testing.assert_close(pass_over(None, cut, layout).mean, cut.mean((1, 2)))


@pytest.mark.parametrize("where", [(1, 0, 0, 0), (0, 4, 6, 8), (1, 2, 3, 4)])
def test_peaks_wherever_they_are(where: tuple[int, ...]) -> None:
    body = random(2, 5, 7, 9)
    for value, want in ((-30.0, 30.0), (30.0, 30.0), (float("-inf"), float("inf"))):
        body[where] = value
        assert pass_over(None, body, LAYOUT).peak == want
    for nan in (float("nan"), -float("nan")):
        body[where] = nan
        assert pass_over(None, body, LAYOUT).peak.isnan()
    prefix = torch.full((2, 1, 9), -50.0)
    assert pass_over(prefix, torch.ones(2, 5, 7, 9), LAYOUT).peak == 50.0


def test_the_mean_by_hand() -> None:
    body = torch.tensor([[[1.0, 10.0], [3.0, -4.0]]])
    found = pass_over(None, body, TokenLayout((), None, rows=2))
    assert (
        found.mean.tolist() == [[2.0, 3.0]] and found.cls is None and found.peak == 10.0
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_channels", [3, 16, 37])
def test_tokens_are_kept_as_torch_rounds_them(
    n_channels: int, dtype: torch.dtype
) -> None:
    # Halfway cases, subnormal numbers of float16 and what it cannot hold.
    values = torch.tensor(
        [1 + 2**-11, 1 + 3 * 2**-11, 3e-8, 2.0**-25, 6e-5, 65519.0, 65520.0, -0.0]
    )
    body = (100 * random(5, 6, 7, n_channels))[:, 1:]
    body.select(-1, -1)[:4, :2, :4] = values.view(2, 4)
    assert is_by_token(body)
    kept = torch.full(body.shape, torch.nan, dtype=dtype)
    mean = torch.full((5, n_channels), torch.nan)
    peak = take_tokens(body, mean, kept)
    assert torch.equal(kept.view(torch.uint8), body.to(dtype).view(torch.uint8))
    assert torch.equal(mean, pass_over(None, body, LAYOUT).mean)
    assert peak == body.abs().max() == 65520.0


def test_tokens_with_nan_are_kept_and_told_by_the_peak() -> None:
    body = torch.ones(2, 3, 4, 20)
    body[1, 2, 3, 19] = torch.nan
    kept = torch.zeros(body.shape, dtype=torch.float16)
    assert take_tokens(body, torch.empty(2, 20), kept).isnan()
    assert torch.equal(kept.isnan(), body.isnan())
