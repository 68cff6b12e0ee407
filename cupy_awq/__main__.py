# SPDX-License-Identifier: Apache-2.0
"""``python -m cupy_awq``: the command line of `cupy_awq.tools.command_line`."""

import signal
import sys

if __name__ == "__main__":
    # Until `main` handles KeyboardInterrupt, Ctrl-C ends the process immediately and without a traceback.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from cupy_awq.tools.command_line import main

    signal.signal(signal.SIGINT, handler)
    sys.exit(main())
