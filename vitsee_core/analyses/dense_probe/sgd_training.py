"""Training of the probes by SGD, on an endless stream of batches of a store's images."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitsee_core.analyses.dense_probe.cells import Head
from vitsee_core.analyses.dense_probe.features import Patches
from vitsee_core.analyses.dense_probe.pixels import Pixels
from vitsee_core.analyses.dense_probe.protocols import BATCH, Solver
from vitsee_core.analyses.dense_probe.ridge_training import count_truth
from vitsee_core.analyses.dense_probe.sgd import (
    NO_CLASS,
    Batch,
    ClassRecipe,
    DepthRecipe,
    Recipe,
    train,
)
from vitsee_core.analyses.dense_probe.tasks import Depth
from vitsee_core.analyses.dense_probe.work import (
    HeadKey,
    Part,
    Trained,
    blind_heads,
    counted_rows,
)
from vitsee_core.masks.class_maps import IGNORED
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Slab

log = logging.getLogger(__name__)


def train_sgd(part: Part, solver: Solver, execution: Execution) -> Trained:
    """Train the probes of the sites one after the other, and the baselines of every grid.

    Raises:
        VitseeError: no pixel counts, or the loss is not finite.
    """
    from vitsee_core.runtime.device import resolve_device

    device, task = resolve_device(execution.device), part.task
    # As in the protocol, training sees the model's input.
    part = replace(part, truth=replace(part.truth, resolution="input"))
    places = count_truth(part, execution)
    classes = np.flatnonzero(next(iter(places.values())).totals)
    heads: dict[HeadKey, Head] = {}
    losses: dict[str, float] = {}
    recipe: Recipe = ClassRecipe(len(classes))
    if isinstance(task, Depth):
        recipe = DepthRecipe(task.limits)
    for site, features in part.features.items():
        stream = _Stream(part, features, part.grids[site], classes, execution)
        last: list[float] = []
        for found in train(
            stream.batches(device), features.dim, recipe, solver.steps, execution.seed, device
        ):
            if not isinstance(found, float):
                heads[HeadKey(site)] = task.head(classes, found)
            elif not np.isfinite(found):
                raise VitseeError(f"{part.store.label}: the loss of {site} is not finite any more")
            else:
                last = [*last[-9:], found]
                execution.progress.advance(BATCH)
        losses[site] = float(np.mean(last))
    notes: dict[str, Any] = {"loss_of_the_last_steps": losses}
    if not isinstance(task, Depth):
        notes["n_trained"] = len(classes)
    return Trained(heads | blind_heads(task, places), notes)


_Example = tuple[Float32, Pixels]  # tokens (cells, dim), and the pixels of the model's input


@dataclass(frozen=True)
class _Stream:
    """The training images in random order, over and over. Where they do not all fit into memory,
    some slabs at a time are kept: their images are in random order, and so are such groups."""

    part: Part
    features: Patches
    grid: str
    classes: Integers
    execution: Execution

    def batches(self, device: torch.device) -> Iterator[Batch]:
        """Batches without an end."""
        examples = self._examples()
        while True:
            yield self._batch(list(islice(examples, BATCH)), device)

    def _examples(self) -> Iterator[_Example]:
        rng = np.random.default_rng((self.execution.seed, 5))
        groups = self._groups()
        if len(groups) > 1:
            log.info(
                "%s: of %s, %d groups of slabs are in memory in turn (more --memory, or fewer "
                "--images, are faster)",
                *(self.part.store.label, self.features.parts[-1].site.name, len(groups)),
            )
        kept = self._load(groups[0]) if len(groups) == 1 else None
        while True:
            for group in rng.permutation(len(groups)):
                examples = kept or self._load(groups[group])
                for i in rng.permutation(len(examples)):
                    yield examples[i]

    def _groups(self) -> list[list[Slab]]:
        """Group the slabs with training images, as many together as half of the memory holds."""
        mask, store = self.part.truth.mask, self.part.store
        cells = self.features.grid[0] * self.features.grid[1]
        pixels = int(np.prod(store.manifest.transform["input_size"][1:]))
        label = 4 if isinstance(self.part.task, Depth) else 1
        each = 4 * cells * self.features.dim + label * pixels
        room = max(1, self.execution.budget // 2 // each)
        groups: list[list[Slab]] = []
        n = room
        for slab in store.slabs():
            own = int(mask[slab.rows].sum())
            if not own:
                continue
            if n + own > room and (n or not groups):
                groups.append([])
                n = 0
            groups[-1].append(slab)
            n += own
        return groups

    def _load(self, slabs: list[Slab]) -> list[_Example]:
        found = []
        for slab in slabs:
            tokens = self.features.of_slab(slab)
            for row, own in zip(counted_rows(slab), tokens, strict=True):
                if self.part.truth.mask[row]:
                    found.append((own, self.part.truth.pixels(row)[self.grid]))
        return found

    def _batch(self, examples: list[_Example], device: torch.device) -> Batch:
        def tensor(arrays: list[Any], kind: Any = np.float32) -> torch.Tensor:
            return torch.from_numpy(np.stack(arrays).astype(kind)).to(device)

        every = [pixels for _, pixels in examples]
        shown = [np.outer(own.down.sum(0) > 0, own.across.sum(0) > 0) for own in every]
        if isinstance(self.part.task, Depth):
            labels = tensor([own.labels for own in every])
        else:
            table = np.full(IGNORED + 1, NO_CLASS)
            table[self.classes] = np.arange(len(self.classes))
            labels = tensor([table[own.labels] for own in every], np.int64)
        shape = *self.features.grid, self.features.dim
        return Batch(
            tensor([tokens.reshape(shape) for tokens, _ in examples]),
            tensor(shown, np.bool_),
            labels,
            tensor([own.down for own in every]),
            tensor([own.across for own in every]),
        )
