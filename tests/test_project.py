# SPDX-License-Identifier: Apache-2.0
"""Rules for the repository: import layers, contents of files, and the files in an installation."""

from __future__ import annotations

import ast
import functools
import graphlib
import itertools
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import cupy_awq
from cupy_awq.kernels.family import AnyFamily, KernelProblem
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, INT8_ROWS, Problem
from cupy_awq.kernels.gemm.repack import Repacking
from cupy_awq.kernels.registry import FAMILIES_OF
from cupy_awq.runtime import device
from cupy_awq.tools.command_line import main

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cupy_awq"
CUDA = ROOT / "cuda_src"

PEERS = ROOT / "tests" / "peers"

ORDER = (
    "__init__ atomic sandbox activation check_scalar overlap check array_types packing weight block_weight reference"
    " block_check block_reference expert_check expert_reference checkpoint runtime kernels ops quantization"
    " quantizer gemm_layer linear int8_linear loader saver llm serve tools __main__"
).split()
"""The layers, the lowest first. A module imports from its own layer and from lower ones.

`__init__` is the lowest because it imports a public name when it is first used.
"""
LLM_ORDER = (
    "extra completion families text files decoder generate_arguments engine language_model assemble prompt_answerer"
    " calibrate __init__"
).split()
"""The layers within cupy_awq.llm, the lowest first."""
NO_CUPY = set(
    (
        "sandbox activation check_scalar overlap check array_types packing weight block_weight reference block_check"
        " block_reference expert_check expert_reference quantization kernels checkpoint"
    ).split()
)
"""The layers of NumPy and pure Python alone: they may not import CuPy, not even inside a function."""

KERNEL_FOLDERS = ("gemm", "int8", "conv2d", "dequantize", "decoder", "experts", "quantization")
"""The folders of kernels, one per operation, in `cupy_awq/kernels` and in `cuda_src`."""
FOREIGN = {
    ("conv2d", "gemm"): {"conv2d_gemm"},
    ("decoder", "select"): {"decoder"},
    ("experts", "gemm"): {
        "expert_gemm",
        "expert_gemm_simt",
        "expert_gemm_sm90",
        "expert_gemm_tiles",
        "layer",
        "problem",
    },
    ("experts", "select"): {"layer"},
    ("int8", "gemm"): {"gemm_w4a8_mma"},
}
"""Imports between folders that are allowed: (folder, imported folder or module): the modules that may do so.

A 1x1 convolution is a GEMM, experts have the layouts of a GEMM's weight, and the decoder and layers of experts choose
among kernels.
"""
GGUF_ORDER = "container names dense q4 q8 tensors write".split()
"""The modules of `cupy_awq.checkpoint.gguf`, the lowest first."""
GGUF_IMPORTS = "contents files module nibbles tensors threads".split()
"""The modules of `cupy_awq.checkpoint` that GGUF code shares with the other formats."""

TOP_LEVEL = {"pyproject.toml", "cupy_awq", "cuda_src", "tests", "README.md", "LICENSE", "CHANGELOG.md"}
BUILT = {"build", "dist", "cupy_awq.egg-info"}
"""The folders that an installation by pip leaves in the checkout; git ignores them."""


def files(*suffixes: str) -> list[Path]:
    found = [p for folder in (PACKAGE, CUDA, ROOT / "tests") for p in folder.rglob("*") if p.suffix in suffixes]
    assert found
    return found


def device_code() -> list[Path]:
    return [path for path in files(".cu", ".cuh") if path.is_relative_to(CUDA)]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def imported(path: Path) -> list[str]:
    """Return the absolute dotted names that a file imports, also inside functions."""
    names: list[str] = []
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = list(path.relative_to(ROOT).parts[: -node.level]) if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def layer_of(path: Path) -> str:
    """Return the layer that a module belongs to, such as "ops" for cupy_awq/ops/gemm.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def python(*arguments: str, cwd: Path = ROOT) -> str:
    result = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_no_module_imports_from_a_layer_above() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        layer = layer_of(path)
        assert layer in ORDER, f"{path} has no place in the layers"
        below = ORDER[: ORDER.index(layer) + 1]
        for name in imported(path):
            parts = name.split(".")
            target = parts[1] if len(parts) > 1 else "__init__"
            if parts[0] == "cupy_awq" and target not in below:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_no_part_of_llm_imports_from_a_part_above() -> None:
    wrong = []
    for path in (PACKAGE / "llm").rglob("*.py"):
        part = path.relative_to(PACKAGE / "llm").parts[0].removesuffix(".py")
        below = LLM_ORDER[: LLM_ORDER.index(part) + 1]
        for name in imported(path):
            target = name.removeprefix("cupy_awq.llm.").partition(".")[0]
            if name.startswith("cupy_awq.llm.") and target not in below:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_gguf_modules_import_lower_ones_and_the_shared_parts_of_checkpoint() -> None:
    folder = PACKAGE / "checkpoint" / "gguf"
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", *GGUF_ORDER}
    wrong = []
    for path in folder.glob("*.py"):
        below = GGUF_ORDER[: GGUF_ORDER.index(path.stem)] if path.stem in GGUF_ORDER else GGUF_ORDER
        allowed = {f"checkpoint.gguf.{name}" for name in below} | {f"checkpoint.{name}" for name in GGUF_IMPORTS}
        for name in imported(path):
            target = name.removeprefix("cupy_awq.")
            if target.startswith("checkpoint") and not {target, target.rpartition(".")[0]} & allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong
    importers = {path for path in PACKAGE.rglob("*.py") for name in imported(path) if ".checkpoint.gguf" in name}
    above = {path.stem for path in importers if layer_of(path) == "checkpoint" and path.parent != folder}
    assert above <= {"__init__", "model_folder", "model_path"}


def module_name(path: Path) -> str:
    """Return the dotted name of a module, such as "cupy_awq.ops" for cupy_awq/ops/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_imports_have_no_cycle_not_even_inside_functions() -> None:
    modules = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        for name in imported(path):
            # the name may be a module, or something defined in one
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                graph[module].add(target)
    assert graph["cupy_awq.linear"] >= {"cupy_awq.check", "cupy_awq.weight"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle, if there is one


def kernels_below(folder: str) -> list[Path]:
    found = sorted((PACKAGE / "kernels" / folder).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("folder", KERNEL_FOLDERS)
def test_kernels_of_an_operation_import_no_others(folder: str) -> None:
    """A folder of kernels imports from no other folder of kernels, except as FOREIGN allows."""
    wrong = []
    for path in kernels_below(folder):
        for name in imported(path):
            parts = name.split(".")
            if parts[:2] != ["cupy_awq", "kernels"] or parts[2] == folder:
                continue
            of_another = parts[2] in KERNEL_FOLDERS and path.stem not in FOREIGN.get((folder, parts[2]), ())
            above = parts[2] in ("registry", "select") and path.stem not in FOREIGN.get((folder, parts[2]), ())
            if of_another or above:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_folders_of_kernels_mirror_those_of_the_device_code() -> None:
    """Each folder of kernels in Python has a folder of the same name in cuda_src.

    There, `common`, `hopper` and `ptx` hold what several operations share.
    """
    shared = {"common", "hopper", "ptx", "__pycache__"}
    assert set(KERNEL_FOLDERS) == {path.name for path in CUDA.iterdir() if path.is_dir()} - shared


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def comparisons_of_architectures(tree: ast.AST) -> Iterator[ast.Compare]:
    """Yield comparisons of a GPU's compute capability (``arch``, ``native``) with a number, which may be named."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = {side.attr for side in sides if isinstance(side, ast.Attribute)}
            constants = [
                side for side in sides if is_number(side) or (isinstance(side, ast.Name) and side.id.isupper())
            ]
            if names & {"arch", "native"} and constants:
                yield node


@pytest.mark.parametrize(
    "text", ["device.arch == 90", "80 <= gpu.native < 90", "device.arch >= ARCH", "90 != a.b.arch"]
)
def test_a_comparison_of_an_architecture_is_found(text: str) -> None:
    assert list(comparisons_of_architectures(ast.parse(text)))


def test_architectures_are_compared_in_one_module_alone() -> None:
    """Only `runtime/device.py` compares compute capabilities; all others ask whether the GPU has a `Capability`."""
    owner = PACKAGE / "runtime" / "device.py"
    found = {path: list(comparisons_of_architectures(ast.parse(read(path)))) for path in PACKAGE.rglob("*.py")}
    assert not {str(path): [node.lineno for node in nodes] for path, nodes in found.items() if nodes and path != owner}


def example_problems(kind: type[KernelProblem]) -> list[KernelProblem]:
    """Return the common problems of a type; for a GEMM and a repacking, small problems."""
    if kind is Repacking:
        return [Repacking(FragmentLayout(128, 128, 128))]
    if kind is not Problem:
        return list(kind.common_problems())
    rows = [Problem(m, 128, 1024, 128, layouts=layouts) for m in (1, 16, 64) for layouts in ((AWQ,), (AWQ, FRAGMENTS))]
    invariant = Problem(16, 128, 1024, 128, layouts=(FRAGMENTS,), batch_invariant=True)
    return [*rows, invariant, Problem(16, 128, 1024, 128, zeros="symmetric", layouts=(INT8_ROWS,))]


def sources_of(kind: type[KernelProblem], family: AnyFamily) -> set[str]:
    """Return the CUDA sources that a family's kernels come from, for the example problems and nominal GPUs."""
    pairs = itertools.product(map(device.nominal, (60, 75, 80, 90)), example_problems(kind))
    legal = [(problem, gpu) for gpu, problem in pairs if family.refusal(problem, gpu) is None]
    if kind is not Problem:
        legal = legal[:1]
    plans = [family.plan(config, problem, gpu) for problem, gpu in legal for config in family.configs(problem, gpu)]
    return {plan.kernel.source for plan in plans}


def test_every_registered_family_has_a_source_and_every_source_a_family() -> None:
    """Every registered kernel family has a source, and every source belongs to a family.

    Most sources hold one kernel; that of `Conversion` and that of sampling hold two.
    """
    found = {
        (kind, name): sources_of(kind, family) for kind, some in FAMILIES_OF.items() for name, family in some.items()
    }
    assert not [name for (_, name), sources in found.items() if not sources]
    of_no_family = {"common/rates.cu"}  # microbenchmarks, which belong to no operation
    assert set().union(*found.values(), of_no_family) == {str(path.relative_to(CUDA)) for path in CUDA.rglob("*.cu")}


def test_reading_checkpoints_loads_neither_cupy_nor_the_gpu_layers() -> None:
    program = (
        "import sys; import numpy.typing, ml_dtypes; before = set(sys.modules); import cupy_awq.checkpoint;"
        " print(*(set(sys.modules) - before))"
    )
    loaded = [name.split(".") for name in python("-c", program).split()]
    own = {".".join(parts[:2]) for parts in loaded if parts[0] not in sys.stdlib_module_names}
    names = "atomic sandbox checkpoint weight packing check check_scalar overlap array_types activation".split()
    assert own <= {"cupy_awq", *(f"cupy_awq.{name}" for name in names)}


def test_type_stub_of_the_package_names_what_it_loads_lazily() -> None:
    stub = ast.parse(read(PACKAGE / "__init__.pyi"))
    declared = {
        alias.name: (node.module or "").removeprefix("cupy_awq.")
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert declared == cupy_awq._MODULES | dict.fromkeys(cupy_awq._SUBMODULES, "cupy_awq")
    assert cupy_awq.__all__ == sorted(cupy_awq._MODULES)
    assert all(getattr(cupy_awq, name) for name in declared)
    assert set(declared) == {name for name in dir(cupy_awq) if not name.startswith("__")}
    with pytest.raises(AttributeError, match="module 'cupy_awq' has no attribute 'absent'"):
        _ = cupy_awq.absent


def test_formats_reference_and_selection_never_name_cupy() -> None:
    paths = [p for p in PACKAGE.rglob("*.py") if layer_of(p) in NO_CUPY]
    assert paths
    assert not [str(p) for p in paths for name in imported(p) if name.split(".")[0] in ("cupy", "cupyx", "cuda")]


def test_nothing_imports_torch() -> None:
    assert not [
        str(p)
        for p in files(".py")
        if PEERS not in p.parents
        for name in imported(p)
        if name.split(".")[0] in ("torch", "torchvision")
    ]


def test_importing_every_public_name_is_quick_and_leaves_cupy_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing every name takes at most twice as long as importing NumPy, and leaves CuPy unloaded.

    On an idle machine it takes 1.3 to 1.5 times as long. The first of the four imports compiles to bytecode.
    """
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    program = (
        "import sys, time; start = time.process_time(); import numpy, ml_dtypes; half = time.process_time();"
        " from cupy_awq import *; print((time.process_time() - half) / (half - start),"
        " {'cupy', 'cuda.bindings', 'matplotlib', 'torch'} & set(sys.modules) or '')"
    )
    runs = [python("-c", program).split(maxsplit=1) for _ in range(4)]
    assert [rest for _, *rest in runs] == [[], [], [], []]
    assert min(float(ratio) for ratio, *_ in runs) < 2


def test_every_source_opens_with_its_license() -> None:
    others = [ROOT / "pyproject.toml", ROOT / ".ci" / "run", ROOT / ".gitignore", ROOT / ".clang-format"]
    first = re.compile(r"(#!.*\n)?(#|//) SPDX-License-Identifier: Apache-2\.0\n")
    assert not [str(p) for p in [*files(".py", ".cu", ".cuh"), *others] if not first.match(read(p))]


def test_inline_assembly_stands_in_the_ptx_folder_alone() -> None:
    with_asm = [p for p in device_code() if re.search(r"\basm\b", re.sub(r"//.*", "", read(p)))]
    assert with_asm
    assert not [str(p) for p in with_asm if p.parent != CUDA / "ptx"]


def test_device_code_includes_nothing_but_its_own_headers() -> None:
    assert not [str(p) for p in device_code() if re.search(r"#\s*include\s*<", read(p))]


def test_top_level_holds_only_the_known_names() -> None:
    names = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    assert names - BUILT == TOP_LEVEL


def copy_checkout(target: Path) -> None:
    target.mkdir()
    for name in TOP_LEVEL - {"tests"}:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copy(ROOT / name, target / name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from the source distribution of a copy of the checkout, as an installation from an index does."""
    work = tmp_path_factory.mktemp("dist")
    checkout = work / "checkout"
    copy_checkout(checkout)
    build = "from setuptools import build_meta; print(build_meta.build_{}({!r}))"
    python("-c", build.format("sdist", str(work)), cwd=checkout)
    (source,) = work.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(work, filter="data")
    python("-c", build.format("wheel", str(work)), cwd=work / source.name.removesuffix(".tar.gz"))
    (result,) = work.glob("*.whl")
    return result


def test_wheel_carries_every_module_kernel_and_data_file(wheel: Path) -> None:
    def below(folder: Path, prefix: str) -> set[str]:
        found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {f"{prefix}/{path.relative_to(folder).as_posix()}" for path in found if path.suffix != ".md"}

    expected = below(PACKAGE, "cupy_awq") | below(CUDA, "cupy_awq/cuda_src")
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert carried == expected


def test_wheel_carries_the_license_and_the_notices(wheel: Path) -> None:
    names = {name.partition(".dist-info/licenses/")[2] for name in zipfile.ZipFile(wheel).namelist()}
    assert names >= {"LICENSE", "cupy_awq/data/smollm2-mlp/NOTICE", "cupy_awq/data/THIRD_PARTY_NOTICES"}


def test_version_is_known_without_installation(wheel: Path) -> None:
    version = python("-c", "import cupy_awq; print(cupy_awq.__version__)").strip()
    assert wheel.name == f"cupy_awq-{version}-py3-none-any.whl"


def readme_commands() -> set[str]:
    return set(re.findall(r"python -m cupy_awq (\w+)", read(ROOT / "README.md")))


@pytest.mark.parametrize("command", sorted(readme_commands()))
def test_command_of_the_readme_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "usage:" in capsys.readouterr().out


def test_readme_opens_with_the_two_commands() -> None:
    block = re.search(r"```bash\n(.*?)```", read(ROOT / "README.md"), re.DOTALL)
    assert block
    lines = [shlex.split(line, comments=True) for line in block[1].splitlines()]
    assert lines[1] == shlex.split("pip install . && python -m cupy_awq demo")
    assert lines[2] == shlex.split('pip install -e ".[test]" && python -m pytest')


def test_dir_lists_the_public_names_alone() -> None:
    names = {name for name in dir(cupy_awq) if not name.startswith("__")}
    assert names == {*cupy_awq.__all__, "checkpoint", "llm", "packing", "reference"}


def test_readme_explains_every_public_name() -> None:
    _, _, index = read(ROOT / "README.md").partition("## API")
    assert not [name for name in cupy_awq.__all__ if f"`{name}`" not in index]
