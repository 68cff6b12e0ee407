#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Download the peers' published wheels and reduce them to what compare.py loads, about 25 MB.
#   bash tests/peers/prepare.sh DEST      DEST: a folder that git ignores, such as .peers; 3 minutes, 3 GB of scratch
#   bash tests/peers/prepare.sh DEST moe  also Marlin for experts, which moe.py loads
# Then, on a GPU:   python tests/peers/compare.py --libraries DEST
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dest=$(mkdir -p "$1" && cd "$1" && pwd)
scratch=$(mktemp -d); trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
wheel() { python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d . "$1"; }
wheel vllm==0.26.0                 # for torch 2.11.0 (CUDA 13): Marlin, Machete
unzip -qo vllm-*.whl 'vllm/_C_stable_libtorch.abi3.so'
python3 "$here/prune_fatbin.py" vllm/_C_stable_libtorch.abi3.so vllm_C.so ptx
wheel fbgemm-gpu-genai==1.6.0      # bf16i4bf16_shuffled (CUTLASS, bf16)
unzip -qo fbgemm_gpu_genai-*.whl '*.so'
so=$(grep -l bf16i4bf16_shuffled $(find fbgemm_gpu -name '*.so') | head -n 1)
python3 "$here/prune_fatbin.py" "$so" fbgemm_genai.so none
for f in vllm_C.so fbgemm_genai.so; do xz -T2 -3 -c "$f" >"$dest/$f.xz"; done
if [ "${2:-}" = moe ]; then
  rm vllm-*.whl
  wheel vllm==0.33.0               # the stable ABI, so that it loads with torch 2.11
  unzip -qo vllm-*.whl 'vllm/_moe_C_stable_libtorch.abi3.so'
  python3 "$here/prune_fatbin.py" vllm/_moe_C_stable_libtorch.abi3.so vllm_moe_C.so ptx
  xz -T2 -3 -c vllm_moe_C.so >"$dest/vllm_moe_C.so.xz"
fi
ls -l "$dest"
