"""Makes template folders for an MCP server: shops, each a SQLite database, for training and evaluation.

    python examples/mcp_shop.py runs/mcp_shop

FOLDER/train, /development and /test get a folder for each shop, with shop.db. Beside it, coevolve.json holds
SQL that an explorer may try in this shop: no rule can invent that. The same FOLDER holds the same shops.
"""

import json
import random
import sqlite3
import sys
from pathlib import Path

SHOPS = {"train": 12, "development": 12, "test": 12}
GOODS = (
    "tea coffee cocoa milk bread butter cheese apples pears plums honey salt pepper rice beans soap".split()
)
PEOPLE = "Ada Ben Cleo Dan Eva Finn Gus Hal Ida Jon Kim Leo Mia Ned Oda Pam".split()
CITIES = "Oslo Bern Rome Lima Cairo Delhi Quito Paris".split()
SCHEMA = """
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, price REAL, stock INTEGER);
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE orders (id INTEGER PRIMARY KEY, product INTEGER, customer INTEGER, pieces INTEGER);
"""


def make(folder: Path, rng: random.Random) -> None:
    """Makes one shop, unless it is there. One without coevolve.json, its last file, is made anew."""
    if (folder / "coevolve.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shop.db").unlink(missing_ok=True)
    products = [
        (i, name, rng.randint(2, 40) / 2, rng.randint(0, 30))
        for i, name in enumerate(rng.sample(GOODS, 6), 1)
    ]
    customers = [(i, name, rng.choice(CITIES)) for i, name in enumerate(rng.sample(PEOPLE, 5), 1)]
    orders = [(i, rng.randint(1, 6), rng.randint(1, 5), rng.randint(1, 9)) for i in range(1, 9)]
    database = sqlite3.connect(folder / "shop.db")
    database.executescript(SCHEMA)
    for table, rows in {"products": products, "customers": customers, "orders": orders}.items():
        database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    database.commit()
    database.close()
    (folder / "coevolve.json").write_text(json.dumps({"values": values(rng)}, indent=1))


def values(rng: random.Random) -> dict[str, list[str]]:
    """Returns values by tool and parameter. A user types at most 40 characters, so no value is longer."""
    n = rng.randint
    return {
        "read_query.query": [
            f"SELECT name FROM products WHERE id={n(1, 6)}",
            f"SELECT stock FROM products WHERE id={n(1, 6)}",
            f"SELECT city FROM customers WHERE id={n(1, 5)}",
            f"SELECT pieces FROM orders WHERE id={n(1, 8)}",
            f"SELECT id FROM orders WHERE customer={n(1, 5)}",
            f"SELECT COUNT(*) FROM {rng.choice(('products', 'orders'))}",
        ],
        "write_query.query": [
            f"UPDATE products SET stock={n(31, 60)} WHERE id={n(1, 6)}",
            f"UPDATE products SET price={n(1, 9)} WHERE id={n(1, 6)}",
            f"UPDATE orders SET pieces={n(10, 20)} WHERE id={n(1, 8)}",
            f"DELETE FROM orders WHERE id={n(1, 8)}",
            f"INSERT INTO orders VALUES (9,{n(1, 6)},{n(1, 5)},{n(1, 9)})",
        ],
        "create_table.query": [
            f"CREATE TABLE {name} (id, text)" for name in ("notes", "returns", "suppliers")
        ],
        "describe_table.table_name": ["products", "customers", "orders"],
    }


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("Error: name the folder to make, such as runs/mcp_shop.")
    for number, split in enumerate(SHOPS):
        for shop in range(SHOPS[split]):
            make(Path(sys.argv[1], split, f"shop_{shop}"), random.Random(100 * number + shop))
