# SPDX-License-Identifier: Apache-2.0
"""The command line and its commands: benchmarks, autotuning, ahead-of-time compilation, the demo."""
