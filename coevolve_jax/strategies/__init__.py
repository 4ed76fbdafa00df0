SHARED = ("base", "batches", "growth", "groups", "hints", "questions")  # files here that are no strategy
