# SPDX-License-Identifier: Apache-2.0
"""``python -m cupy_awq``: the command line of `cupy_awq.tools.command_line`."""

import sys

from cupy_awq.tools.command_line import main

if __name__ == "__main__":
    sys.exit(main())
