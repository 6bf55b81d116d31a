#define nvfuser_index_t int
extern "C" __global__ void __launch_bounds__(128) row_sum_and_max(
    FUSER_PTR(const float) T0,
    FUSER_PTR(float) T2,
    FUSER_PTR(float) T3,
    FUSER_PTR(unsigned) W0,
    FUSER_PTR(uint64_t) W1,
    const int s0,
    const int i2) {
  FUSER_BLOCK_SMEM(smem, 128, 1, 1);
  const nvfuser_index_t tx = threadIdx.x;
  const nvfuser_index_t bx = blockIdx.x;
  const nvfuser_index_t by = blockIdx.y;
  const nvfuser_index_t h0 = 128 * bx * s0 + tx;
  const nvfuser_index_t h1 = 128 * bx * s0 + by * i2 + tx;
  const unsigned ticket0 = grid_ticket<true, false, false>(W0);
  float r1 = 0.0f;
  float r5 = -float(FUSER_INF);
  for (nvfuser_index_t k0 = 0; k0 < s0; ++k0) {
    if ((h0 + 128 * k0) < i2) {
      const float t0 = T0[h1 + 128 * k0];
      r1 += t0;
      r5 = MaxOp<float>()(r5, t0);
    }
  }
  Pair<float, float> pr1 = Pair<float, float>{r1, r5};
  pr1 = block_reduce<true, false, false>(pr1, PairOp<SumOp<float>, MaxOp<float>>(), Pair<float, float>{0.0f, -float(FUSER_INF)}, smem);
  const bool done1 = grid_reduce<true, false, false, true, true, true>(pr1, PairOp<SumOp<float>, MaxOp<float>>(), Pair<float, float>{0.0f, -float(FUSER_INF)}, W1, ticket0, smem);
  r1 = pr1.first;
  r5 = pr1.second;
  if (done1 && tx == 0) {
    const float t4 = r1 * 0.5f;
    T2[by] = t4;
    T3[by] = r5;
  }
}
