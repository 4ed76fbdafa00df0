"""The folder of the checkout, for a file anywhere in tests/."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
