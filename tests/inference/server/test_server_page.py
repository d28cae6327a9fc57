"""The page, in a real browser: what a person types, sees and may not do."""

from __future__ import annotations

import copy

import httpx2
import pytest

from tests.inference.server.chromium import BINARY, Chromium

pytestmark = pytest.mark.skipif(
    BINARY is None, reason="no chromium or google-chrome on this machine"
)

PROMPT = "again and again <script>document.title='run'</script><b>bold</b> and again"
OUTPUT = "document.getElementById('output')"
DONE = "document.getElementById('status').textContent.startsWith('finished')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def model(tiny_model, byte_tokenizer):
    model = tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=512)
    model.generation_config.eos_token_id = None
    return model


def ask(browser, prompt: str, max_tokens: int = 60) -> None:
    """Types it as a text to be continued and sends it."""
    browser.evaluate("document.getElementById('chat').checked = false")
    browser.evaluate(
        "document.getElementById('prompt').value = ''; document.getElementById('prompt').focus()"
    )
    browser.evaluate(f"document.getElementById('max_tokens').value = {max_tokens}")
    browser.write(prompt)
    browser.press("Enter", 13, modifiers=2)
    browser.wait("!running", 60)


def counted(url: str, name: str) -> float:
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name + "{")).split()[-1])


def spans(browser) -> list[dict]:
    return browser.evaluate(
        f"[...{OUTPUT}.children].map(e => ({{text: e.textContent, gone: e.tagName === 'DEL', "
        "position: e.dataset.position ?? null, colour: getComputedStyle(e).backgroundColor, "
        "line: getComputedStyle(e).textDecorationLine, title: e.title}))"
    )


def test_a_completion_with_its_drafts(browser, serving, drafting_llm, model):
    """What is shown is what the server writes: accepted drafts coloured by position, the target's
    own plain, what was rejected struck through; and the figures are those of the server's
    counters."""
    url = serving(drafting_llm("ngram", model, num_speculative_tokens=4))
    browser.open(f"{url}/")
    ask(browser, "again and again and again")
    assert browser.evaluate(DONE)
    shown = spans(browser)
    plain = {
        "model": "tiny",
        "prompt": "again and again and again",
        "max_tokens": 60,
        "temperature": 0,
    }
    written = httpx2.post(f"{url}/v1/completions", json=plain, timeout=60).json()["choices"][0][
        "text"
    ]
    assert "".join(each["text"] for each in shown if not each["gone"]) == written
    accepted = [each for each in shown if each["position"] is not None and not each["gone"]]
    own, gone = (
        [each for each in shown if each["position"] is None],
        [each for each in shown if each["gone"]],
    )
    assert accepted and own and gone
    assert {each["colour"] for each in own} == {"rgba(0, 0, 0, 0)"}
    assert {each["title"] for each in own} == {"the target's own"}
    colours = {each["position"]: each["colour"] for each in accepted}
    assert (
        len(set(colours.values())) == len(colours) > 1
        and "rgba(0, 0, 0, 0)" not in colours.values()
    )
    assert {each["colour"] for each in accepted if each["position"] == "1"} == {colours["1"]}
    assert {each["line"] for each in gone} == {"line-through"}
    drafts, taken = (
        counted(url, f"vllm:spec_decode_{name}_total")
        for name in ("num_drafts", "num_accepted_tokens")
    )
    tau = browser.evaluate("document.getElementById('tau').textContent")
    assert (
        tau == f"{1 + taken / drafts:.2f}" and len(accepted) == taken / 2
    )  # two responses were written, alike
    assert float(browser.evaluate("document.getElementById('speed').textContent")) > 0
    assert not browser.messages


@pytest.mark.parametrize("template", [True, False])
def test_it_opens_with_an_example(browser, serving, drafting_llm, model, byte_tokenizer, template):
    """As a chat where the model has a template, else with a text to be continued; drafts can be
    turned off and rejected ones hidden."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    if not template:
        tokenizer.chat_template = None
    browser.open(f"{serving(drafting_llm('ngram', model, tokenizer=tokenizer))}/")
    assert browser.evaluate("document.getElementById('chat').checked") is template
    assert len(browser.evaluate("document.getElementById('prompt').value")) > 40
    browser.evaluate("document.getElementById('prompt').focus()")
    browser.press("Enter", 13, modifiers=2)
    browser.wait("!running", 60)
    assert browser.evaluate(DONE) and any(each["gone"] for each in spans(browser))
    browser.evaluate("document.getElementById('rejected').click()")
    visible = f"[...{OUTPUT}.querySelectorAll('del')].filter(e => e.offsetParent !== null).length"
    assert browser.evaluate(visible) == 0
    browser.evaluate("document.getElementById('drafting').click()")
    browser.press("Enter", 13, modifiers=2)
    browser.wait("!running", 60)
    assert {each["title"] for each in spans(browser)} == {"the target's own"}


def test_text_is_shown_and_never_run(browser, serving, drafting_llm, model):
    """Markup in a prompt, in what is written and in what is drafted is text."""
    llm = drafting_llm("right", model)
    drafts = llm.get_tokenizer()("<img src=x onerror=alert(1)><script>").input_ids
    llm.engine.proposer._text = lambda request: drafts
    url = serving(llm)
    browser.open(f"{url}/")
    ask(browser, PROMPT)
    assert browser.evaluate(DONE)
    names = browser.evaluate(
        f"[...new Set([...{OUTPUT}.querySelectorAll('*')].map(e => e.tagName))].sort()"
    )
    assert set(names) <= {"SPAN", "DEL"} and "DEL" in names
    gone = browser.evaluate(
        f"[...{OUTPUT}.querySelectorAll('del')].map(e => e.textContent).join('')"
    )
    assert "<im" in gone and browser.evaluate("document.title") == "Draftsmith"
    assert browser.evaluate("document.getElementById('prompt').value") == PROMPT
    refused = "fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')"
    assert browser.evaluate(refused) == "refused"
    policy = httpx2.get(f"{url}/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy


def test_with_a_key(browser, serving, drafting_llm, model):
    """The page itself needs none; without it its requests are refused, in words."""
    browser.open(f"{serving(drafting_llm('ngram', model), api_key=('secret',))}/")
    ask(browser, "again and again")
    assert "API key" in browser.evaluate("document.getElementById('status').textContent")
    assert browser.evaluate(f"{OUTPUT}.children.length") == 0
    browser.evaluate("document.getElementById('key').focus()")
    browser.write("secret")
    ask(browser, "again and again")
    assert browser.evaluate(DONE) and browser.evaluate(f"{OUTPUT}.children.length") > 10
    browser.wait("document.getElementById('model').textContent === 'tiny'")
    browser.messages.clear()  # 401 is noted there
