#define nvfuser_index_t int
extern "C" __global__ void __launch_bounds__(1) cpu_column_maximum(
    FUSER_PTR(const float) T0,
    FUSER_PTR(float) T1,
    const int s0,
    const int i0,
    const int i2) {
  for (nvfuser_index_t k0 = 0; k0 < s0; ++k0) {
    const nvfuser_index_t h0 = i2 - 64 * k0;
    const nvfuser_index_t h1 = 64 < h0 ? 64 : h0;
    const nvfuser_index_t h2 = 64 * k0;
    const nvfuser_index_t h4 = 64 < (i2 - 64 * k0) ? 64 : (i2 - 64 * k0);
    Array<float, 64> r2;
    r2.set(-float(FUSER_INF));
    for (nvfuser_index_t k1 = 0; k1 < i0; ++k1) {
      const nvfuser_index_t h3 = i2 * k1 + h2;
      FUSER_SIMD
      for (nvfuser_index_t k2 = 0; k2 < h1; ++k2) {
        const float t0 = T0[h3 + k2];
        r2[k2] = MaxOp<float>()(r2[k2], t0);
      }
    }
    FUSER_SIMD
    for (nvfuser_index_t k3 = 0; k3 < h4; ++k3) {
      T1[h2 + k3] = r2[k3];
    }
  }
}
