"""Handwritten kernels in the form that the code generator emits, for tests of the runtime."""

from __future__ import annotations

import re

from fuser.runtime import KernelParam, KernelSource


def kernel(
    name: str,
    parameters: str,
    body: str,
    *,
    threads: int = 1024,
    index: str = "int",
    uses_barriers: bool = False,
    helpers: str = "",
    cluster: int = 1,
) -> KernelSource:
    """Builds a kernel from parameters such as `const float* T0, float* T1, int n`, and a
    body.
    """
    params: list[KernelParam] = []
    spelled: list[str] = []
    for part in parameters.split(","):
        match = re.fullmatch(r"\s*(?P<type>[\w\s<>:]+?)\s*(?P<star>\*?)\s*(?P<name>\w+)\s*", part)
        assert match, part
        pointer = bool(match["star"])
        params.append(KernelParam(match["name"], match["type"], pointer))
        spelled.append(
            f"FUSER_PTR({match['type']}) {match['name']}"
            if pointer
            else f"const {match['type']} {match['name']}"
        )
    dims = f"__cluster_dims__(1, {cluster}, 1) " if cluster > 1 else ""
    text = (
        f"#define nvfuser_index_t {index}\n{helpers}"
        f'extern "C" __global__ void {dims}__launch_bounds__({threads}) '
        f"{name}({', '.join(spelled)}) {{\n"
        f"{body}\n}}\n"
    )
    return KernelSource(name, text, tuple(params), uses_barriers, cluster)


VECTOR_ADD = kernel(
    "vector_add",
    "const float* T0, const float* T1, float* T2, int64_t n",
    """\
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) T2[i] = T0[i] + T1[i];""",
    threads=128,
    index="int64_t",
)


def vector_copy(element: str, width: int, *, streaming: bool) -> KernelSource:
    """Copies `n` elements in vectors of `width`, and the remaining ones one by one."""
    cs = "_cs" if streaming else ""
    return kernel(
        f"vector_copy_{element.strip('_')}_{width}{cs}",
        f"const {element}* T0, {element}* T1, int n",
        f"""\
  const int first = (blockIdx.x * blockDim.x + threadIdx.x) * {width};
  Array<{element}, {2 * width}> T2;
  if (first + {width} <= n) {{
    load_vec{cs}<{width}>(T2, {width}, T0, first);
    store_vec{cs}<{width}>(T1, first, T2, {width});
  }} else {{
    for (int i = first; i < n; ++i) T1[i] = T0[i];
  }}""",
    )


BFLOAT_SCALE = kernel(
    "bfloat_scale",
    "const __bfloat* T0, __bfloat* T1, float s0, int n",
    """\
  const int first = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (first + 8 > n) return;
  Array<__bfloat, 8> T2;
  load_vec<8>(T2, T0, first);
  Array<float, 8> T3;
  bfloat2float_vec<8>(T3, T2);
  FUSER_UNROLL
  for (int i = 0; i < 8; ++i) T3[i] = T3[i] * s0;
  float2bfloat_vec<8>(T2, T3);
  store_vec<8>(T1, first, T2);""",
)

# Affine maps modulo a prime: associative, exact, and the order of combination shows in the result.
AFFINE = """\
struct Affine { int a; int b; };
struct AffineOp {
  static constexpr bool commutative = false;
  FUSER_METHOD Affine operator()(Affine f, Affine g) const {
    return Affine{f.a * g.a % 10007, (f.b * g.a + g.b) % 10007};
  }
};
"""
AXES = tuple((x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1) if x or y or z)


def flags(axes: tuple[int, int, int]) -> str:
    return ", ".join("true" if axis else "false" for axis in axes)


def suffix(axes: tuple[int, int, int]) -> str:
    return "".join(name for name, axis in zip("xyz", axes, strict=True) if axis)


def block_reduce_affine(axes: tuple[int, int, int]) -> KernelSource:
    """Every thread writes the result of its group, twice in a loop, so that shared memory is
    reused.
    """
    return kernel(
        f"block_reduce_affine_{suffix(axes)}",
        "const int* T0, int* T1",
        f"""\
  FUSER_SMEM(smem);
  const unsigned i = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  Affine value{{T0[2 * i], T0[2 * i + 1]}};
  for (int round = 0; round < 2; ++round) {{
    const Affine total = block_reduce<{flags(axes)}>(value, AffineOp(), Affine{{1, 0}}, smem);
    T1[2 * (i + round * blockDim.x * blockDim.y * blockDim.z)] = total.a;
    T1[2 * (i + round * blockDim.x * blockDim.y * blockDim.z) + 1] = total.b;
    value.b = (value.b + 1) % 10007;
  }}""",
        uses_barriers=True,
        helpers=AFFINE,
    )


def block_reduce_ops(type_name: str, op: str, identity: str) -> KernelSource:
    """Reduces one row per block in y over the threads in x."""
    return kernel(
        f"row_{op.lower()}_{type_name}",
        f"const {type_name}* T0, {type_name}* T1, int columns",
        f"""\
  FUSER_SMEM(smem);
  {type_name} value = {identity};
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  const {op}<{type_name}> combine;
  for (int i = threadIdx.x; i < columns; i += blockDim.x)
    value = combine(value, T0[row * columns + i]);
  value = block_reduce<true, false, false>(value, combine, {type_name}({identity}), smem);
  if (threadIdx.x == 0) T1[row] = value;""",
        uses_barriers=True,
    )


COLUMN_SUM = kernel(
    "column_sum",
    "const float* T0, float* T1, int rows, int columns",
    """\
  FUSER_SMEM(smem);
  Array<float, 4> T2;
  T2.set(0.0f);
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  for (int row = threadIdx.y; row < rows; row += blockDim.y) {
    Array<float, 4> T3;
    load_vec<4>(T3, T0, row * columns + column);
    FUSER_UNROLL
    for (int i = 0; i < 4; ++i) T2[i] += T3[i];
  }
  block_reduce_array<false, true, false, 4>(T2, SumOp<float>(), 0.0f, smem);
  if (threadIdx.y == 0) store_vec<4>(T1, column, T2);""",
    uses_barriers=True,
)

WELFORD_ROW = kernel(
    "welford_row",
    "const float* T0, float* T1, float* T2, int columns",
    """\
  FUSER_SMEM(smem);
  const Welford<float, int> none{0.0f, 0.0f, 0.0f, 0};
  Welford<float, int> w = none;
  for (int i = threadIdx.x; i < columns; i += blockDim.x)
    welford_add(w, T0[blockIdx.x * columns + i]);
  w = block_reduce<true, false, false>(w, WelfordOp<float, int>(), none, smem);
  if (threadIdx.x == 0) {
    T1[blockIdx.x] = w.mean();
    T2[blockIdx.x] = w.m2 / static_cast<float>(w.n);
  }""",
    uses_barriers=True,
)


def grid_reduce_affine(blocks: tuple[int, int, int], threads: tuple[int, int, int]) -> KernelSource:
    """Reduces over block and thread axes; the threads of the last block write the results."""
    return kernel(
        f"grid_reduce_affine_{suffix(blocks)}_{suffix(threads)}",
        "const int* T0, int* T1, int* T2, uint64_t* packets, unsigned* begun",
        f"""\
  const unsigned ticket = grid_ticket<{flags(blocks)}>(begun);
  FUSER_SMEM(smem);
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  Affine value{{T0[2 * (b * threads + t)], T0[2 * (b * threads + t) + 1]}};
  value = block_reduce<{flags(threads)}>(value, AffineOp(), Affine{{1, 0}}, smem);
  const bool last = grid_reduce<{flags(blocks)}, {flags(threads)}>(
      value, AffineOp(), Affine{{1, 0}}, packets, ticket, smem);
  if (last) {{
    const unsigned group = fuser_block_place<{flags(blocks)}>().group;
    T1[2 * (group * threads + t)] = value.a;
    T1[2 * (group * threads + t) + 1] = value.b;
    if (t == 0) atomicAdd(T2 + group, 1);
  }}""",
        uses_barriers=True,
        helpers=AFFINE,
    )


GRID_COLUMN_SUM = kernel(
    "grid_column_sum",
    "const float* T0, float* T1, uint64_t* packets, unsigned* begun, int rows, int columns",
    """\
  const unsigned ticket = grid_ticket<false, true, false>(begun);
  FUSER_SMEM(smem);
  Array<float, 2> T2;
  T2.set(0.0f);
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 2;
  for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += blockDim.y * gridDim.y) {
    Array<float, 2> T3;
    load_vec_cs<2>(T3, T0, row * columns + column);
    FUSER_UNROLL
    for (int i = 0; i < 2; ++i) T2[i] += T3[i];
  }
  block_reduce_array<false, true, false, 2>(T2, SumOp<float>(), 0.0f, smem);
  const bool last = grid_reduce_array<false, true, false, false, true, false, 2>(
      T2, SumOp<float>(), 0.0f, packets, ticket, smem);
  if (last && threadIdx.y == 0) store_vec_cs<2>(T1, column, T2);""",
    uses_barriers=True,
)

TRANSPOSE = kernel(
    "transpose",
    "const float* T0, float* T1, int n",
    """\
  FUSER_SMEM(smem);
  FUSER_SHARED(float) tile = FUSER_SHARED_AT(float, smem, 0, 16 * 17);
  const int column = blockIdx.x * 16 + threadIdx.x, row = blockIdx.y * 16 + threadIdx.y;
  if (row < n && column < n) tile[threadIdx.y * 17 + threadIdx.x] = T0[row * n + column];
  __syncthreads();
  const int to_column = blockIdx.y * 16 + threadIdx.x, to_row = blockIdx.x * 16 + threadIdx.y;
  if (to_row < n && to_column < n)
    T1[to_row * n + to_column] = tile[threadIdx.x * 17 + threadIdx.y];""",
    uses_barriers=True,
)

WARP_OPERATIONS = kernel(
    "warp_operations",
    "const int* T0, int* T1",
    """\
  const int x = T0[threadIdx.x];
  T1[threadIdx.x * 8 + 0] = __shfl_sync(0xffffffffu, x, 3);
  T1[threadIdx.x * 8 + 1] = __shfl_xor_sync(0xffffffffu, x, 5);
  T1[threadIdx.x * 8 + 2] = __shfl_down_sync(0xffffffffu, x, 4);
  T1[threadIdx.x * 8 + 3] = __shfl_up_sync(0xffffffffu, x, 4);
  T1[threadIdx.x * 8 + 4] = __shfl_xor_sync(0xffffffffu, x, 4, 8);
  T1[threadIdx.x * 8 + 5] = static_cast<int>(__ballot_sync(0xffffffffu, x % 2 == 0));
  T1[threadIdx.x * 8 + 6] = __any_sync(0xffffffffu, x == 7) + 2 * __all_sync(0xffffffffu, x >= 0);
  __syncwarp();
  if (threadIdx.x < 16) T1[threadIdx.x * 8 + 7] = __shfl_down_sync(0x0000ffffu, x, 1);
  else T1[threadIdx.x * 8 + 7] = -1;""",
    uses_barriers=True,
)

ATOMICS = kernel(
    "atomics",
    "const float* T0, float* T1, int* T2, int n",
    """\
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    atomicAdd(T1 + i % 3, T0[i]);
    atomicAdd(T2, 1);
  }""",
)


def everything() -> list[KernelSource]:
    """All kernels of this module, for the tests that compile each of them."""
    copies = [
        vector_copy(element, width, streaming=streaming)
        for element, widths in (("__bfloat", (1, 2, 4, 8)), ("float", (1, 4)), ("double", (2,)))
        for width in widths
        for streaming in (False, True)
    ]
    rows = [
        block_reduce_ops("float", "SumOp", "0"),
        block_reduce_ops("float", "ProdOp", "1"),
        block_reduce_ops("float", "MaxOp", "-INFINITY_F"),
        block_reduce_ops("int64_t", "MinOp", "9223372036854775807LL"),
        block_reduce_ops("double", "SumOp", "0"),
    ]
    rows = [
        KernelSource(r.name, r.text.replace("-INFINITY_F", "-3.4e38f"), r.params, r.uses_barriers)
        for r in rows
    ]
    return [
        VECTOR_ADD,
        *copies,
        BFLOAT_SCALE,
        *map(block_reduce_affine, AXES),
        *rows,
        COLUMN_SUM,
        WELFORD_ROW,
        grid_reduce_affine((1, 0, 0), (1, 0, 0)),
        grid_reduce_affine((1, 1, 1), (1, 1, 1)),
        grid_reduce_affine((0, 1, 0), (0, 1, 0)),
        grid_reduce_affine((1, 0, 1), (0, 0, 1)),
        GRID_COLUMN_SUM,
        TRANSPOSE,
        WARP_OPERATIONS,
        ATOMICS,
    ]
