# SPDX-License-Identifier: Apache-2.0
"""The programs ``python -m cupy_awq`` and ``cupy-awq``: the command line of `cupy_awq.tools.command_line`."""

import os
import signal
import sys


def run() -> int:
    """Run the command line and return its exit code."""
    # Until `main` handles KeyboardInterrupt, Ctrl-C ends the process immediately and without a traceback.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from cupy_awq.tools import blas_threads

    blas_threads.limit(sys.argv[1:], os.environ)

    from cupy_awq.tools.command_line import main

    signal.signal(signal.SIGINT, handler)
    return main()


if __name__ == "__main__":
    sys.exit(run())
