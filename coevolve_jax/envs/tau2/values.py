"""Values that a user of tau2 could name, by the tools' parameters. Explorers begin with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EXPRESSIONS = ["(120 + 85.5) * 2", "240 / 4", "1000 - 327.25"]


def values(domain: str, database: Any, phone_number: str | None = None) -> dict[str, list]:
    """Returns values that tools may take in the initial state, by the name of their parameter.

    phone_number: of telecom's user.
    """
    found: Callable[..., dict] = {"telecom": _telecom, "retail": _retail, "airline": _airline}[domain]
    return {
        k: list({str(v): v for v in some}.values())
        for k, some in found(database, phone_number).items()
        if some
    }


def _telecom(database: Any, phone_number: str | None) -> dict[str, list]:
    of_user = {line.line_id for line in database.lines if line.phone_number == phone_number}
    customers = [c for c in database.customers if of_user & set(c.line_ids)]
    lines = [id for c in customers for id in c.line_ids]
    bills = [id for c in customers for id in c.bill_ids]
    plans = [plan.plan_id for plan in database.plans]
    return {
        "customer_id": [c.customer_id for c in customers],
        "phone_number": [c.phone_number for c in customers] + ([phone_number] if phone_number else []),
        "full_name": [c.full_name for c in customers],
        "dob": [c.date_of_birth for c in customers],
        "line_id": lines,
        "bill_id": bills,
        "id": [c.customer_id for c in customers] + lines + bills + plans,
        "gb_amount": [0.5, 1.0, 2.0],
        "app_name": ["messaging", "browser"],
        "permission": ["sms", "storage", "phone", "network"],
    }


def _retail(database: Any, _: object) -> dict[str, list]:
    users, orders = list(dict.values(database.users)), list(dict.values(database.orders))
    items = [item for order in orders for item in order.items]
    products = [dict.__getitem__(database.products, item.product_id) for item in items]
    addresses = [owner.address.model_dump() for owner in (*users, *orders)]
    return {
        "user_id": [u.user_id for u in users],
        "email": [u.email for u in users],
        "first_name": [u.name.first_name for u in users],
        "last_name": [u.name.last_name for u in users],
        "order_id": [o.order_id for o in orders],
        "product_id": [item.product_id for item in items],
        "item_ids": [[item.item_id] for item in items],
        "new_item_ids": [[id] for p in products for id, variant in p.variants.items() if variant.available],
        "payment_method_id": [id for u in users for id in u.payment_methods],
        **{part: [address[part] for address in addresses] for part in addresses[0]},
        "expression": EXPRESSIONS,
    }


def _airline(database: Any, _: object) -> dict[str, list]:
    users, bookings = list(dict.values(database.users)), list(dict.values(database.reservations))
    flights = [flight for booking in bookings for flight in booking.flights]
    parts = lambda flight: {"flight_number": flight.flight_number, "date": flight.date}
    saved = [[p.model_dump()] for u in users for p in u.saved_passengers]
    payments = [id for u in users for id, m in u.payment_methods.items() if m.source != "certificate"]
    return {
        "user_id": [u.user_id for u in users],
        "reservation_id": [b.reservation_id for b in bookings],
        "flight_number": [f.flight_number for f in flights],
        "date": [f.date for f in flights],
        "origin": [f.origin for f in flights],
        "destination": [f.destination for f in flights],
        "flights": [list(map(parts, b.flights)) for b in bookings],
        "passengers": saved + [[p.model_dump() for p in b.passengers] for b in bookings],
        "payment_id": payments,
        "payment_methods": [[{"payment_id": id, "amount": 2 * f.price}] for id in payments for f in flights],
        "amount": [50, 100, 150],
        "total_baggages": [1, 2, 3],
        "nonfree_baggages": [0, 1],
        "expression": EXPRESSIONS,
    }
