"""The stage of a run that provides the features of its training rows: online, or from a cache that
it fills first.

It reports the bytes per token and in all before anything is written, and refuses a disk that is too
small."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from inference.console import size_text
from inference.provenance import text_sha256
from inference.vllm_bridge.hidden_states import HiddenStates
from speculators.errors import ConfigError
from speculators.hub import cached_folder
from speculators.target.frozen_target import FrozenTarget
from train.data.packing import PackedRow, best_fit
from train.features.cache import (
    SHARD_BYTES,
    CacheKey,
    FeatureCache,
    ShardWriter,
    missing,
    texts_of,
)
from train.features.row_features import RowFeatures
from train.pipeline.data_stage import TrainingData
from train.pipeline.progress import Stages
from train.recipe.recipe import Recipe

Text = tuple[bytes, Tensor | None, Tensor]  # its name, taps [L, n·H], last hidden states [L, H]
TOGETHER = 1 << 16  # tokens that vLLM is given at once, whose states it leaves in files
ENGINE_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
)  # devices are their product
SPARE = 1.02  # of the disk: names, headers, other writers


def training_features(
    recipe: Recipe,
    target: FrozenTarget,
    data: TrainingData,
    accelerator: Accelerator,
    stages: Stages,
) -> RowFeatures:
    """The features of the training rows, for the loop; with `mode: cache` from the disk, once all
    of them are there."""
    cache = None
    if recipe.features.mode == "cache":
        cache = open_cache(recipe, target, data).scan()
        accelerator.wait_for_everyone()  # so that all find the same texts missing
        writer = Writer((accelerator.process_index, accelerator.num_processes))
        if recipe.features.engine == "vllm":
            writer = vllm_writer(accelerator, recipe.features.vllm_options)
        fill(recipe, target, data.rows, cache, stages, writer)
        accelerator.wait_for_everyone()
        cache.scan()
    keep_bytes = recipe.training.keep_features_gb * 2**30
    pad = data.tokenizer.tokenizer.pad_token_id or 0
    return RowFeatures(target, data.rows, pad_token_id=pad, keep_bytes=keep_bytes, cache=cache)


@dataclass(frozen=True)
class Writer:
    """The rows of one process: every n-th from the i-th on for `part` (i, n), none for None.
    `devices`: numbers of those that vLLM may use; None: all that this process sees."""

    part: tuple[int, int] | None = (0, 1)
    devices: tuple[int, ...] | None = None


def vllm_writer(
    accelerator: Accelerator, options: Mapping[str, Any], count: int | None = None
) -> Writer:
    """The writer of this process: one engine for every set of devices that it takes, in the first
    process of the set.

    `count`: accelerators of this machine; None: as many as torch finds. Without any, one engine a
    machine. ConfigError if one engine takes more than there are."""
    size = math.prod(int(options.get(name, 1)) for name in ENGINE_SIZES)
    if count is None:
        count = torch.accelerator.device_count() if accelerator.device.type != "cpu" else 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    machine, machines = accelerator.process_index // here, max(accelerator.num_processes // here, 1)
    if count == 0:
        return Writer((machine, machines) if accelerator.local_process_index == 0 else None)
    if size > count:
        sizes = ", ".join(f"{name}={options[name]}" for name in ENGINE_SIZES if name in options)
        raise ConfigError(
            f"features.vllm_options: {sizes} takes {size} devices, and this machine has {count};"
            " lower the sizes"
        )
    engines = max(min(here, count) // size, 1)
    engine, place = divmod(accelerator.local_process_index, size)
    if place or engine >= engines:
        return Writer(None)
    return Writer(
        (machine * engines + engine, machines * engines),
        tuple(range(engine * size, (engine + 1) * size)),
    )


def _root(recipe: Recipe) -> Path:
    return Path(recipe.features.dir or Path(recipe.output_dir) / "features")


def cache_key(recipe: Recipe, target: FrozenTarget, data: TrainingData) -> CacheKey:
    section, tokenizer = recipe.features, data.tokenizer.tokenizer
    words = getattr(tokenizer, "backend_tokenizer", None)
    return CacheKey(
        target=recipe.target.model,
        weights=data.hashes.weights,
        config=data.hashes.config,
        tokenizer=str(
            text_sha256(words.to_str() if words else str(sorted(tokenizer.get_vocab().items())))
        ),
        template=data.hashes.template,
        hidden_size=target.hidden_size,
        taps=target.tap_layers,
        dtype=str(target.dtype).removeprefix("torch."),
        engine=section.engine,
        encoding=section.encoding,
    )


def open_cache(recipe: Recipe, target: FrozenTarget, data: TrainingData) -> FeatureCache:
    return FeatureCache(_root(recipe), cache_key(recipe, target, data))


def fill(
    recipe: Recipe,
    target: FrozenTarget,
    rows: Sequence[PackedRow],
    cache: FeatureCache,
    stages: Stages,
    writer: Writer = Writer(),
) -> None:
    """Writes the missing features of this writer's rows. ConfigError if the disk is too small for
    those of all rows."""
    wanted = missing(cache, rows)
    tokens, section = sum(wanted.values()), recipe.features
    whole = cache.bytes_per_token * sum(map(len, rows))
    stages.say(
        f"      features in {cache.folder}: {cache.bytes_per_token:,} bytes per token"
        f" ({section.encoding}), {size_text(whole)} for the rows of this run,"
        f" {size_text(cache.bytes_per_token * tokens)} to be written"
    )
    if not wanted:
        return
    refuse_small_disk(cache, tokens)
    if writer.part is None:
        return
    first, step = writer.part
    mine = [row for row in rows[first::step] if any(text in wanted for text, _ in texts_of(row))]
    texts = {text: wanted[text] for row in mine for text, _ in texts_of(row) if text in wanted}
    features = (
        _from_vllm(recipe, target, mine, set(texts), writer.devices)
        if section.engine == "vllm"
        else _from_target(target, mine, set(texts))
    )
    with (
        stages.stage("write features", sum(texts.values())) as advance,
        ShardWriter(cache, SHARD_BYTES) as shards,
        closing(features),
    ):
        done = 0
        for text, taps, last_hidden in features:
            shards.add(text, taps, last_hidden)
            done += len(last_hidden)
            advance(done)
    errors = ", ".join(f"{name} {value:.2g}" for name, value in shards.error.items())
    stages.say(
        f"      {size_text(shards.bytes)} written; relative squared error of the worst text:"
        f" {errors}"
    )


def refuse_small_disk(cache: FeatureCache, tokens: int) -> None:
    """ConfigError if the disk of the cache has no room for so many tokens."""
    there = cache.folder
    while not there.exists():
        there = there.parent
    needed, free = SPARE * cache.bytes_per_token * tokens, shutil.disk_usage(there).free
    if needed > free:
        raise ConfigError(
            f"features: {size_text(needed)} are needed for {tokens:,} tokens, and {size_text(free)}"
            f" are free at {there}; choose a smaller features.encoding, another features.dir, less"
            " data, or features.mode: online"
        )


def _from_target(
    target: FrozenTarget, rows: Sequence[PackedRow], wanted: set[bytes]
) -> Generator[Text]:
    """Packed rows one by one, as kept features are made, so that a text is what it is in a run
    without a cache."""
    features = RowFeatures(target, rows)
    for index, row in enumerate(rows):
        taps, last_hidden = features.made(index)
        for text, place in texts_of(row):
            if text in wanted:
                wanted.discard(text)
                yield text, None if taps is None else taps[place], last_hidden[place]


def _from_vllm(
    recipe: Recipe,
    target: FrozenTarget,
    rows: Sequence[PackedRow],
    wanted: set[bytes],
    devices: Sequence[int] | None,
) -> Generator[Text]:
    """Every text is a prompt of its own; the states before the final norm are normed here, as the
    target does it."""
    places = {text: (row, place) for row in rows for text, place in texts_of(row) if text in wanted}
    texts = [(text, row.input_ids[place].tolist()) for text, (row, place) in places.items()]
    with HiddenStates(
        str(cached_folder(recipe.target.model, recipe.target.revision)),
        [*(tap for tap in target.tap_layers if tap != target.num_layers), target.num_layers],
        longest=max(len(ids) for _, ids in texts),
        dtype=str(target.dtype).removeprefix("torch."),
        options={
            "trust_remote_code": recipe.target.trust_remote_code,
            **recipe.features.vllm_options,
        },
        folder=_root(recipe),
        devices=devices,
    ) as engine:
        for members in best_fit([min(len(ids), TOGETHER) for _, ids in texts], TOGETHER):
            batch = [texts[i] for i in members]
            for (text, _), states in zip(batch, engine.of([ids for _, ids in batch]), strict=True):
                yield text, *features_of_states(target, states)


def features_of_states(target: FrozenTarget, states: Tensor) -> tuple[Tensor | None, Tensor]:
    """[L, layers, H], the residual streams of the taps and before the final norm -> taps [L, n·H],
    last_hidden."""
    states = states.to(target.device, target.dtype)
    taps = states if target.num_layers in target.tap_layers else states[:, :-1]
    return taps.flatten(1) if target.tap_layers else None, target.final_norm(states[:, -1])
