"""Changes to a model that are made once, as it is loaded: skips taken out, registers added.

Without a skip z + f(z) becomes f(z) (Raghu et al. 2021, Fig. 8): the branch's last module returns
its output as a tensor that ignores the addition of the skip (`hook_points.branch_only`), so the
result is f to the bit and no code of the block is rewritten. That the block's output is f is
verified: first on random images, then by every extraction's self-check, as branch == sum.

Registers are zero tokens added to a trained model's input, test-time registers (Jiang et al. 2025,
arXiv 2506.08010). They go in behind the prefix tokens where the first block begins, and out again
before what takes the last block's output, so that pooling and head see as many tokens as ever.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import (
    HookPoint,
    ModelError,
    branch_only,
    input_tensor,
)
from vitsee_core.models.interventions.changes import swapped
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.survey import Survey, survey
from vitsee_stores.errors import SiteError
from vitsee_stores.layout import TokenLayout
from vitsee_stores.manifest import abbreviate
from vitsee_stores.selectors import GROUPS, select_names

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

SHOWN = 8


def ablate_skips(model: LoadedModel, names: Sequence[str]) -> None:
    """Take the skips of these sublayers, and of those of the model's own configuration
    (`trained_without`), out of the model's forward pass, for good.

    A name is a sublayer (`blocks.3.attn`, `blocks.3.mlp`, `blocks.3.token`), a block (all its
    sublayers; a residual CNN block has one), a glob of either, or counts from the end
    (`blocks.-1`). `model.ablate_skip` becomes the sorted names of the sublayers.

    Raises:
        ModelError: no such sublayer or block, or one whose sum cannot be identified; the model is
            left unchanged.
    """
    table = site_table(model)
    said = dict.fromkeys(names, "--ablate-skip")
    said |= dict.fromkeys(model.trained_without, "ablate_skip of its config.json:")
    asked = {
        found: said[x] for x in said for found in _sublayers(model, table, x, said[x])
    }
    chosen = sorted(asked)
    if not chosen:
        return
    for name in chosen:
        if table.residuals[name].witness is not None:
            raise ModelError(
                f"{asked[name]} {name} cannot be done in {model.name}: its branch is scaled "
                "outside of any module before it is added"
            )
    ends = [table.points[table.residuals[name].branch].hook_points[0] for name in chosen]
    cuts = _cut(model.module, ends)
    before = model.ablate_skip
    model.ablate_skip = tuple(chosen)
    proven = site_table(model)
    for name in chosen:
        if name not in proven.residuals:
            for handle in cuts:
                handle.remove()
            model.ablate_skip = before
            block = table.residuals[name].total.rpartition(".")[0]
            reason = proven.left_out.get(
                block, "without its skip the block is no longer read"
            )
            raise ModelError(
                f"{asked[name]} {name} cannot be done in {model.name}: {reason}"
            )


def _sublayers(model: LoadedModel, table: SiteTable, text: str, option: str) -> list[str]:
    """The sublayers that one name stands for; `option`: where it was given."""
    places: dict[str, list[str]] = {}
    for name, residual in table.residuals.items():
        block = residual.total.rpartition(".")[0]
        for place in dict.fromkeys((block, name)):
            places.setdefault(place, []).append(name)
    known = [
        replace(table.sites[0], name=name, groups=(), alias_of=None) for name in places
    ]
    try:
        found = [] if text in GROUPS else select_names([text], known)
    except SiteError:
        found = []
    if found:
        return [name for site in found for name in places[site.name]]
    if reason := table.left_out.get(text):
        raise ModelError(f"{option} {text} cannot be done in {model.name}: {reason}")
    if not places:
        raise ModelError(f"{option} {text}: {model.name} has {table.residual_refusal}")
    raise ModelError(
        f"{option} {text}: {model.name} has no residual block or sublayer of this name whose "
        f"skip is known; there are: {abbreviate(list(places), SHOWN)} (run: vitsee sites "
        f"{model.name})"
    )


def _cut(module: nn.Module, ends: Sequence[HookPoint]) -> list[RemovableHandle]:
    """Hooks behind the branches' last modules, counting the calls of those that several share; once
    they are removed the skips are as before."""
    counts: Counter[str] = Counter()
    ending: dict[str, set[int]] = defaultdict(set)
    for hook_point in ends:
        ending[hook_point.module].add(hook_point.call)

    def cut(path: str, _module: nn.Module, _args: Any, output: Any) -> Any:
        call = counts[path]
        counts[path] += 1
        if call not in ending[path]:
            return None
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (branch_only(output[0]), *output[1:])
        return branch_only(output) if isinstance(output, Tensor) else None

    before = module.register_forward_pre_hook(lambda _m, _a: counts.clear())
    behind = [
        module.get_submodule(path).register_forward_hook(partial(cut, path))
        for path in ending
    ]
    return [before, *behind]


def add_registers(model: LoadedModel, n: int) -> None:
    """Add n tokens of zeros to what the model's blocks work on, for good. They follow the prefix
    tokens, and are named as further registers; `model.geometry` becomes that with them.

    Raises:
        ModelError: the model's blocks do not all work on the same tokens, or not on more of them;
            nothing takes the last block's output as it is. The model is left unchanged.
    """
    said = f"--registers cannot be added to {model.name}"
    table = site_table(model)
    found = survey(model.module, model.input_size)
    layout = _shared_layout(table, found, said)
    n_there = sum(name.startswith("reg") for name in layout.prefix)
    added = tuple(f"reg{n_there + i}" for i in range(n))
    ends = _takers(found, said)
    first = found.blocks[0]
    at = layout.n_prefix
    handles = [
        model.module.get_submodule(path).register_forward_pre_hook(
            _Tokens(at, n if path == first else -n, (path, True) in table.turned),
            with_kwargs=True,
        )
        for path in (first, *ends)
    ]
    model.geometry = replace(found.geometry, added=added, steps=None, patches=())
    whole = replace(layout, prefix=layout.prefix + added)
    try:
        wrong = _differences(table, _retraced(model), _places(found), whole)
    except ModelError as error:
        wrong = str(error).partition("; expected")[0]
    if wrong:
        for handle in handles:
            handle.remove()
        model.geometry = None
        raise ModelError(f"{said}: {wrong}")


def _places(found: Survey) -> list[str]:
    """The sites whose tokens grow: what goes into the first block, and what each block gives."""
    return ["embed", *(f"{found.names[path]}.out" for path in found.blocks)]


def _shared_layout(table: SiteTable, found: Survey, said: str) -> TokenLayout:
    """The layout of what goes into the first block, which all blocks must share."""
    if "embed" not in table.points:
        raise ModelError(f"{said}: no sequence of tokens goes into its blocks")
    view = table.points["embed"].view
    for name in _places(found):
        own = table.points[name].view if name in table.points else None
        if own is None or own.form != "tokens" or own.layout != view.layout:
            raise ModelError(
                f"{said}: {name} is not the sequence of prefix tokens and patches that goes into "
                "the first block; expected a plain ViT"
            )
    if view.layout is None or view.layout.grid is None:
        raise ModelError(f"{said}: its tokens lie on no grid")
    return view.layout


def _takers(found: Survey, said: str) -> list[str]:
    """The modules, none inside another, that the last block's output goes into as it is."""
    last = found.blocks[-1]
    left = found.trace.left(last)
    taking = [
        name
        for name, calls in found.trace.calls.items()
        if left and not f"{name}.".startswith(f"{last}.")
        if any(call.entered and call.entered.key == left.key for call in calls)
    ]
    outer = [a for a in taking if not any(a.startswith(f"{b}.") for b in taking)]
    if not outer or any(len(found.trace.calls[name]) > 1 for name in outer):
        raise ModelError(
            f"{said}: no module, such as a final norm, takes the output of {last} as it is"
        )
    return outer


def _retraced(model: LoadedModel) -> SiteTable:
    """The model's table with the tokens; what its own code refuses is a ModelError."""
    device = next(model.module.parameters()).device
    try:
        with torch.no_grad():
            model.module(torch.zeros(2, *model.input_size, device=device))
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"its forward pass has a fixed number of tokens ({text})"
        ) from error
    return site_table(model)


def _differences(
    before: SiteTable, after: SiteTable, names: Sequence[str], layout: TokenLayout
) -> str:
    """The first thing that the added tokens changed beside the layout of these sites of blocks; ""
    for nothing."""
    for name in names:
        if name not in after.points or after.points[name].view.layout != layout:
            return f"the tokens of {name} are no longer known"
    for name in ("pooled", "logits"):
        there = [table[name].shape for table in (before, after) if name in table.points]
        if there and there != 2 * there[:1]:
            return f"{name} changes with the number of tokens"
    for what, a, b in (
        ("residual sum", before.residuals, after.residuals),
        ("attention", before.attention_modules, after.attention_modules),
    ):
        if missing := [name for name in a if name not in b]:
            return f"with more tokens the {what} of {missing[0]} is no longer known"
    return ""


class _Tokens:
    """A hook before a module: n zero tokens are put into its input behind `at` others, or -n taken
    out there. turned: tokens come before images."""

    def __init__(self, at: int, n: int, turned: bool) -> None:
        self.at = at
        self.n = n
        self.dim = 0 if turned else 1

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        old = input_tensor(args, kwargs)
        if old is None:
            return None
        head = old.narrow(self.dim, 0, self.at)
        start = self.at + max(-self.n, 0)
        tail = old.narrow(self.dim, start, old.shape[self.dim] - start)
        zeros = old.new_zeros(max(self.n, 0), *old.transpose(0, self.dim).shape[1:])
        new = torch.cat([head, zeros.transpose(0, self.dim), tail], self.dim)
        return swapped(args, old, new), swapped(kwargs, old, new)
