# SPDX-License-Identifier: Apache-2.0
"""Write ``tests/golden_logits.npz``: logits that transformers computes for tiny mixtures of experts, on the CPU.

transformers 5 and torch are needed beside cupy_awq[llm,test]:

    python -m tests.peers.write_golden_logits
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests import llm_models
from tests.golden_models import FILE, IDS, write_folder


def compute_logits(folder: Path) -> np.ndarray:
    """Return the logits [tokens, vocab] of a model. Raises ValueError unless transformers takes exactly its tensors."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"{folder}: expected tensors as transformers names them, got {report}")
    logits: np.ndarray = model(torch.tensor([IDS])).logits[0].numpy().astype(np.float32)
    return logits


def main() -> None:
    """Compute and write the logits of every family with experts."""
    torch.set_grad_enabled(False)
    found = {}
    for name, config in llm_models.EXPERT_FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = compute_logits(write_folder(Path(folder), config))
        print(f"{name}: largest {np.abs(found[name]).max():.3f}, standard deviation {found[name].std():.3f}")
    np.savez_compressed(FILE, **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
