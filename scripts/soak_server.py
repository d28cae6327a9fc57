"""A server at saturation for minutes: its memory stays flat, no request is lost, and its counters
tell the truth.

    python scripts/soak_server.py --model TARGET --speculative-config '{"model": "EXPORT"}'
    --seconds 600

Clients ask without a pause: whole and streamed, completions and chats, greedy and seeded, several
responses, stop strings, structured outputs, drafting off for some, wrong requests, and clients that
hang up. In the last quarter nobody hangs up: there every counter must be exactly what the clients
were told. docs/server.md says what came of it."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import psutil
import typer
from pydantic_core import to_jsonable_python
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inference import LLM, SamplingParams, StructuredOutputsParams
from inference.bench.servers import started
from inference.console import json_option, run
from inference.http_client import RequestFailed, ServerClient
from scripts.demo_target.corpus import prompts
from scripts.measuring import table

POOL = 24  # different requests of each kind
CHOICES = ["one", "two", "three"]
COUNTED = (
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
)  # names of the server's counters
OF_ANSWERS = dict(
    zip(COUNTED, ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"), strict=True)
)
FAULTS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"prompt": ""}, 400),
    ({"prompt": "x", "temperature": -1}, 400),
    ({"prompt": "x", "no_such_field": 1}, 400),
    ({"prompt": "x" * 100_000}, 400),
    ({"prompt": "x", "model": "nobody"}, 404),
    ({"prompt": "x", "structured_outputs": {"regex": "("}}, 400),
)


@dataclass(frozen=True)
class Ask:
    """One request.

    status     expected of the answer same       requests with an equal value must get equal texts
    hangs_up   after so many events of a stream, or seconds of a whole answer, the client closes the
    connection"""

    path: str
    body: dict[str, Any]
    status: int = 200
    same: str | None = None
    hangs_up: float | None = None


@dataclass
class Tally:
    """Totals of the answers. Tokens of a prompt count once per response, as the server counts
    them."""

    complete: int = 0
    refused: int = 0
    hung_up: int = 0
    hung_up_responses: int = 0
    hung_up_tokens: int = 0  # the most that they may have written
    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafting: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def read(self, ask: Ask, answer: dict[str, Any]) -> None:
        """A whole answer, or the parts of a stream put together."""
        n = ask.body.get("n", 1)
        self.complete += 1
        self.reasons.update(answer["reasons"])
        self.prompt_tokens += n * answer["usage"]["prompt_tokens"]
        self.generation_tokens += answer["usage"]["completion_tokens"]
        drafting = (answer.get("metrics") or {}).get("speculative_decoding") or {}
        self.drafting.update({name: drafting.get(theirs, 0) for name, theirs in OF_ANSWERS.items()})


# ------------------------------------------------------------------------------
# requests


def greedy_asks() -> list[Ask]:
    """Greedy requests, whose answers are known from the offline runtime."""
    asks = []
    for i, (messages, _) in enumerate(prompts("test", POOL, 1)):
        body: dict[str, Any] = {"temperature": 0, "max_tokens": 8 + 5 * (i % 12)}
        if i % 4 == 1:
            body["stop"] = ["\n", "ing "]
        if i % 6 == 2:
            body["structured_outputs"] = {"choice": CHOICES}
        if i % 3:
            asks.append(
                Ask(
                    "/v1/chat/completions", {"messages": list(messages), **body}, same=f"greedy {i}"
                )
            )
        else:
            asks.append(
                Ask(
                    "/v1/completions",
                    {"prompt": messages[-1]["content"], **body},
                    same=f"greedy {i}",
                )
            )
    return asks


def sampled_asks() -> list[Ask]:
    """Sampled requests, each with a seed, so that its answer is the same every time."""
    asks = []
    for i, (messages, _) in enumerate(prompts("test", POOL, 2)):
        body = {
            "prompt": messages[-1]["content"],
            "seed": i,
            "temperature": 0.7 + 0.1 * (i % 5),
            "n": 1 + i % 3,
        }
        body |= {"max_tokens": 8 + 4 * (i % 9), "top_p": 0.9, "frequency_penalty": 0.2 * (i % 2)}
        asks.append(Ask("/v1/completions", body, same=f"sampled {i}"))
    return asks


def drawn(rng: random.Random, pools: tuple[list[Ask], list[Ask]], *, exact: bool) -> Ask:
    """The next request of a client. Where counts are exact, several responses to one prompt are
    written without drafts, since answers report drafting for single ones only."""
    chance = rng.random()
    if chance < 0.06:
        body, status = rng.choice(FAULTS)
        return Ask("/v1/completions", body, status)
    ask = rng.choice(pools[chance < 0.4])
    body = dict(ask.body)
    if body.get("n", 1) == 1:
        body["per_request_spec_decode_metrics"] = "summary"
    same = ask.same
    if rng.random() < 0.15 or (exact and body.get("n", 1) > 1):
        body["num_speculative_tokens"] = 0
        same = same if body["temperature"] == 0 else f"{same} undrafted"
    if rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if not exact and rng.random() < 0.1:
        return Ask(
            ask.path,
            body,
            same=same,
            hangs_up=rng.randint(1, 6) if body.get("stream") else 0.2 * rng.random(),
        )
    return Ask(ask.path, body, same=same)


# ------------------------------------------------------------------------------
# clients


class Load:
    """The clients. `texts`: the expected texts by `Ask.same`; the first answer sets those of other
    requests."""

    def __init__(self, url: str, texts: dict[str, list[str]], *, seeded: bool) -> None:
        self.client, self.texts, self._seeded = ServerClient(url, 300.0), texts, seeded
        self.compared = 0

    async def saturate(
        self, tally: Tally, seconds: float, clients: int, seed: int, *, exact: bool
    ) -> None:
        pools, end = (greedy_asks(), sampled_asks()), time.monotonic() + seconds

        async def run_client(number: int) -> None:
            rng = random.Random(f"{seed} {number} {exact}")
            while time.monotonic() < end:
                await self._ask(drawn(rng, pools, exact=exact), tally)

        await asyncio.gather(*(run_client(number) for number in range(clients)))

    async def _ask(self, ask: Ask, tally: Tally) -> None:
        parts = list[dict[str, Any]]()
        try:
            if ask.body.get("stream"):
                async with aclosing(self.client.events(ask.path, ask.body)) as events:
                    async for event in events:
                        parts.append(event)
                        if ask.hangs_up is not None and len(parts) >= ask.hangs_up:
                            return _hung_up(ask, tally)
            else:
                async with asyncio.timeout(ask.hangs_up):
                    parts = [await self.client.post(ask.path, ask.body)]
        except TimeoutError:
            return _hung_up(ask, tally)
        except RequestFailed as failure:
            if failure.reason != f"http_{ask.status}":
                tally.lost.append(str(failure)[:200])
            elif ask.status != 200:
                tally.refused += 1
            return None
        if ask.status != 200:
            tally.lost.append(f"HTTP 200 instead of {ask.status}")
            return None
        answer = _joined(parts)
        if ask.body.get("stream") and len(answer["reasons"]) < ask.body.get("n", 1):
            tally.lost.append("the stream broke off")
            return None
        tally.read(ask, answer)
        if ask.same is not None and (self._seeded or ask.same.startswith("greedy")):
            self.compared += 1
            expected = self.texts.setdefault(ask.same, answer["texts"])
            if answer["texts"] != expected:
                tally.changed.append(
                    f"{ask.same}: {answer['texts']!r} instead of {expected!r}"[:400]
                )
        return None


def _hung_up(ask: Ask, tally: Tally) -> None:
    n = ask.body.get("n", 1)
    tally.hung_up += 1
    tally.hung_up_responses += n
    tally.hung_up_tokens += n * ask.body["max_tokens"]


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer from a whole one, or from the chunks of a stream."""
    answer: dict[str, Any] = {"reasons": [], "usage": None, "metrics": None}
    texts: dict[int, str] = {}
    for part in parts:
        answer["usage"] = part.get("usage") or answer["usage"]
        answer["metrics"] = part.get("metrics") or answer["metrics"]
        for choice in part["choices"]:
            content = choice.get("message") or choice.get("delta") or choice
            text = content.get("content") or content.get("text") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            answer["reasons"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return answer | {"texts": [texts[i] for i in sorted(texts)]}


async def idle(client: ServerClient) -> dict[str, float]:
    """The server's counters once no request runs or waits, which must be within a minute."""
    for _ in range(120):
        totals = await client.metrics()
        if totals["num_requests_running"] == totals["num_requests_waiting"] == 0:
            return totals
        await asyncio.sleep(0.5)
    raise TimeoutError("a minute after the last client left, requests still run or wait")


# ------------------------------------------------------------------ the soak

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
            body = {
                name: value
                for name, value in ask.body.items()
                if name not in ("messages", "prompt")
            }
            if (structured := body.pop("structured_outputs", None)) is not None:
                body["structured_outputs"] = StructuredOutputsParams(**structured)
            params.append(SamplingParams(**body))
        said = [ask.body["messages" if chats else "prompt"] for ask in chosen]
        for ask, output in zip(chosen, write(said, params, use_tqdm=False), strict=True):
            texts[str(ask.same)] = [each.text for each in output.outputs]
    return texts


async def soak(
    url: str,
    process: psutil.Process,
    texts: dict[str, list[str]],
    seconds: float,
    clients: int,
    seed: int,
    swap: dict[str, Any] | None,
    swap_every: float,
) -> Found:
    """Both parts against a server that is there. `swap`: the drafter that takes turns with none, in
    the first part."""
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
        wrong += [f"lost: {each}" for each in tally.lost] + [
            f"changed: {each}" for each in tally.changed
        ]
    grown = growth(found.memory, found.seconds)
    if grown > tolerance:
        wrong.append(
            f"resident memory varies by {grown:.1%} after the warm-up; {tolerance:.0%} is allowed"
        )
    if found.server["request_success error"]:
        wrong.append(
            f"{found.server['request_success error']:.0f} responses ended with an error in the"
            " server"
        )
    expected = {
        f"request_success {reason}": float(exact.reasons[reason])
        for reason in ("stop", "length", "abort")
    }
    expected |= {"prompt_tokens": exact.prompt_tokens, "generation_tokens": exact.generation_tokens}
    expected |= {f"spec_decode_{name}": count for name, count in exact.drafting.items()}
    for name, count in expected.items():
        if found.server_exact.get(name, 0) != count:
            wrong.append(
                f"{name}: {found.server_exact.get(name, 0):.0f} by the server, {count:.0f} by its"
                " clients"
            )
    told = sum(rough.reasons.values()) + sum(exact.reasons.values())
    ended = sum(found.server[f"request_success {reason}"] for reason in ("stop", "length", "abort"))
    if not told <= ended <= told + rough.hung_up_responses:
        wrong.append(
            f"{ended:.0f} responses ended, {told} were told and {rough.hung_up_responses} hung"
            " up on"
        )
    written = rough.generation_tokens + exact.generation_tokens
    if not written <= found.server["generation_tokens"] <= written + rough.hung_up_tokens:
        wrong.append(f"{found.server['generation_tokens']:.0f} tokens written, {written} were told")
    return wrong


def show(found: Found, console: Console) -> None:
    shown = table(f"{found.seconds:g} s", "", "with hang-ups", "exact part", "server, exact part")
    rough, exact, server = found.rough, found.exact, found.server_exact
    for name in ("complete", "refused", "hung_up"):
        shown.add_row(
            name.replace("_", " "), str(getattr(rough, name)), str(getattr(exact, name)), ""
        )
    told = [
        (f"request_success {name}", rough.reasons[name], exact.reasons[name])
        for name in ("stop", "length")
    ]
    told += [
        (name, getattr(rough, name), getattr(exact, name))
        for name in ("prompt_tokens", "generation_tokens")
    ]
    told += [
        (f"spec_decode_{name}", rough.drafting[name], exact.drafting[name]) for name in COUNTED
    ]
    for name, of_rough, of_exact in told:
        shown.add_row(
            name.replace("_", " "), str(of_rough), str(of_exact), f"{server.get(name, 0):.0f}"
        )
    console.print(shown)
    sizes = [size / 2**20 for when, size in found.memory if when >= WARM_UP * found.seconds]
    console.print(
        f"resident memory after the warm-up: {min(sizes):.0f} to {max(sizes):.0f} MiB"
        f" ({growth(found.memory, found.seconds):.1%}); {found.compared} texts compared;"
        f" {found.swaps} swaps",
        highlight=False,
        soft_wrap=True,
    )


@contextmanager
def server(
    model: str, drafting: dict[str, Any] | None, flags: Sequence[str]
) -> Iterator[tuple[str, psutil.Process]]:
    with TemporaryDirectory() as folder:
        log, before = Path(folder) / "server.log", set(psutil.Process().children())
        with started(
            model, drafting, ["--dtype", "float32", "--enable-prefix-caching", *flags], log, 600
        ) as url:
            (process,) = set(psutil.Process().children()) - before
            yield url, process


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Target: folder or repository id.")],
    speculative_config: Annotated[
        str, typer.Option(help="How to draft, as JSON; default: n-grams.")
    ] = "",
    seconds: Annotated[float, typer.Option(help="Of load, warm-up included.")] = 600.0,
    clients: Annotated[int, typer.Option(min=1, help="That ask at the same time.")] = 12,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Responses the server writes at the same time.")
    ] = 8,
    swap_every: Annotated[
        float, typer.Option(help="Seconds between two drafters, none every other time.")
    ] = 0.0,
    tolerance: Annotated[
        float, typer.Option(help="By how much memory may vary after the warm-up.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Of what is asked when.")] = 0,
    save: Annotated[Path | None, typer.Option("--json", help="Write what was found there.")] = None,
) -> None:
    """Exit code 1: memory was not flat, a request was lost, a text changed, or a counter was
    wrong."""
    ngrams = {"method": "ngram", "num_speculative_tokens": 4}
    drafting = json_option("--speculative-config", speculative_config) or ngrams
    console = Console(soft_wrap=True)
    texts = offline_texts(model, greedy_asks())
    flags = [
        "--max-num-seqs",
        str(max_num_seqs),
        *(["--enable-drafter-swap"] if swap_every else []),
    ]
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
    console.print(
        "memory is flat, no request was lost, and every counter is what clients were told",
        style="green",
    )


if __name__ == "__main__":
    run(app)
