"""The classifiers of stores: as they keep them, else taken from the models they were made with."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vitsee_core.models import head_weights
from vitsee_core.models.provenance import Provenance, model_of
from vitsee_stores.errors import MissingInput, NotOffered, VitseeError

if TYPE_CHECKING:
    from vitsee_core.models.head_weights import Classifier
    from vitsee_core.models.loaded import LoadedModel
    from vitsee_stores import Store

log = logging.getLogger(__name__)


@dataclass
class Classifiers:
    """Each found once. origin: where the weights are now; rebuilt: labels of the stores whose model
    was needed."""

    origin: Provenance
    rebuilt: list[str] = field(default_factory=list)
    _found: dict[str, Classifier | MissingInput] = field(default_factory=dict)

    def __call__(self, store: Store) -> Classifier:
        """The classifier that a store keeps, else its model's, built again; a MissingInput where
        neither can be had, with both reasons."""
        key = store.manifest.store_id
        if key not in self._found:
            try:
                self._found[key] = self._find(store)
            except MissingInput as missing:
                self._found[key] = missing
        found = self._found[key]
        if isinstance(found, MissingInput):
            raise found
        return found

    def _find(self, store: Store) -> Classifier:
        try:
            return head_weights.of_store(store)
        except MissingInput as missing:
            kept = missing
        try:
            model = model_of(store, self.origin.checkpoint, trust=self.origin.trust)
            found = of_model(model)
        except VitseeError as error:
            raise MissingInput(f"{kept}; {error}") from None
        if isinstance(found, str):
            raise NotOffered(f"{kept}; nor has its model one that can be read: {found}")
        self.rebuilt.append(store.label)
        log.info("%s: the classifier is that of its model, built again", store.label)
        return found


def of_model(model: LoadedModel) -> Classifier | str:
    """The classifier of a model on the CPU: a formula over tokens, or attention pooling and a
    linear layer; else the reason why it is neither."""
    from vitsee_core.models.attention_pooled import find_attention_pooled
    from vitsee_core.models.classifier import find_classifier
    from vitsee_core.models.site_tables import site_table

    table = site_table(model)
    found = find_classifier(model, table)
    if not isinstance(found, str):
        return found
    pooled = find_attention_pooled(model, table)
    return found if isinstance(pooled, str) else pooled
