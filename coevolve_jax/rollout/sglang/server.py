"""Runs a real SGLang server as child processes of this one: starts, watches, restarts and ends it.

    with Server("models/tiny_qwen3").wait_until_ready() as server:
        ... requests to server.url ...

SGLang has a Python environment of its own. On a CPU it is `.sglang`, which `make sglang-cpu` builds.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

import coevolve_jax
from coevolve_jax import shipped
from coevolve_jax.rollout.sglang import supervise

HOST = "127.0.0.1"
CPU_PYTHON = Path(coevolve_jax.__file__).resolve().parents[1] / ".sglang" / "bin" / "python"
REMEDY = (
    "in a checkout run `make sglang-cpu`, or set config.engine.python to the python of an environment with "
    "sglang"
)
POLL_SECONDS = 0.1
STOP_SECONDS = 30.0
TAIL_LINES = 8
# SGLang's "CPU engine" needs kernels that its package on PyPI lacks; 0 takes torch's. With a small model a
# second thread only costs: 64 requests to models/tiny_qwen3 took ten times the CPU time.
_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "0"}
_CPU_DEFAULTS = {"OMP_NUM_THREADS": "1"}
# The server's own warm-up needs a tokenizer, and /health generates a token anyway.
_CPU_FLAGS = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--skip-server-warmup",
    # Otherwise its scheduler spins on a core that the update needs.
    "--sleep-on-idle",
)
# Rollouts exchange token ids only. Without these flags a server also speaks OpenAI's protocol, for explorers.
_TOKENS_ONLY = ("--skip-tokenizer-init", "--grammar-backend", "none")
_QUIET = "GET /health"  # marks lines of the log that explain nothing


def default_python() -> str:
    """Returns this interpreter where it has sglang (GPU machines), otherwise the one of `.sglang`.

    ValueError with the remedy where neither has SGLang.
    """
    if importlib.util.find_spec("sglang") is not None:
        return sys.executable
    if CPU_PYTHON.is_file():
        return str(CPU_PYTHON)
    raise ValueError(
        f"SGLang is not installed, neither for {sys.executable} nor in {CPU_PYTHON.parents[1]}: {REMEDY}."
    )


def _command(python: str, model: Path, host: str, port: int, version: str, flags: Sequence[str]) -> list[str]:
    """Returns the command that starts a server. The server reports `version` with every token."""
    return [
        python,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(model),
        "--host",
        host,
        "--port",
        str(port),
        "--weight-version",
        version,
        *flags,
    ]


def _environment(python: str, cpu: bool, scratch: str) -> dict[str, str]:
    """Returns the server's environment variables: this process's, without its settings of JAX and Python.

    scratch: a folder for the server's socket files.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # the first start compiles: pip was told not to
    if python != sys.executable:
        env.pop("PYTHONPATH", None)
    if cpu:
        env = {**_CPU_DEFAULTS, **env, **_CPU_ENVIRONMENT}
    return {**env, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", "TMPDIR": scratch}


def _reserve(host: str, port: int) -> socket.socket:
    """Binds a port without listening: no other program gets it, but the server may still listen on it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        raise ValueError(
            f"Port {port} of {host} cannot be used ({error.strerror}): choose another, or 0 for "
            "any that is free."
        ) from None
    return reserved


def _end(process: subprocess.Popen) -> None:
    """Makes the supervisor kill the server's processes, and waits for it."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:  # the kernel kills the server's main process with the supervisor
        process.kill()
        process.wait()


class Server:
    """One SGLang server on this machine. The constructor launches it; `wait_until_ready` waits.

    model_path: Hugging Face folder. version: the server's label for these weights.
    python: an interpreter with sglang; default_python() by default.
    device: "cpu", or "auto" for SGLang's own choice and defaults. The default for `.sglang` is "cpu".
    context_length: tokens of prompt and answer.
    words: whether it also speaks the OpenAI protocol and constrains answers to a JSON schema. Explorers need
      this, rollouts do not.
    host: the address where it listens; 0.0.0.0 admits other machines. port: 0 chooses a free one.
    log_path: the file to which both output streams are appended.
    arguments: further arguments of sglang.launch_server, verbatim.
    deadline: seconds for a start.

    The processes end with `stop`, with this object, with the interpreter, and when this process is killed.
    Raises ValueError, before anything is launched, for an unusable python, folder, device or port.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        version: str = "0",
        python: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        context_length: int = 2048,
        max_running_requests: int = 64,
        seed: int = 0,
        host: str = HOST,
        port: int = 0,
        log_path: str | Path | None = None,
        words: bool = False,
        arguments: Sequence[str] = (),
        deadline: float = 600.0,
    ):
        self.python = python or default_python()
        if shutil.which(self.python) is None:
            raise ValueError(f"{self.python} (the python for SGLang) is not a program: {REMEDY}.")
        self.device = device or ("cpu" if Path(self.python) == CPU_PYTHON else "auto")
        if self.device not in ("cpu", "auto"):
            raise ValueError(f"The SGLang server has no device {self.device!r}: choose cpu or auto.")
        cpu = self.device == "cpu"
        cache = ("--max-total-tokens", str(context_length * max_running_requests)) if cpu else ()
        self._flags = [
            "--dtype",
            dtype,
            "--context-length",
            str(context_length),
            "--random-seed",
            str(seed),
            "--max-running-requests",
            str(max_running_requests),
            *cache,  # all running requests on a CPU; SGLang's choice elsewhere
            *(_CPU_FLAGS if cpu else ()),
            *(() if words else _TOKENS_ONLY),
            *arguments,
        ]
        self.deadline = deadline
        self._lock, self._stopped = threading.Lock(), False
        self._reserved = _reserve(host, port)
        self.port = self._reserved.getsockname()[1]
        self._host, self._reached = host, HOST if host == "0.0.0.0" else host
        self.url = f"http://{self._reached}:{self.port}"
        name = f"coevolve-sglang-{os.getuid()}-{self.port}.log"
        self.log_path = Path(log_path or Path(tempfile.gettempdir()) / name).resolve()
        self._launch(model_path, version)

    def _launch(self, model_path: str | Path, version: str) -> None:
        self.model_path, self.version = shipped.folder(model_path).resolve(), version
        if not (self.model_path / "config.json").is_file():
            raise ValueError(f"{model_path} is not a Hugging Face model folder: it has no config.json.")
        scratch = tempfile.mkdtemp(prefix="coevolve-sglang-")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    supervise.__file__,
                    str(os.getpid()),
                    scratch,
                    *_command(self.python, self.model_path, self._host, self.port, version, self._flags),
                ],
                env=_environment(self.python, self.device == "cpu", scratch),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(self, _end, self._process)

    def wait_until_ready(self) -> Server:
        """Returns self once the server has generated a token.

        Raises RuntimeError, with the last lines of the log, where it dies or its deadline passes. None of its
        processes runs then.
        """
        limit = time.monotonic() + self.deadline
        with tqdm(bar_format="SGLang starts, {elapsed}{postfix}", disable=None) as bar:
            while not self.healthy():
                if not self.alive():
                    raise RuntimeError(self.failure("died while starting"))
                if time.monotonic() > limit:
                    reason = self.failure(f"was not ready after {self.deadline:g} s")
                    self.stop()
                    raise RuntimeError(reason)
                bar.set_postfix_str("".join(self._tail(1))[:100])
                time.sleep(POLL_SECONDS)
        return self

    def alive(self) -> bool:
        """Says whether its process runs. It may still be starting, or hang."""
        return self._process.poll() is None

    def wait(self) -> None:
        """Waits until the server has ended, for any reason."""
        self._process.wait()

    def healthy(self, timeout: float = 25.0) -> bool:
        """Says whether the server generates: /health samples a token, or sees others, in 1 to 20 s."""
        connection = http.client.HTTPConnection(self._reached, self.port, timeout=timeout)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def restart(self, model_path: str | Path, version: str) -> Server:
        """Restarts the server at the same URL with these weights, from any state, hanging or dead included.

        Its running requests are lost.
        """
        with self._lock:
            if self._stopped:
                raise RuntimeError(f"The SGLang server at {self.url} was stopped.")
            self._finalizer()
            self._launch(model_path, version)
        return self.wait_until_ready()

    def stop(self) -> None:
        """Ends the server for good and waits for all its processes. A second call does nothing."""
        with self._lock:
            self._stopped = True
            self._finalizer()
        self._reserved.close()

    def failure(self, what: str = "does not answer") -> str:
        """Says in a sentence what happened to which server, with the last lines of its log."""
        tail = " | ".join(self._tail(TAIL_LINES)) or "nothing"
        return (
            f"The SGLang server at {self.url} ({self.model_path}) {what}. "
            f"Its log {self.log_path} ends with: {tail}"
        )

    def _tail(self, count: int) -> list[str]:
        with open(self.log_path, "rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 16384))
            lines = log.read().decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip() and _QUIET not in line][-count:]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
