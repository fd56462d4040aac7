"""Where do sshd and rsync come from? The machine has them, or its distribution's packages are unpacked, not installed.

Hosts show what is unpacked over their /usr, so nothing of it is left on the machine.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PROGRAMS = ("/usr/sbin/sshd", "/usr/bin/rsync")
PACKAGES = ("openssh-server", "rsync", "libwrap0", "libpopt0")
LIMIT_S = 60


def unpack(into: Path) -> str:
    """Puts the programs that this machine lacks below a directory; returns why that cannot be done, "" if it is.

    Args:
        into: gets usr/, which may stay empty.
    """
    (into / "usr").mkdir(parents=True, exist_ok=True)
    missing = [program for program in PROGRAMS if not Path(program).exists()]
    if not missing:
        return ""
    if not shutil.which("apt-get"):
        return f"there is no {' and no '.join(missing)}, and no apt-get to get them"
    packages = into / "packages"
    packages.mkdir(exist_ok=True)
    got = subprocess.run(
        ["apt-get", "download", *PACKAGES], cwd=packages, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if got.returncode:
        return f"there is no {' and no '.join(missing)}: {got.stderr.strip().splitlines()[-1]}"
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(into)], check=True)
    return ""
