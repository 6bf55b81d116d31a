from fuser.nvfuser.idm import *  # noqa: F403
