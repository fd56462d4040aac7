"""How does a worker's process start without importing PyTorch again? It is forked from a server on its node.

Imports are most of what a worker's start costs. Ray starts a worker by a command, whose Python a runtime environment may
replace (`py_executable`). Ours asks the fork server of its node for a process, and starts the server first if there is none.
The server has imported what every worker needs, runs no code of the task and has connected to nothing, so a forked process
is as clean as a new one. Whatever goes wrong here, Ray's own command runs instead.

Ray itself is imported after the fork: it draws the ids of objects and calls from a random state, which forks would share.

Imports nothing that takes time, since `main` runs once for each worker.
"""

from __future__ import annotations

import contextlib
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
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MODULES = (
    *("torch", "torch._dynamo", "safetensors.torch", "pandas", "pyarrow.dataset", "pyarrow.fs", "pyarrow.parquet"),
    *("fsspec", "pydantic", "google.protobuf.message", "jsonschema", "requests", "yaml"),
)
"""What each worker imports, as far as it starts no threads and leaves the GPUs alone. torch.optim needs torch._dynamo."""
OTHER_COMMANDS = ("py_executable", "pip", "uv", "conda", "image_uri", "container", "nsight", "_nsight", "rocprof_sys")
"""Fields of a runtime environment that themselves decide which Python runs, or how."""
OF_OTHERS = (
    *("RAY_", "RAYTRAIN_", "SPT_NOENV", "PL_DISABLE_FORK", "PYTEST_"),
    *("SHLVL", "PWD", "OLDPWD", "PS1", "PS2", "PS4", "_"),  # of shells
)
"""Beginnings of the names of variables that matter to no module of `MODULES`."""
RAYLET_PID = "RAY_RAYLET_PID"
OMP_NUM_THREADS = "OMP_NUM_THREADS"
"""Read when PyTorch is imported. Ray sets it to the number of an actor's CPUs, before that but after the fork."""
OF_DRIVER = "RAYTRAIN_FORK_SERVER"
"""The name of a server that the driver has started on this machine."""
IDLE_S = 600.0
"""A server without living processes ends after this time, since it holds memory."""
START_TIMEOUT_S = 45.0
"""What a server may take to start; Ray waits for a worker for 60 s."""
NOT_FORKED = 3
IMPORT_MAIN = f"from {__name__} import main"
"""Part of the command that asks a server; tells our own command from others."""
WITHOUT_DIRECTORY = "import sys; sys.path[:1] == [''] and sys.path.pop(0)"
"""As for a script of Ray's, modules in the current directory must not hide others."""


def py_executable(variables: Mapping[str, str], modules: Sequence[str] = MODULES) -> str:
    """The command in place of Python's for a runtime environment of Ray, as a line for a shell.

    Args:
        variables: that libraries read when they are imported; a node's own variables win.
        modules: imported by the server.
    """
    exported = "".join(f"{name}=${{{name}-{shlex.quote(value)}}}; export {name}; " for name, value in variables.items())
    code = f"{WITHOUT_DIRECTORY}; {IMPORT_MAIN}; sys.exit(main(sys.argv[1:]))"
    ask = shlex.join(["-c", code, ",".join(modules)])
    script = (
        f'{exported}python={shlex.quote(sys.executable)}; [ -x "$python" ] || python=python3; '
        f'"$python" {ask} "$0" "$@" || exec "$python" "$0" "$@"'
    )
    return f"sh -c {shlex.quote(script)}"


def runtime_environment(of_job: Mapping[str, object], variables: Mapping[str, str], num_cpus: float) -> dict[str, str]:
    """The runtime environment of an actor that is to be forked; empty if the job's decides which Python runs.

    Args:
        of_job: the job's own runtime environment.
        variables: as in `py_executable`.
        num_cpus: of the actor.
    """
    others = (of_job.get(field) for field in OTHER_COMMANDS)
    if sys.platform != "linux" or any(command and IMPORT_MAIN not in str(command) for command in others):
        return {}
    return {"py_executable": py_executable({OMP_NUM_THREADS: str(max(1, int(num_cpus))), **variables})}


@contextlib.contextmanager
def started_server() -> Iterator[None]:
    """A server for the Ray that starts on this machine in this block; nobody waits here until it is ready."""
    if sys.platform != "linux" or OF_DRIVER in os.environ:
        yield
        return
    name = f"raytrain-{uuid.uuid4().hex}"
    _start(name, MODULES, os.getpid(), {OMP_NUM_THREADS: "1", **os.environ}, os.devnull)
    os.environ[OF_DRIVER] = name
    try:
        yield
    finally:
        del os.environ[OF_DRIVER]


def main(arguments: Sequence[str]) -> int:
    """Has the fork server start a process with a command, this environment, directory and standard streams.

    Args:
        arguments: modules, separated by commas; the script; its arguments.

    Returns:
        0 once the process runs; else the caller has to start it.
    """
    modules, command = arguments[0].split(","), arguments[1:]
    if OF_DRIVER in os.environ and _request(os.environ[OF_DRIVER], command):
        return 0
    name, log = _own_server(command, modules)
    for _ in range(2):  # the first one may be outdated
        with contextlib.suppress(OSError):  # it runs
            _start(name, modules, int(os.environ[RAYLET_PID]), os.environ, log)
        if _request(name, command):
            return 0
    sys.stderr.write(f"raytrain: no fork server, see {log}; the worker imports all by itself\n")
    return NOT_FORKED


def _own_server(command: Sequence[str], modules: Sequence[str]) -> tuple[str, str]:
    """Name and log of the server for this environment on this node."""
    given = dict(argument[2:].split("=", 1) for argument in command if argument.startswith("--") and "=" in argument)
    directory = os.path.join(given["temp-dir"], given["session-name"])
    key = json.dumps([directory, sys.executable, os.getcwd(), modules, _lasting(os.environ)])
    name = f"raytrain-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    return name, os.path.join(directory, "logs", f"{name}.log")


def _lasting(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """The variables that the imported modules may have read."""
    return sorted((name, value) for name, value in environment.items() if not name.startswith(OF_OTHERS))


def _start(name: str, modules: Sequence[str], owner: int, environment: Mapping[str, str], log: str) -> None:
    """Starts a server, which answers once it has imported the modules.

    Args:
        name: of its socket, in Linux's abstract namespace, so that nothing of a dead server is left.
        modules: to be imported.
        owner: the process with which it ends.
        environment: its variables.
        log: path.

    Raises:
        OSError: there is one of this name.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(128)
        number = listener.fileno()
        command = [sys.executable, os.path.abspath(__file__), ",".join(modules), str(owner), str(number)]
        with open(log, "a") as out, open(os.devnull) as null:
            subprocess.Popen(
                command, stdin=null, stdout=out, stderr=out, env=environment, pass_fds=[number], start_new_session=True
            )


def _request(name: str, command: Sequence[str]) -> bool:
    """Whether a server forks a process for this command, a script and its arguments."""
    request = json.dumps({"command": command, "environment": dict(os.environ), "directory": os.getcwd()}).encode()
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(START_TIMEOUT_S)
            server.connect(f"\0{name}")
            if not _is_of_this_user(server):
                return False
            socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
            server.sendall(request)
            return server.recv(1) == b"1"
    except OSError:
        return False


def _is_of_this_user(peer: socket.socket) -> bool:
    """Whether the process at the other end is; all users may connect, and take a name."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


# In the server


def serve(modules: Sequence[str], owner: int, listener: socket.socket) -> None:
    """Imports modules, then forks a process for each request until the owner ends. Runs the command in each of them."""
    environment, started_ns = _lasting(os.environ), time.time_ns()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not initialise CUDA, which no fork survives
    for name in modules:
        with contextlib.suppress(ImportError):  # a worker imports what it finds
            importlib.import_module(name)
    if "ray" in sys.modules:
        sys.exit("Ray must not be imported before a fork")
    paths = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    files = {path: version for path in paths if path and (version := _version(path))}  # torch names some that do not exist
    if any(modified_ns > started_ns for modified_ns, _ in files.values()):
        sys.exit("a module was edited while it was imported")
    gc.collect()
    gc.freeze()  # a collection would write to, and so copy, the pages that the processes share
    alive = os.pidfd_open(owner)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel keeps no record of processes that have ended
    while True:
        readable = select.select([listener.fileno(), alive], [], [], IDLE_S)[0]
        if alive in readable or (not readable and not _has_children()):
            os._exit(0)
        if listener.fileno() not in readable:
            continue
        client = listener.accept()[0]
        if any(_version(path) != version for path, version in files.items()):
            os._exit(0)  # the next server imports what was edited or installed since
        if not _is_of_this_user(client):
            client.close()
            continue
        length, streams, *_ = socket.recv_fds(client, 4, 3)
        request = json.loads(client.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
        is_same = _lasting(request["environment"]) == environment
        if is_same and os.fork() == 0:
            break
        for descriptor in streams:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            client.sendall(b"1" if is_same else b"0")
        client.close()
    for opened in (listener, client):
        opened.close()
    os.close(alive)
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
    if raylet := os.environ.get(RAYLET_PID):
        os.open(f"/proc/{raylet}", os.O_RDONLY)  # as a child of the raylet, the process shows whose it is
    sys.argv = list(request["command"])
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # else it would be the same in all processes; torch's is the same in new processes too


if __name__ == "__main__":
    if sys.path[:1] == [os.path.dirname(os.path.abspath(__file__))]:
        sys.path.pop(0)
    serve(sys.argv[1].split(","), int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3])))
