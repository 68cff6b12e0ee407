# SPDX-License-Identifier: Apache-2.0
"""`ApiError`: an error that a client receives as JSON in the form that OpenAI's servers use."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error that the client receives.

    Args:
        status: the HTTP status.
        message: a sentence for the user.
        param: the field of the request that is wrong, or None.
        code: a word for programs, or None.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def to_json(self) -> dict[str, Any]:
        """Return the error as the JSON object of the reply's body."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @classmethod
    def from_value_error(cls, error: Exception) -> ApiError:
        """Return the error 400 for an error of the form "name: expected X, got Y"."""
        name = str(error).partition(":")[0]
        return cls(400, str(error), param=name if name.isidentifier() else None, code="invalid_value")
