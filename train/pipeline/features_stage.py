"""The features of the training rows of a run: online, or from a cache that it fills first."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol

from accelerate import Accelerator
from rich.filesize import decimal as size_text
from torch import Tensor

from draftsmith.inference.progress import Stages
from draftsmith.inference.vllm_bridge.hidden_states import HiddenStates
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.hub import cached_folder
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import PackedRow, best_fit
from draftsmith.train.data.tokenising import tokenizer_sha256
from draftsmith.train.features.cache import (
    SHARD_BYTES,
    CacheKey,
    FeatureCache,
    ShardWriter,
    missing,
    texts_of,
)
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.features.served import Servers, features_of_states
from draftsmith.train.features.source import Disk, FeatureSource, InProcess
from draftsmith.train.features.state_servers import StateServers
from draftsmith.train.features.states_spec import StatesSpec, states_root
from draftsmith.train.features.transfers import run_name
from draftsmith.train.pipeline.data_stage import TrainingData
from draftsmith.train.processes import is_shared
from draftsmith.train.recipe.recipe import Recipe

# caches, and the rows whose texts they are for
Needed = list[tuple[FeatureCache, Sequence[PackedRow]]]
Absent = dict[bytes, int]  # texts that a cache lacks: name -> tokens
# a text's name, taps [L, n·H] and last hidden states [L, H]
TextStates = tuple[bytes, Tensor | None, Tensor]
EXACT = "exact"  # the encoding of states that are replayed
TOGETHER = 1 << 16  # tokens that vLLM is given at once, whose states it leaves in files


class FeatureTarget(Protocol):
    """The target whose features are needed. `stays`: its decoder is there throughout a training."""

    head: TargetHead
    stays: bool

    def whole(self) -> FrozenTarget:
        """The target, loaded now unless it is there."""

    def release(self) -> None:
        """Frees the decoder, unless the training needs it."""


def training_features(
    recipe: Recipe,
    target: FeatureTarget,
    data: TrainingData,
    accelerator: Accelerator,
    stages: Stages,
    reads_start_text: bool = False,
) -> RowFeatures:
    """The features of the training rows: from the disk, once all are there (`mode: cache`), from
    running servers, or computed here. Unless the decoder stays, the head has the states that are
    replayed from the disk. `reads_start_text`: of the drafter that is made next."""
    section = recipe.features
    source: FeatureSource
    if section.mode == "online" and not section.endpoints:
        source = InProcess(target.whole())
    else:
        needed = needed_features(recipe, target, data, reads_start_text)
        _fill_together(recipe, target, needed, accelerator, stages)
        if not target.stays:
            target.head.source = Disk(needed[-1][0], target.head.device).features
        if section.mode == "cache":
            source = Disk(needed[0][0], target.head.device)
        else:
            source = Servers(
                open_servers(recipe, target.head, accelerator.process_index, stages), target.head
            )
    keep_bytes = recipe.training.keep_features_gb * 2**30
    pad = data.tokenizer.tokenizer.pad_token_id or 0
    return RowFeatures(
        source,
        data.rows,
        pad_token_id=pad,
        keep_bytes=keep_bytes,
        on_host=recipe.training.keep_features_on == "host",
        overlaps=recipe.features.overlap,
    )


def _fill_together(
    recipe: Recipe, target: FeatureTarget, needed: Needed, accelerator: Accelerator, stages: Stages
) -> None:
    """Fills the caches by all processes, or by the first one where vLLM takes all devices. The
    decoder is gone afterwards, unless it stays."""
    if any(rows for _, rows in needed) and not is_shared(accelerator, _root(recipe)):
        raise ConfigError(
            f"{_root(recipe)} is another folder on another machine; the features that are read"
            " again, of held-out texts too, lie there: give one on a disk that all of them see",
            where="features.dir",
        )
    accelerator.wait_for_everyone()  # so that all find the same texts missing
    part = accelerator.process_index, accelerator.num_processes
    started_here = recipe.features.engine == "vllm" and not recipe.features.endpoints
    if started_here:
        part = (0, 1)
    if not started_here or accelerator.is_main_process:
        fill(recipe, target, needed, stages, part)
    target.release()
    accelerator.wait_for_everyone()
    for cache, _ in needed:
        cache.scan()


def needed_features(
    recipe: Recipe, target: FeatureTarget, data: TrainingData, reads_start_text: bool
) -> Needed:
    """The texts of the training rows in the recipe's encoding, with `mode: cache`. Where no decoder
    stays, also those that are replayed, which have to be exact: held-out texts, and that of a
    drafter's start."""
    encoding = recipe.features.encoding
    training: Needed = []
    if recipe.features.mode == "cache":
        training.append((open_cache(recipe, target.head, data, encoding).scan(), data.rows))
    if target.stays:
        return training
    replayed = _replayed_rows(target, data, reads_start_text)
    if training and encoding == EXACT:
        return [(training[0][0], [*training[0][1], *replayed])]
    return [*training, (open_cache(recipe, target.head, data, EXACT).scan(), replayed)]


def _replayed_rows(
    target: FeatureTarget, data: TrainingData, reads_start_text: bool
) -> list[PackedRow]:
    rows = [
        PackedRow.of(TokenRow.from_response(response.prompt_ids, response.output_ids, ""))
        for responses in data.held_out.values()
        for response in responses
    ]
    if reads_start_text:
        ids = target.head.start_text()[0].cpu().numpy()
        rows.append(PackedRow.of(TokenRow(ids, ids < 0)))
    return rows


def _root(recipe: Recipe) -> Path:
    return Path(recipe.features.dir or Path(recipe.output_dir) / "features")


def open_cache(
    recipe: Recipe, target: TargetHead, data: TrainingData, encoding: str
) -> FeatureCache:
    """The cache of the recipe's features, addressed by everything that they depend on."""
    section = recipe.features
    tokenizer = data.tokenizer.tokenizer
    key = CacheKey(
        target=recipe.target.model,
        weights=data.hashes.weights,
        config=data.hashes.config,
        tokenizer=tokenizer_sha256(tokenizer),
        template=data.hashes.template,
        hidden_size=target.hidden_size,
        taps=target.tap_layers,
        dtype=str(target.dtype).removeprefix("torch."),
        engine=section.engine,
        encoding=encoding,
    )
    return FeatureCache(_root(recipe), key)


def fill(
    recipe: Recipe,
    target: FeatureTarget,
    needed: Needed,
    stages: Stages,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Writes the missing features of a part (i, n) of the rows: every n-th from the i-th on."""
    absent = [missing(cache, rows) for cache, rows in needed]
    _say_sizes(needed, absent, stages)
    rows = _rows_of_part(needed, absent, part)
    if not rows:
        return
    lengths = {text: length for texts in absent for text, length in texts.items()}
    names = {text for row in rows for text, _ in texts_of(row)}
    asked = {text: lengths[text] for text in names & lengths.keys()}
    features = _computed(recipe, target, rows, set(asked), stages, part[0])
    with ExitStack() as open_writers:
        advance = open_writers.enter_context(stages.stage("write features", sum(asked.values())))
        writers = [
            open_writers.enter_context(ShardWriter(cache, SHARD_BYTES)) for cache, _ in needed
        ]
        open_writers.enter_context(closing(features))
        done = 0
        for text, taps, last_hidden in features:
            for writer, texts in zip(writers, absent, strict=True):
                if text in texts:
                    writer.add(text, taps, last_hidden)
            done += len(last_hidden)
            advance(done)
    for writer in writers:
        errors = ", ".join(f"{name} {value:.2g}" for name, value in writer.error.items())
        stages.say(
            f"      {size_text(writer.bytes)} written; relative squared error of the worst text:"
            f" {errors}"
        )


def _say_sizes(needed: Needed, absent: Sequence[Absent], stages: Stages) -> None:
    for (cache, rows), texts in zip(needed, absent, strict=True):
        whole = cache.bytes_per_token * sum(map(len, rows))
        stages.say(
            f"      features in {cache.folder}: {cache.bytes_per_token:,} bytes per token"
            f" ({cache.key.encoding}), {size_text(whole)} for {len(rows):,} rows,"
            f" {size_text(cache.bytes_per_token * sum(texts.values()))} to be written"
        )


def _rows_of_part(
    needed: Needed, absent: Sequence[Absent], part: tuple[int, int]
) -> list[PackedRow]:
    """The rows of a part that have an absent text."""
    first, step = part
    chosen: list[PackedRow] = []
    for (_, rows), texts in zip(needed, absent, strict=True):
        for row in rows[first::step]:
            if any(text in texts for text, _ in texts_of(row)):
                chosen.append(row)
    return chosen


def _computed(
    recipe: Recipe,
    target: FeatureTarget,
    rows: Sequence[PackedRow],
    absent: set[bytes],
    stages: Stages,
    process: int,
) -> Generator[TextStates]:
    """The absent texts of the rows, by whom the recipe says."""
    if recipe.features.engine == "vllm":
        target.release()  # a vLLM that is started takes the memory of the device
    if recipe.features.endpoints:
        return _from_servers(recipe, target.head, rows, absent, stages, process)
    if recipe.features.engine == "vllm":
        return _from_vllm(recipe, target.head, rows, absent)
    return _from_target(target.whole(), rows, absent)


def _from_target(
    target: FrozenTarget, rows: Sequence[PackedRow], absent: set[bytes]
) -> Generator[TextStates]:
    """Packed rows one by one, as kept features are made: a text is as in a run without a cache."""
    source = InProcess(target)
    for row in rows:
        taps, last_hidden = source.states(row)
        for text, place in texts_of(row):
            if text in absent:
                absent.discard(text)
                yield text, None if taps is None else taps[place], last_hidden[place]


def _from_servers(
    recipe: Recipe,
    target: TargetHead,
    rows: Sequence[PackedRow],
    absent: set[bytes],
    stages: Stages,
    process: int,
) -> Generator[TextStates]:
    """Every text is a request of its own to running vLLM servers."""
    texts = _token_ids(rows, absent)
    with closing(open_servers(recipe, target, process, stages)) as servers:
        states = servers.of([ids for _, ids in texts])
        for (text, _), state in zip(texts, states, strict=True):
            yield text, *features_of_states(target, state)


def open_servers(recipe: Recipe, head: TargetHead, process: int, stages: Stages) -> StateServers:
    """The recipe's servers, for one of its processes. EndpointError: they give something else, or
    none answers."""
    section = recipe.features
    servers = StateServers(
        section.endpoints,
        StatesSpec.of_recipe(recipe, head.tap_layers, head),
        root=states_root(section.states_dir),
        run=run_name(recipe.output_dir, process),
        mooncake=section.mooncake,
        unread_bytes=section.unread_gb * 1e9,
        say=stages.say,
    )
    try:
        servers.check(head)
    except BaseException:
        servers.close()
        raise
    return servers


def _token_ids(rows: Sequence[PackedRow], absent: set[bytes]) -> list[tuple[bytes, list[int]]]:
    """The absent texts of the rows, each once: name and tokens."""
    places: dict[bytes, tuple[PackedRow, slice]] = {}
    for row in rows:
        for text, place in texts_of(row):
            if text in absent:
                places[text] = row, place
    return [(text, row.input_ids[place].tolist()) for text, (row, place) in places.items()]


def _from_vllm(
    recipe: Recipe, target: TargetHead, rows: Sequence[PackedRow], absent: set[bytes]
) -> Generator[TextStates]:
    """Every text is a prompt of its own; the states before the final norm are normed here."""
    texts = _token_ids(rows, absent)
    spec = StatesSpec.of_recipe(recipe, target.tap_layers, target)
    with HiddenStates(
        str(cached_folder(recipe.target.model, recipe.target.revision)),
        list(spec.layers),
        longest=max(len(ids) for _, ids in texts),
        dtype=spec.dtype_name,
        options={
            "trust_remote_code": recipe.target.trust_remote_code,
            **recipe.features.vllm_options,
        },
        folder=_root(recipe),
    ) as engine:
        for members in best_fit([min(len(ids), TOGETHER) for _, ids in texts], TOGETHER):
            batch = [texts[i] for i in members]
            for (text, _), states in zip(batch, engine.of([ids for _, ids in batch]), strict=True):
                yield text, *features_of_states(target, states)
