"""Relations that captured tensors must fulfil if every hook is where its name says."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

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
FITTED = 4


def rounding_error(total: Tensor, *terms: Tensor) -> float:
    """The largest |sum of terms - total| in units of the rounding the sum may have: at most 1 for
    a sum that is right, inf for unequal shapes. NaN and inf in equal places count as equal."""
    if any(term.shape != total.shape for term in terms):
        return float("inf")
    total = total.float()
    summed = torch.zeros_like(total)
    scale = torch.zeros_like(total)
    eps = max(torch.finfo(x.dtype).eps for x in terms)
    for term in terms:
        summed = summed + term.float()
        scale = scale + term.float().abs()
    same = (summed == total) | (summed.isnan() & total.isnan())
    error = (summed - total).abs() / (scale * 2 * eps + torch.finfo(torch.float32).tiny)
    return float(
        torch.where(same, torch.zeros_like(error), error).nan_to_num(float("inf")).max()
    )


def scaled_error(total: Tensor, skip: Tensor, given: Tensor) -> float:
    """The largest |skip + factors * given - total| in units of the rounding that it may have.

    All are (images, tokens, dim); the factors, one per channel, are fitted to the differences by
    least squares.

    Beside the roundings of a product and a sum there is the fit's own error: of a factor at most
    sum(r |given|) / sum(given^2), with r the rounding of each difference it is fitted to. A cell
    whose skip is small and whose branch is large shows that of all others' roundings.
    """
    if not total.shape == skip.shape == given.shape:
        return float("inf")
    eps = max(torch.finfo(x.dtype).eps for x in (total, skip, given))
    total = total.double()
    skip = skip.double()
    given = given.double()
    power = given.square().sum((0, 1))
    power = torch.where(power > 0, power, torch.ones_like(power))
    factors = ((total - skip) * given).sum((0, 1)) / power
    branch = factors * given
    rounding = 2 * eps * (skip.abs() + branch.abs())
    of_factors = (rounding * given.abs()).sum((0, 1)) / power
    allowed = FITTED * rounding + of_factors * given.abs()
    error = (skip + branch - total).abs() / (allowed + torch.finfo(torch.float32).tiny)
    both_nan = (skip + branch).isnan() & total.isnan()
    return float(torch.where(both_nan, 0.0, error).nan_to_num(float("inf")).max())


def beyond(
    errors: Mapping[str, float], names: Iterable[str], allowed: float
) -> dict[str, float]:
    """The names whose error is not within `allowed`, with the error; inf where it was not
    measured."""
    found = {name: errors.get(name, math.inf) for name in names}
    return {name: error for name, error in found.items() if not error <= allowed}


class SumProof:
    """Collects skip, branch and sum of every residual sublayer and compares them.

    errors: sublayer -> rounding_error of activation(skip + branch) against the sum, of the branch
    alone where the skip is ablated. Where the branch is the difference of sum and skip, that of
    skip + what the output of the branch's last module became by multiplications, read as the model
    runs (within `watching`); where nothing read is what was added, that of skip + factors * this
    output, the factors (one per channel) fitted.
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
        witnesses = {
            name: witness
            for name in names
            if (witness := self.table.residuals[name].witness) is not None
        }
        if witnesses:
            self.scaled = ScaledBranches(capture.hooks, witnesses)
        for name in names:
            residual = self.table.residuals[name]
            for role in ("skip", "branch", "total"):
                site = getattr(residual, role)
                view = self.table.points[site].view
                gather = self._gather(name, role, residual, view)
                if role == "branch" and residual.witness is not None:
                    capture.hooks.on(residual.witness, gather, name)
                else:
                    capture.on_site(site, gather)

    def watching(self) -> AbstractContextManager[object]:
        """Return the context of a pass in which products are read; one that does nothing where no
        branch is scaled."""
        return nullcontext() if self.scaled is None else self.scaled

    def _scaled_error(
        self, name: str, view: View, skip: Tensor, given: Tensor, total: Tensor
    ) -> float:
        """The least error of the products that were read, of which no factor differs from token to
        token, and of the fitted one."""
        errors = []
        for scaled in [] if self.scaled is None else self.scaled.taken(name):
            factors = [view.flat(factor) for factor in scaled.factors]
            if all(torch.equal(x, x[:, :1].expand_as(x)) for x in factors):
                errors.append(rounding_error(total, skip, view.flat(scaled.product)))
        if min(errors, default=math.inf) > 1:
            errors.append(scaled_error(total, skip, given))
        return min(errors)

    def _gather(
        self, name: str, role: str, residual: Residual, view: View
    ) -> Callable[[Tensor], None]:
        def gather(x: Tensor) -> None:
            parts = self.waiting.setdefault(name, {})
            parts[role] = view.flat(x).clone()
            if len(parts) == 3:
                skip = parts["skip"]
                branch = parts["branch"]
                total = parts["total"]
                del self.waiting[name]
                if residual.witness is not None:
                    branch_view = self.table.points[residual.branch].view
                    self.errors[name] = self._scaled_error(
                        name, branch_view, skip, branch, total
                    )
                elif name in self.activations:
                    summed = branch if residual.ablated else branch + skip
                    self.errors[name] = rounding_error(
                        total, self.activations[name](summed)
                    )
                else:
                    terms = (branch,) if residual.ablated else (skip, branch)
                    self.errors[name] = rounding_error(total, *terms)

        return gather


class AliasProof:
    """Compares the tensors of sites that the table calls equal.

    errors: alias -> largest difference from the site it stands for.
    """

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self.pairs = pairs
        self.errors: dict[str, float] = {}
        self.groups: dict[str, list[str]] = {}
        for alias, stored in pairs.items():
            self.groups.setdefault(stored, [stored]).append(alias)
        # Stored name -> the first of its group, its tensor, and how many are still to come.
        self.waiting: dict[str, tuple[str, Tensor, int]] = {}

    def attach(self, capture: Capture) -> None:
        """Ask a capture for both sides of every pair."""
        for stored, group in self.groups.items():
            for name in group:
                capture.on_site(name, self._gather(stored, name))

    def _gather(self, stored: str, name: str) -> Callable[[Tensor], None]:
        def gather(x: Tensor) -> None:
            x = x.flatten(1)
            if stored not in self.waiting:
                self.waiting[stored] = (name, x.clone(), len(self.groups[stored]) - 1)
                return
            first_name, first, left = self.waiting.pop(stored)
            if left > 1:
                self.waiting[stored] = (first_name, first, left - 1)
            gap = float("inf")
            if x.shape == first.shape:
                gap = float((x.float() - first.float()).abs().nan_to_num(0.0).max())
            self.errors[name if name in self.pairs else first_name] = gap

        return gather


class AttentionProof(Observer):
    """Recomputes softmax(scores) @ value and compares it with what the model uses next.

    The comparison is with the input of the block's own projection (or norm before it) where that
    is known, so that the attention of another block does not pass. errors: block -> largest
    difference, relative to the largest output.
    """

    def __init__(self, table: SiteTable) -> None:
        self.table = table
        self.errors: dict[str, float] = {}
        self.made: dict[str, Tensor] = {}

    def attach(self, capture: Capture, blocks: Sequence[AttentionBlock]) -> None:
        """Ask a capture for where the heads' outputs go in these blocks."""
        for block in blocks:
            hook_point = self.table.heads.get(block.name)
            if hook_point:
                capture.hooks.on(hook_point, self._compare(block.name), block.name)

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Recompute one block's attention."""
        one = call.n_heads * call.n_tokens**2
        step = max(SCORES_AT_ONCE // one, 1)
        parts = []
        for start in range(0, call.n_images, step):
            images = slice(start, min(start + step, call.n_images))
            weights = call.scores(images).softmax(-1)
            parts.append(weights @ call.value[images].float())
        made = torch.cat(parts)
        self._note(block.name, made, call.output)
        if block.name in self.table.heads:
            self.made[block.name] = made.transpose(1, 2).flatten(2)

    def _compare(self, name: str) -> Callable[[Tensor], None]:
        def compare(x: Tensor) -> None:
            if name in self.made:
                self._note(name, self.made.pop(name), x)
            else:
                self.errors[name] = float("inf")

        return compare

    def _note(self, name: str, made: Tensor, seen: Tensor) -> None:
        error = float("inf")
        if made.shape == seen.shape:
            gap = (made - seen.float()).abs().nan_to_num(0.0).max()
            error = float(gap / seen.float().abs().nan_to_num(0.0).max().clamp_min(1e-30))
        self.errors[name] = max(error, self.errors.get(name, 0.0))
