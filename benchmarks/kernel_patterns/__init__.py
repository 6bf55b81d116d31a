"""The kernels that `bench.py kernels` times, by name."""

from kernel_patterns.columns import COLUMNS
from kernel_patterns.norms import NORMS
from kernel_patterns.pattern import Operand, Pattern, define
from kernel_patterns.pointwise import POINTWISE
from kernel_patterns.rows import ROWS
from kernel_patterns.transposes import TRANSPOSES

PATTERNS: dict[str, Pattern] = {**POINTWISE, **ROWS, **NORMS, **COLUMNS, **TRANSPOSES}

# One or two of each kind, for comparisons over many shapes.
MAIN = (
    *("cast", "gelu_mul_add", "silu_mul", "silu_mul_backward", "adamw", "rope"),
    *("dropout", "bias_dropout_add", "row_sum", "softmax", "softmax_backward"),
    *("cross_entropy", "cross_entropy_and_gradient", "layer_norm_kept", "rms_norm_kept"),
    *("residual_rms_norm_wide", "dropout_residual_layer_norm"),
    *("layer_norm_gradients", "rms_norm_gradients", "column_sum", "sum_of_all", "batch_norm"),
    *("transpose", "permute_021", "permute_0213", "add_turned_gelu"),
)

__all__ = ["MAIN", "PATTERNS", "Operand", "Pattern", "define"]
