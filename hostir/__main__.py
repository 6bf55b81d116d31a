"""`python -m hostir`; see `hostir.cli`."""

import sys

from hostir.cli import main

sys.exit(main())
