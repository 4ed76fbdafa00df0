#!/usr/bin/env bash
# Shows what exists, what runs and how far the training is.
#
#   status.sh [--dry-run] [--env=FILE]
#
# Settings: see env.sh.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

parse "$@"
settings
no_more_options
for vm in $(vms); do
  if [[ $QUEUED == yes ]]; then
    run gcloud compute tpus queued-resources describe "$vm-request" "${PLACE[@]}" --format='yaml(state)'
  fi
  run gcloud compute tpus tpu-vm describe "$vm" "${PLACE[@]}" --format='value(state,health)'
  on "$vm" all bash coevolve_jax/tpu_scripts/vm.sh status "$RUN" "${PARTS[@]}"
done
