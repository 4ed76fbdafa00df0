#!/usr/bin/env bash
# Copies this checkout to the VMs and installs what learner and server need. May be run again after a change.
#
#   setup.sh [--code-only] [--dry-run] [--env=FILE]
#
# --code-only: copy the checkout and install nothing. Worker 0 of the learner shares /srv/coevolve with all
# other hosts (NFS inside the VPC), for the server reads the pushed weights from there and every host of a
# slice its part of a checkpoint. MODEL, if it is set and a model id, is downloaded into it.
# Settings: see env.sh.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ARCHIVE=${TMPDIR:-/tmp}/coevolve_jax.tgz
CODE_ONLY=no

parse "$@"
settings
for option in "${ARGS[@]}"; do
  [[ $option == --code-only ]] || die "unknown option $option; setup.sh --help lists what it understands."
  CODE_ONLY=yes
done

run tar -czf "$ARCHIVE" -C "$ROOT" --exclude-vcs --exclude='./.*' --exclude='./runs' --exclude='__pycache__' .
for vm in $(vms); do
  run gcloud compute tpus tpu-vm scp "$ARCHIVE" "$vm:coevolve_jax.tgz" "${PLACE[@]}" --worker=all
  on "$vm" all mkdir -p coevolve_jax
  on "$vm" all tar -xzf coevolve_jax.tgz -C coevolve_jax
done
if [[ $CODE_ONLY == yes ]]; then exit; fi

on "$TPU" 0 "${VM[@]}" share
if [[ $HOSTS -gt 1 || -n $SERVER_TPU ]]; then
  ask LEARNER_IP gcloud compute tpus tpu-vm describe "$TPU" "${PLACE[@]}" \
    --format='value(networkEndpoints[0].ipAddress)'
fi
if [[ $HOSTS -gt 1 ]]; then on "$TPU" all "${VM[@]}" mount "$LEARNER_IP"; fi
on "$TPU" all "${VM[@]}" setup-learner
if [[ -n $SERVER_TPU ]]; then on "$SERVER_TPU" 0 "${VM[@]}" mount "$LEARNER_IP"; fi
if has server; then on "${SERVER_TPU:-$TPU}" 0 "${VM[@]}" setup-server "$SGLANG_JAX_REF"; fi
if [[ -n $MODEL && $MODEL != /* ]]; then on "$TPU" 0 "${VM[@]}" download "$MODEL"; fi
