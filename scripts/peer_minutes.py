"""Our EAGLE-3 head beside the one that vLLM's library `speculators` trains, at equal minutes of one
core and at equal tokens; `bench_peers.py --minutes` calls it.

Both learn from the same responses of SmolLM2-135M-Instruct over the same draft vocabulary, and one
judge measures both exports (scripts/minutes.py). Model, loss, packing, optimizer and schedule of
the library are its own (scripts/peer_trainer.py). It is favoured: its options are tuned, by the
very texts that judge, and its hidden states are computed before its minutes begin. Beside it stand
three of our trainings, of as many minutes with the target's hidden states `computed` in them, or
read from the `disk`; and of as many supervised `tokens` as the library has seen.

On a CPU the library is slower than it need be, as it is made for GPUs: attention masks are dense,
with all depths in them (its own attention has no backward here), losses are not fused (those are in
Triton), and every token of a row gets logits, supervised or not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.inference.progress import Stages
from draftsmith.speculators.vocab.draft_vocab import choose_draft_vocabulary
from draftsmith.train.data.packing import PackedRow
from draftsmith.train.features.cache import texts_of
from draftsmith.train.pipeline.data_stage import prepare_data
from draftsmith.train.pipeline.features_stage import training_features
from draftsmith.train.pipeline.run import make_accelerator
from draftsmith.train.pipeline.run_target import RunTarget
from draftsmith.train.recipe.drafter_config import drafter_config
from draftsmith.train.recipe.load import load_recipe
from scripts.measuring import library_environment, save_json
from scripts.minutes import (
    RECIPES,
    ROOT,
    TRAINING_ALONE,
    Run,
    Texts,
    judge,
    judging_texts,
    result_of,
)

PEER = "speculators"
MODEL = ROOT / "runs" / "smollm2-135m-instruct" / "model"
# Options of the library that are tuned, one after the other: each at the best values of those above
# it, and at the first values of those below.
GRID = {
    "hidden-states-dtype": ("bfloat16", "float32"),
    "lr": ("3e-3", "1e-3", "1e-2"),
    "total-seq-len": ("1280", "640", "2560"),  # tokens of a step; our rows have 640
    "ttt-steps": ("3", "4", "2"),
}
TUNED_FOR = 0.2  # of the minutes
TUNED_BY = ("chat", "code")  # judges: the training's own kind of prompts


def samples(
    row: PackedRow, taps: Tensor, last_hidden: Tensor, norm: Tensor
) -> Iterator[dict[str, Tensor]]:
    """The texts of a packed row as the library keeps them: token_ids and loss_mask [L], and
    hidden_states [L, n + 1, H], which are the taps and the state before the target's final norm.

    taps [T, n·H] and last_hidden [T, H] are the row's, norm [H] is the scale of the final norm. The
    state is known up to a factor, which an RMS norm takes out."""
    states = torch.cat([taps, last_hidden / norm], -1).unflatten(-1, (-1, len(norm)))
    for _, place in texts_of(row):
        yield {
            "token_ids": torch.tensor(row.input_ids[place], dtype=torch.long),
            "loss_mask": torch.tensor(row.loss_mask[place]),
            "hidden_states": states[place].bfloat16(),
        }


def write_data(folder: Path, keys: Sequence[str]) -> None:
    """Writes the files that `speculators train` reads: texts, hidden states, draft vocabulary.
    `keys`: of the recipe."""
    path = RECIPES / "eagle3.yaml"
    recipe = load_recipe(path, [*TRAINING_ALONE, *keys, f"output_dir={folder}"])
    accelerator = make_accelerator(recipe)
    stages = Stages()
    config = drafter_config(recipe, recipe.target.sketch(accelerator.device))
    target = RunTarget(recipe, accelerator, config.tap_layers, stages)
    data = prepare_data(recipe, target, recipe.target.load_tokenizer(), accelerator, stages, "")
    features = training_features(recipe, target, data, accelerator, stages)
    norm = target.head.final_norm_weight
    states = folder / "hidden_states"
    states.mkdir(parents=True, exist_ok=True)
    texts: list[dict[str, Tensor]] = []
    for row in features.rows:
        taps, last_hidden = features.source.states(row, features.source.fetch(row))
        for sample in samples(row, taps, last_hidden, norm):
            ids, mask = sample["token_ids"], sample.pop("loss_mask")
            save_file(sample, states / f"hs_{len(texts)}.safetensors")
            texts.append({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)})
    supervised = torch.cat([text["input_ids"][text["loss_mask"]] for text in texts])
    size = config.draft_vocab_size
    chosen = choose_draft_vocabulary(supervised.bincount(minlength=config.vocab_size), size)
    np.save(folder / f"d2t-{size}.npy", chosen - torch.arange(size))
    np.save(folder / f"t2d-{size}.npy", np.isin(np.arange(config.vocab_size), chosen.numpy()))
    # It holds out a text at least: the last one, which is there twice.
    Dataset.from_list([*texts, texts[-1]]).with_format("torch").save_to_disk(folder)
    words = [f"--draft-vocab-size={size}", f"--train-data-ratio={1 - 0.5 / len(texts)}"]
    words += ["--target-layer-ids", *map(str, config.tap_layers)]
    save_json(folder / "facts.json", {"words": words})


@dataclass(frozen=True)
class Library:
    """Trainings of the library. `python`: an interpreter that has it; `out`: where they lie."""

    python: Path
    out: Path
    keys: tuple[str, ...]
    texts: Texts

    def train(self, minutes: float, options: Mapping[str, str]) -> Path:
        """The folder of a training, which is done unless it has been."""
        folder = self.out / "-".join([PEER, f"{minutes:g}", *options.values()])
        data = self.out / "data"
        if not (data / "facts.json").exists():
            write_data(data, self.keys)
        if not (folder / "counts.json").exists():
            words = json.loads((data / "facts.json").read_text(encoding="utf-8"))["words"]
            words += [f"--verifier-name-or-path={MODEL}", f"--data-path={data}"]
            words += [f"--save-path={folder}", "--no-resume-from-checkpoint", "--num-workers=0"]
            words += ["--draft-attn-impl=sdpa", "--loss-implementation=eager"]
            words += [f"--{name}={value}" for name, value in options.items()]
            command = [self.python, "-P", ROOT / "scripts" / "peer_trainer.py", f"{minutes:g}"]
            subprocess.run([*command, *words], env=library_environment(1), check=True)
        return folder

    def result(
        self, minutes: float, options: Mapping[str, str], judges: Sequence[str]
    ) -> dict[str, Any]:
        """What is measured of a training."""
        folder = self.train(minutes, options)
        file = folder / f"judged-{'-'.join(judges)}.json"
        if not file.exists():
            counts = json.loads((folder / "counts.json").read_text(encoding="utf-8"))
            judged = judge(folder / "export", MODEL, {name: self.texts[name] for name in judges})
            save_json(file, {"options": options, **counts, "judged": judged})
        return json.loads(file.read_text(encoding="utf-8"))

    def tuned(self, minutes: float) -> dict[str, str]:
        """The options that are the best for a budget."""
        best = {name: values[0] for name, values in GRID.items()}
        for name, values in GRID.items():
            lengths = {}
            for value in values:
                result = self.result(TUNED_FOR * minutes, best | {name: value}, TUNED_BY)
                lengths[value] = mean(one["tau"] for one in result["judged"].values())
                print(f"{minutes:g} minutes, {name} {value}: τ {lengths[value]:.3f}", flush=True)
            best[name] = max(lengths, key=lambda value: lengths[value])
        return best


def compare(minutes: Sequence[float], python: Path, out: Path, file: Path) -> None:
    """Trains and judges everything for every budget, and writes the results to `file`. `out`: has
    the texts that judge, the `features` and, in `peers`, what is trained."""
    texts = judging_texts(MODEL, None, out)
    keys = ("features.mode=cache", f"features.dir={out / 'features'}")
    library = Library(python, out / "peers", keys, texts)
    results: dict[str, Any] = {"grid": GRID, "tuned_for": TUNED_FOR, "runs": {}}
    for budget in minutes:

        def ours(name: str, *always: str, budget: float = budget) -> dict[str, Any]:
            folder = out / "peers" / name
            folder.mkdir(parents=True, exist_ok=True)
            return result_of(Run("default", budget, 0, "eagle3", always), folder, MODEL, texts)

        peer = library.result(budget, library.tuned(budget), list(texts))
        named = {PEER: peer, "computed": ours("computed"), "disk": ours("disk", *keys)}
        steps = round(peer["tokens"] / named["disk"]["tokens"] * named["disk"]["steps"])
        named["tokens"] = ours("tokens", *keys, f"training.steps={steps}")
        results["runs"][f"{budget:g}"] = named
        save_json(file, results)


def rows(results: Mapping[str, Any]) -> list[list[str]]:
    """The results -> a row for each budget and training: steps, supervised tokens, and expected τ
    by judge, with (τ − 1) ÷ the library's in brackets; the head is first."""
    table: list[list[str]] = []
    for minutes, named in results["runs"].items():
        theirs = named[PEER]["judged"]
        for name, one in named.items():
            shown = [minutes, f"`{name}`", f"{one['steps']:,}", f"{one['tokens']:,}"]
            for judged, by in zip(one["judged"].values(), theirs.values(), strict=True):
                share = (judged["tau"] - 1) / (by["tau"] - 1)
                shown.append(f"{judged['tau']:.3f}" + (f" ({share:.2f})" if name != PEER else ""))
            table.append(shown)
    return [["minutes", "training", "steps", "tokens", *(f"τ, {name}" for name in theirs)], *table]
