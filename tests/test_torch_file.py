# SPDX-License-Identifier: Apache-2.0
"""Tests of files of torch.save: tensors are read, and no function that a pickle names is called."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupy_awq.checkpoint import CheckpointError, read, torch_file
from tests.checkpoint_files import check_refusal
from tests.format_files import Call, Persistent, global_name, pickled, save_torch, save_zip, tensor

TENSORS = {
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "brain": np.arange(4).astype(ml_dtypes.bfloat16),
    "int": np.arange(-3, 3, dtype=np.int32),
    "short": np.arange(3, dtype=np.int16),
    "byte": np.arange(3, dtype=np.uint8),
    "scalar": np.array(5, np.int64),
    "empty": np.ones((0, 3), np.float32),
}
STORAGE = bytes(range(32))


def file(path: Path, value: Any, **entries: bytes) -> Path:
    """Write a .pt file whose pickle is that of ``value``, or ``value`` itself if it is bytes, and return its path."""
    text = value if isinstance(value, bytes) else pickled(value)
    return save_zip(path / "m.pt", {"a/data.pkl": text, "a/data/0": STORAGE, **entries})


def refused(path: Path, *fragments: str) -> None:
    check_refusal(torch_file.read, path, *fragments)


def test_tensors_are_views_with_their_dtypes_and_strides(tmp_path: Path) -> None:
    found = torch_file.read(save_torch(tmp_path / "m.pt", TENSORS))
    assert list(found) == list(TENSORS)
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == value.dtype
    assert not found["half"].flags.writeable
    turned = tensor("0", "uint8", (2, 3), 32, size=(3, 2), stride=(1, 3), offset=4)
    view = torch_file.read(file(tmp_path, {"t": turned}))["t"]
    np.testing.assert_array_equal(view, np.arange(4, 10, dtype=np.uint8).reshape(2, 3).T)


def test_metadata_of_an_ordered_dictionary_is_ignored(tmp_path: Path) -> None:
    text = pickled({"t": tensor("0", "uint8", (3,), 32)}).removesuffix(pickle.STOP)
    state = pickled({"_metadata": {"": {"version": 1}}}).removeprefix(pickle.PROTO + b"\x02").removesuffix(pickle.STOP)
    path = file(tmp_path, text + state + pickle.BUILD + pickle.STOP)
    assert torch_file.read(path)["t"].tolist() == [0, 1, 2]


def called(module: str, attribute: str, *arguments: Any) -> Any:
    return Call(global_name(module, attribute), *arguments)


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        ({"t": called("posix", "system", "touch pwned")}, "posix.system"),
        ({"t": called("builtins", "eval", "1")}, "builtins.eval"),
        ({"t": called("os", "system", "true")}, "os.system"),
        ({"t": called("torch", "load", "x")}, "torch.load"),
        ({"t": called("torch._utils", "_rebuild_parameter", 1)}, "torch._utils._rebuild_parameter"),
        ({"t": called("numpy.core.multiarray", "_reconstruct")}, "numpy.core.multiarray._reconstruct"),
        ({"t": called("collections", "OrderedDict.fromkeys", "ab")}, "collections.OrderedDict.fromkeys"),
        ({"t": called("torch", "HalfStorage", 10**9)}, "a call of torch HalfStorage"),
        ({"t": called("collections", "OrderedDict", ("a", 1))}, "a call of collections OrderedDict"),
        ({"t": called("torch._utils", "_rebuild_tensor_v2", 1)}, "a call of torch._utils _rebuild_tensor_v2"),
        ({"t": called("torch._utils", "_rebuild_tensor_v2", 1, 0, (1,), (1,))}, "a call of torch._utils"),
        ({"t": 5}, "flat dictionary"),
        ({"t": {"u": tensor("0", "uint8", (3,), 32)}}, "flat dictionary"),
        ((), "flat dictionary"),
        ({"t": Persistent("storage", "torch.HalfStorage", "0", "cpu", 3)}, "persistent id"),
        ({"t": Persistent("module", global_name("torch", "HalfStorage"), "0", "cpu", 3)}, "persistent id"),
        (b"\x80\x02cposix\nsystem\n(X\x04\x00\x00\x00true\x85R.", "posix.system"),
        (b"\x80\x02iposix\nsystem\n.", "opcode INST"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "opcode STACK_GLOBAL"),
        (b"\x80\x02\x82\x01.", "opcode EXT1"),
        (b"\x80\x02(o.", "opcode OBJ"),
        (b"\x80\x02)\x81.", "opcode NEWOBJ"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "data.pkl"),
        (b"\x80\x02r\xff\xff\xff\x7f.", "data.pkl"),
        (b"\x80\x02" + b"(" * 100_000 + b".", "items on the stack"),
        (b"\x80\x02" + b")" + b"\x86" * 3 + b".", "data.pkl"),
        (b"\x80\x02h\x05.", "data.pkl"),
        (b"\x80\x02", "data.pkl"),
        (b"", "data.pkl"),
        (b"not a pickle", "data.pkl"),
        (b"\x80\x02" + b"q\x00".join([b")"] + [b"h\x00h\x00\x86"] * 3) + b".", "data.pkl"),
    ],
)
def test_pickle_that_is_more_than_tensors_is_refused_and_runs_nothing(
    tmp_path: Path, value: Any, fragment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(file(tmp_path, value), "data.pkl", fragment)
    assert not (tmp_path / "pwned").exists()


def test_huge_number_of_a_memo_takes_no_memory(tmp_path: Path) -> None:
    assert torch_file.read(file(tmp_path, b"\x80\x02}r\xff\xff\xff\x7f.")) == {}


def test_nested_tuples_cannot_fill_the_memory(tmp_path: Path) -> None:
    """Each of 60 memoized tuples contains the preceding one twice: 2^60 items for code that visits them all."""
    bomb = b")q\x00" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(60))
    refused(file(tmp_path, b"\x80\x02" + bomb + b"."), "data.pkl")
    whole = pickled({"t": tensor("0", "uint8", (3,), 32)})
    # The tuple (3,) as `TorchPickler` writes it: the length is a LONG1 of 9 bytes.
    size = b"(\x8a\x09\x03" + bytes(8) + b"t"
    assert whole.count(size) == 1
    refused(file(tmp_path, whole.replace(size, bomb + b"h\x3c\x85")), "tensor 't'", "integers")


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"elements": 33}, "32 bytes"),
        ({"elements": 2**62}, "32 bytes"),
        ({"elements": -1}, "32 bytes"),
        ({"key": "1"}, "storage '1'"),
        ({"key": "../data.pkl"}, "storage '../data.pkl'"),
        ({"key": "²"}, "storage"),
        ({"size": (33,)}, "within 32"),
        ({"size": (2**62, 2**62)}, "integers"),
        ({"size": (2**40,), "stride": (0,)}, "within 32"),
        ({"size": (4, 2**40), "stride": (1, 0)}, "within 32"),
        ({"size": (2,), "stride": (32,)}, "within 32"),
        ({"offset": 30}, "within 32"),
        ({"offset": -1}, "integers"),
        ({"stride": (-1,)}, "integers"),
        ({"stride": (2**63,)}, "integers"),
        ({"size": (1,) * 9, "stride": (1,) * 9}, "integers"),
        ({"size": ("3",)}, "integers"),
        ({"size": (1,), "stride": (2**63 - 1,), "dtype": "float16"}, "a shape that NumPy supports"),
        ({"size": (0, 2**62), "stride": (1, 1), "dtype": "float16"}, "a shape that NumPy supports"),
    ],
)
def test_tensor_beyond_its_storage_is_refused(tmp_path: Path, changes: dict[str, Any], fragment: str) -> None:
    dtype = changes.pop("dtype", "uint8")
    elements = 32 // np.dtype(dtype).itemsize
    refused(file(tmp_path, {"t": tensor("0", dtype, (3,), elements, **changes)}), "tensor 't'", fragment)


def test_archives_of_another_form_are_refused(tmp_path: Path) -> None:
    good = pickled({"t": tensor("0", "uint8", (3,), 32)})
    refused(file(tmp_path, good, **{"b/data.pkl": good}), "one data.pkl, got 2")
    refused(save_zip(tmp_path / "n.pt", {"a/data/0": STORAGE}), "one data.pkl, got 0")
    refused(file(tmp_path, good, **{"a/byteorder": b"big"}), "byteorder")
    assert len(torch_file.read(file(tmp_path, good, **{"a/byteorder": b"little"}))) == 1
    refused(save_zip(tmp_path / "z.pt", {"a/data.pkl": good}, zipfile.ZIP_DEFLATED), "compressed")
    refused(file(tmp_path, {"t": tensor("0", "uint8", (3,), 32), "u": 0}), "flat")
    (tmp_path / "x.pt").write_bytes(b"PK\x03\x04 and no more")
    refused(tmp_path / "x.pt", "zip archive")


def test_older_files_and_folders_of_hqq_are_refused(tmp_path: Path) -> None:
    for name, content in (("old.pt", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."), ("empty.bin", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{name}: expected the zip archive"):
            read(tmp_path / name)
    (tmp_path / "qmodel.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"qmodel\.pt: expected safetensors"):
        read(tmp_path)


def test_storage_that_many_tensors_share_is_refused(tmp_path: Path) -> None:
    storage = bytes(1 << 14)
    table = {f"t{i}": tensor("0", "uint8", (1 << 14,), 1 << 14) for i in range(40)}
    path = save_zip(tmp_path / "m.pt", {"a/data.pkl": pickled(table), "a/data/0": storage})
    refused(path, "twice the file's")


def test_scales_that_divide_x_at_run_time_are_refused(tmp_path: Path) -> None:
    path = save_torch(tmp_path / "m.pt", {"h.0.mlp.act.scales": np.ones(8, np.float16)})
    with pytest.raises(CheckpointError, match=r"module 'h\.0\.mlp': act\.scales"):
        read(path)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_of_the_file_is_one_error_or_readable(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "whole.pt").exists():
        save_torch(tmp_path / "whole.pt", TENSORS)
    content = bytearray((tmp_path / "whole.pt").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(2, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(2, len(content)) | st.just(len(content))) :]
    (tmp_path / "m.pt").write_bytes(content)
    with contextlib.suppress(CheckpointError):
        for array in torch_file.read(tmp_path / "m.pt").values():
            assert array.tobytes() is not None


def test_pickle_of_pythons_own_pickler_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files by Python's own pickler, which torch.save uses, are read: memoized names and integers of every length."""
    root, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")

    class HalfStorage:
        """A stand-in for torch.HalfStorage, which a pickle refers to by its name."""

    def _rebuild_tensor_v2() -> None:
        """A stand-in for torch._utils._rebuild_tensor_v2, which a pickle refers to by its name."""

    for module, item in ((root, HalfStorage), (utils, _rebuild_tensor_v2)):
        item.__module__, item.__qualname__ = module.__name__, item.__name__
        setattr(module, item.__name__, item)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    class Stored:
        """A stand-in for a tensor, which is pickled as a call that rebuilds it."""

        def __init__(self, array: Any, key: str) -> None:
            self.array, self.key = array, key

        def __reduce__(self) -> Any:
            strides = tuple(step // 2 for step in self.array.strides)
            arguments: Any = (Storage(self), 0, self.array.shape, strides, False, OrderedDict())
            return _rebuild_tensor_v2, arguments

    class Storage:
        """A stand-in for a storage, in whose place the pickler writes a persistent id."""

        def __init__(self, tensor: Stored) -> None:
            self.tensor = tensor

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            if not isinstance(item, Storage):
                return None
            return "storage", HalfStorage, item.tensor.key, "cpu", item.tensor.array.size

    shapes = [(), (300,), (2, 70_000), (1, 2, 3), (1, 2, 3, 4)]
    arrays = {f"layer.{i}": np.ones(shape, np.float16) * i for i, shape in enumerate(shapes)}
    table = OrderedDict((name, Stored(array, str(i))) for i, (name, array) in enumerate(arrays.items()))
    table._metadata = OrderedDict([("", {"version": 1})])  # type: ignore[attr-defined]
    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump(table)
    entries = {f"model/data/{i}": array.tobytes() for i, array in enumerate(arrays.values())}
    path = save_zip(tmp_path / "m.pt", {"model/data.pkl": stream.getvalue(), "model/byteorder": b"little", **entries})
    found = torch_file.read(path)
    assert list(found) == list(arrays)
    for name, value in arrays.items():
        np.testing.assert_array_equal(found[name], value)
