"""How hidden states come from a server to this process: through files in a folder that both see,
or through Mooncake. Both are read with `hs-connectors`, and are gone once they are read."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from hs_connectors import FP8Transfer, HiddenStatesTransfer
from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig
from hs_connectors.transfer import wait_for_lock
from rich.filesize import decimal as size_text
from safetensors import SafetensorError
from torch import Tensor

from draftsmith.speculators.errors import ConfigError

TIMEOUT_S = 300.0  # that a server may take to write the states of a text


class WrongStates(Exception):
    """What a server left is not what was asked for."""


class Transfer(Protocol):
    """How states come from a server to this process."""

    def take(self, params: dict[str, Any], folder: Path) -> dict[str, Tensor]:
        """The tensors `token_ids` [T] and `hidden_states` [T, layers, H], which are then gone at
        the other end. WrongStates: there are none."""
        ...

    def remove_left_over(self, folder: Path, run: str) -> None:
        """Removes what was left for a run."""
        ...


class Files:
    """Safetensors files in a folder that the server and this process see."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._reader: HiddenStatesTransfer = FP8Transfer(Path(), dequantize_dtype=dtype)

    def take(self, params: dict[str, Any], folder: Path) -> dict[str, Tensor]:
        """Reads the file of a request, [T, layers, H] among its tensors, and removes it.
        WrongStates: it lies elsewhere, cannot be read or removed, or is not there."""
        path = Path(str(params.get("hidden_states_path")))
        if path.parent.resolve() != folder.resolve():  # nothing else is ever read
            if path.parent.parent.resolve() == folder.parent.resolve():  # states of other layers
                discard(params, folder.parent)
            raise WrongStates(
                f"writes its states to {path.parent}, expected {folder}: another model, other"
                " layers, another dtype or another folder"
            )
        try:
            tensors = self._load(params)
        except (OSError, SafetensorError) as error:
            raise WrongStates(
                f"left a file that cannot be read, {path} ({_room(folder)}): {error}"
            ) from None
        finally:
            _remove(path)
        if tensors is None:
            raise WrongStates(
                f"says that its states lie in {path}, where this process finds none"
                f" ({_room(folder)}); it needs a folder that both see, with room for"
                " features.unread_gb"
            )
        if path.exists():  # else the folder fills up, which may be memory
            raise WrongStates(
                f"left its states in {path}, which this process may read and not remove; let both"
                " run as one user, or give this one write access to that folder"
            )
        return tensors

    def _load(self, params: dict[str, Any]) -> dict[str, Tensor] | None:
        """Waits while the server writes. `hs-connectors` gives up after ten seconds, which the
        states of a long text may take."""
        until = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return self._reader.get_generated(params)
            except TimeoutError:
                if time.monotonic() > until:
                    raise

    def remove_left_over(self, folder: Path, run: str) -> None:
        """Removes the files of requests of `run` that nobody has read."""
        for path in folder.glob(f"cmpl-{run}-*"):
            path.unlink(missing_ok=True)


class Mooncake:
    """A distributed store, for servers that share no folder with this process. What a server has
    put for a run that was killed is evicted by the store itself, which cannot be listed."""

    def __init__(self, master: str, unread_bytes: float) -> None:
        """`master`: HOST:PORT. ConfigError: its package is not installed, it does not answer, or
        this machine's name has no address."""
        try:
            config = MooncakeStoreConfig(
                local_hostname=own_address(),
                master_server_address=master,
                local_buffer_size=round(unread_bytes),
            )
            self._store = MooncakeHiddenStatesStore(config)
            self._store.setup()
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(str(error), where=f"features.mooncake {master}") from error
        self._reading = threading.Lock()

    def take(self, params: dict[str, Any], folder: Path) -> dict[str, Tensor]:
        """Reads the states of a request and deletes them in the store. WrongStates: they are not
        there within TIMEOUT_S seconds."""
        try:
            with self._reading:
                tensors = self._store.get_sample(params, timeout=TIMEOUT_S)
                self._store.delete_sample(params["handle"])
        except (KeyError, RuntimeError, TimeoutError) as error:
            raise WrongStates(f"left no states in Mooncake: {error}") from None
        return tensors

    def remove_left_over(self, folder: Path, run: str) -> None:
        """Nothing: the store evicts them."""


def own_address() -> str:
    """The address that this machine's clients of Mooncake are reached at: as `hs-connectors` finds
    it, for its servers too."""
    address = os.environ.get("MOONCAKE_LOCAL_HOSTNAME")
    return address or socket.gethostbyname(socket.gethostname())


def run_name(output_dir: str | Path, process: int | str) -> str:
    """The beginning of the names of all requests of a process of a run: the same at each start, and
    no other's that writes to the same folder."""
    folder = str(Path(output_dir).absolute()).encode()
    return f"ds-{hashlib.blake2b(folder, digest_size=6).hexdigest()}-{process}"


class ResponseStates:
    """Hidden states of responses, in files that nobody reads: a server that extracts states leaves
    them of every request.

    root: the folder that the servers' folders lie in. run: the beginning of the requests' names;
    files of this name are removed, of an earlier start too."""

    def __init__(self, root: Path, run: str) -> None:
        self.root = root
        self.run = run
        self._numbers = itertools.count()

    def request_name(self) -> str:
        """A name for the next request, which the names of its files are made of."""
        return f"{self.run}-{next(self._numbers)}"

    def discard(self, params: dict[str, Any]) -> None:
        """Removes the file of a request, by the kv_transfer_params of its answer."""
        discard(params, self.root)

    def remove_left_over(self) -> None:
        """Removes the files of requests that had no answer: this process or a server was killed."""
        for path in self.root.glob(f"*/*cmpl-{self.run}-*"):
            path.unlink(missing_ok=True)


def discard(params: dict[str, Any], root: Path) -> None:
    """Removes the file of a request whose states are not needed, once it is written: a server that
    extracts states does it for every request. `root`: nothing elsewhere is removed."""
    path = Path(str(params.get("hidden_states_path"))).absolute()
    if root.resolve() not in path.resolve().parents:
        return
    with suppress(OSError):
        wait_for_lock(f"{path}.lock", timeout=TIMEOUT_S)
    _remove(path)


def _room(folder: Path) -> str:
    if not folder.is_dir():
        return "that folder is not there"
    return f"{size_text(shutil.disk_usage(folder).free)} are free there"


def _remove(path: Path) -> None:
    for left in (path, Path(f"{path}.lock")):
        with suppress(OSError):
            left.unlink()
