"""Every table of figures in README.md and docs/ is that of its result, and a command measures
it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import figures
from scripts.figures import FIGURES, MARKED, RESULTS, ROOT, Table, faults, filled, pages, strays

PAGE = ROOT / "docs" / "page.md"


def test_every_page_agrees_with_the_results():
    assert [
        fault for page in pages() for fault in faults(page, page.read_text(encoding="utf-8"))
    ] == []


def test_every_figure_has_a_result_of_a_commit_and_is_shown():
    shown = {
        mark[1] for page in pages() for mark in MARKED.finditer(page.read_text(encoding="utf-8"))
    }
    assert shown == set(FIGURES) == {path.stem for path in RESULTS.glob("*.json")}
    for name in FIGURES:
        assert len(json.loads((RESULTS / f"{name}.json").read_text())["commit"]) >= 7, name


def test_a_changed_cell_an_unknown_figure_and_a_table_of_nobody_are_faults(tmp_path, monkeypatch):
    page = ROOT / "docs" / "plan.md"
    text = page.read_text(encoding="utf-8")
    cell = json.loads((RESULTS / "plan.json").read_text())["tables"]["errors"]["rows"][0][1]
    assert any(
        "not that of its result" in fault
        for fault in faults(page, text.replace(f" {cell} |", " 9.99 |", 1))
    )
    assert any(
        "no command measures 'plam'" in fault
        for fault in faults(page, text.replace("plan.errors:", "plam.errors:"))
    )
    assert any(
        "no table 'error'" in fault
        for fault in faults(page, text.replace("plan.errors:", "plan.error:"))
    )
    assert faults(PAGE, "| K | τ | speedup |\n| --- | --- | --- |\n| 4 | 2.41 | 1.30 |\n") != []
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert any("has no result plan.json" in fault for fault in faults(page, text))


def test_examples_of_code_and_options_are_no_figures():
    assert strays("| `p` | 0.8 | decay |\n```\n| a | 1.25 | 2.50 |\n```\n") == []


def test_a_result_fills_its_tables_and_nothing_else(tmp_path, monkeypatch):
    printed = "| run | error |\n| --- | ---: |\n| small | 1.07 |\n"
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "memory.md").write_text(printed)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.measure("memory", tmp_path / "made")
    page = "above\n\n<!-- measured memory.rows: -->\n\nold\n\n<!-- /measured -->\n\nbelow\n"
    made = filled(PAGE, page)
    assert made.startswith("above\n\n<!-- measured") and made.endswith(
        "<!-- /measured -->\n\nbelow\n"
    )
    assert "| small | 1.07 |" in made and "bench_memory.py" in made and "old" not in made
    assert filled(PAGE, page, ["plan"]) == page  # only the figure that was measured
    assert filled(PAGE, made) == made and "```bash" not in filled(ROOT / "README.md", page)


@pytest.mark.parametrize("name", ["quickstart", "engines"])
def test_the_figures_of_a_report_are_those_of_its_summary(name, monkeypatch):
    summary = {
        f"t{t}.{key}": 2.5 + t
        for t in (0, 1)
        for key in (*figures.SUMMARY.values(), "vllm_acceptance_length")
    }
    rates = SimpleNamespace(
        autoregressive=SimpleNamespace(median=100.0), speculative=SimpleNamespace(median=250.0)
    )
    report = SimpleNamespace(
        summary=summary | {"lossless_mismatches": 0.0},
        cell=lambda *place, **engine: SimpleNamespace(tokens_per_second=rates),
    )
    monkeypatch.setattr(figures, "load_report", lambda path: report)
    cells = [
        cell for table in FIGURES[name].read(Path()).values() for row in table.rows for cell in row
    ]
    assert {
        "quickstart": {"2.50", "3.50", "0"},
        "engines": {"2.500", "100", "250", "2.50", "1.00"},
    }[name] <= set(cells)


def test_speeds_of_methods_become_ratios_to_drafting_off_and_trees_ratios_to_their_chain(tmp_path):
    def row(method, workload, rate, speedup=None, tau=2.0):
        spread = {"median": speedup} if speedup else None
        return {
            "method": method,
            "workload": workload,
            "tokens_per_second": {"median": rate},
            "speedup": spread,
            "acceptance_length": tau,
        }

    rows = [row("default", w, 100.0) for w in ("math", "chat")]
    rows += [row("dspark", "math", 200.0, 2.0), row("dspark", "chat", 800.0, 8.0)]
    rows += [row("dspark, tree", w, 300.0, 3.0, 2.5) for w in ("math", "chat")]
    (tmp_path / "runtime.json").write_text(json.dumps({"results": rows}))
    made = FIGURES["runtime"].read(tmp_path)
    assert made["methods"] == Table(
        ["speedup", "math", "chat", "geometric mean"],
        [
            ["drafting off, tokens/s", "100", "100", "100"],
            ["`dspark`", "2.00", "8.00", "4.00"],
            ["`dspark, tree`", "3.00", "3.00", "3.00"],
        ],
    )
    assert made["trees"].rows == [["`dspark`", "1.00", "4.00"], ["`dspark, tree`", "1.25", "3.00"]]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with one figure, measured at its only commit."""
    for name in (
        "train/loop.py",
        "scripts/bench_memory.py",
        "scripts/bench_plan.py",
        "docs/plan.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("first\n")
    made_by = "git -c user.name=a -c user.email=a@b commit -qm made"
    subprocess.run(f"git init -q && git add . && {made_by}", shell=True, check=True, cwd=tmp_path)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "docs" / "figures")
    command = "python scripts/bench_memory.py > runs/figures/memory/table.md"
    read = figures.read_printed("table.md", "rows")
    monkeypatch.setitem(
        FIGURES, "memory", figures.Figure(1, (command,), "runs/figures/memory", read)
    )
    made = tmp_path / "made"
    made.mkdir()
    (made / "table.md").write_text("| run | error |\n| --- | --- |\n| small | 1.07 |\n")
    figures.measure("memory", made)
    return tmp_path


def test_a_figure_is_of_the_present_code_until_a_file_that_it_runs_changes(project):
    assert figures.changed("memory") == [] and figures.due(["memory"]) == []
    (project / "docs" / "plan.md").write_text("second\n")
    (project / "scripts" / "bench_plan.py").write_text("second\n")
    assert figures.changed("memory") == []
    (project / "inference" / "bench").mkdir(parents=True)  # which `draftsmith bench` alone runs
    (project / "inference" / "bench" / "run.py").write_text("first\n")
    subprocess.run(["git", "add", "inference"], cwd=project, check=True)
    assert figures.changed("memory") == []
    (project / "scripts" / "bench_memory.py").write_text("second\n")
    assert figures.changed("memory") == ["scripts/bench_memory.py"]
    (project / "train" / "loop.py").write_text("second\n")
    assert figures.changed("memory") == ["scripts/bench_memory.py", "train/loop.py"]
    assert figures.due(["memory"]) == ["memory"] and figures.changed("plan") == ["no result"]


def test_a_figure_of_older_code_is_measured_after_the_drafters_it_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(
        figures, "changed", lambda name: ["file"] if name in ("load", "runtime") else []
    )
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "runs" / "compare").mkdir(parents=True)
    assert figures.due(list(FIGURES)) == ["quickstart", "runtime", "load"]


def test_an_interrupted_figure_goes_on_with_the_same_code_and_begins_anew_with_other(
    project, monkeypatch
):
    kept = project / "runs" / "figures" / "memory" / "part.md"
    stop = "cp made/table.md runs/figures/memory/part.md; false"
    monkeypatch.setitem(FIGURES, "memory", replace(FIGURES["memory"], commands=(stop,)))
    with pytest.raises(subprocess.CalledProcessError):
        figures.measure("memory")
    end = "cp runs/figures/memory/part.md runs/figures/memory/table.md"
    monkeypatch.setitem(FIGURES, "memory", replace(FIGURES["memory"], commands=(end,)))
    figures.measure("memory")
    assert kept.exists() and result_of(project)["tables"]["rows"]["rows"] == [["small", "1.07"]]
    with pytest.raises(
        subprocess.CalledProcessError
    ):  # measured to its end: a new run begins with an empty folder
        figures.measure("memory")
    assert not kept.exists()
    kept.write_text("of other code")
    (project / "runs" / "figures" / "memory.begun").write_text("another commit")
    with pytest.raises(subprocess.CalledProcessError):
        figures.measure("memory")
    assert not kept.exists()


def result_of(project):
    return json.loads((project / "docs" / "figures" / "memory.json").read_text())
