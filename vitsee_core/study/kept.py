"""Contents of existing stores, which are reused where sufficient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitsee_core.study.recipes import (
    ATTENTION,
    FIELDS,
    HEADS,
    MORE_SITES,
    PIXELS,
    RESIDUAL,
    ROWS,
    TOKENS,
)
from vitsee_core.study.steps import Plan
from vitsee_core.study.surveyed import SurveyedModel
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError

NAMES = {
    TOKENS: "every token",
    HEADS: "parts of heads",
    FIELDS: "receptive fields",
    PIXELS: "pixels",
    ATTENTION: "attention summaries",
    ROWS: "attention of single images",
    RESIDUAL: "products of skips and branches",
    MORE_SITES: "sites within blocks",
}


def kept(place: Path, model: SurveyedModel, *, complete: bool = False) -> set[str] | None:
    """Contents of a store beyond pooled vectors, in the words of `recipes`; None without a readable
    store. complete: only of a complete one."""
    try:
        about = open_store(place, allow_partial=not complete).manifest.identity
    except (VitseeError, OSError):
        return None
    tokens, sites = about.get("tokens"), about.get("sites")
    holds = {
        TOKENS: isinstance(tokens, dict) and tokens.get("default") == "all",
        HEADS: isinstance(sites, list) and model.heads in sites,
        FIELDS: bool(about.get("erf")),
        PIXELS: about.get("inputs") is True,
        ATTENTION: about.get("attention") not in (None, "none"),
        ROWS: about.get("attention") in ("rows", "full"),
        MORE_SITES: isinstance(sites, list) and {*model.more_sites} <= {*sites},
        RESIDUAL: about.get("residual") is True,
    }
    return {what for what, there in holds.items() if there}


def check_kept(
    plan: Plan, models: Sequence[SurveyedModel], steps: Mapping[str, Mapping[str, Any]]
) -> None:
    """Check that complete stores of an earlier study hold what the analyses of this one need.

    Args:
        plan: of this study.
        models: its models.
        steps: of the earlier study, by name: results of its own command are trusted.

    Raises:
        VitseeError: one holds less.
    """
    for model in models:
        step = next((s for s in plan.extractions if s.name == f"extract-{model.label}"), None)
        if step is None or steps.get(step.name, {}).get("command") == step.line:
            continue
        place = step.outputs[0]
        holds = kept(place, model, complete=True)
        lacks = [] if holds is None else [what for what in NAMES if what in _wanted(plan, model)]
        if lacks := [NAMES[what] for what in lacks if what not in (holds or ())]:
            raise VitseeError(
                f"{place} was extracted for fewer analyses and lacks {', '.join(lacks)}; remove it "
                "to extract anew, or choose another -o"
            )


def _wanted(plan: Plan, model: SurveyedModel) -> set[str]:
    """What the plan's analyses need of a model, as far as it offers it."""
    needs = {FIELDS: "grid", HEADS: "heads", RESIDUAL: "residual"}
    needs |= dict.fromkeys((ATTENTION, ROWS), "attention")
    return {what for what in plan.keeps if what not in needs or model.lacks[needs[what]] is None}
