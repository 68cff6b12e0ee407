# SPDX-License-Identifier: Apache-2.0
"""Time an engine with drafts on a GPU: a published model's shape with random weights, and drafts of known quality.

python -m tests.peers.speculate qwen3-8b

The texts are sampled, so they have few repetitions. The rows: without drafts; with those of the command ``serve``,
which find little; and with drafts of which each is right with a given probability, as if a text quoted its prompt.
The columns: tokens per second, their ratio to those without drafts, and tokens per step.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence

from cupy_awq.llm import Engine, Request, Sampling
from cupy_awq.llm.engine.draft import NgramDraft
from cupy_awq.llm.engine.runner import DeviceRunner
from cupy_awq.tools.bench_llm import SHAPES
from cupy_awq.tools.table import render
from tests.peers.serve_synthetic import load

Draft = Callable[[Sequence[int], int], Sequence[int]]
PROMPT_TOKENS = 128
"""The number of tokens per prompt."""


def no_draft(tokens: Sequence[int], room: int) -> list[int]:
    """Return no tokens."""
    return []


def make_oracle(texts: Sequence[Sequence[int]], acceptance: float) -> Draft:
    """Return a function that continues one of some texts; each of its tokens is right with a probability."""
    rng = random.Random(0)

    def draft(tokens: Sequence[int], room: int) -> list[int]:
        text = next((text for text in texts if list(text[: len(tokens)]) == list(tokens)), ())
        return [token if rng.random() < acceptance else 0 for token in text[len(tokens) : len(tokens) + room]]

    return draft


def main() -> None:
    """Parse the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="numbers of texts at a time")
    parser.add_argument("--tokens", type=int, default=192, help="tokens per text")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    args = parser.parse_args()
    made: list[Callable[[], Draft]] = [lambda: no_draft]
    most = max(args.rows)
    model = load(args.model)
    engine = Engine(
        model, max_rows=most, cache_tokens=most * 2048, make_runner=DeviceRunner, make_draft=lambda: made[0]()
    )
    rng = random.Random(0)

    def run(requests: Sequence[Request]) -> tuple[float, float, list[list[int]]]:
        before, began = engine.stats(), time.perf_counter()
        texts = [generation.result()[0].tokens for generation in list(map(engine.submit, requests))]
        seconds, stats = time.perf_counter() - began, engine.stats()
        count = stats.completion_tokens - before.completion_tokens
        return count / seconds, count / (stats.steps - before.steps), texts

    table = []
    for rows in args.rows:
        options = {"max_tokens": args.tokens, "ignore_stop_tokens": True}
        requests = [
            Request(
                tuple(rng.randrange(10_000) for _ in range(PROMPT_TOKENS)),
                sampling=Sampling(temperature=1.0, seed=i),
                **options,
            )
            for i in range(rows)
        ]
        run(requests)  # the prefixes are then in the cache
        made[0] = lambda: no_draft
        plain, steps, texts = run(requests)
        table.append([str(rows), "none", f"{plain:.0f}", "", f"{steps:.2f}"])
        whole = [[*request.prompt, *text] for request, text in zip(requests, texts, strict=True)]
        drafts: dict[str, Callable[[], Draft]] = {"n-grams": NgramDraft}
        drafts |= {f"right by {a:g}": lambda a=a: make_oracle(whole, a) for a in args.acceptance}  # type: ignore[misc]
        for name, make in drafts.items():
            made[0] = make
            rate, steps, _ = run(requests)
            table.append([str(rows), name, f"{rate:.0f}", f"{rate / plain:.2f}", f"{steps:.2f}"])
    engine.close()
    print(render(("rows", "drafts", "tokens/s", "ratio", "tokens/step"), table, left=2))


if __name__ == "__main__":
    main()
