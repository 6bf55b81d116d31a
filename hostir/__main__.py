"""Runs the command line `python -m hostir`. The commands are defined in `hostir.tools.cli`."""

import sys

from hostir.tools.cli import main

sys.exit(main())
