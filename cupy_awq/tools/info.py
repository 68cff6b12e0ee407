# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m cupy_awq info PATH``: list the contents of a checkpoint, reading only headers and scales."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cupy_awq import checkpoint
from cupy_awq.checkpoint import ModuleSpec
from cupy_awq.checkpoint import catalog as formats
from cupy_awq.checkpoint.files import printable
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.llm.files.readers import read_contents
from cupy_awq.runtime import device
from cupy_awq.tools import table

ROWS = (1, 512)
"""The numbers of rows of x for which kernels are listed: a decoding step, and a prompt."""


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the format, layers, other tensors and totals of a checkpoint as a JSON object.

    ``fp16_bytes`` is the size of the same layer in float16, and ``ratio`` the size of the quantized layer divided by
    ``fp16_bytes``. Raises the same errors as `read_contents`.
    """
    layers: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    contents = read_contents(path)
    specs = contents.specs
    for name in contents:
        if contents.is_module(name):
            spec = specs[name]
            extra = 0 if spec.bias_dtype is None else spec.n * spec.bias_dtype.itemsize
            layers.append(
                {
                    "name": name,
                    "k": spec.k,
                    "n": spec.n,
                    "group_size": spec.group_size,
                    "zeros": spec.zeros,
                    "dtype": str(spec.dtype),
                    "bias": spec.bias_dtype is not None,
                    **_sizes(spec.nbytes, 2 * spec.k * spec.n + extra),
                }
            )
        else:
            shape, dtype = contents.dense_form(name)
            size = math.prod(shape) * dtype.itemsize
            others.append({"name": name, "shape": list(shape), "dtype": str(dtype), "bytes": size})
    other_bytes = sum(item["bytes"] for item in others)
    total = {
        "layers": _sizes(sum(item["bytes"] for item in layers), sum(item["fp16_bytes"] for item in layers)),
        "other_bytes": other_bytes,
    }
    return {
        "path": os.fspath(path),
        "format": asdict(checkpoint.summarize(contents)),
        "layers": layers,
        "others": others,
        "total": total,
        "kernels": list_kernels([spec for name, spec in specs.items() if contents.is_module(name)]),
    }


def list_kernels(specs: Sequence[ModuleSpec]) -> dict[str, Any]:
    """Return the kernels of `AwqLinear` for x of `ROWS` rows in the dtype of the scales, by shape and form of weights.

    The GPU is the current one, or a typical H100 if there is none. A form is a group size, kind of zero points and
    dtype; ``layers`` is the number of modules with the same shape and form.
    """
    gpu = device.find()
    shapes = []
    forms = Counter((spec.k, spec.n, spec.group_size, spec.zeros, str(spec.dtype)) for spec in specs)
    for (k, n, group_size, zeros, dtype), layers in forms.items():
        layouts = select.weight_layouts(k, n, group_size, dtype, zeros, gpu)
        names = {}
        for m in ROWS:
            problem = Problem(m, n, k, group_size, dtype, scales_dtype=dtype, zeros=zeros, layouts=layouts)
            names[str(m)] = select.choose(problem, gpu).name
        form = {"k": k, "n": n, "group_size": group_size, "zeros": zeros, "dtype": dtype, "layers": layers}
        shapes.append({**form, "kernels": names})
    return {"gpu": gpu.name, "shapes": shapes}


def render_formats() -> str:
    """Return the table of supported formats as text."""
    header = ["format", "recognized by", "activation order", "weights", "convert --format"]
    rows = [
        [row.name, row.recognized, "yes" if row.order else "-", row.rounding or "exact", row.writer or "-"]
        for row in formats.FORMATS
    ]
    return table.render(header, rows, left=len(header))


def _sizes(nbytes: int, fp16_bytes: int) -> dict[str, Any]:
    return {"bytes": nbytes, "fp16_bytes": fp16_bytes, "ratio": nbytes / fp16_bytes if fp16_bytes else None}


def render(content: dict[str, Any]) -> str:
    """Return the result of `describe` as text. Names from files may contain terminal escapes and are escaped."""
    lines = [*_format_lines(content["format"]), ""] if content["format"]["format"] else []
    if not lines and content["others"]:
        lines = [f"{content['format']['found']} `info --formats` lists what is supported.", ""]
    layers, others, total = content["layers"], content["others"], content["total"]
    if layers:
        header = ["layer", "zeros", "scales", "bias", "K", "N", "group size", "bytes", "ratio to fp16"]
        rows = [
            [printable(i["name"]), i["zeros"], i["dtype"], "yes" if i["bias"] else "no", *_numbers(i)] for i in layers
        ]
        lines += [table.render(header, rows, left=4), ""]
    sums = total["layers"]
    fp16 = f", {sums['ratio']:.3f} of the {table.size(sums['fp16_bytes'])} in fp16" if layers else ""
    lines.append(f"{_count(len(layers), 'quantized layer')}: {table.size(sums['bytes'])}{fp16}")
    if others:
        lines.append(f"{_count(len(others), 'other tensor')}: {table.size(total['other_bytes'])}")
        lines.append(f"total: {table.size(sums['bytes'] + total['other_bytes'])}")
    if layers:
        lines += ["", *_kernel_lines(content["kernels"])]
    return "\n".join(lines)


def _format_lines(summary: dict[str, Any]) -> list[str]:
    """Return lines for the format, the most common parameters, the modules with other parameters, and roundings."""
    zeros = {True: "symmetric", False: "asymmetric", None: "symmetric and asymmetric modules"}[summary["symmetric"]]
    order = ", activation order" if summary["act_order"] else ""
    has_groups = summary["group_size"] is not None
    form = f", group size {summary['group_size']}, {zeros}{order}" if has_groups else ", all read as dense tensors"
    lines = [summary["found"], f"{summary['bits']} bits{form}" if summary["bits"] else "no quantized tensors"]
    lines += [f"exception: {name}: {text}" for name, text in summary["exceptions"].items()]
    return [*map(printable, lines), *list_roundings(summary["roundings"])]


def list_roundings(roundings: Mapping[str, int]) -> list[str]:
    """Return a line for each description of a rounding in `Summary.roundings`."""
    return [printable(f"rounded: {text} ({_count(count, 'module')})") for text, count in roundings.items()]


def _kernel_lines(kernels: dict[str, Any]) -> list[str]:
    """Return a table of the kernels that run for each shape and form of the weights."""
    header = ["KxN", "zeros", "scales", *(f"{m} row{'s' * (m > 1)}" for m in ROWS), "group size", "layers"]
    rows = [
        [f"{i['k']}x{i['n']}", i["zeros"], i["dtype"], *i["kernels"].values(), str(i["group_size"]), str(i["layers"])]
        for i in kernels["shapes"]
    ]
    return [f"kernels on {kernels['gpu']}:", table.render(header, rows, left=5)]


def _numbers(item: dict[str, Any]) -> list[str]:
    return [str(item["k"]), str(item["n"]), str(item["group_size"]), table.size(item["bytes"]), f"{item['ratio']:.3f}"]


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")
