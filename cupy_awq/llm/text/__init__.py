# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and chat templates, which convert between texts and token ids."""
