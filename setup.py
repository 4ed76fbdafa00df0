from setuptools import setup  # pyproject.toml has the metadata

setup()
