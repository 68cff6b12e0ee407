# SPDX-License-Identifier: Apache-2.0
"""Talk to a running server with the package openai (pip install openai), and raise an error where an answer is wrong.

python -m cupy_awq serve smollm2 --device cpu --port 8000 &
python -m tests.tools.check_openai_client http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Italy"]}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


def main(url: str) -> None:
    """Send the server requests of every kind; raise AssertionError at the first unexpected answer."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    ask = client.chat.completions.create
    base: Any = {"model": client.models.list().data[0].id, "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    whole = ask(**base, logprobs=True, top_logprobs=3)
    text = whole.choices[0].message.content
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    chunks = list(ask(**base, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert json.loads(ask(**base, response_format=form).choices[0].message.content).keys() == {"city", "country"}
    pair = client.completions.create(model=base["model"], prompt=["1 2 3", "a b c"], max_tokens=5, logprobs=2, n=2)
    assert [len(choice.logprobs.tokens) for choice in pair.choices] == [5] * 4
    for wrong, kind in (({"model": "no"}, openai.NotFoundError), ({"max_tokens": 0}, openai.BadRequestError)):
        try:
            ask(**{**base, **wrong})
        except kind:
            continue
        raise AssertionError(f"expected {kind}")
    with ask(**{**base, "max_tokens": 500}, stream=True) as stream:
        next(iter(stream))  # leave the stream after one event; the server must cancel the request and go on

    async def ask_many() -> list[Any]:
        many = openai.AsyncOpenAI(base_url=url, api_key="none")
        return await asyncio.gather(*(many.chat.completions.create(**base) for _ in range(8)))

    assert [answer.choices[0].message.content for answer in asyncio.run(ask_many())] == [text] * 8
    print(f"the client has what it expects; the answer is {text!r}")


if __name__ == "__main__":
    main(sys.argv[1])
