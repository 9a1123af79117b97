"""Attention and residual summaries, computed where the model runs while it is being extracted."""

from vitsee_core.reductions.activations import pool_sites, residual_products
from vitsee_core.reductions.attention import AttentionReducer
from vitsee_core.reductions.rollout import rollout
from vitsee_core.reductions.summary import AttentionScores, AttentionSummary

__all__ = [
    "AttentionReducer",
    "AttentionScores",
    "AttentionSummary",
    "pool_sites",
    "residual_products",
    "rollout",
]
