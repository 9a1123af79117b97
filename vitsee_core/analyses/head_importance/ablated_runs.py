"""The model of a store, run again on its images with single heads ablated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from vitsee_core.models.provenance import Pictures, Provenance, model_of
from vitsee_core.types import Float, Integers
from vitsee_stores.errors import MissingInput, VitseeError

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_core.attention.heads import StoredAttention
    from vitsee_core.models.interventions.changes import Changes
    from vitsee_stores import Store

LOGITS = "logits"
AT_ONCE = 16  # images of a forward pass

Head = tuple[str, int]  # block, number


@dataclass(frozen=True)
class ConstantReplacement:
    """One value of every token, in the place of a reference from a store. values: (tokens, dim)."""

    values: NDArray[np.float32]

    def begin(self, rows: slice) -> None:
        """Nothing to read ahead."""

    def of(
        self, rows: Integers, places: Integers, draws: list[np.random.Generator]
    ) -> NDArray[np.float32]:
        """(images, chosen, dim) of these tokens (images, chosen)."""
        return self.values[places]


class AblatedRuns:
    """A context in which the store's model is on its device, in the store's precision. blocks:
    whose heads are ablated; origin: where weights and images are now.

    Raises:
        MissingInput: the model has no classifier, or was changed itself.
        VitseeError: weights or images are gone, or others than the store's.
    """

    def __init__(
        self,
        store: Store,
        blocks: Sequence[StoredAttention],
        origin: Provenance,
        device: str,
    ) -> None:
        from vitsee_core.models.site_tables import site_table
        from vitsee_core.runtime.device import resolve_device

        self.store = store
        self.device = resolve_device(device)
        self.model = model_of(store, origin.checkpoint, trust=origin.trust)
        self.table = site_table(self.model)
        self.pictures = Pictures(store, origin.data)
        if LOGITS not in self.table.points:
            raise MissingInput(
                f"the model of {store.label} has no classifier whose answer to ask"
            )
        known = {block.name: block for block in self.table.attention}
        for block in blocks:
            now = known.get(block.site)
            if now is None or (now.n_heads, now.layout) != (block.n_heads, block.layout):
                raise VitseeError(
                    f"{self.model.name} has no attention like the store's in {block.site} any "
                    f"more; extract {store.label} anew"
                )
        self.blocks = [
            block for block in blocks if _site(block.site) in self.table.points
        ]
        if not self.blocks:
            raise MissingInput(
                f"the outputs of the heads of {store.label} are no site (vitsee sites "
                f"{self.model.name} lists those of its model)"
            )

    def __enter__(self) -> Self:
        import torch

        from vitsee_core.runtime.device import precision_context

        precision = self.store.manifest.identity.get("precision", "fp32")
        if precision == "tf32" and self.device.type != "cuda":
            precision = "fp32"
        self.model.module.to(self.device)
        self._stack = ExitStack()
        self._stack.enter_context(torch.inference_mode())
        self._stack.enter_context(precision_context(self.device, precision))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def heads(self) -> list[Head]:
        """All heads of the blocks."""
        return [
            (block.site, head) for block in self.blocks for head in range(block.n_heads)
        ]

    def pixels(self, rows: Integers) -> Tensor:
        """The model's input for these rows, on the device."""
        import torch

        from vitsee_core.images import normalise

        given = torch.from_numpy(self.pictures(rows))
        return normalise(given, self.store.manifest.transform, self.device)

    def means(
        self, rows: Integers, advance: Callable[[int], None]
    ) -> dict[str, NDArray[np.float32]]:
        """Block -> (tokens, dim) mean over these images of its heads' outputs, side by side."""
        sums: dict[str, Float] = {}

        def adding(block: str) -> Callable[[Tensor], None]:
            flat = self.table.points[_site(block)].view.flat

            def add(x: Tensor) -> None:
                own = flat(x).double().sum(0).cpu().numpy()
                sums[block] = sums.get(block, 0.0) + own

            return add

        capture = self._capture(
            {_site(block.site): adding(block.site) for block in self.blocks}
        )
        with capture:
            for part in batches(rows):
                capture.run(self.pixels(part), _Nothing())
                advance(len(part))
        return {
            block: (total / len(rows)).astype(np.float32) for block, total in sums.items()
        }

    def changes(
        self, means: dict[str, NDArray[np.float32]] | None
    ) -> dict[Head, Changes]:
        """Head -> its ablation: by its mean, or by zero (None)."""
        from vitsee_core.models.intervention_spec import parse
        from vitsee_core.models.interventions.changes import Change
        from vitsee_core.models.interventions.switching import Switch

        found = {}
        for block, head in self.heads:
            asked = parse(ablate_heads=[f"{block}:{head}"])
            switch = Switch(self.model.name, self.table, asked, index=np.arange(AT_ONCE))
            made = switch.changes(self.model.module)
            if means is not None:
                held = ConstantReplacement(means[block])
                made.sites = {
                    name: (
                        place,
                        [
                            replace(one, reference=held)
                            for one in some
                            if isinstance(one, Change)
                        ],
                    )
                    for name, (place, some) in made.sites.items()
                }
            found[block, head] = made
        return found

    def logits(self, x: Tensor, changes: Changes | None = None) -> Float:
        """(images, classes) of this input."""
        got: list[Tensor] = []
        capture = self._capture({LOGITS: lambda found: got.append(found.float().cpu())})
        with ExitStack() as stack:
            if changes is not None:
                changes.at(slice(0, len(x)))
                stack.enter_context(changes.applied())
            stack.enter_context(capture)
            capture.run(x, _Nothing())
        logits: Float = got[0].numpy().astype(np.float64)
        if not np.isfinite(logits).all():
            raise VitseeError(
                f"the model of {self.store.label} gives logits that are not finite"
            )
        return logits

    def _capture(self, consumers: dict[str, Callable[[Tensor], None]]) -> Any:
        from vitsee_core.models.capture import Capture

        capture = Capture(self.model, self.table, sites=())
        for name, consumer in consumers.items():
            capture.on_site(name, consumer)
        return capture


class _Nothing:
    """An observer of sites that none are given to."""

    def site(self, *_: Any) -> None: ...

    def branch(self, *_: Any) -> None: ...

    def attention(self, *_: Any) -> None: ...


def batches(rows: Integers) -> list[Integers]:
    """Rows in batches of `AT_ONCE`."""
    return [rows[at : at + AT_ONCE] for at in range(0, len(rows), AT_ONCE)]


def _site(block: str) -> str:
    return f"{block}.attn.heads"
