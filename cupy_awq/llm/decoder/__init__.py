# SPDX-License-Identifier: Apache-2.0
"""The decoder: its forward pass, its back ends and its state."""
