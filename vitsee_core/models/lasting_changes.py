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
    ModuleSide,
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

MAX_NAMES_SHOWN = 8


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
    # Of the unchanged model: it says where each branch ends.
    table = site_table(model)
    option_by_text = dict.fromkeys(names, "--ablate-skip")
    option_by_text |= dict.fromkeys(
        model.trained_without, "ablate_skip of its config.json:"
    )
    option_by_sublayer = {}
    for text, option in option_by_text.items():
        for name in _named_sublayers(model, table, text, option):
            option_by_sublayer[name] = option
    sublayers = sorted(option_by_sublayer)
    if not sublayers:
        return
    # A branch that no module gives cannot be made to ignore its sum.
    for name in sublayers:
        if table.residuals[name].witness is not None:
            raise ModelError(
                f"{option_by_sublayer[name]} {name} cannot be done in {model.name}: its "
                "branch is scaled outside of any module before it is added"
            )
    branch_outputs = [
        table.points[table.residuals[name].branch].hook_points[0] for name in sublayers
    ]
    handles = _ignore_skips(model.module, branch_outputs)
    previous = model.ablate_skip
    model.ablate_skip = tuple(sublayers)
    # Proven again: branch == sum must hold where the skip is out.
    proven = site_table(model)
    for name in sublayers:
        if name not in proven.residuals:
            for handle in handles:
                handle.remove()
            model.ablate_skip = previous
            block = table.residuals[name].total.rpartition(".")[0]
            reason = proven.left_out.get(
                block, "without its skip the block is no longer read"
            )
            raise ModelError(
                f"{option_by_sublayer[name]} {name} cannot be done in {model.name}: "
                f"{reason}"
            )


def _named_sublayers(
    model: LoadedModel, table: SiteTable, text: str, option: str
) -> list[str]:
    """Return the sublayers that a name, a glob or a block stands for.

    Args:
        model: the model.
        table: its sites.
        text: as the user gives it.
        option: where it was given, in messages.

    Raises:
        ModelError: there is no such sublayer or block, or its skip is not known.
    """
    sublayers_by_name: dict[str, list[str]] = {}
    for name, residual in table.residuals.items():
        block = residual.total.rpartition(".")[0]
        sublayers_by_name.setdefault(block, []).append(name)
        if name != block:
            sublayers_by_name.setdefault(name, []).append(name)
    # Blocks and sublayers as if they were sites, so that one function reads all selectors.
    selectable = [
        replace(table.sites[0], name=name, groups=(), alias_of=None)
        for name in sublayers_by_name
    ]
    # Words of groups ("residual") are no blocks, though select_names knows them.
    selected = []
    if text not in GROUPS:
        try:
            selected = select_names([text], selectable)
        except SiteError:
            selected = []
    if selected:
        return [name for site in selected for name in sublayers_by_name[site.name]]
    reason = table.left_out.get(text)
    if reason:
        raise ModelError(f"{option} {text} cannot be done in {model.name}: {reason}")
    if not sublayers_by_name:
        raise ModelError(f"{option} {text}: {model.name} has {table.residual_refusal}")
    names = abbreviate(list(sublayers_by_name), MAX_NAMES_SHOWN)
    raise ModelError(
        f"{option} {text}: {model.name} has no residual block or sublayer of this name "
        f"whose skip is known; there are: {names} (run: vitsee sites {model.name})"
    )


def _ignore_skips(
    module: nn.Module, branch_outputs: Sequence[HookPoint]
) -> list[RemovableHandle]:
    """Let the outputs of branches ignore the addition of their skips, and return the hooks that do
    it; once these are removed the skips are as before."""
    n_calls: Counter[str] = Counter()
    # Several branches may end in one module that they share: its calls tell them apart.
    calls_by_path: dict[str, set[int]] = defaultdict(set)
    for hook_point in branch_outputs:
        calls_by_path[hook_point.module].add(hook_point.call)

    def ignore_skip(path: str, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Return the output as a `BranchOnly`, or None to leave it as it is."""
        call = n_calls[path]
        n_calls[path] += 1
        if call not in calls_by_path[path]:
            return None
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (branch_only(output[0]), *output[1:])
        return branch_only(output) if isinstance(output, Tensor) else None

    # Calls are counted anew in each forward pass.
    handles = [module.register_forward_pre_hook(lambda _m, _a: n_calls.clear())]
    for path in calls_by_path:
        child = module.get_submodule(path)
        handles.append(child.register_forward_hook(partial(ignore_skip, path)))
    return handles


def add_registers(model: LoadedModel, n: int) -> None:
    """Add n tokens of zeros to what the model's blocks work on, for good.

    They follow the prefix tokens, and are named as further registers; `model.geometry` becomes the
    geometry with them (Jiang et al. 2025).

    Raises:
        ModelError: the model's blocks do not all work on the same tokens, or not on more of them;
            nothing takes the last block's output as it is. The model is left unchanged.
    """
    problem = f"--registers cannot be added to {model.name}"
    table = site_table(model)
    observed = survey(model.module, model.input_size)
    layout = _shared_layout(table, observed, problem)
    n_registers = sum(name.startswith("reg") for name in layout.prefix)
    added = tuple(f"reg{n_registers + i}" for i in range(n))
    # Added before the first block, taken out before whatever follows the last one.
    first_block = observed.blocks[0]
    changes_by_path = {first_block: n}
    for path in _modules_behind_blocks(observed, problem):
        changes_by_path[path] = -n
    handles = []
    for path, change in changes_by_path.items():
        hook = _TokenChange(
            position=layout.n_prefix,
            n=change,
            turned=ModuleSide(path, is_input=True) in table.turned,
        )
        child = model.module.get_submodule(path)
        handles.append(child.register_forward_pre_hook(hook, with_kwargs=True))
    # Steps and patches were measured without them.
    model.geometry = replace(observed.geometry, added=added, steps=None, patches=())
    # The model may do other things with the tokens: everything else must be as before.
    new_layout = replace(layout, prefix=layout.prefix + added)
    try:
        reason = _unexpected_change(
            table, _table_with_tokens(model), _block_sites(observed), new_layout
        )
    except ModelError as error:
        reason = str(error).partition("; expected")[0]
    if reason:
        for handle in handles:
            handle.remove()
        model.geometry = None
        raise ModelError(f"{problem}: {reason}")


def _block_sites(observed: Survey) -> list[str]:
    """Return the sites whose tokens grow: the first block's input, and each block's output."""
    return ["embed", *(f"{observed.names[path]}.out" for path in observed.blocks)]


def _shared_layout(table: SiteTable, observed: Survey, problem: str) -> TokenLayout:
    """Return the layout of the first block's input, which all blocks must share.

    problem: the beginning of an error line.

    Raises:
        ModelError: other tokens in some block, or no grid.
    """
    if "embed" not in table.points:
        raise ModelError(f"{problem}: no sequence of tokens goes into its blocks")
    view = table.points["embed"].view
    for name in _block_sites(observed):
        block_view = table.points[name].view if name in table.points else None
        if (
            block_view is None
            or block_view.form != "tokens"
            or block_view.layout != view.layout
        ):
            raise ModelError(
                f"{problem}: {name} is not the sequence of prefix tokens and patches that "
                "goes into the first block; expected a plain ViT"
            )
    if view.layout is None or view.layout.grid is None:
        raise ModelError(f"{problem}: its tokens lie on no grid")
    return view.layout


def _modules_behind_blocks(observed: Survey, problem: str) -> list[str]:
    """Return the modules, none inside another, that take the last block's output as it is.

    problem: the beginning of an error line.

    Raises:
        ModelError: there is none, or one that is called several times.
    """
    trace = observed.trace
    last = observed.blocks[-1]
    output = trace.left(last)
    taking = []
    for name, calls in trace.calls.items():
        if output is None or f"{name}.".startswith(f"{last}."):
            continue
        if any(call.entered and call.entered.key == output.key for call in calls):
            taking.append(name)
    # A module inside another gets what that was given: the outer one is hooked alone.
    outer = [
        name
        for name in taking
        if not any(name.startswith(f"{other}.") for other in taking)
    ]
    if not outer or any(len(trace.calls[name]) > 1 for name in outer):
        raise ModelError(
            f"{problem}: no module, such as a final norm, takes the output of {last} as "
            f"it is"
        )
    return outer


def _table_with_tokens(model: LoadedModel) -> SiteTable:
    """Return the model's site table with the added tokens.

    Raises:
        ModelError: the model's own code refuses their number.
    """
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


def _unexpected_change(
    before: SiteTable, after: SiteTable, names: Sequence[str], layout: TokenLayout
) -> str:
    """Return the first thing that the added tokens changed beside the layout of blocks, in words;
    "" for nothing.

    Args:
        before: the table without the tokens.
        after: the table with them.
        names: the sites whose layout changes.
        layout: their layout with the tokens.
    """
    for name in names:
        if name not in after.points or after.points[name].view.layout != layout:
            return f"the tokens of {name} are no longer known"
    for name in ("pooled", "logits"):
        shape_before = before[name].shape if name in before.points else None
        shape_after = after[name].shape if name in after.points else None
        if shape_before != shape_after:
            return f"{name} changes with the number of tokens"
    for name in before.residuals:
        if name not in after.residuals:
            return f"with more tokens the residual sum of {name} is no longer known"
    for name in before.attention_modules:
        if name not in after.attention_modules:
            return f"with more tokens the attention of {name} is no longer known"
    return ""


class _TokenChange:
    """A forward pre-hook that puts tokens of zeros into a module's input, or takes tokens out.

    Args:
        position: tokens in front of them.
        n: how many are put in; negative for tokens that are taken out.
        turned: whether tokens come before images.
    """

    def __init__(self, *, position: int, n: int, turned: bool) -> None:
        self.position = position
        self.n_added = max(n, 0)
        self.n_removed = max(-n, 0)
        self.axis = 0 if turned else 1

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the module's arguments with another input; None where it has no tensor."""
        old = input_tensor(args, kwargs)
        if old is None:
            return None
        head = old.narrow(self.axis, 0, self.position)
        start = self.position + self.n_removed
        tail = old.narrow(self.axis, start, old.shape[self.axis] - start)
        shape = list(old.shape)
        shape[self.axis] = self.n_added
        new = torch.cat([head, old.new_zeros(shape), tail], self.axis)
        return swapped(args, old, new), swapped(kwargs, old, new)
