# SPDX-License-Identifier: Apache-2.0
"""Load on a running OpenAI-compatible server: a fixed number of clients, each with one request after the other.

python -m cupy_awq serve Qwen3-8B-AWQ/ --port 8000 &
python -m tests.peers.serve_load --port 8000 --clients 1 4 16 64 --prompt-tokens 128 --tokens 1024
python -m tests.peers.serve_load --port 8000 --clients 1 --flood 4 --flood-tokens 8192
python -m tests.peers.serve_load --port 8000 --clients 48 --tokens 256 --leave 0.3 --minutes 10

Prompts are random tokens that begin with the number of the request, so no server finds them in a prefix cache. The
columns: output tokens per second of all clients; the time to the first token, median and 95th percentile; and the time
between two events of a stream, median and 99th percentile, where a server may put several tokens into one event. With
``--flood``, further clients send long prompts, one after the other, for one token each; they are not in the table. With
``--minutes``, the load goes on for so long, and the blocks of the cache and the memory of the server before and after
it follow the table, which is that of the last round. With ``--leave``, this share of the clients leaves early.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from cupy_awq.tools.table import render

COLUMNS = {"clients": 0, "tokens/s": 0, "first ms": 2, "first p95": 2, "between ms": 2, "between p99": 2}
"""The columns of the table, with the number of decimal places."""

BLOCKS, RESIDENT = ("cupy_awq_free_blocks", "cupy_awq_blocks"), "process_resident_memory_bytes"
"""The names of metrics of the server."""

USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
"""The number of tokens in the last event of a stream. Others are not parsed: 256 streams keep a core busy."""


@dataclass
class Result:
    """The times to the first token and between tokens of all requests of a run, in seconds; the number of tokens."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0


@functools.lru_cache
def random_tokens(count: int, vocab: int) -> str:
    """Return random token ids as a part of a JSON list; once, because it takes time that other clients would notice."""
    return ", ".join(map(str, random.Random(count).choices(range(vocab), k=count)))


class Client:
    """A client, which keeps its connection from one request to the next."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, body: str) -> asyncio.StreamReader:
        """Send a request and read the headers of its reply."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.args.port)
        (reader, writer), data = self._streams, body.encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.args.key}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        status = await reader.readline()
        while (await reader.readline()).strip():
            pass
        if b" 200 " not in status:
            raise ValueError(f"server: expected the status 200, got {status!r} {await reader.read(2000)!r}")
        return reader

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


async def run_one(client: Client, seed: int, result: Result, prompt: int, tokens: int) -> None:
    """Run one request of ``prompt`` and ``tokens`` tokens and record its times."""
    args = client.args
    body: dict[str, Any] = {"model": args.model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    first = f"{seed // args.vocab % args.vocab}, {seed % args.vocab}"
    text = f'{json.dumps(body)[:-1]}, "prompt": [{first}, {random_tokens(prompt - 2, args.vocab)}]}}'
    last = began = time.perf_counter()
    reader = await client.send(text)
    generator, is_first = random.Random(seed), True
    left = generator.randint(1, tokens) if generator.random() < args.leave else sys.maxsize
    rest = b""
    while data := await reader.read(1 << 16):
        now = time.perf_counter()
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if b'"error":' in event:
                raise ValueError(f"server: expected tokens, got {event!r}")
            if b'"choices":[{' in event:
                (result.first if is_first else result.between).append(now - (began if is_first else last))
                is_first, last, left = False, now, left - 1
            elif usage := USAGE.search(event):
                result.tokens += int(usage[1])
        if left <= 0:
            break
        if rest.endswith(b"0\r\n\r\n"):
            return
    client.close()


async def run(args: argparse.Namespace, clients: int) -> dict[str, float]:
    """Run some clients, each with ``args.requests`` requests, and return a row of the table by `COLUMNS`."""
    result = Result()
    args.seed += 1_000_000  # no request is sent twice

    async def ask(number: int) -> None:
        client = Client(args)
        for i in range(args.requests):
            await run_one(client, args.seed + 1000 * number + i, result, args.prompt_tokens, args.tokens)
        client.close()

    async def flood(number: int) -> None:
        client = Client(args)
        for i in itertools.count(1):
            await run_one(client, -(args.seed + 1000 * number + i), Result(), args.flood_tokens, 1)

    floods = [asyncio.ensure_future(flood(number)) for number in range(args.flood)]
    began = time.perf_counter()
    await asyncio.gather(*map(ask, range(clients)))
    rate = result.tokens / (time.perf_counter() - began)
    for task in floods:
        task.cancel()
    times = [percentile(result.first, 50), percentile(result.first, 95)]
    times += [percentile(result.between, 50), percentile(result.between, 99)]
    return dict(zip(COLUMNS, [clients, rate, *(1e3 * seconds for seconds in times)], strict=True))


def fetch(args: argparse.Namespace, path: str) -> bytes:
    """Return the server's reply to a GET request."""
    headers = {"Authorization": f"Bearer {args.key}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{args.port}{path}", headers=headers)
    ) as reply:
        content: bytes = reply.read()
        return content


def show_memory(args: argparse.Namespace) -> str:
    """Wait until the server is idle; return the free blocks of its cache and the memory of host and GPU."""
    values = {"cupy_awq_running": 1.0, "cupy_awq_waiting": 0.0}
    while values["cupy_awq_running"] + values["cupy_awq_waiting"]:
        time.sleep(0.2)
        lines = (line.rpartition(" ") for line in fetch(args, "/metrics").decode().splitlines() if line[0] != "#")
        values = {name: float(value) for name, _, value in lines}
    text = f"{values[BLOCKS[0]]:.0f} of {values[BLOCKS[1]]:.0f} blocks free, {values[RESIDENT] / 1e6:.0f} MB resident"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
        text += f", {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()} on the GPU"
    return text


def percentile(values: list[float], part: int) -> float:
    """Return a percentile, 0 without values."""
    return sorted(values)[min(len(values) - 1, len(values) * part // 100)] if values else 0.0


def main() -> None:
    """Parse the arguments, warm up and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", help="by default the first of /v1/models")
    parser.add_argument("--key", default="none", help="the API key")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--requests", type=int, default=2, help="requests per client")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="3 or more")
    parser.add_argument("--tokens", type=int, default=1024, help="output tokens per request")
    parser.add_argument("--flood", type=int, default=0, help="further clients, with long prompts")
    parser.add_argument("--flood-tokens", type=int, default=8192, help="tokens of each of their prompts")
    parser.add_argument("--minutes", type=float, default=0, help="repeat the load for so long")
    parser.add_argument("--leave", type=float, default=0, help="the share of clients that leave early")
    parser.add_argument("--vocab", type=int, default=10_000, help="prompts have tokens below this")
    parser.add_argument("--seed", type=int, help="the number of the first request; by default the time")
    args = parser.parse_args()
    args.seed = time.time_ns() // 1_000_000 if args.seed is None else args.seed
    if args.model is None:
        args.model = json.loads(fetch(args, "/v1/models"))["data"][0]["id"]
    asyncio.run(run_one(Client(args), args.seed - 1, Result(), args.prompt_tokens, 2))
    before, end = show_memory(args) if args.minutes else "", time.monotonic() + 60 * args.minutes
    rows = [asyncio.run(run(args, clients)) for clients in args.clients]
    while time.monotonic() < end:
        rows = [asyncio.run(run(args, clients)) for clients in args.clients]
    texts = [[f"{row[name]:.{digits}f}" for name, digits in COLUMNS.items()] for row in rows]
    print(render(tuple(COLUMNS), texts))
    if args.minutes:
        print(f"before: {before}\nafter:  {show_memory(args)}")


if __name__ == "__main__":
    main()
