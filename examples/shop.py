"""A shop with customers, stock and orders: ten tools for an agent, in a class in TRL's style.

python experiments/check_tools.py examples/shop.py:Shop
python experiments/main.py --config=configs/tools.py:source=examples/shop.py:Shop --workdir=runs/shop
"""

import random

PRODUCTS = (
    "lamp",
    "desk",
    "chair",
    "mug",
    "rug",
    "clock",
    "vase",
    "shelf",
    "kettle",
    "mirror",
    "stool",
    "tray",
)
PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jun", "Kim", "Leo")


class Shop:
    def reset(self, seed: int = 0, **row) -> str:
        draw = random.Random(seed)
        names = draw.sample(PRODUCTS, 6)
        self.stock = {name: {"price": draw.randint(5, 90), "count": draw.randint(1, 9)} for name in names}
        self.customers = {name: draw.randint(50, 300) for name in draw.sample(PEOPLE, 4)}
        self.orders = {}
        return "You help in a shop. Use its tools, and answer with what the user asks for."

    def list_products(self) -> dict:
        """Lists the products with their price and their count."""
        return self.stock

    def show_balance(self, customer: str) -> int:
        """Shows the balance of a customer.

        Args:
            customer: Name of the customer.
        """
        return self.customers[customer]

    def list_customers(self) -> list:
        """Lists the names of the customers."""
        return list(self.customers)

    def place_order(self, customer: str, product: str, count: int = 1) -> str:
        """Places an order. Its price goes off the customer's balance.

        Args:
            customer: Name of the customer.
            product: Name of the product.
            count: How many of it, from 1 to 5.

        Returns:
            The number of the order.
        """
        item = self.stock[product]
        if not 1 <= count <= item["count"]:
            raise ValueError(f"There are {item['count']} of {product}, not {count}.")
        if count * item["price"] > self.customers[customer]:
            raise ValueError(f"{customer} cannot pay {count * item['price']}.")
        item["count"] -= count
        self.customers[customer] -= count * item["price"]
        number = f"A{len(self.orders) + 1}"
        self.orders[number] = {"customer": customer, "product": product, "count": count, "status": "open"}
        return number

    def show_order(self, order: str) -> dict:
        """Shows an order.

        Args:
            order: Number of the order.
        """
        return self.orders[order]

    def ship_order(self, order: str) -> str:
        """Ships an open order.

        Args:
            order: Number of the order.
        """
        return self._close(order, "shipped")

    def cancel_order(self, order: str) -> str:
        """Cancels an open order and returns its price to the customer.

        Args:
            order: Number of the order.
        """
        found = self.orders[order]
        said = self._close(order, "cancelled")
        self.stock[found["product"]]["count"] += found["count"]
        self.customers[found["customer"]] += found["count"] * self.stock[found["product"]]["price"]
        return said

    def restock(self, product: str, count: int) -> int:
        """Adds pieces of a product to the stock.

        Args:
            product: Name of the product.
            count: How many pieces, from 1 to 9.
        """
        self.stock[product]["count"] += count
        return self.stock[product]["count"]

    def set_price(self, product: str, price: int) -> int:
        """Changes the price of a product.

        Args:
            product: Name of the product.
            price: The new price, from 1 to 99.
        """
        self.stock[product]["price"] = price
        return price

    def pay_in(self, customer: str, amount: int) -> int:
        """Adds money to the balance of a customer.

        Args:
            customer: Name of the customer.
            amount: How much, from 1 to 100.
        """
        self.customers[customer] += amount
        return self.customers[customer]

    def _close(self, order: str, status: str) -> str:
        if self.orders[order]["status"] != "open":
            raise ValueError(f"Order {order} is {self.orders[order]['status']} already.")
        self.orders[order]["status"] = status
        return f"{order} {status}"
