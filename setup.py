"""pyproject.toml has the metadata. A wheel also has copies of folders beside the package (shipped.py)."""

from setuptools import find_packages, setup

# Of the demo, and of the testbed that compares methods.
MODELS = ("models/tiny_qwen3", "models/tiny_qwen3_seldom", "models/tiny_qwen3_weak")
FOLDERS = ("experiments", "configs", "configs/models", "requirements", *MODELS)
COPIES = {f"coevolve_jax.checkout.{folder.replace('/', '.')}": folder for folder in FOLDERS}

setup(
    packages=[*find_packages(include=["coevolve_jax", "coevolve_jax.*"]), *COPIES],
    package_dir=COPIES,
)
