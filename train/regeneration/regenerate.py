"""Responses written by the target itself, so that a head learns what it will be asked to predict.

Every conversation becomes a prompt, or several one after another (`train.regeneration.conversations`), and the target
continues each at the recipe's sampling settings: here, batch by batch, or at endpoints, many at a time
(`train.regeneration.endpoint_writer`). What is written is kept by content (`train.regeneration.store`), so a killed run
continues where it was and a changed target, template or setting starts afresh. Written here, a chunk of responses
counts only whole: the batches after a kill are those there would have been, and so are the responses, also where low
precision makes a token depend on its batch. Knows nothing of drafters, losses or packing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference import LLM
from inference.entrypoints.loading import end_of_sequence_ids, saved_ending_tokens
from speculators.errors import ConfigError, DataError
from train.data.loss_mask import ConversationTokenizer
from train.data.sources import Example
from train.recipe.data_sections import RegenerateSection, TemperatureShare
from train.recipe.recipe import Recipe
from train.regeneration.conversations import Account, Conversation
from train.regeneration.endpoint_client import TargetFacts
from train.regeneration.endpoint_writer import FailureList, write_there
from train.regeneration.record import Record
from train.regeneration.store import Response, ResponseStore, digest, part_suffix

Progress = Callable[[int, int, str], None]  # done, total, a note
Say = Callable[[str], None]


def temperatures_of(shares: Sequence[TemperatureShare], count: int) -> list[float]:
    """The temperature of each of `count` examples: the shares of the recipe, spread evenly and in a fixed order."""
    spent = [0.0] * len(shares)
    chosen = []
    for i in range(count):
        behind = [entry.share * (i + 1) - done for entry, done in zip(shares, spent)]
        index = max(range(len(behind)), key=behind.__getitem__)
        spent[index] += 1
        chosen.append(shares[index].temperature)
    return chosen


def settings_hash(section: RegenerateSection, target_hash: str) -> str:
    """What every response depends on beside its prompt: the target's weights and the sampling settings, and that its
    tokens are those of a text, where they are."""
    settings = {"target": target_hash, **section.model_dump(include={"top_p", "top_k", "max_new_tokens", "seed"})}
    if section.endpoints and section.exchange == "text":
        settings["text"] = section.unproved_tokens
    return digest(settings, 16)


def target_facts(llm: LLM, name: str, template_kwargs: dict[str, Any] | None = None) -> TargetFacts:
    """Of a target that is loaded."""
    return TargetFacts(
        name=name,
        max_model_len=llm.engine.max_model_len,
        vocab_size=llm.engine.target.vocab_size,
        end=tuple(sorted(end_of_sequence_ids(llm.engine.target, llm.get_tokenizer()))),
        tokenizer=llm.get_tokenizer(),
        template_kwargs=template_kwargs or {},
    )


def facts_of(recipe: Recipe, tokenizer: Any) -> TargetFacts:
    """Of the recipe's target from its config alone."""
    t = recipe.target
    sketch, source = t.sketch(), {"revision": t.revision, "trust_remote_code": t.trust_remote_code}
    return TargetFacts(
        name=t.model,
        max_model_len=getattr(sketch.config, "max_position_embeddings", None) or recipe.data.max_length,
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

    llm            the target; with endpoints it is what they are compared with, and None where it is not loaded
    facts          of the target, needed without `llm`
    temperatures   one per example, in place of the recipe's shares
    part           (i, n): only every n-th conversation from the i-th on, for several processes that share the work
    retry_failed   ask again for what an earlier run went without (`max_failures`)
    record         keeps what was written by whom and how

    A prompt that leaves no room in `max_length` is left out; DataError if none is left, or if more responses fail than
    `max_failures` allows. EndpointError: the endpoints are not there, or serve something else.
    """
    if llm is not None:
        facts = facts or target_facts(llm, str(llm.engine.target.name_or_path), tokenizer.template_kwargs)
    if facts is None:
        raise ConfigError("regenerate: without a target that is loaded, its facts are needed")
    temperatures = temperatures if temperatures is not None else temperatures_of(section.temperatures, len(examples))
    facts = replace(facts, max_model_len=min(max_length, facts.max_model_len))
    room, account = facts.max_model_len - 2, Account()
    conversations = [
        Conversation(i, example, temperature, tokenizer, section, room=room, end=frozenset(facts.end), account=account)
        for i, (example, temperature) in enumerate(zip(examples, temperatures, strict=True))
        if i % part[1] == part[0]
    ]
    name = settings_hash(section, target_hash)
    store, suffix = ResponseStore(folder, name, part), part_suffix(part)
    failures = FailureList(folder / f"{name}{suffix}.failures.jsonl", retry=retry_failed)

    def tell(note: str = "") -> None:
        if progress is not None:
            progress(account.done, account.total, note)

    writer: dict[str, Any] = {}
    try:
        if section.endpoints:
            writer = {"endpoints": write_there(conversations, store, account, section, facts, llm, failures, tell, say)}
        else:
            if llm is None:
                raise ConfigError("regenerate.endpoints: empty, and the target is not loaded; name the servers")
            writer = {"here": str(llm.engine.target.dtype).removeprefix("torch.")}
            _write_here(llm, conversations, store, account, section, failures, tell)
        assert account.settled, f"responses unaccounted for: {account}"
        if conversations and account.total == 0:
            raise DataError(
                f"regenerate: all {len(conversations)} prompts are longer than {room} tokens; raise data.max_length"
            )
        failures.judge(account, section, store)
    finally:
        store.close()
        if record is not None:
            record.write(folder / f"{name}{suffix}.json", section, account, writer)
    return [response for conversation in conversations for response in conversation.responses]


def _write_here(
    llm: LLM,
    conversations: Sequence[Conversation],
    store: ResponseStore,
    account: Account,
    section: RegenerateSection,
    failures: FailureList,
    tell: Callable[[], None],
) -> None:
    """The first turn of all of them, then the second, …: batches are the same whatever was written before."""
    pending = list(conversations)
    while True:
        asked = []
        for conversation in pending:
            if (ask := conversation.ask()) is None:
                continue
            if ask.key not in store.known and (reason := failures.earlier(ask.key, section, store)) is not None:
                account.failed[reason] += 1
                conversation.fail()
                continue
            asked.append((conversation, ask))
        if not asked:
            return
        missing = list({ask.key: ask for _, ask in asked if ask.key not in store.known}.values())
        account.reused += len(asked) - len(missing)
        tell()
        missing.sort(key=lambda ask: len(ask.prompt_ids))  # like lengths together: little padding
        for start in range(0, len(missing), 8 * section.batch_size):
            chunk = missing[start : start + 8 * section.batch_size]
            prompts = [{"prompt_token_ids": list(ask.prompt_ids)} for ask in chunk]
            outputs = llm.generate(prompts, [ask.params for ask in chunk], use_tqdm=False)
            written = [list(output.outputs[0].token_ids) for output in outputs]
            store.add_chunk({ask.key: ids for ask, ids in zip(chunk, written, strict=True)})
            account.written += len(chunk)
            account.tokens += sum(map(len, written))
            tell()
        for conversation, ask in asked:
            conversation.tell(store.known[ask.key])
        pending = [conversation for conversation, _ in asked]
