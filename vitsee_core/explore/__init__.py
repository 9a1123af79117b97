"""Patches to click on: the tokens of a few images of several stores on one page, `explore.html`."""

from vitsee_core.explore.exploration import explore as explore

__all__ = ["explore"]
