"""Chat templates render as transformers renders them, and fail in one line."""

import pytest

from jaxinfer.errors import InvalidOption, InvalidTokenizer
from jaxinfer.tokenizers import ChatTemplate
from jaxinfer.tokenizers.chat_template import _check_messages

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où est <b>Paris</b>? 😀"},
    {"role": "assistant", "content": "In France."},
    {"role": "user", "content": "Thanks"},
]

TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
    "{%- for m in messages %}\n    {% if m.role == 'system' %}{% continue %}{% endif %}\n  {{ m.content | tojson }}\n"
    "{% break %}\n{% endfor %}\n{% if add_generation_prompt %}go{% endif %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}"
    "{{ ns.n }}",
    "{{ dict(a=1) | tojson(indent=2) }}{{ tools is none }}{{ tools | tojson }}{{ 'é<' | tojson }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}{{ nothing }}",
    "{{ strftime_now('%Y')|length }}{{ eos_token is defined }}",
]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (0, "<s>system: Be brief.\nuser: Où est <b>Paris</b>? 😀\nassistant: In France.\nuser: Thanks\n"),
        (1, '  "Où est <b>Paris</b>? 😀"\ngo'),
        (2, "Be brief.Où est <b>Paris</b>? 😀In France.Thanks"),
        (3, "47"),
        (4, '{\n  "a": 1\n}Truenull"é<"'),
        (5, "Où est <b>Paris</b>? 😀, Thanks"),
        (6, "4False"),
    ],
)
def test_templates_have_the_features_of_transformers(index, expected):
    assert ChatTemplate(TEMPLATES[index], {"bos_token": "<s>"}).render(MESSAGES) == expected


@pytest.mark.parity
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("source", TEMPLATES)
def test_text_is_that_of_transformers(source, add_generation_prompt):
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=add_generation_prompt, bos_token="<s>"
    )
    ours = ChatTemplate(source, {"bos_token": "<s>"})
    assert ours.render(MESSAGES, add_generation_prompt=add_generation_prompt) == theirs[0]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", InvalidOption, "refuses these messages: roles must altern"),
        ("{{ messages[0].missing.deeper }}", InvalidOption, "refuses these messages"),
        ("{{ messages[0].role + 1 }}", InvalidOption, "fails on these messages: TypeError"),
        ("{% for %}", InvalidTokenizer, "the chat template cannot be run"),
        ("{{ ''.__class__.__mro__ }}", InvalidTokenizer, "the chat template cannot be run: access to attribute"),
        ("{{ messages.append(1) }}", InvalidTokenizer, "the chat template cannot be run"),
    ],
)
def test_failures_are_one_line(source, error, message):
    with pytest.raises(error, match=message) as raised:
        ChatTemplate(source).render(MESSAGES)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        (None, "messages must be a list"),
        ([], "messages is empty"),
        (["hello"], "message 0 must be"),
        ([MESSAGES[0], {"content": "x"}], "message 1 has no 'role'"),
        ([{"role": 1, "content": "x"}], "message 0 has no 'role'"),
    ],
)
def test_bad_messages_are_refused_by_index(messages, message):
    with pytest.raises(InvalidOption, match=message):
        _check_messages(messages)


def test_templates_without_a_default_say_which_there_are():
    with pytest.raises(InvalidTokenizer, match="no default chat template, only rag"):
        ChatTemplate({"rag": "x"}).render(MESSAGES)
