"""Hidden states of training rows from running vLLM servers, as a source."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.train.data.packing import PackedRow
from draftsmith.train.features.cache import texts_of
from draftsmith.train.features.source import FeatureSource, RowStates, states_of_row
from draftsmith.train.features.state_servers import StateServers

MOST_READERS = 32


class Servers(FeatureSource):
    """Each text of a row is a request of its own.

    servers: checked; closed with the source. head: norms the states before the final norm."""

    waits = True

    def __init__(self, servers: StateServers, head: TargetHead) -> None:
        self.servers = servers
        self.head = head
        self.readers = min(MOST_READERS, servers.capacity)

    @property
    def device(self) -> torch.device:
        """The head's, where the states go."""
        return self.head.device

    def close(self) -> None:
        """Closes the connections to the servers."""
        self.servers.close()

    def fetch(self, row: PackedRow) -> list[Tensor]:
        """The states of the row's texts, [L_i, layers, H] each. EndpointError: nobody has them."""
        texts = [row.input_ids[place].tolist() for _, place in texts_of(row)]
        states = list(self.servers.of(texts))
        if self.device.type == "cuda":
            states = [part.pin_memory() for part in states]
        return states

    def states(self, row: PackedRow, fetched: Sequence[Tensor]) -> RowStates:
        """Taps [L, n·H], or None, and last hidden states [L, H] of a row of L tokens."""
        return states_of_row([features_of_states(self.head, part) for part in fetched])


def features_of_states(head: TargetHead, states: Tensor) -> RowStates:
    """Residual streams [L, layers, H] of taps and before the final norm -> taps [L, n·H], last."""
    # another dtype is made on the device: of pinned memory the host would make a copy that is not
    states = states.to(head.device, non_blocking=True).to(head.dtype)
    taps = states if head.num_layers in head.tap_layers else states[:, :-1]
    return taps.flatten(1) if head.tap_layers else None, head.final_norm(states[:, -1])
