"""The demo's shop: users, orders and devices, made up but realistic, and the same on every run."""

from __future__ import annotations

import random
from collections.abc import Iterator

import orjson

CITIES = ("Lisbon", "Kyoto", "Nairobi", "Oslo", "Quito", "Toronto", "Vienna", "Wellington")
STATES = ("new", "paid", "shipped", "delivered", "returned")
MODELS = ("thermostat", "camera", "lock", "speaker", "meter")
SHARES = {"users": 0.3, "orders": 0.5, "devices": 0.2}


def user(number: int, rng: random.Random) -> dict[str, object]:
    return {
        "name": f"user {number}",
        "email": f"user{number}@example.com",
        "city": rng.choice(CITIES),
        "age": rng.randint(18, 90),
        "tags": rng.sample(("vip", "newsletter", "beta", "b2b"), rng.randint(0, 2)),
        "address": {"street": f"{rng.randint(1, 99)} High Street", "zip": f"{rng.randint(10000, 99999)}"},
    }


def order(number: int, rng: random.Random) -> dict[str, object]:
    return {
        "user": f"user::{rng.randint(0, 60_000)}",
        "status": rng.choice(STATES),
        "total": round(rng.uniform(5, 500), 2),
        "items": rng.randint(1, 9),
        "city": rng.choice(CITIES),
        "note": "" if rng.random() < 0.9 else "please ring twice",
    }


def device(number: int, rng: random.Random) -> dict[str, object]:
    reading: float | int = round(rng.uniform(-5, 35), 1) if rng.random() < 0.8 else rng.randint(0, 30)
    return {"model": rng.choice(MODELS), "reading": reading, "online": rng.random() < 0.95, "firmware": "2.1"}


_MAKERS = {"users": user, "orders": order, "devices": device}


def documents(collection: str, count: int, seed: int = 7) -> Iterator[tuple[bytes, bytes]]:
    """Keys and JSON of the first ``count`` documents of a collection."""
    rng = random.Random(f"{seed}{collection}")
    make = _MAKERS[collection]
    for number in range(count):
        yield f"{collection[:-1]}::{number}".encode(), orjson.dumps(make(number, rng))


def manifest(uid: int = 2) -> bytes:
    """A scope ``shop`` with the three collections."""
    collections = [{"name": name, "uid": f"{8 + n:x}"} for n, name in enumerate(SHARES)]
    scopes = [
        {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]},
        {"name": "shop", "uid": "8", "collections": collections},
    ]
    return orjson.dumps({"uid": f"{uid:x}", "scopes": scopes})
