# SPDX-License-Identifier: Apache-2.0
"""The engine: many requests at once on one model, which join and leave a running batch between two steps."""
