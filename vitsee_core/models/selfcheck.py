"""The self-check on the first batch: whether hooks capture what their names say, and whether the
values fit their types."""

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
    """Weights or activations of a model are NaN or inf."""


@dataclass
class SelfCheck:
    """The result, fit for the manifest.

    failures: what was found wrong, one line each. figures: the errors measured (output, sums in
    units of rounding, attention relative to its largest output, aliases), the measured patches,
    and per site `max_abs` (NaN and inf left out) and `offset_ratio`, |mean over images|^2 / trace
    of the covariance over images, None for one image. dtypes: site -> stored type, float32 where
    float16 would overflow or underflow.
    notes: remarks for the user. left_out: sublayers whose branch is scaled by nothing that was seen
    and by no fitted factor -> the reason why their residual products are not to be stored.
    finite: False if activations or the output are NaN or inf.
    """

    failures: list[str] = field(default_factory=list)
    finite: bool = True
    figures: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True where nothing failed."""
        return not self.failures


class _Examiner(AttentionProof):
    """Measures every site as it is captured, beside its proof."""

    def __init__(self, table: SiteTable) -> None:
        super().__init__(table)
        self.max_abs: dict[str, float] = {}
        self.offset: dict[str, float | None] = {}
        self.underflowing: dict[str, float] = {}
        self.broken: dict[str, int] = {}
        self.fingerprints = Fingerprints()

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Largest value, values that are not finite, the offset ratio, and the tokens that float16
        would lose."""
        self.fingerprints.site(site, prefix, body)
        tokens = [part for part in (prefix, body) if part is not None and part.numel()]
        self.underflowing[site.name] = max(map(underflowing, tokens), default=0.0)
        parts = [part.flatten(1).float() for part in (prefix, body) if part is not None]
        finite = all(bool(part.isfinite().all()) for part in parts)
        if not finite:
            self.broken[site.name] = sum(int((~part.isfinite()).sum()) for part in parts)
            parts = [part.nan_to_num(0.0, 0.0, 0.0) for part in parts]
        self.max_abs[site.name] = max(float(part.abs().max()) for part in parts)
        self.offset[site.name] = _offset_ratio(parts) if finite else None

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        """Sums are verified from the sites; here only that both have one shape."""
        self.fingerprints.branch(sublayer, z, f)
        if z.shape != f.shape:
            raise CaptureError(
                f"{sublayer.name}: skip {tuple(z.shape)} and branch {tuple(f.shape)} differ"
            )

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """The proof of `AttentionProof`."""
        self.fingerprints.attention(block, call)
        super().attention(block, call)


def underflowing(x: Tensor) -> float:
    """The share of vectors along the last axis that float16 rounds by more than MAX_HALF_ERROR of
    their length, because their numbers are too small for it. Vectors of zeros are not counted."""
    x = x.float().nan_to_num(0.0, 0.0, 0.0)
    x = x if x.ndim > 1 else x.unsqueeze(-1)
    within = x.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    gaps = within - within.half().float()
    # Squares of the smallest numbers would be zero in float32.
    scale = x.abs().amax(-1, keepdim=True)
    shared = torch.where(scale > 0, scale, torch.ones_like(scale))
    errors = (gaps / shared).norm(dim=-1) / (x / shared).norm(dim=-1)
    n_vectors = int((scale > 0).sum())
    return float((errors > MAX_HALF_ERROR).sum()) / max(n_vectors, 1)


def _offset_ratio(parts: Sequence[Tensor]) -> float | None:
    n_images = len(parts[0])
    if n_images < 2:
        return None
    mean_sq = 0.0
    spread = 0.0
    for part in parts:
        mean = part.mean(0, dtype=torch.float32)
        mean_sq += float(mean.square().sum(dtype=torch.float32))
        spread += float((part - mean).square().sum(dtype=torch.float32)) / (n_images - 1)
    return mean_sq / spread if spread > 0 else None


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
    """Run one normalised batch (images, channels, rows, cols) plainly and with hooks, and compare.

    A sublayer that scales its branch outside of any module, and whose sum fails, is left out in
    place of ending the run: nothing but its residual products depends on it.

    Checked: the hooked output equals the plain one (bit for bit on the CPU); what is captured of an
    image is the same beside other images, and in the next run; skip + branch == sum for every
    chosen sublayer and for every sublayer that a chosen site belongs to (branch == sum where the
    skip is ablated); aliases equal what they stand for; softmax(scores) @ value is what the block
    uses next; the cells of patch embeddings depend on the pixels of their patches and on no others
    (on the first image); every site was captured as often as expected; no NaN or inf, nor after the
    cast to the site's type. The model is left unchanged; nothing of the batch is kept.
    """
    check = SelfCheck()
    within = autocast or nullcontext
    stored = [site for site in sites if site.alias_of is None]
    wanted = {site.name for site in stored}
    names = _sums(table, wanted, sublayers)
    aliases = {
        site.name: site.alias_of
        for site in table.sites
        if site.alias_of is not None and site.alias_of in wanted
    }
    sums = SumProof(model.module, table, names)
    equal = AliasProof(aliases)
    examiner = _Examiner(table)
    capture = Capture(
        model, table, sites=stored, sublayers=sublayers, attention=attention
    )
    sums.attach(capture, names)
    equal.attach(capture)
    examiner.attach(capture, attention)
    with torch.inference_mode(), within():
        precision = current_precision(x.device)
        plain = first_tensor(model.module(x))
        try:
            with capture, sums.watching():
                output = capture.run(x, examiner)
        except CaptureError as error:
            check.failures.append(_changing(model, x) or str(error))
            return check
        examiner.fingerprints.note_output(output, len(x))
        hooked = first_tensor(output)
        if _judge_output(check, plain, hooked, OUTPUT_TOLERANCE[precision]):
            dependence = _changing(model, x)
        else:
            again = Capture(
                model, table, sites=stored, sublayers=sublayers, attention=attention
            )
            dependence = _batch_failure(check, again, x, examiner.fingerprints, precision)
    if dependence is not None:
        # Whatever else a changing model fails is a consequence.
        check.failures = [dependence]
        return check
    _judge_patches(check, model, table, x)
    residuals = table.residuals
    for name, roundings in beyond(sums.errors, names, 1).items():
        reason = f"{residuals[name].formula} is not {residuals[name].total}"
        witness = residuals[name].witness
        if witness is None:
            check.failures.append(f"{reason} ({roundings:.3g} roundings apart)")
        else:
            check.left_out[name] = (
                f"what it adds is not the output of {witness.module}, nor that times a factor per "
                f"channel ({roundings:.3g} roundings apart)"
            )
    check.failures += [
        f"{alias} is not equal to {aliases[alias]} (differs by {gap:.3g})"
        for alias, gap in beyond(equal.errors, aliases, 0).items()
    ]
    allowed = ATTENTION_TOLERANCE[precision]
    check.failures += [
        f"{name}: attention times values is not what the block uses next (relative difference "
        f"{error:.3g}, allowed {allowed:.3g})"
        for name, error in beyond(
            examiner.errors, [b.name for b in attention], allowed
        ).items()
    ]
    for what, proof in (("sums", sums), ("aliases", equal), ("attention", examiner)):
        check.figures[what] = _worst(proof.errors)
    _judge_values(check, examiner, stored, dtypes or {})
    return check


def _sums(table: SiteTable, wanted: set[str], sublayers: Sequence[Sublayer]) -> list[str]:
    """Sublayers to prove: those chosen, those whose skip, branch or sum is a chosen site (of a
    branch that is scaled outside of any module: whose branch is), and those whose skip is
    ablated."""
    chosen = {sublayer.name for sublayer in sublayers}
    alias = {site.name: site.alias_of or site.name for site in table.sites}
    for name, residual in table.residuals.items():
        ends = {alias[s] for s in (residual.skip, residual.branch, residual.total)}
        if residual.witness is not None:
            ends = {
                alias[residual.branch]
            }  # its ends are modules' own, whatever lies between
        if ends & wanted or residual.ablated:
            chosen.add(name)
    return [name for name in table.residuals if name in chosen]


def _changing(model: LoadedModel, x: Tensor) -> str | None:
    """The failure of a model that changes from run to run; None of any other."""
    words = changing(model.module, x)
    return None if words is None else f"it {words}"


def _batch_failure(
    check: SelfCheck, capture: Capture, x: Tensor, first: Fingerprints, precision: str
) -> str | None:
    """The failure of a model whose features of an image depend on its batch; None if they do not.
    The largest difference is recorded."""
    model = capture.model
    largest: dict[str, float] = {}
    for other in compositions(x):
        n_images = f"a batch of {plural(len(other.images), 'images')}"
        prints = Fingerprints()
        try:
            with capture:
                output = capture.run(other.images, prints)
            prints.note_output(output, len(other.images))
        except CaptureError as error:
            return _changing(model, x) or f"in {n_images} instead of {len(x)}: {error}"
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            text = " ".join(str(error).split())
            return f"it runs on {plural(len(x), 'images')} and not on {n_images}: {text}"
        errors = prints.differences(first, other.rows, other.first_rows)
        for name, gap in errors.items():
            largest[name] = max(gap, largest.get(name, 0.0))
        suspicious = beyond(errors, errors, other.tolerance(precision))
        if suspicious:
            failure = _changing(model, x) or _depending(
                model, x, other, suspicious, precision
            )
            if failure is not None:
                return failure
    check.figures["batches"] = _worst(largest)
    return None


def _depending(
    model: LoadedModel,
    x: Tensor,
    other: Composition,
    suspicious: Mapping[str, float],
    precision: str,
) -> str | None:
    """The failure of a model that gave this in another batch; None if roundings explain it."""
    dependence = batch_dependence(model.module, x, other)
    if dependence is None and precision == "fp32":
        # Between modules: in what a site is made of, or the output.
        first = next(iter(suspicious))
        where = first
        error = suspicious[first]
    elif dependence is None or dependence.module is None:
        return None
    else:
        where = dependence.module
        error = dependence.error
    return (
        f"features of an image depend on the other images of its batch, first in {where} "
        f"(relative difference {error:.2g}): normalisation, centring or attention over the batch; "
        "expected a model in evaluation mode, which gives the same for an image in every batch"
    )


def _judge_output(
    check: SelfCheck, plain: Tensor | None, hooked: Tensor | None, tolerance: float
) -> bool:
    """Record how far the output with hooks is from the plain one; returns whether they differ."""
    if plain is None or hooked is None:
        check.notes.append("the model's output is no single tensor: not compared")
        return False
    if plain.shape != hooked.shape:
        check.failures.append(
            "the shape of the model's output changes when hooks are installed"
        )
        return True
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
    for patches in table.patches:
        wrong = disproof(model.module, patches, x[0])
        if wrong:
            check.failures.append(wrong)
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
    examiner: _Examiner,
    stored: Sequence[SiteSpec],
    dtypes: Mapping[str, str],
) -> None:
    underflowed: list[str] = []
    for site in stored:
        name = site.name
        if name not in examiner.max_abs:
            check.failures.append(f"{name} was not captured")
            continue
        dtype = dtypes.get(name, site.dtype)
        largest = examiner.max_abs[name]
        if dtype == "float16" and largest > FLOAT16_MAX:
            dtype = "float32"
            check.notes.append(
                f"{name} is stored in float32: its largest value {largest:.4g} exceeds float16"
            )
        elif (
            dtype == "float16"
            and site.kind != "vector"
            and examiner.underflowing[name] > MAX_UNDERFLOWING
        ):
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
            f"{abbreviate(underflowed)} {stored_as} stored in float32: values so small lose "
            "digits or "
            "become 0 in float16"
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


def _worst(errors: Mapping[str, float]) -> dict[str, Any]:
    """How many were compared, the largest error, and where it was."""
    if not errors:
        return {"n": 0}
    where = max(errors, key=lambda name: errors[name])
    worst = errors[where]
    # JSON knows no infinity.
    return {
        "n": len(errors),
        "max": worst if math.isfinite(worst) else None,
        "site": where,
    }
