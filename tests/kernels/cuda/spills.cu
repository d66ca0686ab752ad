// Must not build: far more live values than the registers that 1024 threads a block leave each of them.
__global__ void __launch_bounds__(1024) Spills(float* data) {
  float v[200];
#pragma unroll
  for (int i = 0; i < 200; ++i) v[i] = data[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 200; ++i) data[(199 - i) * 1024 + threadIdx.x] = v[i] * v[(i * 7) % 200];
}
