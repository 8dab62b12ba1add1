"""Jinja's sandbox for chat templates, in which everything that may take long or much memory spends from a budget.

Loops, output and literals have no hook in Jinja: a template's tree gets filters of its own there, which no template can
name.
"""

import functools
import re
import types
from collections.abc import Callable
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import Markup

from jaxinfer.tokenizers.sandbox import operations
from jaxinfer.tokenizers.sandbox.budget import current

# Characters of a template; the longest that models come with have some 30,000.
_LONGEST = 1 << 17
_TURN, _TEXT, _MADE, _LOOK, _CONCAT = "a turn", "text", "made", "a look", "concatenated"
# For placeholder text and for pages of the web.
_NEEDLESS_GLOBALS, _NEEDLESS_FILTERS = ("lipsum",), ("urlize", "xmlattr")


def make_environment(extensions: list[type[Extension]], to_json: Callable[..., str]) -> "BoundedEnvironment":
    """Return an environment with some extensions, that writes JSON by a function of our own."""
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_written)
    environment.filters["tojson"] = to_json
    for name in _NEEDLESS_GLOBALS:
        del environment.globals[name]
    for name in _NEEDLESS_FILTERS:
        del environment.filters[name]
    for name, function in environment.filters.items():
        environment.filters[name] = _bounded(function, operations.FILTERS.get(name))
    for name, function in environment.tests.items():
        environment.tests[name] = _bounded(function, None)
    environment.filters.update({_TURN: _turn, _TEXT: _text, _MADE: _made, _LOOK: _look, _CONCAT: _concatenated})
    environment.globals.update(namespace=_Namespace)
    return environment


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Spends from the current budget; see `jaxinfer.tokenizers.sandbox.budget`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > _LONGEST:
            raise TemplateSyntaxError(f"it has {len(source)} characters, more than {_LONGEST}", 1)
        template = super()._parse(source, name, filename)
        _watch(template, is_repeated=False)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current()
        budget.step()
        operations.operator(budget, operator, left, right)
        return budget.made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, str | int):
            return super().getitem(obj, argument)
        budget = current()
        budget.step()
        return budget.made(super().getitem(obj, argument))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.step()
        if isinstance(__obj, types.MethodType | types.BuiltinMethodType):
            owner = __obj.__self__
            if isinstance(owner, str | bytes) and __obj.__name__ == "join" and args:
                args = (operations.FILTERS["join"](budget, args[0], owner), *args[1:])
            elif isinstance(owner, str | bytes | int) and (rule := operations.METHODS.get(__obj.__name__)):
                rule(budget, owner, *args, **kwargs)
        elif isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            budget.made(args)
            budget.made(kwargs)
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        formatter = _EscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)
        is_map = value.__name__ == "format_map"

        def write(*args: Any, **kwargs: Any) -> str:
            written = formatter.vformat(text, *(((), args[0]) if is_map else (args, kwargs)))
            return type(text)(current().made(written))

        return write


class _Bounded:
    """Formats fields of `str.format` no wider than they may be."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        for number in re.findall(r"\d+", format_spec):
            operations.field(number)
        return current().made(super().format_field(value, format_spec))  # pyright: ignore[reportAttributeAccessIssue]


class _Formatter(_Bounded, SandboxedFormatter):
    pass


class _EscapeFormatter(_Bounded, SandboxedEscapeFormatter):
    pass


class _Namespace(Namespace):
    """Jinja's, but what it holds is not printed with it: namespaces may hold each other, and a value twice."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _written(value: Any) -> str:
    """Return what an expression writes."""
    text = value if isinstance(value, str) else str(value)
    current().write(len(text))
    return text


def _bounded(function: Callable[..., Any], rule: operations.Rule | None) -> Callable[..., Any]:
    """Return a filter or test that spends what it costs."""
    at = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.step()
        if rule is not None:
            try:
                replaced = rule(budget, *args[at:], **kwargs)
            except TypeError:  # arguments that the filter itself refuses, in its own words
                replaced = None
            if replaced is not None:
                args = (*args[:at], replaced, *args[at + 1 :])
        return budget.made(function(*args, **kwargs))

    return run


@pass_context
def _turn(context: Context, value: Any) -> Any:
    current().step()
    return value


@pass_context
def _text(context: Context, value: str) -> str:
    return value


@pass_context
def _made(context: Context, value: Any) -> Any:
    return current().made(value)


@pass_context
def _look(context: Context, value: Any) -> Any:
    current().step()
    return value


@pass_context
def _concatenated(context: Context, values: list[Any]) -> str:
    budget = current()
    budget.step()
    texts = [value if isinstance(value, str) else str(value) for value in values]
    budget.write(sum(map(len, texts)))
    return "".join(texts)


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _watch(node: nodes.Node, is_repeated: bool) -> None:
    """Put filters of our own around a node's parts; what ``is_repeated`` may run more than once."""
    is_repeated |= isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block)
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _watch(value, is_repeated)
            setattr(node, name, _watched(value, is_repeated))
        elif isinstance(value, list):
            for index, part in enumerate(value):
                if isinstance(part, nodes.Node):
                    _watch(part, is_repeated)
                    value[index] = _watched(part, is_repeated)
    if isinstance(node, nodes.For):
        node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(None, lineno=node.lineno), _TURN), lineno=node.lineno))
    elif isinstance(node, nodes.Compare):
        node.expr = _filter(node.expr, _LOOK)


def _watched(node: nodes.Node, is_repeated: bool) -> nodes.Node:
    if isinstance(node, nodes.TemplateData) and is_repeated:
        return _filter(nodes.Const(node.data, lineno=node.lineno), _TEXT)
    if isinstance(node, nodes.Concat):
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)
    if isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _filter(node, _MADE)
    return node
