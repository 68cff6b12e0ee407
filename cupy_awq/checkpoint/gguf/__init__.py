# SPDX-License-Identifier: Apache-2.0
"""GGUF files: the container, the tensors by Hugging Face name, the conversion of each GGML type, and the writer."""

from cupy_awq.checkpoint.gguf import container, tensors

__all__ = ["container", "tensors"]
