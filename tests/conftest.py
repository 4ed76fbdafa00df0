"""Fixtures that several test files share. Tests run on the CPU, whatever the machine has."""

import gc
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from tests.support.paths import ROOT

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the time goes into compiling programs that run a few times, so XLA does not optimise them.
# XLA_FLAGS="" and JAX_DISABLE_MOST_OPTIMIZATIONS=0 turn optimisation on, as `environ` does.
JAXLIB = tuple(map(int, metadata.version("jaxlib").split(".")[:2]))
FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
if JAXLIB < (0, 12):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # later ones do not know it
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# NumPy's products are small here: threads that wait for each other on busy cores take ten times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# All tests and all their processes share the compiled programs, also with the next session.
# A program's key holds the versions, the flags and the processor. `pytest --cache-clear` forgets them.
COMPILED = ROOT / ".pytest_cache" / "d" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
KEPT = 14 * 24 * 3600.0  # seconds until an unused program is deleted, so that the folder stays small

import hypothesis
import pytest

from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.rollout.sglang.server import Server

TINY = ROOT / "models" / "tiny_qwen3"

# An example's duration depends on the machine's load.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# One process runs all of these, in this order: they share the servers.
SERVER = (
    "test_server.py",
    "test_words.py",  # before test_faults.py, which ends the second server
    "test_faults.py",
    "test_push_served.py",
    "test_engines.py",
    "test_served.py",  # after test_train.py, in another process, has compiled its programs
)
SERVER_TOO = "test_hosts.py::test_a_server_gets_the_weights_of_two_processes"
# Fixture -> the marker of every test that asks for it.
MARKED = {"sglang_server": "server", "to_be_struck": "server", "browser": "browser"}
MARKERS = ("slow", "server", "browser")
GUESS = 30.0  # seconds, for a test with such a marker that has never been timed
SECONDS = pytest.StashKey[dict[str, float]]()  # seconds of each test, as last measured
IN_CACHE = "coevolve_jax/seconds"
measured: dict[str, float] = {}


def scope(nodeid: str) -> str:
    """Returns the scope of a test. One process runs all tests of a scope."""
    file = nodeid.split("::", 1)[0]
    return "server" if Path(file).name in SERVER or nodeid.endswith(SERVER_TOO) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FilesOfOneServerTogether(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return scope(nodeid)

    return FilesOfOneServerTogether(config, log)


def pytest_addoption(parser):
    # Random order of files, and of tests within a file: no test may depend on another one.
    # The end of the output names the seed, which repeats the order:
    #     pytest tests -n 3 --dist loadfile --no-loadscope-reorder --order-seed=random
    #     pytest tests/rollout/test_push_served.py --order-seed=17
    parser.addoption("--order-seed", help="run tests in random order: a number, or random", metavar="SEED")


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # a worker process, which receives the options of the first one
        config.stash[SECONDS] = config.workerinput["seconds"]
        return
    cache = getattr(config, "cache", None)  # None with -p no:cacheprovider
    config.stash[SECONDS] = cache.get(IN_CACHE, {}) if cache else {}
    if config.option.order_seed == "random":
        config.option.order_seed = str(random.SystemRandom().randrange(10**6))
    for program in COMPILED.glob("*"):
        if program.stat().st_mtime < time.time() - KEPT:
            program.unlink(missing_ok=True)


def pytest_terminal_summary(terminalreporter, config):
    if config.option.order_seed:
        terminalreporter.write_line(f"in the order of --order-seed={config.option.order_seed}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips the import of a file whose tests -m "not slow and not ..." excludes.

    Its imports may not be installed.
    """
    chosen = config.option.markexpr
    if collection_path.suffix != ".py" or not re.fullmatch(r"not \w+( and not \w+)*", chosen):
        return None
    marks = re.search(r"^pytestmark = .*$", collection_path.read_text(), re.MULTILINE)
    return True if marks and set(chosen.split()) & set(re.findall(r"mark\.(\w+)", marks[0])) else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["seconds"] = node.config.stash[SECONDS]  # all processes must order the tests alike


def pytest_runtest_logreport(report):
    measured[report.nodeid] = measured.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session):
    config = session.config
    if measured and not hasattr(config, "workerinput") and hasattr(config, "cache"):
        config.cache.set(IN_CACHE, config.stash[SECONDS] | measured)


@pytest.hookimpl(tryfirst=True)  # before pytest groups the tests that share a module's fixture
def pytest_collection_modifyitems(config, items):
    for item in items:
        for marker in {MARKED[name] for name in MARKED.keys() & set(item.fixturenames)}:
            item.add_marker(marker)
    if seed := config.option.order_seed:
        files = sorted({item.path.name for item in items})
        place = {name: i for i, name in enumerate(random.Random(seed).sample(files, len(files)))}
        random.Random(seed).shuffle(items)
        items.sort(key=lambda item: place[item.path.name])
    else:
        longest_first(items, config.stash[SECONDS])


def longest_first(items: list[pytest.Item], seconds: dict[str, float]) -> None:
    """Sorts scopes by seconds, longest first: short ones then fill the gaps at the end."""
    whole: dict[str, float] = {}
    for item in items:
        guess = GUESS if any(map(item.get_closest_marker, MARKERS)) else 0.0
        name = scope(item.nodeid)
        whole[name] = whole.get(name, 0.0) + seconds.get(item.nodeid, guess)
    place = lambda file: SERVER.index(file) if file in SERVER else len(SERVER)
    items.sort(key=lambda item: (-whole[scope(item.nodeid)], scope(item.nodeid), place(item.path.name)))


def pytest_collection_finish(session):
    # Imported objects stay: the collector need not search them while programs are traced.
    gc.freeze()
    # By default collections took every seventh second of an update's test.
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def tiny_config() -> ModelConfig:
    """A Qwen3 whose sizes all differ, so that a transposed or swapped axis shows."""
    return ModelConfig(
        model_type="qwen3",
        vocab_size=88,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        rope_theta=1e6,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )


@pytest.fixture(scope="session")
def environ() -> dict[str, str]:
    """Runs a user's program as installed for a user (without PyTorch) and optimised: costly to compile."""
    path = os.pathsep.join(
        (str(ROOT / "tests" / "support" / "as_installed"), os.environ.get("PYTHONPATH", ""))
    )
    return {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}


@pytest.fixture(scope="session")
def quick(environ) -> dict[str, str]:
    """`environ` without optimisation: with what these tests compile themselves."""
    return {**environ, **{name: os.environ[name] for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}}


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory) -> Server:
    """A real SGLang server with models/tiny_qwen3 in float32 as version "0", started once for all tests.

    A test that needs certain weights pushes them first: the server may hold any.
    Without `make sglang-cpu` the start fails and says so.
    """
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    told = ("--enable-metrics",)  # metrics of the time that requests wait
    with Server(TINY, context_length=2048, max_running_requests=64, log_path=log, arguments=told) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="session")
def to_be_struck(tmp_path_factory) -> Iterator[Callable[[], Server]]:
    """Gives a second real server, which also handles text. Tests may kill, stop and restart it.

    Returns the last one while it is alive. It may hold any weights.
    """
    started, log = [], tmp_path_factory.mktemp("struck") / "server.log"

    def server() -> Server:
        if not started or not started[-1].alive():
            started.append(
                Server(TINY, words=True, context_length=8192, max_running_requests=8, log_path=log)
            )
        return started[-1]

    yield server
    for one in started:
        one.stop()
