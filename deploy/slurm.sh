#!/bin/bash
# One engine on several nodes under Slurm: Slurm starts a task for every GPU, each task one rank.
#
#   ENGINE=/shared/engine IMAGE=registry/cog-triton-runner-90 sbatch deploy/slurm.sh
#
# Rank 0 has Cog on PORT and Triton's ports on the first node; docs/multi-gpu.md tells more. ENGINE is
# an engine directory that all nodes see. IMAGE is for pyxis (srun --container-image); without it,
# cog-triton is taken from PATH. Put your account and partition here or on sbatch's command line.
#SBATCH --job-name=cog-triton
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=1-00:00:00
#SBATCH --requeue
# A minute before the end of its time, and with `scancel --batch --signal=TERM JOB`, streams are let end.
#SBATCH --signal=B:TERM@60
#SBATCH --open-mode=append
#SBATCH --output=cog-triton-%j.out
set -euo pipefail

export ENGINE=${ENGINE:?set ENGINE to an engine directory that all nodes see}
export WORLD_SIZE=$SLURM_NTASKS PORT=${PORT:-5000}
container=()
if [[ -n ${IMAGE:-} ]]; then
  mounts=$ENGINE,$SLURM_SUBMIT_DIR
  # By their directories: a file that is replaced would stay the old one in the container.
  for file in "${COG_TRITON_KEYS:-}" "${TLS_CERT_FILE:-}" "${TLS_KEY_FILE:-}"; do
    [[ -z $file ]] || mounts+=",$(dirname "$file")"
  done
  container=("--container-image=$IMAGE" "--container-mounts=$mounts")
fi

# TensorRT-LLM has to know on how many machines its ranks are.
if [[ -z ${COG_TRITON_CONFIG:-} ]]; then
  export COG_TRITON_CONFIG=$SLURM_SUBMIT_DIR/cog-triton-$SLURM_JOB_ID.yaml
  echo "tensorrt_llm: {args: {num_nodes: $SLURM_JOB_NUM_NODES}}" >"$COG_TRITON_CONFIG"
  trap 'rm -f "$COG_TRITON_CONFIG"' EXIT
fi

echo "cog-triton: $WORLD_SIZE ranks on $SLURM_JOB_NODELIST; http${TLS_CERT_FILE:+s}://$(hostname):$PORT"
# Rank 0 drains when asked from its own machine, which is this one; to signal the tasks would end all of them.
stopping=
stop() {
  stopping=1
  if [[ -n ${TLS_CERT_FILE:-} ]]; then # of another name than 127.0.0.1; no key is needed
    curl -ksf -m 10 -o /dev/null -X POST "https://127.0.0.1:$PORT/shutdown"
    return $?
  fi
  local answer=
  { exec 3<>"/dev/tcp/127.0.0.1/$PORT"; } 2>/dev/null &&
    printf 'POST /shutdown HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n' >&3 &&
    read -r -t 10 answer <&3
  [[ $answer == *" 200 "* ]]
}
trap 'stop || kill $srun' TERM

# The death of one task ends them all, and Slurm requeues the job if it has failed.
status=0
srun --mpi=pmix --kill-on-bad-exit=1 --wait=15 "${container[@]}" bash -c '
  export COG_TRITON_RANK=$SLURM_PROCID
  export COG_TRITON_WORK_DIR=/tmp/cog-triton-$SLURM_JOB_ID-$SLURM_PROCID
  if [[ $SLURM_PROCID == 0 ]]; then
    exec cog-triton serve "$ENGINE" --host "${COG_HOST:-0.0.0.0}"
  fi
  # Rank 0 is told of a death before Slurm kills it, so that its streams end with E2105.
  trap "" USR1
  cog-triton serve "$ENGINE" --triton-only && exit
  status=$?
  scancel --signal=USR1 "$SLURM_JOB_ID.$SLURM_STEP_ID" && sleep 3
  exit $status
' &
srun=$!
while kill -0 "$srun" 2>/dev/null; do
  wait "$srun" && status=0 || status=$?
done
if [[ -n $stopping ]]; then
  exit 0
fi
if ((status)) && [[ -n ${REQUEUE:-} ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
