# SPDX-License-Identifier: Apache-2.0
from cupy_awq import checkpoint as checkpoint
from cupy_awq import llm as llm
from cupy_awq import packing as packing
from cupy_awq import reference as reference
from cupy_awq.block_weight import BlockQuantizedWeight as BlockQuantizedWeight
from cupy_awq.block_weight import from_mnn as from_mnn
from cupy_awq.block_weight import from_packed as from_packed
from cupy_awq.checkpoint import CheckpointError as CheckpointError
from cupy_awq.int8_linear import Int8Linear as Int8Linear
from cupy_awq.linear import AwqLinear as AwqLinear
from cupy_awq.loader import Checkpoint as Checkpoint
from cupy_awq.loader import load as load
from cupy_awq.ops.conv2d import conv2d as conv2d
from cupy_awq.ops.conv2d_int8 import conv2d_int8 as conv2d_int8
from cupy_awq.ops.dequantize import dequantize as dequantize
from cupy_awq.ops.experts import gemm_grouped as gemm_grouped
from cupy_awq.ops.experts import moe as moe
from cupy_awq.ops.experts import topk as topk
from cupy_awq.ops.gemm import explain as explain
from cupy_awq.ops.gemm import gemm as gemm
from cupy_awq.ops.gemm import gemv as gemv
from cupy_awq.ops.int_to_fp16 import dequantize_s4_to_fp16x2 as dequantize_s4_to_fp16x2
from cupy_awq.ops.int_to_fp16 import int8_to_fp16 as int8_to_fp16
from cupy_awq.ops.moe_layer import MoeLayer as MoeLayer
from cupy_awq.ops.packed_experts import PackedExperts as PackedExperts
from cupy_awq.ops.plan import Plan as Plan
from cupy_awq.ops.plan import plan as plan
from cupy_awq.ops.quantized_linear import gemm_int8 as gemm_int8
from cupy_awq.ops.quantized_linear import linear_fp8 as linear_fp8
from cupy_awq.ops.quantized_linear import linear_int8 as linear_int8
from cupy_awq.ops.quantized_linear import quantize_activations as quantize_activations
from cupy_awq.packing import pack_int4 as pack_int4
from cupy_awq.packing import unpack_int4 as unpack_int4
from cupy_awq.quantizer import quantize as quantize
from cupy_awq.saver import save as save
from cupy_awq.weight import PackedWeight as PackedWeight

__version__: str
__all__: list[str]
