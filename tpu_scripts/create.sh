#!/usr/bin/env bash
# Creates the TPU VMs, which costs money from the moment they exist until teardown.sh.
#
#   create.sh [--server-only | --learner-only] [--wait] [--dry-run] [--env=FILE]
#
# --wait: with QUEUED=yes, ask every minute until the requests are granted. Without it the command returns at
# once; status.sh shows how far they are. Settings: see env.sh.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
WAIT=no

create() {
  local name=$1 type=$2
  local flags=("${PLACE[@]}" --accelerator-type="$type" --network="$NETWORK")
  if [[ $SPOT == yes ]]; then flags+=(--spot); fi
  if [[ $QUEUED == yes ]]; then
    if [[ -n $VALID_FOR ]]; then flags+=(--valid-until-duration="$VALID_FOR"); fi
    run gcloud compute tpus queued-resources create "$name-request" --node-id="$name" \
      --runtime-version="${RUNTIME:-$(runtime "$type")}" "${flags[@]}"
  else
    run gcloud compute tpus tpu-vm create "$name" --version="${RUNTIME:-$(runtime "$type")}" "${flags[@]}"
  fi
}

await() {
  local request=$1-request
  while true; do
    ask STATE gcloud compute tpus queued-resources describe "$request" "${PLACE[@]}" \
      --format='value(state.state)'
    case $STATE in
      ACTIVE | @*) return ;;
      FAILED | SUSPENDED | SUSPENDING)
        die "$request is $STATE; status.sh tells why. Run teardown.sh and try another ZONE or type." ;;
    esac
    echo "$request: ${STATE:-unknown}" >&2
    sleep 60
  done
}

parse "$@"
settings
for option in "${ARGS[@]}"; do
  case $option in
    --wait) WAIT=yes ;;
    --server-only) only server; need SERVER_TPU server ;;
    --learner-only) only learner ;;
    *) die "unknown option $option; create.sh --help lists what it understands." ;;
  esac
done
for vm in $(vms); do
  if [[ $vm == "$TPU" ]]; then create "$vm" "$ACCELERATOR"; else create "$vm" "$SERVER_ACCELERATOR"; fi
done
if [[ $WAIT == yes && $QUEUED == yes ]]; then
  for vm in $(vms); do await "$vm"; done
fi
