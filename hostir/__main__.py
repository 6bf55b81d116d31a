"""`python -m hostir`; see `hostir.tools.cli`."""

import sys

from hostir.tools.cli import main

sys.exit(main())
