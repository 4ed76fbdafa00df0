#!/usr/bin/env bash
# Makes models/tiny_qwen3, as runs/pretrain/habits. Needs `make setup`. docs/notes/results.md has its wall time.
set -euo pipefail
cd "$(dirname "$0")/../.."
export JAX_PLATFORMS=${JAX_PLATFORMS-cpu} GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}  # as the Makefile has it
PRETRAIN="${PYTHON:-.venv/bin/python} experiments/pretraining/pretrain_tiny.py"

$PRETRAIN --output=runs/pretrain/clean --seed=7 --steps=1200
$PRETRAIN --output=runs/pretrain/habits --start=runs/pretrain/clean --seed=8 --tasks=6000 --steps=350 --learning_rate=0.006 --decay=0.7 --weak=0.45
