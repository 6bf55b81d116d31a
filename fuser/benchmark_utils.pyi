from fuser.nvfuser.benchmark_utils import *  # noqa: F403
