"""A training step and decoding on one GPU, in the shapes of Qwen3-8B with random weights: time by
phase, beside what the device could do at best.

    python scripts/bench_gpu.py --json runs/bench/gpu.json
    python scripts/bench_gpu.py --device cpu          # the same at tiny shapes, in seconds

The bound of a phase is its work by shapes (scripts/roofline.py) over rates that are measured first.
Phases are those of the trainer's telemetry; of `drafter`, the objective is timed by itself. What
is left of a step is `waits`: the host between phases. The target keeps as many of its layers as fit
half of the free memory. What does not fit, or fails, is named, and the others go on.

The first measurements say most: one head's step, then decoding, then the other heads and rows. The
file is written after each, and a second start with the same file, commit and machine goes on where
the first has ended. Between two starts, `bench_peers.py --device cuda` has the peer's step."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from accelerate import Accelerator
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.utils.benchmark import Timer
from transformers import Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.provenance import git_commit
from draftsmith.speculators.errors import DraftsmithError
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.hub import one_line
from draftsmith.speculators.precision import free_memory
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.planner.plan import make_stage
from draftsmith.train.recipe.recipe import Recipe, make_recipe
from scripts import roofline
from scripts.measuring import (
    QWEN3_8B,
    TINY_QWEN3,
    make_trainer,
    random_target,
    save_json,
    table,
    with_peak_memory,
)

PHASES = ("target", "head", "objective", "optimizer")
COLUMNS = ("head", "rows", "s", *PHASES, "waits", "tokens/s", "of bound", "GB", "plan")
DECODING = ("rounds", "drafting", "ms a token", "bound", "of bound")
NONE = "–"


@dataclass(frozen=True)
class Shapes:
    """A target, its heads by family (the drafter's section of a recipe) and the rows and tokens of
    steps, both from what says most, and the prompt and response that are decoded."""

    config: dict[str, int]
    dtype: str
    heads: dict[str, dict[str, Any]]
    steps: tuple[tuple[int, int], ...]
    prompt: int
    written: int
    product: int  # rows and columns of the matrices whose product is timed
    copied: int  # bytes


LARGE = Shapes(  # Qwen3-8B's, and its recipes'
    QWEN3_8B,
    "bfloat16",
    {
        "eagle3": {"unroll_steps": 7, "draft_vocab_size": 32000},
        "dflash": {
            "num_layers": 5,
            "block_size": 16,
            "mask_token_id": 151669,
            "anchors_per_row": 512,
        },
        "draft_model": {"from_target": {"last": 3}},
        "mtp": {"unroll_steps": 3},
    },
    ((8, 4096), (1, 2048), (1, 32768)),
    prompt=128,
    written=64,
    product=8192,
    copied=2**30,
)
TINY = Shapes(
    TINY_QWEN3,
    "float32",
    {
        "eagle3": {"unroll_steps": 3, "draft_vocab_size": 128},
        "dflash": {"num_layers": 2, "block_size": 4, "mask_token_id": 5, "anchors_per_row": 8},
        "draft_model": {"from_target": {"last": 1}},
        "mtp": {"unroll_steps": 2},
    },
    ((2, 128), (1, 64)),
    prompt=16,
    written=8,
    product=256,
    copied=2**22,
)


def measured_rates(shapes: Shapes, device: str) -> roofline.Rates:
    """Of a product of matrices in the dtype of the target, and of a copy."""
    dtype = getattr(torch, shapes.dtype)
    matrix = torch.randn(shapes.product, shapes.product, dtype=dtype, device=device)
    source = torch.zeros(shapes.copied, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    names = {"matrix": matrix, "source": source, "copy": copy}
    product = Timer("matrix @ matrix", globals=names).blocked_autorange(min_run_time=0.1).median
    copying = Timer("copy.copy_(source)", globals=names).blocked_autorange(min_run_time=0.1).median
    return roofline.Rates(2 * shapes.product**3 / product, 2 * shapes.copied / copying)


@dataclass
class Phases:
    """Seconds by phase of the steps of a trainer, in place of its telemetry's own account."""

    device: str
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    events: list[tuple[str, Any, Any]] = field(default_factory=list)

    def watch(self, trainer: Any) -> None:
        """Times the phases of its steps from now on, and the objective inside of `drafter`."""
        trainer.telemetry.phase = self.phase
        objectives = trainer.loss.objectives

        def timed(*arguments: Any) -> Any:
            with self.phase("objective"):
                return objectives(*arguments)

        trainer.loss.objectives = timed

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside counts."""
        if self.device == "cpu":
            began = time.perf_counter()
            yield
            self.spent[name] += time.perf_counter() - began
            return
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self.events.append((name, start, end))

    def read(self, seconds: float) -> dict[str, float]:
        """Seconds of each of PHASES and of `waits`, of a step that took so many, and begins
        anew."""
        for name, start, end in self.events:
            self.spent[name] += start.elapsed_time(end) / 1000
        self.events.clear()
        spent = dict(self.spent)
        self.spent.clear()
        spent["head"] = spent.pop("drafter", 0.0) - spent.get("objective", 0.0)
        by_phase = {name: spent.get(name, 0.0) for name in PHASES}
        return by_phase | {"waits": max(seconds - sum(by_phase.values()), 0.0)}


def recipe_for(family: str, shapes: Shapes, rows: int, length: int, folder: Path) -> Recipe:
    """A recipe of the family over random rows; `folder` has the target's config."""
    half = shapes.dtype == "bfloat16"
    training = {"steps": 1000, "batch_size": rows, "preset": "published"}
    if shapes is LARGE and family == "dflash":
        training["activation_checkpointing"] = True  # as its recipe: of all slots they do not fit
    drafts = min(4, shapes.heads[family].get("block_size", 5) - 1)
    return make_recipe(
        {
            "name": "bench",
            "family": family,
            "target": {"model": str(folder)},
            "data": {"train": [{"path": "random.jsonl"}], "max_length": length},
            "drafter": shapes.heads[family],
            "loss": {"forward_kl": 1.0},
            "evaluation": {"num_speculative_tokens": drafts},
            "training": {"mixed_precision": "bf16" if half else "no", **training},
        }
    )


def step_shape(family: str, options: dict[str, Any], rows: int, length: int) -> Any:
    """The shape of a step of a family with these options of its head."""
    depths = options.get("unroll_steps", 1)
    return roofline.StepShape(
        rows, length, depths, options.get("anchors_per_row", 0), options.get("block_size", 0)
    )


def step_work(family: str, trainer: Any, config: Any, s: Any, itemsize: int) -> dict[str, Any]:
    """The work of each phase of a step."""
    module = trainer.module
    drafts = module.config.draft_vocab_size or config.vocab_size
    owned = [p for name, p in module.named_parameters() if "lm_head" in name and p.requires_grad]
    sizes = {"width": module.config.hidden_size, "drafts": drafts}
    sizes |= {"hidden": config.hidden_size, "vocab": config.vocab_size}
    terms = roofline.objective_terms(family, s)
    return {
        "target": roofline.target_work(config, s.rows, s.length, itemsize),
        "head": roofline.head_work(family, module, s, itemsize),
        "objective": roofline.objective_work(
            terms, min(s.tokens, terms), **sizes, trained=bool(owned)
        ),
        "optimizer": roofline.optimizer_work(sum(p.numel() for p in trainer.parameters)),
    }


def random_rows(vocab: int, length: int, count: int = 16) -> list[TokenRow]:
    """Rows of random tokens, all of which are supervised."""
    ids = np.random.default_rng(0).integers(0, vocab, (count, length))
    return [TokenRow(row, np.ones(length, dtype=bool)) for row in ids]


def timed_step(trainer: Any, phases: Phases, device: str) -> tuple[float, dict[str, float]]:
    """Seconds of a step, and those of its phases."""
    began = time.perf_counter()
    trainer.step(0.5).read(trainer.loss.depths)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return seconds, phases.read(seconds)


def training(
    family: str, model: Any, shapes: Shapes, rows: int, length: int, device: str, repeats: int
) -> tuple[dict[str, Any], dict[str, roofline.Work]]:
    """Medians of a step's seconds by phase, its peak memory beside the plan's formula, and its work
    by shapes."""
    others = _held(device) - (sum(p.nbytes for p in model.parameters()) if device == "cuda" else 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.config.save_pretrained(folder)
        recipe = recipe_for(family, shapes, rows, length, folder)
        precision = "bf16" if shapes.dtype == "bfloat16" else "no"
        accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision)
        tokens = random_rows(model.config.vocab_size, length, max(rows, 16))
        trainer = make_trainer(recipe, model, tokens, accelerator, folder)
        phases = Phases(device)
        phases.watch(trainer)
        try:
            timed_step(trainer, phases, device)  # kernels are compiled
            held = _held(device) - others
            _, peak = with_peak_memory(lambda: timed_step(trainer, phases, device), device)
            steps = [timed_step(trainer, phases, device) for _ in range(repeats)]
        finally:
            trainer.target.close()  # its hooks on the model, which others use after it
        plan = make_stage(recipe, device=torch.device(device))
    by_phase = {name: median(parts[name] for _, parts in steps) for name in steps[0][1]}
    work = step_work(
        family,
        trainer,
        model.config,
        step_shape(family, shapes.heads[family], rows, length),
        getattr(torch, shapes.dtype).itemsize,
    )
    result = {
        "seconds": median(seconds for seconds, _ in steps),
        "phases": by_phase,
        "peak": peak + held,
        "plan": sum(plan.memory.values()),
        "tokens": rows * length,
    }
    return result, work


def _held(device: str) -> int:
    """Bytes of the GPU that are in use; on a CPU the peak alone is known."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def exported_head(model: Any, shapes: Shapes, device: str, folder: Path) -> Any:
    """A new EAGLE-3 head, which is exported to `folder`."""
    size = shapes.heads["eagle3"]["draft_vocab_size"]
    probe = FrozenTarget(model)
    config = config_for_target(probe, "eagle3", draft_vocab_size=size)
    probe.close()
    target = FrozenTarget(model, config.tap_layers)
    drafter = family_class("eagle3")(config).attach(target).to(device)
    drafter.initialise_from(target)
    export_drafter(drafter, folder, dtype=model.dtype)
    target.close()
    return drafter


def decoding(
    model: Any, shapes: Shapes, device: str, eager: bool, folder: Path
) -> list[dict[str, Any]]:
    """Milliseconds a token of one row, without a head and with an EAGLE-3 head, beside the bytes
    that a round must read."""
    drafter = exported_head(model, shapes, device, folder / "head")
    drafts = 4
    drafting = {"model": str(folder / "head"), "num_speculative_tokens": drafts}
    longest = shapes.prompt + shapes.written
    limits = {"max_num_seqs": 1, "max_model_len": longest + 2 * drafts}
    prompt = {
        "prompt_token_ids": [3 + 7 * i % (model.vocab_size - 3) for i in range(shapes.prompt)]
    }
    params = SamplingParams(temperature=0, max_tokens=shapes.written, ignore_eos=True)
    traced = {"mode": 3, "backend": "eager"} if device == "cpu" else None  # no default there
    how = {"enforce_eager": True} if eager else {"compilation_config": traced}
    results = []
    llm = LLM(model, speculative_config=drafting, **how, **limits)
    try:
        llm.warm_up(longest=longest)
        for speculate in (False, True):
            seconds, output = _timed(
                partial(llm.generate, prompt, params, False, speculate=speculate)
            )
            rounds = len(output.metrics.accepted_per_round)
            head = drafter if speculate else None
            size = roofline.round_bytes(model, longest, model.dtype.itemsize, head, drafts)
            results.append(
                {
                    "rounds": "eager" if output.metrics.num_compiled_rounds == 0 else "compiled",
                    "drafting": speculate,
                    "ms_per_token": 1e3 * seconds / shapes.written,
                    "bytes_per_token": size * rounds / shapes.written,
                }
            )
    finally:
        llm.engine.target.close()  # its hooks on the model, which others use after it
    return results


def _timed(generate: Callable[[], list[RequestOutput]]) -> tuple[float, RequestOutput]:
    """The median seconds of three calls that write one response, and the last response."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        (output,) = generate()
        seconds.append(time.perf_counter() - began)
    return median(seconds), output


def fitting_layers(shapes: Shapes, device: str) -> int:
    """How many of the target's layers are kept: all, or those that fit half of the free memory."""
    config = Qwen3Config(**shapes.config)
    layers = config.num_hidden_layers
    if device == "cpu":
        return layers
    itemsize = getattr(torch, shapes.dtype).itemsize
    layer = roofline.target_work(config, 0, 1, itemsize).bytes / layers
    tables = 2 * config.vocab_size * config.hidden_size * itemsize
    room = torch.cuda.mem_get_info()[0] / 2 - tables
    return max(4, min(layers, int(room / layer)))


def training_cells(result: dict[str, Any]) -> list[str]:
    """A step's row of the table: seconds, the share of the bound that each phase reaches, tokens
    per second, memory beside the plan's. `result`: with the bound of each phase."""
    if "fault" in result:
        return [result["head"], result["rows"], result["fault"], *[NONE] * (len(COLUMNS) - 3)]
    bounds = result["bounds"]
    phases = result["phases"]
    shown = [f"{1e3 * phases[p]:.1f} ({bounds[p] / max(phases[p], 1e-9):.0%})" for p in PHASES]
    main = sum(bounds[p] for p in ("target", "head")) / sum(phases[p] for p in ("target", "head"))
    return [
        result["head"],
        result["rows"],
        f"{result['seconds']:.3f}",
        *shown,
        f"{1e3 * phases['waits']:.1f}",
        f"{result['tokens'] / result['seconds']:,.0f}",
        f"{main:.0%}",
        f"{result['peak'] / 1e9:.1f}",
        f"{result['plan'] / 1e9:.1f}",
    ]


def decoding_cells(result: dict[str, Any], rates: roofline.Rates) -> list[str]:
    """A row of the table of decoding."""
    if "fault" in result:
        return [result["rounds"], NONE, result["fault"], *[NONE] * (len(DECODING) - 3)]
    bound = 1e3 * result["bytes_per_token"] / rates.bandwidth
    return [
        result["rounds"],
        "on" if result["drafting"] else "off",
        f"{result['ms_per_token']:.2f}",
        f"{bound:.2f}",
        f"{bound / result['ms_per_token']:.0%}",
    ]


@dataclass(frozen=True)
class Piece:
    """What is measured at once. `kind`: "training" or "decoding"; `names`: what a table calls it;
    `work`: its results, a row each."""

    kind: str
    names: dict[str, str]
    work: Callable[[], list[dict[str, Any]]]

    @property
    def key(self) -> str:
        """By which the file knows it."""
        return " ".join((self.kind, *self.names.values()))


def results_of(piece: Piece) -> list[dict[str, Any]]:
    """Its results with its key and seconds, or what has failed: memory, or a kernel."""
    began = time.perf_counter()
    try:
        results = piece.work()
    except torch.OutOfMemoryError:
        results = [{"fault": "out of memory"}]
    except (DraftsmithError, RuntimeError) as error:
        traceback.print_exc()
        results = [{"fault": escape(one_line(error)[:200])}]
    seconds = time.perf_counter() - began
    return [{"piece": piece.key, "took": seconds} | piece.names | result for result in results]


def works_still(device: str) -> bool:
    """Frees what nobody holds; False if an error has left the device to no more use of this
    process, as a kernel's illegal address does."""
    gc.collect()
    try:
        free_memory()
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def all_pieces(
    families: Iterable[str],
    model: Any,
    shapes: Shapes,
    device: str,
    repeats: int,
    rates: roofline.Rates,
) -> list[Piece]:
    """Those that say most come first: the first head's step, decoding, then the other heads and
    rows."""

    def step(family: str, rows: int, length: int) -> list[dict[str, Any]]:
        result, work = training(family, model, shapes, rows, length, device, repeats)
        bounds = {phase: part.seconds(rates) for phase, part in work.items()}
        works = {phase: asdict(part) for phase, part in work.items()}
        return [result | {"bounds": bounds, "work": works}]

    def tokens(eager: bool) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            return decoding(model, shapes, device, eager, Path(folder))

    first, *others = [
        Piece(
            "training",
            {"head": family, "rows": f"{rows} × {length:,}"},
            partial(step, family, rows, length),
        )
        for rows, length in shapes.steps
        for family in families
    ]
    decoded = [
        Piece("decoding", {"rounds": rounds}, partial(tokens, rounds == "eager"))
        for rounds in ("compiled", "eager")
    ]
    return [first, *decoded, *others]


def begun(file: Path | None, tree: dict[str, Any]) -> dict[str, Any]:
    """What an earlier start of the same measurements has written to the file, else `tree`; rates
    are those that were measured first."""
    if file is None or not file.exists():
        return tree
    earlier = json.loads(file.read_text(encoding="utf-8"))
    same = all(earlier.get(name) == tree[name] for name in ("machine", "about", "commit"))
    return earlier if same else tree


def measure(
    pieces: Iterable[Piece], tree: dict[str, Any], device: str, report: Callable[[str], None]
) -> Iterator[list[dict[str, Any]]]:
    """The results of the pieces that `tree` has not, each after it was put there; those that failed
    before come last. `report`: is told what is left."""
    results = tree["training"] + tree["decoding"]
    took = {result["piece"]: result["took"] for result in results}
    failed = {result["piece"] for result in results if "fault" in result}
    done = took.keys() - failed
    left = [piece for piece in pieces if piece.key not in done]
    left.sort(key=lambda piece: piece.key in failed)
    if done:
        report(f"measurements of an earlier start: {len(done)}; without its file all are new")
    while left:
        if took:
            seconds = len(left) * sum(took.values()) / len(took)
            report(f"measurements left: {len(left)}, some {seconds:.0f} s")
        piece = left.pop(0)
        new = results_of(piece)
        took[piece.key] = new[0]["took"]
        tree[piece.kind] = [x for x in tree[piece.kind] if x["piece"] != piece.key] + new
        yield new
        if not works_still(device):
            sys.exit(
                "bench_gpu: the GPU is of no more use to this process; start it again to go on"
            )


def tables(tree: dict[str, Any], cells: dict[str, Any]) -> Iterator[Table]:
    """All that was measured, by kind. `cells`: of a kind's result."""
    steps = table("a training step: ms (share of the bound)", *COLUMNS, left=2)
    decoded = table("decoding, one row: ms a token", *DECODING, left=2)
    for kind, shown in (("training", steps), ("decoding", decoded)):
        for result in tree[kind]:
            shown.add_row(*cells[kind](result))
        yield shown


def main(
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="cpu: tiny shapes.")] = "cuda",
    head: Annotated[list[str] | None, typer.Option(help="Of these families only.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write them there, or go on from there.")
    ] = None,
) -> None:
    """Time training steps by phase and decoding on one GPU, beside what it could do at best."""
    shapes = LARGE if device == "cuda" else TINY
    layers = fitting_layers(shapes, device)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    about = f"{layers} of {shapes.config['num_hidden_layers']} layers of the target"
    tree = begun(
        json_file,
        {
            "machine": f"{name}, torch {torch.__version__}",
            "about": f"{about}, {repeats} timed steps",
            "commit": git_commit(Path(__file__).parent),
            "rates": asdict(measured_rates(shapes, device)),
            "training": [],
            "decoding": [],
        },
    )
    rates = roofline.Rates(**tree["rates"])
    console = Console(width=140)
    console.print(
        f"{tree['machine']}: {rates.flops / 1e12:,.2f} TFLOP/s of products in {shapes.dtype},"
        f" {rates.bandwidth / 1e9:,.0f} GB/s of copies; {about}"
    )
    model = random_target(shapes.config | {"num_hidden_layers": layers}, device, shapes.dtype)
    pieces = all_pieces(head or shapes.heads, model, shapes, device, repeats, rates)
    cells = {"training": training_cells, "decoding": partial(decoding_cells, rates=rates)}
    for results in measure(pieces, tree, device, console.print):
        if json_file is not None:
            save_json(json_file, tree)
        for result in results:
            kind = "decoding" if "rounds" in result else "training"
            console.print("  ".join(cells[kind](result)))
    for shown in tables(tree, cells):
        console.print(shown)


if __name__ == "__main__":
    typer.run(main)
