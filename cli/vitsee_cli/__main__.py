"""The program `vitsee`: signal handlers are installed before the slow imports."""

from __future__ import annotations

import os
import sys

from vitsee_cli import signals

TYPE_CHECKING = False  # typing is not loaded yet
if TYPE_CHECKING:
    from collections.abc import MutableMapping

# Turns of a loop, about 50 us: longer than the gaps within a forward pass.
SPIN = "1000"


def share_cores(environ: MutableMapping[str, str]) -> None:
    """Let torch's idle threads sleep soon, unless the user configured otherwise.

    By default GNU OpenMP lets them spin for milliseconds after every operation, on cores that the
    threads of summaries, of the writer and of other processes need. Read when torch is loaded.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environ.keys():
        environ["GOMP_SPINCOUNT"] = SPIN


def main() -> None:
    """Run the command line."""
    signals.install_handlers(sys.argv[1:])
    share_cores(os.environ)
    from vitsee_cli.main import main as group

    try:
        group(prog_name="vitsee")
    finally:
        signals.ignore()


if __name__ == "__main__":
    main()
