"""Runs pytest on every rank: `mpirun -np 2 python tests/support/rank_programs/in_pytest.py
FILE`.
"""

from __future__ import annotations

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
