"""The page, in a real browser: what a person sees and may not do."""

from __future__ import annotations

import copy
import json

import httpx2
import pytest

from tests.support.chromium import BINARY, Chromium

pytestmark = pytest.mark.skipif(
    BINARY is None, reason="no chromium or google-chrome on this machine"
)
PROMPT = "again and again and again"
PARTS = """[...at('output').children].map(e => ({text: e.textContent, gone: e.tagName === 'DEL',
position: e.dataset.position ?? null, title: e.title, visible: e.offsetParent !== null,
colour: getComputedStyle(e).backgroundColor}))"""


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


def send(browser, prompt: str | None = None) -> str:
    """Sends what is there, or a text to be continued; what the page says in the end."""
    if prompt is not None:
        browser.evaluate(f"at('prompt').value = {json.dumps(prompt)}; at('chat').checked = false")
        browser.evaluate("at('max_tokens').value = 60")
    browser.evaluate("at('form').requestSubmit()")
    browser.wait("!running")
    return browser.evaluate("at('status').textContent")


@pytest.mark.slow
def test_a_completion_with_its_drafts(browser, serving, drafting_llm, model):
    """What is shown is what the server writes: accepted drafts coloured by position, the target's
    own plain, what was rejected struck through; and the figures are those of the server's
    counters."""
    llm = drafting_llm("ngram", model, num_speculative_tokens=4)
    url = serving(llm)
    browser.open(f"{url}/")
    assert send(browser, PROMPT).startswith("finished") and not browser.messages
    counters, parts = llm.get_metrics(), browser.evaluate(PARTS)
    asked = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    answer = httpx2.post(f"{url}/v1/completions", json=asked, timeout=60).json()
    kept = [part for part in parts if not part["gone"]]
    assert "".join(part["text"] for part in kept) == answer["choices"][0]["text"]
    accepted = [part for part in kept if part["position"] is not None]
    own = [part for part in kept if part["position"] is None]
    assert len(accepted) == counters.num_accepted_tokens and len(kept) < len(parts)
    assert {(part["title"], part["colour"]) for part in own} == {
        ("the target's own", "rgba(0, 0, 0, 0)")
    }
    colours = {(part["position"], part["colour"]) for part in accepted}
    assert len(colours) == len(dict(colours)) == len({colour for _, colour in colours}) > 1
    tau = 1 + counters.num_accepted_tokens / counters.num_drafts
    assert browser.evaluate("at('tau').textContent") == f"{tau:.2f}"


@pytest.mark.slow
@pytest.mark.parametrize("template", [True, False])
def test_it_opens_with_an_example(browser, serving, drafting_llm, model, byte_tokenizer, template):
    """As a chat where the model has a template, else with a text to be continued; drafts can be
    turned off and rejected ones hidden."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    if not template:
        tokenizer.chat_template = None
    browser.open(f"{serving(drafting_llm('ngram', model, tokenizer=tokenizer))}/")
    assert browser.evaluate("at('chat').checked") is template
    assert send(browser).startswith("finished")
    assert any(part["gone"] and part["visible"] for part in browser.evaluate(PARTS))
    browser.evaluate("at('rejected').click()")
    assert not any(part["gone"] and part["visible"] for part in browser.evaluate(PARTS))
    browser.evaluate("at('drafting').click()")
    send(browser)
    assert {part["title"] for part in browser.evaluate(PARTS)} == {"the target's own"}


def test_text_is_shown_and_never_run(browser, serving, drafting_llm, model):
    """Markup in a prompt and in what is drafted is text; nobody but this server is asked."""
    llm = drafting_llm("right", model)
    drafts = llm.get_tokenizer()("<img src=x onerror=alert(1)><script>").input_ids
    llm.engine.proposer._text = lambda request: drafts
    browser.open(f"{serving(llm)}/")
    assert send(browser, "<script>document.title='run'</script>").startswith("finished")
    assert "<im" in "".join(part["text"] for part in browser.evaluate(PARTS) if part["gone"])
    tags = browser.evaluate("[...at('output').querySelectorAll('*')].map(e => e.tagName)")
    assert set(tags) == {"SPAN", "DEL"} and browser.evaluate("document.title") == "Draftsmith"
    refused = "fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')"
    assert browser.evaluate(refused) == "refused"


def test_with_a_key(browser, serving, drafting_llm, model):
    """The page itself needs none; without it its requests are refused, in words."""
    browser.open(f"{serving(drafting_llm('ngram', model), api_key=('secret',))}/")
    assert "API key" in send(browser, PROMPT) and not browser.evaluate(PARTS)
    browser.evaluate("at('key').value = 'secret'")
    assert send(browser, PROMPT).startswith("finished") and browser.evaluate(PARTS)
