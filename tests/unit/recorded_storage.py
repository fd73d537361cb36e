"""A local storage that reports every change it makes, and may stop short of one."""

from gyre_core.storage import LocalStorage

CHANGES = ("create", "replace", "create_file", "delete", "delete_folder")


class StopError(Exception):
    """The process ends here."""


class RecordedStorage(LocalStorage):
    """Calls `after(operation, name)` when a change was made, and raises StopError in place of the `stop_at`-th one."""

    def __init__(self, root, after=lambda operation, name: None, stop_at=None):
        super().__init__(root)
        self.changes = []
        self._after = after
        self._stop_at = stop_at

    def _change(self, operation, name, *arguments):
        if len(self.changes) == self._stop_at:
            raise StopError(f"{operation} {name}")
        result = getattr(LocalStorage, operation)(self, name, *arguments)
        self.changes.append((operation, name))
        self._after(operation, name)
        return result

    def create(self, name, data):
        return self._change("create", name, data)

    def replace(self, name, data):
        return self._change("replace", name, data)

    def create_file(self, name, write):
        return self._change("create_file", name, write)

    def delete(self, name):
        return self._change("delete", name)

    def delete_folder(self, folder):
        return self._change("delete_folder", folder)
