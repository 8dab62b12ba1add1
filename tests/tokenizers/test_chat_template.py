"""Chat templates render as transformers renders them, and fail in one line, soon and without much memory."""

import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxinfer.errors import InvalidOption, InvalidTokenizer
from jaxinfer.tokenizers import ChatTemplate, read_chat_template
from jaxinfer.tokenizers.chat_template import _check_messages
from jaxinfer.tokenizers.folder_settings import read_folder_settings
from jaxinfer.tokenizers.sandbox import budget

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


A_MILLION = "{% set x = 'a' * 1000000 %}"
# Programs without end, of endless text and of values that grow without end, by every way that Jinja has.
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "text in a loop": "{% for a in range(99999) %}" + "x" * 5000 + "{% endfor %}",
    "a loop that calls itself": "{% for a in [[1] * 99] * 9 recursive %}{{ loop([[1] * 99] * 99) }}{% endfor %}",
    "a macro that calls itself": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(99) }}",
    "a product": "{{ 'a' * 4000000000 }}",
    "a product of a product": A_MILLION + "{% set y = x * 10000 %}",
    "a list's product": "{% set x = [1] * 1000000000 %}",
    "lists of a list": "{% set x = [[[1] * 1000] * 1000] * 1000 %}{{ x }}",
    "bytes": "{{ 'a'.encode() * 4000000000 }}",
    "a sum": "{% set x = 'abcdefgh' %}" + "{% set x = x + x %}" * 26,
    "concatenation": "{% set x = 'abcdefgh' %}" + "{% set x = x ~ x %}" * 26,
    "a block": "{% set x = 'abcdefgh' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 26,
    "lists that share": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 26 + "{{ x }}",
    "tuples that share": "{% set x = (1,) %}" + "{% set x = (x, x) %}" * 26 + "{{ {x: 1} }}",
    "dicts that share": "{% set x = {} %}" + "{% set x = dict(a=x, b=x) %}" * 26 + "{{ x | tojson }}",
    "arguments that share": "{% macro m() %}{{ m(varargs, varargs) }}{% endmacro %}{{ m(1) }}",
    "defaults that share": "{% set x = [1] %}"
    + "{% set x = range(50) | map(attribute='q', default=x) | list %}" * 5
    + "{{ x }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "large numbers": "{% set s = namespace(x=2 ** 999) %}{% for i in range(99) %}{% set s.x = s.x * s.x %}{% endfor %}",
    "decimals": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "a number's bytes": "{{ (5).to_bytes(4000000000, 'big') | length }}",
    "a wide field": "{{ '%999999999d' % 5 }}",
    "a field of any width": "{{ '%*d' % (999999999, 5) }}",
    "the filter format": "{{ '%999999999d' | format(5) }}",
    "the method format": "{{ '{:{}}'.format(5, 999999999) }}",
    "format_map": "{{ '{a:999999999}'.format_map({'a': 5}) }}",
    "a field many times": A_MILLION + "{{ ('%(a)s' * 9999) % {'a': x} }}",
    "center": "{{ 'x' | center(4000000000) }}",
    "the method center": "{{ 'x'.center(4000000000) }}",
    "ljust": "{{ 'x'.ljust(4000000000) | length }}",
    "tabs": "{{ ('\t' * 9999).expandtabs(tabsize=1000000) | length }}",
    "indent": "{{ ('a\n' * 9999) | indent(1000000) | length }}",
    "indent by a text": A_MILLION + "{{ ('a\n' * 9999) | indent(width=x) | length }}",
    "a filter on a block": "{% filter center(4000000000) %}x{% endfilter %}",
    "slice": "{{ [1] | slice(4000000000) | list | length }}",
    "batch": "{{ [1] | batch(4000000000, 'x') | list | length }}",
    "tojson": "{{ [[1]] | tojson(indent=1000000000) }}",
    "separators of JSON": A_MILLION + "{{ ([1] * 9999) | tojson(separators=(x, x)) | length }}",
    "replace": A_MILLION + "{{ x | replace('a', x) | length }}",
    "the method replace": A_MILLION + "{{ x.replace('', x) | length }}",
    "join": A_MILLION + "{{ range(9999) | map('string') | join(x) | length }}",
    "the method join": A_MILLION + "{{ x.join(range(9999) | map('string')) | length }}",
    "translate": A_MILLION + "{{ x.translate({97: x}) | length }}",
    "split": "{{ ('a ' * 4000000).split() | length }}",
    "lines": "{{ ('a\n' * 4000000).splitlines() | length }}",
    "list": "{{ ('é' * 8000000) | list | length }}",
    "sum": "{{ range(9999) | map('string') | map('list') | sum(start=[]) | length }}",
    "groupby": A_MILLION + "{{ range(99999) | groupby('q', default=x) | list }}",
    "fromkeys": A_MILLION + "{{ dict.fromkeys(range(99999), x) }}",
    "encodings": A_MILLION + "{{ x.encode('punycode') | length }}",
    "tags": A_MILLION + "{{ x | striptags }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "a long template": "{{ x }}" * 30_000,
}


@pytest.fixture
def few_steps(monkeypatch):
    """A budget for less time: where all types are checked, as here, a million steps take minutes."""
    monkeypatch.setattr(budget, "_STEPS", 500)
    monkeypatch.setattr(budget, "_STEPS_PER_NODE", 0)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_soon_and_take_little_memory(name):
    began, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((InvalidTokenizer, InvalidOption)) as raised:
        ChatTemplate(HOSTILE[name]).render(MESSAGES)
    assert time.thread_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10
    assert "MemoryError" not in str(raised.value)


@pytest.mark.usefixtures("few_steps")
def test_a_template_has_the_steps_and_the_seconds_of_its_budget(monkeypatch):
    """Each turn of a loop is a step; three messages, their keys and what else the template is given are 30 nodes."""
    loops = "{% for a in range(4) %}{% for b in range(N) %}{% endfor %}{% endfor %}"
    assert ChatTemplate(loops.replace("N", "120")).render(MESSAGES) == ""
    with pytest.raises(InvalidTokenizer, match="cannot be run: it takes too long"):
        ChatTemplate(loops.replace("N", "130")).render(MESSAGES)
    monkeypatch.setattr(budget, "_SECONDS", 0.05)
    turns = "{% set r = range(99999) %}{% for a in range(400) %}{% for b in r if false %}{% endfor %}{% endfor %}"
    began = time.thread_time()
    with pytest.raises(InvalidTokenizer, match="cannot be run: it takes too long"):
        ChatTemplate(turns).render(MESSAGES)
    assert time.thread_time() - began < 1


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(300) %}TEXT{% endfor %}",
        "{% macro m() %}TEXT{% endmacro %}{% for a in range(300) %}{% set b = m() %}{% endfor %}",
        "{% block b %}TEXT{% endblock %}{% for a in range(300) %}{% set b = self.b() %}{% endfor %}",
    ],
)
def test_text_that_a_template_repeats_counts_wherever_it_stands(source):
    with pytest.raises(InvalidTokenizer, match="cannot be run: it writes too much"):
        ChatTemplate(source.replace("TEXT", "x" * 60_000)).render(MESSAGES)


def test_a_value_has_a_bound_of_its_own():
    template = "{% set x = [1] %}" + "{% set x = [x, x] %}" * 18
    with pytest.raises(InvalidTokenizer, match="cannot be run: it makes too large a value"):
        ChatTemplate(template).render(MESSAGES)
    assert ChatTemplate(template.replace("x, x", "x")).render(MESSAGES) == ""


def test_the_budget_grows_with_the_conversation():
    """The template writes every message three times, and makes a longer list for each."""
    template = (
        "{% set seen = namespace(roles=[], text='') %}{% for m in messages %}"
        "{% set seen.roles = seen.roles + [m.role] %}"
        "{% set seen.text = m.content ~ m['content'] | trim + m.content %}{{ seen.text }}{{ seen.roles | length }}"
        "{% endfor %}"
    )
    messages = [{"role": ("user", "assistant")[at % 2], "content": "ab" * 5000} for at in range(200)]
    text = ChatTemplate(template).render(messages)
    assert text == "".join("ab" * 15000 + str(at + 1) for at in range(200))


@pytest.mark.usefixtures("few_steps")
def test_templates_of_several_threads_have_budgets_of_their_own():
    template = ChatTemplate("{% for a in range(400) %}{% endfor %}x")
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: template.render(MESSAGES), range(4))) == ["x"] * 4


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a link to nothing", "a large file"])
def test_a_template_is_a_small_regular_file(tmp_path, name, kind):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a link to nothing":
            path.symlink_to(tmp_path / "absent")
        case "a large file":
            path.write_bytes(b" " * (2**20 + 1))
    with pytest.raises(InvalidTokenizer, match=r"a chat template (must be a regular file|of 1048577 bytes)"):
        read_folder_settings(tmp_path, {})


@pytest.mark.parametrize("text", ["{% if %}", "{{", "{% nothing %}", "{" * 50_000])
def test_a_file_without_a_program_is_no_template(tmp_path, text):
    path = tmp_path / "template.jinja"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidTokenizer, match="the chat template cannot be read: "):
        read_chat_template(path)


def test_a_file_has_a_template_as_a_folder_has(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATES[5], encoding="utf-8")
    assert read_chat_template(path).render(MESSAGES) == ChatTemplate(TEMPLATES[5]).render(MESSAGES)
