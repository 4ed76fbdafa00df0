#!/usr/bin/env bash
# Shows the end of a log.
#
#   logs.sh [server | learner] [--worker=N] [--follow] [--dry-run] [--env=FILE]
#
# The learner's of worker 0 if nothing else is said. Settings: see env.sh.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

parse "$@"
settings
part=learner worker=0 follow=()
for option in "${ARGS[@]}"; do
  case $option in
    server | learner) only "$option"; part=$option ;;
    --worker=*) worker=${option#--worker=} ;;
    --follow) follow=(-f) ;;
    *) die "unknown option $option; logs.sh --help lists what it understands." ;;
  esac
done
vm=$TPU
if [[ $part == server ]]; then vm=${SERVER_TPU:-$TPU}; fi
on "$vm" "$worker" tail -n 100 "${follow[@]}" "coevolve_logs/$part.log"
