"""The self-check on the first batch of an extraction: whether hooks capture what their names say,
and whether the values fit the types that they are stored in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitsee_core.models.attention_watch import AttentionCall
from vitsee_core.models.batch_independence import (
    Composition,
    Fingerprints,
    batch_dependence,
    changing,
    compositions,
)
from vitsee_core.models.capture import Capture
from vitsee_core.models.hook_points import CaptureError, first_tensor
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.proofs import AliasProof, AttentionProof, SumProof, beyond
from vitsee_core.models.sites import AttentionBlock, SiteTable, Sublayer
from vitsee_core.models.survey.patches import disproof
from vitsee_core.runtime.device import current_precision
from vitsee_core.runtime.machine import is_out_of_memory, plural
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import SiteSpec
from vitsee_stores.manifest import abbreviate

FLOAT16_MAX = float(torch.finfo(torch.float16).max)
# Recomputed attention against the model's own: summation order in float32, rounded factors in
# TF32 (10 bits), rounded scores and weights where the kernel ran in half precision.
ATTENTION_TOLERANCE = {"fp32": 1e-4, "tf32": 5e-3, "half": 3e-2}
# Off the CPU a kernel may be chosen anew between two calls: roundings of the precision it runs in.
OUTPUT_TOLERANCE = {"fp32": 1e-5, "tf32": 5e-3, "half": 1e-2}
# float16 rounds a number to 11 bits, and a token's vector to 2^-11 of its length at most, down to
# 2^-14; below that steps of 2^-24 remain. A token twice as far from its float16 has underflowed. A
# site where this happens to a tenth of the tokens is stored in float32; fewer are the dead tokens
# of a sound map.
MAX_HALF_ERROR = 2**-10
MAX_UNDERFLOWING = 0.1
OFFSET_WARNING = 1e4


class NotFinite(VitseeError):
    """Weights or activations of a model are NaN or inf.

    Attributes:
        advice: what to try, the end of the message; "" if nothing is known to help.
    """

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(f"{message}; {advice}" if advice else message)
        self.advice = advice


@dataclass
class SelfCheck:
    """The result of a self-check, fit for the manifest.

    Attributes:
        failures: reasons not to trust the extraction, a line each.
        finite: False if activations or the output are NaN or inf.
        figures: the errors measured (output, sums in units of rounding, attention relative to its
            largest output, aliases), the measured patches, and per site `max_abs` (NaN and inf left
            out) and `offset_ratio`, |mean over images|^2 / trace of the covariance over images,
            None for one image.
        dtypes: site -> stored type, float32 where float16 would overflow or underflow.
        notes: remarks for the user.
        left_out: sublayer -> why its residual products are not to be stored: its branch is scaled
            by nothing that was seen and by no fitted factor.
    """

    failures: list[str] = field(default_factory=list)
    finite: bool = True
    figures: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


class _SiteExaminer(AttentionProof):
    """An observer that measures every site as it is captured, beside the proof of attention.

    Attributes:
        max_abs: site -> largest absolute value, NaN and inf left out.
        offset: site -> |mean|^2 over the variance over images, None where that is not defined.
        underflowing: site -> fraction of tokens that float16 would lose.
        broken: site -> how many values are NaN or inf, of the sites that have any.
        fingerprints: a few projections of all that was captured.
    """

    def __init__(self, table: SiteTable) -> None:
        super().__init__(table)
        self.max_abs: dict[str, float] = {}
        self.offset: dict[str, float | None] = {}
        self.underflowing: dict[str, float] = {}
        self.broken: dict[str, int] = {}
        self.fingerprints = Fingerprints()

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Measure the largest value, values that are not finite, the offset ratio, and the tokens
        that float16 would lose."""
        self.fingerprints.site(site, prefix, body)
        tensors = [body] if prefix is None else [prefix, body]
        self.underflowing[site.name] = max(
            (underflowing_fraction(x) for x in tensors if x.numel()), default=0.0
        )
        flat = [x.flatten(1).float() for x in tensors]  # (images, numbers) each
        n_broken = sum(int((~x.isfinite()).sum()) for x in flat)
        if n_broken:
            self.broken[site.name] = n_broken
            flat = [x.nan_to_num(0.0, 0.0, 0.0) for x in flat]
        self.max_abs[site.name] = max(float(x.abs().max()) for x in flat)
        self.offset[site.name] = None if n_broken else _offset_ratio(flat)

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        """Raise CaptureError unless both terms have one shape; sums are verified from the sites."""
        self.fingerprints.branch(sublayer, z, f)
        if z.shape != f.shape:
            raise CaptureError(
                f"{sublayer.name}: skip {tuple(z.shape)} and branch {tuple(f.shape)} "
                f"differ"
            )

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Recompute the attention, as `AttentionProof` does."""
        self.fingerprints.attention(block, call)
        super().attention(block, call)


def underflowing_fraction(x: Tensor) -> float:
    """Return the fraction of vectors along the last axis that float16 rounds by more than
    MAX_HALF_ERROR of their length, because their numbers are too small for it. Vectors of zeros are
    not counted."""
    x = x.float().nan_to_num(0.0, 0.0, 0.0)
    if x.ndim == 1:
        x = x.unsqueeze(-1)
    # Overflow is judged by `max_abs`.
    in_range = x.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    rounding = in_range - in_range.half().float()
    # Lengths relative to the largest number: squares of the smallest would be zero in float32.
    scale = x.abs().amax(-1, keepdim=True)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    # Vectors of zeros give 0 / 0 = NaN, which exceeds nothing.
    errors = (rounding / divisor).norm(dim=-1) / (x / divisor).norm(dim=-1)
    n_vectors = int((scale > 0).sum())
    return float((errors > MAX_HALF_ERROR).sum()) / max(n_vectors, 1)


def _offset_ratio(flat: Sequence[Tensor]) -> float | None:
    """Return |mean over images|^2 / trace of the covariance over images.

    flat: the site's tensors, (images, numbers) each. None for one image, and without variance.
    """
    n_images = len(flat[0])
    if n_images < 2:
        return None
    squared_mean = 0.0
    variance = 0.0
    for x in flat:
        mean = x.mean(0, dtype=torch.float32)
        squared_mean += float(mean.square().sum(dtype=torch.float32))
        squared_deviations = (x - mean).square().sum(dtype=torch.float32)
        variance += float(squared_deviations) / (n_images - 1)
    return squared_mean / variance if variance > 0 else None


def self_check(
    model: LoadedModel,
    table: SiteTable,
    x: Tensor,
    *,
    sites: Sequence[SiteSpec],
    sublayers: Sequence[Sublayer] = (),
    attention: Sequence[AttentionBlock] = (),
    dtypes: Mapping[str, str] | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] | None = None,
) -> SelfCheck:
    """Run one batch plainly and with hooks, and compare what comes out.

    Checked are, in this order:

    - the output with hooks equals the plain one (bit for bit on the CPU);
    - what is captured of an image is the same beside other images, and in the next run;
    - the cells of patch embeddings depend on the pixels of their patches and on no others (on the
      first image);
    - skip + branch == sum for every chosen sublayer and for every sublayer that a chosen site
      belongs to; branch == sum where the skip is ablated;
    - aliases equal what they stand for;
    - softmax(scores) @ value is what the block uses next;
    - every site was captured as often as expected, without NaN or inf, also after the cast to the
      site's type.

    A sublayer that scales its branch outside of any module, and whose sum fails, is left out in
    place of ending the run: nothing but its residual products depends on it. The model is left
    unchanged; nothing of the batch is kept.

    Args:
        model: the model.
        table: its sites.
        x: (images, channels, rows, cols), normalised.
        sites: the sites to be stored.
        sublayers: the sublayers whose residual products are to be stored.
        attention: the blocks whose attention is to be stored.
        dtypes: site -> the type it is to be stored in, where that is not the table's.
        autocast: gives the context in which the extraction runs the model.
    """
    check = SelfCheck()
    run_context = autocast or nullcontext
    stored = [site for site in sites if site.alias_of is None]
    stored_names = {site.name for site in stored}
    sublayer_names = _sublayers_to_prove(table, stored_names, sublayers)
    aliases = {
        site.name: site.alias_of
        for site in table.sites
        if site.alias_of is not None and site.alias_of in stored_names
    }
    sum_proof = SumProof(model.module, table, sublayer_names)
    alias_proof = AliasProof(aliases)
    examiner = _SiteExaminer(table)
    capture = Capture(
        model, table, sites=stored, sublayers=sublayers, attention=attention
    )
    sum_proof.attach(capture, sublayer_names)
    alias_proof.attach(capture)
    examiner.attach(capture, attention)
    with torch.inference_mode(), run_context():
        precision = current_precision(x.device)
        plain = first_tensor(model.module(x))
        try:
            with capture, sum_proof.watching():
                output = capture.run(x, examiner)
        except CaptureError as error:
            # A model that takes other paths in every run explains a missing capture.
            check.failures.append(_change_failure(model, x) or str(error))
            return check
        examiner.fingerprints.note_output(output, len(x))
        hooked = first_tensor(output)
        if _judge_output(check, plain, hooked, OUTPUT_TOLERANCE[precision]):
            change_or_batch_failure = _change_failure(model, x)
        else:
            # Without the proofs, which would take the tensors of other batches for the first's.
            plain_capture = Capture(
                model, table, sites=stored, sublayers=sublayers, attention=attention
            )
            change_or_batch_failure = _batch_failure(
                check,
                plain_capture,
                x,
                first_prints=examiner.fingerprints,
                precision=precision,
            )
    if change_or_batch_failure is not None:
        # Whatever else a changing model fails is a consequence.
        check.failures = [change_or_batch_failure]
        return check
    _judge_patches(check, model, table, x)
    _judge_sums(check, table, sum_proof, sublayer_names)
    for alias, gap in beyond(alias_proof.errors, aliases, 0).items():
        check.failures.append(
            f"{alias} is not equal to {aliases[alias]} (differs by {gap:.3g})"
        )
    allowed = ATTENTION_TOLERANCE[precision]
    attention_names = [block.name for block in attention]
    for name, gap in beyond(examiner.errors, attention_names, allowed).items():
        check.failures.append(
            f"{name}: attention times values is not what the block uses next (relative "
            f"difference {gap:.3g}, allowed {allowed:.3g})"
        )
    check.figures["sums"] = _largest_error(sum_proof.errors)
    check.figures["aliases"] = _largest_error(alias_proof.errors)
    check.figures["attention"] = _largest_error(examiner.errors)
    _judge_values(check, examiner, stored, dtypes or {})
    return check


def _sublayers_to_prove(
    table: SiteTable, stored_names: set[str], sublayers: Sequence[Sublayer]
) -> list[str]:
    """Return the sublayers whose sums are verified.

    These are the chosen sublayers, those whose skip, branch or sum is a stored site, and those
    whose skip is ablated. Of a branch that is scaled outside of any module only the branch counts:
    skip and sum are outputs of modules, whatever lies between.
    """
    chosen = {sublayer.name for sublayer in sublayers}
    stored_as = {site.name: site.alias_of or site.name for site in table.sites}
    for name, residual in table.residuals.items():
        ends = {stored_as[residual.branch]}
        if residual.witness is None:
            ends |= {stored_as[residual.skip], stored_as[residual.total]}
        if ends & stored_names or residual.ablated:
            chosen.add(name)
    return [name for name in table.residuals if name in chosen]


def _judge_sums(
    check: SelfCheck, table: SiteTable, proof: SumProof, names: Sequence[str]
) -> None:
    """Record the sublayers whose sum is off by more than one rounding: a failure, or left out where
    only the factor of its branch is not known."""
    for name, roundings in beyond(proof.errors, names, 1).items():
        residual = table.residuals[name]
        if residual.witness is None:
            check.failures.append(
                f"{residual.formula} is not {residual.total} ({roundings:.3g} roundings "
                f"apart)"
            )
        else:
            check.left_out[name] = (
                f"what it adds is not the output of {residual.witness.module}, nor that "
                f"times a factor per channel ({roundings:.3g} roundings apart)"
            )


def _change_failure(model: LoadedModel, x: Tensor) -> str | None:
    """Return the failure of a model that changes from run to run; None for any other."""
    change = changing(model.module, x)
    return None if change is None else f"it {change}"


def _batch_failure(
    check: SelfCheck,
    capture: Capture,
    x: Tensor,
    *,
    first_prints: Fingerprints,
    precision: str,
) -> str | None:
    """Return the failure of a model whose features of an image depend on its batch; None if they do
    not. The largest difference is recorded.

    Args:
        check: gets the largest difference.
        capture: runs the model.
        x: the first batch.
        first_prints: fingerprints of what was captured of it.
        precision: "fp32", "tf32" or "half".
    """
    model = capture.model
    largest: dict[str, float] = {}
    for other in compositions(x):
        batch = f"a batch of {plural(len(other.images), 'images')}"
        prints = Fingerprints()
        try:
            with capture:
                output = capture.run(other.images, prints)
            prints.note_output(output, len(other.images))
        except CaptureError as error:
            return _change_failure(model, x) or f"in {batch} instead of {len(x)}: {error}"
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            text = " ".join(str(error).split())
            return f"it runs on {plural(len(x), 'images')} and not on {batch}: {text}"
        errors = prints.differences(first_prints, other.rows, other.first_rows)
        for name, gap in errors.items():
            largest[name] = max(gap, largest.get(name, 0.0))
        suspicious = beyond(errors, errors, other.tolerance(precision))
        if suspicious:
            failure = _change_failure(model, x) or _dependence_failure(
                model, x, other, suspicious, precision
            )
            if failure is not None:
                return failure
    check.figures["batches"] = _largest_error(largest)
    return None


def _dependence_failure(
    model: LoadedModel,
    x: Tensor,
    other: Composition,
    suspicious: Mapping[str, float],
    precision: str,
) -> str | None:
    """Return the failure of a model whose features differ in another batch; None if roundings
    explain it, which a second look in float32 shows.

    Args:
        model: the model.
        x: the first batch.
        other: the other batch.
        suspicious: what was captured -> its difference, of all that differs by more than roundings.
        precision: in which it was captured.
    """
    dependence = batch_dependence(model.module, x, other)
    if dependence is None and precision == "fp32":
        # Between modules: in what a site is made of, or the output.
        where, error = next(iter(suspicious.items()))
    elif dependence is None or dependence.module is None:
        return None
    else:
        where = dependence.module
        error = dependence.error
    return (
        f"features of an image depend on the other images of its batch, first in {where} "
        f"(relative difference {error:.2g}): normalisation, centring or attention over "
        "the batch; expected a model in evaluation mode, which gives the same for an "
        "image in every batch"
    )


def _judge_output(
    check: SelfCheck, plain: Tensor | None, hooked: Tensor | None, tolerance: float
) -> bool:
    """Record how far the output with hooks is from the plain one; return whether they differ by
    more than `tolerance`, relative to the largest value."""
    if plain is None or hooked is None:
        check.notes.append("the model's output is no single tensor: not compared")
        return False
    if plain.shape != hooked.shape:
        check.failures.append(
            "the shape of the model's output changes when hooks are installed"
        )
        return True
    # NaN in both outputs is judged below, not here.
    gap = float((plain.float() - hooked.float()).abs().nan_to_num(0.0).max())
    scale = float(plain.float().abs().nan_to_num(0.0).max())
    check.figures["output_max_abs_difference"] = gap
    allowed = 0.0 if plain.device.type == "cpu" else tolerance * scale
    if gap > allowed:
        check.failures.append(
            f"the model's output changes by {gap:.3g} when hooks are installed"
        )
    if not bool(plain.isfinite().all()):
        check.finite = False
        check.failures.append("the model's output has NaN or inf on the first images")
    return gap > allowed


def _judge_patches(
    check: SelfCheck, model: LoadedModel, table: SiteTable, x: Tensor
) -> None:
    """Record the measured patches, and as a failure where the first image shows other pixels."""
    for patches in table.patches:
        reason = disproof(model.module, patches, x[0])
        if reason:
            check.failures.append(reason)
    check.figures["patches"] = [
        {
            "grid": list(patches.grid),
            "stride_px": list(patches.stride_px),
            "offset_px": list(patches.offset_px),
            "window_px": [length for _, length in patches.window],
        }
        for patches in table.patches
    ]


def _judge_values(
    check: SelfCheck,
    examiner: _SiteExaminer,
    stored: Sequence[SiteSpec],
    dtypes: Mapping[str, str],
) -> None:
    """Record each site's values, choose the type it is stored in, and note what float16 or
    comparisons would make of them.

    Args:
        check: gets dtypes, notes, figures and failures.
        examiner: what was measured.
        stored: the sites to be stored.
        dtypes: site -> the type it is to be stored in, where that is not the table's.
    """
    underflowed: list[str] = []
    for site in stored:
        name = site.name
        if name not in examiner.max_abs:
            check.failures.append(f"{name} was not captured")
            continue
        dtype = dtypes.get(name, site.dtype)
        largest = examiner.max_abs[name]
        loses_tokens = (
            site.kind != "vector" and examiner.underflowing[name] > MAX_UNDERFLOWING
        )
        if dtype == "float16" and largest > FLOAT16_MAX:
            dtype = "float32"
            check.notes.append(
                f"{name} is stored in float32: its largest value {largest:.4g} exceeds "
                f"float16"
            )
        elif dtype == "float16" and loses_tokens:
            dtype = "float32"
            underflowed.append(name)
        check.dtypes[name] = dtype
        ratio = examiner.offset[name]
        if ratio is not None and ratio > OFFSET_WARNING:
            check.notes.append(
                f"{name}: |mean|^2 is {ratio:.3g} times its variance over images; "
                "comparisons need centred features in high precision"
            )
    if underflowed:
        stored_as = "is" if len(underflowed) == 1 else "are"
        check.notes.append(
            f"{abbreviate(underflowed)} {stored_as} stored in float32: values so small "
            "lose digits or become 0 in float16"
        )
    if examiner.broken:
        check.finite = False
        sites = abbreviate(list(examiner.broken))
        check.failures.append(f"NaN or inf in {sites}: are the weights sound?")
    check.figures["sites"] = {
        site.name: {
            "max_abs": examiner.max_abs[site.name],
            "offset_ratio": examiner.offset[site.name],
        }
        for site in stored
        if site.name in examiner.max_abs
    }


def _largest_error(errors: Mapping[str, float]) -> dict[str, Any]:
    """Return how many errors there are, the largest, and the site where it was."""
    if not errors:
        return {"n": 0}
    site = max(errors, key=lambda name: errors[name])
    error = errors[site]
    # JSON knows no infinity.
    return {
        "n": len(errors),
        "max": error if math.isfinite(error) else None,
        "site": site,
    }
