"""Measures what the documentation publishes, and writes `docs/results/NAME.json`, which
docs/results.md shows.

    python scripts/bench.py quickstart methods        # these; without names: all but gpu…, hours
    python scripts/bench.py gpu --device cpu          # tries it at tiny shapes, and writes nothing
    python scripts/bench.py --list                    # the commands
    python scripts/bench.py methods --record          # the command has run: only write the result

Every file holds its table with the date, the commit, the machine and the command. Measure on a
quiet machine, from a clean clone. Results are renewed for a release, not for a commit."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.inference.provenance import cpu_model, git_commit
from draftsmith.inference.whole_file import write_whole

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
TARGET = "recipes/quickstart/target"
PROMPTS = "recipes/quickstart/data/test.jsonl.gz"
HEAD = "runs/quickstart/eagle3/export"  # the quickstart writes it
FAMILIES = "recipes/quickstart/*.yaml"
OUT = "runs/bench"  # what the other commands write
BROAD = "suites/sharegpt.jsonl"  # conversations of any kind
Rows = list[list[str]]
QUICKSTART = {
    "acceptance_length": "acceptance length τ, measured",
    "expected_acceptance_length": "acceptance length τ, expected",
    "tokens_per_second": "tokens/s with drafting",
    "speedup_vs_autoregressive": "speedup over the same engine, drafting off",
}


def number(value: float | None, digits: int = 2) -> str:
    """A figure with `digits` decimals; a dash for one that was not measured."""
    return "–" if value is None else f"{value:,.{digits}f}"


def estimate(value: dict[str, float] | None) -> str:
    """An estimate with the interval of its repeats."""
    return "–" if value is None else number(value["value"])


def quickstart(report: dict[str, Any]) -> Rows:
    """acceptance.json -> its summary at both temperatures."""
    rows = [["", "T = 0", "T = 1"]]
    for key, name in QUICKSTART.items():
        values = [report["summary"].get(f"t{temperature}.{key}") for temperature in (0, 1)]
        rows.append([name, *(number(x, 0 if key == "tokens_per_second" else 2) for x in values)])
    return [*rows, ["mismatches", str(int(report["summary"]["lossless_mismatches"])), ""]]


def suites(_: dict[str, Any]) -> Rows:
    """The reports of every method on every set of prompts -> a row per method, with two cells per
    set: tokens per forward (expected, here, in vLLM), and the speedup over the same engine without
    drafting (here, in vLLM); at last the mismatches on all of them."""
    head = ["drafter"]
    for prompts in TABLE_PROMPTS.values():
        head += [prompts, f"{prompts}, speedup"]
    rows = [[*head, "mismatches"]]
    for method in (*TABLE_HEADS, *TABLE_METHODS):
        row = [f"`{method}`"]
        mismatches = 0
        for prompts in TABLE_PROMPTS:
            folder = ROOT / OUT / "suites" / prompts
            engines = pooled(folder / method / "acceptance.json")
            row += [forwards(engines), speedups(folder, method)]
            checks = engines["draftsmith"]["lossless"]
            mismatches += sum(check["mismatches"] for check in checks)
        rows.append([*row, str(mismatches)])
    return rows


def forwards(engines: dict[str, dict[str, Any]]) -> str:
    """Tokens per forward: expected, here, in vLLM."""
    ours = engines["draftsmith"]
    expected = (ours.get("expected") or {}).get("acceptance_length")
    in_vllm = engines.get("vllm", {}).get("tokens_per_forward")
    return " / ".join(map(number, (expected, ours["tokens_per_forward"], in_vllm)))


def speedups(folder: Path, method: str) -> str:
    """The speedups of a method on the prompts of a folder: here, in vLLM if it was timed there."""
    times = json.loads((folder / "speed.json").read_text(encoding="utf-8"))
    names = [name for name in times if method in Path(name).parts]  # of an export, or the method
    cells = [times[names[0]]["metrics"]]
    timed = folder / method / "vllm" / "acceptance.json"
    cells.append(pooled(timed)["vllm"] if timed.exists() else {})
    return " / ".join(estimate(cell.get("speedup_vs_autoregressive")) for cell in cells)


def pooled(file: Path) -> dict[str, dict[str, Any]]:
    """The figures of an acceptance.json over all prompts at T = 0, by engine."""
    report = json.loads(file.read_text(encoding="utf-8"))
    cells = [cell for cell in report["results"] if cell["workload"] == "all"]
    return {cell["engine"]: cell for cell in cells if cell["temperature"] == 0}


def methods(results: dict[str, Any]) -> Rows:
    """The JSON of `draftsmith try` -> a row per method or drafter."""
    rows = [["method", "τ", "tokens per forward", "tokens/s", "speedup", "same text"]]
    for name, result in results.items():
        if name in ("versions", "arguments"):
            continue
        cell = result["metrics"]
        checks = cell["lossless"]
        prompts = sum(check["checked_prompts"] for check in checks)
        differing = sum(check["mismatches"] + check["ties"] for check in checks)
        off = name == "default"
        rows.append(
            [
                "drafting off" if off else f"`{drafter_name(name)}`",
                "–" if off else number(cell["acceptance_length"]),
                "–" if off else number(cell["tokens_per_forward"]),
                number(result["timings"]["tokens_per_second"], 0),
                estimate(cell.get("speedup_vs_autoregressive")),
                f"{prompts - differing} of {prompts}" if prompts else "–",
            ]
        )
    return rows


def drafter_name(name: str) -> str:
    """Of a run's export, its run; else as it is."""
    path = Path(name)
    return path.parent.name if path.name == "export" else name


def engines(report: dict[str, Any]) -> Rows:
    """acceptance.json of several engines -> a row per engine, greedy, all workloads pooled."""
    rows = [["engine", "τ", "tokens/s", "drafting off", "speedup"]]
    for cell in report["results"]:
        if (cell["workload"], cell["temperature"], cell["suite"]) != ("all", 0, None):
            continue
        rates = {kind: rate["value"] for kind, rate in cell["tokens_per_second"].items()}
        rows.append(
            [
                cell["engine"],
                number(cell["acceptance_length"]),
                number(rates.get("speculative"), 0),
                number(rates.get("autoregressive"), 0),
                estimate(cell["speedup_vs_autoregressive"]),
            ]
        )
    return rows


def load(comparison: dict[str, Any]) -> Rows:
    """comparison.json of `draftsmith bench` -> a row per concurrency and way of serving."""
    rows = [["users", "drafts per round", "tokens/s", "gain", "TTFT, ms", "TPOT, ms", "τ"]]
    for level in comparison["levels"]:
        for mode, result in level["modes"].items():
            rows.append(
                [
                    str(level["max_concurrency"]),
                    mode,
                    number(result["output_throughput"], 0),
                    number(result.get("gain")),
                    number(result["median_ttft_ms"], 0),
                    number(result["median_tpot_ms"], 1),
                    number(result.get("spec_decode_acceptance_length")),
                ]
            )
    return rows


def families(comparison: dict[str, Any]) -> Rows:
    """comparison.json of `draftsmith compare` -> a row per recipe."""
    from draftsmith.train.pipeline.compare import rows

    return rows(comparison["entries"])


def minutes(results: dict[str, Any]) -> Rows:
    """The JSON of minutes.py -> a row per family, budget and variant."""
    from scripts.minutes import rows

    return rows(results)


def peers_minutes(results: dict[str, Any]) -> Rows:
    """The JSON of bench_peers.py --minutes -> a row per budget and training."""
    from scripts.peer_minutes import rows

    return rows(results)


def gpu(results: dict[str, Any]) -> Rows:
    """The JSON of bench_gpu.py -> a row per step and way of decoding, of those that are there."""
    from scripts import bench_gpu, roofline

    rates = roofline.Rates(**results["rates"])
    steps = [bench_gpu.training_cells(result) for result in results["training"]]
    decoded = [bench_gpu.decoding_cells(x, rates) for x in results.get("decoding", [])]
    empty = [""] * (len(bench_gpu.COLUMNS) - len(bench_gpu.DECODING))
    heads = [[f"*{name}*" for name in bench_gpu.DECODING]] if decoded else []
    return [list(bench_gpu.COLUMNS), *steps, *(row + empty for row in heads + decoded)]


def gpu_tests(results: dict[str, Any]) -> Rows:
    """The JSON of `make check-gpu` -> a row per measurement."""
    rows = [["test", "measured"]]
    for result in results["results"]:
        measured = [f"{name} {value:.4g}" for name, value in result.items() if name != "test"]
        rows.append([f"`{result['test']}`", ", ".join(measured)])
    return rows


def training(results: dict[str, Any]) -> Rows:
    """The JSON of bench_peers.py -> a row per setting."""
    from scripts.bench_peers import COLUMNS, cells

    rows = [cells(name, result)[: len(COLUMNS)] for name, result in results["results"].items()]
    return [list(COLUMNS), *rows]


def sources(_: dict[str, Any]) -> Rows:
    """The logs of trainings of every target with features from every source -> a row per pair:
    medians over repeats of tokens per second and of the share of the time waited, after the first
    steps."""
    rows = [["target", "features", "tokens/s", "of in process", "waits"]]
    for target in SOURCES_TARGETS:
        rates = {name: median(figures_of(target, name, "tokens_per_second")) for name in SOURCES}
        for name, title in SOURCES.items():
            waits = median(figures_of(target, name, "waits"))
            share = number(rates[name] / rates["process"])
            rows.append([target.title, title, number(rates[name], 0), share, f"{waits:.1%}"])
    return rows


def figures_of(target: SourcesTarget, source: str, name: str) -> list[float]:
    """A figure of the trainings of a target with features from a source, one a repeat: its mean
    behind the first steps."""
    means = []
    folder = ROOT / OUT / "sources"
    for path in sorted(folder.glob(f"{target.name}-{source}-*/**/events.out.tfevents.*")):
        costs = costs_of(path, target.warm)
        if name in costs:  # it is not the file of the recipe
            means.append(mean_over_time(costs, name))
    return means


def costs_of(path: Path, warm: int) -> dict[str, list[float]]:
    """What the trainer has logged to a file of TensorBoard, by name, behind `warm` steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    names = events.Tags()["scalars"]
    return {name: [event.value for event in events.Scalars(name)][warm:] for name in names}


def mean_over_time(costs: dict[str, list[float]], name: str) -> float:
    """The mean of a figure of steps, each of which counts by its seconds."""
    seconds = costs["step_seconds"]
    return sum(map(mul, costs[name], seconds)) / sum(seconds)


@dataclass(frozen=True)
class Bench:
    """A table: what it shows, the shell command that measures it, the JSON file that the command
    writes, and how its rows come from that; the first row is the head."""

    title: str
    command: str
    file: str
    rows: Callable[[dict[str, Any]], Rows]


SERVE = f"draftsmith serve --model {TARGET} --max-num-seqs 8 --port"
LOAD = f"""{SERVE} 8001 &
{SERVE} 8002 --speculative-config '{{"model": "{HEAD}"}}' &
trap 'kill $(jobs -p)' EXIT
until curl -sf localhost:8001/health && curl -sf localhost:8002/health; do sleep 1; done
draftsmith bench --base-url http://localhost:8002 --baseline-url http://localhost:8001 \\
  --dataset-name custom --dataset-path {PROMPTS} --num-prompts 64 --output-len 128 \\
  --temperature 0 --concurrencies 1,4,8 --draft-lengths 2,4 --repeats 3 --result-dir {OUT}"""
TABLE_HEADS = ("eagle3", "peagle", "dspark", "mlp", "medusa", "draft_model")
TABLE_HEADS_OF_VLLM = ("eagle3", "peagle", "draft_model")  # that its build for CPUs serves
TABLE_METHODS = ("ngram", "suffix")
TABLE_PROMPTS = {"quickstart": "own kind", "mt_bench": "MT-Bench", "humaneval": "HumanEval"}
TABLE_MINUTES = 20  # of one core's time, for every head
# Acceptance first, in float32, in which both engines write the same text. Then the speeds, in the
# target's own precision where the machine has it: ours side by side, in CPU time; vLLM's by the
# wall's clock, for which the machine has to be its own.
SUITES = f"""for head in {" ".join(TABLE_HEADS)}; do
  OMP_NUM_THREADS=1 python scripts/minutes.py train \\
    recipes/smollm2-135m-instruct/$head.yaml training.max_minutes={TABLE_MINUTES} \\
    data.validation=[] evaluation.prompts=[] gates={{}}
  drafters="${{drafters-}} --drafter runs/smollm2-135m-instruct/$head/export"
done
on() {{  # on FOLDER OPTIONS...
  OMP_NUM_THREADS=1 draftsmith evaluate --model runs/smollm2-135m-instruct/model \\
    --temperature 0 --max-tokens 64 --out {OUT}/suites/$1 "${{@:2}}"
}}
side_by_side() {{  # side_by_side NAME FILE COUNT
  python scripts/cpu_speed.py --model runs/smollm2-135m-instruct/model $drafters \\
    {" ".join(f"--method {name}" for name in TABLE_METHODS)} \\
    --prompts $2 --num-prompts $3 -k 4 --max-tokens 64 \\
    --json {OUT}/suites/$1/speed.json
}}
quickstart="--prompts {PROMPTS} --prompts-per-workload 2"
mt_bench="--suite mt_bench --prompts-per-workload 1"
humaneval="--suite humaneval --prompts-per-workload 12"
for name in {" ".join(TABLE_PROMPTS)}; do
  for head in {" ".join(TABLE_HEADS)}; do
    head_of="--drafter runs/smollm2-135m-instruct/$head/export"
    case $head in {"|".join(TABLE_HEADS_OF_VLLM)}) vllm="--engine vllm" ;; *) vllm="" ;; esac
    on $name/$head ${{!name}} $head_of --repeats 0 --dtype float32 --engine draftsmith $vllm
    test -z "$vllm" || on $name/$head/vllm ${{!name}} $head_of --repeats 1 $vllm
  done
  for method in {" ".join(TABLE_METHODS)}; do
    on $name/$method ${{!name}} --method $method --repeats 0 --dtype float32
  done
done
for suite in mt_bench humaneval; do
  python scripts/suite_prompts.py $suite 10 > {OUT}/suites/$suite.jsonl
  side_by_side $suite {OUT}/suites/$suite.jsonl 10
done
side_by_side quickstart {PROMPTS} 2"""
CACHE_FEATURES = f"""draftsmith cache-features recipes/smollm2-135m-instruct/eagle3.yaml \\
  features.mode=cache features.dir={OUT}/minutes/features \\
  data.validation=[] evaluation.prompts=[] gates={{}}"""

# Its features are written once; the library's head runs in vLLM as well.
PEERS_MINUTES = f"""{CACHE_FEATURES}
python scripts/bench_peers.py --minutes 10 --minutes 20
draftsmith evaluate --model runs/smollm2-135m-instruct/model \\
  --drafter {OUT}/minutes/peers/speculators-10-*/export --suite humaneval \\
  --prompts-per-workload 12 --temperature 0 --max-tokens 96 --repeats 0 \\
  --engine draftsmith --engine vllm --out {OUT}/peers_minutes"""


@dataclass(frozen=True)
class SourcesTarget:
    """A target whose trainer is timed by the source of its features.

    warm   steps of a training that are not counted: an epoch of the rows that are kept
    many   keys of the data, with more rows than steps
    few    keys of the rows that are kept, `warm` at most"""

    name: str
    title: str
    recipe: str
    repeats: int
    steps: int
    warm: int
    many: str
    few: str


SOURCES_TARGETS = [
    SourcesTarget(
        "quickstart",
        "the quickstart's",
        "recipes/quickstart/eagle3.yaml",
        repeats=3,
        steps=30,
        warm=12,
        many="data.train.0.limit=120 data.train.1.limit=20",
        few="data.train.0.limit=16 data.train.1.limit=3",
    ),
    SourcesTarget(
        "smollm2",
        "SmolLM2-135M",
        "recipes/smollm2-135m-instruct/eagle3.yaml",
        repeats=2,
        steps=14,
        warm=4,
        many="data.train.0.limit=50 data.train.1.limit=10",
        few="data.train.0.limit=4 data.train.1.limit=1",
    ),
]
SOURCES = {
    "process": "computed in process",
    "kept": "computed in process once, then kept in memory",
    "disk": "on disk, `bf16`",
    "server": "at a vLLM server",
    "servers": "at two vLLM servers",
}
SOURCES_FUNCTIONS = f"""train="target.dtype=float32 data.max_length=256 data.validation=[]
  drafter.init=taps gates={{}} regenerate.enabled=false evaluation.prompts=[] training.batch_size=1
  trackers=[tensorboard]"
one=http://127.0.0.1:8001
two=http://127.0.0.1:8002
served="features.engine=vllm features.states_dir=$PWD/{OUT}/sources/states"
servers() {{  # servers RECIPE: two, of its target's states
  for url in $one $two; do
    command=$(draftsmith serving-args $1 $train $served features.endpoints=[$url] --cpu)
    VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind bash -c \\
      "exec env ${{command/ python / .venv-vllm/bin/python }} --port ${{url##*:}}" &
  done
  until curl -sf $one/health && curl -sf $two/health; do sleep 1; done
}}
on() {{  # on FOLDER RECIPE KEYS...: a training
  rm -rf {OUT}/sources/$1
  draftsmith train $2 $train training.keep_features_gb=0 output_dir={OUT}/sources/$1 "${{@:3}}"
}}
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT"""


def trainings_of(target: SourcesTarget) -> str:
    """The shell lines that train for a target with features from each source, repeatedly."""
    folder = f"{target.name}-"
    keys = f"{target.recipe} training.steps={target.steps} {target.many}"
    return f"""servers {target.recipe}
for i in $(seq {target.repeats}); do
  on {folder}process-$i {keys}
  on {folder}disk-$i {keys} features.mode=cache features.dir={OUT}/sources/features
  on {folder}server-$i {keys} $served features.endpoints=[$one]
  on {folder}servers-$i {keys} $served features.endpoints=[$one,$two]
  on {folder}kept-$i {keys} training.keep_features_gb=2 {target.few}
done
kill $(jobs -p)
wait"""


SOURCES_COMMAND = "\n".join([SOURCES_FUNCTIONS, *map(trainings_of, SOURCES_TARGETS)])
MINUTES = f"""python scripts/get_sharegpt.py {BROAD}
{CACHE_FEATURES}
for family in eagle3 dspark peagle mlp draft_model; do
  python scripts/minutes.py --family $family --minutes 10 --broad {BROAD} \\
    --always features.mode=cache --always features.dir={OUT}/minutes/features
done"""
BENCHES = {
    "quickstart": Bench(
        "The quickstart's head, all workloads pooled, one request at a time",
        "make quickstart",
        "runs/quickstart/eagle3/acceptance.json",
        quickstart,
    ),
    "suites": Bench(
        f"SmolLM2-135M-Instruct, heads after {TABLE_MINUTES} minutes of one core, K = 4, greedy,"
        " one request at a time. Tokens per forward: expected / here / in vLLM; speedup over the"
        " same engine without drafting: here / in vLLM",
        SUITES,
        f"{OUT}/suites/quickstart/eagle3/acceptance.json",
        suites,
    ),
    "methods": Bench(
        "Methods side by side, greedy, one request at a time",
        f"draftsmith try --model {TARGET} --drafter {HEAD} --prompts {PROMPTS}"
        f" --json {OUT}/methods.json",
        f"{OUT}/methods.json",
        methods,
    ),
    "engines": Bench(
        "This runtime and vLLM's CPU build, greedy, one request at a time",
        f"draftsmith evaluate --model {TARGET} --drafter {HEAD} --temperature 0"
        f" --engine draftsmith --engine vllm --out {OUT}/engines",
        f"{OUT}/engines/acceptance.json",
        engines,
    ),
    "families": Bench(
        "Every family on the quickstart's target, K = 4, four minutes of training each",
        f"draftsmith compare {FAMILIES} --minutes 4 --out {OUT}/families"
        " --set evaluation.temperatures=[0.0] --set evaluation.prompts_per_workload=8"
        " --set evaluation.repeats=2",
        f"{OUT}/families/comparison.json",
        families,
    ),
    "minutes": Bench(
        "Variants of a training for SmolLM2-135M-Instruct at equal minutes of one core, K = 4,"
        " τ expected, the mean of T = 0 and 1",
        MINUTES,
        f"{OUT}/minutes/results.json",
        minutes,
    ),
    "peers_minutes": Bench(
        "EAGLE-3 for SmolLM2-135M-Instruct trained by vLLM's `speculators` and here: τ expected,"
        " K = 4, the mean of T = 0 and 1; in brackets (τ − 1) ÷ the library's",
        PEERS_MINUTES,
        f"{OUT}/minutes/peers.json",
        peers_minutes,
    ),
    "tokens": Bench(
        "Every family on the quickstart's target, K = 4, 300 steps of the same tokens each",
        f"draftsmith compare {FAMILIES} --steps 300 --out {OUT}/tokens",
        f"{OUT}/tokens/comparison.json",
        families,
    ),
    "gpu": Bench(
        "A training step by phase, in ms and as a share of the device's bound, and decoding, random"
        " weights in the shapes of Qwen3-8B",
        f"python scripts/bench_gpu.py --json {OUT}/gpu.json",
        f"{OUT}/gpu.json",
        gpu,
    ),
    "gpu_tests": Bench(
        "One GPU, random weights in the shapes of Qwen3-8B",
        f'make check-gpu ARGS="--measured {OUT}/gpu_tests.json"',
        f"{OUT}/gpu_tests.json",
        gpu_tests,
    ),
    "gpu_training": Bench(
        "A training step beside vLLM's `speculators` on a GPU",
        f"python scripts/bench_peers.py --device cuda --json {OUT}/gpu_peers.json",
        f"{OUT}/gpu_peers.json",
        training,
    ),
    "sources": Bench(
        "The trainer by where its features come from, EAGLE-3, float32",
        SOURCES_COMMAND,
        f"{OUT}/sources/smollm2-kept-2/export/config.json",
        sources,
    ),
    "load": Bench("Load: drafting off and on", LOAD, f"{OUT}/comparison.json", load),
    "training": Bench(
        "A training step beside vLLM's `speculators`",
        f"python scripts/bench_peers.py --json {OUT}/peers.json",
        f"{OUT}/peers.json",
        training,
    ),
}


def record(name: str) -> Path:
    """Writes the result of a bench whose command has run; returns the file."""
    bench = BENCHES[name]
    written = ROOT / bench.file
    tree = json.loads(written.read_text(encoding="utf-8"))
    head, *rows = bench.rows(tree)
    result = {
        "title": bench.title,
        "date": datetime.date.fromtimestamp(written.stat().st_mtime).isoformat(),
        "commit": git_commit(ROOT),
        "machine": tree.get("machine") or f"{cpu_model()}, {os.cpu_count()} cores",
        "command": bench.command,
        "columns": head,
        "rows": rows,
    }
    if "runs" in tree:  # all of which the rows are of
        result["runs"] = tree["runs"]
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benches that are named, and writes their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--record", action="store_true", help="the commands have run")
    parser.add_argument("--list", action="store_true", help="print the commands")
    device = {"choices": ("cuda", "cpu"), "default": "cuda"}
    parser.add_argument("--device", **device, help="of gpu; cpu: tiny shapes, no result")
    chosen = parser.parse_args(arguments)
    for name in chosen.names or [name for name in BENCHES if not name.startswith("gpu")]:
        if name not in BENCHES:
            parser.error(f"{name}: expected {', '.join(BENCHES)}")
        print(f"{name}: {BENCHES[name].command}", flush=True)
        if chosen.list:
            continue
        if not chosen.record:
            (ROOT / OUT).mkdir(parents=True, exist_ok=True)
            path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
            tiny = " --device cpu" if name == "gpu" and chosen.device == "cpu" else ""
            command = ["bash", "-euo", "pipefail", "-c", BENCHES[name].command + tiny]
            subprocess.run(command, cwd=ROOT, env=os.environ | path, check=True)
            if tiny:
                continue
        print(f"  {record(name).relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    main()
