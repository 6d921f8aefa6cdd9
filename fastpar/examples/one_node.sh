#!/usr/bin/env bash
# One machine, all its GPUs (without any: two CPU ranks). A rank that dies or hangs is a restart from the last
# checkpoint; started again, by you or after a reboot, the same line goes on with the run in $RUN.
#
#   RUN=runs/night bash one_node.sh --model gpt2 --data hf:openwebtext --batch-size 96
#
# NPROC may differ from start to start if it divides the batch size. Ctrl-C, or kill, saves and ends.
set -euo pipefail

RUN=${RUN:-runs/night}
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
NPROC=${NPROC:-$((GPUS > 0 ? GPUS : 2))}

exec "${PYTHON:-python}" -m fastpar train \
  --nproc "$NPROC" --max-restarts "${MAX_RESTARTS:-10}" --timeout "${TIMEOUT:-10m}" \
  --auto-resume --out "$RUN" --save-every "${SAVE_EVERY:-500}" "$@"
