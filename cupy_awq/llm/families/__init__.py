# SPDX-License-Identifier: Apache-2.0
"""The families of decoders: how a model type is described, and how its tensors are named in files."""
