# SPDX-License-Identifier: Apache-2.0
"""The decoder of a language model: its forward pass, its back ends for CPU and GPU, and its memory of past tokens."""
