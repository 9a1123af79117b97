"""Forward passes without some skip connections: z + f(z) becomes f(z) (Raghu et al. 2021, Fig. 8).

The branch's last module returns its output as a tensor that ignores the addition of the skip
(branch_only.py), so the result is f to the bit and no code of the block is rewritten. That the
block's output is f is verified: first on random images, then by every extraction's self-check, as
branch == sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitsee_core.models.branch_only import branch_only
from vitsee_core.models.hook_points import HookPoint, ModelError
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_stores.errors import SiteError
from vitsee_stores.manifest import few
from vitsee_stores.selectors import GROUPS, select_names

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
    asked = {found: said[x] for x in said for found in _sublayers(model, table, x, said[x])}
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
    cuts = _Cuts(model.module, ends)
    before, model.ablate_skip = model.ablate_skip, tuple(chosen)
    proven = site_table(model)
    for name in chosen:
        if name not in proven.residuals:
            cuts.remove()
            model.ablate_skip = before
            block = table.residuals[name].total.rpartition(".")[0]
            reason = proven.left_out.get(block, "without its skip the block is no longer read")
            raise ModelError(f"{asked[name]} {name} cannot be done in {model.name}: {reason}")


def _sublayers(model: LoadedModel, table: SiteTable, text: str, option: str) -> list[str]:
    """The sublayers that one name stands for; `option`: where it was given."""
    places: dict[str, list[str]] = {}
    for name, residual in table.residuals.items():
        block = residual.total.rpartition(".")[0]
        for place in dict.fromkeys((block, name)):
            places.setdefault(place, []).append(name)
    known = [replace(table.sites[0], name=name, groups=(), alias_of=None) for name in places]
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
        f"skip is known; there are: {few(list(places), SHOWN)} (run: vitsee sites {model.name})"
    )


class _Cuts:
    """Hooks behind the branches' last modules, counting the calls of those that several share."""

    def __init__(self, module: nn.Module, ends: Sequence[HookPoint]) -> None:
        self.counts: Counter[str] = Counter()
        self.handles = [module.register_forward_pre_hook(lambda _m, _a: self.counts.clear())]
        by_module: dict[str, set[int]] = {}
        for hook_point in ends:
            by_module.setdefault(hook_point.module, set()).add(hook_point.call)
        for path, calls in by_module.items():
            child = module.get_submodule(path)
            self.handles.append(child.register_forward_hook(self._cut(path, calls)))

    def _cut(self, path: str, calls: set[int]) -> Callable[..., Any]:
        def cut(_module: nn.Module, _args: Any, output: Any) -> Any:
            call = self.counts[path]
            self.counts[path] += 1
            if call not in calls:
                return None
            if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
                return (branch_only(output[0]), *output[1:])
            return branch_only(output) if isinstance(output, Tensor) else None

        return cut

    def remove(self) -> None:
        """Restore the skips."""
        for handle in self.handles:
            handle.remove()
