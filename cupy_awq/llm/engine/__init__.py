# SPDX-License-Identifier: Apache-2.0
"""The engine: many requests at once on one model, with a paged cache and continuous batching."""
