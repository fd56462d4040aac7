"""The cluster file for machines of one's own, reached by ssh: which part of it is special?

Ray 2.60's autoscaler v2 starts one worker too few with the provider `local`, so the head's command asks for the older one.
"""

from __future__ import annotations

from typing import Any

from raytrain.cluster.file.commands import TOKEN_FILE, V1, start_head, start_worker
from raytrain.cluster.file.setup import mounts, setup_commands
from raytrain.cluster.file.spec import ClusterSpec

HEADER = """\
# A Ray cluster on machines of your own, reached by ssh; written by `raytrain cluster render --provider local`.
#
# On the machine where you run `ray`, once:  ray get-auth-token --generate   (writes ~/.ray/auth_token)
# `ray up` needs ssh and rsync, there and on all hosts.
#   ray up -y FILE          start it, or bring it to what this file says
#   ray dashboard FILE      forward the dashboard and the job server to localhost:8265
#   RAY_AUTH_MODE=token ray job submit --address http://localhost:8265 --working-dir . -- python job.py
#   ray down -y FILE        stop it; workers notice within 10 s that their head is gone
# `raytrain cluster check FILE` finds mistakes before you wait for them.
#
# Ports: nodes need to reach each other on all ports, since Ray chooses most of them (the head's are 6379 and 10001, and 8265
# on its localhost for the dashboard). From outside ssh is enough.
# The token keeps others out; it is not encrypted on the way, so keep the network private."""


def local(spec: ClusterSpec) -> dict[str, Any]:
    """The file's content, in its order; keys that begin with '# ' are comments."""
    head = start_head(spec, V1, (f"--node-ip-address={spec.head_ip}",))
    return {
        HEADER: None,
        "cluster_name": spec.name,
        "provider": {"type": "local", "head_ip": spec.head_ip, "worker_ips": list(spec.worker_ips)},
        "auth": {"ssh_user": spec.ssh_user, "ssh_private_key": spec.ssh_key or "~/.ssh/id_ed25519"},
        "# The same token on all nodes.": None,
        "file_mounts": {TOKEN_FILE: TOKEN_FILE, **mounts(spec)},
        "rsync_exclude": ["**/__pycache__"],
        "setup_commands": setup_commands(spec),
        "# RAY_enable_autoscaler_v2=0: Ray 2.60's autoscaler v2 starts one worker too few with this provider. The older one"
        "\n# starts all of them, and Ray on a machine that comes back (10 s after it was last heard of).": None,
        "head_start_ray_commands": head,
        "worker_start_ray_commands": start_worker(spec),
    }
