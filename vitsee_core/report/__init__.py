"""One page from a folder of results and stores, for a browser and without a network."""

from vitsee_core.report.page import write_report as write_report

__all__ = ["write_report"]
