"""CoEvolve in JAX: a policy and its training set evolve together (arXiv 2604.15840)."""
