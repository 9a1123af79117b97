"""timm name or checkpoint -> model, its sites, and hooks that capture them."""

from vitsee_core.models.attention_watch import AttentionCall
from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.hook_points import CaptureError, ModelError
from vitsee_core.models.load import load_model, own_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.selfcheck import SelfCheck, self_check
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import AttentionBlock, SiteTable, Sublayer

__all__ = [
    "AttentionBlock",
    "AttentionCall",
    "Capture",
    "CaptureError",
    "LoadedModel",
    "ModelError",
    "Observer",
    "SelfCheck",
    "SiteTable",
    "Sublayer",
    "load_model",
    "own_model",
    "self_check",
    "site_table",
]
