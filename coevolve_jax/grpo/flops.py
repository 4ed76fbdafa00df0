"""Floating-point operations of an update, from which the share of a device's peak (MFU) is computed.

Matrix products count, two operations for each multiplication and addition (PaLM, arXiv 2204.02311, appendix
B). Padding, and what is computed again to save memory, do not count.
"""

from __future__ import annotations

import numpy as np

from coevolve_jax.grpo.packing import Batch
from coevolve_jax.models.decoder import ModelConfig


def forward(c: ModelConfig, tokens: int, pairs: int, predicted: int) -> float:
    """Operations of one forward pass.

    tokens: without padding. pairs: of a token and one that it attends to. predicted: tokens with logits.
    """
    heads = c.num_attention_heads * c.head_dim
    attention = 2 * c.hidden_size * (heads + c.num_key_value_heads * c.head_dim)
    dense = 3 * c.hidden_size * c.intermediate_size
    experts = c.hidden_size * (c.num_experts + 3 * c.num_experts_per_tok * c.moe_intermediate_size)
    layers = c.num_hidden_layers * attention + len(c.dense_layers) * dense + len(c.sparse_layers) * experts
    scores = 2 * c.num_hidden_layers * heads  # queries with keys, and weights with values
    return 2.0 * (tokens * layers + pairs * scores + predicted * c.hidden_size * c.vocab_size)


def of_batch(c: ModelConfig, batch: Batch[np.ndarray]) -> float:
    """Operations of one forward pass on a batch. A backward pass has twice as many, with LoRA as many."""
    real = batch.segment_ids > 0
    predicted = batch.mask | (batch.ce_weights != 0) if batch.ce_weights.size else batch.mask
    # A token attends to itself and to those before it in its segment.
    pairs = int(np.sum(batch.positions[real], dtype=np.int64)) + int(real.sum())
    return forward(c, int(real.sum()), pairs, int(predicted.sum()))
