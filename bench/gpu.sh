#!/usr/bin/env bash
# What `make gpu` runs on a machine with an NVIDIA GPU and no network: build there, GPU tests, all
# benches, results to bench/results/<gpu>_<date>.json. Under 9 minutes on one H200; every part keeps
# what it has when its time is up, and no part's failure stops the others.
#
#   bench/gpu.sh                    everything
#   bench/gpu.sh --part ops         one part: tests | ops | train (may be given several times)
#   bench/gpu.sh --device cpu --quick --part ops      the same code without a GPU, tiny shapes
#
# PYTHON names the interpreter: it needs torch, pybind11, ninja, setuptools, numpy, pytest.
# FASTPAR_GPU_BUILD=pip|inplace|none builds one way only (default: pip, then inplace).
# FASTPAR_COMMIT names the commit where git is missing. Logs, and results when OUT is set, go to $OUT.
set -uo pipefail
cd "$(dirname "$0")/.."

PARTS="" DEVICE=cuda QUICK=""
usage() {
  echo "gpu.sh: expected --part tests|ops|train, --device cuda|cpu or --quick, got $1; see bench/gpu.sh" >&2
  exit 2
}
while (($#)); do
  case "$1 ${2:-}" in
    "--part tests" | "--part ops" | "--part train") PARTS+=" $2"; shift 2 ;;
    "--device cuda" | "--device cpu") DEVICE=$2; shift 2 ;;
    "--quick "*) QUICK=--quick; shift ;;
    *) usage "$1 ${2:-}" ;;
  esac
done
PARTS=${PARTS:-tests ops train}
LIMIT_S=520  # of all parts together; the build comes before
LOGS=${OUT:-build/gpu}
mkdir -p "$LOGS"

PYTHON=${PYTHON:-$(test -x .venv/bin/python && echo "$PWD/.venv/bin/python" || echo python3)}
if [[ $DEVICE == cuda ]] && ! "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu.sh: expected a GPU that torch can use, got none from $PYTHON; set PYTHON or use --device cpu" >&2
  exit 2
fi
export PYTHONUNBUFFERED=1

# One line for the summary.
STATUS="" FAILED=0
note() {
  STATUS+="$1"$'\n'
  echo "== $1"
}
fail() {
  FAILED=1
  note "$1"
}

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
  (cd "$LOGS" && "$PYTHON" -m fastpar.kernels.backend)
}
# Not in a subshell: make_shim exports.
build >"$LOGS/build.log" 2>&1 || { cat "$LOGS/build.log"; echo "gpu.sh: the build failed" >&2; exit 1; }
tail -n 25 "$LOGS/build.log"
SECONDS=0

# Newest result file of this device, for $OUT.
bring_results() {
  [[ -n ${OUT:-} ]] || return 0
  local newest
  newest=$(ls -t bench/results/*.json build/bench/*/*.json 2>/dev/null | head -n 1)
  [[ -z $newest ]] || cp "$newest" "$OUT/"
}
trap bring_results EXIT

# run_tests <limit> <name> <pytest arguments>: red tests and a timeout fail the part, visibly.
run_tests() {
  local limit=$1 log="$LOGS/tests_$2.log" name=$2 started=$SECONDS status
  shift 2
  timeout --signal=INT --kill-after=10 "$limit" "$PYTHON" -m pytest -q --timeout=120 \
    -p no:cacheprovider --durations=5 "$@" >"$log" 2>&1
  status=$?
  grep -E "^(FAILED|ERROR)" "$log" | head -n 30
  local line
  line=$(grep -E "[0-9]+ (passed|failed|skipped|error|deselected)" "$log" | tail -n 1)
  case $status in
    0) note "tests $name: $line" ;;
    5) note "tests $name: none is collected here" ;;
    124 | 137) fail "tests $name: stopped after $limit s; ${line:-no summary}" ;;
    *) fail "tests $name: exit code $status; ${line:-see $log}" ;;
  esac
  echo "($((SECONDS - started)) s)"
}
run_bench() {
  local started=$SECONDS limit=$1 name=$2 target=--commit-results
  shift 2
  [[ -z $QUICK ]] || target=--quick
  "$PYTHON" -m bench "$@" --device "$DEVICE" $target --total-limit "$limit" 2>&1 |
    tee "$LOGS/bench_$name.log"
  if ((PIPESTATUS[0])); then
    fail "bench $name: something failed or was refused, see above"
  else
    note "bench $name: done"
  fi
  echo "($((SECONDS - started)) s)"
  bring_results
}

# Alone, the part tests runs the whole suite but the slow ones; beside others, what a GPU can change:
# the tests that need one and those of the ops.
ALONE=$([[ $PARTS == *ops* || $PARTS == *train* ]] && echo 0 || echo 1)
least() { echo $(($1 < $2 ? $1 : $2)); }
for part in $PARTS; do
  echo "=== $part ($((LIMIT_S - SECONDS)) s left)"
  case $part in
    tests)
      run_tests "$(least 100 $((LIMIT_S - SECONDS)))" gpu -m gpu
      selected=(-m "not slow and not gpu")
      if ((!ALONE)); then
        for file in kernels/*.py; do
          file=tests/test_$(basename "$file" .py).py
          [[ ! -e $file ]] || selected+=("$file")
        done
      fi
      "$PYTHON" -c 'import xdist' 2>/dev/null && selected+=(-n 8)
      run_tests "$(least $((ALONE ? 400 : 70)) $((LIMIT_S - SECONDS)))" rest "${selected[@]}"
      ;;
    ops)
      run_bench $((LIMIT_S - SECONDS - ($([[ $PARTS == *train* ]] && echo 160 || echo 0)))) ops \
        ceilings attention layer_norm adamw linear_cross_entropy gelu embedding linear philox
      ;;
    train) run_bench $((LIMIT_S - SECONDS)) train train ;;
  esac
done

echo "=== summary ($SECONDS s after the build)"
printf '%s' "$STATUS"
exit $FAILED
