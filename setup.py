"""Package metadata. `make demo` and `make test` install from the pinned requirements/ files instead."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="coevolve_jax",
    version=re.search(r'^__version__ = "(.+)"$', (HERE / "coevolve_jax/__init__.py").read_text(), re.M)[1],
    description="CoEvolve in JAX: a policy and its training set evolve together.",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["coevolve_jax", "coevolve_jax.*"]),
    # Markdown: prompts and wording that roles read.
    package_data={
        "": ["*.md"],
        "coevolve_jax": ["py.typed", "*.pyi"],
        "coevolve_jax.analysis": ["viewer/*", "viewer/vendor/*"],
    },
    python_requires=">=3.11",
    install_requires=[
        "jax>=0.10",
        "flax>=0.12",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12",
        "etils[epath]>=1.13",
        "jaxtyping>=0.3",
        "transformers>=5.0",
        "safetensors>=0.8",
        "ml-collections>=1.1",
        "absl-py>=2.5",
        "tqdm>=4.67",
        "aiohttp>=3.11",
        "jinja2>=3.1",
        "tensorboardX>=2.6",
        "scipy>=1.14",
        # What the BFCL environment imports. The package itself wants --no-deps
        # (its declared dependencies are 3.2 GB): `make` does that, or
        # `pip install --no-deps -r requirements/bfcl.txt`.
        "mpmath==1.3.0",
        "filelock",
    ],
    extras_require={
        # llguidance: for explorer=policy, whose answers the in-process engine constrains to a schema.
        "llm": ["openai>=3.54", "pydantic>=2.14", "llguidance>=1.9"],
        "test": ["pytest", "hypothesis", "playwright", "nbclient", "ipykernel"],
        # The parity tests compare with transformers' own Qwen on torch (CPU build).
        "torch": ["torch==2.13.0"],
        "wandb": ["wandb>=0.25"],  # config.logging.trackers
        "ray": ["ray>=2.55"],  # environment workers on other machines
        "cuda": ["jax[cuda13]>=0.10"],
        "tpu": ["jax[tpu]>=0.10"],
        # tensorflow-datasets imports importlib_resources and does not ask for it.
        "tfds": ["tensorflow-datasets>=4.9.10", "array-record>=0.8", "importlib_resources"],
        "notebooks": ["jupyterlab", "matplotlib>=3.10"],
    },
)
