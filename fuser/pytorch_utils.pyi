from fuser.nvfuser.pytorch_utils import *  # noqa: F403
