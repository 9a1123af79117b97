"""The findings of the papers, looked for in one's own stores."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import product
from typing import Any

from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.progress import SILENT, Progress, counting
from vitsee_core.study.findings.model_tables import ModelTables
from vitsee_core.study.findings.papers import FINDINGS
from vitsee_core.tables.results import Table
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import by_reason

log = logging.getLogger(__name__)

ROLES = frozenset(model for finding in FINDINGS for model in finding.models)
TRAIN = "-train"
NOT_MEASURED = "not measured"
COLUMNS = (
    *(
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
    ),
    *("reason", "section", "source", "statistic"),
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
    """One row per finding, and per choice of stores for its models.

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
    known = [finding.name for finding in FINDINGS]
    if unknown := [name for name in findings if name not in known]:
        raise VitseeError(f"no finding {unknown[0]!r}; findings: {', '.join(known)}")
    execution = Execution(
        images=images, seed=seed, jobs=jobs, memory=memory, device=device
    )
    own = [store for store in stores if not store.label.endswith(TRAIN)]
    learnt = {
        store.label.removesuffix(TRAIN): store for store in stores if store not in own
    }
    members = _members(own)
    tables: dict[tuple[str, ...], ModelTables] = {}
    wanted = []
    left_out = {}
    for finding in FINDINGS:
        if findings and finding.name not in findings:
            continue
        missing = [model for model in finding.models if model not in members]
        if missing:
            left_out[finding.name] = f"no store is of a {', '.join(missing)}"
        else:
            choices = product(*(members[model] for model in finding.models))
            wanted += [(finding, chosen) for chosen in choices]
    for line in by_reason(left_out):
        log.info("left out: %s", line)
    if not wanted:
        raise VitseeError(f"nothing to look for: {'; '.join(by_reason(left_out))}")
    rows = []
    with counting(progress, len(wanted), "findings"):
        for finding, chosen in wanted:
            named = dict(zip(finding.models, chosen, strict=True))
            key = tuple(f"{model}={store.label}" for model, store in named.items())
            training = {m: learnt[s.label] for m, s in named.items() if s.label in learnt}
            made = tables.setdefault(key, ModelTables(named, training, execution))
            reason = ""
            try:
                found = finding.measure(made)
            except (VitseeError, ValueError) as error:
                found = None
                reason = " ".join(str(error).split())
            row: dict[str, Any] = finding.row(found)
            del row["models"]  # the roles; which stores play them is in `stores`
            row["stores"] = " ".join(key)
            row["reason"] = reason
            if not found:
                row["verdict"] = NOT_MEASURED
            rows.append(row)
            progress.advance(1)
    notes: dict[str, Any] = {
        "interval": "95 %, delete-a-block jackknife over images",
        "seed": seed,
    }
    return Table.from_rows(
        rows, COLUMNS, notes | ({"left_out": left_out} if left_out else {})
    )


def _members(stores: Sequence[Store]) -> dict[str, list[Store]]:
    found: dict[str, list[Store]] = {}
    for store in stores:
        layouts = [site.layout for site in store.sites.values() if site.layout]
        cls = any("cls" in layout.prefix for layout in layouts)
        kind = "vit" if cls or store.attention_blocks else "resnet"
        found.setdefault(store.label if store.label in ROLES else kind, []).append(store)
    return found
