"""`draftsmith certify`: whether a server that drafts is lossless, by inference/bench/certify.py."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftsmith.inference.progress import Advance, Stages
from draftsmith.train.commands.options import command_of

if TYPE_CHECKING:
    from openai import AsyncOpenAI

EXIT_CODES = {"lossless": 0, "lossy": 1, "undecided": 3}


@dataclass(frozen=True)
class CertifyOptions:
    """What `draftsmith certify` takes."""

    url: Annotated[str, typer.Argument(help="Address of the server that drafts.")]
    baseline: Annotated[
        str,
        typer.Option(
            help="A server of the same model that does not draft, or the model: folder or id."
        ),
    ]
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL with `prompt`, a text; default: a few built-in texts."),
    ] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a greedy text.")] = 64
    samples: Annotated[
        int, typer.Option(min=0, help="Texts at temperature 1, of each server and prompt; 0: none.")
    ] = 200
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to a server at a time.")] = 4
    dtype: Annotated[str, typer.Option(help="Precision of a baseline that is a model.")] = "auto"
    assume_drafting: Annotated[
        bool,
        typer.Option(
            "--assume-drafting", help="Take it that the server drafts, if /metrics do not show it."
        ),
    ] = False
    output: Annotated[Path | None, typer.Option(help="Where to write the certificate.")] = None


def run(options: CertifyOptions) -> None:
    """Test whether drafting changes what a server writes. Its texts at temperature 0 and its
    samples are compared with those of the same model without drafting. Exit code 1: they differ;
    3: undecided, as nothing shows that the server drafted."""
    from draftsmith.inference.evaluation.demo_prompts import demo_prompts
    from draftsmith.inference.evaluation.suites import read_prompts
    from draftsmith.inference.whole_file import check_writable, write_whole

    if options.output is not None:
        check_writable("--output", options.output)
    texts = demo_prompts("en")[0] if options.prompts is None else read_prompts(options.prompts)
    with Stages(console=Console(stderr=True)).stage("completions of both servers") as advance:
        certificate = asyncio.run(_certificate(options, texts, advance))
    _print(certificate, Console(highlight=False, soft_wrap=True))
    if options.output is not None:
        text = json.dumps(certificate, indent=2, ensure_ascii=False)
        write_whole(options.output, text + "\n")
    raise typer.Exit(EXIT_CODES[certificate["verdict"]])


async def _certificate(
    options: CertifyOptions, texts: Sequence[str], advance: Advance
) -> dict[str, Any]:
    """The certificate of both servers, and the name of the baseline."""
    from draftsmith.inference.bench.certify import Completions
    from draftsmith.inference.bench.certify import certify as certificate_of
    from draftsmith.inference.bench.load_generator import client_at

    count = itertools.count(1)
    remote = options.baseline.startswith(("http://", "https://"))
    opened = client_at(options.baseline) if remote else _client_of(options.baseline, options.dtype)
    async with client_at(options.url) as server, opened as reference:
        certificate = await certificate_of(
            Completions(server, options.concurrency, lambda: advance(next(count))),
            Completions(reference, options.concurrency, lambda: advance(next(count))),
            texts,
            max_tokens=options.max_tokens,
            samples=options.samples,
            assume_drafting=options.assume_drafting,
        )
    return certificate | {"baseline": options.baseline}


@asynccontextmanager
async def _client_of(model: str, dtype: str) -> AsyncIterator[AsyncOpenAI]:
    """A client of a server of `model` without drafting, in this process."""
    import httpx2
    from openai import AsyncOpenAI

    from draftsmith.inference.entrypoints.llm import LLM
    from draftsmith.inference.server.app import make_app
    from draftsmith.inference.server.serve_options import ServerOptions

    app = make_app(LLM(model, dtype=dtype), ServerOptions(served_model_name=(model,)))
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    http = httpx2.AsyncClient(transport=transport)
    async with app.router.lifespan_context(app):
        yield AsyncOpenAI(base_url="http://baseline/v1", api_key="none", http_client=http)


def _print(certificate: dict[str, Any], console: Console) -> None:
    """Greedy differences that are no ties, then what was tested and what not, then the verdict."""
    console.print(f"{certificate['server']} against {certificate['baseline']}")
    for difference in certificate["greedy"]["differences"]:
        if not difference["tie"]:
            console.print(f"  {json.dumps(difference)}", markup=False)
    for statement in certificate["scope"]["tested"]:
        console.print(statement, markup=False)
    console.print(f"not tested: {'; '.join(certificate['scope']['not_tested'])}", markup=False)
    console.print(certificate["verdict"], style="bold")


certify = command_of("certify", CertifyOptions, run)
