#!/usr/bin/env bash
# Starts the server, if there is one, waits until it answers, and starts the training. Both go on when the
# connection ends.
#
#   launch.sh [--server-only | --learner-only] [--dry-run] [--env=FILE] [-- OPTION...]
#
# What follows -- goes to experiments/main.py: launch.sh -- --config.steps=20 --config.learner.remat=False
# The same command after stop.sh or a lost spot VM goes on with the run. Settings: see env.sh.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# Chips of the learner and of the server: halves of one host where they share it, else all of each.
split() {
  SERVER_PART=all LEARNER_PART=all
  if [[ -n $SERVER_TPU || $ENGINE == native ]]; then
    LEARNER_CHIPS=$CHIPS HOST=0.0.0.0
    return
  fi
  HOST=127.0.0.1
  [[ $HOSTS == 1 ]] ||
    die "$ACCELERATOR has $HOSTS hosts, and a slice of several cannot be shared; set SERVER_TPU, or ENGINE=native."
  case $CHIPS in
    8) SERVER_PART=0,1,2,3 LEARNER_PART=4,5,6,7 ;;
    4) SERVER_PART=0,1 LEARNER_PART=2,3 ;;
    *) die "$ACCELERATOR has $CHIPS chip(s); sharing a host needs 4 or 8. Or set SERVER_TPU, or ENGINE=native." ;;
  esac
  LEARNER_CHIPS=$((CHIPS / 2)) SERVER_CHIPS=$((CHIPS / 2))
}

server() {
  on "${SERVER_TPU:-$TPU}" 0 "${VM[@]}" server "$SERVER_PART" "$HOST" "$PORT" "$FOLDER" "$SERVER_CHIPS" \
    "$SERVER_MEMORY"
}

learner() {
  if [[ -n $SERVER_TPU ]]; then
    ask SERVER_IP gcloud compute tpus tpu-vm describe "$SERVER_TPU" "${PLACE[@]}" \
      --format='value(networkEndpoints[0].ipAddress)'
  fi
  local flags=(--config="$CONFIG" --workdir="$SHARED/runs/$RUN" --config.model="$FOLDER"
    --config.engine.name="$ENGINE" --config.mesh.fsdp="$LEARNER_CHIPS")
  if [[ $ENGINE == sglang ]]; then
    flags+=(--config.engine.url="http://${SERVER_IP:-127.0.0.1}:$PORT")
  elif [[ $LEARNER_CHIPS -gt 1 ]]; then
    flags+=(--config.engine.sharded=True)
  fi
  # A batch's rows are split over the chips; configs/bfcl_qwen3_4b.py has 8.
  if [[ $LEARNER_CHIPS -gt 8 ]]; then flags+=(--config.learner.rows_per_microbatch="$LEARNER_CHIPS"); fi
  if [[ $HOSTS -gt 1 ]]; then flags+=(--processes=auto); fi
  on "$TPU" all "${VM[@]}" learner "$LEARNER_PART" "${flags[@]}" "${EXTRA[@]}"
}

OWN=() EXTRA=()
while [[ $# -gt 0 && $1 != -- ]]; do OWN+=("$1"); shift; done
if [[ $# -gt 0 ]]; then EXTRA=("${@:2}"); fi
parse "${OWN[@]}"
settings
need MODEL Qwen/Qwen3-4B-Instruct-2507
for option in "${ARGS[@]}"; do
  case $option in
    --server-only) only server ;;
    --learner-only) only learner ;;
    *) die "unknown option $option; options of experiments/main.py stand after --, see launch.sh --help." ;;
  esac
done
if [[ $MODEL == /* ]]; then FOLDER=$MODEL; else FOLDER=$SHARED/models/${MODEL##*/}; fi
split
for part in "${PARTS[@]}"; do "$part"; done
