#!/usr/bin/env bash
# What the other scripts run on a TPU VM, in the home folder of the user that gcloud logs in as.
#
#   vm.sh share                    shares /srv/coevolve with the other machines of the VPC
#   vm.sh mount HOST               mounts it, if it is not shared from here
#   vm.sh setup-learner            installs this checkout and its requirements
#   vm.sh setup-server REF         installs sglang-jax at that commit, tag or branch
#   vm.sh download MODEL           fetches a model from the Hugging Face hub
#   vm.sh server CHIPS HOST PORT FOLDER TP MEMORY   starts the server, returns when it answers
#   vm.sh learner CHIPS OPTION...                   starts experiments/main.py
#   vm.sh status RUN PART...       PART: learner or server
#   vm.sh stop PART [--force]      ends it; --force kills it
#   vm.sh pack RUN all|results     lays a run out for sync.sh, with its newest checkpoint or without
#   vm.sh unpack                   deletes what pack has laid out
#
# CHIPS: all, or a list such as 0,1,2,3 where learner and server share a host.
set -euo pipefail

SHARED=${SHARED:-/srv/coevolve}
CODE=$HOME/coevolve_jax
LOGS=$HOME/coevolve_logs
PACKED=$SHARED/runs/.packed
PATIENCE=${PATIENCE:-3600} # seconds until the server must answer; its start compiles for many sizes

die() {
  echo "Error: $*" >&2
  exit 1
}

share() {
  sudo mkdir -p "$SHARED"
  sudo chown "$(id -u):$(id -g)" "$SHARED"
  mkdir -p "$SHARED/models" "$SHARED/runs"
  apt_get install -y nfs-kernel-server
  # The user of the learner owns everything: a user's number may be another one on each VM.
  echo "$SHARED 10.0.0.0/8(rw,sync,no_subtree_check,all_squash,anonuid=$(id -u),anongid=$(id -g))" |
    sudo tee /etc/exports.d/coevolve.exports
  sudo exportfs -ra
}

mount_from() {
  if [[ -f /etc/exports.d/coevolve.exports ]] || mountpoint -q "$SHARED"; then return; fi
  apt_get install -y nfs-common
  sudo mkdir -p "$SHARED"
  # A lookup must not be answered from the cache: the learner has just written the folder that it tells of.
  sudo mount -t nfs4 -o hard,lookupcache=positive "$1:$SHARED" "$SHARED"
}

# A new VM installs updates by itself for some minutes, and holds the lock.
apt_get() {
  sudo DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 update
  sudo DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 "$@"
}

# A virtual environment of the given Python, which the VM's image need not have.
environment() {
  command -v uv > /dev/null || python3 -m pip install --user uv
  PATH=$HOME/.local/bin:$PATH
  [[ -d $2 ]] || uv venv --python "$1" "$2"
}

setup_learner() {
  environment 3.11 "$HOME/venv-learner"
  export VIRTUAL_ENV=$HOME/venv-learner
  cd "$CODE"
  uv pip install -r requirements/main.txt
  uv pip install --no-deps -r requirements/bfcl.txt
  uv pip install -e '.[tpu]'
}

setup_server() {
  environment 3.12 "$HOME/venv-server"
  export VIRTUAL_ENV=$HOME/venv-server
  [[ -d $HOME/sglang-jax ]] || git clone https://github.com/sgl-project/sglang-jax "$HOME/sglang-jax"
  git -C "$HOME/sglang-jax" fetch origin "$1"
  git -C "$HOME/sglang-jax" checkout --detach FETCH_HEAD
  uv pip install -e "$HOME/sglang-jax/python[tpu]"
}

download() {
  "$HOME/venv-learner/bin/hf" download "$1" --local-dir "$SHARED/models/${1##*/}"
}

# Which chips the next process sees. Each process is a TPU of its own, whose only host this is.
take_chips() {
  [[ $1 == all ]] && return
  local bounds
  case $1 in
    ?,?,?,?) bounds=2,2,1 ;;
    ?,?) bounds=1,2,1 ;;
    ?) bounds=1,1,1 ;;
    *) die "the chips '$1' are no group of 1, 2 or 4." ;;
  esac
  local port=$((8476 + ${1%%,*}))
  export TPU_VISIBLE_CHIPS=$1 TPU_CHIPS_PER_PROCESS_BOUNDS=$bounds TPU_PROCESS_BOUNDS=1,1,1
  export TPU_PROCESS_ADDRESSES=localhost:$port TPU_PROCESS_PORT=$port CLOUD_TPU_TASK_ID=0
}

running() {
  [[ -f $LOGS/$1.pid ]] && kill -0 "$(cat "$LOGS/$1.pid")" 2> /dev/null
}

# start PART COMMAND...: in a process group of its own, which outlives the connection.
start() {
  local part=$1
  shift
  ! running "$part" || die "the $part is running (pid $(cat "$LOGS/$part.pid")); first: stop.sh $part."
  mkdir -p "$LOGS"
  cd "$CODE"
  nohup setsid "$@" >> "$LOGS/$part.log" 2>&1 < /dev/null &
  echo $! > "$LOGS/$part.pid"
}

ended() {
  tail -n 40 "$LOGS/$1.log" >&2
  die "the $1 has ended; the end of its log is above."
}

server() {
  take_chips "$1"
  local host=$2 port=$3 folder=$4 tp=$5 memory=$6
  [[ -f $folder/config.json ]] || die "there is no model in $folder; set MODEL and run setup.sh again."
  start server "$HOME/venv-server/bin/python" -m tpu_scripts.sglang_jax_server --model-path="$folder" \
    --host="$host" --port="$port" --tp-size="$tp" --mem-fraction-static="$memory" \
    --device=tpu --dtype=bfloat16
  local end=$((SECONDS + PATIENCE))
  until curl -sf -o /dev/null --max-time 5 "http://127.0.0.1:$port/model_info"; do
    running server || ended server
    [[ $SECONDS -lt $end ]] || die "the server has not answered for $PATIENCE s; see logs.sh server."
    sleep 1
  done
  echo "The server answers on port $port."
}

learner() {
  take_chips "$1"
  export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$SHARED/compiled} # a resumed run compiles nothing
  export PYTHONPATH=$CODE${PYTHONPATH:+:$PYTHONPATH} # modules of the user's own, in this checkout
  start learner "$HOME/venv-learner/bin/python" experiments/main.py "${@:2}"
  local second
  for ((second = 0; second < ${SETTLE:-15}; second++)); do # an option that is wrong shows soon
    sleep 1
    running learner || ended learner
  done
  echo "The learner runs; logs.sh --follow shows what it does."
}

# The learner has all the time that it needs to end its update and save. A server has nothing to save.
stop() {
  if ! running "$1"; then
    echo "The $1 is not running."
    return
  fi
  local pid second=0 signal=TERM
  pid=$(cat "$LOGS/$1.pid")
  case ${2:-} in
    "") ;;
    --force) signal=KILL ;;
    *) die "stop has no option '$2'; vm.sh --help lists what it understands." ;;
  esac
  kill "-$signal" -- "-$pid"
  while running "$1"; do
    sleep 1
    second=$((second + 1))
    if [[ $1 == server && $second -eq 300 ]]; then kill -KILL -- "-$pid"; fi
    if [[ $((second % 60)) -eq 0 ]]; then
      echo "The $1 has not ended after $second s; stop.sh $1 --force kills it, saved or not."
    fi
  done
  echo "The $1 was stopped."
}

status() {
  local part
  for part in "${@:2}"; do
    if running "$part"; then echo "$part: running"; else echo "$part: not running"; fi
  done
  if [[ -f $SHARED/runs/$1/metrics.jsonl ]]; then tail -n 1 "$SHARED/runs/$1/metrics.jsonl"; fi
}

# Lays out a run in a folder beside it, as hard links, which take no room. What the run deletes meanwhile
# stays there. The link at home is a name without spaces for scp.
pack() {
  [[ -d $SHARED/runs/$1 ]] || die "there is no run $SHARED/runs/$1; set RUN to one of: $(ls "$SHARED/runs")."
  local try
  for ((try = 0; try < 20; try++)); do
    unpack
    mkdir -p "$PACKED/$1"
    ln -sfn "$PACKED" "$HOME/coevolve_packed"
    if { [[ $2 == results ]] || link_checkpoint "$1"; } && link_results "$1"; then return; fi
  done
  unpack
  die "$SHARED/runs/$1 could not be laid out, for the reasons above; run sync.sh again."
}

unpack() {
  rm -rf "$PACKED"
}

# The newest checkpoint. Its manifest is written last and deleted first: it is whole if that is there after.
link_checkpoint() {
  local found newest
  found=("$SHARED/runs/$1/checkpoints"/step_*/manifest.json)
  newest=${found[-1]%/manifest.json}
  [[ $newest != *"/step_*" ]] ||
    die "$SHARED/runs/$1/checkpoints has no finished checkpoint; wait for one, or leave out --checkpoints."
  mkdir "$PACKED/$1/checkpoints"
  cp -al "$newest" "$PACKED/$1/checkpoints/" && [[ -f ${found[-1]} ]]
}

# The rest, after the checkpoint, so that no log is shorter than that says. The weights are the server's.
link_results() {
  find "$SHARED/runs/$1" -mindepth 1 -maxdepth 1 ! -name checkpoints ! -name weights \
    -exec cp -al -t "$PACKED/$1/" {} +
}

# arguments COUNT GIVEN...: one sentence instead of an unbound variable.
arguments() {
  [[ $(($# - 1)) -ge $1 ]] || die "$COMMAND needs $1 argument(s), not $(($# - 1)); vm.sh --help lists them."
}

COMMAND=${1:---help}
[[ $# -eq 0 ]] || shift
case $COMMAND in
  --help | -h) sed -n '2,/^[^#]/{/^#/{s/^# \{0,1\}//;p}}' "$0" ;;
  share) share ;;
  mount) arguments 1 "$@" && mount_from "$1" ;;
  setup-learner) setup_learner ;;
  setup-server) arguments 1 "$@" && setup_server "$1" ;;
  download) arguments 1 "$@" && download "$1" ;;
  server) arguments 6 "$@" && server "$@" ;;
  learner) arguments 1 "$@" && learner "$@" ;;
  status) arguments 2 "$@" && status "$@" ;;
  pack) arguments 2 "$@" && pack "$@" ;;
  unpack) unpack ;;
  stop) arguments 1 "$@" && stop "$@" ;;
  *) die "there is no command '$COMMAND'; vm.sh --help lists them." ;;
esac
