"""Training steps of vLLM's library `speculators` beside ours, EAGLE-3 and DFlash: the same numbers
first, then time and memory.

    python scripts/bench_peers.py                     # all settings; makes .venv-peers first
    python scripts/bench_peers.py --setting packed --pairs 9 --threads 2
    python scripts/bench_peers.py --device cuda --peer-python /path/to/python
    python scripts/bench_peers.py --minutes 20        # whole trainings: scripts/peer_minutes.py

Both sides get the same weights and the same row. In float32, and again in the dtype that is timed,
loss and gradients of one step must agree within TOLERANCE, or nothing is timed. Then each side is a
process that stays alive (tests/peers/worker.py), and steps alternate: forward and backward, without
target and optimizer. Figures are medians over pairs. Memory is the peak of a process's first step
above what it held before (on a GPU of its last step, as the first compiles)."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import peer_minutes, setup_vllm
from scripts.measuring import library_environment, save_json, table, with_peak_memory
from scripts.minutes import OUT

PEER = "speculators==0.9.0"
CHECK = (
    "import torch; from importlib.metadata import version as v; import"
    " speculators.models.eagle3.core; import speculators.models.dflash.core; print(f'speculators"
    ' {v("speculators")}, torch {torch.__version__}, transformers {v("transformers")}\')'
)
COLUMNS = ("setting", "T", "seconds", "tokens/s", "CPU", "MiB", "memory")
SIDES = ("ours", "speculators")
# Largest |difference| / |value| of the loss, and the same of norms for the gradient of every
# weight.
TOLERANCE = {"float32": (1e-5, 1e-4), "bfloat16": (1e-2, 5e-2)}


class DifferentNumbers(Exception):
    """The two sides do not compute the same step."""


class WorkerFailed(Exception):
    """A side's process ended; the text has the end of its output."""


@dataclass(frozen=True)
class Setting:
    """The sizes of a row and of the head, and how it is computed."""

    about: str = ""
    family: str = "eagle3"
    tokens: int = 1024
    documents: int = 1
    draft_vocab: int = 16_384
    supervised: float = 1.0  # share of the tokens behind the first ones of a document
    head: bool = True  # the head's vocabulary projection is trained
    vocab: int = 16_384
    hidden: int = 512
    depths: int = 7
    layers: int = 1
    anchors: int = 256  # blocks of the row, of DFlash
    decay: float = 0.8  # of a depth's weight
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int = 1
    attention: str = "sdpa"  # the library's


REDUCED: dict[str, Any] = {"tokens": 2048, "draft_vocab": 8192, "supervised": 0.4}
# The decay is the library's gamma of 4.
BLOCKS: dict[str, Any] = {"family": "dflash", "layers": 5, "decay": math.exp(-1 / 4)}
ON_CPU = {
    "whole": Setting("head trained"),
    "frozen": Setting("head frozen, as the library has it", head=False),
    "reduced": Setting("8,192 of the vocabulary, 40 % supervised", **REDUCED),
    "packed": Setting("eight documents in the row", documents=8),
    "dflash": Setting("256 blocks, five layers, the target's head", head=False, **BLOCKS),
    "dflash-reduced": Setting(
        "the same over 8,192 of the vocabulary, 40 % supervised", **BLOCKS, **REDUCED
    ),
}

WIDE: dict[str, Any] = {"hidden": 4096, "vocab": 151_936, "tokens": 2048}
ON_GPU = {
    "wide": Setting("the widths of Qwen3-8B", draft_vocab=32_000, **WIDE),
    "wide-dflash": Setting(
        "512 blocks of 16 there",
        head=False,
        draft_vocab=151_936,
        depths=15,
        **BLOCKS,
        **WIDE,
        anchors=512,
    ),
}
SETTINGS = ON_CPU | ON_GPU


class PeerEnvironment(setup_vllm.Environment):
    """The library with torch's CPU build, or with CUDA's where a GPU is measured."""

    pins = (PEER, setup_vllm.TORCH)
    size = "some minutes and 2 GB"

    def fill(self, *options: object) -> str:
        """Installs torch (with CUDA if `options` is "cuda"), the peer and what it imports; the
        versions. SetupError: a step has failed."""
        torch_pin = f"torch=={setup_vllm.TORCH}"
        if options == ("cuda",):
            self._install(torch_pin, step=f"install {torch_pin}")
        else:
            self._install_torch()
        self._install(PEER, torch_pin, step=f"install {PEER}")
        # It asks for these two, uses neither, and gets builds for another torch, which transformers
        # fails to import.
        names = ("torchaudio", "torchvision")
        self._run(
            f"remove {' and '.join(names)}",
            [self.python, "-m", "pip", "uninstall", "--quiet", "--yes", *names],
        )
        return self._run("import it", [self.python, "-I", "-c", CHECK])


def make_batch(s: Setting) -> dict[str, Tensor]:
    """The row, and what both sides share of the target. Every tensor's first dimension is T, V, Vd
    or H.

    The first `depths + 1` tokens of a document are not supervised, nor the last of the row; of the
    others, the last part of every hundred is."""
    torch.manual_seed(0)
    length = s.tokens // s.documents
    place = torch.arange(s.tokens)
    position = place % length
    learnt = (position > s.depths) & (place < s.tokens - s.depths - 1)
    learnt &= position % 100 >= round(100 * (1 - s.supervised))
    half = lambda *shape: torch.randn(shape).bfloat16()
    return {
        "input_ids": torch.randint(0, s.vocab, (s.tokens,)),
        "position_ids": position,
        "segment_ids": place // length,
        "loss_mask": learnt,
        "taps": half(s.tokens, 3 * s.hidden),
        "state": half(s.tokens, s.hidden),  # before the target's final norm
        "norm": 1 + half(s.hidden) / 10,
        "embed": half(s.vocab, s.hidden),
        "lm_head": (2 * s.hidden**-0.5 * half(s.vocab, s.hidden)).bfloat16(),
        "draft_ids": torch.randperm(s.vocab)[: s.draft_vocab].sort().values,
    }


class Worker:
    """A side in a process of its own, which answers one command at a time."""

    def __init__(self, side: str, python: Path | str, folder: Path, threads: int) -> None:
        self.side = side
        self.log = folder / f"{side}.log"
        script = setup_vllm.ROOT / "tests" / "peers" / "worker.py"
        self.process = subprocess.Popen(
            [str(python), "-P", str(script), side, str(folder)],
            cwd=folder,
            env=library_environment(threads),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
        )
        self.versions = self._read()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.communicate()  # closes its stdin, which ends it

    def ask(self, command: str) -> dict[str, Any]:
        """Sends a line, and waits for its answer in JSON. WorkerFailed: the process has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            output = "\n".join(self.log.read_text().splitlines()[-15:])
            raise WorkerFailed(
                f"the worker of {self.side} ended with status {self.process.wait()}:\n{output}"
            )
        return json.loads(line)

    def step(self, device: str) -> dict[str, Any]:
        """A step's seconds, loss and peak memory in bytes."""
        if device == "cuda":
            return self.ask("step")
        answer, peak = with_peak_memory(lambda: self.ask("step"), pid=self.process.pid)
        return answer | {"peak": peak}


def differences(
    losses: Sequence[float], gradients: Sequence[dict[str, Tensor]], dtype: str
) -> tuple[float, float]:
    """Relative differences of two sides: (of the loss, of the gradient that differs most).
    DifferentNumbers beyond TOLERANCE."""
    ours, theirs = gradients
    if set(ours) != set(theirs):
        raise DifferentNumbers(f"only one side has gradients of {sorted(set(ours) ^ set(theirs))}")
    apart = {
        name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs
    }
    worst = max(apart, key=lambda name: apart[name])
    relative = abs(losses[0] - losses[1]) / abs(losses[1]), apart[worst]
    if not all(x <= limit for x, limit in zip(relative, TOLERANCE[dtype])):
        raise DifferentNumbers(
            f"in {dtype} our loss is {losses[0]:.7g}, the library's {losses[1]:.7g}; the gradient"
            f" of {worst} differs by {apart[worst]:.1e} of its norm; allowed are {TOLERANCE[dtype]}"
        )
    return relative


def timed_steps(
    sides: Sequence[Worker], pairs: int, device: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps of both sides in pairs, in which they take turns at being first."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    order = [(sides[0], ours), (sides[1], theirs)]
    for _ in range(pairs):
        for worker, steps in order:
            steps.append(worker.step(device))
        order.reverse()
    return ours, theirs


def measure(s: Setting, pythons: Sequence[Path | str], pairs: int) -> dict[str, Any]:
    """Shows that the sides are equal, then times them. Of "seconds", "cpu_seconds", "peak" (bytes),
    ours are first."""
    result: dict[str, Any] = {"setting": asdict(s), "equality": {}}
    for dtype in dict.fromkeys(("float32", s.dtype)):
        timed = dtype == s.dtype
        with tempfile.TemporaryDirectory() as name, ExitStack() as workers:
            folder = Path(name)
            (folder / "setting.json").write_text(json.dumps(asdict(replace(s, dtype=dtype))))
            save_file(make_batch(s), folder / "batch.safetensors")
            sides = [
                workers.enter_context(Worker(*side, folder, s.threads))
                for side in zip(SIDES, pythons)
            ]
            first = []
            gradients = []
            for worker in sides:
                worker.ask("warm")
                first.append(worker.step(s.device))
                worker.ask(f"gradients {folder / 'gradients'}")
                gradients.append(load_file(folder / "gradients"))
            apart = differences([answer["loss"] for answer in first], gradients, dtype)
            result["equality"][dtype] = {"loss": first[0]["loss"], "differences": apart}
            del gradients
            if timed:
                steps = timed_steps(sides, pairs, s.device)
                for figure in ("seconds", "cpu_seconds"):
                    result[figure] = [[step[figure] for step in side] for side in steps]
                result["peak"] = [
                    steps[i][-1]["peak"] if s.device == "cuda" else first[i]["peak"] for i in (0, 1)
                ]
                result["versions"] = [worker.versions for worker in sides]
    return result


def speedup(seconds: Sequence[Sequence[float]]) -> float:
    """Median over pairs of the library's time ÷ ours, which is our tokens per second ÷ the
    library's."""
    return statistics.median(theirs / ours for ours, theirs in zip(*seconds, strict=True))


def cells(name: str, result: dict[str, Any]) -> list[str]:
    """A setting's row of the table."""
    peak = [size / 2**20 for size in result["peak"]]
    seconds = result["seconds"]
    shown = [
        f"{loss:.0e} {gradient:.0e}"
        for loss, gradient in (e["differences"] for e in result["equality"].values())
    ]
    return [
        name,
        f"{result['setting']['tokens']:,}",
        " : ".join(f"{statistics.median(times):.2f}" for times in seconds),
        f"{speedup(seconds):.2f}",
        f"{speedup(result['cpu_seconds']):.2f}",
        " : ".join(f"{size:,.0f}" for size in peak),
        f"{peak[0] / peak[1]:.2f}",
        *shown,
    ]


def main(
    setting: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(SETTINGS)}; again for more.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Steps of each side.")] = 5,
    tokens: Annotated[int, typer.Option(help="Tokens of the row; 0: each setting's own.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Of autocast over float32 weights.")
    ] = "bfloat16",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    attention: Annotated[
        str, typer.Option(help="The library's; default: sdpa on a CPU, else its own, flex.")
    ] = "",
    peer_python: Annotated[
        Path | None, typer.Option(help="An interpreter that has the library.")
    ] = None,
    venv: Annotated[
        Path, typer.Option(help="Where the library's environment is made.")
    ] = setup_vllm.ROOT / ".venv-peers",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
    minutes: Annotated[
        list[float] | None,
        typer.Option(help="Compare trainings of so many minutes instead; again for more."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Of --minutes: the folder of runs, with `texts.json`.")
    ] = OUT,
) -> None:
    """Compare the training step with that of vLLM's speculators, or whole trainings."""
    names = setting or list(ON_GPU if device == "cuda" else ON_CPU)
    if unknown := [name for name in names if name not in SETTINGS]:
        raise typer.BadParameter(
            f"{', '.join(unknown)}: expected {', '.join(SETTINGS)}", param_hint="--setting"
        )
    chosen: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "attention": attention or ("sdpa" if device == "cpu" else "simple_flex_attention"),
    }
    settings = {
        name: replace(SETTINGS[name], **chosen, tokens=tokens or SETTINGS[name].tokens)
        for name in names
    }
    try:
        peer_python = peer_python or _made_environment(venv.absolute(), device)
        if minutes:
            file = json_file or out / "peers.json"
            peer_minutes.compare(minutes, peer_python.absolute(), out.absolute(), file)
            return
        results = _measure_all(settings, peer_python, pairs, json_file)
    except (
        setup_vllm.SetupError,
        DifferentNumbers,
        WorkerFailed,
        subprocess.CalledProcessError,
    ) as error:
        Console(stderr=True).print(f"bench_peers: {error}", markup=False)
        raise typer.Exit(1) from error
    _print(results, f"{dtype}, {device}, {threads} threads, medians of {pairs} pairs")


def _made_environment(venv: Path, device: str) -> Path:
    """The interpreter of an environment with the library, for the device; made if need be."""
    environment = PeerEnvironment(venv)
    environment.make(*(("cuda",) if device == "cuda" else ()))
    return environment.python


def _measure_all(
    settings: dict[str, Setting], peer_python: Path, pairs: int, json_file: Path | None
) -> dict[str, dict[str, Any]]:
    """The results by setting, one after the other; the file has those that are there so far."""
    console = Console(stderr=True)
    results: dict[str, dict[str, Any]] = {}
    for name, setting in settings.items():
        result = measure(setting, (sys.executable, peer_python.absolute()), pairs)
        results[name] = result
        speed = f"{speedup(result['seconds']):.2f} times the tokens/s"
        console.print(f"{name}: equal, {speed}", highlight=False)
        if json_file is not None:
            save_json(json_file, {"results": results})
    return results


def _print(results: dict[str, dict[str, Any]], how: str) -> None:
    """The table of the settings, and what its columns are. `how`: they were measured."""
    first = next(iter(results.values()))
    library = first["versions"][1]["version"]
    unequal = [f"Δ {kind}" for kind in first["equality"]]
    shown = table(f"a step, ours : that of {library}; {how}", *COLUMNS, *unequal)
    for name, result in results.items():
        shown.add_row(*cells(name, result))
    Console().print(shown)
    print(
        "tokens/s: ours ÷ theirs; CPU: the same by CPU time; Δ: relative difference of loss and of"
        " gradients"
    )


if __name__ == "__main__":
    typer.run(main)
