class PathStore:
    def update_root(self, root: str) -> None: ...

path_store: PathStore
