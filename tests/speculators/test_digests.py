"""Hashes of weights: they follow names and contents, and read no file twice."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from draftsmith.speculators import digests
from draftsmith.speculators.digests import file_sha256, model_weights_sha256, weights_sha256
from draftsmith.speculators.errors import DataError, HubError
from tests.support.errors import raises_at

LONG_AGO = 1e9


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_weights_hash_of_an_adapter_follows_the_model_that_it_adapts(tmp_path):
    """Texts and states that were kept of it are no longer the target's once that model changes."""
    base = tmp_path / "base"
    adapter = tmp_path / "lora"
    write(adapter / "adapter_model.safetensors", b"lora")
    fields = {"base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    hashes = set()
    for weights in (b"1", b"22"):
        write(base / "model.safetensors", weights)
        hashes |= {model_weights_sha256(str(folder)) for folder in (base, adapter)}
    write(adapter / "adapter_model.safetensors", b"other")
    assert len(hashes | {model_weights_sha256(str(adapter))}) == 5


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The files that were read."""
    names: list[str] = []
    real = hashlib.file_digest

    def digest(file, name):
        names.append(Path(file.name).name)
        return real(file, name)

    monkeypatch.setattr(digests.hashlib, "file_digest", digest)
    return names


def write(path: Path, content: bytes, at: float = LONG_AGO) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (at, at))
    return path


def test_weights_hash_follows_content_and_names(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with raises_at(DataError, folder):
        weights_sha256(folder)
    (folder / "a.safetensors").write_bytes(b"1")
    (folder / "config.json").write_text("{}")
    first = weights_sha256(folder)
    (folder / "config.json").write_text("{ }")
    assert weights_sha256(folder) == first
    (folder / "a.safetensors").rename(folder / "b.safetensors")
    renamed = weights_sha256(folder)
    (folder / "b.safetensors").write_bytes(b"2")
    assert len({first, renamed, weights_sha256(folder)}) == 3


def test_file_is_read_once_until_it_changes(tmp_path, reads):
    file = write(tmp_path / "a.safetensors", b"1")
    assert file_sha256(file) == file_sha256(file) == hashlib.sha256(b"1").hexdigest()
    assert len(reads) == 1
    write(file, b"2", at=LONG_AGO + 1)
    assert file_sha256(file) == hashlib.sha256(b"2").hexdigest()


def test_file_that_has_just_changed_is_read_again(tmp_path):
    """A second change may fall into the same tick of the clock."""
    file = tmp_path / "a.safetensors"
    for content in (b"1", b"2", b"3"):
        file.write_bytes(content)
        assert file_sha256(file) == hashlib.sha256(content).hexdigest()


def test_file_of_the_hub_s_cache_is_not_read(tmp_path, reads):
    name = hashlib.sha256(b"w").hexdigest()
    blob = write(tmp_path / "blobs" / name, b"w")
    link = tmp_path / "snapshots" / "c" / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    assert file_sha256(link) == name
    assert not reads


def test_unreadable_cache_costs_no_error(tmp_path, cache):
    file = write(tmp_path / "a.safetensors", b"1")
    cache.write_text("a file where a folder belongs")
    assert file_sha256(file) == hashlib.sha256(b"1").hexdigest()


@pytest.fixture
def sharded(tmp_path, hub_cache):
    """A model of the Hub of two shards; `held`: its files that are on this machine."""
    files = {f"model-{i}.safetensors": f"shard {i}".encode() for i in range(2)}

    def hold(*held: str) -> dict[str, bytes]:
        folder = tmp_path / "source"
        index = {"weight_map": {f"layer.{i}": name for i, name in enumerate(files)}}
        write(folder / "model.safetensors.index.json", json.dumps(index).encode())
        write(folder / "config.json", b"{}")
        for name in held:
            write(folder / name, files[name])
        hub_cache("org/model", folder)
        return files

    return hold


def test_weights_elsewhere_have_the_hash_that_they_have_here(sharded, tmp_path, monkeypatch):
    files = sharded("model-0.safetensors")
    asked = []

    def model_info(self, name, *, revision, files_metadata):
        asked.append(name)
        siblings = [
            SimpleNamespace(
                rfilename=name, lfs=SimpleNamespace(sha256=hashlib.sha256(data).hexdigest())
            )
            for name, data in files.items()
        ]
        return SimpleNamespace(siblings=[*siblings, SimpleNamespace(rfilename="x.json", lfs=None)])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    whole = tmp_path / "whole"
    for name, data in files.items():
        write(whole / name, data)
    assert model_weights_sha256("org/model") == weights_sha256(whole)
    assert model_weights_sha256("org/model") == weights_sha256(whole)
    assert asked == ["org/model"]


def test_weights_elsewhere_without_the_hub_are_an_error(sharded):
    sharded("model-0.safetensors")
    with pytest.raises(HubError):
        model_weights_sha256("org/model")


def test_a_user_without_a_home_reads_weights_every_time(tmp_path, monkeypatch, reads):
    """As those of containers are: there is no place where a digest could be kept."""
    file = write(tmp_path / "model.safetensors", b"weights")
    expected = file_sha256(file)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert file_sha256(file) == file_sha256(file) == expected
    assert len(reads) == 3
