"""Where are the files of a run? In `<storage>/<name>/`, on any filesystem that pyarrow supports.

Holds paths and the few operations that all users of a run directory share; the content of the files is defined elsewhere.
Runs in every process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import fs

CHECKPOINTS = "checkpoints"
EVENTS = "events.jsonl"
RUN = "run.json"


@dataclass(frozen=True)
class RunDir:
    """The directory of one run.

    Args:
        filesystem: the filesystem.
        path: the path on it, without a scheme.
        is_local: whether it is this machine's own filesystem.
    """

    filesystem: fs.FileSystem
    path: str
    is_local: bool

    @classmethod
    def at(cls, storage: str, name: str) -> RunDir:
        """The directory of run `name` in `storage`, which is a path (made absolute) or a URI."""
        if "://" in storage:
            filesystem, root = fs.FileSystem.from_uri(storage)
        else:
            filesystem, root = fs.LocalFileSystem(), str(Path(storage).expanduser().absolute())
        return cls(filesystem, f"{root.rstrip('/')}/{name}", isinstance(filesystem, fs.LocalFileSystem))

    def child(self, *names: str) -> str:
        return "/".join([self.path, *names])

    def exists(self, *names: str) -> bool:
        return bool(self.filesystem.get_file_info(self.child(*names)).type != fs.FileType.NotFound)

    def read_json(self, *names: str) -> Any:
        """Raises FileNotFoundError if there is no such file, ValueError if it is not JSON."""
        with self.filesystem.open_input_stream(self.child(*names)) as stream:
            return json.loads(stream.read())

    def write_json(self, value: Any, *names: str, default: Callable[[Any], Any] | None = None) -> None:
        """Writes the file atomically, as far as the filesystem can rename files.

        Args:
            value: plain values.
            names: path of the file below this directory.
            default: converts values that JSON does not support, as in `json.dumps`.
        """
        self.filesystem.create_dir(self.child(*names[:-1]), recursive=True)
        data = json.dumps(value, indent=1, default=default).encode()
        target = self.child(*names)
        if not self.is_local:  # object stores make a file visible only when it is complete
            self._write(target, data)
            return
        self._write(f"{target}.new", data)
        self.filesystem.move(f"{target}.new", target)

    def _write(self, path: str, data: bytes) -> None:
        with self.filesystem.open_output_stream(path) as stream:
            stream.write(data)
