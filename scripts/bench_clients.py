"""Other people's load generators against `draftsmith serve`, unchanged: aiperf and guidellm, beside
`draftsmith bench`.

    python scripts/bench_clients.py TARGET DRAFTER --suite spec_bench --suite-path FILE
    --num-prompts 12

One server is measured by each in turn, with the same conversations of a suite, greedily, one at a
time; then `draftsmith evaluate --suite` measures the same without a server. guidellm sends first
turns alone. Each client's own figure must be that of the server's /metrics around its run, and
those of all that send every turn agree within 1 %.

aiperf and guidellm have environments of their own (.venv-clients), which this script makes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inference.bench.options import BenchOptions
from inference.bench.run import measure, prepare
from inference.bench.servers import started
from inference.evaluation.suites import Conversation, load_suite
from inference.http_client import ServerClient, drafting_counters
from inference.metrics import SpecDecodeCounters, acceptance_length
from scripts import setup_vllm
from scripts.measuring import save_json, table

CLIENTS = {"aiperf": "aiperf==0.13.0", "guidellm": "guidellm==0.8.1"}
WITHIN = 0.01  # of the pooled acceptance length, relative
SERVE = (
    "--per-request-spec-decode-metrics",
    "summary",
)  # acceptance in each answer, which both clients read


class ClientFailed(Exception):
    """A client or the evaluation ended with an error; the text has the end of its output."""


class ClientEnvironment(setup_vllm.Environment):
    """One client and what it requires, from the package index."""

    inputs = (Path(setup_vllm.__file__),)
    size = "some minutes and 1 GB"

    def fill(self, *options: object) -> str:
        (package,) = map(str, options)
        name = package.partition("==")[0]
        if name == "guidellm":  # requires torch, of which the CPU build is enough
            self._install_torch()
        self._install(package, step=f"install {package}")
        return self._run("ask its version", [self.folder / "bin" / name, "--version"])


@dataclass(frozen=True)
class Run:
    """What every client is told: the server, the conversations, and the longest answer."""

    url: str
    target: Path
    rows: list[Conversation]
    max_tokens: int
    venv: Path
    out: Path

    def aiperf(self) -> SpecDecodeCounters:
        """Its pooled histogram of accepted drafts; with its own reading of /metrics it must be the
        same."""
        sessions = [
            {"session_id": str(i), "turns": [{"text": t} for t in row.turns]}
            for i, row in enumerate(self.rows)
        ]
        folder = self.out / "aiperf"
        self._call(
            "aiperf",
            "profile",
            "--model",
            str(self.target),
            "--tokenizer",
            str(self.target.absolute()),
            "--url",
            self.url,
            "--endpoint-type",
            "chat",
            "--streaming",
            "--input-file",
            self._write("aiperf.jsonl", sessions),
            "--custom-dataset-type",
            "multi_turn",
            "--dataset-sampling-strategy",
            "sequential",
            "--num-conversations",
            str(len(self.rows)),
            "--concurrency",
            "1",
            "--osl",
            str(self.max_tokens),
            "--extra-inputs",
            "temperature:0",
            "--artifact-dir",
            str(folder),
            "--ui",
            "none",
            "--no-gpu-telemetry",
        )
        result = json.loads((folder / "profile_export_aiperf.json").read_text())
        found = _counters(
            [
                (int(n), int(count))
                for n, count in result["pooled_spec_decode_acceptance_histogram"].items()
            ]
        )
        scraped = json.loads((folder / "server_metrics_export.json").read_text())["metrics"]
        for name in ("num_drafts", "num_accepted_tokens"):
            (series,) = scraped[f"vllm:spec_decode_{name}"]["series"]
            if series["stats"]["total"] != getattr(found, name):
                raise ClientFailed(
                    f"aiperf read {series['stats']['total']} of {name} from /metrics, and "
                    f"{getattr(found, name)} from the answers"
                )
        return found

    def guidellm(self) -> SpecDecodeCounters:
        """The acceptance of its answers, first turns alone."""
        rows = [{"prompt": row.turns[0]} for row in self.rows]
        result = self.out / "guidellm.json"
        backend = {
            "kind": "openai_http",
            "target": self.url,
            "model": str(self.target),
            "max_tokens": self.max_tokens,
            "extras": {"body": {"temperature": 0}},
        }
        self._call(
            "guidellm",
            "run",
            "--backend",
            json.dumps(backend),
            "--profile",
            "kind=synchronous",
            "--constraint",
            f"kind=max_requests,count={len(rows)}",
            "--disable-progress",
            "--data",
            f"kind=json_file,path={self._write('guidellm.jsonl', rows)}",
            "--output",
            f"kind=json,path={result}",
        )
        (benchmark,) = json.loads(result.read_text())["benchmarks"]
        answers = [
            each["response_metrics"]["speculative_decoding"]
            for each in benchmark["requests"]["successful"]
        ]
        return _counters(
            [pair for answer in answers for pair in enumerate(answer["acceptance_histogram"])]
        )

    def _write(self, name: str, rows: list[dict[str, Any]]) -> str:
        path = self.out / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    def _call(self, client: str, *arguments: str) -> None:
        call(client, [str(self.venv / client / "bin" / client), *arguments])


def _counters(histogram: list[tuple[int, int]]) -> SpecDecodeCounters:
    """The totals of (accepted drafts, verifications with so many)."""
    return SpecDecodeCounters(
        num_drafts=sum(count for _, count in histogram),
        num_accepted_tokens=sum(n * count for n, count in histogram),
    )


def call(name: str, command: list[str]) -> None:
    """Runs a command. ClientFailed has the end of its output. aiperf reads no tokenizer of a folder
    with HF_HUB_OFFLINE set."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HF_HUB_OFFLINE", "PYTHONPATH")
    }
    environment = os.environ if command[0] == sys.executable else own
    done = subprocess.run(
        command, cwd=setup_vllm.ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
        raise ClientFailed(f"{name} ended with status {done.returncode}:\n{output}")


def scrape(url: str) -> SpecDecodeCounters:
    """The server's counters now."""

    async def read() -> SpecDecodeCounters | None:
        async with ServerClient(url, 60) as client:
            return drafting_counters(await client.metrics())

    return asyncio.run(read()) or SpecDecodeCounters()


def main(
    target: Path,
    drafter: str,
    suite: Annotated[str, typer.Option(help="A suite by name (docs/suites.md).")] = "spec_bench",
    suite_path: Annotated[Path, typer.Option(help="Its file.")] = Path("suites/spec_bench.jsonl"),
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Conversations, the first of the file.")
    ] = 12,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 64,
    k: Annotated[int, typer.Option("-k", min=1, help="Drafts per round.")] = 4,
    dtype: Annotated[
        str, typer.Option(help="Of the target; in float32 all count the same.")
    ] = "auto",
    venv: Annotated[
        Path, typer.Option(help="Where the clients' environments are made.")
    ] = setup_vllm.ROOT / ".venv-clients",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
) -> None:
    """Measure `draftsmith serve` with aiperf, guidellm, `draftsmith bench` and `draftsmith
    evaluate`."""
    console, results = Console(stderr=True), dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        lines = suite_path.read_text(encoding="utf-8").splitlines(keepends=True)[:num_prompts]
        file = out / suite_path.name
        file.write_text("".join(lines), encoding="utf-8")
        serve = (*SERVE, "--dtype", dtype)
        config = {"model": drafter, "num_speculative_tokens": k}
        try:
            for client, package in CLIENTS.items():
                ClientEnvironment(venv.absolute() / client, "pip").make(package)
            with started(str(target), config, serve, out / "server.log", 600) as url:
                run = Run(url, target, load_suite(suite, file), max_tokens, venv.absolute(), out)
                asked = BenchOptions(
                    dataset_name=suite,
                    dataset_path=str(file),
                    base_url=url,
                    backend="openai-chat",
                    output_len=max_tokens,
                    num_prompts=num_prompts,
                    no_oversample=True,
                    disable_shuffle=True,
                    max_concurrency=1,
                    temperature=0,
                    disable_tqdm=True,
                )

                def bench() -> SpecDecodeCounters:
                    found = measure(asked, prepare(asked))
                    return SpecDecodeCounters(
                        found["spec_decode_num_drafts"], 0, found["spec_decode_accepted_tokens"]
                    )

                clients: dict[str, Callable[[], SpecDecodeCounters]] = {
                    "draftsmith bench": bench,
                    "aiperf": run.aiperf,
                    "guidellm, first turns": run.guidellm,
                }
                for client, measured in clients.items():
                    before = scrape(url)
                    own = measured()
                    results[client] = _row(own) | {
                        "metrics": scrape(url).since(before).acceptance_length
                    }
            call(
                "draftsmith evaluate",
                [
                    sys.executable,
                    "-m",
                    "train.cli",
                    "evaluate",
                    "--model",
                    str(target),
                    "--drafter",
                    drafter,
                    "-k",
                    str(k),
                    "--suite",
                    suite,
                    "--suite-path",
                    str(file),
                    "--temperature",
                    "0",
                    "--repeats",
                    "0",
                    "--max-tokens",
                    str(max_tokens),
                    "--dtype",
                    dtype,
                    "--out",
                    str(out / "evaluation"),
                ],
            )
        except (setup_vllm.SetupError, ClientFailed) as error:
            console.print(f"bench_clients: {error}", markup=False)
            raise typer.Exit(1) from error
        cells = json.loads((out / "evaluation" / "acceptance.json").read_text())["results"]
    (cell,) = [each for each in cells if each["workload"] == "all"]
    counted = SpecDecodeCounters(cell["num_drafts"], 0, cell["num_accepted_tokens"])
    results["draftsmith evaluate"] = _row(counted)
    if json_file is not None:
        save_json(json_file, results)
    shown = table(
        f"{suite}, {num_prompts} conversations, K = {k}",
        "client",
        "verifications",
        "accepted",
        "τ",
        "/metrics",
    )
    for client, row in results.items():
        cells = [f"{row[name]:.0f}" for name in ("verifications", "accepted")]
        shown.add_row(
            client,
            *cells,
            *(f"{row[name]:.4f}" if name in row else "-" for name in ("tau", "metrics")),
        )
    Console().print(shown)
    whole = [row["tau"] for client, row in results.items() if "first turns" not in client]
    apart = max(whole) / min(whole) - 1
    off = max(abs(row["metrics"] / row["tau"] - 1) for row in results.values() if "metrics" in row)
    print(
        f"pooled τ apart by {apart:.2%}, a client's own from /metrics by {off:.2%}; allowed:"
        f" {WITHIN:.0%} and 0 %"
    )
    if apart > WITHIN or off > 1e-9:
        raise typer.Exit(1)


def _row(counters: SpecDecodeCounters) -> dict[str, float]:
    drafts, accepted = counters.num_drafts, counters.num_accepted_tokens
    return {
        "verifications": drafts,
        "accepted": accepted,
        "tau": acceptance_length(accepted, drafts),
    }


if __name__ == "__main__":
    typer.run(main)
