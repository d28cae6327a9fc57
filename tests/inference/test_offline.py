"""The side-by-side comparison: every way writes the same, and what is saved can be read back."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.inference.evaluation.demo_prompts import ALIASES, DEMOS, demo_prompts
from draftsmith.inference.evaluation.side_by_side import (
    SideBySide,
    compare_methods,
    repeats_itself,
)
from draftsmith.inference.offline import register
from draftsmith.speculators.errors import ConfigError


def run(*arguments: str):
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("demo", ["te", "chat"])
def test_command_of_the_guide(folders, tmp_path, demo):
    saved = tmp_path / "deep" / "results.json"
    done = run(
        f"--model={folders[0]}",
        f"--speculative-model={folders[1]}",
        "--device=cpu",
        "--max-tokens=10",
        "--repeats=2",
        "--tensor-parallel-size=1",
        "--num-speculative-tokens=5",
        "--ngram-prompt-lookup-max=3",
        f"--demo={demo}",
        "--gpu-memory-utilization=0.9",
        "--trust-remote-code",
        "--enforce-eager",
        f"--save-output={saved}",
    )
    assert done.exit_code == 0, done.output
    results = json.loads(saved.read_text(encoding="utf-8"))
    names = ["default", "speculative", "ngram"]
    assert list(results) == [*names, "versions", "arguments"]
    assert all(word in done.output for word in (*names, "tok/s", "yes"))
    assert results["arguments"]["num_speculative_tokens"] == 5
    texts, chats = demo_prompts(demo)
    tokens = [output["token_ids"] for output in results["default"]["outputs"]]
    rate = results["default"]["timings"]["tokens_per_second"]
    assert len(tokens) == len(texts) + len(chats)
    for name in names:
        result, metrics = results[name], results[name]["metrics"]
        assert [output["token_ids"] for output in result["outputs"]] == tokens
        assert [run["repeat"] for run in metrics["passes"]["speculative"]] == [0, 1]
        assert metrics["output_tokens"] == sum(map(len, tokens))
        if name != "default":
            speedup = result["timings"]["tokens_per_second"] / rate
            assert metrics["speedup_vs_autoregressive"]["value"] == pytest.approx(speedup)
            (check,) = metrics["lossless"]
            assert (check["checked_prompts"], check["details"]) == (len(tokens), [])
    assert "speedup_vs_autoregressive" not in results["default"]["metrics"]
    assert results["speculative"]["metrics"]["num_drafts"] > 0


def test_without_a_drafter_ngram_is_compared_alone_and_a_template_makes_turns(folders, tmp_path):
    template, saved = tmp_path / "template.jinja", tmp_path / "results.json"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    options = ["--temperature=0.7", "--max-tokens=4", "--repeats=1", f"--save-output={saved}"]
    done = run(f"--model={folders[0]}", "--demo=en", f"--template={template}", *options)
    assert done.exit_code == 0, done.output
    results = json.loads(saved.read_text(encoding="utf-8"))
    assert set(results) == {"default", "ngram", "versions", "arguments"}
    assert not results["ngram"]["metrics"]["lossless"]
    prompts = [output["prompt"] for output in results["default"]["outputs"]]
    assert prompts == [f"[{text}]" for text in demo_prompts("en")[0]]


def test_text_that_differs_is_told_and_fails(folders, tmp_path, monkeypatch):
    """Drafting that changed a token would be seen: here the engine is made to change one."""
    generate = LLM.generate

    def tampered(self, *args, **kwargs):
        outputs = generate(self, *args, **kwargs)
        if self.engine.proposer is not None:
            outputs[-1].outputs[0].token_ids[2] ^= 1
        return outputs

    monkeypatch.setattr(LLM, "generate", tampered)
    saved = tmp_path / "results.json"
    done = run(f"--model={folders[0]}", "--max-tokens=6", "--repeats=1", f"--save-output={saved}")
    assert done.exit_code == 1 and "prompt 7, token 2" in done.output


@pytest.mark.parametrize("option", ["--demo=fr", "--save-output=results.txt"])
def test_what_cannot_be_done_is_said_before_anything_is_loaded(option):
    error = run("--model=nowhere", option).exception
    assert isinstance(error, ConfigError) and error.where == option.replace("=", " ")


def test_every_demo_has_prompts():
    for name in (*DEMOS, *ALIASES):
        texts, chats = demo_prompts(name)
        assert len(texts) + len(chats) >= 8 and not (texts and chats)


def test_every_repeat_of_a_method_writes_the_same(folders):
    methods = {"head": {"model": folders[1], "num_speculative_tokens": 2}}
    engines = SideBySide(folders[0], methods, max_num_seqs=2)
    prompts = [Prompt(None, [5 + i] * 9) for i in range(4)]
    measured = engines.run(prompts, SamplingParams(temperature=1.0, max_tokens=12), 2)["head"]
    first, second = measured.passes["speculative"]
    cell = measured.cell()
    assert first.tokens == second.tokens == cell.output_tokens
    assert cell.num_rounds == cell.num_drafts and not cell.lossless


@pytest.mark.parametrize("rows, counted", [(2, [0, 1, 2, 2, 3, 4]), (1, [0, 1, 1, 2, 2, 3, 3, 4])])
def test_progress_of_a_pass_counts_its_responses(rows, counted, folders):
    """Methods take turns: over both prompts where both are in flight, else over one at a time."""
    reported = list[tuple[float, str, float | None]]()

    def progress(done: float, note: str = "", total: float | None = None) -> None:
        reported.append((done, note, total))

    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    prompts = [Prompt(None, [5, 6, 7] * 3), Prompt(None, [7, 6, 5] * 3)]
    engines = SideBySide(folders[0], {"ngram": ngram}, max_num_seqs=rows)
    engines.run(prompts, SamplingParams(max_tokens=4), 1, progress)
    passes = [(done, note, total) for done, note, total in reported if "pass" in note]
    assert [done for done, _, _ in passes] == counted
    assert {total for _, _, total in passes} == {4}
    assert {note for _, note, _ in passes} == {"default, pass 1 of 1", "ngram, pass 1 of 1"}


def interrupting(monkeypatch, after: int) -> None:
    """Ctrl-C arrives in the call of `LLM.generate` that follows this many."""
    generate, calls = LLM.generate, iter(range(after + 1))

    def interrupted(llm, *arguments, **options):
        if next(calls) == after:
            raise KeyboardInterrupt
        return generate(llm, *arguments, **options)

    monkeypatch.setattr(LLM, "generate", interrupted)


@pytest.mark.parametrize(
    "after, names",
    [(3, []), (4, ["default", "ngram"]), (5, ["default", "ngram"])],
)
def test_comparison_that_is_interrupted_prints_and_saves_the_methods_it_has_measured(
    after, names, folders, tmp_path, monkeypatch, capsys
):
    """Two warm-ups, then the passes default, ngram of a repeat and ngram, default of the next."""
    interrupting(monkeypatch, after)
    saved = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        compare_methods(
            str(folders[0]),
            {"ngram": {"method": "ngram", "num_speculative_tokens": 2}},
            lambda tokenizer: [Prompt(None, [5, 6, 7] * 3)],
            SamplingParams(max_tokens=6),
            repeats=2,
            title="chat",
            saved=saved,
            arguments={},
        )
    printed = capsys.readouterr()
    assert "2 passes of each, 24 tokens at most" in printed.err
    assert all((name in printed.out) == (name in names) for name in ("default", "ngram"))
    results = json.loads(saved.read_text()) if names else {}
    assert [name for name in results if name not in ("versions", "arguments")] == names
    if "ngram" in names:  # against the one pass of the default that ran beside it
        assert len(results["ngram"]["metrics"]["passes"]["speculative"]) == 1
        assert results["ngram"]["metrics"]["speedup_vs_autoregressive"]["value"] > 0


@pytest.mark.parametrize(
    "calls, extent", [(5, "1 of 2 prompts"), (6, "2 prompts")], ids=["second prompt", "rounds"]
)
def test_table_is_of_the_prompts_that_all_methods_have_answered(
    calls, extent, folders, monkeypatch, capsys
):
    """Two warm-ups, then each prompt by default and ngram; then rounds are timed."""
    interrupting(monkeypatch, calls)
    with pytest.raises(KeyboardInterrupt):
        compare_methods(
            str(folders[0]),
            {"ngram": {"method": "ngram", "num_speculative_tokens": 2}},
            lambda tokenizer: [Prompt(None, [5, 6, 7] * 3), Prompt(None, [7, 6, 5] * 3)],
            SamplingParams(max_tokens=6),
            repeats=1,
            title="chat",
            saved=None,
            arguments={},
            max_num_seqs=1,
        )
    printed = capsys.readouterr().out
    assert f"chat: {extent}, T=1" in printed and "ngram" in printed


def test_responses_that_repeat_themselves_are_known():
    """On them n-grams look better than they are."""
    assert repeats_itself([1, 2, 3, 4, *[5, 6] * 8]) and repeats_itself([9] * 16)
    assert not repeats_itself(list(range(40))) and not repeats_itself([9] * 15)
