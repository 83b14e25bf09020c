"""Which kernels of the exchange are compiled ahead of the GPU cases."""

from collections import Counter

from tests.gpu import ahead, cases_low_latency


def test_every_kernel_of_both_modes_is_there_for_each_number_of_ranks():
    for num_ranks in (1, 4):
        sources = list(ahead.sources([num_ranks], "sm_90a"))
        names = {source.name for source in sources}
        assert names == {
            "normal_count",
            "normal_dispatch",
            "normal_combine",
            "dispatch_layout",
            "low_latency_dispatch",
            "low_latency_combine",
        }
        assert all(dict(source.defines)["NUM_RANKS"] == num_ranks for source in sources)
        hidden = {dict(one.defines)["HIDDEN"] for one in sources if one.name == "low_latency_dispatch"}
        assert {shape[0] for shape in cases_low_latency.SHAPES} <= hidden


def test_a_kernel_is_compiled_once(monkeypatch, capsys):
    """Shapes that differ only in what kernels do not know give the same source."""
    built = []
    monkeypatch.setattr(ahead.sys, "argv", ["ahead", "2", "1"])
    monkeypatch.setattr("eprt.gpu.device.this_arch", lambda: "sm_90a")
    monkeypatch.setattr(ahead, "build", lambda source: built.append(source) or 1 << 10)
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", Pool)
    ahead.main()
    assert max(Counter(built).values()) == 1 and len(built) > 20
    assert f"{len(built)} kernels" in capsys.readouterr().out


class Pool:
    """In this process."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def map(self, function, values):
        return map(function, values)
