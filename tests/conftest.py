"""Fixtures that several test files share. Tests run on the CPU, whatever the machine has."""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the time goes into compiling programs that run once, so they are not optimised; XLA_FLAGS="" optimises them.
# What a user starts is compiled as for a user (test_train.py).
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

import pytest

from coevolve_jax.models.qwen import QwenConfig
from coevolve_jax.rollout.sglang.server import Server

TINY = Path(__file__).parents[1] / "models" / "tiny_qwen3"


# `make test` gives whole files to two processes: those that take longest go first, the others fill the gaps.
LONGEST = (
    "test_train.py",
    "test_hosts.py",
    "test_sharding.py",
    "test_served.py",
    "test_faults.py",
    "test_grpo.py",
    "test_models.py",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture
def tiny_config() -> QwenConfig:
    """A Qwen3 whose sizes are all different, so that a transposed or swapped axis cannot go unseen."""
    return QwenConfig(
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
def sglang_server(tmp_path_factory) -> Server:
    """A real SGLang server with models/tiny_qwen3 in float32 as version "0", started once for all tests.
    Who changes its weights puts them back. Without `make sglang-cpu`, whatever wants it fails and says so."""
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with Server(TINY, context_length=2048, max_running_requests=64, log_path=log) as server:
        yield server.wait_until_ready()
