"""The scripts for Cloud TPUs, with a fake gcloud.

It records its requests and, if a test wants it, carries them out on this machine.
"""

import functools
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax.config import keys, load_file
from coevolve_jax.records import checkpoint, logs
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

SCRIPTS = ROOT / "tpu_scripts"
NAMES = ("create", "setup", "launch", "status", "logs", "stop", "sync", "teardown")

ONE_HOST = {
    "PROJECT": "my project",
    "ZONE": "us-east5-b",
    "TPU": "coevolve",
    "ACCELERATOR": "v6e-8",
    "MODEL": "Qwen/Q3",
}
SLICE = {
    **ONE_HOST,
    "QUEUED": "yes",
    "ACCELERATOR": "v5p-32",
    "SERVER_TPU": "server",
    "SERVER_ACCELERATOR": "v6e-4",
    "SPOT": "yes",
    "VALID_FOR": "6h",
}
ALONE = {**ONE_HOST, "ACCELERATOR": "v5p-32", "ENGINE": "native"}
AT_ONCE = {**SLICE, "QUEUED": "no", "ACCELERATOR": "v5litepod-8", "MODEL": "/srv/it's here", "RUNTIME": "my"}

# Appends its arguments to $LOG, one call a line, and answers the scripts' queries. With $FAKE_VM set,
# commands run in that folder as they would on the VM, and copies are made.
FAKE = r"""#!/usr/bin/env bash
{ printf '%q ' "$(basename "$0")" "$@"; echo; } >> "$LOG"
case "$*" in
  *"format=value(networkEndpoints"*) echo 10.0.0.7 ;;
  *"format=value(state.state)"*) echo "${STATE:-ACTIVE}" ;;
  *"delete ${FAILS:-nothing}"* | *"tpu-vm ${FAILS:-nothing} "*) exit 1 ;;
  *"tpu-vm describe ${ABSENT:-nothing} "*) exit 1 ;;
esac
[[ -n ${FAKE_VM:-} ]] || exit 0
for word in "$@"; do
  case $word in --command=*) cd "$FAKE_VM" && HOME=$FAKE_VM exec bash -c "${word#--command=}" ;; esac
done
if [[ $4 == scp ]]; then cp -r "${5/#coevolve:/$FAKE_VM/}" "${6/#coevolve:/$FAKE_VM/}"; fi
"""


@pytest.fixture
def fakes(tmp_path):
    """A folder with fakes of gcloud, tar and mkdir."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("gcloud", "tar", "mkdir"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)
    return folder


def bash(*command, setup, fakes, log, stdin="", **more):
    """Runs a script to its end. setup: the settings."""
    env = {"PATH": f"{fakes}:{os.environ['PATH']}", "HOME": str(fakes), "TMPDIR": str(fakes), "LOG": str(log)}
    return subprocess.run(
        ["bash", *map(str, command)],
        env={**env, **setup, **more},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_shellcheck():
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert tool, "shellcheck is not installed: pip install -r requirements/test.txt"
    scripts = sorted(map(str, SCRIPTS.glob("*.sh")))
    found = subprocess.run([tool, "-x", *scripts], capture_output=True, text=True, cwd=SCRIPTS)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "setup", [ONE_HOST, SLICE, ALONE, AT_ONCE], ids=["one host", "slice", "alone", "at once"]
)
def test_a_dry_run_prints_exactly_what_a_run_runs(name, setup, fakes, tmp_path):
    script, logs = SCRIPTS / f"{name}.sh", [tmp_path / n for n in ("dry", "pasted", "real")]
    options = {"create": ["--wait"], "launch": ["--", "--config.note=it's a $HOME"], "teardown": ["--yes"]}
    options = options.get(name, [])
    dry = bash(script, "--dry-run", *options, setup=setup, fakes=fakes, log=logs[0])
    assert dry.returncode == 0 and not dry.stderr and not logs[0].exists()
    assert bash("-c", dry.stdout, setup={}, fakes=fakes, log=logs[1]).returncode == 0
    real = bash(script, *options, setup=setup, fakes=fakes, log=logs[2])
    assert real.returncode == 0, real.stderr
    assert logs[1].read_text() == logs[2].read_text() and "gcloud" in logs[2].read_text()


def commands(script, *options, setup, fakes, log):
    """The words of each command that a dry run prints."""
    dry = bash(SCRIPTS / script, "--dry-run", *options, setup=setup, fakes=fakes, log=log)
    assert dry.returncode == 0, dry.stderr
    return [shlex.split(line) for line in dry.stdout.splitlines()]


def test_the_learner_gets_the_servers_address_and_its_place(fakes, tmp_path):
    server, ask, learner = commands("launch.sh", setup=SLICE, fakes=fakes, log=tmp_path / "log")
    assert "--worker=0" in server
    assert server[-1].endswith("vm.sh server all 0.0.0.0 30000 /srv/coevolve/models/Q3 4 0.7")
    assert "--worker=all" in learner
    options = shlex.split(learner[-1].removeprefix("--command="))
    assert options[:4] == ["bash", "coevolve_jax/tpu_scripts/vm.sh", "learner", "all"]
    assert {
        "--config.engine.name=sglang",
        "--config.engine.url=http://$SERVER_IP:30000",
        "--config.mesh.fsdp=16",
        "--config.learner.rows_per_microbatch=16",
        "--processes=auto",
    } <= set(options)


@pytest.mark.parametrize(
    "type, server_chips, learner_chips",
    [("v6e-8", "0,1,2,3", "4,5,6,7"), ("v5litepod-4", "0,1", "2,3"), ("v5p-8", "0,1", "2,3")],
)
def test_on_one_host_the_chips_are_split(type, server_chips, learner_chips, fakes, tmp_path):
    setup = {**ONE_HOST, "ACCELERATOR": type}
    server, learner = commands("launch.sh", setup=setup, fakes=fakes, log=tmp_path / "log")
    count = str(len(server_chips.split(",")))
    assert shlex.split(server[-1])[3:6] == [server_chips, "127.0.0.1", "30000"]
    assert shlex.split(server[-1])[-2] == count
    assert shlex.split(learner[-1])[3] == learner_chips and f"--config.mesh.fsdp={count}" in learner[-1]


@pytest.mark.parametrize(
    "type, chips, more",
    [
        ("v6e-1", 1, ""),
        ("v6e-8", 8, "--config.engine.sharded=True"),
        (
            "v5p-32",
            16,
            "--config.engine.sharded=True --config.learner.rows_per_microbatch=16 --processes=auto",
        ),
    ],
)
def test_without_a_server_all_chips_are_the_learners(type, chips, more, fakes, tmp_path):
    config = "configs/bfcl_qwen3_4b.py:explorer=policy,seed=3"  # the config's own arguments stay
    setup = {**ALONE, "ACCELERATOR": type, "CONFIG": config}
    (learner,) = commands("launch.sh", setup=setup, fakes=fakes, log=tmp_path / "log")
    assert "--worker=all" in learner
    options = shlex.split(learner[-1].removeprefix("--command="))
    assert options[2:4] == ["learner", "all"] and options[4:] == [
        f"--config={config}",
        "--workdir=/srv/coevolve/runs/run",
        "--config.model=/srv/coevolve/models/Q3",
        "--config.engine.name=native",
        f"--config.mesh.fsdp={chips}",
        *more.split(),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_learner_alone_is_all_that_the_scripts_speak_of(name, fakes, tmp_path):
    found = commands(f"{name}.sh", setup=ALONE, fakes=fakes, log=tmp_path / "log")
    assert found
    for words in found:
        assert not any("server" in word or "sglang" in word for word in words)


@pytest.mark.parametrize(
    "script, option", [("launch", "--server-only"), ("stop", "server"), ("logs", "server")]
)
def test_without_a_server_none_can_be_asked_for(script, option, fakes, tmp_path):
    done = bash(SCRIPTS / f"{script}.sh", option, setup=ALONE, fakes=fakes, log=tmp_path / "log")
    assert done.returncode == 1 and not (tmp_path / "log").exists()
    assert "ENGINE is 'native', so there is no server" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("setup", [SLICE, ALONE], ids=["server", "alone"])
def test_the_learners_options_are_keys_of_its_config(setup, fakes, tmp_path):
    *_, learner = commands("launch.sh", setup=setup, fakes=fakes, log=tmp_path / "log")
    given = dict(re.findall(r"--config\.([\w.]+)=(\S+)", learner[-1]))
    config = load_file(SCRIPTS.parent / "configs/bfcl_qwen3_4b.py")
    for name in given:
        functools.reduce(lambda section, key: section[key], name.split("."), config)
    assert given["engine.name"] in keys.REQUIRED["engine.name"].of


WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@settings(max_examples=15, deadline=None)
@given(options=st.lists(WORD, max_size=4))
def test_options_reach_the_learner_as_they_were_given(tmp_path_factory, options):
    folder = tmp_path_factory.mktemp("options")
    (folder / "gcloud").write_text(FAKE)
    (folder / "gcloud").chmod(0o755)
    (folder / "coevolve_jax/tpu_scripts").mkdir(parents=True)
    (folder / "coevolve_jax/tpu_scripts/vm.sh").write_text("printf '%s\\0' \"$@\"\n")
    done = subprocess.run(
        ["bash", SCRIPTS / "launch.sh", "--learner-only", "--", *options],
        capture_output=True,
        timeout=120,
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "LOG": str(folder / "log"),
            "FAKE_VM": str(folder),
            **ONE_HOST,
        },
    )
    assert done.returncode == 0, done.stderr
    got = done.stdout.split(b"\0")[:-1]
    assert got[len(got) - len(options) :] == [option.encode() for option in options]


WRONG = [
    *(("status", {name: ""}, f"{name} is not set") for name in ("PROJECT", "ZONE", "TPU", "ACCELERATOR")),
    ("launch", {"MODEL": ""}, "MODEL is not set"),
    ("create", {"ACCELERATOR": "h100-8"}, "ACCELERATOR is 'h100-8'"),
    ("create", {"ACCELERATOR": "v6e-8x"}, "ACCELERATOR is 'v6e-8x'"),
    ("create", {"SPOT": "true"}, "SPOT is 'true'; it must be one of: yes no"),
    ("create", {"QUEUED": "1"}, "QUEUED is '1'"),
    ("create", {"SERVER_TPU": "coevolve"}, "SERVER_TPU and TPU are both 'coevolve'"),
    ("create", {"ENGINE": "vllm"}, "ENGINE is 'vllm'; it must be one of: sglang native"),
    (
        "create",
        {"ENGINE": "native", "SERVER_TPU": "s"},
        "SERVER_TPU is 's', but ENGINE=native needs no server",
    ),
    ("create", {"SERVER_TPU": "s", "SERVER_ACCELERATOR": "v6e-16"}, "the server needs one host"),
    ("launch", {"ACCELERATOR": "v6e-16"}, "has 4 hosts, and a slice of several cannot be shared"),
    ("launch", {"ACCELERATOR": "v6e-1"}, "has 1 chip(s)"),
    ("launch", {"PORT": "http"}, "PORT is 'http'"),
    ("sync", {"RUN": "../x"}, "RUN is '../x'"),
]


@pytest.mark.parametrize("name, change, sentence", WRONG)
def test_a_wrong_setting_is_one_sentence_and_runs_nothing(name, change, sentence, fakes, tmp_path):
    done = bash(SCRIPTS / f"{name}.sh", setup={**ONE_HOST, **change}, fakes=fakes, log=tmp_path / "log")
    assert done.returncode == 1 and not (tmp_path / "log").exists()
    assert done.stderr.startswith("Error: ") and sentence in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_help_and_unknown_options(name, fakes, tmp_path):
    script, log = SCRIPTS / f"{name}.sh", tmp_path / "log"
    told = bash(script, "--help", setup={}, fakes=fakes, log=log)
    assert told.returncode == 0 and f"{name}.sh [" in told.stdout and "Settings: see env.sh" in told.stdout
    done = bash(script, "--wat", setup=ONE_HOST, fakes=fakes, log=log)
    assert done.returncode == 1 and "unknown option --wat" in done.stderr and not log.exists()


def test_settings_from_a_file(fakes, tmp_path):
    file, log = tmp_path / "my.env", tmp_path / "log"
    file.write_text("# mine\n" + "".join(f"{name}={value}\n" for name, value in ONE_HOST.items()))
    assert bash(SCRIPTS / "status.sh", f"--env={file}", setup={}, fakes=fakes, log=log).returncode == 0
    assert "my\\ project" in log.read_text()
    for line in ("PATH=/tmp", "ZONE us", "$(touch x)"):
        file.write_text(line + "\n")
        done = bash(SCRIPTS / "status.sh", f"--env={file}", setup=ONE_HOST, fakes=fakes, log=log)
        assert done.returncode == 1 and f"has the line '{line}'" in done.stderr


def test_another_shared_folder_is_told_to_every_vm(fakes, tmp_path):
    log, setup = tmp_path / "log", {**ONE_HOST, "SHARED": "/mnt/big disk"}
    for name in ("setup", "launch", "status", "sync", "stop"):
        done = bash(SCRIPTS / f"{name}.sh", "--dry-run", setup=setup, fakes=fakes, log=log)
        assert done.returncode == 0, done.stderr
        calls = [
            line for line in done.stdout.splitlines() if "tpu_scripts/vm.sh" in line and "--command" in line
        ]
        assert calls and all("SHARED=" in call and "big disk" in call for call in calls), done.stdout
        assert "/srv/coevolve" not in done.stdout


def test_the_status_of_what_is_not_there_yet_is_said_and_the_next_is_asked(fakes, tmp_path):
    log = tmp_path / "log"
    done = bash(SCRIPTS / "status.sh", setup=SLICE, fakes=fakes, log=log, ABSENT="coevolve")
    assert done.returncode == 0 and "coevolve: not there yet" in done.stdout, done.stderr
    asked = log.read_text()
    assert "server-request" in asked and "ssh server" in asked and "ssh coevolve" not in asked


@pytest.mark.parametrize("name", ["create", "teardown"])
@pytest.mark.parametrize("part, vm", [("learner", "coevolve"), ("server", "server")])
@pytest.mark.parametrize("setup", [SLICE, AT_ONCE], ids=["queued", "at once"])
def test_one_of_two_vms_is_made_or_deleted_alone(name, part, vm, setup, fakes, tmp_path):
    log = tmp_path / "log"
    done = bash(SCRIPTS / f"{name}.sh", f"--{part}-only", "--yes", setup=setup, fakes=fakes, log=log)
    assert done.returncode == 0, done.stderr
    asked = [shlex.split(line) for line in log.read_text().splitlines()]
    made = [words[5] for words in asked if {"create", "delete"} & set(words)]
    assert made == [vm if setup["QUEUED"] == "no" else f"{vm}-request"]
    types = [word.partition("=")[2] for words in asked for word in words if "accelerator-type" in word]
    of = setup["ACCELERATOR" if part == "learner" else "SERVER_ACCELERATOR"]
    assert types == ([of] if name == "create" else [])


@pytest.mark.parametrize("name", ["create", "teardown"])
def test_a_server_without_a_vm_of_its_own_cannot_be_made_or_deleted_alone(name, fakes, tmp_path):
    log = tmp_path / "log"
    done = bash(SCRIPTS / f"{name}.sh", "--server-only", "--yes", setup=ONE_HOST, fakes=fakes, log=log)
    assert done.returncode == 1 and done.stderr.startswith("Error: SERVER_TPU is not set;")
    assert not log.exists()


@pytest.mark.parametrize("answer", ["n\n", "", "\n"])
def test_teardown_asks(answer, fakes, tmp_path):
    done = bash(SCRIPTS / "teardown.sh", setup=SLICE, fakes=fakes, log=tmp_path / "log", stdin=answer)
    assert done.returncode == 1 and "deleted" in done.stderr and not (tmp_path / "log").exists()


def test_teardown_goes_on_after_a_failure_and_says_what_is_left(fakes, tmp_path):
    log = tmp_path / "log"
    fails = "coevolve-request"
    done = bash(SCRIPTS / "teardown.sh", setup=SLICE, fakes=fakes, log=log, stdin="y\n", FAILS=fails)
    assert done.returncode == 1 and "did not delete coevolve-request;" in done.stderr
    assert "delete server-request" in log.read_text() and "queued-resources list" in log.read_text()


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_waiting_ends_where_a_request_has_failed(state, fakes, tmp_path):
    log = tmp_path / "log"
    done = bash(SCRIPTS / "create.sh", "--wait", setup=ONE_HOST, fakes=fakes, log=log, STATE=state)
    assert done.returncode == 1 and f"coevolve-request is {state}" in done.stderr
    assert "teardown.sh" in done.stderr


CURL = """#!/usr/bin/env bash
cd "$FAKE_VM/coevolve_logs" && grep -q chips= server.log && ! grep -q doomed server.log
"""
# Replaces python in the VM's environments: it records its chips and arguments, and stays alive.
PYTHON = """#!/usr/bin/env bash
echo "chips=${TPU_VISIBLE_CHIPS:-all} bounds=${TPU_CHIPS_PER_PROCESS_BOUNDS:-} port=${TPU_PROCESS_PORT:-} $*"
for word in "$@"; do
  [[ $word == --workdir=* ]] || continue
  run=${word#--workdir=}
  mkdir -p "$run/checkpoints/step_00000003" "$run/checkpoints/step_00000004" "$run/weights/version-3"
  echo '{"step": 3}' > "$run/metrics.jsonl"
  echo big > "$run/checkpoints/step_00000003/manifest.json"
  echo "not finished" > "$run/checkpoints/step_00000004/state.json"
done
if [[ $* == *doomed* ]]; then echo "Error: it is doomed"; exit 3; fi
exec sleep 1000
"""


@pytest.fixture
def machine(tmp_path):
    """run(script, ...) in a copy of the checkout, with a gcloud that does all in a folder, the VM's home."""
    vm, fakes, checkout = tmp_path / "vm", tmp_path / "bin", tmp_path / "checkout"
    shutil.copytree(SCRIPTS, checkout / "tpu_scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "experiments").mkdir()
    for part in ("learner", "server"):
        python = vm / f"venv-{part}/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
    fakes.mkdir()
    (fakes / "gcloud").write_text(FAKE)
    (fakes / "curl").write_text(CURL)
    for tool in fakes.iterdir():
        tool.chmod(0o755)
    shared = tmp_path / "shared"
    for model in ("Q3", "doomed"):
        (shared / "models" / model).mkdir(parents=True)
        (shared / "models" / model / "config.json").write_text("{}")
    setup = {**ONE_HOST, "FAKE_VM": str(vm), "SHARED": str(shared), "SETTLE": "1"}

    def run(script, *options, **more):
        return bash(
            checkout / "tpu_scripts" / script,
            *options,
            setup={**setup, **more},
            fakes=fakes,
            log=tmp_path / "log",
        )

    run.vm, run.checkout, run.shared = vm, checkout, shared
    yield run
    run("stop.sh", "--force")


def test_from_setup_to_results_on_one_machine(machine):
    assert machine("setup.sh", "--code-only").returncode == 0
    assert (machine.vm / "coevolve_jax/tpu_scripts/vm.sh").is_file()
    done = machine("launch.sh", "--", "--config.steps=3")
    assert done.returncode == 0, done.stderr
    assert "The server answers on port 30000." in done.stdout and "The learner runs" in done.stdout

    server, learner = machine("logs.sh", "server").stdout, machine("logs.sh").stdout
    assert "chips=0,1,2,3 bounds=2,2,1 port=8476 -m tpu_scripts.sglang_jax_server --model-path=" in server
    assert "chips=4,5,6,7 bounds=2,2,1 port=8480 experiments/main.py --config=" in learner
    assert "--config.engine.url=http://127.0.0.1:30000" in learner and learner.endswith("--config.steps=3\n")

    again = machine("launch.sh")
    assert again.returncode == 1 and "the server is running" in again.stderr
    status = machine("status.sh").stdout
    assert "server: running" in status and "learner: running" in status and '{"step": 3}' in status

    assert machine("sync.sh").returncode == 0
    result = machine.checkout / "runs/run"
    assert [path.name for path in result.iterdir()] == ["metrics.jsonl"]
    at_home = lambda: sorted(path for path in machine.vm.rglob("*") if path.is_file())
    before = at_home()
    assert machine("sync.sh", "--checkpoints").returncode == 0
    assert [path.name for path in (result / "checkpoints").iterdir()] == ["step_00000003"]
    assert at_home() == before and not (machine.shared / "runs/.packed").exists()
    missing = machine("sync.sh", RUN="other")
    assert missing.returncode == 1 and "set RUN to one of: run." in missing.stderr

    assert "The learner was stopped." in machine("stop.sh").stdout
    assert machine("status.sh").stdout.count("not running") == 2
    assert "The server is not running." in machine("stop.sh", "server").stdout


def test_what_is_fetched_of_a_run_that_goes_on_can_be_resumed(machine):
    machine("setup.sh", "--code-only")
    run, over, arrays = machine.shared / "runs/run", threading.Event(), {"w": np.arange(4096.0)}
    log, writer = logs.MetricsWriter(run), checkpoint.Writer()

    def train():
        for step in itertools.count():
            log.write_step({"step": step})
            writer.save(run / "checkpoints", step, arrays, {"sizes": log.sizes()}, keep=2)
            writer.wait()
            if over.is_set():
                return

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        while not checkpoint.steps(run / "checkpoints"):
            assert not training.done(), training.result()
        done = machine("sync.sh", "--checkpoints")
        over.set()
        training.result()
    writer.close()
    assert done.returncode == 0, done.stderr
    fetched = machine.checkout / "runs/run"
    step, found, state = checkpoint.restore(fetched / "checkpoints", arrays)
    assert logs.truncate(fetched, state["sizes"]) == step and (found["w"] == arrays["w"]).all()


# The run's writer between two files that cp reads: it deletes the checkpoint and has a newer one.
ROTATING = """#!/usr/bin/env bash
cd "$SHARED"
if [[ $* == *step_00000000* ]]; then
  rm -r runs/run/checkpoints/step_00000000/{arrays,state.json}
  PATH=${PATH#*:} cp "$@"
  rm -r runs/run/checkpoints/step_00000000
  mv later/step_00000001 runs/run/checkpoints/
else
  PATH=${PATH#*:} cp "$@"
fi
"""


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_fetched(machine, tmp_path):
    machine("setup.sh", "--code-only")
    run, writer, arrays = machine.shared / "runs/run", checkpoint.Writer(), {"w": np.arange(3.0)}
    for step, folder in enumerate((run / "checkpoints", machine.shared / "later")):
        writer.save(folder, step, arrays, {})
    writer.close()
    (tmp_path / "bin/cp").write_text(ROTATING)
    (tmp_path / "bin/cp").chmod(0o755)
    done = machine("sync.sh", "--checkpoints")
    assert done.returncode == 0, done.stderr
    fetched = machine.checkout / "runs/run/checkpoints"
    assert checkpoint.restore(fetched, arrays)[0] == 1 and len(list(fetched.iterdir())) == 1


def test_no_checkpoint_is_fetched_of_a_run_that_has_none_yet(machine):
    machine("setup.sh", "--code-only")
    (machine.shared / "runs/run/checkpoints/step_00000000").mkdir(parents=True)
    done = machine("sync.sh", "--checkpoints")
    assert done.returncode == 1 and "has no finished checkpoint; wait for one" in done.stderr
    assert not (machine.checkout / "runs/run").exists()


def test_a_failed_copy_leaves_nothing_behind_on_the_vm(machine):
    machine("setup.sh", "--code-only")
    (machine.shared / "runs/run").mkdir(parents=True)
    done = machine("sync.sh", FAILS="scp")
    assert done.returncode == 1 and "gcloud did not copy run to" in done.stderr
    assert not (machine.shared / "runs/.packed").exists()


# A learner that is asked to end and saves until the file `saved` is there. The VM's `sleep` makes it.
SAVING = """#!/usr/bin/env bash
trap 'until [[ -f $HOME/saved ]]; do /bin/sleep 0.01; done; echo saved; exit 75' TERM
while true; do /bin/sleep 0.01; done
"""
SLEEP = """#!/usr/bin/env bash
echo >> "$HOME/slept"
if [[ $(wc -l < "$HOME/slept") -ge 310 ]]; then touch "$HOME/saved"; fi
"""


def test_a_learner_has_all_the_time_that_its_save_takes(machine, tmp_path):
    machine("setup.sh", "--code-only")
    (machine.vm / "venv-learner/bin/python").write_text(SAVING)
    assert machine("launch.sh", ENGINE="native").returncode == 0
    (tmp_path / "bin/sleep").write_text(SLEEP)
    (tmp_path / "bin/sleep").chmod(0o755)
    done = machine("stop.sh", "learner")
    assert done.returncode == 0 and done.stdout.endswith("The learner was stopped.\n")
    assert "The learner has not ended after 60 s; stop.sh learner --force kills it" in done.stdout
    assert machine("logs.sh").stdout.endswith("saved\n")


def test_a_learner_that_does_not_end_can_be_killed(machine):
    machine("setup.sh", "--code-only")
    (machine.vm / "venv-learner/bin/python").write_text(SAVING)
    assert machine("launch.sh", ENGINE="native").returncode == 0
    done = machine("stop.sh", "learner", "--force")
    assert done.stdout == "The learner was stopped.\n" and "saved" not in machine("logs.sh").stdout


def test_a_run_without_a_server_on_one_machine(machine):
    alone = functools.partial(machine, ENGINE="native")
    assert alone("setup.sh", "--code-only").returncode == 0
    done = alone("launch.sh", "--", "--config.engine.max_concurrency=24")
    assert done.returncode == 0 and "The learner runs" in done.stdout and "server" not in done.stdout
    log = alone("logs.sh").stdout
    assert log.startswith("chips=all bounds= port= experiments/main.py --config=")
    assert "--config.engine.name=native" in log and log.endswith("--config.engine.max_concurrency=24\n")
    assert alone("status.sh").stdout == 'learner: running\n{"step": 3}\n'
    assert alone("sync.sh").returncode == 0 and (machine.checkout / "runs/run/metrics.jsonl").is_file()
    assert alone("stop.sh").stdout == "The learner was stopped.\n"


def test_devices_on_the_cpu_stay_faked_where_the_page_on_several_hosts_sets_its_variables():
    text = (ROOT / "docs/notes/operation.md").read_text()
    exports = re.findall(r"^ {4}(export .*)$", text.partition("## Several hosts")[2], re.M)
    faked = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        ["bash", "-c", "\n".join([*exports, 'echo "$XLA_FLAGS"'])],
        env={**os.environ, "XLA_FLAGS": faked},
        capture_output=True,
        text=True,
    )
    assert len(exports) == 2 and faked in done.stdout.split() and len(done.stdout.split()) == 2


def test_a_server_that_dies_shows_why(machine):
    machine("setup.sh", "--code-only")
    done = machine("launch.sh", MODEL="other/doomed")
    assert done.returncode == 1 and "Error: it is doomed" in done.stderr
    assert "the server has ended" in done.stderr
    assert machine("launch.sh", MODEL="other/none").stderr.count("there is no model in") == 1


def test_a_learner_that_dies_shows_why(machine):
    machine("setup.sh", "--code-only")
    done = machine("launch.sh", "--", "--doomed", SETTLE="60")
    assert done.returncode == 1 and "Error: it is doomed" in done.stderr
    assert "the learner has ended" in done.stderr
