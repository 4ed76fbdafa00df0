#!/usr/bin/env bash
# Settings and helpers of the scripts beside it, which source it. Settings are environment variables; they may
# stand in a file, one NAME=value a line, passed as --env=FILE. What every script understands:
#   --dry-run    print the commands, ready to paste, and run none of them
#   --env=FILE   read settings from FILE
#   --help       what the script does
#
# Needed        PROJECT      Google Cloud project
#               ZONE         zone with the TPU type: us-east5-b
#               TPU          name of the learner's TPU VM or slice: coevolve
#               ACCELERATOR  its type: v6e-8, v5litepod-8, v5p-8, v6e-16, ...
# Optional      ENGINE              sglang: a server generates; native: the learner's chips do, without a server
#               SERVER_TPU          name of a TPU VM for the server; empty: the learner's host serves too
#               SERVER_ACCELERATOR  its type, of one host (v6e-8)
#               RUNTIME             TPU software version; chosen by type if empty
#               QUEUED=yes|no       ask through the queue (yes) or at once (no)
#               SPOT=no|yes         cheaper, and may be taken away at any time
#               VALID_FOR           give up a queued request after this time: 6h
#               NETWORK             VPC network; its machines must reach each other
#               MODEL               for launch: a model id (Qwen/Qwen3-4B-Instruct-2507) or a folder on the VM
#               CONFIG, RUN         config file and name of the run (configs/bfcl_qwen3_4b.py, run)
#               PORT                of the server (30000)
#               SERVER_MEMORY       part of its chips' memory for weights and cache (0.7); an update needs
#                                   room for a second copy of the weights
#               SGLANG_JAX_REF      commit, tag or branch of sglang-jax (main)
#               SHARED              folder for models, runs and pushed weights, the same on all hosts (/srv/coevolve)
# shellcheck disable=SC2034  # the scripts that source this use what is set here
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SETTINGS=(PROJECT ZONE TPU ACCELERATOR ENGINE SERVER_TPU SERVER_ACCELERATOR RUNTIME QUEUED SPOT VALID_FOR
  NETWORK MODEL CONFIG RUN PORT SERVER_MEMORY SGLANG_JAX_REF SHARED)
DRY_RUN=no YES=no
ARGS=()

die() {
  echo "Error: $*" >&2
  exit 1
}

# The comment at the top of the script that is running.
usage() {
  sed -n '2,/^[^#]/{/^#/{s/^# \{0,1\}//;p}}' "$0"
}

# Reads the common options; the others are left in ARGS.
parse() {
  local option
  for option in "$@"; do
    case $option in
      --help | -h) usage; exit 0 ;;
      --dry-run) DRY_RUN=yes ;;
      --yes) YES=yes ;;
      --env=*) read_settings "${option#--env=}" ;;
      *) ARGS+=("$option") ;;
    esac
  done
}

# A file of NAME=value lines. It is read, not run.
read_settings() {
  [[ -f $1 ]] || die "there is no settings file $1; write one NAME=value a line."
  local line
  while IFS= read -r line || [[ -n $line ]]; do
    [[ -z $line || $line == \#* ]] && continue
    [[ " ${SETTINGS[*]} " == *" ${line%%=*} "* && $line == *=* ]] ||
      die "$1 has the line '$line'; a line is NAME=value, and NAME one of: ${SETTINGS[*]}."
    declare -g "${line%%=*}=${line#*=}"
  done < "$1"
}

no_more_options() {
  [[ ${#ARGS[@]} -eq 0 ]] || die "unknown option ${ARGS[0]}; $(basename "$0") --help lists the options."
}

# need NAME EXAMPLE: the setting must have a value.
need() {
  [[ -n ${!1:-} ]] || die "$1 is not set; for example: export $1=$2 (tpu_scripts/env.sh lists all settings)."
}

# one_of NAME VALUE...: the setting must be one of the values.
one_of() {
  local name=$1 value
  shift
  for value in "$@"; do
    if [[ ${!name} == "$value" ]]; then return; fi
  done
  die "$name is '${!name}'; it must be one of: $*."
}

# Defaults, and what no script can do without.
settings() {
  : "${QUEUED:=yes}" "${SPOT:=no}" "${VALID_FOR:=}" "${NETWORK:=default}" "${SERVER_TPU:=}" "${RUNTIME:=}"
  : "${CONFIG:=configs/bfcl_qwen3_4b.py}" "${RUN:=run}" "${MODEL:=}"
  : "${ENGINE:=sglang}" "${PORT:=30000}" "${SERVER_MEMORY:=0.7}" "${SGLANG_JAX_REF:=main}"
  : "${SHARED:=/srv/coevolve}"
  need PROJECT my-project
  need ZONE us-east5-b
  need TPU coevolve
  need ACCELERATOR v6e-8
  : "${SERVER_ACCELERATOR:=$ACCELERATOR}"
  one_of ENGINE sglang native
  one_of QUEUED yes no
  one_of SPOT yes no
  [[ $RUN =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || die "RUN is '$RUN'; use letters, digits, dots and dashes."
  [[ $PORT =~ ^[0-9]{2,5}$ ]] || die "PORT is '$PORT'; use a number such as 30000."
  [[ $SERVER_TPU != "$TPU" ]] || die "SERVER_TPU and TPU are both '$TPU'; leave SERVER_TPU empty to share it."
  PARTS=(server learner)
  if [[ $ENGINE == native ]]; then
    PARTS=(learner)
    [[ -z $SERVER_TPU ]] ||
      die "SERVER_TPU is '$SERVER_TPU', but ENGINE=native needs no server; leave it empty, or set ENGINE=sglang."
  fi
  VM=(bash coevolve_jax/tpu_scripts/vm.sh)
  if [[ $SHARED != /srv/coevolve ]]; then VM=(env "SHARED=$SHARED" "${VM[@]}"); fi
  PLACE=(--project="$PROJECT" --zone="$ZONE")
  CHIPS=$(chips "$ACCELERATOR") HOSTS=$(hosts "$ACCELERATOR")
  [[ -n $CHIPS && -n $HOSTS ]] ||
    die "ACCELERATOR is '$ACCELERATOR'; known are v6e-N, v5litepod-N, v5p-N and v4-N."
  SERVER_CHIPS=$(chips "$SERVER_ACCELERATOR")
  if [[ -n $SERVER_TPU ]]; then
    [[ $(hosts "$SERVER_ACCELERATOR") == 1 ]] ||
      die "SERVER_ACCELERATOR is '$SERVER_ACCELERATOR'; the server needs one host: v6e-8, v5litepod-8, v5p-8."
  fi
}

# has PART: whether there is such a part, server or learner, to do something with.
has() {
  [[ " ${PARTS[*]} " == *" $1 "* ]]
}

# only PART: an option asks for this one alone.
only() {
  [[ $1 != server || $ENGINE != native ]] ||
    die "ENGINE is 'native', so there is no server; leave out the option that names it, or set ENGINE=sglang."
  PARTS=("$1")
}

# How many chips a type has. v4 and v5p are named by cores, of which a chip has two.
chips() {
  case $1 in
    v6e-[1-9]* | v5litepod-[1-9]*) count "${1##*-}" 1 ;;
    v5p-[1-9]* | v4-[1-9]*) count "${1##*-}" 2 ;;
  esac
}

count() {
  if [[ $1 =~ ^[0-9]+$ ]]; then echo $(($1 / $2)); fi
}

# On how many hosts a type lies: up to 8 chips of v6e and v5e are one host, else 4 chips are.
hosts() {
  local n
  n=$(chips "$1")
  case $1:$n in
    *:) ;;
    v6e-*:[1-8] | v5litepod-*:[1-8]) echo 1 ;;
    *) echo $(((n + 3) / 4)) ;;
  esac
}

# The TPU software version for JAX of a type.
runtime() {
  case $1 in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v4-*) echo tpu-ubuntu2204-base ;;
  esac
}

# One line that a shell takes apart into these words again.
words() {
  local word line=""
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word="'${word//\'/"'\\''"}'"
    line+="$word "
  done
  echo "${line% }"
}

# Prints a command so that it can be pasted; @NAME@ stands for a value that `ask` will know.
quoted() {
  local word line=""
  for word in "$@"; do
    word=$(words "$word")
    while [[ $word =~ @(LEARNER_IP|SERVER_IP|STATE)@ ]]; do
      local value="\"\$${BASH_REMATCH[1]}\""
      if [[ $word == \'* ]]; then value="'$value'"; fi
      word=${word//"${BASH_REMATCH[0]}"/"$value"}
    done
    line+="$word "
  done
  echo "${line% }"
}

# Runs a command, or only prints it. All commands with effects go through here.
run() {
  if [[ $DRY_RUN == yes ]]; then
    quoted "$@"
  else
    echo "+ $(quoted "$@")" >&2
    "$@"
  fi
}

# ask NAME COMMAND...: the output of a command as a value for later ones.
ask() {
  local name=$1
  shift
  if [[ $DRY_RUN == yes ]]; then
    echo "$name=\"\$($(quoted "$@"))\""
    declare -g "$name=@$name@"
  else
    echo "+ $(quoted "$@")" >&2
    local output # assigned on its own line, or a failure would go unseen
    output=$("$@")
    declare -g "$name=$output"
  fi
}

# on VM WORKER COMMAND...: runs a command in the home folder on a worker of a TPU VM, or on all of them.
on() {
  local vm=$1 worker=$2
  shift 2
  run gcloud compute tpus tpu-vm ssh "$vm" "${PLACE[@]}" --worker="$worker" --command="$(words "$@")"
}

# The VMs of PARTS: the learner's and, if it has one of its own, the server's.
vms() {
  if has learner; then echo "$TPU"; fi
  if has server && [[ -n $SERVER_TPU ]]; then echo "$SERVER_TPU"; fi
}
