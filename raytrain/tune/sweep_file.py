"""Does this sweep begin, or resume? Decided from `sweep.json`, which holds what the sweep's outcome depends on.

A sweep that would resume with other settings or data is refused, and the error names what differs. Runs in the driver.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from pyarrow import fs
from ray.tune.search.sample import Categorical, Domain, Function, Normal, Quantized

from raytrain.errors import ResumeError, differences
from raytrain.launch.schedule import Schedule
from raytrain.rundir import RunDir
from raytrain.sweep_config import SweepConfig
from raytrain.tune.scheduling import Algorithms
from raytrain.tune.trial import TrialTemplate

SWEEP = "sweep.json"
RUN_SETTINGS = (
    *("global_batch", "logical_workers", "micro_batch", "epochs", "steps", "seed", "shuffle_window", "drop_last"),
    *("precision", "exactness", "clip_norm", "best", "eval_every"),
)
"""Settings of every run on which the outcome of a sweep depends; workers are not among them."""
SWEEP_SETTINGS = ("trials", "seed")
PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, type(None))


def describe(
    template: TrialTemplate, sweep: SweepConfig, space: Mapping[str, Any], algorithms: Algorithms, work: Schedule
) -> dict[str, Any]:
    """What the outcome of a sweep depends on, as plain values; `work` is the schedule of one of its trials."""
    fields = {name: str(value) for name, value in template.fixed.items()}
    return {
        "format": 1,
        "task": {"name": getattr(template.make, "__name__", "task"), "fields": fields},
        "space": {name: _text(domain) for name, domain in space.items()},
        "sweep": {
            **{name: getattr(sweep, name) for name in SWEEP_SETTINGS},
            "scheduler": type(algorithms.scheduler).__name__,
            "search": type(algorithms.searcher).__name__ if algorithms.searcher else "random",
        },
        "run": {name: template.config.model_dump(mode="json")[name] for name in RUN_SETTINGS},
        "data": {name: source.fingerprint() for name, source in work.sources.items()},
    }


def earlier_facts(directory: RunDir, mode: str) -> dict[str, Any] | None:
    """The content of `sweep.json`, or None for a sweep that begins.

    Args:
        directory: of the sweep.
        mode: auto, new or must.

    Raises:
        ResumeError: the mode does not allow what is there, or the file cannot be read.
    """
    exists = directory.exists(SWEEP)
    if mode == "new" and exists:
        raise ResumeError("run.resume", "new", f"there is no sweep at {directory.path} yet", "choose another run.name")
    if mode == "must" and not exists:
        raise ResumeError("run.resume", "must", f"there is a sweep at {directory.path}", "check run.name and run.storage")
    if not exists:
        return None
    try:
        found: dict[str, Any] = directory.read_json(SWEEP)
    except ValueError as error:
        raise ResumeError(directory.child(SWEEP), error, "is the JSON of a sweep", "choose another run.name") from error
    return found


def check_same(directory: RunDir, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Compares the sweep in the directory with the one that is asked for.

    Raises:
        ResumeError: something on which the outcome depends differs.
    """
    if before is None:
        return
    if found := [line for name in now for line in differences(name, before.get(name), now[name])]:
        raise ResumeError(
            f"sweep {directory.path}",
            "\n         ".join(found),
            "a sweep resumes with the settings and data that its outcome depends on",
            "set them back, or choose another run.name",
        )


def has_trials(directory: RunDir) -> bool:
    """Whether Ray Tune has saved a state of this sweep."""
    found = directory.filesystem.get_file_info(fs.FileSelector(directory.path, allow_not_found=True))
    return any(info.base_name.startswith("experiment_state-") for info in found)


def _text(domain: Any) -> str:
    """The same text for the same domain in any process: without memory addresses."""
    if isinstance(domain, Function):
        return f"Function {code_text(domain.func)}"
    if isinstance(domain, Categorical):
        return f"Categorical{code_text(domain.categories)} {_sampler_text(domain.sampler)}".strip()
    if isinstance(domain, Domain):
        return f"{type(domain).__name__}{domain.domain_str} {_sampler_text(domain.sampler)}".strip()
    if isinstance(domain, dict):
        return f"{{{', '.join(f'{name!r}: {_text(value)}' for name, value in domain.items())}}}"
    return domain if isinstance(domain, str) else code_text(domain)


def code_text(value: object) -> str:
    """A plain value as `repr` shows it; a function as its name and a digest of what it computes.

    The digest covers its code, its defaults, the values that it captures, and the functions and plain values of its own
    module that it uses. Another place in the file does not change it.
    """
    if isinstance(value, list | tuple):
        texts = ", ".join(map(code_text, value))
        return f"[{texts}]" if isinstance(value, list) else f"({texts})"
    if not callable(value) or isinstance(value, type):
        return _without_address(value)
    digest = hashlib.sha256("\n".join(_parts(value, set())).encode()).hexdigest()
    return f"{getattr(value, '__qualname__', type(value).__name__)} with code {digest[:16]}"


def _parts(value: object, seen: set[int]) -> Iterator[str]:
    """What a value computes, as texts; each function once."""
    if id(value) in seen:
        return
    if isinstance(value, partial):
        yield from _parts_of(seen, value.func, *value.args, *sorted(value.keywords.items()))
    elif isinstance(value, MethodType):
        yield from _parts_of(seen, value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        seen.add(id(value))
        names = [name for code in _codes(value.__code__) for name in code.co_names]
        used = [value.__globals__[name] for name in dict.fromkeys(names) if name in value.__globals__]
        own = [one for one in used if isinstance(one, PLAIN) or getattr(one, "__module__", None) == value.__module__]
        for code in _codes(value.__code__):
            constants = [one for one in code.co_consts if not isinstance(one, CodeType)]
            yield repr((code.co_code, code.co_names, code.co_varnames, sorted(map(_without_address, constants))))
        captured = [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
        yield from _parts_of(seen, value.__defaults__, value.__kwdefaults__, *captured, *own)
    elif isinstance(value, list | tuple):
        yield from _parts_of(seen, *value)
    else:
        seen.add(id(value))
        yield _without_address(value)
        state = getattr(value, "__dict__", {})
        if not isinstance(value, type | ModuleType):
            yield from _parts_of(seen, *sorted(state.items()), *([type(value).__call__] if callable(value) else []))


def _parts_of(seen: set[int], *values: object) -> Iterator[str]:
    for value in values:
        yield from _parts(value, seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _without_address(value: object) -> str:
    """`repr` where that is the same in each process, otherwise the type."""
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    text = repr(value)
    return text if " at 0x" not in text else f"{type(value).__module__}.{type(value).__qualname__}"


def _sampler_text(sampler: Any) -> str:
    if isinstance(sampler, Quantized):
        return f"{_sampler_text(sampler.sampler)} in steps of {sampler.q:g}"
    if isinstance(sampler, Normal):
        return f"Normal of mean {sampler.mean:g} and deviation {sampler.sd:g}"
    return str(sampler) if sampler else ""
