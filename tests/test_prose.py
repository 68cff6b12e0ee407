# SPDX-License-Identifier: Apache-2.0
"""Rules for words: docstrings, error messages, names of modules, lengths of files, and generated pages."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

from tests.peers import render
from tests.tools import operator_table
from tests.tools.sample_prose import CUDA, PACKAGE, ROOT, Prose, all_docstrings

PAGES = {"README.md": 150, "CHANGELOG.md": 80}
"""The largest number of lines of each page."""
MAX_LINES = 450
"""The largest number of lines of a module or a CUDA source."""

FRAGMENTS = set(
    "About Above After Among As At Before Behind Below Beside Between By During For From In Inside Into Like Of On Onto"
    " Out Outside Over Per Since Than That Through Till To Toward Under Until Up Upon What Whatever Which Whose With"
    " Within Without".split()
)
"""Prepositions and relative pronouns: a docstring that starts with one is a fragment."""
NOT_VERBS = set("A All An Any Both Each Every How Its It None Nothing One Same The These This Those Whether".split())
"""Words that start a noun phrase, which a function's docstring is not."""
CONTRACT = {"refusal", "configs", "estimate_us", "plan", "workspace", "prepare_weight"}
"""The functions of a kernel family, which `kernels.family.Family` documents for all families."""
SUFFIXES = ("s", "d", "ed", "r", "er", "ing", "ion", "ation")


def sources(*suffixes: str) -> list[Path]:
    folders = (PACKAGE, CUDA, ROOT / "tests")
    found = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    assert found
    return found


def place(prose: Prose) -> str:
    first = prose.text.strip().splitlines()[0] if prose.text.strip() else ""
    return f"{prose.path.relative_to(ROOT)}:{prose.line} {prose.name}: {first}"


def is_test(prose: Prose) -> bool:
    """Return whether the docstring is that of a test, which may be any sentence about what the test covers."""
    return prose.name.startswith("test_")


def first_word(prose: Prose) -> str:
    return re.split(r"[\s.,:;(\[]", prose.text.strip(), maxsplit=1)[0]


@pytest.mark.parametrize("page", PAGES)
def test_page_is_short(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= PAGES[page]


def test_no_module_and_no_cuda_source_is_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(".py", ".cu", ".cuh")}
    assert not {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > MAX_LINES}


def test_no_line_exceeds_120_columns() -> None:
    """No line is longer than 120 columns, also comments that ruff ignores and lines that clang-format cannot break."""
    paths = sources(".cu", ".cuh", ".py")
    lines = ((path, number, line) for path in paths for number, line in enumerate(path.open(encoding="utf-8"), 1))
    assert not [f"{path.name}:{number}" for path, number, line in lines if len(line.rstrip("\n")) > 120]


def test_no_docstring_starts_with_a_preposition() -> None:
    assert not [place(prose) for prose in all_docstrings() if first_word(prose) in FRAGMENTS and not is_test(prose)]


def test_docstring_of_a_function_starts_with_a_verb() -> None:
    functions = [prose for prose in all_docstrings() if prose.kind == "function" and not is_test(prose)]
    assert functions
    wrong = [prose for prose in functions if first_word(prose) in NOT_VERBS or not first_word(prose)[:1].isupper()]
    assert not [place(prose) for prose in wrong]


def test_every_public_function_class_and_module_has_a_docstring() -> None:
    missing = []
    for path in PACKAGE.rglob("*.py"):
        module = ast.parse(path.read_text(encoding="utf-8"))
        definitions = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        for node in definitions:
            is_overload = any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)
            is_contract = PACKAGE / "kernels" in path.parents and node.name in CONTRACT
            if not node.name.startswith("_") and not (is_contract or is_overload) and ast.get_docstring(node) is None:
                missing.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
        if module.body and ast.get_docstring(module) is None and path.name != "__main__.py":
            missing.append(str(path.relative_to(ROOT)))
    assert not missing


def test_docstring_of_a_dataclass_names_every_field() -> None:
    docstrings = {(prose.path, prose.name): prose.text for prose in all_docstrings()}
    missing = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or not any(
                "dataclass" in ast.unparse(d) for d in node.decorator_list
            ):
                continue
            fields = [ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)]
            text = docstrings.get((path, node.name), "")
            for field in fields:
                if (path, f"{node.name}.{field}") not in docstrings and not re.search(rf"\b{field}\b", text):
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}.{field}")
    assert not missing


def test_error_messages_have_one_form() -> None:
    """A message has the form "name: expected X, got Y"; a message without "got" states a fact."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                message = " ".join(ast.unparse(argument) for argument in node.exc.args)
                is_expectation = "expected" in message or ", got" not in message
                if re.search(r"\b(must|should)\b", message) or not is_expectation:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {message}")
    assert not wrong


def stem(name: str) -> str:
    """Return a name without an ending such as "-ing" or "-s"."""
    ending = max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default="")
    return name.removesuffix(ending).rstrip("e") if len(name) - len(ending) >= 3 else name


def test_no_two_modules_differ_by_a_suffix() -> None:
    assert stem("tuning") == stem("tune") == stem("tuned")
    assert stem("copies") == stem("copied")
    modules = [path.stem for path in PACKAGE.rglob("*.py") if not path.stem.startswith("_")]
    kernels = [path.stem for path in CUDA.rglob("*.cu*")]
    for names in (modules, kernels):
        pairs = itertools.combinations(sorted(set(names)), 2)
        assert not [pair for pair in pairs if stem(pair[0]) == stem(pair[1])]


def test_results_are_what_render_writes() -> None:
    assert render.RESULTS.read_text(encoding="utf-8") == render.results()


def test_readme_has_the_figures_of_the_results() -> None:
    readme = render.README.read_text(encoding="utf-8")
    assert f"{render.headline().gpu}, float16" in readme
    assert render.with_bands(readme) == readme


def test_operator_table_is_what_its_command_prints() -> None:
    """The page has the table that the command prints now, and every test that it names exists."""
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    assert operator_table.table() in text
    for file, names in re.findall(r"`(test_\w+\.py)::([\w, ]+)`", text):
        for name in names.split(", "):
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CHANGELOG.md",
        "cuda_src/README.md",
        "tests/README.md",
        "tests/peers/EXPERIMENTS.md",
        "cupy_awq/README.md",
        ".github/CONTRIBUTING.md",
        ".github/INSTALL.md",
        ".github/JETSON.md",
        *(f".github/contributing/{path.name}" for path in (ROOT / ".github" / "contributing").glob("*.md")),
    ],
)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith("http")]
    assert local
    assert not [link for link in local if not (path.parent / link).exists()]


def test_links_within_the_experiments_lead_to_an_entry_or_a_section() -> None:
    text = (ROOT / "tests/peers/EXPERIMENTS.md").read_text(encoding="utf-8")
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    targets = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    targets.update(re.findall(r'<a id="([\w-]+)">', text))
    links = re.findall(r"\]\(#([^)]+)\)", text)
    assert links
    assert not set(links) - targets
