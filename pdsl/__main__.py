"""`python -m pdsl` and the console script."""

from __future__ import annotations

import gc
import sys

gc.disable()  # what starting makes stays; looking through it for garbage takes a twentieth of a check

from pdsl.cli import main  # noqa: E402

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
