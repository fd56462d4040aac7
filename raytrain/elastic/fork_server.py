"""How does a worker's process start without importing torch and Ray again? It is forked from a server on its node.

Imports are most of what a worker's start costs. Ray starts a worker by a command, whose Python a runtime environment may
replace (`py_executable`). Ours asks the fork server of its node for a process, and starts the server first if there is none.
The server has imported what every worker needs, runs no code of the task and has connected to nothing, so a forked process
is as clean as a new one. It serves one raylet and ends with it. Whatever goes wrong here, Ray's own command runs instead.

Imports nothing that takes time, since `main` runs once for each worker.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PRELOADED = ("ray.train", "torch", "torch._dynamo", "raytrain.elastic.internals", "raytrain.worker.loop")
"""What each worker needs, as far as it starts no threads and leaves the GPUs alone. torch.optim imports torch._dynamo."""
OF_ONE_PROCESS = ("RAY_JOB_ID", "SHLVL", "PWD", "OLDPWD", "_")
"""Environment variables that differ between workers which one server can serve."""
OTHER_COMMANDS = ("py_executable", "pip", "uv", "conda", "image_uri", "container", "nsight", "_nsight", "rocprof_sys")
"""Fields of a runtime environment that themselves decide which Python runs, or how."""
IDLE_S = 600.0
"""A server without living processes ends after this time, since it holds memory."""
START_TIMEOUT_S = 60.0
"""What a server may take to start; Ray waits no longer for a worker."""
RAYLET_PID = "RAY_RAYLET_PID"
NOT_FORKED = 3
WITHOUT_DIRECTORY = "import sys; sys.path[:1] == [''] and sys.path.pop(0)"
"""As for a script of Ray's, modules in the current directory must not hide others."""


def py_executable(variables: Mapping[str, str], modules: Sequence[str] = PRELOADED) -> str:
    """The command in place of Python's for a runtime environment of Ray, as a line for a shell.

    Args:
        variables: that libraries read when they are imported; a node's own variables win.
        modules: imported by the server.
    """
    own = [",".join(modules), *(f"{name}={value}" for name, value in sorted(variables.items())), "--"]
    code = f"{WITHOUT_DIRECTORY}; from {__name__} import main; sys.exit(main(sys.argv[1:]))"
    script = (
        f'python={shlex.quote(sys.executable)}; [ -x "$python" ] || python=python3; '
        f'"$python" {shlex.join(["-c", code, *own])} "$0" "$@" || exec "$python" "$0" "$@"'
    )
    return f"sh -c {shlex.quote(script)}"


def runtime_environment(of_job: Mapping[str, object], variables: Mapping[str, str]) -> dict[str, str]:
    """The runtime environment of an actor that is to be forked; empty if the job's decides which Python runs.

    Args:
        of_job: the job's own runtime environment.
        variables: as in `py_executable`.
    """
    if sys.platform != "linux" or any(of_job.get(field) for field in OTHER_COMMANDS):
        return {}
    return {"py_executable": py_executable(variables)}


def main(arguments: Sequence[str]) -> int:
    """Has the fork server start a process with a command, this environment, directory and standard streams.

    Args:
        arguments: modules, separated by commas; NAME=VALUE of each variable; "--"; the script and its arguments.

    Returns:
        0 once the process runs; else the caller has to start it.
    """
    split = arguments.index("--")
    modules, variables, command = arguments[0], arguments[1:split], arguments[split + 1 :]
    for name, _, value in (variable.partition("=") for variable in variables):
        os.environ.setdefault(name, value)
    path = _socket_path(command, modules)
    try:
        with open(f"{path}.lock", "a") as lock:
            for _ in range(2):  # the first server may be outdated
                fcntl.flock(lock, fcntl.LOCK_EX)
                server = _connect(path) or _start(path, modules)
                fcntl.flock(lock, fcntl.LOCK_UN)
                if _request(server, command):
                    return 0
        raise OSError("it ended")
    except OSError as error:
        sys.stderr.write(f"raytrain: no fork server: {error}; the worker imports all by itself\n")
    return NOT_FORKED


def _socket_path(command: Sequence[str], modules: str) -> str:
    """Where the server for this environment listens: among the sockets of the Ray session that starts the worker."""
    given = dict(argument[2:].split("=", 1) for argument in command if argument.startswith("--") and "=" in argument)
    lasting = sorted(item for item in os.environ.items() if item[0] not in OF_ONE_PROCESS)
    key = hashlib.sha256(json.dumps([sys.executable, os.getcwd(), modules, lasting]).encode()).hexdigest()[:8]
    return str(Path(given["temp-dir"], given["session-name"], "sockets", f"fork.{key}"))


def _connect(path: str) -> socket.socket | None:
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
        _, user, _ = struct.unpack("3i", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError:
        user = None
    if user == os.getuid():  # all may write to Ray's directory
        return server
    server.close()
    return None


def _start(path: str, modules: str) -> socket.socket:
    """Starts a server and waits until it answers."""
    Path(path).unlink(missing_ok=True)
    ready, writable = os.pipe()
    code = f"{WITHOUT_DIRECTORY}; from {__name__} import serve; serve({path!r}, {modules.split(',')!r}, {writable})"
    with open(f"{path}.log", "w") as log:
        null, command = subprocess.DEVNULL, [sys.executable, "-c", code]
        subprocess.Popen(command, stdin=null, stdout=log, stderr=log, pass_fds=[writable], start_new_session=True)
    os.close(writable)
    is_ready = select.select([ready], [], [], START_TIMEOUT_S)[0] and os.read(ready, 1)
    os.close(ready)
    server = _connect(path) if is_ready else None
    if server is None:
        raise OSError(f"it did not start, see {path}.log")
    return server


def _request(server: socket.socket, command: Sequence[str]) -> bool:
    """Whether the server forked a process for this command."""
    request = json.dumps({"command": command, "environment": dict(os.environ), "directory": os.getcwd()}).encode()
    try:
        with server:
            socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
            server.sendall(request)
            return bool(server.recv(1))
    except OSError:
        return False


# In the server


def serve(path: str, modules: Sequence[str], ready: int) -> None:
    """Imports the modules, then forks a process for each request until its raylet ends. Runs the command in each of them.

    Args:
        path: of the socket.
        modules: to be imported.
        ready: file descriptor; written to once requests are accepted.
    """
    started_ns = time.time_ns()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not initialise CUDA, which no fork survives
    for name in modules:
        importlib.import_module(name)
    paths = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    files = {path: version for path in paths if path and (version := _version(path))}  # torch names some that do not exist
    if any(modified_ns > started_ns for modified_ns, _ in files.values()):
        sys.exit("a module was edited while it was imported")
    gc.collect()
    gc.freeze()  # a collection would write to, and so copy, the pages that the processes share
    raylet = os.pidfd_open(int(os.environ[RAYLET_PID]))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(128)
    os.write(ready, b"1")
    os.close(ready)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel keeps no record of processes that have ended
    while True:
        readable = select.select([listener.fileno(), raylet], [], [], IDLE_S)[0]
        if raylet in readable or (not readable and not _has_children()):
            os._exit(0)
        if listener.fileno() not in readable:
            continue
        client = listener.accept()[0]
        if any(_version(path) != version for path, version in files.items()):
            os._exit(0)  # the next server imports what was edited or installed since
        length, streams, *_ = socket.recv_fds(client, 4, 3)
        request = json.loads(client.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
        if os.fork() == 0:
            break
        for descriptor in streams:
            os.close(descriptor)
        client.sendall(b"1")
        client.close()
    for opened in (listener, client):
        opened.close()
    os.close(raylet)
    _become(request, streams)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _version(path: str) -> tuple[int, int] | None:
    """What changes with a file: its time of modification in nanoseconds, and its size in bytes."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Makes a forked process the one that was asked for."""
    os.setpgid(0, 0)  # Ray ends a worker's process group with the worker
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = list(request["command"])
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # else it would be the same in all processes; torch's is the same in new processes too
