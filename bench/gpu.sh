#!/usr/bin/env bash
# What `make gpu` runs on a machine with an NVIDIA GPU and no network: the build, then a part of
# bench/gpu.py. From a plain copy of the tree, without .git, too.
#
#   bench/gpu.sh --part 1                     is it right: smoke, proofs, tests, sanitizer
#   bench/gpu.sh --part 2                     is it fast: GPT-2 124M and larger, memory, profile
#   bench/gpu.sh --part 3                     tiles, single ops, emulated links
#   bench/gpu.sh                              all three, one after another
#   bench/gpu.sh --part 1 --device cpu --quick    a rehearsal without a GPU, tiny shapes
#
# A part takes less than 9 minutes with its build. What it found is one archive in $OUT (default
# build/gpu), complete after every step; `python -m bench ingest ARCHIVE` makes results of it.
#
# PYTHON names the interpreter: it needs torch, pybind11, ninja, setuptools, numpy, pytest.
# FASTPAR_GPU_BUILD=pip|inplace|none builds one way only (default: pip, then inplace).
# FASTPAR_COMMIT names the commit where git is missing.
set -uo pipefail
cd "$(dirname "$0")/.."
STARTED=$(date +%s)
PYTHON=${PYTHON:-$(test -x .venv/bin/python && echo "$PWD/.venv/bin/python" || echo python3)}
OUT=${OUT:-$PWD/build/gpu}
mkdir -p "$OUT" build
export PYTHONUNBUFFERED=1
# Of the toolkit: compute-sanitizer is often not on the PATH.
PATH=$PATH:/usr/local/cuda/bin:/opt/cuda/bin

# Where pip cannot install. From a copy without pyproject.toml: setuptools below 77 refuses its license.
build_inplace() {
  local copy=build/plain
  rm -rf "$copy"
  mkdir -p "$copy"
  cp -r setup.py csrc "$copy/"
  (cd "$copy" && "$PYTHON" setup.py -q build_ext --build-lib lib) &&
    cp "$copy"/lib/fastpar/kernels/_C*.so kernels/
}
# And then: fastpar/ and kernels/ as one package out of links. The working directory
# must stay off the path then (its fastpar/ has no kernels/), hence the safe path.
make_shim() {
  local shim=$PWD/build/shim
  rm -rf "$shim"
  mkdir -p "$shim/fastpar"
  ln -s "$PWD"/fastpar/* "$shim/fastpar/"
  ln -s "$PWD/kernels" "$shim/fastpar/kernels"
  ln -s "$PWD/bench" "$shim/bench"
  export PYTHONPATH="$shim${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
}
build() {
  local how=${FASTPAR_GPU_BUILD:-}
  if [[ ${how:-pip} == pip ]] &&
    "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --no-index -e .; then
    echo "built: pip install -e ."
  elif [[ ${how:-inplace} == inplace ]] && build_inplace; then
    make_shim
    echo "built: setup.py build_ext, imported from build/shim"
  elif [[ $how != none ]]; then
    return 1
  fi
  (cd build && "$PYTHON" -m fastpar.kernels.backend)
}
# Not in a subshell: make_shim exports.
build >build/gpu_build.log 2>&1 || { cat build/gpu_build.log; echo "gpu.sh: the build failed" >&2; exit 1; }
exec "$PYTHON" -m bench.gpu --started "$STARTED" --build-log build/gpu_build.log --out "$OUT" "$@"
