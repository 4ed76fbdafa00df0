#!/usr/bin/env bash
# Fetches a run's results into runs/ of this checkout: metrics, report, tasks, trajectories and the policy.
#
#   sync.sh [--checkpoints] [--dry-run] [--env=FILE]
#
# --checkpoints: also the newest of these, which holds the optimiser and is several times the size of the
# policy. The run may go on meanwhile. Run it before teardown.sh, for the disks go with the VMs.
# Settings: see env.sh.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

parse "$@"
settings
what=results
for option in "${ARGS[@]}"; do
  [[ $option == --checkpoints ]] || die "unknown option $option; sync.sh --help lists what it understands."
  what=all
done
run mkdir -p "$ROOT/runs"
on "$TPU" 0 "${VM[@]}" pack "$RUN" "$what"
fetched=yes
run gcloud compute tpus tpu-vm scp "$TPU:coevolve_packed/$RUN" "$ROOT/runs/" "${PLACE[@]}" --worker=0 \
  --recurse || fetched=no
on "$TPU" 0 "${VM[@]}" unpack # what the run has deleted since takes room until then
[[ $fetched == yes ]] || die "gcloud did not copy $RUN to $ROOT/runs; run sync.sh again."
