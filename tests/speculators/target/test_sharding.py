"""A target that is read in shards, layer by layer, says what the whole one says."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, Replicate, Shard

from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.sharding import is_sharded, read_sharded
from draftsmith.train.trainer.parallel import target_mesh
from tests.support.models import make_tiny_model
from tests.support.worlds import Scenario, in_worlds

# Tied tables, soft caps and windows, experts that are packed when they are read, layers of two
# kinds, recurrent layers whose states are rolled back, a language model beside a vision tower.
ARCHITECTURES = (
    "qwen2 gemma2 mixtral deepseek_v3 qwen3_next falcon_h1 gemma3_vision gpt2 bloom".split()
)
FACTS = (
    "num_layers hidden_size vocab_size dtype checkpoint_dtype tap_layers decoding_refusal"
    " name_or_path".split()
)
LAYERS = 8
TEXTS = (5, 7)  # tokens of the texts in one row


def read(folder: Path, per_node: int) -> FrozenTarget:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(per_node))
        mesh = target_mesh(Accelerator(cpu=True))
    return FrozenTarget(read_sharded(str(folder), mesh), tap_layers=(1, 2))


def states(target: FrozenTarget) -> Tensor:
    """Taps, last states and logits of a row of two texts."""
    ids = torch.arange(2, 2 + sum(TEXTS))[None]
    positions = torch.cat([torch.arange(length) for length in TEXTS])[None]
    segments = torch.repeat_interleave(torch.tensor(TEXTS))[None]
    features = target.features(ids, positions, segments, segments.bool())
    assert features.taps is not None
    logits = target.logits(features.last_hidden)
    return torch.cat([features.taps, features.last_hidden, logits], dim=-1)


def compare(folder: Path, architectures: Sequence[str], per_node: int) -> dict[str, Any]:
    """For each: what differs between the target in shards and the whole, and where shards lie."""
    results = {}
    for name in architectures:
        sharded = read(folder / name, per_node)
        whole = FrozenTarget.from_pretrained(str(folder / name), tap_layers=(1, 2))
        assert is_sharded(sharded)
        parameters: Any = list(sharded.layers.parameters())
        assert all(isinstance(parameter, DTensor) for parameter in parameters)
        results[name] = {
            "same states": torch.equal(states(sharded), states(whole)),
            "other facts": [
                fact for fact in FACTS if getattr(sharded, fact) != getattr(whole, fact)
            ],
            "share": sum(p.to_local().numel() for p in parameters) / numel(whole.layers),
            "placements": parameters[0].placements,
        }
    return results


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def held() -> int:
    """Numbers in tensors of this process that have memory, or are mapped from a file."""
    tensors = [entry for entry in gc.get_objects() if type(entry) in (Tensor, nn.Parameter)]
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if not tensor.is_meta:
            sizes[tensor.data_ptr()] = max(sizes.get(tensor.data_ptr(), 0), tensor.numel())
    return sum(sizes.values())


def most_held(folder: Path, architecture: str) -> tuple[int, list[int], int]:
    """The most numbers that were held when something was sharded; those of each layer, and those
    of the rest."""
    before = held()
    counts = []
    fully_shard = fsdp.fully_shard

    def watched(module: nn.Module, **options: Any) -> Any:
        counts.append(held() - before)
        return fully_shard(module, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "fully_shard", watched)
        target = read(folder / architecture, per_node=2)
    layers = [numel(layer) for layer in target.layers]
    return max(counts), layers, numel(target.model) - sum(layers)


def saved(
    architecture: str, folder: Path, dtype: torch.dtype = torch.float32, **sizes: Any
) -> None:
    make_tiny_model(architecture, **sizes).to(dtype).save_pretrained(folder / architecture)


@pytest.mark.slow
def test_read_sharded_of_any_architecture_equals_the_whole(tmp_path):
    for architecture in ARCHITECTURES:
        saved(architecture, tmp_path)
    scenario = Scenario("two", 2, arguments={"architectures": ARCHITECTURES, "per_node": 2})
    for name, facts in in_worlds(compare, [scenario], tmp_path)["two"].items():
        assert facts["same states"], name
        assert facts["other facts"] == [], name
        assert facts["placements"] == (Shard(0),), name
        assert facts["share"] == pytest.approx(1 / 2, abs=0.1), name


@pytest.mark.slow
def test_read_sharded_of_two_nodes_has_shards_in_each_and_replicas_between(tmp_path):
    saved("qwen2", tmp_path)
    saved("mixtral", tmp_path, torch.bfloat16)
    arguments = {"architectures": ["qwen2", "mixtral"], "per_node": 2}
    scenario = Scenario("four", 4, arguments=arguments)
    for name, facts in in_worlds(compare, [scenario], tmp_path)["four"].items():
        assert facts["same states"], name
        assert facts["placements"] == (Replicate(), Shard(0)), name
        assert facts["share"] == pytest.approx(1 / 2, abs=0.1), name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_read_sharded_holds_a_share_and_one_layer_at_a_time(tmp_path, architecture):
    saved(architecture, tmp_path, num_hidden_layers=LAYERS)
    scenario = Scenario("two", 2, arguments={"architecture": architecture})
    most, layers, rest = in_worlds(most_held, [scenario], tmp_path)["two"]
    assert most <= sum(layers) / 2 + 1.2 * max(layers) + rest
    assert most < 0.8 * (sum(layers) + rest)
