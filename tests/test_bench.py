"""scripts/bench.py reads what the commands write."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from draftsmith.inference.evaluation.side_by_side import results
from scripts import bench
from scripts.docs_tables import _result
from tests.support.reports import in_engine, make_measurement, make_report


def test_methods_of_the_results_of_try_are_rows():
    one = make_measurement("chat", 0.0, 0.8)
    names = ("default", "ngram", "runs/bench/mlp/export")
    tree = {name: results(one.requests, one.cell()) for name in names}
    head, off, ngram, mlp = bench.methods({**json.loads(json.dumps(tree)), "versions": {}})
    cell = tree["ngram"]["metrics"]
    assert (off[:3], ngram[0]) == (["drafting off", "–", "–"], "`ngram`")
    assert mlp[0] == "`mlp`"
    assert ngram[1] == f"{cell['acceptance_length']:.2f}"
    assert ngram[4] == f"{cell['speedup_vs_autoregressive']['value']:.2f}"
    assert len(head) == len(off) == len(ngram)


def test_quickstart_and_engines_of_a_report_are_rows():
    report = make_report()
    _, tau, *_, mismatches = bench.quickstart(json.loads(report.model_dump_json()))
    assert tau[1:] == [f"{report.summary[f't{t}.acceptance_length']:.2f}" for t in (0, 1)]
    assert mismatches[1] == str(int(report.summary["lossless_mismatches"]))
    for one in (in_engine(report), in_engine(report, "vllm")):
        rows = bench.engines(json.loads(one.model_dump_json()))[1:]
        assert rows and {row[0] for row in rows} <= {"draftsmith", "vllm"}


def test_suites_are_a_row_per_method_with_cells_for_every_set_of_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    report = make_report()
    pooled = next(cell for cell in report.results if cell.workload == "all")
    names = (*bench.TABLE_HEADS, *bench.TABLE_METHODS)
    times = {
        f"runs/{name}/export" if name in bench.TABLE_HEADS else name: {
            "metrics": {"speedup_vs_autoregressive": {"value": 1 + place / 10}}
        }
        for place, name in enumerate(names)
    }
    for prompts in bench.TABLE_PROMPTS:
        folder = tmp_path / bench.OUT / "suites" / prompts
        for name in names:
            (folder / name).mkdir(parents=True)
            (folder / name / "acceptance.json").write_text(report.model_dump_json())
        (folder / "speed.json").write_text(json.dumps(times))
        (folder / "eagle3" / "vllm").mkdir()
        in_vllm = in_engine(report, "vllm").model_dump_json()
        (folder / "eagle3" / "vllm" / "acceptance.json").write_text(in_vllm)
    head, *rows = bench.suites({})
    assert [row[0] for row in rows] == [f"`{name}`" for name in names]
    assert all(len(row) == len(head) == 2 + 2 * len(bench.TABLE_PROMPTS) for row in rows)
    forwards, speedups = rows[0][1:3]
    assert forwards.split(" / ")[1:] == [f"{pooled.tokens_per_forward:.2f}", "–"]
    assert speedups == f"1.00 / {pooled.speedup_vs_autoregressive.value:.2f}"
    assert [row[2] for row in rows[1:]] == [f"{1 + i / 10:.2f} / –" for i in range(1, len(names))]


def test_sources_are_rows_of_medians_behind_the_first_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    for target, source in product(bench.SOURCES_TARGETS, bench.SOURCES):
        for repeat, seconds in enumerate((1.0, 2.0, 9.0)):
            run = tmp_path / bench.OUT / "sources" / f"{target.name}-{source}-{repeat}"
            with SummaryWriter(run / "quickstart") as writer:
                for step in range(target.warm + 2):
                    warm = step >= target.warm
                    writer.add_scalar("step_seconds", seconds, step)
                    writer.add_scalar("tokens_per_second", 100 / seconds if warm else 1e9, step)
                    writer.add_scalar("waits", 0.25 if warm else 1.0, step)
    head, *rows = bench.sources({})
    pairs = [
        [target.title, title]
        for target in bench.SOURCES_TARGETS
        for title in bench.SOURCES.values()
    ]
    assert rows == [[*pair, "50", "1.00", "25.0%"] for pair in pairs]
    assert len(head) == 5


def test_load_of_a_comparison_is_a_row_per_mode():
    result = {"output_throughput": 40.0, "median_ttft_ms": 20.0, "median_tpot_ms": 3.0}
    level = {"max_concurrency": 4, "modes": {"off": result, "K=2": {**result, "gain": 1.5}}}
    _, off, drafting = bench.load({"levels": [level]})
    assert (off[:4], drafting[:4]) == (["4", "off", "40", "–"], ["4", "K=2", "40", "1.50"])


def test_record_of_a_command_that_ran_has_its_origin(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "docs" / "results")
    written = tmp_path / bench.BENCHES["quickstart"].file
    written.parent.mkdir(parents=True)
    written.write_text(make_report().model_dump_json())
    bench.main(["quickstart", "--record"])
    result = json.loads((tmp_path / "docs" / "results" / "quickstart.json").read_text())
    assert result["command"] == "make quickstart" and result["machine"] and result["date"]
    assert all(len(row) == len(result["columns"]) for row in result["rows"])


@pytest.mark.parametrize("file", sorted(bench.RESULTS.glob("*.json")), ids=lambda f: f.stem)
def test_published_result_is_shown_with_its_origin(file: Path):
    result, shown = json.loads(file.read_text()), "\n".join(_result(file.stem))
    assert file.stem in bench.BENCHES
    assert all(result[key] in shown for key in ("date", "commit", "machine", "command"))
