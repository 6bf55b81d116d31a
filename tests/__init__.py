"""Tests: <package>/<room>/test_<module>.py; `support` is shared; `gpu` needs a CUDA device."""
