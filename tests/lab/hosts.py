"""Several hosts on one machine: each has its own network, processes, /tmp, home and sshd, as Linux namespaces.

Whoever makes them is their user's laptop, at 10.77.0.254. They end with the process that made them, if that is the first
of a process namespace of its own, as `tests.lab.test_lab` has it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"
LAPTOP = f"{NETWORK}.254"
BOOT = "boot.sh"
BOOT_LIMIT_S = 20.0
SSHD = """
ListenAddress 0.0.0.0
HostKey /etc/lab/host_key
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
MaxStartups 50
"""
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@dataclass
class Host:
    """One of them.

    Args:
        number: its address is 10.77.0.NUMBER.
        lab: directory of all hosts.
    """

    number: int
    lab: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"h{self.number}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    @property
    def disk(self) -> Path:
        return self.lab / self.name

    def boot(self) -> None:
        """Starts it, with an empty disk the first time; returns when it takes ssh connections."""
        for directory in ("tmp", "root/.ssh", "log"):
            (self.disk / directory).mkdir(parents=True, exist_ok=True)
        shutil.copy(self.lab / "key.pub", self.disk / "root/.ssh/authorized_keys")
        exports = "".join(f"export {name}={value}\n" for name, value in ENVIRONMENT.items() if name != "HOME")
        (self.disk / "root/.bashrc").write_text(exports)
        (self.disk / "log/booted").unlink(missing_ok=True)
        own = ["unshare", "--kill-child", "--fork", "--pid", "--mount", "--net", "--uts", "--ipc"]
        script = [str(Path(__file__).with_name(BOOT)), self.name, str(self.disk), str(self.lab / "over")]
        seen = [str(self.lab / "shared"), str(ROOT), sys.prefix, sys.base_prefix]
        with (self.disk / "log/boot.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*own, "bash", *script, *seen], env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._wait(lambda: bool(self._children()))
        self._lay_cable()
        self._wait((self.disk / "log/booted").exists)

    def power_off(self) -> None:
        """Ends all of its processes at once, as a power cut does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def unplug(self) -> None:
        """Takes its link down; whoever is connected does not learn of it."""
        ip("link", "set", self.name, "down")

    def plug_in(self) -> None:
        ip("link", "set", self.name, "up")

    def run(self, *words: str, check: bool = True) -> str:
        """Runs a command there; what it says on stdout."""
        enter = ["nsenter", "-t", str(self._pid()), "-m", "-p", "-n", "-u", "-i", "-r", "-w", "--"]
        done = subprocess.run([*enter, *words], env=ENVIRONMENT, check=check, stdout=subprocess.PIPE, text=True)
        return done.stdout

    def commands(self) -> list[str]:
        """The command lines of its processes."""
        return self.run("ps", "-eo", "args=", check=False).splitlines()

    def _pid(self) -> int:
        """Of its first process, as this process sees it."""
        return self._children()[0]

    def _children(self) -> list[int]:
        assert self._process is not None
        pid = self._process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def _lay_cable(self) -> None:
        pid = str(self._pid())
        ip("link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", pid)
        ip("link", "set", self.name, "master", "bridge", "up")
        inside = ["nsenter", "-t", pid, "-n", "ip"]
        for words in (["link", "set", "lo", "up"], ["addr", "add", f"{self.address}/24", "dev", "eth0"]):
            subprocess.run([*inside, *words], check=True)
        subprocess.run([*inside, "link", "set", "eth0", "up"], check=True)

    def _wait(self, condition: object) -> None:
        assert callable(condition)
        until = time.monotonic() + BOOT_LIMIT_S
        while not condition():
            if self._process is None or self._process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"{self.name} did not boot: {(self.disk / 'log/boot.log').read_text()}")
            time.sleep(0.05)


def build(lab: Path, count: int) -> list[Host]:
    """Hosts, booted, on one network; from now on this process has what was unpacked for them, too.

    Args:
        lab: directory with what `tools.unpack` put into over/.
        count: of hosts.
    """
    hosts = [Host(number, lab) for number in range(1, count + 1)]
    _prepare(lab, hosts)
    subprocess.run(["mount", "-t", "overlay", "-o", f"lowerdir={lab}/over/usr:/usr", "usr", "/usr"], check=True)
    ip("link", "set", "lo", "up")
    ip("link", "add", "bridge", "type", "bridge")
    ip("addr", "add", f"{LAPTOP}/24", "dev", "bridge")
    ip("link", "set", "bridge", "up")
    for host in hosts:
        host.boot()
    return hosts


def first_processes() -> list[int]:
    """The first processes of all hosts that this process can see."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text().split("\0")
            if words[0] == "bash" and words[1].endswith(BOOT):
                found.append(int(path.parent.name))
    return found


def _prepare(lab: Path, hosts: list[Host]) -> None:
    """Keys, and an /etc that knows the hosts and sshd's user; ssh itself checks the modes."""
    etc = lab / "over/etc"
    (etc / "lab").mkdir(parents=True)
    (lab / "over/usr").mkdir(exist_ok=True)
    (lab / "shared").mkdir()
    for path in (lab / "key", etc / "lab/host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    names = [f"{host.address} {host.name}" for host in hosts]
    (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{LAPTOP} laptop", *names]) + "\n")
    (etc / "passwd").write_text(Path("/etc/passwd").read_text() + "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n")
    (etc / "lab/sshd_config").write_text(SSHD)
    os.chmod(etc, 0o755)
