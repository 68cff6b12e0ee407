# SPDX-License-Identifier: Apache-2.0
"""Text generation with quantized language models: Llama, SmolLM2, Qwen2, Qwen2.5 and Qwen3.

This subpackage needs the extra ``llm`` (packages tokenizers, jinja2 and gguf).
"""

from cupy_awq.llm.assemble import load
from cupy_awq.llm.calibrate.model_quantizer import quantize
from cupy_awq.llm.calibrate.quantization_report import Report
from cupy_awq.llm.completion import Completion, Score, Stats
from cupy_awq.llm.decoder.sampling import Sampling
from cupy_awq.llm.engine.engine import Engine
from cupy_awq.llm.engine.generation import Generation
from cupy_awq.llm.engine.request import Delta, QueueFullError, Request, TokenChoice
from cupy_awq.llm.families.description import Decoder
from cupy_awq.llm.files.model_files import ModelFiles
from cupy_awq.llm.files.readers import read
from cupy_awq.llm.language_model import Chat, ContextFullError, LanguageModel
from cupy_awq.llm.prompt_answerer import PromptAnswerer

__all__ = [
    "Chat",
    "Completion",
    "ContextFullError",
    "Decoder",
    "Delta",
    "Engine",
    "Generation",
    "LanguageModel",
    "ModelFiles",
    "PromptAnswerer",
    "QueueFullError",
    "Report",
    "Request",
    "Sampling",
    "Score",
    "Stats",
    "TokenChoice",
    "load",
    "quantize",
    "read",
]
