SHARED = ("base", "batches", "growth", "groups")  # files of this package that are no strategy
