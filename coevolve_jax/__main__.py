"""`python -m coevolve_jax` is the command coevolve."""

from coevolve_jax.cli import main

if __name__ == "__main__":
    main()
