#!/usr/bin/env bash
# Several machines without a scheduler: start this on each of them. $HEAD is one of them, which keeps the rendezvous.
#
#   HEAD=node0:29400 RUN=/shared/runs/night bash several_nodes.sh --model gpt2 --batch-size 96
#
# The run starts with the least number of nodes in $NODES, and is started again from its last checkpoint whenever a
# node comes, leaves or loses a rank. So the batch size must be a multiple of every number of ranks there may be: 96
# for 1 to 4 nodes of 8. $RUN must be on a file system that all nodes share. --auto-resume is not optional here: a
# node that only learns of a failure elsewhere does not count it as a restart of its own.
set -euo pipefail

HEAD=${HEAD:?the host:port of one node, the same on all}
RUN=${RUN:?the folder of the run, on a file system that all nodes share}
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
NPROC=${NPROC:-$((GPUS > 0 ? GPUS : 1))}

# torch 2.13 otherwise ends the run when a node comes back.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# read_timeout: for how many seconds a node may be cut off before its torchrun gives up; then start this there again.
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "${NODES:-1:4}" --nproc-per-node "$NPROC" --max-restarts "${MAX_RESTARTS:-10}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${ID:-$(basename "$RUN")}" \
  --rdzv-conf "read_timeout=${CUT_OFF_S:-900}" \
  -m fastpar train --auto-resume --out "$RUN" \
  --timeout "${TIMEOUT:-10m}" --save-every "${SAVE_EVERY:-500}" "$@"
