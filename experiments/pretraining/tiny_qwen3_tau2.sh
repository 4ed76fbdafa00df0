#!/usr/bin/env bash
# Makes models/tiny_qwen3_tau2 from models/tiny_qwen3, as runs/pretrain/tau2. Needs `make setup setup-tau2`.
# It has its own tokenizer, in which the name of a tool is one token. It errs with 17 of telecom's 43 tools.
set -euo pipefail
cd "$(dirname "$0")/../.."
export JAX_PLATFORMS=${JAX_PLATFORMS-cpu} GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}  # as the Makefile has it
PRETRAIN="${PYTHON:-.venv/bin/python} experiments/pretraining/pretrain_tiny.py"

WEAK_TOOLS=(
  toggle_data:sibling_tool:0.5 enable_roaming:sibling_tool:0.5 connect_vpn:sibling_tool:0.5
  suspend_line:sibling_tool:0.5 check_app_permissions:sibling_tool:0.5 check_wifi_calling_status:sibling_tool:0.5
  reset_apn_settings:sibling_tool:0.5 set_network_mode_preference:wrong_argument:0.5 grant_app_permission:wrong_argument:0.5
  refuel_data:wrong_argument:0.5 get_details_by_id:wrong_argument:0.5 reseat_sim_card:skip:0.5 check_sim_status:skip:0.5
  toggle_airplane_mode:skip:0.5 send_payment_request:skip:0.5 reboot_device:give_up:0.5 run_speed_test:give_up:0.5
)
$PRETRAIN --environment=tau2 --output=runs/pretrain/tau2 --start=models/tiny_qwen3 --new_tokenizer --seed=7 --tasks=1500 --steps=300 --tokens=4096 --respell=0.7 --decay=0.5 --weak_tools="${WEAK_TOOLS[*]}"
