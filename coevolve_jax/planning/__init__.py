"""Memory that a config needs on a machine, before one is rented."""
