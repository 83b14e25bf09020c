"""Every number in README and docs is that of a result file, and those of README are of this code."""

import re

import pytest

from benchmarks.tools import catalogue, figures, measured, provenance
from benchmarks.tools.quantities import flat
from benchmarks.tools.report import RESULTS
from tests.house.sources import ROOT, repository_files

MEASURED = measured.load()
README = "README.md"


def behind_readme() -> dict[str, list[figures.Figure]]:
    """Result file -> the entries that fill a row of README from it."""
    readme = flat((ROOT / README).read_text())
    rendered, _ = figures.render(figures.load())
    files: dict[str, list[figures.Figure]] = {}
    for figure, one in rendered:
        if figures.vouched([(figure, one)], readme):
            for name in figure.files:
                files.setdefault(name, []).append(figure)
    return files


BEHIND_README = behind_readme()


def test_every_figure_is_as_its_result_file_has_it():
    """`python -m benchmarks.tools.figures` prints the same; with --write it writes the results' numbers."""
    wrong = figures.check(figures.pages())
    assert not wrong, "\n".join(wrong)


def test_every_row_of_readme_has_a_result_file():
    table = (ROOT / README).read_text().partition("| | needs | eprt | peer |")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    filled = figures.vouched(figures.render(figures.load())[0], flat((ROOT / README).read_text()))
    assert len(rows) >= 10 and len(filled) == len(rows)


def test_every_result_file_says_how_it_is_measured():
    assert set(MEASURED) == {path.stem for path in repository_files(".json") if path.parent == RESULTS}
    modules = {one.module for one in catalogue.find()}
    for one in MEASURED.values():
        ran = re.findall(r"python -m (\S+)", one.command)
        assert set(ran) <= modules and (ran or one.command.startswith("eprt bench ")), one.command
        missing = [path for path in one.code if not (ROOT / path).exists()]
        assert one.needs and not missing, f"{one.name}: {missing}"


def test_the_planner_is_every_module_that_a_plan_rests_on():
    left, planner = ["plan", "replay", "moves", "split"], set()
    while left:
        module = left.pop()
        if module not in planner:
            planner.add(module)
            left += re.findall(r"^from \.(\w+) import", (ROOT / "balancer" / f"{module}.py").read_text(), re.MULTILINE)
    have = {path for path in MEASURED["balance_plans"].code if path.startswith("balancer/")}
    assert have == {f"balancer/{module}.py" for module in planner}


@pytest.mark.parametrize("name", sorted(BEHIND_README))
def test_results_behind_readme_are_of_this_code(name):
    """Or the row carries the date on which it was measured: {selection.date} in its text."""
    if not provenance.has_history():
        pytest.skip("no git history: an unpacked archive or a shallow clone cannot tell how old a result is")
    if all("date" in figure.text for figure in BEHIND_README[name]):
        return
    why = MEASURED[name].why_old()
    if MEASURED[name].pending:
        assert why, f"{name} is of this code: take it off [pending] in benchmarks/figures/results.toml"
        pytest.xfail(f"{why}; to be measured again on {MEASURED[name].pending}")
    assert why is None, f"{name}: {why}. Measure it again ({MEASURED[name].command}), or let the row say its date"


def test_only_results_behind_readme_are_waited_for():
    assert {one.name for one in MEASURED.values() if one.pending} <= set(BEHIND_README)


def test_a_row_of_readme_that_only_a_simulation_supports_says_so():
    silent = [
        figure.text
        for name, entries in BEHIND_README.items()
        for figure in entries
        if MEASURED[name].simulated and "simulated" not in figure.text
    ]
    assert not silent, silent
