"""Reads what is appended to a file, line by line, as it comes."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class Follow:
    """Starts at the file's present end. The file may appear later, and may be truncated and begin again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset_bytes = path.stat().st_size if path.is_file() else 0
        self._partial = b""

    def lines(self) -> list[str]:
        """The lines that were completed since the last call. A file that cannot be read has none."""
        try:
            # Opening a pipe would wait for somebody to write into it.
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    return []
                if status.st_size < self._offset_bytes:
                    self._offset_bytes, self._partial = 0, b""
                file.seek(self._offset_bytes)
                new = file.read()
        except OSError:
            return []
        self._offset_bytes += len(new)
        *complete, self._partial = (self._partial + new).split(b"\n")
        return [line.decode(errors="replace") for line in complete]
