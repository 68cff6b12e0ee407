# SPDX-License-Identifier: Apache-2.0
"""The application: endpoints, keys, limits and metrics, on an engine that runs in its own thread."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cupy_awq.llm import Delta, Engine, Generation, QueueFullError
from cupy_awq.llm import Request as EngineRequest
from cupy_awq.serve import openapi, protocol, replies
from cupy_awq.serve.constraint import Grammars
from cupy_awq.serve.errors import ApiError
from cupy_awq.serve.event_stream import EventStream
from cupy_awq.serve.http import read_body, until_disconnect
from cupy_awq.serve.limits import Limits
from cupy_awq.serve.replies import Reply
from cupy_awq.serve.tools import ToolUse

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""The names of this machine. A server without keys answers to them alone, so no web page reaches it by a name of its
own that it lets point here."""


DEADLINE = "x-request-timeout"
"""The header with the number of seconds that a request may take in the queue, and from then on."""

LARGE_BYTES = 1 << 16
"""The size in bytes from which on a body is parsed in another thread, which takes 0.1 ms more."""

PAGE = Path(__file__).parent.parent / "data" / "chat.html"
"""The page to chat in a browser."""

PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page may talk to its own server alone, and no other page may show it."""


@dataclass(frozen=True)
class Settings:
    """The settings of a server.

    Attributes:
        name: the name of the model.
        keys: the API keys, of which each request needs one; without any, everybody is served.
        hosts: the names in Host headers that a server without keys answers to; "*" is any name.
        limits: the limits of requests.
        sampling: the sampling parameters of requests that have none, such as "temperature", which is else 1.
    """

    name: str
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = LOCAL_HOSTS
    limits: Limits = field(default_factory=Limits)
    sampling: Mapping[str, Any] = field(default_factory=dict)


class Server:
    """The HTTP endpoints of OpenAI's protocol, /health and /metrics, which submit requests to an engine.

    Args:
        engine: the engine, which the server does not close.
        settings: the settings.

    Attributes:
        app: the ASGI application.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._model = engine.model
        self._grammars = Grammars(engine.model, settings.limits.grammar_characters)
        self._threads = ThreadPoolExecutor(2, "cupy_awq tokenizer")
        self._compilers = ThreadPoolExecutor(1, "cupy_awq grammars")  # slow grammars delay no other requests
        self._created = int(time.time())
        self._registry = prometheus.CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        prometheus.ProcessCollector(registry=self._registry)
        metric = functools.partial(prometheus.Histogram, registry=self._registry)
        self._first_token = metric("cupy_awq_time_to_first_token_seconds", "Time to the first token of a request")
        self._duration = metric("cupy_awq_request_seconds", "Time to the last token of a request")
        self._requests = prometheus.Counter(
            "cupy_awq_http_requests", "Replies by status", ["status"], registry=self._registry
        )
        routes = [
            Route("/", self._guard(self._page), methods=["GET"]),
            Route("/v1/chat/completions", self._guard(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guard(self._complete), methods=["POST"]),
            Route("/v1/models", self._guard(self._list_models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guard(self._show_model), methods=["GET"]),
            Route("/openapi.json", self._guard(self._describe_api), methods=["GET"]),
            Route("/metrics", self._guard(self._metrics), methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
        ]
        handlers: dict[Any, Any] = {404: self._not_found, 405: self._not_found, Exception: self._fail}
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    def _guard(self, endpoint: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """Wrap an endpoint: check host and key, turn errors into replies and count them."""

        async def guarded(request: Request) -> Any:
            status = 200
            try:
                self._check_access(request)
                return await endpoint(request)
            except ApiError as error:
                status = error.status
                return _error(error)
            except QueueFullError as error:
                status = 503 if self._engine.error else 429
                return _error(ApiError(status, str(error), code="overloaded"))
            except (ValueError, TypeError) as error:
                status = 400
                return _error(ApiError.from_value_error(error))
            except ClientDisconnect:
                status = 499
                return _json({}, status)  # nobody reads this reply: the client has left
            except MemoryError:
                status = 503
                return _error(ApiError(503, "memory: expected enough for the request, got none"))
            finally:
                self._requests.labels(str(status)).inc()

        return guarded

    def _check_access(self, request: Request) -> None:
        """Raise ApiError unless the request has a valid key or, without keys, a known host."""
        keys, hosts = self._settings.keys, self._settings.hosts
        # Not request.url.path, which Starlette 0.46 to 1.0, at least, take from a header such as "Host: x/?".
        if keys and request.scope["path"] != "/":
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            # Compare with all keys, so that the time tells nothing about them.
            is_known = sum(hmac.compare_digest(given.encode(), key.encode()) for key in keys)
            if scheme.lower() != "bearer" or not is_known:
                raise ApiError(
                    401, "authorization: expected Bearer and a valid key, got another", code="invalid_api_key"
                )
        elif not keys and "*" not in hosts:
            host = request.headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in hosts:
                raise ApiError(403, f"host: expected one of {', '.join(hosts)}, got {name!r:.80}")

    async def _page(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(PAGE.read_bytes(), headers=headers, media_type="text/html; charset=utf-8")

    async def _health(self, request: Request) -> Response:
        is_healthy = self._engine.is_healthy()
        return _json({"status": "ok" if is_healthy else "failed"}, 200 if is_healthy else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(prometheus.generate_latest(self._registry), media_type=prometheus.CONTENT_TYPE_LATEST)

    async def _describe_api(self, request: Request) -> Response:
        return _json(openapi.describe(self._settings.name))

    async def _list_models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._describe()]})

    async def _show_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _json(self._describe())

    async def _not_found(self, request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        headers = getattr(error, "headers", None) or {}  # "Allow" for the status 405
        message = f"path: expected a known one, got {request.scope['path']!r:.80}"
        if "Allow" in headers:
            message = f"method: expected {headers['Allow']}, got {request.method!r:.80}"
        reply = _error(ApiError(status, message))
        reply.headers.update(headers)
        return reply

    async def _fail(self, request: Request, error: Exception) -> Response:
        return _error(ApiError(500, "server: expected no error in itself, got one; its log has more"))

    def _describe(self) -> dict[str, Any]:
        context = {"max_model_len": self._engine.max_tokens}
        name = self._settings.name
        return {"id": name, "object": "model", "created": self._created, "owned_by": "cupy_awq", **context}

    def _check_model(self, name: str) -> None:
        if name != self._settings.name:
            message = f"model: expected {self._settings.name}, got {name!r:.80}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _read(self, request: Request, kind: type[protocol.B]) -> protocol.B:
        """Return the body of a request, which another thread parses if it is large."""
        limits = self._settings.limits
        data = await read_body(request, limits)
        if len(data) < LARGE_BYTES:
            return protocol.decode(data, kind, limits)
        return await asyncio.get_running_loop().run_in_executor(self._threads, protocol.decode, data, kind, limits)

    async def _chat(self, request: Request) -> Any:
        body = await self._read(request, protocol.ChatBody)
        tools = ToolUse(body, self._model.tokenizer.template or "")
        arguments = body.template_arguments() | ({"tools": tools.offered} if tools.offered else {})
        encode = functools.partial(self._model.encode, template_args=arguments, limit=self._engine.max_tokens)
        return await self._answer(request, body, [functools.partial(encode, body.conversation())], [""], tools)

    async def _complete(self, request: Request) -> Any:
        body = await self._read(request, protocol.CompletionBody)
        encode = functools.partial(self._model.encode, raw=True, limit=self._engine.max_tokens)
        prompts = body.prompts()
        texts = [self._echo(prompt) if body.echo else "" for prompt in prompts]
        encoders = [functools.partial(encode, p) if isinstance(p, str) else p for p in prompts]
        return await self._answer(request, body, encoders, texts)

    def _echo(self, prompt: str | list[int]) -> str:
        """Return the text of a prompt, which is cut if the prompt is going to be refused."""
        if isinstance(prompt, str):
            return prompt
        vocab = self._model.config.vocab
        return self._model.tokenizer.decode([i for i in prompt[: self._engine.max_tokens] if 0 <= i < vocab])

    async def _answer(
        self,
        request: Request,
        body: protocol.Body,
        encoders: Sequence[Callable[[], list[int]] | list[int]],
        texts: Sequence[str],
        tools: ToolUse | None = None,
    ) -> Any:
        """Run a request: encode its texts and submit its prompts; then return the reply or a stream of it."""
        self._check_model(body.model)
        options = body.options(self._settings.sampling)
        n = options.get("n", 1)
        if isinstance(n, int) and n * len(encoders) > self._engine.max_rows:
            raise ApiError(400, f"n: expected at most {self._engine.max_rows} completions in all, got more", param="n")
        began = time.monotonic()
        run = asyncio.get_running_loop().run_in_executor
        constraint = (tools and tools.grammar()) or body.constraint()
        if constraint is not None:
            options["make_constraint"] = await run(self._compilers, self._grammars.compile, *constraint)
        is_chat = isinstance(body, protocol.ChatBody)
        options |= {"continues": not is_chat, "key": self._key(request), "salt": self._salt(request)}
        options |= self._deadlines(request)
        options.setdefault("max_tokens", self._engine.max_tokens)
        prompts = [await run(self._threads, encode) if callable(encode) else encode for encode in encoders]
        requests = [EngineRequest(tuple(prompt), **options) for prompt in prompts]
        for one in requests:
            self._engine.check(one)
        generations: list[Generation] = []
        parser = tools.parser if tools else lambda: None
        has_logprobs = options["logprobs"] is not None
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        tokenizer, name = self._model.tokenizer, self._settings.name
        reply = Reply(tokenizer, name, is_chat, has_logprobs, texts, prompts, n, parser, has_usage)
        try:
            generations += map(self._engine.submit, requests)
            async with until_disconnect(request.receive):
                found = await _read_first(generations)
                if not body.stream:
                    for i, generation in enumerate(generations):
                        found += [(i, replies.check(delta)) async for delta in generation]
        except BaseException:
            _cancel(generations)
            raise

        def end() -> None:
            first = [generation.first_token for generation in generations if generation.first_token is not None]
            if first:
                self._first_token.observe(min(first) - began)
            if all(generation.is_finished for generation in generations):
                self._duration.observe(time.monotonic() - began)
            _cancel(generations)

        if body.stream:
            return EventStream(reply, generations, found, end, self._settings.limits.send_seconds)
        end()
        return _json(reply.whole(found, generations))

    def _deadlines(self, request: Request) -> dict[str, float]:
        """Return the times in the queue and from then on: the limits, and those that the client sets by a header."""
        given, limits = request.headers.get(DEADLINE), self._settings.limits
        try:
            seconds = math.inf if given is None else float(given)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            raise ApiError(400, f"{DEADLINE}: expected a positive number of seconds, got {given!r:.40}")
        return {name: min(seconds, getattr(limits, name)) for name in ("queue_seconds", "run_seconds")}

    def _key(self, request: Request) -> str:
        """Return who asks: the key, or the client's address."""
        client = request.client.host if request.client else ""
        return request.headers.get("authorization", "").partition(" ")[2] if self._settings.keys else client

    def _salt(self, request: Request) -> str:
        """Return the owner of cached prefixes: one per key, so that no key can time what another has asked."""
        return hashlib.sha256(self._key(request).encode()).hexdigest() if self._settings.keys else ""


async def _read_first(generations: Sequence[Generation]) -> list[tuple[int, Delta]]:
    """Wait until a prompt leaves the queue; return the deltas so far with the indices of their prompts.

    So the headers of a stream are sent while the prompt runs, but a request that waits too long gets a status.
    """
    ready = asyncio.Event()
    for generation in generations:
        generation.listen(ready.set, asyncio.get_running_loop())
    await ready.wait()
    return [(i, replies.check(delta)) for i, one in enumerate(generations) for delta in one.take()[0]]


def _cancel(generations: Sequence[Generation]) -> None:
    for generation in generations:
        if not generation.is_finished:
            generation.cancel()


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def _error(error: ApiError) -> Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413, 415):
        headers["Connection"] = "close"  # the rest of the body is not read
    return _json(error.to_json(), error.status, headers)


class _EngineCollector:
    """A collector for the package prometheus_client that reports the counts of an engine, such as generated tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the present counts of the engine as metrics."""
        stats = self._engine.stats()
        for name in ("running", "waiting", "free_blocks", "blocks"):
            yield GaugeMetricFamily(f"cupy_awq_{name}", f"Number of {name}", value=getattr(stats, name))
        for name in ("preemptions", "prompt_tokens", "cached_tokens", "completion_tokens", "steps"):
            yield CounterMetricFamily(f"cupy_awq_{name}", f"Total of {name}", value=getattr(stats, name))
