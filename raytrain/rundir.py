"""Where the files of a run lie: `<storage>/<name>/`, on any filesystem that pyarrow knows.

Knows paths and the few operations that all users of the run directory share; what is in the files is known elsewhere.
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
        filesystem: where it lies.
        path: its path there, without a scheme.
        is_local: whether it is on this machine's own filesystem.
    """

    filesystem: fs.FileSystem
    path: str
    is_local: bool

    @classmethod
    def at(cls, storage: str, name: str) -> RunDir:
        """The directory of run `name` below `storage`, a path (made absolute) or a URI."""
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
        """Raises FileNotFoundError where there is no such file, ValueError where it is not JSON."""
        with self.filesystem.open_input_stream(self.child(*names)) as stream:
            return json.loads(stream.read())

    def write_json(self, value: Any, *names: str, default: Callable[[Any], Any] | None = None) -> None:
        """Writes the file whole or not at all, as far as the filesystem can move files.

        Args:
            value: plain values.
            names: of the file, below this directory.
            default: makes something plain of what JSON does not know, which is refused otherwise.
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
