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
BATCH_SIZE = 16  # images; each batch runs once for every head while it is in memory

# A head's block and its number in the block.
Head = tuple[str, int]


@dataclass(frozen=True)
class ConstantReplacement:
    """A reference, as `Change` wants it, that is the same for all images.

    References of interventions are read from stores; this one holds a mean that was just computed.
    values: (tokens, dim).
    """

    values: NDArray[np.float32]

    def begin(self, rows: slice) -> None:
        """Do nothing: there is nothing to read ahead."""

    def of(
        self, rows: Integers, places: Integers, draws: list[np.random.Generator]
    ) -> NDArray[np.float32]:
        """Return the values of these tokens, (images, chosen tokens, dim).

        Args:
            rows: (images,) rows of the images; they make no difference.
            places: (images, chosen tokens) indices of the tokens.
            draws: a generator per image; nothing is drawn.
        """
        return self.values[places]


class AblatedRuns:
    """A context in which the store's model is on its device, in the store's precision.

    Args:
        store: the store whose model runs.
        blocks: the blocks whose heads are ablated.
        origin: where weights and images are now.
        device: where the model runs, as `--device` names it.

    Raises:
        MissingInput: the model has no classifier, or was changed itself.
        VitseeError: weights or images are gone, or are not those of the store.
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
        # A newer library may build the same model in another way.
        model_blocks = {block.name: block for block in self.table.attention}
        for block in blocks:
            now = model_blocks.get(block.site)
            if now is None or (now.n_heads, now.layout) != (block.n_heads, block.layout):
                raise VitseeError(
                    f"{self.model.name} has no attention like the store's in "
                    f"{block.site} any more; extract {store.label} anew"
                )
        # The heads' outputs are a site only where a proof shows which channels are which head's.
        self.blocks = [
            block for block in blocks if _heads_site(block.site) in self.table.points
        ]
        if not self.blocks:
            raise MissingInput(
                f"the outputs of the heads of {store.label} are no site (vitsee sites "
                f"{self.model.name} lists those of its model)"
            )

    def __enter__(self) -> Self:
        """Move the model to the device, without gradients, in the store's precision."""
        import torch

        from vitsee_core.runtime.device import precision_context

        # The same precision as in the store, so that outputs are those it was extracted with;
        # tf32 exists on GPUs alone.
        precision = self.store.manifest.identity.get("precision", "fp32")
        if precision == "tf32" and self.device.type != "cuda":
            precision = "fp32"
        self.model.module.to(self.device)
        self._stack = ExitStack()
        self._stack.enter_context(torch.inference_mode())
        self._stack.enter_context(precision_context(self.device, precision))
        return self

    def __exit__(self, *error: object) -> None:
        """Restore precision and gradients; the model stays on the device."""
        self._stack.close()

    @property
    def heads(self) -> list[Head]:
        """All heads of the blocks, in the order of the model."""
        return [
            (block.site, head) for block in self.blocks for head in range(block.n_heads)
        ]

    def pixels(self, rows: Integers) -> Tensor:
        """Return the model's input for these rows of the store, normalised and on the device."""
        import torch

        from vitsee_core.images import normalise

        rgb = torch.from_numpy(self.pictures(rows))
        return normalise(rgb, self.store.manifest.transform, self.device)

    def means(
        self, rows: Integers, advance: Callable[[int], None]
    ) -> dict[str, NDArray[np.float32]]:
        """Return block -> (tokens, dim) mean over images of its heads' outputs, side by side.

        Args:
            rows: the store's rows that are averaged over.
            advance: called with the number of images after each batch.
        """
        sums: dict[str, Float] = {}

        # A closure per block, as a loop's variable would be the last block in all of them.
        def make_adder(block: str) -> Callable[[Tensor], None]:
            """Return a consumer that adds a batch of the block's head outputs to its sum."""
            flat = self.table.points[_heads_site(block)].view.flat

            def add(x: Tensor) -> None:
                """Add (images, ...) outputs, in float64 as the sum may be over many images."""
                batch_sum = flat(x).double().sum(0).cpu().numpy()
                sums[block] = sums.get(block, 0.0) + batch_sum

            return add

        capture = self._capture(
            {_heads_site(block.site): make_adder(block.site) for block in self.blocks}
        )
        with capture:
            for batch in batches(rows):
                capture.run(self.pixels(batch), _IgnoringObserver())
                advance(len(batch))
        return {
            block: (total / len(rows)).astype(np.float32) for block, total in sums.items()
        }

    def changes(
        self, means: dict[str, NDArray[np.float32]] | None
    ) -> dict[Head, Changes]:
        """Return head -> the change of the model that ablates it.

        Args:
            means: block -> (tokens, dim) what replaces its heads' outputs; None for zero.
        """
        from vitsee_core.models.intervention_spec import parse
        from vitsee_core.models.interventions.changes import Change, SiteChanges
        from vitsee_core.models.interventions.switching import Switch

        ablations = {}
        for block, head in self.heads:
            # The same change as `extract --ablate-heads` makes.
            spec = parse(ablate_heads=[f"{block}:{head}"])
            switch = Switch(
                self.model.name, self.table, spec, index=np.arange(BATCH_SIZE)
            )
            ablation = switch.changes(self.model.module)
            if means is not None:
                # The ablation by zero, with the mean as its reference in place of none.
                reference = ConstantReplacement(means[block])
                for name, (point, site_changes) in ablation.sites.items():
                    ablation.sites[name] = SiteChanges(
                        point,
                        [
                            replace(change, reference=reference)
                            for change in site_changes
                            if isinstance(change, Change)
                        ],
                    )
            ablations[block, head] = ablation
        return ablations

    def logits(self, x: Tensor, changes: Changes | None = None) -> Float:
        """Return the logits of this input, (images, classes), with the model changed or as it is.

        Raises:
            VitseeError: a logit is not finite.
        """
        outputs: list[Tensor] = []
        capture = self._capture({LOGITS: lambda x: outputs.append(x.float().cpu())})
        with ExitStack() as stack:
            if changes is not None:
                changes.at(slice(0, len(x)))
                # Before the capture, so that what is captured is what the change left.
                stack.enter_context(changes.applied())
            stack.enter_context(capture)
            capture.run(x, _IgnoringObserver())
        logits: Float = outputs[0].numpy().astype(np.float64)
        if not np.isfinite(logits).all():
            raise VitseeError(
                f"the model of {self.store.label} gives logits that are not finite"
            )
        return logits

    def _capture(self, consumers: dict[str, Callable[[Tensor], None]]) -> Any:
        """Return a capture that hands each site's tensor to its consumer: site -> consumer."""
        from vitsee_core.models.capture import Capture

        capture = Capture(self.model, self.table, sites=())
        for name, consumer in consumers.items():
            capture.on_site(name, consumer)
        return capture


class _IgnoringObserver:
    """An observer that keeps nothing: consumers take the tensors before it."""

    def site(self, *_: Any) -> None:
        """Ignore a site's tokens."""

    def branch(self, *_: Any) -> None:
        """Ignore a residual branch."""

    def attention(self, *_: Any) -> None:
        """Ignore a call of attention."""


def batches(rows: Integers) -> list[Integers]:
    """Return the rows in batches of `BATCH_SIZE`."""
    starts = range(0, len(rows), BATCH_SIZE)
    return [rows[start : start + BATCH_SIZE] for start in starts]


def _heads_site(block: str) -> str:
    """Return the site of the outputs of a block's heads, before the projection."""
    return f"{block}.attn.heads"
