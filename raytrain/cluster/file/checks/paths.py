"""Are the files there that `ray up` will copy or use? On the machine where the check runs, where `ray up` will run too."""

from __future__ import annotations

from collections.abc import Iterator

from raytrain.cluster.file.commands import TOKEN_FILE
from raytrain.cluster.file.document import Document, Mistake


def ssh_keys(document: Document) -> Iterator[Mistake]:
    """The keys that the file names are there."""
    for name, kind in (("ssh_private_key", "private"), ("ssh_public_key", "public")):
        path = document.text("auth", name)
        if path and not document.facts.exists(path):
            rule, fix = "is a file on this machine", f"give the path of your {kind} key, or make a pair with ssh-keygen"
            yield document.mistake(("auth", name), path, rule, fix)


def mounts(document: Document) -> Iterator[Mistake]:
    """What is to be copied to the nodes is there."""
    for target, source in document.mapping("file_mounts").items():
        if isinstance(source, str) and not document.facts.exists(source):
            fix = (
                "run: ray get-auth-token --generate"
                if source == TOKEN_FILE
                else "run this where the path is right, or correct it"
            )
            yield document.mistake(("file_mounts", target), source, "is a file or directory on this machine", fix)
