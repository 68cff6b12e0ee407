# SPDX-License-Identifier: Apache-2.0
"""Readers and writers of a language model's files: Hugging Face folders, GGUF and ak48."""
