// SPDX-License-Identifier: Apache-2.0
// y[i] = x[i] + 1, as a kernel that starts before its predecessor ends and lets its successor do the same.
extern "C" __global__ void dependent(const int* x, int* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (i < n) y[i] = x[i] + 1;
}
