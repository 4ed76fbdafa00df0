#!/usr/bin/env bash
# Deletes the TPU VMs and their disks, with everything on them, and the queued requests in whatever state:
# also those that failed or were suspended, which stay in the list until somebody deletes them.
#
#   teardown.sh [--server-only | --learner-only] [--yes] [--dry-run] [--env=FILE]
#
# Asks before it does so; --yes does not. Ends with what is left in the zone. Settings: see env.sh.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

parse "$@"
settings
for option in "${ARGS[@]}"; do
  case $option in
    --server-only) only server; need SERVER_TPU server ;;
    --learner-only) only learner ;;
    *) die "unknown option $option; teardown.sh --help lists what it understands." ;;
  esac
done
if [[ $YES == no && $DRY_RUN == no ]]; then
  echo "This deletes $(vms | paste -sd' ') in $ZONE of $PROJECT, with all that sync.sh has not fetched."
  read -r -p "Go on? [y/N] " answer ||
    die "nobody answered, so nothing was deleted; --yes does not ask."
  [[ $answer == y || $answer == yes ]] || die "nothing was deleted."
fi
failed=()
for vm in $(vms); do
  if [[ $QUEUED == yes ]]; then
    # --force also deletes the VM that the request was granted.
    run gcloud compute tpus queued-resources delete "$vm-request" "${PLACE[@]}" --force --quiet ||
      failed+=("$vm-request")
  else
    run gcloud compute tpus tpu-vm delete "$vm" "${PLACE[@]}" --quiet || failed+=("$vm")
  fi
done
run gcloud compute tpus tpu-vm list "${PLACE[@]}"
run gcloud compute tpus queued-resources list "${PLACE[@]}"
[[ ${#failed[@]} -eq 0 ]] || die "gcloud did not delete ${failed[*]}; what the lists above show still costs."
