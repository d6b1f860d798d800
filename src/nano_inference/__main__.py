"""Run the command line with `python -m nano_inference`."""

from __future__ import annotations

import sys

from nano_inference.cli import main

if __name__ == "__main__":
    sys.exit(main())
