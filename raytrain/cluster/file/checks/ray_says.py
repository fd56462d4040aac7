"""What does Ray itself say about the file? Its own preparation and validation, twice, as `ray up` and the head run them.

They stop at the first mistake and give no line, so they are asked only when our checks of the form found nothing.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Iterator
from typing import Any

from raytrain.cluster.file.document import Document, Mistake


def rays_own_word(document: Document) -> Iterator[Mistake]:
    """Ray prepares and validates the file, and does so again with the result."""
    word = objection(document.data)
    if word:
        place, rule = ("provider",), "Ray's own check, prepare_config and validate_config, passes"
        yield document.mistake(place, word, rule, "see Ray's documentation of cluster YAML files")


def objection(config: Any) -> str:
    """What Ray has against a file's content; empty if nothing."""
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
        node.setdefault("resources", {})  # only AWS lets them out, and Ray asks AWS for them between the two
    validate_config(prepared)
    return prepared


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray prints what it does; the level of logging is put back."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
