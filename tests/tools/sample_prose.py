# SPDX-License-Identifier: Apache-2.0
"""Draw docstrings and comments at random, to be read by somebody who has never seen the code.

    python -m tests.tools.sample_prose --seed 7 --count 20

Docstrings come from the package and from the tests and include those of constants; comments come also from
``cuda_src``. Adjacent comment lines count as one comment.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "cupy_awq"
TESTS = ROOT / "tests"
CUDA = ROOT / "cuda_src"

LICENSE = "SPDX-License-Identifier"
DIRECTIVES = re.compile(r"(type|fmt|noqa|mypy|ruff|pylint|doctest|clang-format)\b")
"""The regular expression for comments that address a tool."""


class Prose(NamedTuple):
    """A docstring or a comment.

    Attributes:
        path: the file.
        line: the number of the first line.
        kind: "module", "class", "function", "property", "constant" or "comment".
        name: the documented name, dotted within its module; empty for a comment.
        text: the text without quotes and comment signs.
    """

    path: Path
    line: int
    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        """Return the place and, below it, the text."""
        name = f" {self.name}" if self.name else ""
        return f"{self.path.relative_to(ROOT)}:{self.line} ({self.kind}{name})\n{self.text}\n"


def python_docstrings(path: Path) -> Iterator[Prose]:
    """Yield the docstrings of a module, including the strings below constants and attributes."""
    yield from _docstrings(path, ast.parse(path.read_text(encoding="utf-8")), "")


def _docstrings(
    path: Path, owner: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, prefix: str
) -> Iterator[Prose]:
    text = ast.get_docstring(owner)
    if text is not None:
        yield Prose(path, owner.body[0].lineno, kind_of(owner), prefix.rstrip("."), text)
    if isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for before, node in zip(owner.body, owner.body[1:], strict=False):
        if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Expr):
            target = before.targets[0] if isinstance(before, ast.Assign) else before.target
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield Prose(path, node.lineno, "constant", prefix + ast.unparse(target), node.value.value)
    for node in owner.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(path, node, f"{prefix}{node.name}.")


def kind_of(owner: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return which kind of object a docstring documents: "module", "class", "function" or "property"."""
    if isinstance(owner, ast.Module):
        return "module"
    if isinstance(owner, ast.ClassDef):
        return "class"
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in owner.decorator_list}
    return "property" if decorators & {"property", "cached_property"} else "function"


def python_comments(path: Path) -> Iterator[Prose]:
    """Yield the comments of a Python module, without licenses and directives such as noqa."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    comments = (token for token in tokens if token.type == tokenize.COMMENT)
    yield from _joined(path, [(*token.start, token.string.lstrip("# ")) for token in comments])


def cuda_comments(path: Path) -> Iterator[Prose]:
    """Yield the comments of a CUDA source, without its license."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    found = [
        (number, line.index("//"), line[line.index("//") :].lstrip("/ ")) for number, line in lines if "//" in line
    ]
    yield from _joined(path, found)


def _joined(path: Path, comments: list[tuple[int, int, str]]) -> Iterator[Prose]:
    """Yield one comment for each run of adjacent lines that start in one column, without licenses and directives."""
    begin = column = 0
    parts: list[str] = []
    for number, at, text in [*comments, (-1, 0, "")]:
        if parts and (number, at) != (begin + len(parts), column):
            yield Prose(path, begin, "comment", "", "\n".join(parts))
            parts = []
        if number < 0 or LICENSE in text or DIRECTIVES.match(text) or (number == 1 and text.startswith("!")):
            continue
        if not parts:
            begin, column = number, at
        parts.append(text)


@functools.cache
def all_docstrings() -> list[Prose]:
    """Return every docstring of the package and of the tests."""
    return [prose for path in _modules() for prose in python_docstrings(path)]


def all_comments() -> list[Prose]:
    """Return every comment of the package, of the tests and of the CUDA sources."""
    python = [prose for path in _modules() for prose in python_comments(path)]
    sources = sorted([*CUDA.rglob("*.cu"), *CUDA.rglob("*.cuh")])
    return python + [prose for path in sources for prose in cuda_comments(path)]


def _modules() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=20, help="docstrings, and as many comments (default: 20)")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    for title, found in (("docstrings", all_docstrings()), ("comments", all_comments())):
        print(f"== {arguments.count} of {len(found)} {title}\n")
        for prose in draw.sample(found, min(arguments.count, len(found))):
            print(prose)


if __name__ == "__main__":
    main()
