"""Environment families, loaded by name, and their worlds in worker processes."""

from coevolve_jax.envs.family import Family, load

__all__ = ["Family", "load"]
