"""Chat templates render conversations; a template is untrusted code."""

import sys

import pytest

from onchip.engine.chat_template import render
from onchip.engine.tokenizer import ByteTokenizer

MESSAGES = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "yes"}]


class Speaker(ByteTokenizer):
    def __init__(self, template, special=None):
        self.chat_template, self.special = template, special or {}


def test_a_template_sees_messages_special_tokens_and_options():
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "  [{{ m.role }}] {{ m.content }}{{ mood }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    one = Speaker(template, {"bos_token": "<s>"})
    assert render(one, MESSAGES, mood="!") == "<s>  [user] Hi <b>!\n  [assistant] yes!\n[assistant]"
    assert render(one, MESSAGES[:1], add_generation_prompt=False) == "<s>  [user] Hi <b>\n"
    assert render(one, MESSAGES, template="{{ messages | tojson }}").startswith('[{"role": "user"')


@pytest.mark.parametrize(
    "template, match",
    [
        ("{{ messages.__class__.__mro__ }}", "chat template failed"),
        ("{{ messages.append(1) }}", "chat template failed"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{% for %}", "chat template failed"),
        (None, "has no chat_template"),
    ],
)
def test_a_template_cannot_leave_the_sandbox(template, match):
    one = Speaker(template)
    with pytest.raises(ValueError, match=match):
        render(one, MESSAGES)


@pytest.mark.parametrize("messages", [[], ["text"], [{"content": "x"}]])
def test_an_invalid_conversation_is_rejected(messages):
    with pytest.raises(ValueError, match="conversation is empty|must have a role"):
        render(ByteTokenizer(), messages)


def test_without_jinja_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[serve\]' in a clone"):
        render(ByteTokenizer(), MESSAGES)
