"""Chat templates against transformers; a template that fails, or that would break out, is a clear error."""

from pathlib import Path
from typing import Any

import pytest

from engine.model.pretokenizers import QWEN2
from engine.model.tokenizer import Tokenizer
from tests.engine.model.vocabularies import CHAT, save, theirs, train

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <|im_end|> & <b>é</b> 你好"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": ""},
]
TEMPLATES = [
    CHAT,
    "{%- for m in messages %}\n    {%- if m.role == 'system' %}\n[{{ m.content | trim }}]\n    {%- endif %}\n    {% set x = 1 %}\n{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}{{ eos_token }}",
    "{{ messages | tojson(indent=2) }}{{ tools is none }}{{ documents is none }}{{ unk_token }}{{ add_generation_prompt }}",
    "{{ strftime_now('%Y') }}{% generation %}{{ messages[0].content }}{% endgeneration %}{{ missing is defined }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ dict(a=1)['a'] }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_template(template: str, add_generation_prompt: bool, tmp_path: Path) -> None:
    config = save(tmp_path, train(QWEN2, nfc=True), "qwen3", chat_template=template)
    ours, oracle = Tokenizer.from_directory(tmp_path, config), theirs(tmp_path)
    options = {"add_generation_prompt": add_generation_prompt}
    assert ours.chat_text(CONVERSATION, **options) == oracle.apply_chat_template(CONVERSATION, tokenize=False, **options)
    wanted = oracle.apply_chat_template(CONVERSATION, return_dict=False, **options)
    assert ours.apply_chat_template(CONVERSATION, **options) == wanted


def test_where_a_template_may_stand(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = save(tmp_path, train(None), "llama", chat_template=named)
    message = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_directory(tmp_path, config).chat_text(message) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert (
        Tokenizer.from_directory(tmp_path, config).chat_text(message)
        == "F"
        == theirs(tmp_path).apply_chat_template(message, tokenize=False)
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"this checkpoint has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", r"refuses these messages: roles must alternate"),
        ("{% for %}", r"refuses these messages"),
        ("{{ messages[9].content.x }}", r"refuses these messages"),
        ("{{ messages[0].content + 1 }}", r"fails on these messages: TypeError"),
        ("{{ ''.__class__.__mro__ }}", r"refuses these messages: .*unsafe"),
        ("{{ messages.append(1) }}", r"refuses these messages: .*unsafe|not safely callable"),
        ("{% for i in range(999999999) %}{% endfor %}", r"fails on these messages: OverflowError"),
    ],
)  # fmt: skip
def test_template_that_cannot_be_used(template: str | None, message: str, tmp_path: Path) -> None:
    config = save(tmp_path, train(None), "llama", chat_template=template)
    with pytest.raises(ValueError, match=rf"tokenizer.json: .*{message}"):
        Tokenizer.from_directory(tmp_path, config).chat_text([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("messages", [[], ["hello"], [{"content": "x"}], [{"role": 3, "content": "x"}]])
def test_messages_that_are_none(messages: Any, tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(tmp_path, save(tmp_path, train(None), "llama"))
    with pytest.raises(ValueError, match=r"messages? must"):
        ours.chat_text(messages)


@pytest.mark.model
def test_default_model(default_tokenizers: tuple[Tokenizer, Any]) -> None:
    ours, oracle = default_tokenizers
    for messages in (CONVERSATION, CONVERSATION[1:2]):  # without a system message the template writes one
        wanted = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.apply_chat_template(messages) == wanted
