# SPDX-License-Identifier: Apache-2.0
"""The description of the endpoints in OpenAPI's form, from the types of their bodies."""

from __future__ import annotations

from typing import Any

import msgspec

import cupy_awq
from cupy_awq.serve.protocol import ChatBody, CompletionBody

POSTS = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}
GETS = {
    "/v1/models": "application/json",
    "/health": "application/json",
    "/metrics": "text/plain",
    "/openapi.json": "application/json",
    "/": "text/html",
}
STATUSES = {400: "an invalid field", 401: "an invalid key", 403: "an unknown host", 404: "an unknown model",
            408: "a slow body", 413: "a large body", 415: "another type of body", 429: "a full queue",
            500: "an error", 503: "an overload"}  # fmt: skip


def describe(model: str) -> dict[str, Any]:
    """Return the OpenAPI description of a server whose model has the name ``model``."""
    bodies, components = msgspec.json.schema_components(POSTS.values(), ref_template="#/components/schemas/{name}")
    for kind in POSTS.values():
        components[kind.__name__]["properties"]["model"] = {"const": model}
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    errors = {
        str(status): {"description": text, "content": {"application/json": {"schema": error}}}
        for status, text in STATUSES.items()
    }

    def reply(*kinds: str) -> dict[str, Any]:
        return {"responses": {"200": {"description": "the reply", "content": {kind: {} for kind in kinds}}, **errors}}

    paths: dict[str, Any] = {path: {"get": reply(form)} for path, form in GETS.items()}
    for path, body in zip(POSTS, bodies, strict=True):
        content = {"required": True, "content": {"application/json": {"schema": body}}}
        paths[path] = {"post": {"requestBody": content, **reply("application/json", "text/event-stream")}}
    scheme = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "cupy_awq", "version": cupy_awq.__version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": scheme},
        "security": [{}, {"key": []}],
    }
