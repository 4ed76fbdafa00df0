"""The server process: start, failure in one sentence, restart, nothing left behind; the CPU patches."""

import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coevolve_jax.rollout.sglang import server as server_module
from coevolve_jax.rollout.sglang.server import CPU_PYTHON, Server
from tests.support.paths import ROOT

pytestmark = pytest.mark.server

TINY = ROOT / "models" / "tiny_qwen3"
PATCH = ROOT / "requirements" / "patch_sglang_cpu.py"
PROMPT = [5, 6, 7, 8, 9, 10]


def _members(session: int) -> dict[int, str]:
    """Command lines of a session's living processes: the supervisor and its children."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, leader = stat.read_text().rpartition(")")[2].split()[:4]
            if int(leader) == session and state not in "ZX":
                found[int(stat.parent.name)] = (stat.parent / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def started_by(supervisor: int) -> int:
    """The only child of a server's supervisor, the leader of its process group; 0 if there is none yet."""
    return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text() or 0)


def _until(condition, seconds: float = 600.0):  # busy cores took 150 for the start of a server
    limit = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.05)
    return value


def post(server: Server, path: str, body: dict) -> dict:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return json.loads(connection.getresponse().read())


def _greedy(server: Server) -> dict:
    sampling = {"temperature": 0.0, "max_new_tokens": 4}
    body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling}
    return post(server, "/generate", body)


def _fake_python(folder: Path, script: str) -> str:
    """A program that runs instead of SGLang's python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


# ---- a real server


def test_a_started_server_generates(sglang_server):
    assert sglang_server.alive() and sglang_server.healthy()
    answer = _greedy(sglang_server)
    assert len(answer["output_ids"]) == 4
    with urllib.request.urlopen(
        f"{sglang_server.url}/model_info"
    ) as info:  # others may have pushed weights since
        assert answer["meta_info"]["weight_version"] == json.load(info)["weight_version"]
    assert len(answer["meta_info"]["output_token_logprobs"]) == 4


def test_killed_server_restarts_with_other_weights_at_its_url(sglang_server, to_be_struck, tmp_path):
    """A kill from outside acts like a crash; it returns with a model of other sizes and another version."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    tensors = load_file(TINY / "model.safetensors")
    key = "model.norm.weight"
    tensors[key] = (tensors[key].astype(np.float32) * 0.5).astype(tensors[key].dtype)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})

    server = to_be_struck()
    url, group = server.url, server._process.pid
    os.kill(_until(lambda: started_by(group)), signal.SIGKILL)
    _until(lambda: not server.alive())
    assert "code -9" in server.failure() and not _members(group)

    server.restart(other, "step-7")
    group = server._process.pid
    loaded = post(
        sglang_server, "/update_weights_from_disk", {"model_path": str(TINY), "weight_version": "0"}
    )
    assert loaded["success"], loaded
    before, after = _greedy(sglang_server), _greedy(server)
    assert server.url == url and after["meta_info"]["weight_version"] == "step-7"
    first = [answer["meta_info"]["output_token_logprobs"][0][0] for answer in (before, after)]
    assert abs(first[0] - first[1]) > 0.01
    assert len(_members(group)) >= 4  # supervisor, HTTP server, scheduler, detokenizer


def test_no_process_outlives_a_killed_owner(tmp_path):
    """kill -9 comes while the scheduler starts: SGLang's own children watch their parent only later."""
    program = (
        "import sys, time\nfrom coevolve_jax.rollout.sglang.server import Server\n"
        f"server = Server({str(TINY)!r}, log_path={str(tmp_path / 'log')!r})\n"
        "print(server._process.pid, flush=True)\ntime.sleep(1200)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    group = int(owner.stdout.readline())
    # supervisor, HTTP server, scheduler
    _until(lambda: sum("sglang" in line for line in _members(group).values()) >= 3)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _until(lambda: not _members(group))
    assert "Uvicorn running" not in (tmp_path / "log").read_text()


# ---- failures, with a program instead of SGLang


def test_death_while_starting_quotes_this_start_only(tmp_path):
    log = tmp_path / "log"
    log.write_text("of an earlier run\n")
    python = _fake_python(tmp_path, "echo CUDA went away; sleep 0.1; exit 3")
    server = Server(TINY, python=python, log_path=log)
    with pytest.raises(RuntimeError, match="died while starting.*CUDA went away.*code 3") as caught:
        server.wait_until_ready()
    sentence = str(caught.value)
    assert "earlier" not in sentence and "\n" not in sentence and str(log) in sentence
    server.stop()


def test_deadline_ends_the_whole_group(tmp_path):
    python = _fake_python(tmp_path, "trap '' TERM INT; sleep 600 & echo still loading; wait; sleep 600")
    server = Server(TINY, python=python, log_path=tmp_path / "log", deadline=0.5)
    group = server._process.pid
    _until(lambda: "still loading" in (tmp_path / "log").read_text())
    with pytest.raises(RuntimeError, match=r"not ready after 0\.5 s.*still loading"):
        server.wait_until_ready()
    assert not _members(group)


def test_ends_with_its_object_and_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module.tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    python = _fake_python(tmp_path, 'touch "$TMPDIR/socket"; echo "$@" "$TMPDIR"; sleep 600')
    server = Server(
        TINY,
        python=python,
        log_path=tmp_path / "log",
        version="v1",
        device="cpu",
        arguments=["--enable-return-routed-experts"],
    )
    group, port = server._process.pid, server.port
    line = _until(lambda: (tmp_path / "log").read_text())
    assert f"--port {port} --weight-version v1 --dtype" in line and "--skip-tokenizer-init" in line
    assert "--device cpu" in line and "--enable-return-routed-experts" in line
    assert _members(group)
    del server
    assert not _members(group) and not list((tmp_path / "scratch").iterdir())


def test_what_cannot_start_is_refused_with_the_remedy(tmp_path, monkeypatch):
    python = _fake_python(tmp_path, "exit 0")
    with pytest.raises(ValueError, match="no config.json"):
        Server(tmp_path, python=python)
    with pytest.raises(ValueError, match="/no/python .*make sglang-cpu.*config.engine.python"):
        Server(TINY, python="/no/python")
    with pytest.raises(ValueError, match="no device 'tpu'"):
        Server(TINY, python=python, device="tpu")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ValueError, match="Port .* cannot be used"):
            Server(TINY, python=python, port=taken.getsockname()[1])
    monkeypatch.setattr(server_module, "CPU_PYTHON", tmp_path / "absent" / "bin" / "python")
    with pytest.raises(ValueError, match="not installed.*make sglang-cpu"):
        Server(TINY)


# ---- requirements/patch_sglang_cpu.py


def _patcher():
    spec = importlib.util.spec_from_file_location("patch_sglang_cpu", PATCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PATCHES = _patcher().PATCHES


def _site_packages(folder: Path, versions: dict[str, str], around: str = "x = 1") -> None:
    """Installs packages whose patched files hold the text to patch, with `around` before and after it."""
    for package, version in versions.items():
        info = folder / f"{package}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    for file in {file for _, file, _, _ in PATCHES}:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as stream:
            stream.write(around + "".join(old + around for _, name, old, _ in PATCHES if name == file))


def _texts(folder: Path) -> dict[str, str]:
    return {file: (folder / file).read_bytes().decode() for _, file, _, _ in PATCHES}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(around=st.text(st.characters(codec="utf-8", exclude_characters="@_")))
def test_patch_changes_its_lines_only_and_once(around, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    _site_packages(folder, {"sglang": "0.5.23", "torchvision": "0.28.0+cpu"}, around)
    expected = {
        file: around + "".join(new + around for _, name, _, new in PATCHES if name == file)
        for _, file, _, _ in PATCHES
    }
    with pytest.MonkeyPatch.context() as patched_path:
        patched_path.syspath_prepend(folder)
        assert len(_patcher().patch()) == len(expected)
        assert _texts(folder) == expected
        assert _patcher().patch() == []
    assert _texts(folder) == expected


@pytest.mark.parametrize(
    "versions, message",
    [
        ({"sglang": "0.5.24", "torchvision": "0.28.0"}, "sglang is 0.5.24, .* for 0.5.23"),
        ({"sglang": "0.5.23", "torchvision": "0.28.01"}, "torchvision is 0.28.01, .* for 0.28.0"),
    ],
)
def test_patch_refuses_another_version(versions, message, tmp_path, monkeypatch):
    _site_packages(tmp_path, versions)
    before = _texts(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=message):
        _patcher().patch()
    assert _texts(tmp_path) == before


@pytest.mark.parametrize("damage", [lambda text: "", lambda text: text + text])
def test_patch_refuses_another_text_and_changes_nothing(damage, tmp_path, monkeypatch):
    _site_packages(tmp_path, {"sglang": "0.5.23", "torchvision": "0.28.0"})
    file = PATCHES[-1][1]
    path = tmp_path / file
    path.write_text(damage(path.read_text()))
    before = _texts(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"{file} of sglang 0.5.23 .* times instead of once"):
        _patcher().patch()
    assert _texts(tmp_path) == before


def test_patch_names_a_missing_package_and_the_environment_is_patched():
    bare = subprocess.run([sys.executable, "-I", str(PATCH)], capture_output=True, text=True)
    assert bare.returncode == 1 and bare.stderr.startswith("Error: sglang is not installed")
    assert CPU_PYTHON.is_file(), server_module.REMEDY
    ours = subprocess.run([CPU_PYTHON, str(PATCH)], capture_output=True, text=True)
    assert ours.stdout == "already patched\n", ours.stderr
