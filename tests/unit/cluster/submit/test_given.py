"""Variables that a job gets from the shell which submits it."""

from __future__ import annotations

import pytest

from raytrain.cluster.submit.given import forward_env, variables
from raytrain.elastic.variables import SUBMIT_DIRECTORY
from raytrain.errors import ConfigError

SHELL = {
    "NCCL_DEBUG": "INFO",
    "GLOO_SOCKET_IFNAME": "eth0",
    "TORCH_LOGS": "x",
    "HOME": "/home/me",
    "TOKEN": "s3cret",
    "MINE": "1",
}

HERE = {SUBMIT_DIRECTORY: "/home/me"}


def test_r18_variables_of_the_libraries_go_along_and_those_that_the_run_forwards() -> None:
    libraries = {name: SHELL[name] for name in ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_LOGS")} | HERE
    assert variables(SHELL, [], ["--lr", "1"], "/home/me") == libraries
    assert variables(SHELL, [], ["--run.forward-env", "MINE,ABSENT"], "/home/me") == libraries | {"MINE": "1"}


def test_r18_values_may_be_given_or_taken_from_the_shell_by_name() -> None:
    found = variables(SHELL, ["A=1,2", "EMPTY=", "B=x=y", "TOKEN", "NCCL_DEBUG=WARN"], [], "/home/me")
    asked = {"A": "1,2", "EMPTY": "", "B": "x=y", "TOKEN": "s3cret", "NCCL_DEBUG": "WARN"}
    assert {name: found[name] for name in asked} == asked


@pytest.mark.parametrize(("word", "value"), [("NOPE", "NOPE"), ("=s3cret", "no name"), ("", "no name")])
def test_a_name_that_is_not_set_is_refused_without_a_value(word: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        variables(SHELL, [word], [], "/home/me")
    assert (caught.value.where, caught.value.value) == ("--env", value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--run.forward-env", "A,B"],
        ["--run.forward-env=A,B", "--lr", "1"],
        ["--run.forward-env", "A", "--run.forward-env", "B"],
        ["--run.forward-env", '["A", "B"]'],
    ],
)
def test_the_flag_is_read_as_the_job_reads_it(arguments: list[str]) -> None:
    assert forward_env(arguments) == ["A", "B"]


def test_a_flag_without_a_value_names_nothing() -> None:
    assert forward_env(["--lr", "1", "--run.forward-env"]) == []
