#define nvfuser_index_t int
extern "C" __global__ void __launch_bounds__(128) bias_relu_bf16(
    FUSER_PTR(const __bfloat) T0,
    FUSER_PTR(const __bfloat) T1,
    FUSER_PTR(__bfloat) T7,
    const int i0,
    const int i2_div8) {
  const nvfuser_index_t tx = threadIdx.x;
  const nvfuser_index_t bx = blockIdx.x;
  const nvfuser_index_t h0 = 256 * bx + tx;
  const nvfuser_index_t h2 = 2048 * bx + 8 * tx;
  const nvfuser_index_t h4 = i0 * i2_div8;
  if ((256 * bx + tx + 128) < (i0 * i2_div8)) {
    Array<__bfloat, 16> T9;
    FUSER_UNROLL
    for (nvfuser_index_t k0 = 0; k0 < 2; ++k0) {
      const nvfuser_index_t h1 = (h0 + 128 * k0) % i2_div8;
      load_vec<8>(T9, 8 * k0, T1, 8 * h1);
    }
    Array<__bfloat, 16> T8;
    FUSER_UNROLL
    for (nvfuser_index_t k2 = 0; k2 < 2; ++k2) {
      load_vec<8>(T8, 8 * k2, T0, h2 + 1024 * k2);
    }
    FUSER_UNROLL
    for (nvfuser_index_t k4 = 0; k4 < 2; ++k4) {
      const nvfuser_index_t h3 = 8 * k4;
      Array<__bfloat, 8> v7;
      FUSER_UNROLL
      for (nvfuser_index_t k5 = 0; k5 < 8; ++k5) {
        const float t2 = __bfloat2float(T8[h3 + k5]);
        const float t3 = __bfloat2float(T9[h3 + k5]);
        const float t5 = t2 + t3;
        const float t6 = fm_relu(t5);
        const __bfloat t10 = __float2bfloat(t6);
        v7[k5] = t10;
      }
      store_vec_cs<8>(T7, h2 + 1024 * k4, v7);
    }
  } else {
    Array<__bfloat, 16> T9;
    FUSER_UNROLL
    for (nvfuser_index_t k0 = 0; k0 < 2; ++k0) {
      const nvfuser_index_t h5 = (h0 + 128 * k0) % i2_div8;
      if ((h0 + 128 * k0) < h4) {
        load_vec<8>(T9, 8 * k0, T1, 8 * h5);
      }
    }
    Array<__bfloat, 16> T8;
    FUSER_UNROLL
    for (nvfuser_index_t k2 = 0; k2 < 2; ++k2) {
      if ((h0 + 128 * k2) < h4) {
        load_vec<8>(T8, 8 * k2, T0, h2 + 1024 * k2);
      }
    }
    FUSER_UNROLL
    for (nvfuser_index_t k4 = 0; k4 < 2; ++k4) {
      const nvfuser_index_t h6 = 8 * k4;
      if ((h0 + 128 * k4) < h4) {
        Array<__bfloat, 8> v7;
        FUSER_UNROLL
        for (nvfuser_index_t k5 = 0; k5 < 8; ++k5) {
          const float t2 = __bfloat2float(T8[h6 + k5]);
          const float t3 = __bfloat2float(T9[h6 + k5]);
          const float t5 = t2 + t3;
          const float t6 = fm_relu(t5);
          const __bfloat t10 = __float2bfloat(t6);
          v7[k5] = t10;
        }
        store_vec_cs<8>(T7, h2 + 1024 * k4, v7);
      }
    }
  }
}
