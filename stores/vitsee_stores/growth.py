"""The record in a manifest that makes a store a later generation of another store."""

from __future__ import annotations

from dataclasses import dataclass

from vitsee_stores.json_schema import Fields, name, text

MOST_SLABS = 1 << 27


@dataclass(frozen=True)
class Growth:
    """The record of a later generation: its predecessors, and where its slabs and sites belong.

    Attributes:
        after: store_id of each generation before, in order; the first one is the store itself.
        first_slab: the slab of the whole store that is this generation's slab 0: 0 where sites are
            added for all images, else the first slab that the images before did not fill.
        sites: all sites of the whole store in the model's order, aliases included.
        samples_fingerprint: of all images of the whole store.
    """

    after: tuple[str, ...]
    first_slab: int
    sites: tuple[str, ...]
    samples_fingerprint: str

    @property
    def number(self) -> int:
        """The generation's number; the store as it was made is 1."""
        return len(self.after) + 1


def read_growth(data: Fields) -> Growth:
    """The growth in a manifest. Raises ValueError: names a field that is missing or invalid."""
    after = data.list("after", text)
    if not after:
        raise ValueError(f"{data.place('after')} is empty, expected the generations before")
    return Growth(
        after=after,
        first_slab=data.integer("first_slab", 0, MOST_SLABS),
        sites=data.list("sites", name),
        samples_fingerprint=data.text("samples_fingerprint"),
    )
