#!/usr/bin/env bash
# Fetches a run's results into runs/ of this checkout: metrics, report, tasks, trajectories and the policy.
#
#   sync.sh [--checkpoints] [--dry-run] [--env=FILE]
#
# --checkpoints: also these, which hold the optimiser and are several times the size of the policy. Run it
# before teardown.sh, for the disks go with the VMs. Settings: see env.sh.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

parse "$@"
settings
what=results
for option in "${ARGS[@]}"; do
  [[ $option == --checkpoints ]] || die "unknown option $option; sync.sh --help lists what it understands."
  what=all
done
archive=${TMPDIR:-/tmp}/coevolve_$RUN.tgz
on "$TPU" 0 "${VM[@]}" pack "$RUN" "$what"
run gcloud compute tpus tpu-vm scp "$TPU:coevolve_run.tgz" "$archive" "${PLACE[@]}" --worker=0
run mkdir -p "$ROOT/runs"
run tar -xzf "$archive" -C "$ROOT/runs"
