# SPDX-License-Identifier: Apache-2.0
"""Run the configurations of one GEMM kernel on the simulator and compare each with the float64 product.

    python -m tests.tools.run_kernel gemm_sm80 --m 17 --arch 80
    python -m tests.tools.run_kernel gemm_sm90 192x256 --m 33 --dtype bfloat16 --landing earliest --limit 5

This is the loop for work on one kernel: edit the `.cu` file, run this, read the fault or the error.
"""

from __future__ import annotations

import argparse
import time

from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from cupy_awq.runtime import device
from tests.backends import runner
from tests.test_kernels import check_matmul


def run(problem: Problem, kernel: str, arch: int, landing: str, limit: int) -> int:
    """Simulate a kernel's configurations, print a line for each, and return how many ran.

    Raises:
        ValueError: the kernel cannot take the problem; the message says why.
        simt.Fault, AssertionError: a configuration fails.
    """
    gpu = device.nominal(arch)
    found = select.candidates(problem, gpu)[kernel]
    if isinstance(found, str):
        raise ValueError(f"{kernel}: expected a problem that it can take, got a refusal: {found}")
    for candidate in found[:limit]:
        start = time.perf_counter()
        check_matmul(runner(landing), problem, candidate.family, candidate.config, gpu, seed=0)
        print(f"{candidate.config}: {time.perf_counter() - start:.2f} s", flush=True)
    return min(limit, len(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", help="the name of a GEMM kernel, such as gemm_sm80")
    parser.add_argument("shape", metavar="KxN", nargs="?", default="192x224", help="(default: 192x224)")
    parser.add_argument("--m", type=int, default=17, help="rows of x (default: 17)")
    parser.add_argument("--group-size", type=int, default=64, help="(default: 64)")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="of x")
    parser.add_argument("--arch", type=int, default=90, help="the architecture path: 60, 75, 80 or 90 (default: 90)")
    parser.add_argument("--landing", choices=("latest", "earliest"), default="latest", help="of asynchronous copies")
    parser.add_argument("--limit", type=int, default=1000, help="the most configurations, fastest by cost model first")
    arguments = parser.parse_args()
    k, n = map(int, arguments.shape.split("x"))
    repacked = arguments.kernel in ("gemm_sm90", "gemm_sm90_large")
    problem = Problem(
        arguments.m, n, k, arguments.group_size, arguments.dtype, layouts=(AWQ, FRAGMENTS)[: 1 + repacked]
    )
    count = run(problem, arguments.kernel, arguments.arch, arguments.landing, arguments.limit)
    print(f"{count} configurations of {arguments.kernel} are right")


if __name__ == "__main__":
    main()
