"""Responses written by the target itself, so that a head learns the text that it will be asked to
predict.

Every conversation becomes one prompt or several (conversations.py), and the target continues each
with the recipe's sampling settings: in this process (writers.py) or at servers (servers.py).
Responses are stored by content when they have ended (store.py): a kill loses those in flight and no
other, and a changed target, template or setting starts afresh. What is written after a kill has
other neighbours in its batch, so that in low precision a token may differ."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.inference import LLM
from draftsmith.inference.progress import Advance, unwatched
from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.train.data.examples import Example
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.packing import thinks
from draftsmith.train.recipe.data_sections import RegenerateSection, deal_temperatures
from draftsmith.train.regeneration.conversations import (
    Account,
    Conversation,
    ConversationRules,
    TargetFacts,
)
from draftsmith.train.regeneration.store import Record, Response, ResponseStore, digest
from draftsmith.train.regeneration.writers import LocalWriter, UnreadStates, Writer

SAMPLING = {"temperatures", "top_p", "top_k", "max_new_tokens", "turns"}
Say = Callable[[str], None]


def regenerate(
    llm: LLM | None,
    examples: Sequence[Example],
    tokenizer: ConversationTokenizer,
    section: RegenerateSection,
    *,
    facts: TargetFacts,
    target_hash: str,
    folder: Path,
    max_length: int,
    prompts: Sequence[tuple[int, ...]] | None = None,
    temperatures: Sequence[float] | None = None,
    progress: Advance = unwatched,
    say: Say = lambda text: None,
    part: tuple[int, int] = (0, 1),
    record: Record | None = None,
    unread: UnreadStates | None = None,
    make_llm: Callable[[], LLM] | None = None,
) -> list[Response]:
    """The target's responses to `examples`, turn by turn and in order.

    llm            the target; servers are compared with it; None where it is not loaded
    prompts        of the last response of each example, tokenised; None: they are made here
    temperatures   one per example, in place of the recipe's shares
    part           (i, n): only every n-th conversation from the i-th on, for several processes
    record         where the account is kept
    unread         the hidden states that servers leave of responses, if they extract any
    make_llm       the target in this process, loaded once a response is missing

    A prompt that leaves no room in `max_length` is left out and counted; DataError if none is left.
    EndpointError: the servers are not there, serve something else, or have all failed."""
    longest = min(max_length, facts.max_model_len)
    if llm is not None:
        longest = min(longest, llm.engine.max_model_len)
    facts = replace(facts, max_model_len=longest)
    temperatures = temperatures or deal_temperatures(section.temperatures, len(examples))
    account = Account()
    rules = ConversationRules(section, tokenizer, account, facts)
    asked = list(zip(examples, temperatures, strict=True))
    conversations = [
        Conversation(i, *asked[i], rules, prompts) for i in range(part[0], len(asked), part[1])
    ]
    store = ResponseStore(folder, store_name(section, target_hash))
    writer = _writer(llm, make_llm, rules, say, unread)
    try:
        _write_all(conversations, writer, store, account, _reporter(account, writer, progress))
    except KeyboardInterrupt:
        say(f"      stopped: {account.written} responses written and kept; again, it goes on")
        raise
    finally:
        writer.close()
        store.close()
        if record is not None:
            record.add(store.name, _recorded(section, account, store))
    whole = part[1] == 1  # of a part all conversations may be too long
    cause = "raise it" if longest >= max_length else f"the target's context is {longest} tokens"
    _check(account, bool(conversations) and whole, cause)
    for line in account.lines(thinks=thinks(tokenizer)):
        say(f"      {line}")
    return [response for conversation in conversations for response in conversation.responses]


def _check(account: Account, needed: bool, cause: str) -> None:
    """Every response is accounted for. DataError: responses are `needed`, and no prompt leaves room
    for one; `cause`: why, or what to do."""
    assert account.done == account.total, f"responses unaccounted for: {account}"
    if needed and account.total == 0:
        raise DataError(f"{account}; {cause}", where="data.max_length")


def store_name(section: RegenerateSection, target_hash: str) -> str:
    """The name of a store: a hash of what its responses depend on beside their prompts."""
    settings = section.model_dump(include={"top_p", "top_k", "max_new_tokens"})
    return digest({"target": target_hash, **settings}, 16)


def _recorded(section: RegenerateSection, account: Account, store: ResponseStore) -> dict[str, Any]:
    """How responses were written, and by whom, for the record of the run."""
    sampling = section.model_dump(mode="json", include=SAMPLING)
    return {**sampling, "account": vars(account), "written_by": dict(store.written_by)}


def _writer(
    llm: LLM | None,
    make_llm: Callable[[], LLM] | None,
    rules: ConversationRules,
    say: Say,
    unread: UnreadStates | None,
) -> Writer:
    if rules.section.endpoints:
        from draftsmith.train.regeneration.servers import ServerWriter

        return ServerWriter(rules, llm, say, unread)
    if llm is not None:
        return LocalWriter(lambda: llm, 8 * rules.section.batch_size)
    if make_llm is None:
        raise ConfigError("empty, and the target is not loaded here", where="regenerate.endpoints")
    return LocalWriter(make_llm, 8 * rules.section.batch_size)


def _write_all(
    conversations: Sequence[Conversation],
    writer: Writer,
    store: ResponseStore,
    account: Account,
    report: Callable[[], None],
) -> None:
    """Settles all conversations, from the store or by the writer."""
    # similar lengths together: little padding
    ready = deque(sorted(conversations, key=lambda conversation: conversation.length))
    under_way: dict[str, list[Conversation]] = {}  # equal asks are written once
    while ready or under_way:
        while ready and len(under_way) < writer.capacity:
            conversation = ready.popleft()
            ask = conversation.ask()
            while ask is not None and ask.key in store.known:
                account.reused += 1
                conversation.add_response(store.known[ask.key].unpacked())
                ask = conversation.ask()
            if ask is not None and ask.key not in under_way:
                writer.begin(ask)
            if ask is not None:
                under_way.setdefault(ask.key, []).append(conversation)
        for written in writer.collect() if under_way else ():
            same = under_way.pop(written.ask.key)
            if written.token_ids is None:
                for conversation in same:
                    conversation.leave_out(written.reason)
                continue
            store.add(written.ask.key, written.token_ids, written.engine)
            account.written += 1
            account.reused += len(same) - 1
            account.tokens += len(written.token_ids)
            for conversation in same:
                conversation.add_response(written.token_ids)
            ready.extendleft(same)
        report()


def _reporter(account: Account, writer: Writer, progress: Advance) -> Callable[[], None]:
    """Reports responses, and tokens per second, those under way included."""
    began = time.monotonic()

    def report() -> None:
        tokens = account.tokens + writer.tokens_under_way
        speed = tokens / max(time.monotonic() - began, 1e-9)
        note = f"{tokens:,} tokens, {speed:,.0f} tokens/s" if tokens else "reading prompts"
        progress(account.done, note, account.total)

    return report
