#!/usr/bin/env bash
# Makes the base policy of the table for hints from models/tiny_qwen3_seldom, as runs/pretrain/hints. Needs `make setup`.
# It has the same ten weak tools. 30% of its demonstrations hold a hint, and 30% of these are wrong.
# Further flags are added: experiments/pretraining/tiny_qwen3_hints.sh --tasks=300 --steps=10
set -euo pipefail
cd "$(dirname "$0")/../.."
export JAX_PLATFORMS=${JAX_PLATFORMS-cpu} GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}  # as the Makefile has it
PRETRAIN="${PYTHON:-.venv/bin/python} experiments/pretraining/pretrain_tiny.py"

WEAK_TOOLS=(
  sort:skip:0.5 cp:sibling_tool:0.5 tail:wrong_argument:0.5 grep:wrong_argument:0.5 diff:wrong_argument:0.5
  delete_message:wrong_argument:0.5 search_messages:give_up:0.5 edit_ticket:wrong_argument:0.5
  close_ticket:sibling_tool:0.5 get_tweet_comments:skip:0.5
)
$PRETRAIN --output=runs/pretrain/hints --start=models/tiny_qwen3_seldom --seed=10 --tasks=4500 --steps=300 --learning_rate=0.006 --decay=0.7 --hints=0.3 --wrong_hints=0.3 --weak_tools="${WEAK_TOOLS[*]}" "$@"
