"""Lowering of a scheduled fusion to a kernel: loop nests, indices, predicates, buffers,
barriers.
"""

from fuser.lower.kernel import Kernel as Kernel
from fuser.lower.kernel_passes import lower_kernel as lower_kernel
