#!/usr/bin/env bash
# Checks and times the package on a machine with an NVIDIA GPU and no network, from a plain copy of the
# tree, without .git, too. It writes report.json, report.txt and logs.tar.gz into $OUT (default build/gpu).
#
#   bench/gpu.sh                            all of it: 590 seconds
#   bench/gpu.sh --limit 280                in two calls of 280: the second does what the first left
#   bench/gpu.sh --device cpu --quick       a rehearsal without a GPU, tiny shapes
#   bench/gpu.sh pack                       on a machine without a GPU: builds into build/gpu_pack what is then
#                                           not compiled (Python 3.12, torch 2.11, Triton 3.6, nvcc)
#
# PYTHON names the interpreter: it needs torch, triton, numpy, safetensors, tqdm, pytest, pytest-timeout, for one
# cell transformers, and where nothing is carried pybind11, ninja and setuptools.
set -uo pipefail
cd "$(dirname "$0")/.."
STARTED=$(date +%s)
PYTHON=${PYTHON:-$(test -x .venv/bin/python && echo "$PWD/.venv/bin/python" || echo python3)}
OUT=${OUT:-$PWD/build/gpu}
PACK=$PWD/build/gpu_pack
mkdir -p "$OUT" build
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTORCH_NVML_BASED_CUDA_CHECK=1
# For this GPU alone, or an H100: half of the time of a build for all.
ARCH=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
export FASTPAR_CUDA_ARCHS=${FASTPAR_CUDA_ARCHS-$([[ ${ARCH:-90} == 90 ]] && echo 90a || echo "$ARCH")}

# fastpar/ and kernels/ as one package out of links. The working directory must stay off the path
# then (its fastpar/ has no kernels/), hence the safe path.
make_shim() {
  local shim=$PWD/build/shim
  rm -rf "$shim"
  mkdir -p "$shim/fastpar/kernels"
  ln -s "$PWD"/fastpar/* "$shim/fastpar/"
  ln -s "$PWD"/kernels/*.py "$PWD"/kernels/[a-z]*/ "$shim/fastpar/kernels/"
  ln -s "$PWD/bench" "$shim/bench"
  ln -s "$PWD/bench/triton_key.py" "$shim/sitecustomize.py"
  export PYTHONPATH="$shim${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
}
# The module and the library for this torch, in a copy, whose objects are those of this Python.
build_module() {
  local copy=build/plain
  mkdir -p "$copy"
  rm -rf "$copy/csrc" "$copy/lib"  # a file that went must not be compiled, nor another Python's carried
  cp -rp setup.py csrc "$copy/"
  (cd "$copy" && "$PYTHON" setup.py -q build_ext --build-lib lib) && cp -p "$copy"/lib/fastpar/kernels/_*.so "$1/"
}
digest() { (LC_ALL=C; cat setup.py csrc/*.* csrc/torch/* | sha256sum | cut -c 1-16); }
# A package whose library is for another torch can be imported, too: torch then computes everything.
loads() {
  (cd build && "$PYTHON" -c 'from fastpar.kernels import _C, backend; print(backend.describe()); assert _C is not None')
}

make_shim
if [[ ${1:-} == pack ]]; then
  rm -rf "$PACK"
  mkdir -p "$PACK"
  FASTPAR_CUDA=1 build_module "$PACK" && digest >"$PACK/digest" || exit 1
  cp -p "$PACK"/_*.so build/shim/fastpar/kernels/
  loads || exit 1
  TRITON_CACHE_DIR=$PWD/build/pack_cache "$PYTHON" -m bench.gpu_checks pack || exit 1
  tar -C build/pack_cache -czf "$PACK/triton.tar.gz" .
  du -sh "$PACK"/*
  exit
fi
if [[ -f $PACK/triton.tar.gz ]]; then
  export TRITON_CACHE_DIR=$PWD/build/triton_cache
  mkdir -p "$TRITON_CACHE_DIR"
  tar -C "$TRITON_CACHE_DIR" -xzf "$PACK/triton.tar.gz"
fi
how=carried
[[ -f $PACK/digest && $(cat "$PACK/digest") != "$(digest)" ]] && echo "gpu.sh: the pack is of another csrc/" >&2
if [[ $(cat "$PACK/digest" 2>/dev/null) == "$(digest)" ]] && cp -p "$PACK"/_*.so build/shim/fastpar/kernels/ &&
  { loads >build/gpu_build.log 2>&1 || { tail -n 3 build/gpu_build.log >&2; false; }; }; then
  :
elif compgen -G "kernels/_C*.so" >/dev/null && rm -f build/shim/fastpar/kernels/_*.so &&
  ln -s "$PWD"/kernels/_*.so build/shim/fastpar/kernels/ && loads >build/gpu_build.log 2>&1; then
  how=installed
else
  how=built
  rm -f build/shim/fastpar/kernels/_*.so
  build_module build/shim/fastpar/kernels >build/gpu_build.log 2>&1 && loads >>build/gpu_build.log 2>&1 ||
    { cat build/gpu_build.log; echo "gpu.sh: the build failed" >&2; exit 1; }
fi
echo "module: $how, after $(($(date +%s) - STARTED)) s"
exec "$PYTHON" -m bench.gpu_checks run "$@" --started "$STARTED" --out "$OUT"
