# SPDX-License-Identifier: Apache-2.0
"""A worker process with limits of memory and CPU time, which runs what files bring as programs.

`worker` starts the process and calls it; `program` is what it runs: chat templates, tokenizers and regular expressions.
"""
