# SPDX-License-Identifier: Apache-2.0
"""From text to tokens and back: tokenizers and chat templates."""
