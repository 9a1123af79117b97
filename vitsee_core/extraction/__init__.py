"""model x images -> store (see run.py for the path the data takes)."""

from vitsee_core.extraction.options import DataOptions, KeepOptions, ModelOptions, RunOptions
from vitsee_core.extraction.prepare import Prepared, prepare
from vitsee_core.extraction.run import Outcome, extract
from vitsee_core.extraction.sharding import Shard, parse_shard
from vitsee_core.extraction.signals import Interrupted

__all__ = [
    "DataOptions",
    "Interrupted",
    "KeepOptions",
    "ModelOptions",
    "Outcome",
    "Prepared",
    "RunOptions",
    "Shard",
    "extract",
    "parse_shard",
    "prepare",
]
