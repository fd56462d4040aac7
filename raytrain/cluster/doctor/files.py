"""The files by which the driver and the nodes find out whether they share the storage; any filesystem of pyarrow.

Sent to the nodes by value, since raytrain may be missing there: pyarrow is imported only when it is used.
"""

from __future__ import annotations

from typing import Any


def make(directory: str) -> bool:
    """A directory, with its parents; whether the one above it is new.

    Raises:
        OSError, ValueError: it cannot be made.
    """
    from pyarrow import fs

    filesystem, path = _filesystem(directory)
    above = path.rpartition("/")[0]
    is_new = bool(filesystem.get_file_info(above).type == fs.FileType.NotFound)
    filesystem.create_dir(path, recursive=True)
    return is_new


def remove(directory: str, with_parent: bool) -> None:
    """A directory with all that is in it, and the one above it if that is empty then.

    Raises:
        OSError: it cannot be removed.
    """
    from pyarrow import fs

    filesystem, path = _filesystem(directory)
    filesystem.delete_dir(path)
    above = path.rpartition("/")[0]
    if with_parent and not filesystem.get_file_info(fs.FileSelector(above, allow_not_found=True)):
        filesystem.delete_dir(above)


def read(directory: str, name: str) -> None:
    """Reads a file that holds its own name.

    Args:
        directory: a path, or a URI that pyarrow knows.

    Raises:
        OSError, ValueError: it is not there, or holds something else.
    """
    filesystem, path = _filesystem(directory)
    with filesystem.open_input_stream(f"{path}/{name}") as stream:
        if stream.read() != name.encode():
            raise OSError(f"{name} holds something else than what was written")


def write(directory: str, name: str) -> None:
    """Writes what `read` reads."""
    filesystem, path = _filesystem(directory)
    with filesystem.open_output_stream(f"{path}/{name}") as stream:
        stream.write(name.encode())


def _filesystem(directory: str) -> tuple[Any, str]:
    from pyarrow import fs

    return fs.FileSystem.from_uri(directory) if "://" in directory else (fs.LocalFileSystem(), directory)
