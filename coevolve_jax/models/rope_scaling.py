"""Scalings of rotary position embeddings for contexts that grew: YaRN and Llama 3's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary embeddings (arXiv 2309.00071), under the names of config.json.

    Attributes:
      factor: the ratio by which the context grows.
      original_max_position_embeddings: the context in tokens before it grew.
      beta_fast: a pair of coordinates that turns more often than this in the original context is unchanged.
      beta_slow: a pair that turns less often than this is slowed down by `factor`.
      attention_factor: scales cos and sin. None: derived from factor, and from mscale and mscale_all_dim
        where both are given.
      truncate: round the bounds of the ramp between beta_fast and beta_slow to whole coordinates.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    rope_type: ClassVar[str] = "yarn"

    @property
    def scale(self) -> float:
        """The factor by which cos and sin are multiplied."""
        if self.attention_factor is not None:
            return self.attention_factor
        grown = lambda mscale: 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        if self.mscale and self.mscale_all_dim:
            return grown(self.mscale) / grown(self.mscale_all_dim)
        return grown(1.0)

    def bounds(self, head_dim: int, theta: float) -> tuple[float, float]:
        """The ramp's first and last coordinate: frequencies go from unscaled to divided by `factor`."""

        def turning(times):
            original = self.original_max_position_embeddings
            return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

        low, high = turning(self.beta_fast), turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high if high != low else high + 0.001

    def slow(self, frequencies: jax.Array, theta: float) -> jax.Array:
        """Scales the frequencies [head_dim / 2] of base `theta`. Source: arXiv 2309.00071, eq. 23."""
        half = len(frequencies)
        low, high = self.bounds(2 * half, theta)
        slowed = jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / (high - low), 0, 1)
        return frequencies / self.factor * slowed + frequencies * (1 - slowed)


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's scaling of rotary embeddings (arXiv 2407.21783), under the names of config.json.

    Attributes:
      factor: the ratio by which slow frequencies are divided.
      original_max_position_embeddings: the context in tokens before it grew.
      low_freq_factor: a frequency with fewer turns than this in the original context is slowed whole.
      high_freq_factor: a frequency with more turns is unchanged. Between the two it is interpolated.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float

    rope_type: ClassVar[str] = "llama3"
    scale: ClassVar[float] = 1.0

    def slow(self, frequencies: jax.Array, theta: float) -> jax.Array:
        """Scales the frequencies [head_dim / 2]."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        return frequencies / self.factor * (1 - kept) + frequencies * kept


Scaling = Yarn | Llama3Rope
_SCALINGS: dict[str, type[Scaling]] = {kind.rope_type: kind for kind in (Yarn, Llama3Rope)}


def read_rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields rope_theta and rope_scaling of ModelConfig from a config.json.

    As in transformers, rope_scaling (the older name) wins over rope_parameters. Raises ValueError for a type
    that this code does not implement, and where a field is missing.
    """
    for place in ("rope_parameters", "rope_scaling"):
        _check(place, data.get(place) or {})
    parameters, scaling = data.get("rope_parameters") or {}, data.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", parameters.get("rope_theta", data.get("rope_theta")))
    if theta is None:
        raise ValueError(
            "The model's config.json names no rope_theta, neither in rope_parameters nor at the "
            "top level; take it from the checkpoint's model card."
        )
    rope = scaling or parameters
    kind = _SCALINGS.get(rope.get("rope_type", rope.get("type", "default")))
    if kind is None:
        return {"rope_theta": float(theta)}
    names = [f.name for f in dataclasses.fields(kind)]
    fields = {name: rope[name] for name in names if rope.get(name) is not None}
    # As in transformers 5, an original length at the top level wins over the one in the scaling.
    length, limit = "original_max_position_embeddings", data.get("max_position_embeddings", 32768)
    fields[length] = data.get(length) or fields.get(length, limit)
    fields.setdefault("factor", limit / fields[length])
    for name in ("beta_fast", "beta_slow"):
        if not fields.get(name, True):  # transformers takes 0 as the default
            del fields[name]
    needed = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    if missing := [name for name in needed if name not in fields]:
        raise ValueError(
            f"The {kind.rope_type} rope of the model's config.json lacks {', '.join(missing)}; "
            "take it from the checkpoint's model card."
        )
    return {"rope_theta": float(theta), "rope_scaling": kind(**fields)}


def _check(place: str, rope: Mapping[str, Any]) -> None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" and kind not in _SCALINGS:
        raise ValueError(
            f"{place} type {kind!r} in config.json is not supported; only unscaled rotary embeddings "
            "('default'), 'yarn' and 'llama3' are, so use one of these."
        )
    if (partial := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(
            f"partial_rotary_factor {partial} of {place} in config.json is not supported; "
            "use a checkpoint that rotates whole heads."
        )


def write_rope(theta: float, scaling: Scaling | None) -> dict[str, Any]:
    """The fields of config.json that `read_rope` reads.

    transformers 5 reads rope_parameters, older versions the top-level rope_theta and rope_scaling.
    """
    rope = {"rope_type": "default", "rope_theta": theta}
    if scaling is None:
        return {"rope_theta": theta, "rope_parameters": rope}
    given = {k: v for k, v in dataclasses.asdict(scaling).items() if v is not None}
    rope = {**rope, "rope_type": scaling.rope_type, **given}
    return {"rope_theta": theta, "rope_scaling": rope, "rope_parameters": rope}
