"""The hooks of interventions, and the proof on images that they do what they say: what a site holds
is replaced where the following layers take it, and queries do not attend to blocked keys.

A site that is a module's output, or its input, is replaced by another tensor. A residual sum that
is no module's output (`mid` of a transformer block) is written over in place, as its skip must see
the change, too. Scores of blocked keys become -inf, and the rows of weights are renormalised by the
softmax itself, within a TorchFunctionMode inside that of AttentionWatch, which so sees the changed
arguments.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitsee_core.models.attention_watch import (
    KERNEL,
    KERNEL_ARGS,
    SOFTMAX,
    AttentionCall,
    AttentionMode,
)
from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.hook_points import (
    BranchOnly,
    CaptureError,
    HookPoint,
    ModelError,
    ModuleSide,
    View,
    branch_only,
    input_tensor,
    output_tensor,
    plain,
)
from vitsee_core.models.interventions.replacements import (
    Array,
    Moved,
    Places,
    TokenChoice,
    generators,
    places_of,
)
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.proofs import SumProof, beyond
from vitsee_core.models.sites import AttentionBlock, SiteTable
from vitsee_stores.layout import TokenLayout


class ReplacementValues(Protocol):
    """The values that take the place of tokens: `references.Reference`, or values that are at
    hand."""

    def begin(self, rows: slice) -> None:
        """Read ahead what these rows of the new store will need."""

    def of(self, rows: Places, places: Places, draws: list[np.random.Generator]) -> Array:
        """(images, chosen, dim) for these rows at these tokens (images, chosen)."""


@dataclass(frozen=True)
class Change:
    """Tokens of one site that get other values.

    Attributes:
        tokens: which tokens.
        channels: the channels of ablated heads, None for all.
        reference: where the values come from, None for zeros.
        about: tokens or heads in words, which random numbers depend on.
    """

    tokens: TokenChoice
    channels: NDArray[np.int64] | None
    reference: ReplacementValues | None
    about: str


Changed = Change | Moved


@dataclass(frozen=True)
class ChangedSite:
    """Where a site is replaced.

    Attributes:
        name: the site.
        hook_point: where its tensor is.
        view: how it is read as tokens.
        in_place: whether the tensor itself is written over, as a residual sum must be.
        turned: whether tokens come before images there.
    """

    name: str
    hook_point: HookPoint
    view: View
    in_place: bool
    turned: bool


class SiteChanges(NamedTuple):
    """A site, and what is changed there, in order."""

    site: ChangedSite
    changes: list[Changed]


class Changes:
    """The interventions of one model, in effect within `applied()`.

    Attributes:
        lines: each intervention in words, as manifests and tables have it.
        stores: the ids of the stores that values come from.
        expected: filled if it is a dictionary: site -> (images, tokens, dim) after its change.
        sites: name -> where the site is, and what is changed there, in order.
        attention: block -> the path of its attention module, and the mode that blocks pairs there.
        seed: of random numbers.
        index: (images,) the number of each image in the data set, by which it gets its own.
    """

    def __init__(
        self,
        module: nn.Module,
        lines: Sequence[str],
        stores: Sequence[str],
        seed: int,
        index: NDArray[np.int64],
    ) -> None:
        self.module = module
        self.lines = tuple(lines)
        self.stores = tuple(stores)
        self.seed = seed
        self.index = index
        self.sites: dict[str, SiteChanges] = {}
        self.attention: dict[str, tuple[str, BlockedAttention]] = {}
        self.expected: dict[str, Tensor] | None = None
        self.counts: Counter[ModuleSide] = Counter()
        self.rows = np.zeros(0, np.int64)

    def record(self) -> dict[str, list[str]]:
        """Return the entry of manifests, the lines of the interventions; {} without any."""
        return {"interventions": list(self.lines)} if self.lines else {}

    def begin(self, rows: slice) -> None:
        """Read ahead what the passes over these rows of the store will need."""
        for _, changes in self.sites.values():
            for change in changes:
                if isinstance(change, Change) and change.reference is not None:
                    change.reference.begin(rows)

    def at(self, rows: slice) -> None:
        """Say which rows of the store the next pass is about."""
        self.rows = np.arange(rows.start, rows.stop)

    def check(self) -> None:
        """Check that each block with blocked attention called it once in the last pass, and
        reset the counts.

        Raises:
            CaptureError: a changed block called its attention more often than once, or never.
        """
        for name, (_, mode) in self.attention.items():
            calls = mode.calls
            mode.calls = 0
            if calls != 1:
                raise CaptureError(
                    f"{name}: {calls} attention calls were changed, expected 1"
                )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context in which the model runs with the interventions; hooks that are
        registered within see the changed tensors."""
        with ExitStack() as stack:
            # Calls are counted anew in each pass of the whole model.
            stack.enter_context(
                self.module.register_forward_pre_hook(lambda _m, _a: self.counts.clear())
            )
            # One hook a side: it counts the module's calls, of which each may be another site.
            sites_by_side: dict[ModuleSide, list[SiteChanges]] = defaultdict(list)
            for site_changes in self.sites.values():
                sites_by_side[site_changes.site.hook_point.side].append(site_changes)
            for side, sites in sites_by_side.items():
                child = self.module.get_submodule(side.module)
                if side.is_input:
                    hook: Any = partial(self._change_input, sites)
                    stack.enter_context(
                        child.register_forward_pre_hook(hook, with_kwargs=True)
                    )
                else:
                    hook = partial(self._change_output, sites)
                    stack.enter_context(child.register_forward_hook(hook))
            for path, mode in self.attention.values():
                child = self.module.get_submodule(path)
                # A mode inside its attention module alone: elsewhere an equal number of
                # tokens may attend.
                enter, leave = _mode_hooks(mode)
                stack.enter_context(child.register_forward_pre_hook(enter))
                stack.enter_context(child.register_forward_hook(leave, always_call=True))
            yield

    def _change_input(
        self, sites: Sequence[SiteChanges], _module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Return a module's arguments with the changed input; None where it is not changed."""
        old = input_tensor(args, kwargs)
        new = self._changed_tensor(sites, old)
        if new is None or old is None:
            return None
        return swapped(args, old, new), swapped(kwargs, old, new)

    def _change_output(
        self, sites: Sequence[SiteChanges], module: nn.Module, _args: Any, output: Any
    ) -> Any:
        """Return a module's changed output; None where it is not changed."""
        # The batch tells the tensor from others that a module returns (attention
        # weights).
        old = output_tensor(module, output, len(self.rows))
        new = self._changed_tensor(sites, old)
        if new is None or old is None:
            return None
        return swapped(output, old, new)

    def _changed_tensor(
        self, sites: Sequence[SiteChanges], old: Tensor | None
    ) -> Tensor | None:
        """Return the tensor after the changes of this call of a module; None without any, and where
        the tensor was written over.

        sites: the changed sites on one side of the module.
        """
        side = sites[0].site.hook_point.side
        call = self.counts[side]
        self.counts[side] += 1
        for site, changes in sites:
            if site.hook_point.call == call:
                if old is None:
                    raise CaptureError(f"{site.name}: its module gave no single tensor")
                # The values' own arithmetic is not the model's: modes that watch it must
                # not see it.
                with torch._C.DisableTorchFunction():
                    return self._replace(site, changes, old)
        return None

    def _replace(
        self, site: ChangedSite, changes: Sequence[Changed], old: Tensor
    ) -> Tensor | None:
        """Return a site's tensor with other values; None where it was written over in place."""
        x = old.transpose(0, 1) if site.turned else old
        if len(x) != len(self.rows):
            raise CaptureError(
                f"{site.name}: {len(x)} for a batch of {len(self.rows)} images"
            )
        # (images, tokens, dim), a view where memory allows: hence the clone.
        before = site.view.flat(x)
        after = before.clone()
        for change in changes:
            if isinstance(change, Moved):
                change.put(after)
                continue
            draws = generators(
                self.seed, f"{change.about} {site.name}", self.index[self.rows]
            )
            tokens = change.tokens.of(before, draws)  # (images, chosen)
            values = torch.zeros((), dtype=after.dtype, device=after.device)
            if change.reference is not None:
                reference_values = change.reference.of(self.rows, tokens, draws)
                if change.channels is not None:
                    reference_values = reference_values[..., change.channels]
                values = torch.from_numpy(reference_values).to(after)
            # (images, 1): with tokens (images, chosen) each image gets its own tokens.
            images = np.arange(len(tokens))[:, None]
            if change.channels is None:
                after[images, tokens] = values
            else:
                # (images, chosen, channels of the ablated heads)
                after[images[:, :, None], tokens[:, :, None], change.channels] = values
        if self.expected is not None:
            self.expected[site.name] = after.clone()
        # x is the tensor that the skip holds, too.
        if site.in_place:
            x.copy_(site.view.unflat(after, x))
            return None
        # empty_like keeps the strides (channels last), by which layers behind choose
        # kernels.
        new = torch.empty_like(x).copy_(site.view.unflat(after, x))
        return new.transpose(0, 1) if site.turned else new


def _mode_hooks(mode: BlockedAttention) -> tuple[Any, Any]:
    """Return a forward pre-hook that enters a mode, and a forward hook that leaves it."""
    open_modes: list[BlockedAttention] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        mode.__enter__()  # type: ignore[no-untyped-call]
        open_modes.append(mode)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if open_modes:  # not where an earlier hook refused the input
            open_modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    return enter, leave


def swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return arguments or an output, in which one tensor has taken the place of another. Dicts are
    changed in place, as classes of their own cannot be made anew."""
    if isinstance(value, Tensor):
        if plain(value) is not old:
            return value
        return branch_only(new) if isinstance(value, BranchOnly) else new
    if isinstance(value, dict):
        for key, entry in value.items():
            value[key] = swapped(entry, old, new)
        return value
    if isinstance(value, tuple | list):
        entries = [swapped(entry, old, new) for entry in value]
        # Named tuples take their entries one by one.
        if hasattr(value, "_fields"):
            return type(value)(*entries)
        return type(value)(entries)
    return value


def blocked_pairs(what: str, layout: TokenLayout, said: str) -> NDArray[np.bool_]:
    """Return which pairs of tokens do not attend, (queries, keys).

    Args:
        what: `QUERIES<-KEYS`, `own` for a token itself, or `distance>K` for patches further apart
            than K cells of the grid (Euclidean).
        layout: prefix tokens and grid.
        said: the beginning of error lines.

    Raises:
        ModelError: the layout has no such tokens.
    """
    pairs = np.zeros((layout.n_tokens, layout.n_tokens), np.bool_)
    # A token then sees the others alone.
    if what == "own":
        np.fill_diagonal(pairs, True)
    elif what.startswith("distance>"):
        patches = places_of("patches", layout, said)
        assert layout.grid is not None
        # (patches, 2): row and column of each patch
        cells = np.stack(np.divmod(np.arange(len(patches)), layout.grid[1]), 1)
        distances = np.linalg.norm(cells[:, None] - cells, axis=-1)
        max_distance = float(what.partition(">")[2])
        pairs[np.ix_(patches, patches)] = distances > max_distance
    else:
        queries, keys = what.split("<-")
        query_index = _tokens_of_words(queries, layout, said)
        key_index = _tokens_of_words(keys, layout, said)
        pairs[np.ix_(query_index, key_index)] = True
    return pairs


def _tokens_of_words(words: str, layout: TokenLayout, said: str) -> NDArray[np.int64]:
    """Return the tokens that a list of words with commas, "cls,patches", stands for."""
    return np.concatenate(
        [places_of(word.strip(), layout, said) for word in words.split(",")]
    )


def refuse_empty_rows(pairs: NDArray[np.bool_], layout: TokenLayout, said: str) -> None:
    """Raise ModelError if a query would be left without any key."""
    for query in np.flatnonzero(pairs.all(1))[:1]:
        name = layout.prefix[query] if query < layout.n_prefix else "a patch"
        raise ModelError(f"{said}: {name} would be left without any token to attend to")


class BlockedAttention(AttentionMode):
    """A mode in which blocked pairs of tokens do not attend: their scores are -inf.

    It changes the attention over as many tokens as `pairs` has, (tokens, tokens), True where
    blocked; `calls` counts that attention.
    """

    def __init__(self, pairs: NDArray[np.bool_]) -> None:
        super().__init__()
        self.blocked = torch.from_numpy(pairs)
        self.calls = 0

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function; that of attention without the blocked pairs."""
        if func is KERNEL:
            arguments = dict(zip(KERNEL_ARGS, args, strict=False)) | kwargs
            query = arguments["query"]
            key = arguments["key"]
            # Other attention in the module, as over windows or time, has other sizes.
            if (query.shape[-2], key.shape[-2]) == self.blocked.shape:
                return func(**self._masked(arguments))
        elif func in SOFTMAX:
            scores = args[0] if args else kwargs["input"]
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            # Over the last axis: the keys are the columns, as in `blocked`.
            if scores.shape[-2:] == self.blocked.shape and dim in (-1, scores.ndim - 1):
                self.calls += 1
                scores = scores.masked_fill(self._blocked_on(scores), float("-inf"))
                other_kwargs = {k: x for k, x in kwargs.items() if k != "input"}
                return func(scores, *args[1:], **other_kwargs)
        return func(*args, **kwargs)

    def _blocked_on(self, x: Tensor) -> Tensor:
        """Return the blocked pairs on the device of a tensor; they move once."""
        self.blocked = self.blocked.to(x.device)
        return self.blocked

    def _masked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the kernel's arguments with the blocked pairs in its mask."""
        self.calls += 1
        blocked = self._blocked_on(arguments["query"])
        if arguments.get("is_causal"):  # the kernel takes a mask or causality, not both
            blocked = blocked | torch.ones_like(blocked).triu(1)
        mask = arguments.get("attn_mask")
        if mask is None:
            mask = ~blocked
        elif mask.dtype == torch.bool:
            mask = mask & ~blocked
        else:
            mask = mask.masked_fill(blocked, float("-inf"))
        return {**arguments, "attn_mask": mask, "is_causal": False}


def prove(model: LoadedModel, table: SiteTable, changes: Changes, x: Tensor) -> None:
    """Run the model on images with the interventions, and compare: every changed site holds exactly
    the values that were put there, residual sums are made of the changed terms, and blocked keys
    have no weight.

    Args:
        model: the model.
        table: its sites.
        changes: the interventions.
        x: (images, channels, rows, cols), normalised.

    Raises:
        ModelError: names what does not hold.
    """

    def stored_name(name: str) -> str:
        """Return the site that is stored for a site."""
        return table[name].alias_of or name

    # A changed sum is no longer the sum of its terms.
    changed = {stored_name(name) for name in changes.sites}
    names = [
        name
        for name, residual in table.residuals.items()
        if stored_name(residual.total) not in changed
    ]
    sum_proof = SumProof(model.module, table, names)
    attention = [block for block in table.attention if block.name in changes.attention]
    # One pass with all observers: sums, scores and the changed sites.
    blocked_proof = _BlockedKeysProof(changes)
    capture = Capture(model, table, sites=(), attention=attention)
    sum_proof.attach(capture, names)
    captured: dict[str, Tensor] = {}
    for name in changes.sites:
        flat = table.points[name].view.flat

        def keep(tensor: Tensor, name: str = name, flat: Any = flat) -> None:
            """Keep a copy of a changed site's tokens."""
            captured[name] = flat(tensor).clone()

        capture.on_site(name, keep)
    # A dictionary: the hooks now also note what they put at each site.
    changes.expected = {}
    rows = slice(0, len(x))
    changes.begin(rows)
    changes.at(rows)
    with torch.inference_mode(), changes.applied(), capture:
        capture.run(x, blocked_proof)
    changes.check()
    reasons = []
    # To the bit: the values were copied, nothing was computed with them.
    for name, expected in changes.expected.items():
        if name not in captured or not torch.equal(captured[name], expected):
            reasons.append(f"{name} does not hold the values that were put there")
    for name in changes.sites:
        if name not in changes.expected:
            reasons.append(f"{name} was not met")
    for name in beyond(sum_proof.errors, names, 1):
        residual = table.residuals[name]
        reasons.append(f"{residual.formula} is not {residual.total}")
    reasons += blocked_proof.failures
    changes.expected = None
    if reasons:
        raise ModelError(f"{model.name} cannot be changed so: {'; '.join(reasons[:3])}")


class _BlockedKeysProof(Observer):
    """An observer that checks that blocked keys have no weight.

    Attributes:
        failures: a line for each block where they have.
    """

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.failures: list[str] = []

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Check on the first image that the scores of blocked pairs are -inf."""
        _, mode = self.changes.attention[block.name]
        scores = call.scores(slice(0, 1))
        # (1, heads, blocked pairs): one image is enough, as the mask is the same for all.
        blocked_scores = scores[..., mode.blocked.to(scores.device)]
        if not bool((blocked_scores == float("-inf")).all()):
            self.failures.append(f"{block.name} attends to tokens that were blocked")
