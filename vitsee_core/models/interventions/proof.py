"""The proof on images that interventions do what they say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitsee_core.models.attention_watch import AttentionCall
from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.interventions.changes import Changes
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.proofs import SumProof, beyond
from vitsee_core.models.sites import AttentionBlock, SiteTable


def prove(model: LoadedModel, table: SiteTable, changes: Changes, x: Tensor) -> None:
    """Run the model on pixels and compare: every changed site comes with exactly the values
    that were put there, residual sums are made of the changed terms, and blocked keys have no
    weight.

    Raises:
        ModelError: names what does not.
    """

    def stored(name: str) -> str:
        return table[name].alias_of or name

    gone, got = {stored(name) for name in changes.sites}, dict[str, Tensor]()
    names = [
        name for name, residual in table.residuals.items() if stored(residual.total) not in gone
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
    wrong += [f"{name} was not met" for name in changes.sites if name not in changes.expected]
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
        self.changes, self.wrong = changes, list[str]()

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """The scores of blocked pairs are -inf."""
        blocked = self.changes.attention[block.name][1].blocked
        scores = call.scores(slice(0, 1))
        if not bool((scores[..., blocked.to(scores.device)] == float("-inf")).all()):
            self.wrong.append(f"{block.name} attends to tokens that were blocked")
