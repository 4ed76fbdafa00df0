# Files here that are no strategy.
SHARED = ("base", "batches", "episodes", "growth", "groups", "hints", "questions")
