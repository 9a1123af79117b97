"""An option that takes several values, repeated or with commas between them."""

from __future__ import annotations

from typing import Any

import click

REPEATABLE, LISTED = "Repeatable.", "Repeatable, or a comma list."


class Listed(click.Option):
    """`--k 1 --k 5`, or `--k 1,5`; for values that have no comma of their own."""

    def __init__(self, *args: Any, **settings: Any):
        """Accept the settings of click.Option; the help text also explains comma lists."""
        text = settings.get("help") or ""
        settings |= {"help": text.replace(REPEATABLE, LISTED), "multiple": True}
        super().__init__(*args, **settings)

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """The values, each checked."""
        if isinstance(value, (tuple, list)):
            parts = (part.split(",") if isinstance(part, str) else [part] for part in value)
            value = tuple(one for some in parts for one in some)
        return super().type_cast_value(ctx, value)
