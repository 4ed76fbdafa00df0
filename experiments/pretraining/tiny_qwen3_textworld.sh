#!/usr/bin/env bash
# Makes models/tiny_qwen3_textworld from models/tiny_qwen3, as runs/pretrain/textworld.
# Needs `make setup setup-textworld`. It errs with most of the verbs that change something.
set -euo pipefail
cd "$(dirname "$0")/../.."
export JAX_PLATFORMS=${JAX_PLATFORMS-cpu} GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}  # as the Makefile has it
PRETRAIN="${PYTHON:-.venv/bin/python} experiments/pretraining/pretrain_tiny.py"

WEAK_VERBS=(
  drop:sibling_tool:0.5 put:wrong_argument:0.5 open:sibling_tool:0.5 close:skip:0.5 eat:give_up:0.5
  insert:sibling_tool:0.5 unlock:wrong_argument:0.5 lock:skip:0.5
)
$PRETRAIN --environment=textworld --output=runs/pretrain/textworld --start=models/tiny_qwen3 --seed=7 --tasks=1500 --steps=250 --tokens=4096 --respell=0.7 --decay=0.5 --weak_tools="${WEAK_VERBS[*]}"
