"""What a config takes on which machine, before one is rented."""
