# SPDX-License-Identifier: Apache-2.0
"""Readers and writers of the files of a language model."""
