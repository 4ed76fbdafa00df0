"""Diagnostics and reward terms as data: rows of plain values, and formulas over them. Nothing needs jax."""
