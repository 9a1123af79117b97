"""timm name or checkpoint -> model, its sites, and hooks that capture them."""

from vitsee_core.models.attention import AttentionCall
from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.hook_points import CaptureError, ModelError
from vitsee_core.models.load import LoadedModel, load_model
from vitsee_core.models.selfcheck import SelfCheck, self_check
from vitsee_core.models.sites import AttentionBlock, SiteTable, Sublayer, site_table

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
    "self_check",
    "site_table",
]
