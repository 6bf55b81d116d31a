"""A block of a GPT through Lightning Thunder: its nvFuser executor, with this project in nvFuser's
place.

    pip install lightning-thunder
    python examples/thunder_gpt_block.py

Thunder traces the module, forward and backward, and gives regions of it to an executor. That for
nvFuser imports `nvfuser_direct`, writes each region as a FusionDefinition and executes that; here
`fuser` has this name. Thunder wants CUDA tensors; without a GPU, names of its executor are set so
that it takes CPU tensors. Prints the fused regions, and their largest difference from torch in
float64. docs/how-to/use-with-thunder.md says what Thunder needs, and what it does without.
"""

from __future__ import annotations

import sys
import types
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

import fuser

# Thunder asks for nvFuser's version, by which it knows what nvFuser's Python has.
SPOKEN = "0.2.36"


def stand_in() -> None:
    """Makes `nvfuser_direct` and `nvfuser` names of this project, as `import` finds them."""
    for name in ("nvfuser_direct", "nvfuser"):
        module: Any = types.ModuleType(name)
        module.__getattr__ = lambda attribute: getattr(fuser, attribute)
        module.version = lambda: SPOKEN
        sys.modules[name] = module
    # Thunder 0.2.6 lists functions of named tensors, which torch 2.13 has no more.
    for name in ("align_as", "align_to", "has_names", "refine_names", "rename"):
        if not hasattr(torch.Tensor, name):
            setattr(torch.Tensor, name, types.FunctionType(_gone.__code__, globals(), name))


def _gone(self: torch.Tensor, *names: str) -> torch.Tensor:
    raise NotImplementedError("named tensors")


def executor(device: str) -> Any:
    """Returns Thunder's executor for nvFuser, which takes tensors of the device."""
    stand_in()
    found: Any = import_module("thunder.executors.nvfuserex")
    if device == "cuda":
        return found.nvfuserex
    version = import_module("looseversion").LooseVersion(SPOKEN)
    found.nvfuser_version = lambda: version
    impl: Any = import_module("thunder.executors.nvfuserex_impl")
    cpu = import_module("thunder.core.devices").DeviceType.CPU
    # The devices that it compares: CPU tensors pass for CUDA ones, and none is a CPU scalar.
    impl.DeviceType = types.SimpleNamespace(CUDA=cpu)
    impl.cpu = None
    impl.device_supports_fp8 = lambda: False
    return impl.ex


class Block(torch.nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.projection = torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the block: x [batch, tokens, width] -> the same shape."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (c // self.heads) ** -0.5
        later = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1)
        x = x + self.projection((weights @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


def gradients(block: torch.nn.Module, function: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns the result and the gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    y = function(x)
    return [y.detach(), *torch.autograd.grad((y * y).sum(), [x, *block.parameters()])]


def main() -> None:
    """Runs the block with Thunder, with and without this project's kernels, and compares."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        ex = executor(device)
        thunder: Any = import_module("thunder")
    except ImportError as error:
        print(f"needs Lightning Thunder: pip install lightning-thunder ({error})")
        return
    torch.manual_seed(0)
    block = Block(32, 4).to(device)
    x = torch.randn(2, 16, 32, device=device)
    fused = thunder.jit(block, executors=[ex], nv_enable_linear=True, nv_enable_matmul=True)
    got = gradients(block, fused, x)
    traces = thunder.last_traces(fused)[-1], thunder.last_backward_traces(fused)[-1]
    for name, trace in zip(("forward", "backward"), traces, strict=True):
        regions = [b for b in trace.bound_symbols if b.sym.is_fusion]
        ops = sum(len(b.subsymbols) for b in regions)
        print(f"{name}: {len(regions)} fusions of {ops} ops")
    exact = Block(32, 4).double().to(device)
    exact.load_state_dict(block.state_dict())
    expected = gradients(exact, exact, x.double())
    worst = max(
        float(((a - e).abs() / (1 + e.abs())).max()) for a, e in zip(got, expected, strict=True)
    )
    print(f"largest error against torch in float64: {worst:.1e}")


if __name__ == "__main__":
    main()
