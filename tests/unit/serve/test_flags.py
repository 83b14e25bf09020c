"""The server's command line: what a flag becomes, and mistakes told with the flag and its value."""

import json

import pytest

from eprt.config import EngineConfig
from eprt.serve.flags import parse_options
from eprt.serve.options import OptionError
from tests.unit.cases import MODEL


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--device", "cuda", "--quantization", "int4"], "--quantization int4: must be int8"),
        (["--num-hidden-layers", "3"], "--num-hidden-layers 3: .* with --load-format dummy only"),
        (["--load-format", "gguf"], "--load-format gguf: must be auto or dummy"),
        (["--max-model-len", "2049"], "--max-model-len 2049: this model has positions up to 2048"),
        (["--graph-sizes", "0", "8"], r"--graph-sizes 0 8: must be whole numbers of at least 1"),
        (["--graph-sizes", "8", "-1"], r"--graph-sizes 8 -1: must be whole numbers of at least 1"),
        (["--graph-sizes", "8", "--no-graphs"], "--no-graphs: not allowed with argument --graph-sizes"),
        (["--speculative-acceptance", "rejection"], "--speculative-acceptance rejection: .* --num-speculative-tokens"),
        (["--overlap-schedule", "--num-speculative-tokens", "1"], "--overlap-schedule: steps wait for their drafts"),
        (["--kv-cache-gb", "inf"], "--kv-cache-gb inf: must be above 0 and at most 2147483647"),
        (["--kv-cache-gb", "1e300"], "--kv-cache-gb 1e.300: must be above 0 and at most 2147483647"),
        (["--max-num-seqs", "9" * 40], "--max-num-seqs 9+: must be at most 2147483647"),
        (["--chunk-size", str(1 << 31)], "--chunk-size 2147483648: must be at most 2147483647"),
        (["--diagnose-dir", ""], "--diagnose-dir is empty: give it a value or leave it out"),
        (["--served-model-name", ""], "--served-model-name is empty: give it a value or leave it out"),
        (["--model", ""], "--model is empty"),
        (["--chat-template", "/nowhere/x"], "--chat-template /nowhere/x: No such file"),
        (["--chat-template", "x", "--skip-tokenizer-init"], "--chat-template x: there are no chats with"),
        (["--host", ""], "--host is empty"),
        (["--drain-timeout", "inf"], "--drain-timeout inf: must be finite and at least 0"),
        (["--body-timeout", "inf"], "--body-timeout inf: must be finite and above 0"),
        (["--load-window", "inf"], "--load-window inf: must be in 0.1..86400"),
        (["--migration-timeout", "inf"], "--migration-timeout inf: must be finite and above 0"),
        (["--generation-config", "9" * 5000], "File name too long"),
        (["--max-body-mb", "inf"], "--max-body-mb inf: must be finite and above 0"),
        (["--diagnose-log-mb", "inf"], "--diagnose-log-mb inf: must be finite and at least 1"),
        (
            ["--max-lost-ranks", "1"],
            "--max-lost-ranks 1: needs ranks that eprt starts .*; give -n, and leave out mpirun",
        ),
        (["-n", "2", "--prompt-ranks", "4"], "--prompt-ranks 4: there are 2 ranks; must be in 1..2"),
        (
            ["--nnodes", "2", "--dist-init-addr", "127.0.0.1:7000", "-n", "2", "--prompt-ranks", "2"],
            "--prompt-ranks 2: ranks that compute one prompt share memory, and these are of 2 hosts; leave it out",
        ),
        (
            ["--device", "cuda", "--attention-tp", "2"],
            "--attention-tp 2: attention over several ranks works on CPUs only, so far, not with --device cuda",
        ),
        (["-n", "3", "--attention-tp", "2"], "--attention-tp 2: --ranks 3 makes no teams of 2; must be a multiple"),
        (
            ["-n", "2", "--attention-tp", "2", "--max-lost-ranks", "1"],
            "--attention-tp 2 with --max-lost-ranks 1: nobody has the heads of a rank that is lost; leave one of them",
        ),
        (
            ["--nnodes", "2", "--dist-init-addr", "127.0.0.1:7000", "-n", "2", "--attention-tp", "2"],
            "--attention-tp 2: ranks that share attention share memory, and these are of 2 hosts; leave it out",
        ),
        (
            ["--prefill", "1", "--prefill-ranks", "2", "--decode", "1", "--attention-tp", "2"],
            "--attention-tp 2: --decode-ranks 1 makes no teams of 2; must be a multiple of it",
        ),
        (["-n", "2", "--max-lost-ranks", "2"], "--max-lost-ranks 2: must be in 0..1 with -n 2"),
        (["-n", "2", "--max-lost-ranks", "-1"], "--max-lost-ranks -1: must be in 0..1 with -n 2"),
        (["-n", "2", "--restart-lost-ranks"], "--restart-lost-ranks needs --max-lost-ranks of at least 1"),
        (["-n", "2", "--serve-without-experts"], "--serve-without-experts needs --max-lost-ranks of at least 1"),
        (
            ["-n", "2", "--max-lost-ranks", "1", "--serve-without-experts", "--device", "cuda"],
            "--serve-without-experts with --device cuda: is for ranks on CPUs",
        ),
        (["-n", "2", "--hang-timeout", "2"], "--hang-timeout 2: needs --max-lost-ranks of at least 1, or instances"),
        (["--decode", "1", "--hang-timeout", "0.1"], "--hang-timeout 0.1: must be in 0.5..30: .* EPRT_TIMEOUT_S=30 s"),
        (["-n", "2", "--max-lost-ranks", "1", "--hang-timeout", "31"], "--hang-timeout 31: must be in 0.5..30"),
        (["-n", "2", "--max-lost-ranks", "1", "--hang-timeout", "nan"], "--hang-timeout nan: must be in 0.5..30"),
        (["--load-timeout", "1"], "--load-timeout 1.0: must be finite and at least 2"),
        (["--load-timeout", "inf"], "--load-timeout inf: must be finite"),
        (["--expert-host-copies", "rank"], "--expert-host-copies rank: must be off or node"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, error):
    with pytest.raises(OptionError, match=error):
        parse_options(["--model", str(MODEL), *flags])


def test_the_models_directory_is_known_from_everywhere(monkeypatch):
    monkeypatch.chdir(MODEL.parent)
    options = parse_options(["--model", MODEL.name])
    assert options.engine.model_dir == str(MODEL) and options.model_name == MODEL.name


def test_flags_reach_the_engine():
    engine = parse_options(
        [
            "--model",
            str(MODEL),
            "--device",
            "cuda",
            "--load-format",
            "dummy",
            "--num-hidden-layers",
            "3",
            "--no-graphs",
            "--low-latency-max-tokens",
            "128",
            "--rebalance",
            "auto",
            "--exact-combine",
        ]
    ).engine
    assert engine.exact_combine and engine.spare_experts == EngineConfig.spare_experts
    assert (engine.device, engine.load_format, engine.num_hidden_layers) == ("cuda", "dummy", 3)
    assert engine.graph_sizes == () and engine.low_latency_max_tokens == 128
    assert parse_options(["--model", str(MODEL)]).engine.graph_sizes == EngineConfig.graph_sizes
    assert parse_options(["--model", str(MODEL), "--graph-sizes", "64", "8", "64", "1"]).engine.graph_sizes == (
        1,
        8,
        64,
    )


def test_the_flags_say_what_they_are_for():
    options = parse_options(
        ["--model", str(MODEL), "--rebalance", "auto", "--load-window", "2", "--rebalance-slow-ranks"]
    )
    assert (options.rebalance, options.load_window_s, options.rebalance_slow_ranks) == ("auto", 2.0, True)
    assert parse_options(["--model", str(MODEL), "--replica-routing", "batch-lp"]).engine.replica_routing == "batch-lp"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--rebalance", "on"], "--rebalance on: must be off, auto or dry-run"),
        (["--rebalance", "auto", "--spare-experts", "0"], "--rebalance auto needs --spare-experts of at least 1"),
        (["--replica-routing", "random"], "--replica-routing random: must be weights, local, batch or batch-lp"),
        (["--us-per-crossing", "-1"], "--us-per-crossing -1.0: must be finite and at least 0"),
        (["--load-window", "0"], "--load-window 0.0: must be in 0.1..86400"),
        (["--load-window", "1e-9"], "--load-window 1e-09: must be in 0.1..86400"),
        (["--migration-timeout", "-1"], "--migration-timeout -1.0: must be finite and above 0"),
        (["--generation-config", "/nowhere"], "--generation-config /nowhere: there is no generation_config.json"),
    ],
)
def test_a_flag_that_cannot_be_met_is_named(flags, words):
    with pytest.raises(OptionError) as caught:
        parse_options(["--model", str(MODEL), *flags])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "deepseek_v41"}, "model_type='deepseek_v41' is not supported; DeepSeek V4.1's Engram"),
        ({"model_type": "deepseek_v3", "quantization_config": {"quant_method": "awq"}}, "quant_method='awq' is not"),
    ],
)
def test_models_that_are_not_served_are_refused_before_ranks_start(fields, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(OptionError, match=message):
        parse_options(["--model", str(tmp_path), "--skip-tokenizer-init"])


def test_a_configuration_that_is_nested_without_end_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(OptionError, match=f"--model {tmp_path}: config.json is nested too deeply"):
        parse_options(["--model", str(tmp_path), "--skip-tokenizer-init"])


def test_a_chat_template_of_a_file(tmp_path):
    path = tmp_path / "x.jinja"
    path.write_text("{% if %}")
    with pytest.raises(OptionError, match=f"--chat-template {path}: the chat template has an error in line 1"):
        parse_options(["--model", str(MODEL), "--chat-template", str(path)])
    path.write_text("{{ messages }}")
    assert parse_options(["--model", str(MODEL), "--chat-template", str(path)]).chat_template == str(path)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--prefill", "1"], "--decode 0: must be at least 1"),
        (["--prefill", "-1", "--decode", "1"], "--prefill -1: must be at least 0"),
        (["--decode", "9" * 30], f"--decode {'9' * 30}: must be at most 1024"),
        (["--decode", "1", "--decode-ranks", "1025"], "--decode-ranks 1025: must be at most 1024"),
        (["--decode", "1", "--decode-ranks", "0"], "--decode-ranks 0: must be at least 1"),
        (["--decode", "1", "--local-prefill-tokens", "-1"], "--local-prefill-tokens -1: must be at least 0"),
        (["--decode", "1", "--handoff-timeout", "0"], "--handoff-timeout 0: must be above 0"),
        (["--decode", "1", "--decode-balance", "rows"], "--decode-balance rows: must be step, kv or batch"),
        (["--decode", "1", "-n", "2"], "-n 2: instances have ranks of their own: --prefill-ranks, --decode-ranks"),
        (["--decode", "1", "--device", "auto"], "--device auto: all instances need the same: give --device cpu or"),
        (
            ["--decode", "1", "--device", "cuda", "--join-address", "0.0.0.0:0"],
            "--join-address 0.0.0.0:0: is for instances of other hosts, which cannot read KV pages of GPUs so far",
        ),
        (["--decode", "1", "--device", "cuda", "--page-reader", "tcp"], "--page-reader tcp: is for instances of other"),
        (
            ["--prefill", "1", "--decode", "1", "--prefill-ranks", "2", "--prompt-ranks", "3"],
            "--prompt-ranks 3: the largest instance has 2 ranks; must be in 1..2",
        ),
        (
            ["--prefill", "1", "--decode", "1", "--prefill-ranks", "2", "--prompt-ranks", "2", "--device", "cuda"],
            "--prompt-ranks 2: one prompt over several ranks of an instance works on CPUs only, so far, not with",
        ),
        (["--decode", "1", "--max-lost-ranks", "1"], "--max-lost-ranks 1: an instance is lost as a whole"),
        (["--decode", "1", "--inject", "slow-rank:0:2x"], "--inject slow-rank:0:2x: names a rank of one group"),
        (["--decode-ranks", "2"], "--decode-ranks 2: is of instances; give --prefill and --decode too"),
        (["--decode", "1", "--page-reader", "fax"], "--page-reader fax: must be tcp or nixl"),
        (["--decode", "1", "--join-address", "9000"], "--join-address 9000: write HOST:PORT"),
        (["--decode", "1", "--join-address", "::1:99999"], "--join-address ::1:99999: write HOST:PORT"),
        (["--join-address", "0.0.0.0:0"], "--join-address 0.0.0.0:0: is of instances"),
        (["--handoff-timeout", "3"], "--handoff-timeout 3.0: is of instances"),
    ],
)
def test_flags_of_instances_that_cannot_be_served_are_named(flags, words):
    with pytest.raises(OptionError, match=f"^{words}"):
        parse_options(["--model", str(MODEL), *flags])


def test_instances_on_gpus():
    options = parse_options(["--model", str(MODEL), "--prefill", "1", "--decode", "2", "--device", "cuda"])
    assert options.engine.hands_over and options.engine.page_size == 64 and options.total_ranks == 3


def test_instances_have_names_roles_and_ranks_in_order():
    flags = ["--prefill", "2", "--decode", "1", "--prefill-ranks", "2", "--restart-lost-ranks"]
    options = parse_options(["--model", str(MODEL), *flags])
    assert options.instance_plan == [
        ("prefill-0", "prefill", 2),
        ("prefill-1", "prefill", 2),
        ("decode-0", "decode", 1),
    ]
    assert (options.num_ranks, options.num_instances, options.engine.hands_over) == (5, 3, True)
    plain = parse_options(["--model", str(MODEL)])
    assert (plain.num_instances, plain.engine.hands_over, plain.local_prefill_tokens) == (0, False, 256)


def test_more_than_any_disk_has_is_as_much_as_there_is():
    options = parse_options(["--model", str(MODEL), "--max-body-mb", "1e308", "--diagnose-log-mb", "1e308"])
    assert options.max_body_bytes == options.diagnose_log_bytes == 1 << 60
