"""pyproject.toml has the metadata. A wheel also has copies of folders beside the package (shipped.py)."""

from setuptools import find_packages, setup

# The policies that shipped configs name.
MODELS = [f"models/tiny_qwen3{kind}" for kind in ("", "_seldom", "_tau2", "_textworld", "_weak")]
DOCS = [
    "docs",
    *(f"docs/{part}" for part in ("guides", "environments", "notes", "results")),
]  # their pages' text
FOLDERS = ("experiments", "configs", "configs/models", "examples", "requirements", *DOCS, *MODELS)
COPIES = {f"coevolve_jax.checkout.{folder.replace('/', '.')}": folder for folder in FOLDERS}

setup(
    packages=[*find_packages(include=["coevolve_jax", "coevolve_jax.*"]), *COPIES],
    package_dir=COPIES,
)
