#!/usr/bin/env bash
# Installs what compiles and links emitted programs, no GPU needed: .ci/install-cuda.sh DIR
#
# nvcc, NVRTC, the CUDA runtime, cuBLAS and NCCL come as wheels, through pip, into a virtual environment at DIR. The output is
# the two lines that a shell needs to find them:
#
#     eval "$(.ci/install-cuda.sh /tmp/cuda)" && make -C out
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
directory=$1
version='13.0.*'
if [ ! -x "$directory/bin/python" ]; then
    python3 -m venv "$directory"
fi
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check \
    "nvidia-cuda-nvcc==$version" "nvidia-nvvm==$version" "nvidia-cuda-crt==$version" \
    "nvidia-cuda-runtime==$version" "nvidia-cuda-cccl==$version" "nvidia-cublas==$version" "nvidia-nvtx==$version" \
    "nvidia-cuda-nvrtc==$version" \
    nvidia-nccl-cu13 >&2

packages=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cuda=$packages/nvidia/cu13
nccl=$packages/nvidia/nccl
for file in "$cuda/bin/nvcc" "$cuda/include/cublasLt.h" "$cuda/lib/libnvrtc.so.13" "$nccl/include/nccl.h"; do
    if [ ! -e "$file" ]; then
        echo "$file is missing: the wheels are laid out differently from what this script expects" >&2
        exit 1
    fi
done
"$cuda/bin/nvcc" --version >&2
printf 'export CUDA_HOME=%q\nexport NCCL_HOME=%q\n' "$cuda" "$nccl"
