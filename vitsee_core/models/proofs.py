"""Relations that captured tensors must fulfil if every hook is where its name says: skip + branch
is the sum (`SumProof`), an alias equals its site (`AliasProof`), and softmax(scores) @ values is
what the block uses next (`AttentionProof`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitsee_core.models.attention_watch import AttentionCall
from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.hook_points import View
from vitsee_core.models.scaled_branches import ScaledBranches
from vitsee_core.models.sites import AttentionBlock, SiteTable
from vitsee_core.models.sites.families import Residual

# Scores in memory at once while attention is recomputed, in numbers.
SCORES_AT_ONCE = 1 << 24
# Roundings of the product and of the factors themselves, beside that of the sum.
ROUNDINGS_OF_FIT = 4


def rounding_error(total: Tensor, *terms: Tensor) -> float:
    """Return the largest |sum of terms - total| in units of the rounding that the sum may have.

    It is at most 1 for a sum that is right, and inf for unequal shapes. NaN and inf in equal places
    count as equal.
    """
    if any(term.shape != total.shape for term in terms):
        return float("inf")
    total = total.float()
    summed = torch.zeros_like(total)
    scale = torch.zeros_like(total)
    eps = max(torch.finfo(x.dtype).eps for x in terms)
    for term in terms:
        summed = summed + term.float()
        scale = scale + term.float().abs()
    is_equal = (summed == total) | (summed.isnan() & total.isnan())
    # Rounding to nearest is off by eps / 2 of the result; 2 eps of the terms' sizes leaves room for
    # a sum that was rounded in between.
    allowed = scale * 2 * eps + torch.finfo(torch.float32).tiny
    error = (summed - total).abs() / allowed
    error = torch.where(is_equal, torch.zeros_like(error), error)
    return float(error.nan_to_num(float("inf")).max())


def scaled_error(total: Tensor, skip: Tensor, output: Tensor) -> float:
    """Return the largest |skip + factors * output - total| in units of the rounding that it may
    have, with one factor per channel, fitted to the differences by least squares.

    Beside the roundings of a product and a sum there is the error of the fit: a factor is off by at
    most sum(r |output|) / sum(output^2), with r the rounding of each difference that it is fitted
    to. A cell whose skip is small and whose branch is large shows the roundings of all others.

    Args:
        total: the sum, (images, tokens, dim).
        skip: its first term, of that shape.
        output: the output of the branch's last module, of that shape.
    """
    if not total.shape == skip.shape == output.shape:
        return float("inf")
    eps = max(torch.finfo(x.dtype).eps for x in (total, skip, output))
    # float64: the fit is to show the roundings of the tensors, not its own.
    total = total.double()
    skip = skip.double()
    output = output.double()
    power = output.square().sum((0, 1))  # (dim,)
    power = torch.where(power > 0, power, torch.ones_like(power))
    factors = ((total - skip) * output).sum((0, 1)) / power
    branch = factors * output
    rounding = 2 * eps * (skip.abs() + branch.abs())
    factor_error = (rounding * output.abs()).sum((0, 1)) / power
    allowed = ROUNDINGS_OF_FIT * rounding + factor_error * output.abs()
    error = (skip + branch - total).abs() / (allowed + torch.finfo(torch.float32).tiny)
    both_nan = (skip + branch).isnan() & total.isnan()
    return float(torch.where(both_nan, 0.0, error).nan_to_num(float("inf")).max())


def beyond(
    errors: Mapping[str, float], names: Iterable[str], allowed: float
) -> dict[str, float]:
    """Return name -> error of the names whose error is above `allowed`, is NaN, or was not measured
    (inf)."""
    measured = {name: errors.get(name, math.inf) for name in names}
    return {name: error for name, error in measured.items() if not error <= allowed}


class SumProof:
    """Collects skip, branch and sum of every residual sublayer and compares them.

    The sum is compared with activation(skip + branch), or with the branch alone where the skip is
    ablated. Where the branch is known as the difference of sum and skip alone, the sum is compared
    with skip + the product that the output of the branch's last module became, read as the model
    runs (within `watching`). Where no product that was read is what was added, it is compared with
    skip + factors * this output, one fitted factor per channel.

    Attributes:
        errors: sublayer -> error in units of rounding.
    """

    def __init__(self, module: nn.Module, table: SiteTable, names: Sequence[str]) -> None:
        self.table = table
        self.errors: dict[str, float] = {}
        self.waiting: dict[str, dict[str, Tensor]] = {}
        self.scaled: ScaledBranches | None = None
        # A copy, because a call of the model's own module would count as one more call.
        self.activations = {
            name: copy.deepcopy(
                module.get_submodule(table.residuals[name].activation or "")
            )
            for name in names
            if table.residuals[name].activation
        }

    def attach(self, capture: Capture, names: Sequence[str]) -> None:
        """Ask a capture for the tensors of these sublayers."""
        witnesses = {}
        for name in names:
            witness = self.table.residuals[name].witness
            if witness is not None:
                witnesses[name] = witness
        if witnesses:
            self.scaled = ScaledBranches(capture.hooks, witnesses)
        for name in names:
            residual = self.table.residuals[name]
            for role in ("skip", "branch", "total"):
                site = getattr(residual, role)
                view = self.table.points[site].view
                gather = self._collector(name, role, residual, view)
                if role == "branch" and residual.witness is not None:
                    capture.hooks.on(residual.witness, gather, name)
                else:
                    capture.on_site(site, gather)

    def watching(self) -> AbstractContextManager[object]:
        """Return the context of a pass in which products are read; one that does nothing where no
        branch is scaled."""
        return nullcontext() if self.scaled is None else self.scaled

    def _scaled_error(
        self, name: str, view: View, *, skip: Tensor, output: Tensor, total: Tensor
    ) -> float:
        """Return the least error of the products that were read and, if none is right, of the
        fitted one. Products with a factor that differs from token to token are left out: they are
        gates, not a scale of the branch."""
        products = [] if self.scaled is None else self.scaled.taken(name)
        errors = []
        for scaled in products:
            factors = [view.flat(factor) for factor in scaled.factors]
            if all(torch.equal(x, x[:, :1].expand_as(x)) for x in factors):
                errors.append(rounding_error(total, skip, view.flat(scaled.product)))
        if min(errors, default=math.inf) > 1:
            errors.append(scaled_error(total, skip, output))
        return min(errors)

    def _collector(
        self, name: str, role: str, residual: Residual, view: View
    ) -> Callable[[Tensor], None]:
        """Return the consumer of a sublayer's "skip", "branch" or "total"."""

        def collect(x: Tensor) -> None:
            """Keep a copy, as the model may change the tensor; with the third compare."""
            parts = self.waiting.setdefault(name, {})
            parts[role] = view.flat(x).clone()
            if len(parts) == 3:
                del self.waiting[name]
                self.errors[name] = self._error(name, residual, parts)

        return collect

    def _error(self, name: str, residual: Residual, parts: Mapping[str, Tensor]) -> float:
        """Return the error of a sublayer's sum; parts: "skip", "branch" and "total"."""
        skip = parts["skip"]
        branch = parts["branch"]
        total = parts["total"]
        if residual.witness is not None:
            view = self.table.points[residual.branch].view
            return self._scaled_error(name, view, skip=skip, output=branch, total=total)
        if name in self.activations:
            summed = branch if residual.ablated else branch + skip
            return rounding_error(total, self.activations[name](summed))
        if residual.ablated:
            return rounding_error(total, branch)
        return rounding_error(total, skip, branch)


class _FirstOfGroup(NamedTuple):
    """The tensor of a group of equal sites that came first, and how many are still to come."""

    name: str
    tensor: Tensor
    n_left: int


class AliasProof:
    """Compares the tensors of sites that the table calls equal.

    Attributes:
        pairs: alias -> the site that is stored for it.
        errors: alias -> largest difference from that site.
    """

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self.pairs = pairs
        self.errors: dict[str, float] = {}
        self.groups: dict[str, list[str]] = {}
        for alias, stored in pairs.items():
            self.groups.setdefault(stored, [stored]).append(alias)
        self.waiting: dict[str, _FirstOfGroup] = {}  # by stored name

    def attach(self, capture: Capture) -> None:
        """Ask a capture for both sides of every pair."""
        for stored, group in self.groups.items():
            for name in group:
                capture.on_site(name, self._comparer(stored, name))

    def _comparer(self, stored: str, name: str) -> Callable[[Tensor], None]:
        """Return the consumer of a site's tensor, in the group of the site that is stored."""

        def compare(x: Tensor) -> None:
            """Keep the first tensor of the group; compare each other one with it."""
            x = x.flatten(1)
            if stored not in self.waiting:
                n_left = len(self.groups[stored]) - 1
                self.waiting[stored] = _FirstOfGroup(name, x.clone(), n_left)
                return
            first = self.waiting.pop(stored)
            if first.n_left > 1:
                self.waiting[stored] = first._replace(n_left=first.n_left - 1)
            gap = float("inf")
            if x.shape == first.tensor.shape:
                difference = x.float() - first.tensor.float()
                gap = float(difference.abs().nan_to_num(0.0).max())
            # Errors go by alias: the stored site may have come first or later.
            self.errors[name if name in self.pairs else first.name] = gap

        return compare


class AttentionProof(Observer):
    """Recomputes softmax(scores) @ value and compares it with what the model uses next.

    The comparison is with the input of the block's own projection (or norm before it) where that
    is known, so that the attention of another block does not pass.

    Attributes:
        errors: block -> largest difference, relative to the largest output.
    """

    def __init__(self, table: SiteTable) -> None:
        self.table = table
        self.errors: dict[str, float] = {}
        # Block -> heads' outputs side by side, (images, tokens, heads x head dim), until the
        # projection gets its input.
        self.recomputed: dict[str, Tensor] = {}

    def attach(self, capture: Capture, blocks: Sequence[AttentionBlock]) -> None:
        """Ask a capture for where the heads' outputs go in these blocks."""
        for block in blocks:
            hook_point = self.table.heads.get(block.name)
            if hook_point:
                capture.hooks.on(hook_point, self._comparer(block.name), block.name)

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Recompute one block's attention."""
        scores_per_image = call.n_heads * call.n_tokens**2
        step = max(SCORES_AT_ONCE // scores_per_image, 1)
        outputs = []
        for start in range(0, call.n_images, step):
            images = slice(start, min(start + step, call.n_images))
            weights = call.scores(images).softmax(-1)
            outputs.append(weights @ call.value[images].float())
        output = torch.cat(outputs)  # (images, heads, tokens, head dim)
        self._note_error(block.name, output, call.output)
        if block.name in self.table.heads:
            self.recomputed[block.name] = output.transpose(1, 2).flatten(2)

    def _comparer(self, name: str) -> Callable[[Tensor], None]:
        """Return the consumer of what a block uses next."""

        def compare(x: Tensor) -> None:
            """Compare with the recomputed attention, which must have come before."""
            if name in self.recomputed:
                self._note_error(name, self.recomputed.pop(name), x)
            else:
                self.errors[name] = float("inf")

        return compare

    def _note_error(self, name: str, recomputed: Tensor, captured: Tensor) -> None:
        """Keep a block's largest relative difference; inf for unequal shapes."""
        error = float("inf")
        if recomputed.shape == captured.shape:
            gap = (recomputed - captured.float()).abs().nan_to_num(0.0).max()
            scale = captured.float().abs().nan_to_num(0.0).max().clamp_min(1e-30)
            error = float(gap / scale)
        self.errors[name] = max(error, self.errors.get(name, 0.0))
