// SPDX-License-Identifier: Apache-2.0
// y[i] = x[i] + 1, launched with PDL: it starts before the preceding kernel ends and lets the next kernel start early.
extern "C" __global__ void dependent(const int* x, int* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (i < n) y[i] = x[i] + 1;
}
