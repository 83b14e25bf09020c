"""Environment variables: values, defaults, mistakes, and what child processes get."""

import os
import re

import pytest

from eprt import env
from tests.unit.cases import ROOT


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("EPRT_RANKS_PER_NODE", "2", 2),
        ("EPRT_TIMEOUT_S", "0.5", 0.5),
        ("EPRT_CPU_ISA", "avx2", "avx2"),
        ("EPRT_LOG_LEVEL", "debug", "debug"),
    ],
)
def test_values_are_parsed_and_unset_means_default(monkeypatch, name, text, value):
    monkeypatch.delenv(name, raising=False)
    assert env.get(name) == env.TABLE[name].default
    monkeypatch.setenv(name, "")
    assert env.get(name) == env.TABLE[name].default
    monkeypatch.setenv(name, text)
    assert env.get(name) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("EPRT_RANKS_PER_NODE", "0", "at least 1"),
        ("EPRT_RANKS_PER_NODE", "two", "two"),
        ("EPRT_TIMEOUT_S", "-1", "above 0"),
        ("EPRT_TIMEOUT_S", "nan", "above 0"),
        ("EPRT_TIMEOUT_S", "inf", "above 0 and below 1e.09"),
        ("EPRT_GPU_TIMEOUT_S", "1e300", "below 1e.09"),
        ("EPRT_CPU_ISA", "avx1024", "scalar, avx2, avx512, amx"),
    ],
)
def test_a_bad_value_names_variable_value_and_meaning(monkeypatch, name, text, message):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}='{text}'.*{message}"):
        env.get(name)
    with pytest.raises(ValueError, match=re.escape(env.TABLE[name].meaning)):
        env.check()


def test_a_misspelt_variable_is_not_ignored(monkeypatch):
    monkeypatch.setenv("EPRT_TIMEOUT", "5")
    with pytest.raises(ValueError, match="unknown environment variable EPRT_TIMEOUT; eprt reads EPRT_RANKS_PER_NODE"):
        env.check()


def test_the_documentation_lists_every_variable_with_its_default():
    text = (ROOT / "docs" / "environment.md").read_text()
    rows = dict(re.findall(r"^\| `(EPRT_\w+)` \| (.+?) \|", text, re.MULTILINE))
    assert rows == {
        name: "unset" if variable.default is None else f"`{variable.default}`" for name, variable in env.TABLE.items()
    }
    for variable in env.TABLE.values():
        assert variable.meaning in text, variable.name
    for name in (*env.ROOT_ENVIRONMENT, "rmaps_default_mapping_policy", "hwloc_default_binding_policy", "osc"):
        assert name in text


def test_mpi_environment_says_the_same_as_the_parameter_files():
    assert env.MPI_ENVIRONMENT["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert env.MPI_ENVIRONMENT["OMPI_MCA_osc"] == "^ucx"
    assert len(env.MPI_ENVIRONMENT) == 5


def test_open_mpi_always_has_a_home(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    assert os.path.isabs(env.mpi_environment()["HOME"])
    monkeypatch.setattr(env.os.path, "expanduser", lambda path: path)  # a user without a name
    assert env.mpi_environment()["HOME"] == "/"
    monkeypatch.setenv("HOME", "/their/own")
    assert env.mpi_environment()["HOME"] == "/their/own"


def test_child_processes_can_be_told_that_they_are_no_ranks(monkeypatch):
    monkeypatch.setenv("PMIX_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert env.started_by_mpirun()
    assert not {"PMIX_RANK", "OMPI_COMM_WORLD_SIZE"} & set(env.without_mpi())


@pytest.mark.parametrize(("local", "all_ranks", "wanted"), [("4", "4", "^tcp"), ("2", "4", None), (None, None, None)])
def test_ranks_of_one_host_are_told_to_open_no_port(monkeypatch, local, all_ranks, wanted):
    monkeypatch.setattr(env.os, "environ", {})
    for name, value in (("LOCAL_SIZE", local), ("SIZE", all_ranks)):
        if value is not None:
            env.os.environ[f"OMPI_COMM_WORLD_{name}"] = value
    env.close_ranks_ports()
    assert env.os.environ.get("OMPI_MCA_btl") == wanted
    env.os.environ["OMPI_MCA_btl"] = "self,tcp"
    env.close_ranks_ports()
    assert env.os.environ["OMPI_MCA_btl"] == "self,tcp", "the user's word"


@pytest.mark.parametrize(
    ("variables", "rank", "size"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}, 1, 4),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1, 2),
        ({"PMIX_RANK": "2", "PMI_RANK": "0", "PMI_SIZE": "1"}, 2, None),  # srun --mpi=pmix in a shell of PMI-2's
        ({"PMIX_RANK": "2", "OMPI_COMM_WORLD_SIZE": "1"}, 2, None),
        ({"PMI_SIZE": "4"}, None, None),  # whoever unset PMI_RANK wants no job
    ],
)
def test_a_job_has_the_size_that_the_launcher_of_its_ranks_tells(monkeypatch, variables, rank, size):
    monkeypatch.setattr(env.os, "environ", variables)
    assert (env.launched_rank(), env.launched_size()) == (rank, size)
