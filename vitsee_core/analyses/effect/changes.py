"""The numbers per image of a slab of the base and of the changed store: outputs and cosines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.features import SiteFeatures
from vitsee_core.labels.changed_outputs import compare_outputs
from vitsee_core.types import Float, Float32

if TYPE_CHECKING:
    from vitsee_stores import Slab

PIECE_BYTES = 64 << 20  # of tokens of one store that are compared at a time
COSINE = "cosine"


@dataclass(frozen=True)
class ReadChange:
    """(metric, site) -> (images,) numbers of the images that count, NaN for images without a label.

    Attributes:
        logits: of the base and of the changed store; None: outputs are not compared.
        labelled: whether labels are the classes of the logits.
        sites: features of corresponding tokens in both, for their cosines.
    """

    logits: tuple[SiteFeatures, SiteFeatures] | None
    labelled: bool
    sites: tuple[tuple[SiteFeatures, SiteFeatures], ...]

    @property
    def slab_bytes(self) -> int:
        """Memory of a slab of both stores while it is read."""
        of_sites = [
            sum(min(own.slab_bytes, 2 * PIECE_BYTES) for own in pair) for pair in self.sites
        ]
        of_logits = 4 * sum(own.slab_bytes for own in self.logits or ())
        return max([*of_sites, of_logits], default=0)

    def __call__(self, base: Slab, changed: Slab) -> dict[tuple[str, str], Float]:
        found: dict[tuple[str, str], Float] = {}
        if self.logits is not None:
            ours, theirs = (
                own.of_slab(slab, slice(0, 1))[:, 0].astype(np.float64)
                for own, slab in zip(self.logits, (base, changed), strict=True)
            )
            labels = base.store.samples.label[base.rows][base.valid] if self.labelled else None
            outputs = compare_outputs(ours, theirs, labels)
            found = {(metric, ""): values for metric, values in outputs.items()}
        for pair in self.sites:
            found[COSINE, pair[0].site.name] = _cosines(*pair, base, changed)
        return found


def _cosines(ours: SiteFeatures, theirs: SiteFeatures, base: Slab, changed: Slab) -> Float:
    """(images,) mean over tokens of the cosine of each token with the same one."""
    n_rows = max(1, base.rows.stop - base.rows.start)
    total = np.zeros(int(base.valid.sum()))
    for part in ours.groups(max(1, PIECE_BYTES // (4 * ours.dim * n_rows))):
        total += cosines(ours.of_slab(base, part), theirs.of_slab(changed, part)).sum(1)
    return total / len(ours.tokens)


def cosines(a: Float32, b: Float32) -> Float:
    """(images, tokens) of tokens (images, tokens, dim); 0 where one of both is 0, 1 where both are:
    nothing changed there."""

    def dot(x: Float32, y: Float32) -> Float:
        return np.einsum("itd,itd->it", x, y, dtype=np.float64)

    aa, bb = dot(a, a), dot(b, b)
    # One root of the product: a token with itself has exactly 1.
    norms = np.sqrt(aa * bb)
    found = np.divide(dot(a, b), norms, out=np.zeros_like(norms), where=norms > 0)
    return np.where((aa == 0) & (bb == 0), 1.0, found)
