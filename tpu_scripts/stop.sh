#!/usr/bin/env bash
# Stops training and server; the VMs stay, and cost. launch.sh goes on with the run from its last checkpoint.
#
#   stop.sh [server | learner] [--force] [--dry-run] [--env=FILE]
#
# All there is if nothing else is said. The learner ends its update and saves, however long that takes.
# --force kills at once: what came after the last checkpoint is lost. Settings: see env.sh.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

parse "$@"
settings
force=()
for option in "${ARGS[@]}"; do
  case $option in
    server | learner) only "$option" ;;
    --force) force=(--force) ;;
    *) die "unknown option $option; stop.sh --help lists what it understands." ;;
  esac
done
for part in learner server; do # the learner first, which would miss its server
  has "$part" || continue
  vm=$TPU
  if [[ $part == server ]]; then vm=${SERVER_TPU:-$TPU}; fi
  on "$vm" all "${VM[@]}" stop "$part" "${force[@]}"
done
