"""The program `vitsee`: signal handlers are installed before the slow imports."""

from __future__ import annotations

import sys

from vitsee_cli import signals


def main() -> None:
    """Run the command line."""
    signals.answer(sys.argv[1:])
    from vitsee_cli.main import main as group

    try:
        group(prog_name="vitsee")
    finally:
        signals.ignore()


if __name__ == "__main__":
    main()
