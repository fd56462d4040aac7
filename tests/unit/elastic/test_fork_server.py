"""Workers that are forked: as clean as new processes, from one server that knows when it is out of date."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytrain.elastic import fork_server
from raytrain.elastic.fork_server import OTHER_COMMANDS, py_executable, runtime_environment, started_server

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only"),
    pytest.mark.timeout(60),
]

VARIABLES = {"OMP_A": "a driver's $HOME", "OMP_NUM_THREADS": "1"}
SCRIPT = """
import json, os, sys, preloaded
process = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "name": __name__, "value": preloaded.VALUE}
process["opened"] = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
process |= {"arguments": sys.argv[1:], "variables": dict(os.environ), "directory": os.getcwd(), "path": sys.path[0]}
print(json.dumps(process))
sys.stderr.write("an error")
"""


class Node:
    """What a raylet has: a session directory, and workers to start."""

    def __init__(self, path: Path) -> None:
        self.path, self.preloaded = path, path / "lib" / "preloaded.py"
        self.logs = path / "session" / "logs"
        for directory in (self.logs, self.preloaded.parent, path / "scripts"):
            directory.mkdir(parents=True)
        self.preloaded.write_text("VALUE = 1")
        self.script = path / "scripts" / "worker.py"
        self.script.write_text(SCRIPT)
        self.raylet = subprocess.Popen(["sleep", "60"])

    def start(self, *arguments: str, modules: str = "preloaded", **variables: str) -> dict[str, Any]:
        """Starts a worker as Ray does, and returns what it says of itself."""
        environment = {**os.environ, "PYTHONPATH": str(self.preloaded.parent), "RAY_RAYLET_PID": str(self.raylet.pid)}
        own = [str(self.script), *arguments, f"--temp-dir={self.path}", "--session-name=session"]
        command = [
            "bash",
            "-c",
            f'exec {py_executable(VARIABLES, modules.split(","))} "$@"',
            "bash",
            *own,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.path, env=environment | variables, check=True
        )
        self.errors = done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.raylet.kill()
    node.raylet.wait()


def test_a_forked_process_has_its_own_command_variables_directory_streams_and_group(node: Node) -> None:
    first, second = node.start("an argument", "--x"), node.start(RAY_JOB_ID="7")
    assert first["arguments"][:2] == ["an argument", "--x"]
    assert (first["directory"], first["path"], first["name"]) == (str(node.path), str(node.script.parent), "__main__")
    assert first["group"] == first["pid"], "Ray ends the group of a worker"
    assert node.errors == "an error"
    assert f"/proc/{node.raylet.pid}" in first["opened"]
    assert first["parent"] == second["parent"] != os.getpid(), "one server"
    assert "RAY_JOB_ID" not in first["variables"]
    assert (second["variables"]["RAY_JOB_ID"], second["variables"]["OMP_A"]) == ("7", VARIABLES["OMP_A"])
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in first["variables"]
    assert not psutil.pid_exists(first["pid"]), "no zombie is left"


def test_a_variable_that_imports_may_read_has_a_server_of_its_own_and_a_nodes_own_value_wins(node: Node) -> None:
    first, second = node.start(), node.start(OMP_A="node")
    assert first["parent"] != second["parent"]
    assert second["variables"]["OMP_A"] == "node"


def test_an_edited_module_is_imported_anew(node: Node) -> None:
    first = node.start()
    node.preloaded.write_text("VALUE = 22")
    second = node.start()
    assert (first["value"], second["value"]) == (1, 22)
    node.preloaded.write_text("VALUE = 1")
    assert node.start()["value"] == 1


def test_the_server_ends_with_its_raylet(node: Node) -> None:
    server = psutil.Process(node.start()["parent"])
    node.raylet.kill()
    server.wait(10)


def test_a_server_that_died_is_replaced(node: Node) -> None:
    psutil.Process(node.start()["parent"]).kill()
    assert node.start()["value"] == 1


def test_without_a_server_the_process_starts_all_the_same(node: Node) -> None:
    (node.preloaded.parent / "broken.py").write_text("1 / 0")
    assert node.start(modules="broken")["value"] == 1
    assert "no fork server" in node.errors
    assert "ZeroDivisionError" in next(node.logs.iterdir()).read_text()
    node.start(modules="missing")
    assert "no fork server" not in node.errors
    node.start(PYTHONSAFEPATH="1")
    assert "no fork server" not in node.errors


def test_modules_in_the_current_directory_hide_no_others(node: Node) -> None:
    (node.path / "socket.py").write_text("raise SystemExit('hidden')")
    (node.path / "preloaded.py").write_text("raise SystemExit('hidden')")
    assert node.start()["value"] == 1
    assert "no fork server" not in node.errors


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_users_neither_ask_a_server_of_another_one_nor_are_served_by_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.start()
    name = next(node.logs.iterdir()).stem
    own = {"PYTHONPATH": str(node.preloaded.parent), "RAY_RAYLET_PID": str(os.getpid())}
    monkeypatch.setattr(os, "environ", {**os.environ, **VARIABLES, **own})
    assert fork_server._request(name, [str(node.script)])
    os.seteuid(65534)
    try:
        assert not fork_server._request(name, [str(node.script)])
    finally:
        os.seteuid(0)
    monkeypatch.setattr(os, "getuid", lambda: 65534)
    assert not fork_server._request(name, [str(node.script)])


@pytest.mark.parametrize("prompt", [None, "(.venv) $ "])
def test_a_driver_can_start_the_server_for_its_machine(
    node: Node, monkeypatch: pytest.MonkeyPatch, prompt: str | None
) -> None:
    """Also in an activated environment, whose prompt the shell that Ray starts does not pass on."""
    if prompt:
        monkeypatch.setenv("PS1", prompt)
    monkeypatch.setenv("PYTHONPATH", str(node.preloaded.parent))
    monkeypatch.setenv("OMP_A", VARIABLES["OMP_A"])
    monkeypatch.setattr(fork_server, "MODULES", ("preloaded",))
    monkeypatch.delenv(fork_server.OF_DRIVER, raising=False)
    with started_server(), started_server():
        first, second = node.start(RAY_A="of a session"), node.start(RAY_A="of another")
        server = psutil.Process(first["parent"])
        assert second["parent"] == server.pid
        assert node.start(LANG="other")["parent"] != server.pid, "what it has imported may have read it"
    assert fork_server.OF_DRIVER not in os.environ
    server.kill()
    server.wait(10)


def test_ray_is_not_imported_before_a_fork(node: Node) -> None:
    node.start(modules="ray")
    assert "no fork server" in node.errors
    assert "Ray must not be imported" in next(node.logs.iterdir()).read_text()
    code = f"import sys, {', '.join(fork_server.MODULES)}; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_job_that_chooses_its_python_keeps_it() -> None:
    assert "OMP_NUM_THREADS-1" in runtime_environment({"working_dir": "/x", "pip": None}, {}, 0.5)["py_executable"]
    assert "OMP_NUM_THREADS-2" in runtime_environment({}, {}, 2.0)["py_executable"], "as Ray sets it"
    assert "OMP_NUM_THREADS-3" in runtime_environment({}, {"OMP_NUM_THREADS": "3"}, 2.0)["py_executable"]
    for field in OTHER_COMMANDS:
        assert runtime_environment({field: "python3"}, {}, 1.0) == {}
