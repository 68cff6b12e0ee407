# SPDX-License-Identifier: Apache-2.0
"""The command ``serve``: an OpenAI-compatible HTTP server for one model."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.files import MAX_SETTINGS_NAMES, read_object
from cupy_awq.checkpoint.model_path import locate
from cupy_awq.serve.limits import Limits
from cupy_awq.tools.llm_commands import MODEL

SAMPLING = ("temperature", "top_k", "top_p")
"""The sampling parameters of a model, which requests may change."""

MORE = """

Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, /openapi.json, and a page to chat at /.
Needs the extra "serve":
pip install "cupy-awq[serve]". A server for other machines (--host) needs a key, also from CUPY_AWQ_API_KEY."""

KEY_VARIABLE = "CUPY_AWQ_API_KEY"
"""The environment variable with the API key that clients must send."""

SWITCH_SECONDS = 1e-4
"""The time after which Python lets another thread run: with its default of 5 ms, replies would delay the next step."""

COLLECTIONS = 20_000, 10, 1000
"""The thresholds of garbage collections. With Python's, some take 10 ms or more while hundreds of requests run."""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command by ``command``: it makes a parser of (name, function to run, summary, help text, examples)."""
    examples = ["smollm2 --device cpu", "Qwen3-8B-AWQ/ --port 8001 --batch-invariant --speculate auto"]
    parser = command("serve", _serve, "serve a model over HTTP", MORE, examples)
    parser.add_argument("model", metavar="MODEL", help=MODEL)

    def option(name: str, kind: Callable[[str], Any], default: Any, text: str) -> None:
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(name, metavar="X", type=kind, default=default, help=text + shown)

    option("--host", str, "127.0.0.1", "the address to listen on")
    option("--port", _parse_port, 8000, "the port; 0 takes a free one")
    option("--name", str, None, "the name of the model in requests (default: the last part of MODEL)")
    option("--max-rows", int, 64, "the largest number of completions that run at the same time")
    option(
        "--cache-tokens",
        int,
        None,
        "the number of tokens in the KV cache (default: an eighth of the memory; on a GPU what fits)",
    )
    option(
        "--inter-token-ms", _parse_time, 50.0, "the bound for the time between two tokens while prompts of others run"
    )
    option("--drain-seconds", _parse_time, 30.0, "the time that running requests get after SIGTERM")
    parser.add_argument(
        "--api-key", metavar="KEY", action="append", default=[], help="a key that requests must have; repeatable"
    )
    parser.add_argument(
        "--allow-host", metavar="NAME", action="append", default=[], help="a further name in Host headers, * for any"
    )
    parser.add_argument(
        "--limit",
        metavar="NAME=X",
        action="append",
        default=[],
        help="a limit of requests or connections, with a name and above 0: "
        + ", ".join(f"{name}={value}" for name, value in vars(Limits()).items())
        + "; repeatable. The header X-Request-Timeout lowers queue_seconds and run_seconds",
    )
    parser.add_argument("--batch-invariant", action="store_true", help="texts do not depend on other requests; slower")
    parser.add_argument(
        "--speculate",
        nargs="?",
        const="auto",
        choices=["auto"],
        help="draft tokens that followed the same ones before, while few completions run and enough drafts are correct",
    )
    parser.add_argument("--device", metavar="cpu|cuda|cuda:N", help="the device (default: as for generate)")


def _parse_port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"expected an integer in 0..65535, got {text!r:.80}")
    return int(text)


def _parse_time(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (time := float(text)) < math.inf:
            return time
    raise argparse.ArgumentTypeError(f"expected a finite number of at least 0, got {text!r:.80}")


def tune_interpreter() -> None:
    """Prepare the interpreter for two threads of which one launches steps, after the model has been loaded."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # garbage collections then skip the model, which lives until the end
    gc.set_threshold(*COLLECTIONS)


def _serve(args: argparse.Namespace) -> int:
    try:
        from cupy_awq.serve.listener import Listener, listen
        from cupy_awq.serve.server import LOCAL_HOSTS, Settings
    except ImportError as error:
        raise ValueError(
            f'{error.name}: expected an installed package, got none: pip install "cupy-awq[serve]"'
        ) from None
    from cupy_awq import llm
    from cupy_awq.llm.engine.draft import NgramDraft

    if "" in args.api_key:  # such as that of a variable that is not set: everybody could pass it
        raise ValueError("--api-key: expected a key, got an empty text")
    keys = (*args.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)]))
    if args.host not in ("127.0.0.1", "localhost", "::1") and not keys:
        raise ValueError(f"--host: expected an --api-key for an address other than 127.0.0.1, got none for {args.host}")
    limits = Limits(**dict(map(_read_limit, args.limit)))
    sampling = read_sampling(locate(args.model))
    for listening in listen(args.host, args.port):  # an address that is taken is an error before the model is loaded
        listening.close()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("cupy_awq").setLevel(logging.INFO)
    model = llm.load(args.model, device=args.device, batch_invariant=args.batch_invariant)
    engine = llm.Engine(
        model,
        max_rows=args.max_rows,
        cache_tokens=args.cache_tokens,
        inter_token_seconds=args.inter_token_ms / 1e3,
        queued_per_row=limits.queued_per_row,
        queued_caches=limits.queued_caches,
        make_draft=NgramDraft if args.speculate else None,
    )
    name = args.name or os.path.basename(os.path.normpath(args.model))
    settings = Settings(name, keys, (*LOCAL_HOSTS, *args.allow_host), limits, sampling)

    address = {"host": args.host, "port": args.port, "drain_seconds": args.drain_seconds}
    listener = Listener(engine, settings, **address)
    tune_interpreter()
    listener.run()
    return 0 if engine.error is None else 1


def read_sampling(path: Path) -> dict[str, Any]:
    """Return the parameters `SAMPLING` of a folder's generation_config.json, as far as it has them.

    Raises CheckpointError if one of them is invalid.
    """
    from cupy_awq.llm import Sampling

    file = path / "generation_config.json"
    table = read_object(file, MAX_SETTINGS_NAMES) if file.is_file() else {}
    found = {name: value for name in SAMPLING if (value := table.get(name)) is not None}
    try:
        Sampling(**found)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from None
    return found


def _read_limit(text: str) -> tuple[str, Any]:
    """Return the name and the value of a limit in the form NAME=X."""
    kinds: dict[str, Any] = {name: type(value) for name, value in vars(Limits()).items()}
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):
        if name in kinds and (limit := kinds[name](value)) > 0:
            return name, limit
    raise ValueError(f"--limit: expected NAME=X with a name of {', '.join(kinds)}, and X above 0, got {text!r:.80}")
