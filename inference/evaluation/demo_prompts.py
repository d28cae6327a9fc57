"""Prompts that come with the side-by-side comparison: English and Chinese texts to go on with, and conversations.

Some repeat themselves or ask for parts of what they give, where n-grams help; others are free, where only a trained
drafter does. Nothing here knows a tokenizer or a model.
"""

from __future__ import annotations

from speculators.errors import ConfigError

Message = dict[str, str]

ENGLISH = (
    "The future of AI is",
    "A lighthouse keeper's notebook, first page. The storm began at noon, and by evening",
    "To make bread you need flour, water, salt and yeast. First,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Monday: rain, 12 degrees. Tuesday: rain, 13 degrees. Wednesday: rain, 12 degrees. Thursday:",
    "Question: Why is the sky blue?\nAnswer:",
    "name,age,city\nAnna,31,Lisbon\nBruno,45,Turin\nCarla,28,",
    "There are three reasons to write things down. The first reason is that memory fades. The second reason is",
)

CHINESE = (
    "人工智能的未来是",
    "春天来了，花园里",
    "做一碗西红柿鸡蛋面需要西红柿、鸡蛋和面条。第一步，",
    "星期一：小雨，十二度。星期二：小雨，十三度。星期三：小雨，十二度。星期四：",
    "问：天空为什么是蓝色的？\n答：",
    "北京是中国的首都，上海是",
    "姓名，年龄，城市\n王芳，三十一，杭州\n李强，四十五，",
    "读书有三个好处。第一个好处是增长知识。第二个好处是",
)

CHAT: tuple[list[Message], ...] = (
    [{"role": "user", "content": "Write a Python function that reverses a string."}],
    [{"role": "user", "content": "Explain in three sentences what a compiler does."}],
    [
        {"role": "system", "content": "You answer briefly and politely."},
        {"role": "user", "content": "Which is larger, 17 times 24 or 400?"},
    ],
    [
        {
            "role": "user",
            "content": "Correct the spelling and change nothing else: 'The wether was fine, and we walkd along the "
            "river untill the evening.'",
        },
    ],
    [
        {"role": "user", "content": "Name a fruit that is red."},
        {"role": "assistant", "content": "A cherry is red."},
        {"role": "user", "content": "And one that is yellow? Answer in the same way."},
    ],
    [{"role": "user", "content": 'Give this as JSON: name is "Mira", age is 34, languages are Czech and French.'}],
    [{"role": "user", "content": "用三句话介绍一下长城。"}],
    [{"role": "user", "content": "Plan a day in a small town for two people who like museums and cake."}],
)

TEXTS = {"en": ENGLISH, "zh": CHINESE}
DEMOS = (*TEXTS, "chat")
ALIASES = {"te": "en", "tc": "zh"}  # what vLLM guides call them


def demo_prompts(name: str) -> tuple[list[str], list[list[Message]]]:
    """(texts to go on with, conversations) of a demo; one of the two is empty. ConfigError for an unknown name."""
    chosen = ALIASES.get(name, name)
    if chosen not in DEMOS:
        known = ", ".join((*DEMOS, *(f"{short} (= {long})" for short, long in ALIASES.items())))
        raise ConfigError(f"--demo {name}: there are no such prompts; expected one of {known}")
    return list(TEXTS.get(chosen, ())), [list(each) for each in CHAT] if chosen == "chat" else []
