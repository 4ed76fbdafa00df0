#!/usr/bin/env bash
# Makes models/tiny_qwen3_weak, as runs/pretrain/weak. Needs `make setup`.
# Unguided exploration meets three of its weak tools often, three now and then, and four rarely.
set -euo pipefail
cd "$(dirname "$0")/../.."
export JAX_PLATFORMS=${JAX_PLATFORMS-cpu} GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}  # as the Makefile has it
PRETRAIN="${PYTHON:-.venv/bin/python} experiments/pretraining/pretrain_tiny.py"

WEAK_TOOLS=(
  get_user_stats:wrong_argument:0.5 view_messages_sent:skip:0.5 du:sibling_tool:0.5
  search_tweets:give_up:0.5 edit_ticket:wrong_argument:0.5 close_ticket:sibling_tool:0.5
  sort:skip:0.5 cp:sibling_tool:0.5 tail:wrong_argument:0.5 delete_message:wrong_argument:0.5
)
$PRETRAIN --output=runs/pretrain/broad --seed=7 --steps=600
$PRETRAIN --output=runs/pretrain/weak --start=runs/pretrain/broad --seed=8 --tasks=6000 --steps=400 --learning_rate=0.008 --decay=0.7 --weak_tools="${WEAK_TOOLS[*]}"
