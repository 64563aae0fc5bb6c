#!/usr/bin/env bash
# Compiles the engine's CUDA build on a machine without a GPU and without the CUDA toolkit: nvcc and what it needs come from PyPI, by
# exact version, into a virtual environment in the cache. Type checking needs neither a driver nor cuBLAS. About seven minutes on two
# cores, once; repeated, seconds.
set -euo pipefail
cd "$(dirname "$0")/../.."

cuda="${PRIMA_CACHE:-$HOME/.cache/prima}/cuda-13.0.88"
if [[ ! -e "$cuda/complete" ]]; then
    "${PYTHON:-python3}" -m venv --clear "$cuda"
    "$cuda/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        nvidia-cuda-nvcc==13.0.88 \
        nvidia-nvvm==13.0.88 \
        nvidia-cuda-crt==13.0.88 \
        nvidia-cuda-runtime==13.0.96 \
        nvidia-cuda-cccl==13.0.85 \
        nvidia-curand==10.4.0.35
    touch "$cuda/complete"
fi
CUDA_HOME=$(echo "$cuda"/lib/python*/site-packages/nvidia/cu13)
export CUDA_HOME CUDA_PATH="$CUDA_HOME" PATH="$CUDA_HOME/bin:$PATH"
# A target must be named where no GPU can be asked: 8.6 is the RTX 30 series.
export CUDA_COMPUTE_CAP="${CUDA_COMPUTE_CAP:-86}"

# A target directory of its own: the other builds have other features, and would be built again.
cargo check --locked -p prima-engine --features cuda --target-dir target/cuda
