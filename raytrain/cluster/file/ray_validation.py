"""What would Ray refuse in a cluster file? Ray's JSON schema, with lines and remedies, and then Ray's own validation.

Ray's validation runs twice, as in `ray up` and then on the head. It stops at the first mistake and gives no line, so it runs
only after all other checks of the form found nothing. What Ray accepts and should not is the question of `checks`.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import io
import logging
from collections.abc import Iterator
from typing import Any

from raytrain.cluster.file.document import Document, KeyPath, Mistake


def unique_keys(document: Document) -> Iterator[Mistake]:
    """YAML takes the last of two equal keys, without a warning."""
    for path in document.duplicates:
        rule = "each key must be unique: the first of the two has no effect"
        yield document.mistake(path, "duplicate key", rule, "remove one")


def string_keys(document: Document) -> Iterator[Mistake]:
    """YAML reads 1, yes, on and ~ as something other than a string."""
    for path in document.other_keys:
        yield document.mistake(path, path[-1], "a key is a string", "put it in quotes, or choose another name")


def schema(document: Document) -> Iterator[Mistake]:
    """All that differs from Ray's schema of a cluster file."""
    from jsonschema import Draft7Validator

    data = document.data
    if document.provider == "local":  # Ray removes and uses this key before it validates
        data = {key: value for key, value in data.items() if key != "min_workers"}
    for error in Draft7Validator(document.facts.schema).iter_errors(data):
        yield from _explain(document, error)


def _explain(document: Document, error: Any) -> Iterator[Mistake]:
    path: KeyPath = tuple(error.absolute_path)
    if error.validator == "additionalProperties":
        known = list(error.schema.get("properties", {}))
        for name in error.instance:
            if name not in known and (*path, name) not in document.other_keys:
                fix = did_you_mean(name, known, "remove it", cutoff=0.6)
                yield document.mistake((*path, name), "no such key", "is a key that Ray knows here", fix)
    elif error.validator == "required":
        missing = error.message.split("'")[1]
        if document.provider != "aws" or missing != "resources" or not error.instance:  # on AWS Ray adds the resources
            yield document.mistake((*path, missing), None, "is required", f"add {missing}: here")
    elif error.validator == "type":
        kind = error.validator_value
        fix = f"write {error.instance} without quotes" if str(error.instance).isdigit() else f"write a value of type {kind}"
        yield document.mistake(path, f"{error.instance!r}", f"is of type {kind}", fix)
    else:
        yield document.mistake(path, error.instance, error.message, "give another value")


def did_you_mean(name: str, known: list[str], otherwise: str, cutoff: float) -> str:
    """A fix that names the nearest of the known names."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else otherwise


def ray_accepts(document: Document) -> Iterator[Mistake]:
    """Ray prepares and validates the file, and does so again with the result."""
    error = ray_error(document.data)
    if error:
        rule = "Ray's own check, prepare_config and validate_config, passes"
        yield document.mistake(("provider",), error, rule, "see Ray's documentation of cluster YAML files")


def ray_error(config: Any) -> str:
    """Why Ray refuses the content of a file; empty if it does not."""
    import click
    from jsonschema import ValidationError

    with _quiet():
        try:
            prepared = _prepared(_prepared(copy.deepcopy(config)))
        except (ValidationError, click.ClickException) as error:
            return error.message or type(error).__name__
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError, OSError) as error:
            return f"{type(error).__name__}: {error}"
    return "" if prepared else "nothing is left of it"


def _prepared(config: Any) -> Any:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(config)
    for node in prepared.get("available_node_types", {}).values():
        node.setdefault("resources", {})  # optional on AWS only, where Ray asks AWS for them between the two
    validate_config(prepared)
    return prepared


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides what Ray prints and logs, and restores the level of logging."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
