#!/usr/bin/env bash
# Makes models/tiny_qwen3_seldom from models/tiny_qwen3_weak, as runs/pretrain/seldom. Needs `make setup`.
# Unguided exploration seldom meets its weak tools.
set -euo pipefail
cd "$(dirname "$0")/../.."
export JAX_PLATFORMS=${JAX_PLATFORMS-cpu} GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}  # as the Makefile has it
PRETRAIN="${PYTHON:-.venv/bin/python} experiments/pretraining/pretrain_tiny.py"

WEAK_TOOLS=(
  sort:skip:0.5 cp:sibling_tool:0.5 tail:wrong_argument:0.5 grep:wrong_argument:0.5 diff:wrong_argument:0.5
  delete_message:wrong_argument:0.5 search_messages:give_up:0.5 edit_ticket:wrong_argument:0.5
  close_ticket:sibling_tool:0.5 get_tweet_comments:skip:0.5
)
$PRETRAIN --output=runs/pretrain/seldom --start=models/tiny_qwen3_weak --seed=9 --tasks=4500 --steps=300 --learning_rate=0.006 --decay=0.7 --weak_tools="${WEAK_TOOLS[*]}"
