"""A real model from one command, on any machine with a GPU and without a network: responses, an
EAGLE-3 and a DSpark head for SmolLM2-135M-Instruct, 15 minutes each, exported, and measured here
and in vLLM on MT-Bench and HumanEval.

    python scripts/real_model.py --beside DIR
    python scripts/real_model.py --dry-run            # 20 prompts, a minute: also on a CPU

What may lie in DIR, each of which is otherwise taken from its usual place or left out with a word:

    model/            the target, a folder of transformers; else scripts/get_smollm2.py fetches it
    prompts.jsonl     conversations to train on (.gz or not); else those of the quickstart
    suites/           mt_bench.jsonl, humaneval.jsonl; else the folder `suites` here
    wheels/           for both environments: the project's, and vLLM's if one of them is its wheel

It needs nothing but Python 3.11: where this interpreter has not the project's packages, an
environment is made of the wheels. The table is written after every row, and a step that fails does
not keep the others from running: a suite is measured here first, then in vLLM. A second start goes
on where the first has ended."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "runs" / "real-model"
RECIPES = ROOT / "recipes" / "smollm2-135m-instruct"
MODEL = ROOT / "runs" / "smollm2-135m-instruct" / "model"
QUICKSTART = ROOT / "recipes" / "quickstart" / "data"
HEADS = ("eagle3", "dspark")
SUITES = ("mt_bench", "humaneval")
GPU = shutil.which("nvidia-smi") is not None
IN_VLLM = HEADS if GPU else ("eagle3",)  # its CPU runner has no DSpark
COLUMNS = ("head", "prompts", "τ", "expected", "in vLLM", "speedup", "in vLLM", "mismatches")
NONE = "–"
REPORT = "acceptance.json"


class StepFailed(Exception):
    """A command has failed; the text says which, and that its output is above."""


@dataclass(frozen=True)
class Job:
    """What lies beside, how much is trained and measured, and where the results go.

    limit      conversations that are trained on
    minutes    of each head's training
    measured   conversations of each suite; None: all
    tokens     of the longest response
    """

    beside: Path
    out: Path
    limit: int
    minutes: float
    measured: int | None
    tokens: int

    @property
    def model(self) -> Path:
        """The folder of the target."""
        folder = self.beside / "model"
        return folder if (folder / "config.json").exists() else MODEL

    @property
    def prompts(self) -> list[Path]:
        """Files of conversations."""
        beside = [self.beside / f"prompts.jsonl{end}" for end in ("", ".gz")]
        usual = [QUICKSTART / f"{name}train.jsonl.gz" for name in ("", "code-")]
        return [file for file in beside if file.exists()] or usual

    @property
    def suites(self) -> dict[str, Path]:
        """Files of the suites that are there."""
        folders = (self.beside / "suites", ROOT / "suites")
        files = {name: [folder / f"{name}.jsonl" for folder in folders] for name in SUITES}
        existing = {name: [f for f in places if f.exists()] for name, places in files.items()}
        return {name: places[0] for name, places in existing.items() if places}

    @property
    def wheels(self) -> Path | None:
        """The folder of wheels, if there is one."""
        folder = self.beside / "wheels"
        return folder if folder.is_dir() else None


def train_words(job: Job, head: str) -> list[str]:
    """The arguments of `draftsmith` that train, export and measure a head on held-out prompts."""
    share = max(1, job.limit // len(job.prompts))
    sources = ", ".join(f"{{path: {file}, limit: {share}}}" for file in job.prompts)
    held_out = max(4, min(60, job.limit // 10))
    return [
        "train",
        str(RECIPES / f"{head}.yaml"),
        f"target.model={job.model}",
        f"data.train=[{sources}]",
        f"data.validation=[{{path: {QUICKSTART / 'validation.jsonl.gz'}, limit: {held_out}}}]",
        f"regenerate.cache_dir={job.out / 'responses'}",
        f"regenerate.max_new_tokens={job.tokens}",
        f"regenerate.batch_size={256 if GPU else 32}",
        f"training.max_minutes={job.minutes:g}",
        f"evaluation.prompts=[{{path: {QUICKSTART / 'test.jsonl.gz'}, limit: {held_out}}}]",
        f"evaluation.prompts_per_workload={max(1, held_out // 6)}",
        f"evaluation.max_tokens={job.tokens}",
        "evaluation.repeats=1",
        "gates={}",
        f"output_dir={job.out / head}",
    ]


def evaluate_words(job: Job, head: str, suite: str, file: Path, engine: str) -> list[str]:
    """The arguments of `draftsmith` that measure an export on a suite, in one engine."""
    words = ["evaluate", "--model", str(job.model), "--drafter", str(job.out / head / "export")]
    words += ["--suite", suite, "--suite-path", str(file), "--temperature", "0"]
    words += ["--max-tokens", str(job.tokens), "--repeats", "3"]
    if job.measured is not None:
        words += ["--prompts-per-workload", str(job.measured)]
    name = f"{head}-{suite}" + ("-vllm" if engine == "vllm" else "")
    return [*words, "--engine", engine, "--out", str(job.out / name)]


def cells(head: str, suite: str, *reports: dict[str, Any]) -> list[str]:
    """A row of the table, of the reports of a head on a suite, here and perhaps in vLLM."""
    results = [cell for report in reports for cell in report["results"]]
    pooled = {cell["engine"]: cell for cell in results if cell["workload"] == "all"}
    ours = pooled["draftsmith"]
    vllm = pooled.get("vllm", {})
    expected = (ours.get("expected") or {}).get("acceptance_length")
    speedups = [(cell.get("speedup_vs_autoregressive") or {}).get("value") for cell in (ours, vllm)]
    taus = [ours["acceptance_length"], expected, vllm.get("acceptance_length")]
    mismatches = sum(check["mismatches"] for check in ours["lossless"])
    shown = [NONE if value is None else f"{value:.2f}" for value in (*taus, *speedups)]
    return [head, suite, *shown, str(mismatches)]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The rows as a table of Markdown."""
    rule = ["---", "---", *["---:"] * (len(COLUMNS) - 2)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (COLUMNS, rule, *rows))


def run(words: Sequence[str | Path], environment: dict[str, str] | None = None) -> None:
    """Runs a command in the folder of the project. StepFailed if it fails."""
    print(f"\n$ {shlex.join(map(str, words))}", flush=True)
    done = subprocess.run(
        [str(word) for word in words], cwd=ROOT, env=os.environ | (environment or {}), check=False
    )
    if done.returncode:
        raise StepFailed(f"{words[1]} ended with status {done.returncode}; its output is above")


def environment_of(folder: Path, wheels: Path, *packages: str) -> Path:
    """The interpreter of an environment with these packages, made of wheels alone."""
    python = folder / "bin" / "python"
    if not (folder / "filled").exists():
        run([sys.executable, "-m", "venv", folder])
        install = ["-m", "pip", "install", "--no-index", "--find-links", wheels]
        run([python, *install, *packages])
        (folder / "filled").touch()
    return python


def project_environment() -> dict[str, str]:
    """In which this project is imported, before what the caller's own search path has."""
    before = os.environ.get("PYTHONPATH")
    path = [str(ROOT / "src"), *([before] if before else [])]
    return {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}


def project_python(job: Job) -> Path:
    """An interpreter that has what the project needs."""
    words = [sys.executable, "-c", "import draftsmith.train.pipeline.run"]
    tried = subprocess.run(
        words, env=os.environ | project_environment(), capture_output=True, text=True, check=False
    )
    if tried.returncode == 0:
        return Path(sys.executable)
    if job.wheels is None:
        fault = tried.stderr.strip().splitlines()[-1:]
        raise StepFailed(
            "this Python has not the project's packages: `make venv`, or --beside a folder with"
            f" wheels ({''.join(fault)})"
        )
    return environment_of(job.out / "venv", job.wheels, f"{ROOT}[train,serve,report]")


def vllm_python(job: Job) -> Path | None:
    """An interpreter with vLLM: the one that is named, or one made of wheels; None: neither."""
    named = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
    if named:
        return Path(named)
    if job.wheels is None or not any(job.wheels.glob("vllm-*.whl")):
        return None
    return environment_of(job.out / "venv-vllm", job.wheels, "vllm")


class Table:
    """The rows so far, in a file that is renewed with every row, and what has failed."""

    def __init__(
        self, file: Path, draftsmith: Sequence[str | Path], environment: dict[str, str]
    ) -> None:
        self.file = file
        self._draftsmith = draftsmith
        self._environment = environment
        self.rows: dict[tuple[str, str], list[str]] = {}
        self.faults: list[str] = []

    def add(self, head: str, prompts: str, *reports: Path) -> None:
        """The row of the reports of a head, in the place of an earlier one."""
        trees = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
        self.rows[head, prompts] = cells(head, prompts, *trees)
        self.file.write_text(markdown(list(self.rows.values())), encoding="utf-8")

    def measured(self, report: Path, words: Sequence[str]) -> bool:
        """True if an earlier start has written this report by these arguments of `draftsmith`, or
        they do so now; a fault is noted."""
        said = report.parent.with_name(f"{report.parent.name}.command")
        command = shlex.join(words)
        if report.exists() and said.exists() and said.read_text(encoding="utf-8") == command:
            return True
        try:
            run([*self._draftsmith, *words], self._environment)
        except StepFailed as error:
            print(f"real_model: {error}", flush=True)
            self.faults.append(str(error))
            return False
        said.write_text(command, encoding="utf-8")
        return True


def do(job: Job) -> Table:
    """Trains and measures all heads."""
    job.out.mkdir(parents=True, exist_ok=True)
    python = project_python(job)
    if not (job.model / "config.json").exists():
        run([python, ROOT / "scripts" / "get_smollm2.py", job.model])
    vllm = vllm_python(job)
    for wanted, place in (("vLLM", vllm), *((name, job.suites.get(name)) for name in SUITES)):
        if place is None:
            print(f"{wanted} is not there, and left out")
    environment = project_environment()
    if vllm is not None:
        environment["DRAFTSMITH_VLLM_PYTHON"] = str(vllm)
    draftsmith = (python, "-m", "draftsmith.train.cli")
    table = Table(job.out / "table.md", draftsmith, environment)
    for head in HEADS:
        do_head(job, head, table, vllm is not None and head in IN_VLLM)
    return table


def do_head(job: Job, head: str, table: Table, in_vllm: bool) -> None:
    """Trains a head, and measures it on every suite, here before in vLLM."""
    report = job.out / head / REPORT
    if not table.measured(report, train_words(job, head)):
        return
    table.add(head, "held out", report)
    ours: dict[str, Path] = {}
    for suite, file in job.suites.items():
        words = evaluate_words(job, head, suite, file, "draftsmith")
        report = Path(words[-1]) / REPORT
        if table.measured(report, words):
            ours[suite] = report
            table.add(head, suite, report)
    for suite in ours if in_vllm else ():
        words = evaluate_words(job, head, suite, job.suites[suite], "vllm")
        report = Path(words[-1]) / REPORT
        if table.measured(report, words):
            table.add(head, suite, ours[suite], report)


def job_of(arguments: Sequence[str] | None = None) -> Job:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, default=ROOT, help="folder with model, prompts, …")
    parser.add_argument("--out", type=Path, help="where everything is written")
    parser.add_argument(
        "--limit", type=int, default=10_000, help="conversations that are trained on"
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="of each head's training")
    parser.add_argument(
        "--dry-run", action="store_true", help="20 conversations, half a minute each"
    )
    chosen = parser.parse_args(arguments)
    beside = chosen.beside.resolve()
    out = (chosen.out or (OUT / "dry-run" if chosen.dry_run else OUT)).resolve()
    if chosen.dry_run:
        return Job(beside, out, limit=20, minutes=0.5, measured=1, tokens=16)
    return Job(beside, out, chosen.limit, chosen.minutes, measured=None, tokens=256)


def main(arguments: Sequence[str] | None = None) -> None:
    """Does the job, and prints its table."""
    job = job_of(arguments)
    try:
        table = do(job)
    except StepFailed as error:
        sys.exit(f"real_model: {error}")
    print(f"\n{markdown(list(table.rows.values()))}\nwritten to {table.file}")
    if table.faults:
        sys.exit("\n".join(f"real_model: {fault}" for fault in table.faults))


if __name__ == "__main__":
    main()
