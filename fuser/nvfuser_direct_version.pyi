from fuser.support.version import Version as Version
