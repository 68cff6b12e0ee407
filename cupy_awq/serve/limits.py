# SPDX-License-Identifier: Apache-2.0
"""`Limits`: what a server accepts, with defaults that `serve --limit` changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of a server.

    Attributes:
        body_bytes: the size of a request's body.
        nesting: the levels of nested values in the body.
        values: the lists, objects and strings in the body; the interpreter does nothing else while they are made.
        messages, tools: the numbers of them in a chat.
        prompts: the number of prompts of a completion.
        stops, stop_characters: the number of stop strings, and the length of each.
        n: the number of completions per prompt, at most 8.
        grammar_characters: the length of a JSON schema, a regular expression or a grammar.
        queued_per_row: the number of waiting requests, as a multiple of the rows; others get the status 429.
        queued_caches: the number of waiting tokens, as a multiple of those in the cache.
        queue_seconds, run_seconds: the times in the queue, and from then on.
        header_seconds, body_seconds: the times in which the headers of a request, and then its body, must arrive.
        send_seconds: the time after which a client that reads nothing is given up.
        connections: the number of connections that wait for headers; then the one that has waited longest is closed.
    """

    body_bytes: int = 8 << 20
    nesting: int = 64
    values: int = 1 << 17
    messages: int = 2048
    tools: int = 128
    prompts: int = 64
    stops: int = 16
    stop_characters: int = 256
    n: int = 8
    grammar_characters: int = 1 << 16
    queued_per_row: int = 4
    queued_caches: int = 2
    queue_seconds: float = 120.0
    run_seconds: float = 3600.0
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    send_seconds: float = 60.0
    connections: int = 1024
