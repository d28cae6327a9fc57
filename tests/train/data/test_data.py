"""Masks cover what the assistant must write and nothing else, in real template styles; packing is
lossless.

The templates are written for these tests in the style of well-known ones, with the difficulty of
each kept."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.speculators.errors import DataError
from draftsmith.train.data.bad_rows import BadRow, BadRows
from draftsmith.train.data.examples import Example, parse_row, without_weights
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.packing import TokenRow, collate, fit_rows, pack, prepare_rows
from tests.support.errors import raises_at

SPECIAL = "<|im_start|> <|im_end|> <s> </s> [INST] [/INST] <|begin_of_text|> <|eot_id|>".split()
SPECIAL += "<|start_header_id|> <|end_header_id|> <bos> <start_of_turn> <end_of_turn>".split()

# ChatML whose markers leave the end-of-turn token out, as many published templates do.
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED_CLOSED = CHATML_MARKED.replace(
    "{% endif %}<|im_end|>\n", "<|im_end|>\n{% endif %}"
).replace("{% endgeneration %}", "<|im_end|>\n{% endgeneration %}")
# And such whose markers enclose the turn's header too, which the generation prompt has.
CHATML_MARKED_WHOLE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML = CHATML_MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LLAMA3 = (
    "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "Tools: {{ tools | tojson }}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{"
    " raise_exception('roles must alternate user/assistant') }}{% endif %}{% if m.role == 'user'"
    " %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# The system prompt stands before the *last* user turn (Mistral v0.3): every new turn moves it.
MISTRAL_MOVING_SYSTEM = (
    "{% set system = messages[0].content %}{% set turns = messages[1:] %}{% set last = turns |"
    " selectattr('role', 'equalto', 'user') | list | last %}<s>{% for m in turns %}{% if m.role =="
    " 'user' %}[INST] {% if m is sameas last %}{{ system }}\n\n{% endif %}{{ m.content }} [/INST]{%"
    " else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# Thoughts stay only after the last user turn, and the answers there always have a block for them.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last"
    " = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if"
    " m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}{% set answer ="
    " m.content %}{% if '</think>' in answer %}{% set thought ="
    " answer.split('</think>')[0].split('<think>')[-1].strip() %}{% set answer ="
    " answer.split('</think>')[-1].lstrip() %}{% endif %}{% if loop.index0 > ns.last %}<think>\n{{"
    " thought }}\n</think>\n\n{% endif %}{{ answer }}{% else %}{{ m.content }}{% endif"
    " %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if"
    " enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Thoughts are dropped everywhere, yet the generation prompt opens one (DeepSeek-R1).
R1 = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}Assistant: {{"
    " m.content.split('</think>')[-1] }}</s>{% else %}User: {{ m.content }}{% endif %}{% endfor"
    " %}{% if add_generation_prompt %}Assistant: <think>\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not"
    " supported') }}{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role"
    " }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt"
    " %}<start_of_turn>model\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges across spaces and line ends, so that boundaries can be got
    wrong."""
    bpe = Tokenizer(models.BPE())
    pieces = (
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")  # as Llama 3 and Qwen split
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    bpe.decoder = decoders.ByteLevel()
    text = [
        "hello there, how are you?\n\nfine, thanks.\n\n\n",
        "user assistant model Assistant: <think>\n\n\n",
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(text * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", bos_token="<s>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.add_tokens(["<tool_call>", "</tool_call>"])
    return fast


def chat(*turns: str, system: str | None = None) -> Example:
    """user, assistant, user, ... in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)
    ]
    return parse_row({"messages": messages}, origin="chats.jsonl:7")


def supervised(tokenizer, row: TokenRow) -> list[str]:
    """The decoded stretches under the mask."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask.astype(int), [0]])))
    return [
        tokenizer.decode(row.input_ids[a:b], skip_special_tokens=False)
        for a, b in edges.reshape(-1, 2)
    ]


def rows_of(tokenizer, template: str, example: Example, **options) -> list[TokenRow]:
    return ConversationTokenizer(tokenizer, chat_template=template, **options).rows(example)


STYLES = {
    "chatml-marked": (CHATML_MARKED, "{}<|im_end|>"),
    "chatml-marked-closed": (CHATML_MARKED_CLOSED, "{}<|im_end|>"),
    "chatml-marked-whole": (CHATML_MARKED_WHOLE, "{}<|im_end|>"),
    "chatml": (CHATML, "{}<|im_end|>"),
    "llama3": (LLAMA3, "{}<|eot_id|>"),
    "mistral": (MISTRAL, " {}</s>"),
    "gemma": (GEMMA, "{}<end_of_turn>"),
}


@pytest.mark.parametrize("style", ["chatml-marked", "llama3"])
def test_system_prompt_and_unanswered_last_question_are_context_only(tokenizer, style):
    template, form = STYLES[style]
    (row,) = rows_of(tokenizer, template, chat("hello", "fine", "and you?", system="be brief"))
    assert supervised(tokenizer, row) == [form.format("fine")]
    assert "be brief" in tokenizer.decode(row.input_ids)
    assert "and you?" not in tokenizer.decode(row.input_ids)


words = (
    st.text("abc XYZ.,:;!?-+é中🙂{}<>|\n\t", min_size=1, max_size=12).map(str.strip).filter(bool)
)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=8, deadline=None)
@given(pairs=st.lists(st.tuples(words, words), min_size=1, max_size=4))
@example(pairs=[("hello", "fine, thanks.\n\nAnd you?"), ("2 + 2?\n", "2 + 2 = 4")])
def test_property_masked_text_is_the_answers_plus_end_marker(tokenizer, style, pairs):
    """And what follows the last end-of-turn token is no part of the row."""
    template, form = STYLES[style]
    example = chat(*(text for pair in pairs for text in pair))
    (row,) = rows_of(tokenizer, template, example)
    assert supervised(tokenizer, row) == [form.format(answer) for _, answer in pairs]
    assert row.loss_mask[-1]
    whole = tokenizer.apply_chat_template(
        list(example.messages), chat_template=template, return_dict=False
    )
    assert row.input_ids.tolist() == whole[: len(row)]


def test_marks_that_end_inside_a_character_are_completed(tokenizer):
    """Of a character that is several byte tokens, transformers marks only the first."""
    (row,) = rows_of(tokenizer, CHATML_MARKED, chat("hi", "caf\u00e9", "ok?", "\U0001f642"))
    assert supervised(tokenizer, row) == ["caf\u00e9<|im_end|>", "\U0001f642<|im_end|>"]


def test_an_open_question_is_its_own_prompt(tokenizer):
    converter = ConversationTokenizer(tokenizer, chat_template=LLAMA3)
    answered, (row,) = chat("a", "b", "c", "d"), converter.rows(chat("a", "b", "c", "d"))
    prompt = converter.prompt_ids(answered)
    assert prompt == converter.prompt_ids(chat("a", "b", "c"))
    assert row.input_ids[: len(prompt)].tolist() == prompt


# ------------------------------------------------------------------ rewritten history


def conversation(*turns: tuple[str, str]) -> Example:
    return parse_row({"messages": [{"role": r, "content": c} for r, c in turns]}, origin="x")


def test_history_that_loses_thoughts_makes_rows_of_its_turns(tokenizer):
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi", "reasoning_content": "greet"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "see you", "reasoning": "part"},
    ]
    first, second = rows_of(tokenizer, QWEN3, parse_row({"messages": messages}, origin="x"))
    assert supervised(tokenizer, first) == ["<think>\ngreet\n</think>\n\nhi<|im_end|>"]
    assert supervised(tokenizer, second) == ["<think>\npart\n</think>\n\nsee you<|im_end|>"]
    assert "greet" not in tokenizer.decode(second.input_ids), (
        "the context is what the target will see"
    )


def test_turns_that_are_not_rewritten_share_a_row(tokenizer):
    """After one user turn, a tool call and the final answer both keep their thoughts: one row for
    both."""
    example = conversation(
        ("user", "hello"),
        ("assistant", "<think>\na\n</think>\n\nhi"),
        ("user", "compute"),
        ("assistant", "<think>\nb\n</think>\n\nrun it"),
        ("tool", "3"),
        ("assistant", "<think>\nc\n</think>\n\nthree"),
    )
    rows = rows_of(tokenizer, QWEN3, example)
    assert [supervised(tokenizer, row) for row in rows] == [
        ["<think>\na\n</think>\n\nhi<|im_end|>"],
        ["<think>\nb\n</think>\n\nrun it<|im_end|>", "<think>\nc\n</think>\n\nthree<|im_end|>"],
    ]


def test_template_variables_reach_the_template(tokenizer):
    (row,) = rows_of(
        tokenizer, QWEN3, chat("hello", "hi"), template_kwargs={"enable_thinking": False}
    )
    assert supervised(tokenizer, row) == ["hi<|im_end|>"], (
        "the empty thought belongs to the generation prompt"
    )


def test_a_moving_system_prompt_makes_rows_of_its_turns(tokenizer):
    example = chat("hello", "hi", "bye", "see you", system="be brief")
    rows = rows_of(tokenizer, MISTRAL_MOVING_SYSTEM, example)
    assert [supervised(tokenizer, row) for row in rows] == [[" hi</s>"], [" see you</s>"]]
    assert all(tokenizer.decode(row.input_ids).count("be brief") == 1 for row in rows)


# ------------------------------------------------------------------ turns of weight 0


def weighed(**marks) -> Example:
    """Three answers, of which the first has `marks`, and the second bears a mark of its own."""
    messages = [dict(message) for message in chat("a", "b", "c", "d", "e", "f").messages]
    messages[1] |= marks
    messages[3] |= {"weight": 1, "train": True}
    return parse_row({"messages": [RULES, *messages]}, origin="chats.jsonl:7")


@pytest.mark.parametrize("marks", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_turn_of_weight_0_is_context(tokenizer, marks):
    (row,) = rows_of(tokenizer, CHATML, weighed(**marks))
    (whole,) = rows_of(tokenizer, CHATML, weighed())
    assert row.input_ids.tolist() == whole.input_ids.tolist()
    assert supervised(tokenizer, row) == ["d<|im_end|>", "f<|im_end|>"]
    assert len(supervised(tokenizer, whole)) == 3
    rows = rows_of(tokenizer, CHATML, without_weights(weighed(**marks)))
    assert rows[0].loss_mask.tolist() == whole.loss_mask.tolist()
    with pytest.raises(DataError, match=r"turn 1 of 7 \(system: .*does not show its text"):
        rows_of(tokenizer, NO_SYSTEM, weighed(**marks))


def test_conversation_of_turns_of_weight_0_has_nothing_to_learn(tokenizer):
    messages = [chat("a").messages[0], {"role": "assistant", "content": "b", "weight": 0}]
    with pytest.raises(DataError, match=r"chats.jsonl:7: .*no assistant turn to learn from"):
        rows_of(tokenizer, CHATML, parse_row({"messages": messages}, origin="chats.jsonl:7"))


@pytest.mark.parametrize("marks", [{"weight": 0.5}, {"weight": "0"}, {"train": "no"}])
def test_weight_that_is_neither_0_nor_1_is_refused(marks):
    with raises_at(BadRow, "chats.jsonl:7"):
        weighed(**marks)


# ------------------------------------------------------------------ refusals

MARKS_NOTHING = CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'model'")

REFUSALS = {
    "prompt opens a thought": (R1, chat("hi", "ok, yes"), "'ok, yes'.*generation prompt"),
    "thoughts dropped": (R1, chat("hi", "<think>hm</think>yes"), "does not show its text"),
    "no system role": (GEMMA, chat("hi", "yes", system="be brief"), "System role not supported"),
    "no assistant": (CHATML, chat("hi"), "chats.jsonl:7: .*no assistant turn"),
    "merged boundary": (CHATML, chat("hi", "\nyes"), "changes the tokens of the prompt"),
    "merged boundary, marked": (CHATML_MARKED, chat("hi", "\nyes"), "changes the tokens of"),
    "nothing marked": (MARKS_NOTHING, chat("hi", "yes"), "its mask is empty"),
    "nothing to learn": (CHATML, chat("hi", " "), "it is empty"),
    "assistant first": (CHATML, conversation(("assistant", "hi")), "nothing prompts it"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_mask_that_cannot_be_proved_is_an_error_quoting_the_turn(tokenizer, case):
    template, example, message = REFUSALS[case]
    with pytest.raises(DataError, match=message):
        rows_of(tokenizer, template, example)


def test_lost_reasoning_is_an_error_unless_dropped(tokenizer):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "because"},
    ]
    example = parse_row({"messages": messages}, origin="x")
    with pytest.raises(DataError, match=r"does not show its reasoning.*data.reasoning: drop"):
        rows_of(tokenizer, CHATML, example)
    (row,) = rows_of(tokenizer, CHATML, example, reasoning="drop")
    assert supervised(tokenizer, row) == ["b<|im_end|>"]


# Hermes' and Qwen's way: calls are JSON in tags, results are the user's; thoughts in tags wherever
# they are given.
HERMES = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}{% for m"
    " in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content"
    " }}</tool_response>{% else %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{"
    " m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls"
    " %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endif %}<|im_end|>\n{%"
    " endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TALK = {
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    "messages": [
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "ask",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 1}'},
                }
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 3.", "reasoning_content": "easy"},
    ],
}
ANSWERS = [
    '<think>ask</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>',
    "<think>easy</think>It is 3.<|im_end|>",
]


def test_parts_and_arguments_are_read_as_the_server_reads_them():
    asked = {"role": "user", "content": ["1", {"type": "text", "text": "2?"}]}
    answer = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": ""}}]}
    example = parse_row({"messages": [asked, answer]}, origin="here")
    assert example.messages[0]["content"] == "1\n2?"
    assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_nulls_of_json_text_stay_and_those_of_columns_are_none():
    """Arrow fills up what a row has not; a server hands JSON as it is to the template."""
    call = {"name": "add", "arguments": '{"a": null}', "id": None}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    asked = {"role": "user", "content": "1?"}
    tools = '[{"function": {"name": "add", "default": null}}]'
    example = parse_row({"messages": [asked, answer], "tools": tools}, origin="here")
    (called,) = example.messages[1]["tool_calls"]
    assert called["function"] == {"name": "add", "arguments": {"a": None}}
    assert example.tools == ({"function": {"name": "add", "default": None}},)


def test_tool_calls_and_reasoning_are_supervised_and_their_results_are_not(tokenizer):
    example = parse_row(TOOL_TALK, origin="x")
    (row,) = rows_of(tokenizer, HERMES, example)
    assert supervised(tokenizer, row) == ANSWERS
    prompt = ConversationTokenizer(tokenizer, chat_template=HERMES).prompt_ids(example)
    assert row.input_ids[: len(prompt)].tolist() == prompt, (
        "serving sends the calls and their results"
    )
    assert not row.loss_mask[: len(prompt)][-10:].any()
    with pytest.raises(DataError, match=r"turn 2 of 4 .*does not show its"):
        rows_of(tokenizer, CHATML, example)


RESULTS_AS_JSON = CHATML.replace("{{ m.content }}", "{{ m.content | tojson }}")
NO_SYSTEM = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
)
NO_RESULTS = HERMES.replace("{{ m.content }}</tool_response>", "</tool_response>")
SWITCHED = CHATML.replace("{{ m.content }}", "{{ m.content.replace('/no_think', '') }}")
BACKWARDS = CHATML.replace("{{ m.content }}", "{{ m.content | reverse }}")
RULES = {"role": "system", "content": 'Be "brief". /no_think'}
ASKED_BY_RULES = {"messages": [RULES, {"role": "user", "content": "why?"}]}


@pytest.mark.parametrize(
    ("template", "row", "refused"),
    [
        (NO_SYSTEM, ASKED_BY_RULES, r"turn 1 of 2 \(system: .*does not show its text"),
        (CHATML, TOOL_TALK, "turn 2 of 4 .*does not show its tool call add"),
        (NO_RESULTS, TOOL_TALK, r"turn 3 of 4 \(tool: '3'.*does not show its text"),
        (HERMES, TOOL_TALK, None),
        (RESULTS_AS_JSON, ASKED_BY_RULES, None),
        (SWITCHED, ASKED_BY_RULES, None),
        (BACKWARDS, ASKED_BY_RULES, None),
    ],
)
def test_prompt_that_leaves_out_what_was_said_is_refused(tokenizer, template, row, refused):
    example = parse_row(row, origin="x")
    tokenised = ConversationTokenizer(tokenizer, chat_template=template)
    with nullcontext() if refused is None else pytest.raises(DataError, match=refused):
        tokenised.prompt_ids(example)


def test_row_whose_prompt_leaves_out_its_system_turn_is_refused(tokenizer):
    answered = [*ASKED_BY_RULES["messages"], {"role": "assistant", "content": "so"}]
    example = parse_row({"messages": answered}, origin="x")
    with pytest.raises(DataError, match=r"turn 1 of 3 \(system: .*does not show its text"):
        rows_of(tokenizer, NO_SYSTEM, example)


def test_tokenizer_without_template_is_refused(tokenizer):
    with pytest.raises(DataError, match=r"no chat template; put a chat_template.jinja beside it"):
        ConversationTokenizer(tokenizer).rows(chat("a", "b"))


# ------------------------------------------------------------------------------------------ rows


def test_completion_rows_supervise_the_completion_only(tokenizer):
    example = parse_row({"prompt": "hello\n", "completion": "\nthere"}, origin="x")
    # the joint text would merge both line ends
    (row,) = ConversationTokenizer(tokenizer).rows(example)
    assert supervised(tokenizer, row) == ["\nthere"]
    assert row.input_ids[~row.loss_mask].tolist() == ConversationTokenizer(tokenizer).prompt_ids(
        example
    )
    with pytest.raises(DataError, match="the completion is empty"):
        ConversationTokenizer(tokenizer).rows(parse_row({"prompt": "a"}, origin="x"))


def test_cutting_keeps_masks_right_and_is_counted(tokenizer):
    converter = ConversationTokenizer(tokenizer, chat_template=CHATML)
    examples = [
        chat("hello", "fine, thanks"),
        chat("hello", "x" * 200),
        chat("y" * 200, "cut away"),
    ]
    full = [converter.rows(example)[0] for example in examples]
    rows, statistics = prepare_rows(examples, converter, max_length=60, bad=BadRows())
    assert [row.truncated for row in rows] == [False, True]
    assert [len(row) for row in rows] == [len(full[0]), 60]
    for row, whole in zip(rows, full, strict=False):
        assert np.array_equal(row.input_ids, whole.input_ids[:60])
        assert np.array_equal(row.loss_mask, whole.loss_mask[:60])
    counts = (statistics.examples, statistics.rows, statistics.truncated, statistics.dropped_cut)
    assert counts == (3, 2, 1, 1)
    assert statistics.tokens == sum(map(len, rows))
    assert statistics.supervised == sum(int(row.loss_mask.sum()) for row in rows)
    with pytest.raises(DataError, match="no row is left of 1 examples"):
        prepare_rows(examples[2:], converter, max_length=60, bad=BadRows())


# Templates whose prompts grow at their beginning, and which forget it.
USERS = "{% set users = messages | selectattr('role', 'equalto', 'user') | list | length %}"
COUNTED = f"{USERS}<|im_start|>{{{{ users }}}} questions\n{CHATML}"
LATEST = USERS + CHATML.replace("in messages", "in messages[[2 * users - 4, 0] | max:]")
LONG_TALKS = {
    **{style: (template, "") for style, (template, _) in STYLES.items()},
    "moving system": (MISTRAL_MOVING_SYSTEM, "system"),
    "thoughts of the last question": (QWEN3, "thoughts, tools"),
    "thoughts kept": (HERMES, "thoughts, tools"),
    "first words change": (COUNTED, "system"),
    "oldest turns left out": (LATEST, ""),
}


def long_talk(kind: str, turns: list[tuple[str, str, str, bool]]) -> Example:
    """`kind`: what its template allows; `turns`: a question, its answer, a thought before that, and
    whether a tool is asked first."""
    messages = [{"role": "system", "content": "be brief"}] if "system" in kind else []
    for question, answer, thought, asks in turns:
        said = {"reasoning": thought} if thought and "thoughts" in kind else {}
        messages.append({"role": "user", "content": question})
        if asks and "tools" in kind:
            messages.append({"role": "assistant", "content": "I ask.", **said})
            messages.append({"role": "tool", "content": "42"})
        messages.append({"role": "assistant", "content": answer, **said})
    return parse_row({"messages": messages}, origin="x")


talks = st.lists(
    st.tuples(words, words, st.sampled_from(["", "hm", "so " * 12]), st.booleans()),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("template", LONG_TALKS)
@settings(max_examples=12, deadline=None)
@given(turns=talks, max_length=st.integers(1, 250))
@example(turns=[("hello", "hi", "so " * 12, True)] * 6, max_length=100)
@example(
    turns=[("a", text, "", False) for text in ("b", "long " * 40, "c", "d", "e")], max_length=100
)
def test_property_rows_that_are_to_be_cut_are_those_of_the_whole_conversation(
    tokenizer, template, turns, max_length
):
    text, kind = LONG_TALKS[template]
    converter = ConversationTokenizer(tokenizer, chat_template=text)
    talk = long_talk(kind, turns)
    whole, _ = fit_rows(converter.rows(talk), max_length)
    cut, _ = fit_rows(converter.rows(talk, max_length), max_length)
    assert [row.truncated for row in cut] == [row.truncated for row in whole]
    for row, expected in zip(cut, whole, strict=True):
        assert row.input_ids.tolist() == expected.input_ids.tolist()
        assert row.loss_mask.tolist() == expected.loss_mask.tolist()


@pytest.fixture
def renderings(tokenizer, monkeypatch):
    """An entry for every text that the chat template has rendered."""
    done = []
    render = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *a, **k: done.append(1) or render(*a, **k)
    )
    return done


def test_prompt_of_many_results_in_another_form_is_rendered_twice(tokenizer, renderings):
    converter = ConversationTokenizer(tokenizer, chat_template=RESULTS_AS_JSON)
    talk = long_talk("tools", [('Say "this".', "No.", "", True)] * 30)
    converter.prompt_ids(talk)
    assert len(renderings) == 2


@pytest.mark.parametrize("template", ["chatml-marked", "llama3", "thoughts of the last question"])
def test_turns_beyond_max_length_are_not_rendered(tokenizer, renderings, template):
    text, kind = LONG_TALKS[template]
    converter = ConversationTokenizer(tokenizer, chat_template=text)
    turns = [(f"What is {i}?", f"{i} it is.", "", True) for i in range(60)]
    longest = len(converter.rows(long_talk(kind, turns[:4]))[-1])
    counts = []
    for number in (15, 30, 60):
        renderings.clear()
        talk = long_talk(kind, turns[:number])
        rows, _ = prepare_rows([talk], converter, max_length=longest, bad=BadRows())
        assert max(map(len, rows)) == longest
        counts.append(len(renderings))
    assert counts[0] == counts[1] == counts[2] <= 2 * (2 * 4 + 3)


# ------------------------------------------------------------------------------------------ packing


def made_rows(lengths: list[int]) -> list[TokenRow]:
    """Rows whose tokens are all different, so that each can be found again."""
    starts = np.cumsum([0, *lengths])
    rng = np.random.default_rng(0)
    return [
        TokenRow(np.arange(start, start + n), rng.random(n) < 0.5, workload=f"of {n}")
        for start, n in zip(starts, lengths, strict=False)
    ]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_property_packing_loses_nothing(lengths):
    rows = made_rows(lengths)
    packed = pack(rows, 16)
    documents = {}
    for row in packed:
        assert 0 < len(row) <= 16
        assert sorted(set(row.segment_ids.tolist())) == list(range(len(row.workloads)))
        assert (np.diff(row.segment_ids) >= 0).all(), "segments are contiguous"
        for segment, workload in enumerate(row.workloads):
            inside = row.segment_ids == segment
            assert row.position_ids[inside].tolist() == list(range(inside.sum())), (
                "positions restart"
            )
            documents[tuple(row.input_ids[inside])] = (row.loss_mask[inside].tolist(), workload)
    assert documents == {
        tuple(row.input_ids): (row.loss_mask.tolist(), row.workload) for row in rows
    }
    assert sum(len(row) <= 8 for row in packed) <= 1, "no two rows could have been one"


def test_collate_pads_with_segment_minus_one():
    packed = pack(made_rows([5, 3, 6]), 8)
    batch = collate(packed, pad_token_id=99)
    integers = dict.fromkeys(["input_ids", "position_ids", "segment_ids"], torch.long)
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        **integers,
        "loss_mask": torch.bool,
    }
    assert all(tensor.shape == (2, 8) for tensor in batch.values())
    padding = batch["segment_ids"] == -1
    assert int(padding.sum()) == 2
    assert (batch["input_ids"][padding] == 99).all()
    assert not batch["loss_mask"][padding].any()
    assert int(batch["loss_mask"].sum()) == sum(int(row.loss_mask.sum()) for row in packed)
