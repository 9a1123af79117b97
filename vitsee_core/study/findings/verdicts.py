"""The findings of the papers, looked for in one's own stores."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.progress import SILENT, Progress, counting
from vitsee_core.study.findings.finding import Finding
from vitsee_core.study.findings.model_tables import ModelTables
from vitsee_core.study.findings.papers import FINDINGS
from vitsee_core.tables.results import Table
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import by_reason

log = logging.getLogger(__name__)

# Findings' names for models: a store that has such a label stands for that model alone.
ROLES = frozenset(model for finding in FINDINGS for model in finding.models)
TRAIN = "-train"  # ending of the label of a store of training images
NOT_MEASURED = "not measured"
COLUMNS = (
    "name",
    "claim",
    "stores",
    "value",
    "std",
    "low",
    "high",
    "n_blocks",
    "unit",
    "verdict",
    "reason",
    "section",
    "source",
    "statistic",
)


def run(
    *stores: Store,
    findings: Sequence[str] = (),
    images: int | None = None,
    seed: int = 0,
    jobs: int = 1,
    memory: int | None = None,
    device: str = "auto",
    progress: Progress = SILENT,
) -> Table:
    """Measure findings, one row for each, and for each choice of stores for its models.

    Columns: `COLUMNS`. `value` is above 0 where the claim holds, with a 95 % interval over images;
    `verdict`: "holds" or "does not hold" where the interval lies on one side of 0, else
    "undecided"; "not measured", without numbers, where the stores lack what it takes (`reason`).

    A store that is named as a finding names its model (`vit-gap`, `mixer`) stands for that alone;
    of the others those with attention or a class token stand for `vit`, those without for `resnet`
    (one of a ViT that keeps neither is named: `vit=`). `NAME-train` is
    over the images that probes and neighbours of NAME learn from. A finding that has no store for
    one of its models is left out, which is logged.

    Args:
        stores: of models over the same images.
        findings: only these, by name.
        images: how many images are used.
        seed: of all that is random.
        jobs: slabs to work on at a time.
        memory: bytes to stay within.
        device: where to compute.
        progress: advanced by one per row.

    Raises:
        VitseeError: no such finding, or none that these stores are for.
    """
    names = [finding.name for finding in FINDINGS]
    for name in findings:
        if name not in names:
            raise VitseeError(f"no finding {name!r}; findings: {', '.join(names)}")
    execution = Execution(
        images=images, seed=seed, jobs=jobs, memory=memory, device=device
    )
    training_stores = {}  # label of a model's store -> its store of training images
    model_stores = []
    for store in stores:
        if store.label.endswith(TRAIN):
            training_stores[store.label.removesuffix(TRAIN)] = store
        else:
            model_stores.append(store)
    stores_of_role = _stores_by_role(model_stores)
    selected = [f for f in FINDINGS if not findings or f.name in findings]
    choices, left_out = _choose_stores(selected, stores_of_role)
    for line in by_reason(left_out):
        log.info("left out: %s", line)
    if not choices:
        raise VitseeError(f"nothing to look for: {'; '.join(by_reason(left_out))}")
    # Findings on the same stores share their tables.
    tables_of_stores: dict[tuple[str, ...], ModelTables] = {}
    rows = []
    with counting(progress, len(choices), "findings"):
        for finding, chosen_stores in choices:
            key = tuple(f"{role}={store.label}" for role, store in chosen_stores.items())
            if key not in tables_of_stores:
                training = {
                    role: training_stores[store.label]
                    for role, store in chosen_stores.items()
                    if store.label in training_stores
                }
                tables_of_stores[key] = ModelTables(chosen_stores, training, execution)
            rows.append(_measure(finding, tables_of_stores[key], key))
            progress.advance(1)
    notes: dict[str, Any] = {
        "interval": "95 %, delete-a-block jackknife over images",
        "seed": seed,
    }
    if left_out:
        notes["left_out"] = left_out
    return Table.from_rows(rows, COLUMNS, notes)


def _choose_stores(
    findings: Sequence[Finding], stores_of_role: Mapping[str, Sequence[Store]]
) -> tuple[list[tuple[Finding, dict[str, Store]]], dict[str, str]]:
    """Return each finding with each choice of stores for its models, and the findings left out.

    Args:
        findings: in the order of the rows.
        stores_of_role: a finding's name for a model -> the stores that can stand for it.

    Returns:
        Pairs of a finding and role -> store; name of a finding -> why no stores are for it.
    """
    choices = []
    left_out = {}
    for finding in findings:
        missing = [role for role in finding.models if role not in stores_of_role]
        if missing:
            left_out[finding.name] = f"no store is of a {', '.join(missing)}"
            continue
        # Every combination of one store for each role.
        candidates = [stores_of_role[role] for role in finding.models]
        for stores in product(*candidates):
            store_of_role = dict(zip(finding.models, stores, strict=True))
            choices.append((finding, store_of_role))
    return choices, left_out


def _measure(
    finding: Finding, tables: ModelTables, stores: tuple[str, ...]
) -> dict[str, Any]:
    """Return the row of a finding.

    Args:
        finding: the finding.
        tables: of the stores.
        stores: `ROLE=LABEL` of each.
    """
    estimate = None
    reason = ""
    # Whatever a store lacks is a verdict, and the other findings are measured still.
    try:
        estimate = finding.measure(tables)
    except (VitseeError, ValueError) as error:
        reason = " ".join(str(error).split())
    row: dict[str, Any] = finding.row(estimate)
    del row["models"]  # the roles; which stores play them is in `stores`
    row["stores"] = " ".join(stores)
    row["reason"] = reason
    if estimate is None:
        row["verdict"] = NOT_MEASURED
    return row


def _stores_by_role(stores: Sequence[Store]) -> dict[str, list[Store]]:
    """Return a finding's name for a model -> the stores that can stand for it."""
    stores_of_role: dict[str, list[Store]] = {}
    for store in stores:
        if store.label in ROLES:
            role = store.label
        else:
            layouts = [site.layout for site in store.sites.values() if site.layout]
            has_cls = any("cls" in layout.prefix for layout in layouts)
            role = "vit" if has_cls or store.attention_blocks else "resnet"
        stores_of_role.setdefault(role, []).append(store)
    return stores_of_role
