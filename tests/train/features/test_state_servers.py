"""Hidden states from servers: those of the texts that were asked for, and what becomes of them
where servers fail, answer otherwise or are killed."""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hs_connectors.mooncake_store import (
    MooncakeHiddenStatesStore,
    MooncakeStoreConfig,
    packed_layout,
)
from hs_connectors.transfer import MooncakeBackend
from safetensors.torch import load, save_file

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import PackedRow
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.features.served import Servers
from draftsmith.train.features.serving_args import serving_args, shell_command
from draftsmith.train.features.source import InProcess
from draftsmith.train.features.state_servers import StateServers
from draftsmith.train.features.states_spec import StatesSpec, states_root
from draftsmith.train.recipe.data_sections import EndpointSection
from draftsmith.train.recipe.endpoints import EndpointError
from tests.support.errors import raises_at
from tests.support.state_server import FakeServer, connect, states_of
from tests.support.training import recipe_of

A, B = "http://a/v1", "http://b/v1"
TAPS = (1, 2)
TEXTS = [[5 + (i * 7 + n) % 90 for n in range(3 + i % 5)] for i in range(24)]


@pytest.fixture(scope="module")
def target(tiny_model) -> FrozenTarget:
    model = tiny_model("qwen3", num_hidden_layers=3)
    return FrozenTarget(model, (*TAPS, 3))


@pytest.fixture
def spec(target) -> StatesSpec:
    return StatesSpec("target", (*TAPS, 3), target.hidden_size, torch.float32, longest=32)


@pytest.fixture
def fakes(target, spec, tmp_path, monkeypatch):
    """Two servers, at A and B, that write to one folder."""
    by_url = {url: FakeServer(target, tmp_path / spec.label) for url in (A, B)}
    connect(monkeypatch, by_url)
    return by_url


@pytest.fixture
def servers(fakes, target, spec, tmp_path):
    """servers(*addresses, **options) -> StateServers; `lines`: what was said."""
    running = []

    def make(*urls: str, check: bool = True, **options) -> StateServers:
        sections = [EndpointSection(url=url, max_concurrency=3) for url in urls]
        options = {"run": "r0", "unread_bytes": 1e9, "first_pause_s": 0.01} | options
        servers_of_run = StateServers(
            sections, spec, root=tmp_path, say=make.lines.append, **options
        )
        running.append(servers_of_run)
        if check:
            servers_of_run.check(target)
        return servers_of_run

    make.lines = []
    yield make
    for opened in running:
        opened.close()


def assert_right(states, target) -> None:
    for text, text_states in zip(TEXTS, states, strict=True):
        torch.testing.assert_close(text_states, states_of(target, text)[0])


def test_states_are_those_of_the_texts_in_their_order_and_no_file_stays(
    servers, fakes, target, tmp_path
):
    assert_right(servers(A, B).of(TEXTS), target)
    assert all(len(fake.asked) > 1 for fake in fakes.values())
    assert not list(tmp_path.glob("*/*"))


def test_rows_from_servers_have_the_features_of_the_target(servers, fakes, target):
    """Packed texts, read ahead in several threads."""
    rows = [
        PackedRow.of(*(TokenRow(text, [True] * len(text)) for text in TEXTS[i : i + 3]))
        for i in range(0, 12, 3)
    ]
    steps = ([0, 1], [3, 2])
    expected = [RowFeatures(InProcess(target), rows).of(indices) for indices in steps]
    features = RowFeatures(Servers(servers(A, B), target), rows)
    features.begin(range(len(rows)))
    for indices, theirs in zip(steps, expected, strict=True):
        ours = features.of(indices)
        inside = ours.segment_ids >= 0
        for name in ("taps", "last_hidden"):
            pair = (getattr(features, name)[inside] for features in (ours, theirs))
            torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)
    assert not len(features.ahead)


def test_no_more_than_the_stated_bytes_lie_unread(servers, fakes, spec, tmp_path):
    """Whoever asks: several threads read rows ahead. Files of one size are counted."""
    lying = []
    text = TEXTS[4]
    pool = servers(A, unread_bytes=2 * spec.bytes_of(len(text)))

    def count() -> None:
        time.sleep(0.02)  # others may write theirs
        lying.append(len(list(tmp_path.glob("*/*.safetensors"))))

    fakes[A].unread = count
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda row: list(pool.of(row)), [[text] * 4] * 4))
    assert max(lying) == 2


def test_a_text_that_is_larger_than_the_stated_bytes_is_asked_for_alone(servers, fakes, tmp_path):
    lying = []
    fakes[A].unread = lambda: lying.append(len(list(tmp_path.glob("*/*.safetensors"))))
    assert len(list(servers(A, unread_bytes=1).of(TEXTS))) == len(TEXTS)
    assert set(lying) == {1}


def test_a_server_that_fails_is_left_alone_and_asked_again(servers, fakes, target):
    pool = servers(A, B)
    fakes[B].status = 500
    assert_right(pool.of(TEXTS), target)
    fakes[B].status = 200
    before = len(fakes[B].asked)
    fakes[A].status = 503
    assert_right(pool.of(TEXTS), target)
    assert len(fakes[B].asked) > before
    assert sum("left alone" in line for line in servers.lines) == 2


def test_a_server_that_is_gone_for_days_is_still_asked_again(servers, fakes, target):
    pool = servers(A, B)
    pool.servers[1].failures = 2000
    fakes[B].status = 500
    assert_right(pool.of(TEXTS), target)
    fakes[B].status = 200
    pool.servers[1].retry_at = 0
    assert_right(pool.of(TEXTS), target)
    assert pool.servers[1].failures == 0


def test_no_server_left_is_an_error_that_names_the_last(servers, fakes):
    pool = servers(A, B, patience_s=0.1)
    fakes[A].status = fakes[B].status = 500
    with raises_at(EndpointError, "features.endpoints"):
        list(pool.of(TEXTS))


def test_a_server_that_comes_back_with_other_states_is_not_used(servers, fakes, target):
    pool = servers(A, B)
    fakes[B].status = 500
    assert_right(pool.of(TEXTS), target)
    fakes[B].status = 200
    fakes[B].spoil = lambda tensors, path: (
        tensors | {"hidden_states": tensors["hidden_states"][:, :2]}
    )
    assert_right(pool.of(TEXTS), target)


def spoiled_once(change):
    """A change of the first text after the probe."""
    left = [None, change]

    def spoil(tensors, path):
        now = left.pop(0) if left else None
        return now(tensors) if now else tensors

    return spoil


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: None,
        lambda tensors: tensors | {"token_ids": tensors["token_ids"] + 1},
        lambda tensors: tensors | {"hidden_states": tensors["hidden_states"] * torch.nan},
    ],
    ids=["missing", "another_text", "not_finite"],
)
def test_a_text_without_its_states_is_asked_for_again(servers, fakes, target, change):
    fakes[A].spoil = spoiled_once(change)
    assert_right(servers(A).of(TEXTS), target)
    assert len(fakes[A].asked) == 1 + len(TEXTS) + 1


def test_a_text_that_never_has_its_states_is_reported(servers, fakes):
    pool = servers(A)
    fakes[A].spoil = lambda tensors, path: None
    with raises_at(EndpointError, A):
        list(pool.of(TEXTS))


@pytest.mark.parametrize(
    "damage",
    [
        lambda fake: setattr(fake, "fields", lambda answer: answer | {"kv_transfer_params": None}),
        lambda fake: setattr(fake, "folder", fake.folder.with_name("another")),
        lambda fake: setattr(fake, "limit", 32),
        lambda fake: setattr(
            fake, "spoil", lambda t, p: t | {"hidden_states": t["hidden_states"][:, 1:]}
        ),
        lambda fake: setattr(
            fake, "spoil", lambda t, p: t | {"hidden_states": t["hidden_states"].half()}
        ),
        lambda fake: setattr(
            fake, "spoil", lambda t, p: t | {"hidden_states": -t["hidden_states"]}
        ),
        lambda fake: setattr(fake, "spoil", lambda t, p: None),
        lambda fake: setattr(fake, "page", "<html>Welcome</html>"),
    ],
    ids=["no_method", "folder", "length", "layers", "dtype", "model", "unseen", "web_page"],
)
def test_a_server_of_something_else_is_refused_at_the_start(servers, fakes, damage):
    damage(fakes[B])
    with raises_at(EndpointError, B):
        servers(A, B)


def test_a_server_of_other_layers_leaves_no_file(servers, fakes, tmp_path):
    fakes[A].folder = tmp_path / "target-layers-0-1-2"
    with raises_at(EndpointError, A):
        servers(A)
    assert not list(tmp_path.glob("*/*"))


def test_a_folder_in_which_nothing_may_be_removed_is_refused_at_the_start(
    servers, fakes, tmp_path, monkeypatch
):
    """As where the server is another user's: its files would fill the memory that they lie in."""
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.parent == fakes[A].folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    pool = servers(A, check=False)
    with raises_at(EndpointError, A):
        pool.check(fakes[A].target)
    pool.close()


def test_a_path_elsewhere_is_neither_read_nor_deleted(servers, fakes, tmp_path):
    precious = tmp_path / "precious.safetensors"
    save_file({"token_ids": torch.tensor([1])}, precious)
    fakes[A].fields = lambda answer: (
        answer | {"kv_transfer_params": {"hidden_states_path": str(precious)}}
    )
    with raises_at(EndpointError, A):
        servers(A)
    assert precious.exists()


def test_what_a_killed_run_left_is_removed_and_no_other_run_s(servers, fakes, spec, tmp_path):
    folder = tmp_path / spec.label
    folder.mkdir()
    for run in ("r0", "r1"):
        (folder / f"cmpl-{run}-7-0-ab.safetensors").write_bytes(b"x")
        (folder / f"cmpl-{run}-7-0-ab.safetensors.lock").touch()
    servers(A)
    assert {path.name.split("-")[1] for path in folder.iterdir()} == {"r1"}


class Store:
    """Mooncake's store, in this process."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.put = lambda key, data: self.objects.__setitem__(key, data) or 0
        self.is_exist = lambda key: int(key in self.objects)
        self.get_size = lambda key: len(self.objects[key])
        self.register_buffer = self.unregister_buffer = lambda *_: 0
        self.setup = lambda *_: 0

    def remove(self, key: str, force: bool) -> int:
        return 0 if self.objects.pop(key, None) is not None else -704

    def put_from(self, key: str, pointer: int, size: int) -> int:
        self.objects[key] = ctypes.string_at(pointer, size)
        return 0

    def get_into(self, key: str, pointer: int, size: int) -> int:
        ctypes.memmove(pointer, self.objects[key], size)
        return size


def test_states_through_mooncake_are_taken_out_of_it(
    servers, fakes, target, spec, tmp_path, monkeypatch
):
    """By the protocol of hs-connectors; the store stands in for Mooncake's."""
    store = Store()
    module = types.SimpleNamespace(MooncakeDistributedStore=lambda: store)
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    producer = MooncakeHiddenStatesStore(MooncakeStoreConfig()).setup()

    def put(answer):
        path = Path(answer["kv_transfer_params"]["hidden_states_path"])
        tensors = load(path.read_bytes())
        path.unlink()
        sizes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        specs, total = packed_layout(sizes)
        manifest = {"version": 1, "handle": path.stem, "tensors": specs}
        manifest["metadata"] = {"total_aligned_bytes": total}
        producer.put_sample(manifest, tensors)
        return answer | {"kv_transfer_params": manifest}

    fakes[A].fields = put
    assert_right(servers(A, mooncake="master:50051").of(TEXTS), target)
    assert not store.objects


def test_mooncake_that_is_not_installed_is_named(servers):
    with raises_at(ConfigError, "features.mooncake master:50051"):
        servers(A, mooncake="master:50051")


def test_servers_over_mooncake_are_started_as_hs_connectors_starts_them(spec, tmp_path):
    """The line that is printed, read by a shell on a machine with two addresses."""
    features = {"engine": "vllm", "mooncake": "master:50051", "endpoints": [A]}
    recipe = recipe_of("eagle3", features=features)
    parser = argparse.ArgumentParser()
    MooncakeBackend.add_launch_args(parser)
    options = parser.parse_args(["--mooncake-master", "master:50051"])
    expected = MooncakeBackend.build_kv_transfer_config(options)
    expected["kv_connector_extra_config"]["mooncake"]["local_hostname"] = "10.0.0.1"
    line = shell_command(serving_args(recipe, spec, tmp_path))
    shell = f'hostname() {{ echo 10.0.0.1 10.0.0.2; }}; vllm() {{ echo "${{@: -1}}"; }}; {line}'
    printed = subprocess.run(["bash", "-c", shell], check=True, capture_output=True, text=True)
    assert json.loads(printed.stdout) == expected


def test_a_user_without_a_name_has_a_folder_of_states(monkeypatch):
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", unknown)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert states_root(None).name == "draftsmith-12345"
