"""Fixtures that several test files share. Tests run on the CPU, whatever the machine has."""
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import pytest

from coevolve_jax.models.qwen import QwenConfig


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
