"""Hidden states of texts from running vLLM servers, by their method `extract_hidden_states`.

A request is one text and asks for one token; its answer names the file that holds the text's
states (`kv_transfer_params`). The file is read and deleted (transfers.py), and checked here.

A text is asked for again if its states are missing, of another text or not finite. A server that
fails is left alone for a while, then checked and asked again; the run stops once no server has
worked for PATIENCE_S. No more than a stated number of bytes is under way or lies unread.

The names of files begin with the run's, so that the next start of a run that was killed removes
what was left for it (`remove_left_over`)."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import torch
from openai import OpenAI
from torch import Tensor

from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.train.features.states_spec import StatesSpec
from draftsmith.train.features.transfers import Files, Mooncake, Transfer, WrongStates
from draftsmith.train.recipe.data_sections import EndpointSection
from draftsmith.train.recipe.endpoints import (
    REFUSALS,
    EndpointError,
    answers_of,
    api_key,
    base_url,
    card_of_target,
    failure,
    require_length,
)

WHERE = "features.endpoints"
TIMEOUT_S = 300.0  # of one text
TRIES = 3  # of a text whose states are not what was asked for
FIRST_PAUSE_S = 5.0  # of a server that failed; it doubles with each failure that follows
LONGEST_PAUSE_S = 300.0
MOST_DOUBLED = 16  # times that a pause doubles: 2 ** 1024 is no float, after days without a server
PATIENCE_S = 90.0  # in which no server works
PROBE = tuple(range(8))  # the text that a server is checked with: ids that every vocabulary has
TOLERANCE = 0.02  # of the logits' range, by which a server's greedy token may miss the largest
DO = "start it with the command that `draftsmith serving-args RECIPE` prints"


class StateServer:
    """One server. `in_flight`, `failures` and `retry_at` are its pool's account of it; `checked`:
    nothing has failed since it was checked."""

    def __init__(
        self, section: EndpointSection, spec: StatesSpec, folder: Path, transfer: Transfer
    ) -> None:
        self.section = section
        self.spec = spec
        self.folder = folder
        self.url = base_url(section)
        self.model = spec.model
        self.in_flight = 0
        self.failures = 0
        self.retry_at = 0.0
        self.checked = False
        self._transfer = transfer
        self._client = OpenAI(
            base_url=self.url, api_key=api_key(section, WHERE), timeout=TIMEOUT_S, max_retries=0
        )

    def check(self, head: TargetHead, name: str) -> None:
        """EndpointError unless it gives the states of the spec, of the target that `head` is of.

        `name`: of the request. The greedy token of the server has to be the one that the head
        finds in its last state, within TOLERANCE: else its weights are another model's."""
        with answers_of(self.url):
            cards = list(self._client.models.list().data)
        card = card_of_target(cards, self.spec.model, self.url)
        self.model = card.id
        require_length(card, self.spec.longest + 1, self.url)
        answer = self._complete(PROBE, name)
        try:
            states = self._read(answer, PROBE)
        except WrongStates as error:
            raise EndpointError(f"{error}; {DO}", where=self.url) from None
        with answers_of(self.url):
            token = answer.choices[0].token_ids[0]
        residual = states[-1, -1].to(head.device, head.dtype)
        logits = head.logits(head.final_norm(residual)).float()
        missing = float(logits.max() - logits[token]) if token < len(logits) else float("inf")
        if missing > TOLERANCE * float(logits.max() - logits.min()):
            raise EndpointError(
                f"continues a text with token {token}, which the output head of"
                f" {self.spec.model} does not find in its last hidden state: another model or"
                f" revision, or other layers; {DO}",
                where=self.url,
            )
        self.checked = True

    def states(self, text: Sequence[int], name: str) -> Tensor:
        """[T, layers, H] of a text of T tokens. `name`: of the request, and of the file.

        openai.APIError: the server failed. WrongStates: it left something else."""
        return self._read(self._complete(text, name), text)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _complete(self, text: Sequence[int], name: str) -> Any:
        with answers_of(self.url):
            return self._client.completions.create(
                model=self.model,
                prompt=list(text),
                max_tokens=1,
                temperature=0,
                extra_body={"return_token_ids": True},
                extra_headers={"X-Request-Id": name},
            )

    def _read(self, answer: Any, text: Sequence[int]) -> Tensor:
        params = getattr(answer, "kv_transfer_params", None)
        if not params:
            raise WrongStates(
                "answers without hidden states (kv_transfer_params): it runs without"
                " extract_hidden_states, which vLLM has since 0.18"
            )
        tensors = self._transfer.take(params, self.folder)
        tokens = tensors["token_ids"].tolist()
        states = tensors["hidden_states"]
        spec = self.spec
        expected = (len(text), len(spec.layers), spec.hidden_size)
        if tokens != list(text):
            raise WrongStates(f"gives the states of another text, of {len(tokens)} tokens")
        if tuple(states.shape) != expected:
            raise WrongStates(
                f"gives states {list(states.shape)}, expected [tokens, layers, size] ="
                f" {list(expected)}"
            )
        if states.dtype != spec.dtype:
            raise WrongStates(f"gives states in {states.dtype}, expected {spec.dtype}")
        if not torch.isfinite(states).all():
            raise WrongStates(f"gives states of {len(text)} tokens that are not finite")
        return states


class StateServers:
    """The servers of a recipe, in turn.

    root: the folder that the states' folder lies in. run: as `run_name` makes it.
    mooncake: HOST:PORT of a Mooncake master, in place of the folder.
    unread_bytes: of states that are under way or lie unread, at most, but one text always; and of
    those that `of` holds for its caller, as many again.

    `of` may be called from several threads at once."""

    def __init__(
        self,
        sections: Sequence[EndpointSection],
        spec: StatesSpec,
        *,
        root: Path,
        run: str,
        unread_bytes: float,
        say: Callable[[str], None],
        mooncake: str | None = None,
        patience_s: float = PATIENCE_S,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self.spec = spec
        self.folder = root / spec.label
        self.run = run
        self.unread_bytes = unread_bytes
        self.say = say
        self.patience_s = patience_s
        self.first_pause_s = first_pause_s
        self._transfer: Transfer = Files(spec.dtype)
        if mooncake is not None:
            self._transfer = Mooncake(mooncake, unread_bytes)
        self.servers = [
            StateServer(section, spec, self.folder, self._transfer) for section in sections
        ]
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._unread = 0
        self._head: TargetHead | None = None
        self._none_since: float | None = None  # when the last server that worked failed
        self._last_failure = ""
        self._threads = ThreadPoolExecutor(
            sum(section.max_concurrency for section in sections), "hidden-states"
        )

    @property
    def capacity(self) -> int:
        """Requests under way at once, at most."""
        return sum(server.section.max_concurrency for server in self.servers)

    def check(self, head: TargetHead) -> None:
        """Removes what an earlier start of this run left, and checks every server.

        EndpointError: one gives other states than the spec's, or none answers. One that does not
        answer is asked again later."""
        self._head = head
        self._transfer.remove_left_over(self.folder, self.run)
        for server in self.servers:
            try:
                server.check(head, self._name())
            except openai.APIError as error:
                self._failed(server, error)
        if self._none_since is not None:
            raise self._none_left()

    def of(self, texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """[T, layers, H] of each text in its order, on the CPU. EndpointError as for `check`, and
        for a text that no server gives the states of."""
        pending: deque[tuple[Future[Tensor], int]] = deque()
        held = 0
        try:
            for text in texts:
                size = self.spec.bytes_of(len(text))
                while pending and held + size > self.unread_bytes:
                    future, taken = pending.popleft()
                    yield future.result()
                    held -= taken
                pending.append((self._threads.submit(self._ask, text), size))
                held += size
            while pending:
                yield pending.popleft()[0].result()
        finally:
            for future, _ in pending:
                future.cancel()

    def close(self) -> None:
        """Waits for what is under way, and removes what nobody reads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(cancel_futures=True)
        for server in self.servers:
            server.close()
        with suppress(OSError):  # it would hide the error that ends the run; the next start says so
            self._transfer.remove_left_over(self.folder, self.run)

    # ------------------------------------------------------------------ in the threads

    def _ask(self, text: Sequence[int]) -> Tensor:
        """The states of one text, by whichever server has room."""
        wrong = 0
        size = self.spec.bytes_of(len(text))
        while True:
            server = self._take_slot(size)
            try:
                states = self._states(server, text)
            except WrongStates as error:
                wrong += 1
                if wrong == TRIES:
                    raise EndpointError(
                        f"{error}; asked {TRIES} times for a text of {len(text)} tokens that begins"
                        f" {list(text[:8])}",
                        where=server.url,
                    ) from None
            except (openai.APIError, EndpointError) as error:
                if getattr(error, "status_code", None) in REFUSALS:
                    raise EndpointError(
                        f"refuses a text of {len(text)} tokens: {str(error)[:300]}",
                        where=server.url,
                    ) from None
                self._failed(server, error)
            else:
                self._answered(server)
                return states
            finally:
                self._give_slot(server, size)

    def _states(self, server: StateServer, text: Sequence[int]) -> Tensor:
        """Of a server that may have been started anew since it failed, and otherwise."""
        assert self._head is not None, "check the servers first"
        if not server.checked:
            server.check(self._head, self._name())
        return server.states(text, self._name())

    def _take_slot(self, size: int) -> StateServer:
        """The server with the least under way for its room, for states of `size` bytes. Waits for
        one, and for room to leave them in."""
        with self._changed:
            while True:
                if self._closed:
                    raise EndpointError("was closed while a text was asked for", where=WHERE)
                now = time.monotonic()
                usable = [server for server in self.servers if server.retry_at <= now]
                free = [s for s in usable if s.in_flight < s.section.max_concurrency]
                if free and (not self._unread or self._unread + size <= self.unread_bytes):
                    self._unread += size
                    server = min(free, key=lambda s: s.in_flight / s.section.max_concurrency)
                    server.in_flight += 1
                    return server
                since = self._none_since
                if since is not None and now - since > self.patience_s:
                    raise self._none_left()
                self._changed.wait(1.0 if usable else self._until_next(now))

    def _until_next(self, now: float) -> float:
        """Seconds until a server that failed is asked again, a second at most: patience may end."""
        next_try = min(server.retry_at for server in self.servers) - now
        return min(1.0, max(0.01, next_try))

    def _give_slot(self, server: StateServer, size: int) -> None:
        with self._changed:
            self._unread -= size
            server.in_flight -= 1
            self._changed.notify_all()

    def _answered(self, server: StateServer) -> None:
        with self._changed:
            if server.failures:
                self.say(f"      {server.url} answers again")
            server.failures = 0
            server.retry_at = 0.0
            self._none_since = None

    def _failed(self, server: StateServer, error: Exception) -> None:
        """Leaves a server alone for a while."""
        with self._changed:
            now = time.monotonic()
            self._last_failure = failure(server.url, error)
            if server.retry_at > now:  # by a request that failed with it
                return
            if not server.failures:
                self.say(f"      warning: a server is left alone for now: {self._last_failure}")
            pause = self.first_pause_s * 2 ** min(server.failures, MOST_DOUBLED)
            server.checked = False
            server.failures += 1
            server.retry_at = now + min(LONGEST_PAUSE_S, pause)
            if self._none_since is None and all(s.failures for s in self.servers):
                self._none_since = now

    def _none_left(self) -> EndpointError:
        return EndpointError(
            f"no server answers; the last was {self._last_failure}. The same command goes on from"
            " the last checkpoint",
            where=WHERE,
        )

    def _name(self) -> str:
        return f"{self.run}-{next(self._numbers)}"
