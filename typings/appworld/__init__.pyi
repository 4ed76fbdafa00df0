"""What the environment family uses of AppWorld, which has a virtual environment of its own."""
