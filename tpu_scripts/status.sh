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
  # Until the queue has given it, the VM does not exist; until setup.sh, there is nothing on it to ask.
  run gcloud compute tpus tpu-vm describe "$vm" "${PLACE[@]}" --format='value(state,health)' ||
    { echo "$vm: not there yet"; continue; }
  on "$vm" all "${VM[@]}" status "$RUN" "${PARTS[@]}" ||
    echo "$vm: it tells nothing; setup.sh comes first"
done
