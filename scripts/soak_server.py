"""A server at saturation for minutes: its memory stays flat, no request is lost, and its counters tell the truth.

    python scripts/soak_server.py --model TARGET --speculative-config '{"model": "EXPORT"}' --seconds 600

Clients ask without a pause: whole and streamed, completions and chats, greedy and seeded, several responses, stop
strings, structured outputs, drafting off for some, wrong requests, and clients that hang up. In the last quarter nobody
hangs up: there every counter must be exactly what the clients were told. docs/server.md says what came of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import psutil
import typer
from pydantic_core import to_jsonable_python
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inference import LLM, SamplingParams, StructuredOutputsParams
from inference.bench.servers import started
from inference.console import json_option, run
from inference.http_client import RequestFailed
from scripts.soak_load import COUNTED, Ask, Load, Tally, greedy_asks, idle

EXACT = 0.25  # share of the time in which nobody hangs up
WARM_UP = 0.3  # share of the time whose memory is not judged

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass
class Found:
    """The soak as a whole. `server`: its counters' growth, of all and of the exact part."""

    seconds: float = 0.0
    rough: Tally = field(default_factory=Tally)
    exact: Tally = field(default_factory=Tally)
    server: dict[str, float] = field(default_factory=dict)
    server_exact: dict[str, float] = field(default_factory=dict)
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds since the start, bytes
    swaps: int = 0
    compared: int = 0


def offline_texts(model: str, asks: Sequence[Ask]) -> dict[str, list[str]]:
    """The target's own responses, without a server."""
    llm, texts = LLM(model, dtype="float32"), {}
    for write, chats in ((llm.chat, True), (llm.generate, False)):
        chosen = [ask for ask in asks if ("messages" in ask.body) == chats]
        params = []
        for ask in chosen:
            body = {name: value for name, value in ask.body.items() if name not in ("messages", "prompt")}
            if (structured := body.pop("structured_outputs", None)) is not None:
                body["structured_outputs"] = StructuredOutputsParams(**structured)
            params.append(SamplingParams(**body))
        said = [ask.body["messages" if chats else "prompt"] for ask in chosen]
        for ask, output in zip(chosen, write(said, params, use_tqdm=False), strict=True):
            texts[str(ask.same)] = [each.text for each in output.outputs]
    return texts


async def soak(
    url: str, process: psutil.Process, texts: dict[str, list[str]], seconds: float, clients: int, seed: int,
    swap: dict[str, Any] | None, swap_every: float,
) -> Found:  # fmt: skip
    """Both parts against a server that is there. `swap`: the drafter that takes turns with none, in the first part."""
    found, start = Found(seconds=seconds), time.monotonic()
    load = Load(url, texts, seeded=swap is None)

    async def watch() -> None:
        while True:
            found.memory.append((time.monotonic() - start, process.memory_info().rss))
            await asyncio.sleep(min(1.0, seconds / 20))

    async def change() -> None:
        while True:
            for config in (None, swap):
                await asyncio.sleep(swap_every)
                try:
                    await load.client.post("/drafter", {"speculative_config": config})
                except RequestFailed as failure:
                    found.rough.lost.append(f"a swap was refused: {failure}"[:200])
                found.swaps += 1

    async with load.client:
        before = await load.client.metrics()
        watching = asyncio.ensure_future(watch())
        swapping = asyncio.ensure_future(change()) if swap is not None else None
        await load.saturate(found.rough, seconds * (1 - EXACT), clients, seed, exact=False)
        if swapping is not None:
            swapping.cancel()
            with suppress(asyncio.CancelledError):
                await swapping
            await load.client.post("/drafter", {"speculative_config": swap})
        between = await idle(load.client)
        await load.saturate(found.exact, seconds * EXACT, clients, seed, exact=True)
        after = await idle(load.client)
        watching.cancel()
        await load.client.version()
    found.server = {name: value - before.get(name, 0) for name, value in after.items()}
    found.server_exact = {name: value - between.get(name, 0) for name, value in after.items()}
    found.compared = load.compared
    return found


def growth(memory: Sequence[tuple[float, int]], seconds: float) -> float:
    """Growth of resident memory after the warm-up: largest ÷ smallest - 1."""
    judged = [size for when, size in memory if when >= WARM_UP * seconds]
    return max(judged) / min(judged) - 1


def violations(found: Found, tolerance: float) -> list[str]:
    """The requirements that do not hold, as sentences."""
    rough, exact, wrong = found.rough, found.exact, []
    for tally in (rough, exact):
        wrong += [f"lost: {each}" for each in tally.lost] + [f"changed: {each}" for each in tally.changed]
    grown = growth(found.memory, found.seconds)
    if grown > tolerance:
        wrong.append(f"resident memory varies by {grown:.1%} after the warm-up; {tolerance:.0%} is allowed")
    if found.server["request_success error"]:
        wrong.append(f"{found.server['request_success error']:.0f} responses ended with an error in the server")
    expected = {f"request_success {reason}": float(exact.reasons[reason]) for reason in ("stop", "length", "abort")}
    expected |= {"prompt_tokens": exact.prompt_tokens, "generation_tokens": exact.generation_tokens}
    expected |= {f"spec_decode_{name}": count for name, count in exact.drafting.items()}
    for name, count in expected.items():
        if found.server_exact.get(name, 0) != count:
            wrong.append(f"{name}: {found.server_exact.get(name, 0):.0f} by the server, {count:.0f} by its clients")
    told = sum(rough.reasons.values()) + sum(exact.reasons.values())
    ended = sum(found.server[f"request_success {reason}"] for reason in ("stop", "length", "abort"))
    if not told <= ended <= told + rough.hung_up_responses:
        wrong.append(f"{ended:.0f} responses ended, {told} were told and {rough.hung_up_responses} hung up on")
    written = rough.generation_tokens + exact.generation_tokens
    if not written <= found.server["generation_tokens"] <= written + rough.hung_up_tokens:
        wrong.append(f"{found.server['generation_tokens']:.0f} tokens written, {written} were told")
    return wrong


def show(found: Found, console: Console) -> None:
    table = Table(title=f"{found.seconds:g} s", box=SIMPLE_HEAD, title_justify="left")
    for name in ("", "with hang-ups", "exact part", "server, exact part"):
        table.add_column(name, justify="left" if not name else "right")
    rough, exact, server = found.rough, found.exact, found.server_exact
    for name in ("complete", "refused", "hung_up"):
        table.add_row(name.replace("_", " "), str(getattr(rough, name)), str(getattr(exact, name)), "")
    for reason in ("stop", "length"):
        counts = (str(tally.reasons[reason]) for tally in (rough, exact))
        table.add_row(f"ended by {reason}", *counts, f"{server[f'request_success {reason}']:.0f}")
    for name in ("prompt_tokens", "generation_tokens"):
        counts = (str(getattr(tally, name)) for tally in (rough, exact))
        table.add_row(name.replace("_", " "), *counts, f"{server[name]:.0f}")
    for name in COUNTED:
        drafted = server.get(f"spec_decode_{name}", 0)
        table.add_row(name.replace("_", " "), str(rough.drafting[name]), str(exact.drafting[name]), f"{drafted:.0f}")
    console.print(table)
    sizes = [size / 2**20 for when, size in found.memory if when >= WARM_UP * found.seconds]
    console.print(
        f"resident memory after the warm-up: {min(sizes):.0f} to {max(sizes):.0f} MiB "
        f"({growth(found.memory, found.seconds):.1%}); {found.compared} texts compared; {found.swaps} swaps",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


@contextmanager
def server(model: str, drafting: dict[str, Any] | None, flags: Sequence[str]) -> Iterator[tuple[str, psutil.Process]]:
    with TemporaryDirectory() as folder:
        log, before = Path(folder) / "server.log", set(psutil.Process().children())
        with started(model, drafting, ["--dtype", "float32", "--enable-prefix-caching", *flags], log, 600) as url:
            (process,) = set(psutil.Process().children()) - before
            yield url, process


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Target: folder or repository id.")],
    speculative_config: Annotated[str, typer.Option(help="How to draft, as JSON; default: n-grams.")] = "",
    seconds: Annotated[float, typer.Option(help="Of load, warm-up included.")] = 600.0,
    clients: Annotated[int, typer.Option(min=1, help="That ask at the same time.")] = 12,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Responses the server writes at the same time.")] = 8,
    swap_every: Annotated[float, typer.Option(help="Seconds between two drafters, none every other time.")] = 0.0,
    tolerance: Annotated[float, typer.Option(help="By how much memory may vary after the warm-up.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Of what is asked when.")] = 0,
    save: Annotated[Path | None, typer.Option("--json", help="Write what was found there.")] = None,
) -> None:
    """Exit code 1: memory was not flat, a request was lost, a text changed, or a counter was wrong."""
    drafting = json_option("--speculative-config", speculative_config) or {
        "method": "ngram", "num_speculative_tokens": 4,
    }  # fmt: skip
    console = Console(soft_wrap=True)
    texts = offline_texts(model, greedy_asks())
    flags = ["--max-num-seqs", str(max_num_seqs), *(["--enable-drafter-swap"] if swap_every else [])]
    with server(model, drafting, flags) as (url, process):
        swap = drafting if swap_every else None
        found = asyncio.run(soak(url, process, texts, seconds, clients, seed, swap, swap_every))
    show(found, console)
    wrong = violations(found, tolerance)
    if save is not None:
        told = {**to_jsonable_python(found), "violations": wrong}
        save.write_text(json.dumps(told) + "\n", encoding="utf-8")
    for each in wrong[:20]:
        console.print(each, style="red", markup=False)
    if wrong:
        raise typer.Exit(1)
    console.print("memory is flat, no request was lost, and every counter is what clients were told", style="green")


if __name__ == "__main__":
    run(app)
