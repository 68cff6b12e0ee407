# SPDX-License-Identifier: Apache-2.0
"""The interface of checkpoint formats: a `Format` validates the tensors of a module and returns a `Pending` module.

Validation reads headers, scales, zero points and permutations. When a module is accessed, its codes are repacked; the
scales of GGUF modules are also validated then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cupy_awq.checkpoint.module import Pending
from cupy_awq.checkpoint.module_tensors import ModuleTensors
from cupy_awq.checkpoint.tensors import Array


class Format(Protocol):
    """A reader of one checkpoint format, configured with the settings of one checkpoint.

    The tensors of a module are named ``<module>.<suffix>``.

    Attributes:
        name: the name of the format for messages, such as "gptq v1".
        codes_suffix: the suffix of the tensor of codes, such as "qweight".
        other_suffixes: the suffixes of all other tensors that a module may have.
        dependent_suffixes: the suffixes of tensors that are allowed only in a module with codes.
    """

    @property
    def name(self) -> str: ...
    @property
    def codes_suffix(self) -> str: ...
    @property
    def other_suffixes(self) -> Sequence[str]: ...
    @property
    def dependent_suffixes(self) -> Sequence[str]: ...

    def is_quantized(self, array: Array) -> bool:
        """Return whether ``array`` holds codes. It has the suffix `codes_suffix`, as dense weights also have in MLX."""
        ...

    def open_module(self, tensors: ModuleTensors) -> Pending:
        """Validate the tensors of a module and return the module, whose codes are not repacked yet.

        Raises CheckpointError if the tensors contradict each other or the settings.
        """
        ...
