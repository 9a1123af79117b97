"""`python -m vitsee` is the program `vitsee`."""

from __future__ import annotations

from vitsee_cli.__main__ import main

if __name__ == "__main__":
    main()
