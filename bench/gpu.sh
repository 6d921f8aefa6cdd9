#!/usr/bin/env bash
# What `make gpu` runs on a machine with an NVIDIA GPU and no network: build there, GPU tests, all
# benches, results to bench/results/<gpu>_<date>.json, errors to bench/results/errors. Under 9 minutes
# on one H200; every part keeps what it has when its time is up, and no part's failure stops the
# others.
#
#   bench/gpu.sh                    tests, ops, errors, train, emulated and tp
#   bench/gpu.sh --part ops         one part: tests | ops | errors | tune | train | emulated | tp | profile | plan
#                                   (also several)
#   bench/gpu.sh --part ops --op attention --op gelu  of the ops only these
#   bench/gpu.sh --part emulated    overlap behind emulated links: alone it has time for all of them
#   bench/gpu.sh --part tp          tensor parallelism behind emulated links
#   bench/gpu.sh --part profile     fastpar profile of GPT-2 124M: trace, timeline, verdict; to $OUT/profile
#   bench/gpu.sh --part plan        rates of the GPU; GPT-2 124M to 1.5B predicted and measured: memory, step time
#   bench/gpu.sh --part tune        tiles of the attention kernels: writes kernels/attention_configs.json
#   bench/gpu.sh --device cpu --quick --part ops      the same code without a GPU, tiny shapes
#
# PYTHON names the interpreter: it needs torch, pybind11, ninja, setuptools, numpy, pytest.
# FASTPAR_GPU_BUILD=pip|inplace|none builds one way only (default: pip, then inplace).
# FASTPAR_COMMIT names the commit where git is missing. Logs, and results when OUT is set, go to $OUT.
set -uo pipefail
cd "$(dirname "$0")/.."

PARTS="" DEVICE=cuda QUICK="" OPS=()
usage() {
  echo "gpu.sh: expected --part tests|ops|errors|tune|train|emulated|tp|profile|plan, --op NAME, --device cuda|cpu or --quick, got $1;" \
    "see bench/gpu.sh" >&2
  exit 2
}
while (($#)); do
  case "$1 ${2:-}" in
    "--part tests" | "--part ops" | "--part errors" | "--part tune" | "--part train" | "--part emulated" | "--part tp" | "--part profile" | "--part plan") PARTS+=" $2"; shift 2 ;;
    "--op "?*) OPS+=("$2"); shift 2 ;;
    "--device cuda" | "--device cpu") DEVICE=$2; shift 2 ;;
    "--quick "*) QUICK=--quick; shift ;;
    *) usage "$1 ${2:-}" ;;
  esac
done
PARTS=${PARTS:-tests ops errors train emulated tp}
# The issue's targets first, in case the time runs out.
((${#OPS[@]})) || OPS=(ceilings adamw global_norm bucket quantize attention layer_norm linear_cross_entropy
  cross_entropy gelu embedding philox linear)
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

# For $OUT: the newest result file, the newest error ledger, a table of tiles that was tuned.
bring_results() {
  [[ -n ${OUT:-} ]] || return 0
  local newest
  newest=$(ls -t bench/results/*.json build/bench/{full,quick}/*.json 2>/dev/null | head -n 1)
  [[ -z $newest ]] || cp "$newest" "$OUT/"
  newest=$(ls -t bench/results/errors/*.json build/bench/errors/*.json 2>/dev/null | head -n 1)
  [[ -z $newest ]] || { mkdir -p "$OUT/errors" && cp "$newest" "$OUT/errors/"; }
  [[ $PARTS != *tune* ]] || cp kernels/attention_configs.json "$OUT/"
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

# run_logged <name> <arguments of python -m bench>
run_logged() {
  local started=$SECONDS name=$1
  shift
  "$PYTHON" -m bench "$@" 2>&1 | tee "$LOGS/bench_$name.log"
  if ((PIPESTATUS[0])); then
    fail "bench $name: something failed or was refused, see above"
  else
    note "bench $name: done"
  fi
  echo "($((SECONDS - started)) s)"
  bring_results
}

TARGET=--commit-results
[[ -z $QUICK ]] || TARGET=--quick

# Alone, the part tests runs the whole suite but the slow ones; beside others, what a GPU can change:
# the tests that need one and those of the ops, their Triton kernels first.
ALONE=$([[ $PARTS == *ops* || $PARTS == *train* ]] && echo 0 || echo 1)
# Seconds that the parts after this one need.
reserve() {
  local seconds=0
  [[ $1 == errors || $PARTS != *errors* ]] || seconds=45
  [[ $1 == train || $PARTS != *train* ]] || seconds=$((seconds + 130))
  [[ $1 == emulated || $PARTS != *emulated* ]] || seconds=$((seconds + 45))
  [[ $1 == tp || $PARTS != *tp* ]] || seconds=$((seconds + 45))
  [[ $1 == plan || $PARTS != *plan* ]] || seconds=$((seconds + 200))
  echo "$seconds"
}
least() { echo $(($1 < $2 ? $1 : $2)); }
for part in $PARTS; do
  echo "=== $part ($((LIMIT_S - SECONDS)) s left)"
  case $part in
    tests)
      run_tests "$(least 100 $((LIMIT_S - SECONDS)))" gpu -m gpu
      selected=(-m "not slow and not gpu")
      if ((!ALONE)); then
        for file in tests/ops/test_*_cuda.py; do
          [[ ! -e $file ]] || selected+=("$file")
        done
        for file in $(ls kernels/*_triton.py) $(ls kernels/*.py | grep -v _triton.py); do
          file=tests/ops/test_$(basename "$file" .py).py
          [[ ! -e $file ]] || selected+=("$file")
        done
      fi
      "$PYTHON" -c 'import xdist' 2>/dev/null && selected+=(-n 8)
      run_tests "$(least $((ALONE ? 400 : 100)) $((LIMIT_S - SECONDS)))" rest "${selected[@]}"
      ;;
    ops)
      run_logged ops "${OPS[@]}" --device "$DEVICE" $TARGET \
        --total-limit $((LIMIT_S - SECONDS - $(reserve ops)))
      ;;
    errors)
      run_logged errors errors --device "$DEVICE" $TARGET \
        --total-limit $((LIMIT_S - SECONDS - $(reserve errors)))
      ;;
    tune)
      run_logged tune attention --tune --device "$DEVICE" --commit-results \
        --total-limit $((LIMIT_S - SECONDS - $(reserve tune)))
      ;;
    train)
      run_logged train train --device "$DEVICE" $TARGET \
        --total-limit $((LIMIT_S - SECONDS - $(reserve train)))
      ;;
    emulated)  # as far as the time goes: it begins with what tells most
      FASTPAR_EMULATED_S=$((LIMIT_S - SECONDS - 15 - $(reserve emulated))) \
        run_logged emulated emulated --device "$DEVICE" $TARGET --total-limit $((LIMIT_S - SECONDS))
      ;;
    tp)
      FASTPAR_EMULATED_S=$((LIMIT_S - SECONDS - 15)) run_logged tp tp \
        --device "$DEVICE" $TARGET --total-limit $((LIMIT_S - SECONDS - $(reserve tp)))
      ;;
    plan)  # alone: it needs most of the time
      run_logged plan plan --device "$DEVICE" $TARGET --total-limit $((LIMIT_S - SECONDS))
      ;;
    profile)
      rm -rf "$LOGS/profile"
      KINETO_LOG_LEVEL=6 timeout --kill-after=10 $((LIMIT_S - SECONDS)) "$PYTHON" -m bench.systems.profile_gpt2 \
        --device "$DEVICE" $QUICK --out "$LOGS/profile" 2>&1 | tee "$LOGS/profile.log"
      if ((PIPESTATUS[0])); then fail "profile: failed, see above"; else note "profile: done"; fi
      ;;
  esac
done

echo "=== summary ($SECONDS s after the build)"
printf '%s' "$STATUS"
exit $FAILED
