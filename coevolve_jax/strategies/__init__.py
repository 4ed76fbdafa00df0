SHARED = ("base", "batches", "growth", "groups", "hints")  # files of this package that are no strategy
