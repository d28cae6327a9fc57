"""Every measured table of README.md and docs/: the commands that measure it, its result, and the
text that shows it.

    python scripts/figures.py --list                              # names, minutes, commits, and
    which are of older code python scripts/figures.py                                     # measure
    those of older code, one by one: hours python scripts/figures.py --only runtime --only plan
    # some figures, whatever they are of python scripts/figures.py --only compare --from
    runs/compare  # take results that are there already python scripts/figures.py --check
    # exit code 1 if a page and a result disagree

A table stands between `<!-- measured FIGURE.TABLE: … -->` and `<!-- /measured -->`. Its cells are
in docs/figures/FIGURE.json with the commit that was measured. All other text on the pages is
written by hand, and has no table of figures. Measuring deletes what an earlier run left:
runs/compare, runs/quickstart/eagle3, runs/figures/…; but a run that was interrupted goes on where
it stopped, if the code is the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inference.provenance import cpu_model, git_commit
from inference.report.measurement import ALL_WORKLOADS, OUR_ENGINE
from inference.report.schema import load_report
from scripts import bench_peers
from scripts.measuring import markdown, save_json
from train.pipeline.compare import Comparison
from train.pipeline.compare import markdown as families

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "figures"
RUNS = "runs/figures"
LEFT_OUT = (  # code that is another figure's, unless its commands match
    (re.compile(r"draftsmith bench|bench_clients"), ":!inference/bench"),
    (
        re.compile(r"make quickstart"),
        ":!inference/evaluation/lossless.py",
    ),  # alone shows what this counts
)
CODE = (  # of every figure, besides the scripts that its commands name
    "speculators",
    "inference",
    "train",
    "recipes",
    "pyproject.toml",
    "constraints.txt",
    "constraints-vllm.txt",
    "scripts/measuring.py",
    "scripts/peers",
)
MARKED = re.compile(r"<!-- measured (\w+)\.(\w+):[^>]*-->\n.*?\n<!-- /measured -->", re.DOTALL)
GENERATED = re.compile(
    r"<!-- (\w+):begin -->\n.*?\n<!-- \1:end -->|^```.*?^```", re.DOTALL | re.MULTILINE
)
FIGURE = re.compile(r"[*~]*[\d,]+\.\d+( ?[%×])?\**")  # a cell with a measured number
TARGET, HEAD = "recipes/quickstart/target", "runs/quickstart/eagle3/export"
WORKLOADS = ("math", "python", "json", "rewrite", "table", "chat")


@dataclass(frozen=True)
class Table:
    """Cells as text. `left`: the first columns that are words."""

    headings: list[str]
    rows: list[list[str]]
    left: int = 1

    def __post_init__(self) -> None:
        if any(len(row) != len(self.headings) for row in self.rows):
            raise ValueError(
                f"a row has not as many cells as the headings {self.headings}: {self.rows}"
            )

    @classmethod
    def of(cls, text: str) -> Table:
        """The first Markdown table of a text."""
        lines = [line for line in text.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
        return cls(cells[0], cells[2:])


@dataclass(frozen=True)
class Figure:
    """What one list of commands measures.

    minutes    on one core
    commands   lines of a shell, in the repository root
    folder     where they leave what `read` turns into tables by name
    pictures   files of that folder, and where in docs/ they belong
    needs      figures whose drafters it measures
    """

    minutes: int
    commands: tuple[str, ...]
    folder: str
    read: Callable[[Path], dict[str, Table]]
    pictures: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()


# ------------------------------------------------------------------ results of the commands, as
# tables

SUMMARY = {
    "acceptance length τ, measured": "acceptance_length",
    "acceptance length τ, expected by replay": "expected_acceptance_length",
    "tokens/s with drafting": "tokens_per_second",
    "speedup over the same engine, drafting off": "speedup_vs_autoregressive",
    "speedup over `transformers.generate`": "speedup_vs_transformers",
    "efficiency: speedup ÷ the cost model's limit": "efficiency",
}


def read_quickstart(folder: Path) -> dict[str, Table]:
    summary = load_report(folder / "acceptance.json").summary
    rows = []
    for told, key in SUMMARY.items():
        values = [summary[f"t{t}.{key}"] for t in (0, 1)]
        rows.append(
            [told, *(f"{value:.0f}" if value >= 100 else f"{value:.2f}" for value in values)]
        )
    rows.append(["lossless mismatches", f"{summary['lossless_mismatches']:.0f}", ""])
    return {"head": Table(["figure", "T = 0", "T = 1"], rows)}


def read_compare(folder: Path) -> dict[str, Table]:
    text = (folder / "comparison.json").read_text(encoding="utf-8")
    made = Table.of(families(Comparison.model_validate_json(text)))
    speedup = made.headings.index("speedup T=0")
    return {
        "families": Table(made.headings, sorted(made.rows, key=lambda row: -float(row[speedup])))
    }


def read_runtime(folder: Path) -> dict[str, Table]:
    """Speedups by workload, and trees against the chain of the same head."""
    results = json.loads((folder / "runtime.json").read_text())["results"]
    by_method: dict[str, dict[str, dict[str, Any]]] = {}
    for row in results:
        by_method.setdefault(row["method"], {})[row["workload"]] = row
    heads = [*by_method["default"], "geometric mean"]
    rows = []
    for method, found in by_method.items():
        rates = [row["tokens_per_second"]["median"] for row in found.values()]
        ratios = [row["speedup"]["median"] if row["speedup"] else 0.0 for row in found.values()]
        cells = [f"{x:.0f}" for x in (*rates, geometric_mean(rates))]
        if method != "default":
            cells = [f"{x:.2f}" for x in (*ratios, geometric_mean(ratios))]
        rows.append(["drafting off, tokens/s" if method == "default" else f"`{method}`", *cells])
    chain, trees = by_method["dspark"], []
    for method in ("dspark", *(name for name in by_method if name.startswith("dspark,"))):
        taus = [
            row["acceptance_length"] / chain[w]["acceptance_length"]
            for w, row in by_method[method].items()
        ]
        speedup = geometric_mean([row["speedup"]["median"] for row in by_method[method].values()])
        trees.append([f"`{method}`", f"{sum(taus) / len(taus):.2f}", f"{speedup:.2f}"])
    return {
        "methods": Table(["speedup", *heads], rows),
        "trees": Table(
            ["drafts", "τ against the chain, mean over workloads", "speedup, geometric mean"], trees
        ),
    }


def read_draft_length(folder: Path) -> dict[str, Table]:
    kept = json.loads((folder / "draft_length.json").read_text())
    names = list(next(iter(kept["rates"].values())))
    rows = []
    for workload, by_name in kept["rates"].items():
        fixed = max(rate for name, rate in by_name.items() if name != "adaptive")
        rows.append([workload, *(f"{by_name[name] / fixed:.3f}" for name in names)])
        rows[-1].append(f"{kept['other_half'][workload]['adaptive']:.3f}")
    return {"lengths": Table(["workload", *names, "adaptive ÷ best K of other responses"], rows)}


def read_printed(file: str, name: str) -> Callable[[Path], dict[str, Table]]:
    """A table that a script prints as Markdown."""
    return lambda folder: {name: Table.of((folder / file).read_text(encoding="utf-8"))}


def read_plan(folder: Path) -> dict[str, Table]:
    runs = json.loads((folder / "plan.json").read_text())["runs"]
    names = (
        "seconds per step",
        "seconds per token written",
        "peak memory",
        "checkpoint bytes",
        "export bytes",
    )
    rows = []
    for run in runs:
        told = f"{run['family']}, {run['size']}" + (" (fitted on)" if run["fitted"] else "")
        rows.append(
            [told, *(f"{run['estimated'][name] / run['measured'][name]:.2f}" for name in names)]
        )
    errors = [
        [
            max(r, 1 / r)
            for run in runs
            if not run["fitted"]
            for r in [run["estimated"][n] / run["measured"][n]]
        ]
        for n in names
    ]
    for told, pick in (("not fitted: median error", median), ("not fitted: worst", max)):
        rows.append([told, *(f"× {pick(each):.2f}" for each in errors)])
    return {"errors": Table(["estimated ÷ measured", *names], rows)}


def read_peers(folder: Path) -> dict[str, Table]:
    results = json.loads((folder / "peers.json").read_text())["results"]
    heads = ["setting", "T", "s, ours : theirs", "tokens/s", "MiB, ours : theirs", "memory"]
    rows = [
        bench_peers.cells(f"`{name}`: {each['setting']['about']}", each)
        for name, each in results.items()
    ]
    return {"steps": Table(heads, [[*row[:4], *row[5:7]] for row in rows])}


def read_load(folder: Path) -> dict[str, Table]:
    """Drafting off and on in servers of both engines."""
    heads = [
        "requests at a time",
        "tokens/s off",
        "on",
        "×",
        "per user off",
        "on",
        "×",
        "TTFT ×",
        "τ",
        "same text",
    ]
    tables = {}
    for engine in ("draftsmith", "vllm"):
        rows = []
        for level in json.loads((folder / engine / "comparison.json").read_text())["levels"]:
            off, on, ratios = level["off"], level["on"], level["ratios"]
            rows.append([str(level["max_concurrency"])])
            for name in ("output_throughput", "tokens_per_second_per_user"):
                rows[-1] += [f"{off[name]:.1f}", f"{on[name]:.1f}", f"{ratios[name]:.2f}"]
            rows[-1] += [
                f"{ratios['median_ttft_ms']:.2f}",
                f"{on['spec_decode_acceptance_length']:.2f}",
            ]
            rows[-1].append(f"{level['identical_outputs']}/{level['compared_outputs']}")
        tables[engine] = Table(heads, rows)
    return tables


def read_engines(folder: Path) -> dict[str, Table]:
    """τ and tokens/s of both engines, and of this one with compiled rounds."""
    both, compiled = (
        load_report(folder / name / "acceptance.json") for name in ("both", "compiled")
    )
    keys = ("expected_acceptance_length", "acceptance_length", "vllm_acceptance_length")
    taus = [f"{both.summary[f't0.{k}']:.3f}" for k in keys]
    ours = {"this runtime": (both, OUR_ENGINE), "this runtime, compiled": (compiled, OUR_ENGINE)}
    runs = {"vLLM": (both, "vllm"), **ours}
    speeds = {}
    for name, (report, engine) in runs.items():
        cell = report.cell(ALL_WORKLOADS, 0, engine=engine)
        assert cell is not None and cell.tokens_per_second is not None, f"{name} was not timed"
        rates = cell.tokens_per_second
        assert rates.autoregressive is not None, f"{name} was not timed without drafts"
        speeds[name] = rates.autoregressive.median, rates.speculative.median
    peer_off, peer_on = speeds["vLLM"]
    rows = []
    for name, (off, on) in speeds.items():
        ratios = (on / off, off / peer_off, on / peer_on)
        rows.append([name, f"{off:.0f}", f"{on:.0f}", *(f"{ratio:.2f}" for ratio in ratios)])
    heads = ["engine", "tokens/s off", "drafted", "×", "off ÷ vLLM", "drafted ÷ vLLM"]
    return {
        "tau": Table(["expected by replay", "this runtime", "vLLM"], [taus], left=0),
        "speeds": Table(heads, rows),
    }


def read_advice(folder: Path) -> dict[str, Table]:
    """Gains of each K, the file of the advice, and gains of what follows it."""
    first, followed = (
        json.loads((folder / name / "comparison.json").read_text())
        for name in ("first", "followed")
    )
    lengths = list(first["advice"]["levels"][0]["median_gains"])

    def ranged(gain: dict[str, float]) -> str:
        return f"{gain['median']:.2f} ({gain['smallest']:.2f} to {gain['largest']:.2f})"

    gains, kept = [], []
    for level in first["advice"]["levels"]:
        cells = [f"{level['median_gains'][tokens]:.2f}" for tokens in lengths]
        advised = str(level["num_speculative_tokens"])
        gains.append([str(level["max_concurrency"]), *cells, advised, ranged(level["gain"])])
    for level in followed["advised"]:
        cells = [f"{gain:.2f}" for gain in level["fixed_gains"].values()]
        kept.append(
            [str(level["max_concurrency"]), *cells, ranged(level["gain"]), f"{level['worst']:.3f}"]
        )
    names = [f"K = {tokens}" for tokens in lengths]
    fixed = [
        name if name == "off" else f"K = {name}" for name in followed["advised"][0]["fixed_gains"]
    ]
    file = (folder / "first" / "speculative_config.json").read_text(encoding="utf-8").strip()
    return {
        "gains": Table(["at a time", *names, "advised", "its gain (range)"], gains),
        "file": Table(["speculative_config.json"], [[f"`{file}`"]]),
        "followed": Table(["at a time", *fixed, "advice followed (range)", "÷ best fixed K"], kept),
    }


def read_clients(folder: Path) -> dict[str, Table]:
    rows = []
    for client, found in json.loads((folder / "clients.json").read_text()).items():
        counts = (f"{found[n]:.0f}" for n in ("verifications", "accepted"))
        metrics = f"{found['metrics']:.4f}" if "metrics" in found else "-"
        rows.append([client, *counts, f"{found['tau']:.4f}", metrics])
    return {
        "tau": Table(
            ["client", "verifications", "accepted", "τ pooled, its own", "of `/metrics`"], rows
        )
    }


# ------------------------------------------------------------------ the figures

_LENGTHS = (
    f"python scripts/bench_draft_length.py {TARGET} {HEAD} -k 8 --least 3 --prompts 4 --max-tokens"
    " 96 --repeats 2"
)
_METHODS = (
    f"eagle3={HEAD}",
    '{"method":"draft_model","model":"runs/compare/draft_model/export","num_speculative_tokens":3}',
    "ngram",
    '{"method":"suffix","suffix_decoding_max_cached_requests":0}',
    '{"method":"lookahead","lookahead_window_size":5,"lookahead_ngram_size":4,"lookahead_num_guesses":5}',
    "dspark=runs/compare/dspark/export",
    (
        '{"name":"dspark, tree of'
        ' 8","method":"dspark","model":"runs/compare/dspark/export","num_speculative_tokens":8,'
        '"speculative_eagle_topk":3,"speculative_num_steps":4}'
    ),
    (
        '{"name":"dspark, tree of 16,'
        ' adaptive","method":"dspark","model":"runs/compare/dspark/export",'
        '"num_speculative_tokens":16,"speculative_eagle_topk":4,"speculative_num_steps":4,"enable_adaptive_verification":true}'
    ),
)
_SERVED = (
    f"draftsmith bench --compare --together --model {TARGET} --num-prompts 64 --dataset-name"
    " custom "
    "--dataset-path recipes/quickstart/data/test.jsonl.gz --disable-shuffle --output-len 64"
    " --temperature 0 "
    f'--concurrencies 1,8,32 --speculative-config \'{{"model": "{HEAD}", "num_speculative_tokens":'
    " 4}'"
)
_VLLM = (
    "export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind",
    "export DRAFTSMITH_VLLM_PYTHON=${DRAFTSMITH_VLLM_PYTHON:-$PWD/.venv-vllm/bin/python}",
)


def advice_commands(serve_args: str, lengths: str, folder: str) -> tuple[str, str]:
    """An advice is made, and followed by a server that is measured beside every fixed K."""
    longest = lengths.split(",")[-1]
    drafter = f'{{"model": "{HEAD}", "num_speculative_tokens": {longest}}}'
    run = (
        f"draftsmith bench --compare --together --model {TARGET} --num-prompts 16 --dataset-name"
        " custom --dataset-path recipes/quickstart/data/test.jsonl.gz --disable-shuffle"
        f" --output-len 48 --temperature 0 --concurrencies 1,4,16 --draft-lengths {lengths}"
        f" --repeats 10 --speculative-config '{drafter}' --serve-args '{serve_args}' --result-dir"
        f" {RUNS}/{folder}"
    )
    return f"{run}/first", f"{run}/followed --advised {RUNS}/{folder}/first/speculative_config.json"


_TO_SUITE = (
    "zcat recipes/quickstart/data/test.jsonl.gz | python -c 'import json, sys;"
    ' [print(json.dumps({"question_id": i, "category": row["workload"], "turns": [m["content"] for'
    ' m in row["messages"] if m["role"] == "user"]})) for i, row in enumerate(map(json.loads,'
    " sys.stdin))]'"
)
_EVALUATED = (
    f"draftsmith evaluate --model {TARGET} --drafter {HEAD} --temperature 0 --repeats 5"
    f" --max-tokens 96 --out {RUNS}/engines"
)
FIGURES = {
    "quickstart": Figure(
        20,
        (
            "command -v chromium  # draws the report's picture",
            "make quickstart",
            (
                "chromium --headless --no-sandbox --hide-scrollbars --window-size=1200,2600"
                " --screenshot=$PWD/runs/quickstart/eagle3/report.png"
                " file://$PWD/runs/quickstart/eagle3/report.html"
            ),
        ),
        "runs/quickstart/eagle3",
        read_quickstart,
        pictures=(("report.png", "report.png"),),
    ),
    "compare": Figure(
        65,
        (
            (
                "OMP_NUM_THREADS=1 draftsmith compare recipes/quickstart/*.yaml --minutes 4 "
                "--set evaluation.baseline_transformers=false"
            ),
        ),
        "runs/compare",
        read_compare,
        pictures=(("comparison.png", "comparison.png"),),
    ),
    "runtime": Figure(
        12,
        (
            f"python scripts/bench_runtime.py --model {TARGET} --threads 1 --num-prompts 2"
            " --max-tokens 96 "
            + "--repeats 3 \\\n  "
            + " ".join(f"--prompts {name}" for name in WORKLOADS)
            + f" --json {RUNS}/runtime.json \\\n  "
            + " \\\n  ".join(f"--method '{method}'" for method in _METHODS),
        ),
        RUNS,
        read_runtime,
        needs=("quickstart", "compare"),
    ),
    "draft_length": Figure(
        8,
        (f"OMP_NUM_THREADS=1 {_LENGTHS} --out {RUNS}/draft_length.json",),
        RUNS,
        read_draft_length,
        needs=("quickstart",),
    ),
    "features": Figure(
        12,
        (
            (
                "python scripts/bench_feature_cache.py recipes/quickstart/eagle3.yaml"
                " target.dtype=float32 training.mixed_precision=no training.steps=100 \\\n  --rows"
                " 200 --held-out 24 --seeds 0,1,2 --trained rotated3+rotated6 --encodings"
                f" bf16,fp8,int4,rotated4,rotated3+rotated6 --out {RUNS}/features"
            ),
        ),
        f"{RUNS}/features",
        read_printed("table.md", "encodings"),
    ),
    "memory": Figure(
        4,
        (
            (
                "python scripts/bench_memory.py --hidden-size 128 --texts 1 --lengths"
                f" 2048,4096,8192 > {RUNS}/memory.md"
            ),
        ),
        RUNS,
        read_printed("memory.md", "rows"),
    ),
    "plan": Figure(6, (f"python scripts/bench_plan.py --json {RUNS}/plan.json",), RUNS, read_plan),
    "peers": Figure(
        15, (f"python scripts/bench_peers.py --json {RUNS}/peers.json",), RUNS, read_peers
    ),
    "load": Figure(
        10,
        (
            f"{_SERVED} --result-dir {RUNS}/load/draftsmith --serve-args '--max-num-seqs 32'",
            *_VLLM,
            (
                f"{_SERVED} --result-dir {RUNS}/load/vllm --serve-args '--engine vllm --dtype"
                " bfloat16 --max-model-len 2048 --max-num-seqs 32 --enforce-eager'"
            ),
        ),
        f"{RUNS}/load",
        read_load,
        pictures=(
            ("draftsmith/comparison.png", "load-draftsmith.png"),
            ("vllm/comparison.png", "load-vllm.png"),
        ),
        needs=("quickstart",),
    ),
    "engines": Figure(
        10,
        (
            *_VLLM,
            f"{_EVALUATED}/both --engine draftsmith --engine vllm",
            f"{_EVALUATED}/compiled --engine draftsmith --no-enforce-eager",
        ),
        f"{RUNS}/engines",
        read_engines,
        needs=("quickstart",),
    ),
    "advice": Figure(
        12,
        advice_commands("--max-num-seqs 16", "0,2,4,6", "advice"),
        f"{RUNS}/advice",
        read_advice,
        needs=("quickstart",),
    ),
    "advice_vllm": Figure(
        25,
        (
            *_VLLM,
            *advice_commands(
                "--engine vllm --dtype bfloat16 --max-model-len 2048 --max-num-seqs 16"
                " --enforce-eager",
                "2,4,6",
                "advice-vllm",
            ),
        ),
        f"{RUNS}/advice-vllm",
        read_advice,
        needs=("quickstart",),
    ),
    "clients": Figure(
        6,
        (
            f"{_TO_SUITE} > {RUNS}/clients/spec_bench.jsonl",
            (
                f"python scripts/bench_clients.py {TARGET} {HEAD} --suite-path"
                f" {RUNS}/clients/spec_bench.jsonl --num-prompts 12 --max-tokens 48 --dtype float32"
                f" --json {RUNS}/clients/clients.json"
            ),
        ),
        f"{RUNS}/clients",
        read_clients,
        needs=("quickstart",),
    ),
}


# ------------------------------------------------------------------ results, kept and shown


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def measure(name: str, given: Path | None = None) -> None:
    """Runs the commands of a figure, unless a folder of their results is `given`, and keeps the
    result."""
    figure, commit = FIGURES[name], _commit()
    folder, begun = given or ROOT / figure.folder, ROOT / RUNS / f"{name}.begun"
    if given is None:
        interrupted = begun.exists() and begun.read_text(encoding="utf-8") == commit
        if figure.folder != RUNS and not interrupted:
            shutil.rmtree(
                folder, ignore_errors=True
            )  # runs continue where they stopped, of another commit too
        for path in (folder, begun.parent):
            path.mkdir(parents=True, exist_ok=True)
        begun.write_text(commit, encoding="utf-8")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        script = "set -euo pipefail\n" + "\n".join(figure.commands)
        subprocess.run(
            ["bash", "-c", script], cwd=ROOT, env=os.environ | {"PATH": path}, check=True
        )
    tables = figure.read(folder)
    newest = max(
        path.stat().st_mtime for path in folder.rglob("*") if path.suffix in (".json", ".md")
    )
    save_json(
        RESULTS / f"{name}.json",
        {
            "commit": (_commits_in(folder) or commit) if given else commit,
            "date": datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d"),
            "machine": cpu_model(),
            "tables": {table: asdict(cells) for table, cells in tables.items()},
        },
    )
    for made, shown in figure.pictures:
        shutil.copyfile(folder / made, ROOT / "docs" / shown)
    begun.unlink(missing_ok=True)


def _commit() -> str:
    """The commit of the tree; `-dirty` if files other than the pages and results differ from it."""
    commit = (git_commit(ROOT) or "unknown").removesuffix("-dirty")
    changed = [
        "git",
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        ":!docs",
        ":!README.md",
    ]
    return commit + (
        "-dirty" if subprocess.run(changed, cwd=ROOT, capture_output=True, text=True).stdout else ""
    )


def _commits_in(folder: Path) -> str | None:
    """The commits that the reports of a folder name."""
    reports = [folder / "acceptance.json", *sorted(folder.glob("*/acceptance.json"))]
    found = {load_report(path).provenance.git_commit for path in reports if path.exists()}
    return ", ".join(sorted(commit for commit in found if commit)) or None


def changed(name: str) -> list[str]:
    """The files that a figure runs and that are others than at its commit, in git's order; a line
    that says why if that cannot be told. Empty: the figure is of the present code."""
    try:
        commits = result(name)["commit"].split(", ")
    except ValueError:
        return ["no result"]
    if any(commit.endswith("-dirty") for commit in commits):
        return ["measured with changes that were not committed"]
    commands = " ".join(FIGURES[name].commands)
    scripts = sorted(set(re.findall(r"scripts/\w+\.py", commands)))
    left_out = [path for shows, path in LEFT_OUT if not shows.search(commands)]
    found: dict[str, None] = {}
    for commit in commits:
        asked = ["git", "diff", "--name-only", commit, "--", *CODE, *scripts, *left_out]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            return [f"git does not know {commit[:7]}"]
        found |= dict.fromkeys(done.stdout.split())
    return list(found)


def due(names: Sequence[str]) -> list[str]:
    """Those that are of older code, each after the figures it needs whose drafters are not
    there."""
    wanted = {name for name in names if changed(name)}
    wanted |= {
        need
        for name in wanted
        for need in FIGURES[name].needs
        if not (ROOT / FIGURES[need].folder).exists()
    }
    return [name for name in FIGURES if name in wanted]


def result(name: str) -> dict[str, Any]:
    """The kept result of a figure; ValueError if the figure or its result does not exist."""
    if name not in FIGURES:
        raise ValueError(f"no command measures {name!r}: expected one of {', '.join(FIGURES)}")
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise ValueError(f'{name} has no result {path.name}: run make figures ARGS="--only {name}"')
    return json.loads(path.read_text(encoding="utf-8"))


def shown(name: str, table: str, kept: Mapping[str, Any], commands: bool) -> str:
    """The marked text of a table. `commands`: with the lines that measured it, at the figure's
    first table."""
    if table not in kept["tables"]:
        raise ValueError(
            f"{name} has no table {table!r}: expected one of {', '.join(kept['tables'])}"
        )
    cells, again = Table(**kept["tables"][table]), f'make figures ARGS="--only {name}"'
    told = f"Commit {kept['commit'][:7]}, {kept['date']}, {kept['machine']}; `{again}`"
    if commands and table == next(iter(kept["tables"])):
        told += " runs:\n\n```bash\n" + "\n".join(FIGURES[name].commands) + "\n```"
    begin = f"<!-- measured {name}.{table}: docs/figures/{name}.json, by {again} -->"
    return (
        f"{begin}\n\n{markdown(cells.headings, cells.rows, cells.left)}\n{told}\n\n<!--"
        " /measured -->"
    )


def filled(page: Path, text: str, names: Collection[str] | None = None) -> str:
    """A page with its tables as their results are, those of the figures `names` or all; ValueError
    names a table without a figure or a result."""
    in_docs = page.parent.name == "docs"
    wanted = lambda name: names is None or name in names
    return MARKED.sub(
        lambda m: shown(m[1], m[2], result(m[1]), in_docs) if wanted(m[1]) else m[0], text
    )


def strays(text: str) -> list[str]:
    """Rows of figures outside of marked tables, generated ones and examples of code."""
    rest = GENERATED.sub("", MARKED.sub("", text))
    rows = [line for line in rest.splitlines() if line.startswith("|")]
    return [
        row
        for row in rows
        if sum(bool(FIGURE.fullmatch(cell.strip())) for cell in row.split("|")) >= 2
    ]


def faults(page: Path, text: str) -> list[str]:
    """What `--check` refuses."""
    found = [f"{page.name}: no command measures the row {row}" for row in strays(text)]
    try:
        if filled(page, text) != text:
            found.append(
                f"{page.name}: a table is not that of its result: run python scripts/figures.py"
                " --render"
            )
    except ValueError as error:
        found.append(f"{page.name}: {error}")
    return found


def main(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Figure; several times. By default those of older code."),
    ] = None,
    given: Annotated[
        Path | None, typer.Option("--from", help="Folder of results, instead of measuring.")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Print names, minutes, commits, and what changed since.")
    ] = False,
    render: Annotated[
        bool, typer.Option("--render", help="Write the pages from the results; measure nothing.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 if a page and a result disagree.")
    ] = False,
) -> None:
    """Measure, keep the results, write the tables."""
    names = only or list(FIGURES)
    if unknown := [name for name in names if name not in FIGURES]:
        raise typer.BadParameter(
            f"{', '.join(unknown)}: expected {', '.join(FIGURES)}", param_hint="--only"
        )
    if given is not None and len(names) > 1:
        raise typer.BadParameter("needs one --only, whose results these are", param_hint="--from")
    if listed:
        for name in names:
            path, files = RESULTS / f"{name}.json", changed(name)
            commit = json.loads(path.read_text())["commit"][:7] if path.exists() else "-"
            told = (
                "present code"
                if not files
                else files[0]
                if len(files) == 1
                else f"{len(files)} files changed since"
            )
            needs = "".join(f", after {need}" for need in FIGURES[name].needs)
            typer.echo(f"{name:14}{FIGURES[name].minutes:4} min  {commit:9}{told}{needs}")
        return
    if check:
        found = [
            fault for page in pages() for fault in faults(page, page.read_text(encoding="utf-8"))
        ]
        typer.echo("\n".join(found) or "every table is that of its result")
        raise typer.Exit(1 if found else 0)
    if not render and only is None:
        names = due(names)
        told = (
            ", ".join(names)
            or "nothing: every figure is of the present code (--only NAME measures it again)"
        )
        typer.echo(
            f"to measure, about {sum(FIGURES[name].minutes for name in names)} minutes: {told}"
        )
    for name in () if render else names:
        typer.echo(
            f"{name}: about {FIGURES[name].minutes} minutes"
            if given is None
            else f"{name}: from {given}"
        )
        measure(name, given)
        _write([name])
    if render:
        _write()


def _write(names: Collection[str] | None = None) -> None:
    for page in pages():
        page.write_text(filled(page, page.read_text(encoding="utf-8"), names), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
