"""A KV connector for vLLM on a CPU: writes what `extract_hidden_states` has cached of a prompt to a
file.

vLLM's own one copies on a CUDA stream and writes in threads; here the memory is the host's, so a
request's states are written when it ends. vLLM imports this file by its name, from an environment
that need not have this project."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import cpu_repairs
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as own

cpu_repairs.repair()  # in each process of vLLM that has the connector


class CpuHiddenStatesConnector(own.ExampleHiddenStatesConnector):
    """vLLM's, but for the writing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._written: set[str] = set()

    def _submit_async_write(self, pending: own.PendingSave) -> None:
        """The states [tokens, layers, H] and the tokens of one request; the file appears whole, or
        not at all where the folder is full: the server goes on, as with vLLM's connector."""
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = own.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        partial = f"{pending.filename}.partial"
        try:
            os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
            save_file(tensors, partial)
            os.replace(partial, pending.filename)
        except (OSError, SafetensorError) as error:
            own.logger.error("Hidden states are not written to %s: %s", pending.filename, error)
            with suppress(OSError):
                os.remove(partial)
        self._written.add(pending.req_id)
        if (lock := self._lock_fds.pop(pending.req_id, None)) is not None:
            os.close(lock)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Writes what has come to its end, and says whose blocks may be freed."""
        if self.has_connector_metadata():
            for pending in getattr(self._get_connector_metadata(), "pending_saves", ()):
                self._submit_async_write(pending)
        self._accumulated_finished_req_ids.update(finished_req_ids)
        done = self._accumulated_finished_req_ids & self._written
        self._accumulated_finished_req_ids.difference_update(done)
        self._written -= done
        return done or None, None
