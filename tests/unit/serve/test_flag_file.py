"""Flags from a file: each kind of flag, the command line before the file, mistakes by name."""

import pytest

from eprt.serve.flags import parse_options
from eprt.serve.options import OptionError
from tests.unit.cases import MODEL

YAML = f"""
# what a server of two ranks is given
model: {MODEL}
ranks: 2
served_model_name: [demo, small]
kv-cache-gb: 0.5
no-prefix-cache: true
rebalance-slow-ranks: false
overlap-schedule: false
allowed-origins: https://chat.example.org
graph-sizes: [8, 1]
inject: [slow-rank:1:2x]
drain-timeout: 5
"""
TOML = f'model = "{MODEL}"\nranks = 2\nserved-model-name = ["demo", "small"]\nkv-cache-gb = 0.5\n'


def write(folder, text: str, suffix: str = "yaml") -> str:
    (path := folder / f"serve.{suffix}").write_text(text)
    return str(path)


def test_each_kind_of_flag_can_stand_in_a_file(tmp_path):
    options = parse_options(["--config", write(tmp_path, YAML)])
    assert (options.num_ranks, options.model_name, options.model_aliases) == (2, "demo", ("small",))
    assert options.engine.kv_cache_gb == 0.5 and options.engine.enable_prefix_cache is False
    assert options.rebalance_slow_ranks is False and options.engine.overlap_schedule is False
    assert options.allowed_origins == ("https://chat.example.org",) and options.engine.graph_sizes == (1, 8)
    assert options.inject == ("slow-rank:1:2x",) and options.drain_timeout_s == 5


def test_a_switch_that_is_off_leaves_room_for_its_opposite(tmp_path):
    options = parse_options(["--config", write(tmp_path, f"model: {MODEL}\nno-graphs: false\ngraph-sizes: [8, 1]")])
    assert options.engine.graph_sizes == (1, 8)


def test_toml_says_the_same(tmp_path):
    options = parse_options([f"--config={write(tmp_path, TOML, 'toml')}"])
    assert (options.num_ranks, options.model_aliases, options.engine.kv_cache_gb) == (2, ("small",), 0.5)


def test_the_command_line_wins(tmp_path):
    file = write(tmp_path, YAML)
    given = ["--drain-timeout=7", "-n", "3", "--inject", "slow-rank:2:3x", "--no-graphs", "--served-model-name", "x"]
    options = parse_options(["--config", file, *given])
    assert (options.drain_timeout_s, options.num_ranks, options.inject) == (7, 3, ("slow-rank:2:3x",))
    assert options.engine.graph_sizes == () and (options.model_name, options.model_aliases) == ("x", ())
    assert options.engine.kv_cache_gb == 0.5


@pytest.mark.parametrize(
    "text, suffix, why",
    [
        ("model: [", "yaml", "is not YAML"),
        ("model = ", "toml", "is not TOML"),
        ("- model", "yml", "must hold names of flags with their values"),
        ("modle: x", "yaml", "modle: there is no flag --modle for a file; --help lists the flags"),
        ("config: x.yaml", "yaml", "config: there is no flag --config for a file"),
        ("ranks:", "yaml", "ranks: has no value"),
        ("ranks: [1, 2]", "yaml", "ranks: takes one value, not 2"),
        ("ranks: {a: 1}", "yaml", "ranks: {'a': 1}: must be a text or a number"),
        ("host: true", "yaml", "host: True: must be a text or a number"),
        ("skip-tokenizer-init: 1", "yaml", "skip-tokenizer-init: 1: must be true or false"),
        ("ranks: 1\nranks: 2", "yaml", "is not YAML: ranks stands twice; say it once"),
        ("kv-cache-gb: 1\nkv_cache_gb: 2", "yaml", "kv_cache_gb: the file says this twice; say it once"),
        ("no-graphs: true\ngraph-sizes: [1]", "yaml", "graph-sizes: the file says this twice; say it once"),
        ("no-prefix-cache: false\nno_prefix_cache: true", "yaml", "no_prefix_cache: the file says this twice"),
        ("x: " + "[" * 3000, "yaml", "is nested too deeply"),
        ("x = " + "[" * 3000, "toml", "is nested too deeply"),
        ("x", "ini", "must end in .yaml, .yml or .toml"),
    ],
)
def test_mistakes_name_the_file_and_the_key(tmp_path, text, suffix, why):
    file = write(tmp_path, text, suffix)
    with pytest.raises(OptionError) as caught:
        parse_options(["--config", file])
    assert str(caught.value).startswith(f"--config {file}: {why}") and "\n" not in str(caught.value)


def test_values_are_checked_as_on_the_command_line(tmp_path):
    with pytest.raises(OptionError, match="--ranks 0: must be at least 1"):
        parse_options(["--config", write(tmp_path, f"model: {MODEL}\nranks: 0")])
    with pytest.raises(OptionError, match="--ranks 1025: must be at most 1024"):
        parse_options(["--config", write(tmp_path, f"model: {MODEL}\nranks: 1025")])
    with pytest.raises(OptionError, match=r"--config .*: cannot be read: No such file"):
        parse_options(["--config", str(tmp_path / "none.yaml")])
