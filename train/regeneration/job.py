"""Shared by the two writers of responses, this process and the endpoints: the responses of one run,
and the list of those that failed for good."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from speculators.errors import DataError
from train.recipe.data_sections import RegenerateSection
from train.regeneration.conversations import Account, Ask, Conversation
from train.regeneration.store import ResponseStore

SURPLUS = 100  # failures beyond those allowed, after which the run stops


class GaveUp(Exception):
    """A response that failed for good. `url`: the endpoint of the last attempt."""

    def __init__(self, reason: str, detail: str, attempts: int, url: str) -> None:
        super().__init__(reason)
        self.reason, self.detail, self.attempts, self.url = reason, detail, attempts, url


@dataclass
class Job:
    """The responses of one run.

    failure_list   JSONL file of the responses that failed, written anew by every run
    retry_failed   ask again for those that an earlier run went without
    report         called with a note after every step
    """

    conversations: Sequence[Conversation]
    store: ResponseStore
    account: Account
    section: RegenerateSection
    failure_list: Path
    retry_failed: bool
    report: Callable[[str], None]

    def __post_init__(self) -> None:
        self._failed: dict[str, str] = {}  # reasons by key, of this run

    def settle_known(self, conversation: Conversation, ask: Ask) -> bool:
        """Settles a response that is stored, or that an earlier run went without. False: it must be
        written."""
        if (token_ids := self.store.known.get(ask.key)) is not None:
            self.account.reused += 1
            conversation.add_response(token_ids)
            return True
        remembered = (
            {} if self.retry_failed or self.section.max_failures == 0 else self.store.given_up
        )
        if (reason := remembered.get(ask.key)) is not None:
            self.account.failed[reason] += 1
            conversation.fail()
            return True
        return False

    def fail(self, conversation: Conversation, ask: Ask, failure: GaveUp) -> None:
        """Lists a failure. DataError once far more have failed than are allowed."""
        entry = {
            "origin": ask.example.origin,
            "conversation": ask.number,
            "turn": ask.turn,
            "key": ask.key,
            "reason": failure.reason,
            "attempts": failure.attempts,
            "endpoint": failure.url,
            "detail": failure.detail,
        }
        self.failure_list.parent.mkdir(parents=True, exist_ok=True)
        with self.failure_list.open("a" if self._failed else "w", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self._failed[ask.key] = failure.reason
        self.account.failed[failure.reason] += 1
        conversation.fail()
        self._require_few_failures(SURPLUS)

    def finish(self) -> None:
        """Remembers the failures as responses to go without. DataError if they are more than are
        allowed."""
        self._require_few_failures(0)
        self.store.give_up(self._failed)
        if not self.account.failed:
            self.failure_list.unlink(missing_ok=True)

    def _require_few_failures(self, surplus: int) -> None:
        share = self.section.max_failures
        if self.account.failed.total() > share * self.account.wanted + surplus:
            raise DataError(
                f"regenerate: {self.account}; {share:.2%} may fail (regenerate.max_failures). What"
                f" was written is kept and the failures are listed in {self.failure_list}; the same"
                " command asks for them again"
            )
