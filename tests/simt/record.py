# SPDX-License-Identifier: Apache-2.0
"""Record what a GPU returns for the kernel of every opcode: ``python tests/simt/record.py --out FILE``.

Each kernel runs in a worker process. A kernel that fails is reported, and its worker is replaced, while the others
continue. Afterwards each result is compared with the simulator's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.pool
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tests import simt
from tests.simt.case import Case, same
from tests.simt.kernels import source_text
from tests.simt.opcodes import CASES

VECTORS = Path(__file__).parent / "vectors.npz"
TIMEOUT = 120.0


def measure(name: str) -> np.ndarray:
    """Return the words that the kernel of a case writes on the current GPU."""
    import cupy

    from cupy_awq.runtime.launcher import launch

    case = CASES[name]
    buffers = {key: cupy.asarray(value) for key, value in case.buffers().items()}
    with source_text(case.source, case.kernel()):
        launch(case.plan(), buffers, cupy.cuda.runtime.getDevice())
    return np.asarray(buffers["y"].get())


def device_name(_: str) -> str:
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode())


def simulate(case: Case) -> np.ndarray:
    """Return the words that the kernel of a case writes on the simulator."""
    buffers = case.buffers()
    with source_text(case.source, case.kernel()):
        simt.run(case.plan(), buffers)
    return buffers["y"]


class _Worker:
    """A worker process; it is replaced after a failed kernel, as a CUDA error makes its context unusable."""

    def __init__(self) -> None:
        self._pool: multiprocessing.pool.Pool | None = None

    def call(self, function: Any, argument: str) -> Any:
        if self._pool is None:
            self._pool = multiprocessing.get_context("spawn").Pool(1)
        try:
            return self._pool.apply_async(function, (argument,)).get(TIMEOUT)
        except Exception:
            self._pool.terminate()
            self._pool = None
            raise


def save(path: Path, device: str, found: dict[str, np.ndarray]) -> None:
    """Save all results as one compressed array, which is smaller than one array per kernel."""
    sizes = [result.size for result in found.values()]
    words = np.concatenate([result.ravel() for result in found.values()])
    np.savez_compressed(path, device=device, names=np.array(list(found)), ends=np.cumsum(sizes), words=words)


def load(path: Path = VECTORS) -> dict[str, np.ndarray]:
    """Return the recorded results, uint32 [words, threads], by case."""
    with np.load(path) as file:
        parts = np.split(file["words"], file["ends"][:-1])
        return {str(name): part.reshape(-1, 128) for name, part in zip(file["names"], parts, strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=VECTORS)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    arguments = parser.parse_args()
    worker = _Worker()
    device = worker.call(device_name, "")
    found: dict[str, np.ndarray] = {}
    failed, different = [], []
    for name, case in CASES.items():
        if arguments.only not in name:
            continue
        try:
            found[name] = worker.call(measure, name)
        except Exception as error:
            failed.append(name)
            print(f"FAILED     {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        try:
            agrees = same(case, simulate(case), found[name])
        except Exception as error:
            different.append(name)
            print(f"NOT SIMULATED  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        if not agrees.all():
            different.append(name)
            row, thread = (int(index[0]) for index in np.nonzero(~agrees))
            pair = f"{found[name][row, thread]:#x} on the GPU, {simulate(case)[row, thread]:#x} simulated"
            given = ", ".join(f"{word:#x}" for word in case.buffers()["x"][:, thread])
            print(f"DIFFERENT  {name}: {(~agrees).sum()} of {agrees.size} words; thread {thread} of [{given}]: {pair}")
    save(arguments.out, device, found)
    print(f"{device}: {len(found)} recorded, {len(failed)} failed, {len(different)} differ from the simulator")
    return 1 if failed or different else 0


if __name__ == "__main__":
    sys.exit(main())
