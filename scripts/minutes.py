"""Variants of a training against the default at equal minutes of one core, on a real model.

    python scripts/minutes.py --minutes 10 --minutes 20 --seed 0 --seed 1
    python scripts/minutes.py --variant depths_4 --variant row_1 --minutes 10

Every run trains the recipe for SmolLM2-135M-Instruct, on responses that are written once, and is
judged by the exact expected acceptance length (inference/evaluation/expected_acceptance.py) on
texts that the target has written: its own kind of prompts, held out, and prompts that it was never
trained on, of suites that lie in `suites/` (docs/evaluate.md fetches them) and of a file that
`--broad` names. Runs and texts that are there already are not made again. A minute is a minute of
the process's CPU time on one thread, so that other work on the machine does not count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.inference.provenance import cpu_model
from scripts.measuring import save_json

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes" / "smollm2-135m-instruct"
DATA = ROOT / "recipes" / "quickstart" / "data"
OUT = ROOT / "runs" / "bench" / "minutes"
DRAFTS = 4
TOKENS = 128  # of a response that judges
TEXTS = 24  # responses of a judge at each temperature
LONGEST_PROMPT = 2000  # letters before the first answer of a conversation that judges
TEMPERATURES = (0.0, 1.0)
# A judge's file of prompts: of conversations, or of a suite by its name.
SUITES = ("mt_bench", "humaneval")
# The rates of a training that starts from nothing.
USUAL_RATES = [
    "training.muon_learning_rate=0.02",
    "training.learning_rate=1.5e-3",
    "training.warmup_ratio=0.04",
]
TAPS = ["drafter.init=taps", *USUAL_RATES]
# The recipe's settings of before: a start from the taps, and as many depths as are drafted.
TAPS_DEPTHS_4 = [*TAPS, "drafter.unroll_steps=4"]
# What a run of eagle3 changes in the recipe, by the variant's name.
VARIANTS: dict[str, list[str]] = {
    "default": [],
    "taps": TAPS,
    "usual_rates": USUAL_RATES,
    "depths_1": ["drafter.unroll_steps=1"],
    "depths_3": ["drafter.unroll_steps=3"],
    "depths_4": ["drafter.unroll_steps=4"],
    "row_1": ["training.batch_size=1"],
    "row_4": ["training.batch_size=4"],
    "rows_1280": ["data.max_length=1280", "training.batch_size=1"],
    "adamw": [
        "training.optimizer=adamw",
        "training.muon_learning_rate=null",
        "training.learning_rate=1e-3",
    ],
    "muon_0.01": ["training.muon_learning_rate=0.01", "training.learning_rate=8e-4"],
    "vocabulary_4k": ["drafter.draft_vocab_size=4096"],
    "vocabulary_16k": ["drafter.draft_vocab_size=16384"],
    "vocabulary_32k": ["drafter.draft_vocab_size=32768"],
    "vocabulary_all": ["drafter.draft_vocab_size=49152"],
    "tv": ["loss={tv: 1.0}"],
    "d_pace": ["position_weights={d_pace: 0.5}"],
    "uniform": ["position_weights={uniform: true}"],
    "fc_norm": ["drafter.fc_norm=true"],
    "own_embeddings": ["drafter.own_embeddings=true"],
    "greedy_text": ["regenerate.temperatures={0.0: 1.0}"],
    "sampled_text": ["regenerate.temperatures={1.0: 1.0}"],
    "responses_400": [
        "data.train=[{path: recipes/quickstart/data/train.jsonl.gz, limit: 330},"
        " {path: recipes/quickstart/data/code-train.jsonl.gz, limit: 70}]"
    ],
    "responses_3111": ["data.train.0.limit=2880"],
    "taps_depths_4": TAPS_DEPTHS_4,
    "taps_depths_4_row_1": [*TAPS_DEPTHS_4, "training.batch_size=1"],
    "taps_depths_4_muon_0.04": [*TAPS_DEPTHS_4, "training.muon_learning_rate=0.04"],
    "taps_depths_4_vocabulary_4k": [*TAPS_DEPTHS_4, "drafter.draft_vocab_size=4096"],
    "taps_depths_4_lk_hybrid": [*TAPS_DEPTHS_4, "loss={lk_hybrid: 1.0}"],
    "taps_depths_4_norm_output": [*TAPS_DEPTHS_4, "drafter.norm_output=true"],
}
# Of dspark; the last is its recipe of before.
DSPARK_VARIANTS: dict[str, list[str]] = {
    "default": [],
    "layers_3": ["drafter.num_layers=3"],
    "taps_tv_layers_3": [
        *TAPS,
        "drafter.num_layers=3",
        "loss={cross_entropy: 0.1, tv: 1.8}",
    ],
}
# Of peagle, which starts from the taps at the usual rates. `fitted` is its recipe of before, also
# with weights by depth in place of the published equal ones.
FITTED_RATES = [
    "training.muon_learning_rate=0.005",
    "training.learning_rate=4.0e-4",
    "training.warmup_ratio=0.1",
]
FITTED = ["drafter.init=least_squares", *FITTED_RATES]
PEAGLE_VARIANTS: dict[str, list[str]] = {
    "default": [],
    "fitted": FITTED,
    "fitted_gamma_2": [*FITTED, "position_weights={gamma: 2.0}"],
}
# Of mlp: what won for eagle3 and can be asked of it.
MUON = ["training.optimizer=muon", "training.learning_rate=1.5e-3", "training.warmup_ratio=0.04"]
MLP_VARIANTS: dict[str, list[str]] = {
    "default": [],
    "depths_2": ["drafter.unroll_steps=2"],
    "muon": [*MUON, "training.muon_learning_rate=0.02"],
}
# Of draft_model, which starts from two of the target's layers; the last is its recipe of before.
DRAFT_MODEL_VARIANTS: dict[str, list[str]] = {
    "default": [],
    "adamw": [
        "training.optimizer=adamw",
        "training.muon_learning_rate=null",
        "training.learning_rate=1e-3",
        "training.warmup_ratio=null",
    ],
}
BY_FAMILY = {
    "eagle3": VARIANTS,
    "dspark": DSPARK_VARIANTS,
    "peagle": PEAGLE_VARIANTS,
    "mlp": MLP_VARIANTS,
    "draft_model": DRAFT_MODEL_VARIANTS,
}
# The recipe, without what follows the training.
TRAINING_ALONE = [
    "data.validation=[]",
    "evaluation.prompts=[]",
    "gates={}",
    "training.eval_every=1000000",
    "training.save_every=1000000",
    "training.save_minutes=1000",
]


@dataclass(frozen=True)
class Run:
    """A training. `always`: keys that all runs change."""

    variant: str
    minutes: float
    seed: int
    family: str
    always: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of its folder, and of its entry in the results."""
        return f"{self.family}-{self.variant}-{self.minutes:g}-{self.seed}"

    def words(self, folder: Path) -> list[str]:
        """The arguments of `draftsmith train`."""
        return [
            str(RECIPES / f"{self.family}.yaml"),
            *TRAINING_ALONE,
            *self.always,
            *variants_of(self.family)[self.variant],
            f"training.max_minutes={self.minutes:g}",
            f"training.seed={self.seed}",
            f"output_dir={folder}",
        ]


def variants_of(family: str) -> dict[str, list[str]]:
    """What runs of a family change in its recipe, by the variant's name."""
    return BY_FAMILY.get(family, {"default": []})


def train(words: Sequence[str]) -> int:
    """`draftsmith train` in this process, whose minutes are those of its CPU time."""
    from draftsmith.train.pipeline import train_stage
    from draftsmith.train.pipeline.run import run
    from draftsmith.train.trainer import trainer

    clock = SimpleNamespace(monotonic=time.process_time)
    trainer.time = clock  # type: ignore[attr-defined]
    train_stage.time = clock  # type: ignore[attr-defined]
    return run(words[0], words[1:])


def trained(run: Run, out: Path) -> Path:
    """The run's folder, after its training."""
    folder = out / run.name
    if not (folder / "export" / "config.json").exists():
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "train", *run.words(folder)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return folder


# ------------------------------------------------------------------------------ the judges


Prompts = list[str] | list[list[dict[str, Any]]]  # texts, or conversations


def spread_over(items: Sequence[Any], count: int) -> list[Any]:
    """`count` items, or all if there are fewer, spread evenly."""
    return list(items[:: max(1, len(items) // count)])[:count]


def file_prompts(path: Path) -> Prompts:
    """Prompts of a file of any form that trains: its texts that are to be continued, or what comes
    before the first answer of its conversations, if that has LONGEST_PROMPT letters at most."""
    from draftsmith.train.data.bad_rows import BadRow
    from draftsmith.train.data.examples import parse_row
    from draftsmith.train.data.readers import rows_of
    from draftsmith.train.recipe.data_sections import Source

    texts: list[str] = []
    conversations: list[list[dict[str, Any]]] = []
    for place, row in rows_of(Source(path=str(path))):
        try:
            example = parse_row(row, origin=place)
        except BadRow:
            continue
        question = example.messages[: first_answer(example.messages)]
        if example.prompt is not None:
            texts.append(example.prompt)
        elif question and sum(len(message["content"]) for message in question) <= LONGEST_PROMPT:
            conversations.append(list(question))
    return spread_over(texts or conversations, TEXTS)


def first_answer(messages: Sequence[Mapping[str, Any]]) -> int:
    """The place of the first message of the assistant."""
    roles = [message["role"] for message in messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def suite_questions(name: str) -> list[str]:
    """The first turns of all conversations of a suite."""
    from draftsmith.inference.evaluation.suites import default_path, load_suite

    return [one.turns[0] for one in load_suite(name, ROOT / default_path(name))]


def suite_prompts(name: str) -> Prompts:
    """The first turns of conversations of a suite."""
    questions = spread_over(suite_questions(name), TEXTS)
    return [[{"role": "user", "content": question}] for question in questions]


def prompts_by_judge(broad: Path | None) -> dict[str, Prompts]:
    """The prompts that every judge's texts answer."""
    prompts = {
        "chat": file_prompts(DATA / "validation.jsonl.gz"),
        "code": file_prompts(DATA / "code-validation.jsonl.gz"),
    }
    if broad is not None:
        prompts["broad"] = file_prompts(broad)
    return prompts | {name: suite_prompts(name) for name in SUITES}


Texts = dict[str, dict[str, list[tuple[list[int], list[int]]]]]  # by judge and temperature


def judging_texts(model: Path, broad: Path | None, out: Path) -> Texts:
    """(prompt, response) token ids that the target has written, which are kept in a file."""
    file = out / "texts.json"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    from draftsmith.inference import LLM, SamplingParams

    llm = LLM(str(model), max_num_seqs=64)
    texts: Texts = {}
    for judge, prompts in prompts_by_judge(broad).items():
        texts[judge] = {}
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=0)
            write = llm.generate if isinstance(prompts[0], str) else llm.chat
            answers = write(prompts, params)
            texts[judge][f"{temperature:g}"] = [
                (list(answer.prompt_token_ids), list(answer.outputs[0].token_ids))
                for answer in answers
            ]
    save_json(file, texts)
    return texts


def judge(export: Path, model: Path, texts: Texts) -> dict[str, dict[str, float]]:
    """τ expected by judge: the mean over the temperatures and its standard error, and each."""
    import torch

    from draftsmith.inference.entrypoints.loading import load_target
    from draftsmith.inference.evaluation.expected_acceptance import expected_acceptance
    from draftsmith.inference.spec_decode.replay import ReplayResult, standard_error
    from draftsmith.speculators.export import load_drafter, read_drafter_config

    torch.set_num_threads(1)
    target = load_target(str(model), dtype="float32")
    head = read_drafter_config(str(export), target.num_layers)
    target = load_target(target, head.tap_layers)
    drafter = load_drafter(str(export), target)
    result: dict[str, dict[str, float]] = {}
    for name, by_temperature in texts.items():
        lengths = {}
        samples = []
        for temperature, written in by_temperature.items():
            results = expected_acceptance(target, drafter, written, float(temperature), DRAFTS)
            lengths[f"t{temperature}"] = sum(results, ReplayResult()).expected_acceptance_length
            samples.append(dict(enumerate(results)))
        mean = sum(lengths.values()) / len(lengths)
        result[name] = {"tau": mean, "error": standard_error(samples), **lengths}
    return result


def counts(folder: Path) -> dict[str, int]:
    """Steps and supervised tokens of a training."""
    newest = max((folder / "checkpoints").glob("step-*/history.jsonl"), key=os.path.getmtime)
    steps = [json.loads(line) for line in newest.read_text(encoding="utf-8").splitlines()]
    return {"steps": len(steps), "tokens": sum(step["supervised_tokens"] for step in steps)}


# ------------------------------------------------------------------------------ the table

COLUMNS = ("family", "variant", "machine", "states", "minutes", "seeds", "steps", "tokens")


def rows(results: Mapping[str, Any]) -> list[list[str]]:
    """The results -> a row for each variant, budget and machine, whose minutes and texts are its
    own: where the target's hidden states come from, means over its seeds, and their spread where
    there are several; the head is first."""
    runs = results["runs"].values()
    judges = list(next(iter(runs))["judged"])
    table = [[*COLUMNS, *(f"τ, {name}" for name in judges)]]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for result in runs:
        states = "read" if from_disk(result) else "computed"
        of = (result["family"], result["machine"], result["minutes"], states)
        key = (*of, result["variant"])
        groups.setdefault(key, []).append(result)
    for key, same in sorted(groups.items(), key=lambda item: item[0][:4]):
        family, machine, minutes, states, variant = key
        row = [f"`{family}`", f"`{variant}`", machine, states, f"{minutes:g}", str(len(same))]
        row += [
            f"{sum(one[name] for one in same) / len(same):,.0f}" for name in ("steps", "tokens")
        ]
        row += [spread([one["judged"][name]["tau"] for one in same]) for name in judges]
        table.append(row)
    return table


def machine() -> str:
    """The processor and its instructions, by which it computes."""
    import torch

    return f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}"


def from_disk(result: Mapping[str, Any]) -> bool:
    """Whether a run's hidden states of the target were computed before its minutes began."""
    return "features.mode=cache" in result["always"]


def spread(values: Sequence[float]) -> str:
    """`1.54`, or `1.54 (1.52 to 1.57)` of several."""
    mean = f"{sum(values) / len(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def measure(run: Run, out: Path, model: Path, texts: Texts) -> dict[str, Any]:
    """Trains and judges; what the results keep of a run."""
    folder = trained(run, out)
    return {
        "family": run.family,
        "variant": run.variant,
        "changes": variants_of(run.family)[run.variant],
        "always": list(run.always),
        "machine": machine(),
        "minutes": run.minutes,
        "seed": run.seed,
        **counts(folder),
        "judged": judge(folder / "export", model, texts),
    }


app = typer.Typer(add_completion=False)


@app.command()
def compare(
    variant: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(VARIANTS)} for eagle3; again for more. [default: all]"),
    ] = None,
    minutes: Annotated[
        list[float] | None, typer.Option(help="Of a training; again for more. [default: 10]")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Of a training; again for more. [default: 0]")
    ] = None,
    family: Annotated[str, typer.Option(help="A recipe for SmolLM2.")] = "eagle3",
    always: Annotated[
        list[str] | None, typer.Option(help="SECTION.KEY=VALUE of every run; again for more.")
    ] = None,
    broad: Annotated[Path | None, typer.Option(help="A file of broad conversations.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs and results are written.")] = OUT,
) -> None:
    """Train and judge every variant with every budget and seed, and write results.json. Runs that
    are there already are not made again."""
    known = variants_of(family)
    names = variant or list(known)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(
            f"{', '.join(unknown)}: expected {', '.join(known)}", param_hint="--variant"
        )
    out.mkdir(parents=True, exist_ok=True)
    model = ROOT / "runs" / "smollm2-135m-instruct" / "model"
    texts = judging_texts(model, broad, out)
    for budget in minutes or [10.0]:
        for number in seed or [0]:
            for name in names:
                run = Run(name, budget, number, family, tuple(always or []))
                say(run, result_of(run, out, model, texts))
    files = sorted((out / "results").glob("*.json"))
    runs = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    save_json(out / "results.json", {"runs": runs})


def result_of(run: Run, out: Path, model: Path, texts: Texts) -> dict[str, Any]:
    """What is measured of a run, which is trained and judged unless it has been."""
    file = out / "results" / f"{run.name}.json"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        save_json(file, measure(run, out, model, texts))
    return json.loads(file.read_text(encoding="utf-8"))


def say(run: Run, result: Mapping[str, Any]) -> None:
    """Prints a run's figures."""
    shown = "  ".join(f"{name} {judged['tau']:.3f}" for name, judged in result["judged"].items())
    print(f"{run.name}: {result['steps']} steps, {result['tokens']:,} tokens  {shown}", flush=True)


def main(arguments: Sequence[str]) -> None:
    """The command line; `train WORDS...` is `draftsmith train` by the clock of this process."""
    if arguments[:1] == ["train"]:
        sys.exit(train(arguments[1:]))
    app(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
