"""A user's words for tools whose documentation addresses somebody else, or is too long."""

from __future__ import annotations

import re

from coevolve_jax.types import Call

WORDS = {
    "check_status_bar": "tell me what my status bar shows",
    "check_network_status": "check my phone's network status",
    "check_network_mode_preference": "tell me which network mode my phone prefers",
    "set_network_mode_preference": "set my preferred network mode to {mode}",
    "run_speed_test": "run a speed test",
    "toggle_airplane_mode": "toggle Airplane Mode",
    "check_sim_status": "check my SIM card",
    "reseat_sim_card": "take my SIM card out and put it back in",
    "toggle_data": "toggle mobile data",
    "toggle_roaming": "toggle Data Roaming",
    "check_data_restriction_status": "check whether anything restricts my data",
    "toggle_data_saver_mode": "toggle Data Saver mode",
    "check_apn_settings": "check my APN settings",
    "reset_apn_settings": "reset my APN settings",
    "check_wifi_status": "check my Wi-Fi",
    "toggle_wifi": "toggle Wi-Fi",
    "check_wifi_calling_status": "check whether Wi-Fi Calling is on",
    "toggle_wifi_calling": "toggle Wi-Fi Calling",
    "check_vpn_status": "check whether I use a VPN",
    "connect_vpn": "connect my VPN",
    "disconnect_vpn": "disconnect my VPN",
    "check_installed_apps": "tell me which apps are on my phone",
    "check_app_status": "check the status of the app {app_name}",
    "check_app_permissions": "tell me which permissions the app {app_name} has",
    "grant_app_permission": "give the app {app_name} the permission {permission}",
    "can_send_mms": "check whether I can send MMS",
    "reboot_device": "restart my phone",
    "check_payment_request": "check whether I was sent a payment request",
    "make_payment": "pay the bill that I was asked to pay",
    "get_data_usage": "tell me how much data line {line_id} of customer {customer_id} has used",
    "calculate": "calculate {expression}",
    "transfer_to_human_agents": "transfer me to a human agent, with the summary {summary}",
}


def wording(call: Call) -> str:
    """Returns a user's words for a call, "" for tools without words or arguments that do not fit them."""
    words = WORDS.get(call.name, "")
    if not words or set(re.findall(r"{(\w+)}", words)) != set(call.arguments):
        return ""
    return words.format_map({name: str(value) for name, value in call.arguments.items()})
