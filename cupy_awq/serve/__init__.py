# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible HTTP server for one model.

This subpackage needs the extra ``serve`` (packages uvicorn, starlette, msgspec, prometheus-client and llguidance).
"""
