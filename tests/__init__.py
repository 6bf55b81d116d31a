"""Tests: <package>/<subpackage>/test_<module>.py; `support` is shared; `gpu` needs a CUDA GPU."""
