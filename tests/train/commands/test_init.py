"""`draftsmith init`: the recipe that it writes, what it says of the model and the data, and that
`prepare` takes the recipe."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil

import pytest
from transformers import AutoTokenizer

from draftsmith.speculators.registry import FAMILIES
from draftsmith.train.commands import init
from draftsmith.train.commands.new_recipe import run_name
from draftsmith.train.data.packing import knows_thinking
from draftsmith.train.planner import plan
from draftsmith.train.planner.devices import this_cpu
from draftsmith.train.planner.plan import make_plan
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import make_recipe
from tests.support.cli import call, refused
from tests.support.quickstart_data import source
from tests.support.targets import TOKENIZER

COMMENT = re.compile(r"\S( +)# ")  # behind a value
THINKING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
)


@pytest.fixture
def chats(tmp_path):
    with gzip.open(source("train", 1)["path"], "rt") as file:
        rows = file.read().splitlines()[:100]
    (tmp_path / "chats.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "chats.jsonl"


def options(target, chats, out, *more):
    return ("init", "--model", str(target), "--data", str(chats), "--out", str(out), *more)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_init_of_model_and_data_writes_a_recipe_that_plans(family, chats, tmp_path):
    out = tmp_path / "my.yaml"
    printed = call(*options(TOKENIZER, chats, out, "--family", family, "--gpu", "h100"))[1]
    assert "100 conversations" in printed
    recipe = load_recipe(out)
    assert recipe.family == family
    assert [s.split for s in (*recipe.data.train, *recipe.data.validation)] == [
        "train[5:]",
        "train[:5]",
    ]
    prompts = int(out.read_text().partition("prompts have up to ")[2].split()[0])
    assert recipe.regenerate.max_new_tokens == 256
    assert prompts + 256 <= recipe.data.max_length < prompts + 256 + 128
    assert not recipe.regenerate.endpoints
    if family == "eagle3":
        assert "tap_layers: [2, 8, 13]" in out.read_text()
    assert "drafter" in call("train", str(out), "--dry-run")[1]


@pytest.mark.slow
@pytest.mark.parametrize("flag, least", [("--thinking", 4096 // 2), ("--no-thinking", 256)])
def test_init_of_a_thinking_model_sets_the_mode_and_the_length(flag, least, chats, tmp_path):
    target = shutil.copytree(TOKENIZER, tmp_path / "target")
    (target / "chat_template.jinja").write_text(THINKING)
    out = tmp_path / "my.yaml"
    printed = call(*options(target, chats, out, flag, "--gpu", "h100"))[1]
    recipe = load_recipe(out)
    assert recipe.data.chat_template_kwargs == {"enable_thinking": flag == "--thinking"}
    assert f"thinking mode: {'on' if flag == '--thinking' else 'off'}" in printed
    longest = json.loads((target / "config.json").read_text())["max_position_embeddings"]
    assert recipe.data.max_length <= longest
    assert recipe.regenerate.max_new_tokens >= min(least, longest // 2)


def test_init_says_of_texts_that_they_pass_through_no_template(chats, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"prompt": "Why {i}?", "completion": "So."}}\n' for i in range(20)))
    printed = call(*options(TOKENIZER, texts, tmp_path / "texts.yaml", "--gpu", "h100"))[1]
    assert "20 are texts" in printed and "columns: {user: prompt, assistant: completion}" in printed
    assert "are texts" not in call(*options(TOKENIZER, chats, tmp_path / "my.yaml"))[1]


def test_init_where_writing_takes_long_names_servers(chats, tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.train.commands.init.HOUR", 0.0)
    out = tmp_path / "my.yaml"
    call(*options(TOKENIZER, chats, out, "--gpu", "h100"))
    assert [e.url for e in load_recipe(out).regenerate.endpoints] == ["http://localhost:8000/v1"]


def test_init_where_writing_takes_long_on_a_cpu_trains_on_fewer(chats, tmp_path, monkeypatch):
    monkeypatch.setattr(init, "HOUR", 0.001)
    monkeypatch.setattr(init, "CPU_LEAST_CONVERSATIONS", 3)
    out = tmp_path / "my.yaml"
    printed = call(*options(TOKENIZER, chats, out, "--gpu", "cpu"))[1]
    recipe = load_recipe(out)
    assert recipe.data.train[0].limit == 3 and "first 3 to train on" in printed
    assert recipe.data.train[0].split  # those held out are not among them
    assert make_plan(recipe, this_cpu()).stages[0].sources[0].examples == 3


def test_init_prints_commands_that_a_shell_takes(chats, tmp_path):
    out = tmp_path / "my recipe [1].yaml"
    target = shutil.copytree(TOKENIZER, tmp_path / "my target")
    printed = call(*options(target, chats, out, "--gpu", "h100"))[1]
    lines = [line.strip() for line in printed.splitlines() if line.startswith("  draftsmith")]
    assert [shlex.split(line)[2] for line in lines] == [str(out)] * 3
    (serve,) = [line for line in out.read_text().splitlines() if "vllm serve" in line]
    assert shlex.split(serve.partition("vllm serve ")[2])[0] == str(target)


def test_init_of_folders_with_signs_of_yaml_names_them_in_the_recipe(chats, tmp_path):
    out = tmp_path / "my.yaml"
    data = chats.rename(tmp_path / "\U0001f600 #1.jsonl")
    call(*options(TOKENIZER, data, out))
    assert [source.path for source in load_recipe(out).data.train] == [str(data)]


def test_init_on_a_cpu_tokenises_the_data_for_its_plan_once(chats, tmp_path, monkeypatch):
    count = plan.count_tokens
    calls = []
    monkeypatch.setattr(
        plan, "count_tokens", lambda recipe, examples: calls.append(recipe) or count(recipe)
    )
    out = tmp_path / "my.yaml"
    call(*options(TOKENIZER, chats, out, "--gpu", "cpu"))
    assert len(calls) == 1
    gaps = {match[1] for line in out.read_text().splitlines() if (match := COMMENT.search(line))}
    assert gaps == {" "}  # comments stand alike


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_init_on_a_cpu_takes_what_a_core_can_do(family, chats, tmp_path, monkeypatch):
    monkeypatch.setattr(init, "CPU_VOCABULARY", 1024)  # below that of the target
    out = tmp_path / "my.yaml"
    assert (
        "without a GPU"
        in call(*options(TOKENIZER, chats, out, "--family", family, "--gpu", "cpu"))[1]
    )
    recipe = load_recipe(out)
    assert recipe.data.max_length <= 1024
    assert recipe.training.batch_size == max(1024 // recipe.data.max_length, 1)
    assert recipe.regenerate.turns == "all" and recipe.training.keep_features_gb
    assert recipe.regenerate.max_new_tokens <= 256 and not recipe.regenerate.endpoints
    if family in ("eagle3", "dspark"):
        assert recipe.drafter.init == "least_squares"
        assert recipe.loss == {"forward_kl": 1.0}
        assert recipe.training.muon_learning_rate == 0.005
    if family == "draft_model":  # layers cut out of the target
        assert recipe.training.optimizer == "muon"
    stage = make_plan(recipe, this_cpu()).stages[0]
    assert stage.keeps_features and stage.depths <= 5
    reduced = family in init.CPU_REDUCED
    assert stage.drafter.draft_vocab_size == (1024 if reduced else stage.target.vocab_size)
    assert stage.steps_within_minutes(this_cpu()) >= 50
    epochs = stage.steps * recipe.training.batch_size * recipe.data.max_length / stage.tokens
    assert 20 <= epochs <= 60  # few conversations are known by heart long before the minutes end
    assert "Without a GPU" in out.read_text()


def chat(number: int, *more: tuple[str, str]) -> str:
    turns = [("human", f"{number}: what is two and two?"), ("gpt", "Four."), *more]
    return json.dumps({"conversations": [{"from": who, "value": text} for who, text in turns]})


def test_init_of_conversations_with_faults_writes_a_recipe_that_prepare_takes(
    tmp_path, monkeypatch
):
    """Rows are held out by their number in the file, where bad ones count."""
    monkeypatch.chdir(tmp_path)
    lines = [chat(i) for i in range(20)]
    lines[0] = chat(0, ("human", ""), ("gpt", "Nothing was asked."))
    lines[1] = "{"
    lines[7] = json.dumps({"conversations": [{"from": "gpt", "value": "Go on."}] * 2})
    lines[8] = json.dumps(
        {
            "conversations": [
                {"from": "gpt", "value": "So."},
                *json.loads(chat(8))["conversations"],
            ]
        }
    )
    chats, out = tmp_path / "chats.jsonl", tmp_path / "new" / "my.yaml"
    chats.write_text("\n".join(lines))
    printed = call(*options(TOKENIZER, chats, out))[1]
    recipe = load_recipe(out)
    assert "3 of 20 rows left out" in printed and "1 of 20 conversations begin" in printed
    assert recipe.data.on_bad_row == "drop"
    assert recipe.data.max_bad_row_share >= 3 / 20
    assert recipe.data.validation[0].split == "train[:3]"  # two of three are bad
    code, output = call("prepare", out, f"output_dir={tmp_path / 'run'}")
    assert code == 0, output


@pytest.mark.parametrize("count, validation", [(1, False), (0, True)])
def test_init_of_too_few_conversations_is_refused(count, validation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chats, held_out = tmp_path / "chats.jsonl", tmp_path / "held_out.jsonl"
    chats.write_text("\n".join([*(chat(i) for i in range(count)), "{"]))
    held_out.write_text(chat(0))
    more = ("--validation", str(held_out)) if validation else ()
    out = tmp_path / "my.yaml"
    assert f"{count} usable" in refused(*options(TOKENIZER, chats, out, *more))
    assert not out.exists()


def test_init_finds_a_place_that_cannot_be_written_before_it_reads(tmp_path):
    (tmp_path / "file").write_text("")
    nothing = tmp_path / "nothing.jsonl"
    assert "--out" in refused(*options(TOKENIZER, nothing, tmp_path / "file" / "my.yaml"))


def test_init_finds_a_model_that_is_not_there_before_it_reads(tmp_path):
    nothing = tmp_path / "nothing"
    assert "target.model" in refused(*options(nothing, nothing, tmp_path / "my.yaml"))


@pytest.mark.parametrize(
    "folder, name",
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-8B@v1.0", "qwen3-8b"),
        ("/data/My Model (v2)", "my-model-v2"),
        ("/data/.cache", "cache"),
        ("/data/模型", "model-模型"),
        ("/data/tiny/model", "tiny"),
        ("/data/tiny/run/checkpoint-123/", "run"),
        (f"/hub/models--Qwen--Qwen3-8B/snapshots/{'0' * 40}", "qwen3-8b"),
        ("/model", "target"),
    ],
)
def test_run_name_is_that_of_the_model(folder, name):
    """And a name that a recipe may have."""
    assert run_name(folder, "eagle3") == f"{name}-eagle3"
    tree = {"name": run_name(folder, "eagle3"), "target": {"model": folder}}
    assert make_recipe({**tree, "data": {"train": [{"path": "chats.jsonl"}]}}).name == tree["name"]


def test_run_name_of_a_folder_called_model_is_what_its_config_says(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"_name_or_path": "org/Tiny-1B"}))
    assert run_name(str(folder), "eagle3") == "tiny-1b-eagle3"


def test_init_keeps_a_recipe_that_exists(chats, tmp_path):
    out = tmp_path / "my.yaml"
    out.write_text("mine\n")
    assert "--out" in refused(*options(TOKENIZER, chats, out))
    assert out.read_text() == "mine\n"


@pytest.mark.slow
def test_a_recipe_that_says_nothing_of_thinking_is_warned(chats, tmp_path, caplog):
    target = shutil.copytree(TOKENIZER, tmp_path / "target")
    (target / "chat_template.jinja").write_text(THINKING)
    out = tmp_path / "my.yaml"
    call(*options(target, chats, out, "--no-thinking"))
    call("train", str(out), "--dry-run")
    assert "enable_thinking" not in caplog.text
    call("train", str(out), "--dry-run", "data.chat_template_kwargs={}")
    assert "enable_thinking" in caplog.text


def test_thinking_of_a_template_that_fails_is_left_to_the_rows():
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    assert knows_thinking(tokenizer, THINKING)
    assert not knows_thinking(tokenizer, "{{ raise_exception('a system turn is needed') }}")
