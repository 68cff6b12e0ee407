# SPDX-License-Identifier: Apache-2.0
"""GGUF files: header, tensors of each GGML type, and the writer."""
