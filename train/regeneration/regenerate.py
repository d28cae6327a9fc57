"""Responses written by the target itself, so that a head learns the text that it will be asked to
predict.

Every conversation becomes one prompt or several (conversations.py), and the target continues each
with the recipe's sampling settings: in this process, batch by batch, or at endpoints, many at a
time (endpoint_writer.py). Responses are stored by content (store.py), so a killed run continues,
and a changed target, template or setting starts afresh. Every response is stored when it has ended:
a kill loses those in flight and no other. What is written after a kill has other neighbours in its
batch, so that in low precision a token may differ from that of an uninterrupted run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference import LLM
from inference.entrypoints.loading import end_of_sequence_ids, saved_ending_tokens
from inference.entrypoints.prompts import Prompt
from speculators.errors import ConfigError, DataError
from train.data.loss_mask import ConversationTokenizer
from train.data.sources import Example
from train.recipe.data_sections import RegenerateSection, TemperatureShare
from train.recipe.recipe import Recipe
from train.regeneration.conversations import Account, Ask, Conversation, ConversationRules
from train.regeneration.endpoint import TargetFacts
from train.regeneration.endpoint_writer import write_at_endpoints
from train.regeneration.job import Job
from train.regeneration.record import Record
from train.regeneration.store import Response, ResponseStore, digest, part_suffix

REPORT_EVERY_S = 10.0  # while no response ends

Progress = Callable[[int, int, str], None]  # done, total, a note
Say = Callable[[str], None]


def temperatures_of(shares: Sequence[TemperatureShare], count: int) -> list[float]:
    """The temperature of each of `count` examples: the shares of the recipe, spread evenly and in a
    fixed order."""
    counts = [0.0] * len(shares)
    chosen = []
    for i in range(count):
        behind = [entry.share * (i + 1) - number for entry, number in zip(shares, counts)]
        index = max(range(len(behind)), key=behind.__getitem__)
        counts[index] += 1
        chosen.append(shares[index].temperature)
    return chosen


def settings_hash(section: RegenerateSection, target_hash: str) -> str:
    """Hash of everything that a response depends on beside its prompt: the target, the sampling
    settings, and whether it was exchanged as text."""
    settings = {
        "target": target_hash,
        **section.model_dump(include={"top_p", "top_k", "max_new_tokens", "seed"}),
    }
    if section.endpoints and section.exchange == "text":
        settings["text"] = section.unproved_tokens
    return digest(settings, 16)


def target_facts(llm: LLM, name: str, template_kwargs: dict[str, Any] | None = None) -> TargetFacts:
    """The facts of a loaded target."""
    return TargetFacts(
        name=name,
        max_model_len=llm.engine.max_model_len,
        vocab_size=llm.engine.target.vocab_size,
        end=tuple(sorted(end_of_sequence_ids(llm.engine.target, llm.get_tokenizer()))),
        tokenizer=llm.get_tokenizer(),
        template_kwargs=template_kwargs or {},
    )


def facts_of(recipe: Recipe, tokenizer: Any) -> TargetFacts:
    """The facts of the recipe's target, from its config alone."""
    t = recipe.target
    sketch, source = t.sketch(), {"revision": t.revision, "trust_remote_code": t.trust_remote_code}
    return TargetFacts(
        name=t.model,
        max_model_len=getattr(sketch.config, "max_position_embeddings", None)
        or recipe.data.max_length,
        vocab_size=sketch.vocab_size,
        end=tuple(sorted(saved_ending_tokens(t.model, tokenizer, **source))),
        tokenizer=tokenizer,
        template_kwargs=recipe.data.chat_template_kwargs,
    )


def regenerate(
    llm: LLM | None,
    examples: Sequence[Example],
    tokenizer: ConversationTokenizer,
    section: RegenerateSection,
    *,
    target_hash: str,
    folder: Path,
    max_length: int,
    facts: TargetFacts | None = None,
    temperatures: Sequence[float] | None = None,
    progress: Progress | None = None,
    say: Say = lambda text: None,
    part: tuple[int, int] = (0, 1),
    retry_failed: bool = False,
    record: Record | None = None,
) -> list[Response]:
    """The target's responses to `examples`, turn by turn and in order.

    llm            the target; with endpoints it is what they are compared with, and None where it
                   is not loaded
    facts          of the target, needed without `llm`
    temperatures   one per example, in place of the recipe's shares
    part           (i, n): only every n-th conversation from the i-th on, for several processes that
                   share the work
    retry_failed   ask again for responses that an earlier run went without (`max_failures`)
    record         describes the target in the file of the account

    A prompt that leaves no room in `max_length` is left out; DataError if none is left, or if more
    responses fail than `max_failures` allows. EndpointError: the endpoints are not there, or serve
    something else."""
    if llm is not None:
        facts = facts or target_facts(
            llm, str(llm.engine.target.name_or_path), tokenizer.template_kwargs
        )
    if facts is None:
        raise ConfigError("regenerate: without a target that is loaded, its facts are needed")
    temperatures = (
        temperatures
        if temperatures is not None
        else temperatures_of(section.temperatures, len(examples))
    )
    facts = replace(facts, max_model_len=min(max_length, facts.max_model_len))
    account = Account()
    rules = ConversationRules(
        section, tokenizer, account, room=facts.max_model_len - 2, end=frozenset(facts.end)
    )
    conversations = [
        Conversation(i, example, temperature, rules)
        for i, (example, temperature) in enumerate(zip(examples, temperatures, strict=True))
        if i % part[1] == part[0]
    ]
    name, suffix = settings_hash(section, target_hash), part_suffix(part)

    def report(note: str = "") -> None:
        if progress is not None:
            progress(account.done, account.total, note)

    job = Job(
        conversations,
        ResponseStore(folder, name),
        account,
        section,
        folder / f"{name}{suffix}.failures.jsonl",
        retry_failed,
        report,
    )
    writer: dict[str, Any] = {}
    try:
        if section.endpoints:
            writer = {"endpoints": write_at_endpoints(job, facts, llm, say)}
        else:
            if llm is None:
                raise ConfigError(
                    "regenerate.endpoints: empty, and the target is not loaded; name the servers"
                )
            writer = {"here": str(llm.engine.target.dtype).removeprefix("torch.")}
            _write_here(llm, job)
        assert account.done == account.total, f"responses unaccounted for: {account}"
        if conversations and account.total == 0 and part[1] == 1:  # of a part all may be too long
            what = f"all {len(conversations)} prompts are longer than {rules.room} tokens"
            raise DataError(f"regenerate: {what}; raise data.max_length")
        job.finish()
        if part[1] == 1:
            for line in account.lines(section.max_new_tokens):
                say(f"      {line}")
    finally:
        job.store.close()
        if record is not None:
            record.write(folder / f"{name}{suffix}.json", section, account, writer)
    return [response for conversation in conversations for response in conversation.responses]


def _write_here(llm: LLM, job: Job) -> None:
    """Writes the first turn of all conversations, then the second, and so on."""
    account = job.account
    while asked := [(c, ask) for c in job.conversations if (ask := c.ask()) is not None]:
        missing: dict[str, list[tuple[Conversation, Ask]]] = {}
        for conversation, ask in asked:
            if not job.settle_known(conversation, ask):
                missing.setdefault(ask.key, []).append((conversation, ask))
        account.reused += sum(len(same) - 1 for same in missing.values())
        job.report("")
        # similar lengths together: little padding
        asks = sorted(
            (same[0][1] for same in missing.values()), key=lambda ask: len(ask.prompt_ids)
        )
        _generate(llm, job, asks)
        for conversation, ask in (pair for same in missing.values() for pair in same):
            conversation.add_response(job.store.known[ask.key])


def _generate(llm: LLM, job: Job, asks: Sequence[Ask]) -> None:
    """Writes responses, each stored when it has ended. Reports tokens per second after every one,
    and every REPORT_EVERY_S while none ends."""
    account, began = job.account, time.monotonic()
    pending = {
        id(response.requests[0]): (ask, response)
        for ask in asks
        for response in [llm.submit(Prompt(None, list(ask.prompt_ids)), ask.params)]
    }
    ended_tokens, reported = 0, began
    try:
        while pending:
            ended = [pending.pop(id(request)) for request in llm.engine.step()]
            for ask, response in ended:
                token_ids = list(response.output().outputs[0].token_ids)
                job.store.add(ask.key, token_ids)
                account.written += 1
                account.tokens += len(token_ids)
                ended_tokens += len(token_ids)
            now = time.monotonic()
            if ended or now - reported > REPORT_EVERY_S:
                reported = now
                running = sum(
                    len(request.token_ids) - request.num_prompt_tokens
                    for request in llm.engine.scheduler.running
                )
                speed = (ended_tokens + running) / max(now - began, 1e-9)
                job.report(f"{speed:.0f} tokens/s")
    finally:
        for _, response in pending.values():  # an error or an interrupt: leave the engine usable
            llm.abort(response.request_id)
