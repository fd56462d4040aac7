"""Is the file of the form that Ray wants? All that Ray itself would say, but all of it, with lines and with remedies.

Ray's own word comes last, in `ray_says`: it stops at the first thing that it finds.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

from raytrain.cluster.file.checks.nodes import head_type, node_types
from raytrain.cluster.file.document import Document, Mistake, Place

NOT_FOR_LOCAL = ("available_node_types", "head_node", "worker_nodes", "head_node_type")


def keys_once(document: Document) -> Iterator[Mistake]:
    """YAML takes the last of two equal keys, and says nothing."""
    for place, line in document.twice:
        rule = "each key stands once: the first of the two has no effect"
        yield dataclasses.replace(document.mistake(place, "stands twice", rule, "remove one"), line=line)


def keys_are_texts(document: Document) -> Iterator[Mistake]:
    """YAML reads 1, yes, on and ~ as something else than a text."""
    for place in document.odd:
        yield document.mistake(place, place[-1], "a key is a text", "put it in quotes, or choose another name")


def schema(document: Document) -> Iterator[Mistake]:
    """All that differs from Ray's schema of a cluster file."""
    from jsonschema import Draft7Validator

    data = document.data
    if document.provider == "local":  # Ray takes this out before it looks, and uses it
        data = {key: value for key, value in data.items() if key != "min_workers"}
    for error in Draft7Validator(document.facts.schema).iter_errors(data):
        yield from _explain(document, error)


def _explain(document: Document, error: Any) -> Iterator[Mistake]:
    place: Place = tuple(error.absolute_path)
    if error.validator == "additionalProperties":
        known = list(error.schema.get("properties", {}))
        for name in error.instance:
            if name not in known and (*place, name) not in document.odd:
                yield unknown(document, (*place, str(name)), known, "is a key that Ray knows here")
    elif error.validator == "required":
        if document.provider == "aws" and list(error.instance) and error.message.startswith("'resources'"):
            return  # Ray fills them in itself
        missing = error.message.split("'")[1]
        yield document.mistake((*place, missing), None, "is required", f"add {missing}: here")
    elif error.validator == "type":
        kind = error.validator_value
        fix = f"write {error.instance} without quotes" if str(error.instance).isdigit() else f"write a value of type {kind}"
        yield document.mistake(place, f"{error.instance!r}", f"is of type {kind}", fix)
    else:
        yield document.mistake(place, error.instance, error.message, "give another value")


def unknown(document: Document, place: Place, known: list[str], rule: str) -> Mistake:
    """The mistake for a key that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.6)
    fix = f"did you mean {near[0]}?" if near else "remove it"
    return document.mistake(place, "no such key", rule, fix)


def provider_known(document: Document) -> Iterator[Mistake]:
    """Ray has such a provider."""
    known = [*document.facts.defaults, "external"]
    if document.provider and document.provider not in known:
        near = difflib.get_close_matches(document.provider, known, n=1) or [", ".join(known)]
        yield document.mistake(("provider", "type"), document.provider, "is a provider of Ray's", f"write {near[0]}")


def local_hosts(document: Document) -> Iterator[Mistake]:
    """Own machines are given by their addresses, and have no types."""
    if document.provider != "local" or document.get("provider", "coordinator_address"):
        return
    for key, example in (("head_ip", "10.0.0.1"), ("worker_ips", "[10.0.0.2, 10.0.0.3]")):
        if not document.get("provider", key):
            yield document.mistake(("provider", key), None, "is needed with type: local", f"add {key}: {example}")
    for key in NOT_FOR_LOCAL:
        if document.get(key):
            yield document.mistake((key,), "given", "machines of your own have no types", f"remove {key}")
    if document.get("provider", "head_ip") in document.items("provider", "worker_ips"):
        value, rule = document.get("provider", "head_ip"), "the head is no worker"
        yield document.mistake(("provider", "worker_ips"), value, rule, "take the head's address out of worker_ips")


def head_type_known(document: Document) -> Iterator[Mistake]:
    """The head is of one of the types."""
    types, head = document.mapping("available_node_types"), document.get("head_node_type")
    if types and str(head) not in types and document.provider != "local":
        near = head_type(document)
        fix = f"did you mean {near}?" if near else f"write one of {', '.join(types)}"
        yield document.mistake(("head_node_type",), head, "is one of available_node_types", fix)


def limits(document: Document) -> Iterator[Mistake]:
    """Smallest numbers are not above largest ones."""
    types = [node for node in node_types(document) if not node.is_head]
    for node in types:
        if node.low > node.high:
            place, rule = ("available_node_types", node.name, "min_workers"), f"is at most its max_workers, {node.high}"
            yield document.mistake(place, node.low, rule, f"lower it, or raise max_workers to {node.low}")
    most, wanted = most_workers(document), sum(node.low for node in types)
    if types and wanted > most:
        rule = f"is at least the sum of min_workers of all types, {wanted}"
        yield document.mistake(("max_workers",), most, rule, f"raise it to {wanted}, or lower min_workers")


def most_workers(document: Document) -> int:
    """The most workers of all types together: the file's number, or else Ray's."""
    default = document.facts.defaults.get(document.provider, {}).get("max_workers", 0)
    return document.number("max_workers", default=default or len(document.items("provider", "worker_ips")))
