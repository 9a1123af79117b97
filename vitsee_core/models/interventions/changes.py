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
from typing import Any, Protocol

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
    """Tokens of one site that get other values. channels: those of ablated heads, None for all.
    reference: None for zeros. about: tokens or heads in words, which random numbers depend on."""

    tokens: TokenChoice
    channels: NDArray[np.int64] | None
    reference: ReplacementValues | None
    about: str


Changed = Change | Moved


@dataclass(frozen=True)
class ChangedSite:
    """A place where a site is replaced. in_place: the tensor itself is written over. turned: tokens
    come before images there."""

    name: str
    hook_point: HookPoint
    view: View
    in_place: bool
    turned: bool


_Site = tuple[ChangedSite, list[Changed]]


class Changes:
    """The interventions of one model, in effect within `applied()`.

    Attributes:
        lines: each intervention in words, as manifests and tables have it.
        stores: the ids of the stores that values come from.
        expected: filled if it is a dictionary: site -> (images, tokens, dim) after its change.
        sites: name -> where the site is, and what is changed there, in order.
        attention: block -> the path of its attention module, and the mode that blocks pairs there.
        seed, index: of random numbers, and each image's place in the data set.
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
        self.sites: dict[str, _Site] = {}
        self.attention: dict[str, tuple[str, BlockedAttention]] = {}
        self.expected: dict[str, Tensor] | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        self.rows = np.zeros(0, np.int64)

    def record(self) -> dict[str, list[str]]:
        """The entry of manifests, the lines of the interventions; an empty dict without any."""
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
        """Raises:
        CaptureError: the last pass had another number of attention calls in a changed block than
            one.
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
        """Context in which the model runs with the interventions; hooks registered within see what
        they leave."""
        with ExitStack() as stack:
            stack.enter_context(
                self.module.register_forward_pre_hook(lambda _m, _a: self.counts.clear())
            )
            by_place: dict[tuple[str, str], list[_Site]] = defaultdict(list)
            for site in self.sites.values():
                by_place[site[0].hook_point.module, site[0].hook_point.when].append(site)
            for (path, when), sites in by_place.items():
                child = self.module.get_submodule(path)
                if when == "in":
                    hook: Any = partial(self._entering, sites)
                    stack.enter_context(
                        child.register_forward_pre_hook(hook, with_kwargs=True)
                    )
                else:
                    hook = partial(self._leaving, sites)
                    stack.enter_context(child.register_forward_hook(hook))
            for path, mode in self.attention.values():
                child = self.module.get_submodule(path)
                enter, leave = _entered(mode)
                stack.enter_context(child.register_forward_pre_hook(enter))
                stack.enter_context(child.register_forward_hook(leave, always_call=True))
            yield

    def _entering(
        self, sites: Sequence[_Site], _module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        old = input_tensor(args, kwargs)
        new = self._changed(sites, old)
        if new is None or old is None:
            return None
        return swapped(args, old, new), swapped(kwargs, old, new)

    def _leaving(
        self, sites: Sequence[_Site], module: nn.Module, _args: Any, output: Any
    ) -> Any:
        old = output_tensor(module, output, len(self.rows))
        new = self._changed(sites, old)
        if new is None or old is None:
            return None
        return swapped(output, old, new)

    def _changed(self, sites: Sequence[_Site], old: Tensor | None) -> Tensor | None:
        """The tensor after the changes of this call of a module; None without any."""
        point = sites[0][0].hook_point
        call = self.counts[point.module, point.when]
        self.counts[point.module, point.when] += 1
        for site, changes in sites:
            if site.hook_point.call == call:
                if old is None:
                    raise CaptureError(f"{site.name}: its module gave no single tensor")
                with torch._C.DisableTorchFunction():
                    return self._replaced(site, changes, old)
        return None

    def _replaced(
        self, site: ChangedSite, changes: Sequence[Changed], old: Tensor
    ) -> Tensor | None:
        x = old.transpose(0, 1) if site.turned else old
        if len(x) != len(self.rows):
            raise CaptureError(
                f"{site.name}: {len(x)} for a batch of {len(self.rows)} images"
            )
        before = site.view.flat(x)
        after = before.clone()
        for change in changes:
            if isinstance(change, Moved):
                change.put(after)
                continue
            draws = generators(
                self.seed, f"{change.about} {site.name}", self.index[self.rows]
            )
            places = change.tokens.of(before, draws)
            values = torch.zeros((), dtype=after.dtype, device=after.device)
            if change.reference is not None:
                given = change.reference.of(self.rows, places, draws)
                if change.channels is not None:
                    given = given[..., change.channels]
                values = torch.from_numpy(given).to(after)
            rows = np.arange(len(places))[:, None]
            if change.channels is None:
                after[rows, places] = values
            else:
                after[rows[:, :, None], places[:, :, None], change.channels] = values
        if self.expected is not None:
            self.expected[site.name] = after.clone()
        if site.in_place:
            x.copy_(site.view.unflat(after, x))
            return None
        new = torch.empty_like(x).copy_(site.view.unflat(after, x))
        return new.transpose(0, 1) if site.turned else new


def _entered(mode: BlockedAttention) -> tuple[Any, Any]:
    """Hooks that enter the mode with a module and leave it with that."""
    open_modes: list[BlockedAttention] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        mode.__enter__()  # type: ignore[no-untyped-call]
        open_modes.append(mode)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if open_modes:
            open_modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    return enter, leave


def swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    """The same arguments or output with one tensor for another."""
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
        if hasattr(value, "_fields"):
            return type(value)(*entries)
        return type(value)(entries)
    return value


def blocked_pairs(what: str, layout: TokenLayout, said: str) -> NDArray[np.bool_]:
    """(queries, keys) which pairs `QUERIES<-KEYS`, `own` or `distance>K` blocks: distances are
    Euclidean, in cells of the grid, between patches. `said` begins the errors.

    Raises:
        ModelError: the layout has no such tokens.
    """
    n = layout.n_tokens
    pairs = np.zeros((n, n), np.bool_)
    if what == "own":
        np.fill_diagonal(pairs, True)
    elif what.startswith("distance>"):
        patches = places_of("patches", layout, said)
        assert layout.grid is not None
        cells = np.stack(np.divmod(np.arange(len(patches)), layout.grid[1]), 1)
        gaps = np.linalg.norm(cells[:, None] - cells, axis=-1)
        pairs[np.ix_(patches, patches)] = gaps > float(what.partition(">")[2])
    else:
        queries, keys = (
            np.concatenate(
                [places_of(word.strip(), layout, said) for word in words.split(",")]
            )
            for words in what.split("<-")
        )
        pairs[np.ix_(queries, keys)] = True
    return pairs


def refuse_empty_rows(pairs: NDArray[np.bool_], layout: TokenLayout, said: str) -> None:
    """Raise ModelError if a query would be left without any key."""
    for query in np.flatnonzero(pairs.all(1))[:1]:
        name = layout.prefix[query] if query < layout.n_prefix else "a patch"
        raise ModelError(f"{said}: {name} would be left without any token to attend to")


class BlockedAttention(AttentionMode):
    """While it is entered, the attention over as many tokens as `pairs` (tokens, tokens; True where
    blocked) has goes without these; `calls` counts it."""

    def __init__(self, pairs: NDArray[np.bool_]) -> None:
        super().__init__()
        self.blocked = torch.from_numpy(pairs)
        self.calls = 0

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result where blocked keys are left out."""
        if func is KERNEL:
            arguments = dict(zip(KERNEL_ARGS, args, strict=False)) | kwargs
            query = arguments["query"]
            key = arguments["key"]
            if (query.shape[-2], key.shape[-2]) == self.blocked.shape:
                return func(**self._masked(arguments))
        elif func in SOFTMAX:
            given = args[0] if args else kwargs["input"]
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if given.shape[-2:] == self.blocked.shape and dim in (-1, given.ndim - 1):
                self.calls += 1
                given = given.masked_fill(self._on(given), float("-inf"))
                return func(
                    given, *args[1:], **{k: x for k, x in kwargs.items() if k != "input"}
                )
        return func(*args, **kwargs)

    def _on(self, x: Tensor) -> Tensor:
        self.blocked = self.blocked.to(x.device)
        return self.blocked

    def _masked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The kernel's arguments with the pairs in its mask."""
        self.calls += 1
        blocked = self._on(arguments["query"])
        if arguments.get("is_causal"):
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
    """Run the model on pixels and compare: every changed site comes with exactly the values
    that were put there, residual sums are made of the changed terms, and blocked keys have no
    weight.

    Raises:
        ModelError: names what does not.
    """

    def stored(name: str) -> str:
        return table[name].alias_of or name

    gone = {stored(name) for name in changes.sites}
    got = dict[str, Tensor]()
    names = [
        name
        for name, residual in table.residuals.items()
        if stored(residual.total) not in gone
    ]
    sums = SumProof(model.module, table, names)
    attention = [b for b in table.attention if b.name in changes.attention]
    weights = _Weights(changes)
    capture = Capture(model, table, sites=(), attention=attention)
    sums.attach(capture, names)
    for name in changes.sites:
        flat = table.points[name].view.flat

        def keep(tensor: Tensor, name: str = name, flat: Any = flat) -> None:
            got[name] = flat(tensor).clone()

        capture.on_site(name, keep)
    changes.expected = {}
    rows = slice(0, len(x))
    changes.begin(rows)
    changes.at(rows)
    with torch.inference_mode(), changes.applied(), capture:
        capture.run(x, weights)
    changes.check()
    wrong = [
        f"{name} does not hold the values that were put there"
        for name, wanted in changes.expected.items()
        if name not in got or not torch.equal(got[name], wanted)
    ]
    wrong += [
        f"{name} was not met" for name in changes.sites if name not in changes.expected
    ]
    wrong += [
        f"{table.residuals[name].formula} is not {table.residuals[name].total}"
        for name in beyond(sums.errors, names, 1)
    ]
    wrong += weights.wrong
    changes.expected = None
    if wrong:
        raise ModelError(f"{model.name} cannot be changed so: {'; '.join(wrong[:3])}")


class _Weights(Observer):
    """Checks that blocked keys have no weight."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.wrong = list[str]()

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """The scores of blocked pairs are -inf."""
        blocked = self.changes.attention[block.name][1].blocked
        scores = call.scores(slice(0, 1))
        if not bool((scores[..., blocked.to(scores.device)] == float("-inf")).all()):
            self.wrong.append(f"{block.name} attends to tokens that were blocked")
