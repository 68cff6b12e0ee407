# SPDX-License-Identifier: Apache-2.0
"""Chat templates: jinja2 programs from untrusted files, rendered in a sandbox with limits on work and text size.

jinja2's immutable sandbox denies a template access to Python's internals, but does not limit its use of memory and
time. Here every loop iteration, call, filter, test and operator is charged to a work counter (`Account`) by the size of
its operands and its result; the sizes of each text and of the output are also limited. Only the listed filters and
methods are allowed, because others can create a large value from small ones in a single step.
"""

from __future__ import annotations

import datetime
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.files import printable
from cupy_awq.llm.extra import import_extra

MAX_TEMPLATE_CHARACTERS = 1 << 17
"""The largest length of a template in characters. Templates of common models have at most 20,000."""

MAX_CHARACTERS = 1 << 22
"""The largest length of an intermediate text in characters, to which four times the messages' length is added."""

MAX_OUTPUT_CHARACTERS = 1 << 18
"""The largest length of the output in characters, to which four times the messages' length is added.

The limit is lower than `MAX_CHARACTERS` because the output is also tokenized.
"""

MAX_WORK = 1 << 27
"""The largest work of one rendering, a few seconds; 1024 times the messages' length is added to this limit.

One unit of work is the processing of one character. Each operation also counts as `STEP` units.
"""

STEP = 256
"""The number of units of work for an iteration, a call, a filter, a test, an operator or an element of a list."""

MAX_INTEGER_BITS = 256
"""The largest size of an integer in bits."""

FILTERS = (
    "abs capitalize count d default dictsort first float groupby int items last length list lower map max min reject"
    " rejectattr replace reverse round select selectattr sort string title trim truncate unique upper urlencode"
    " wordcount join tojson indent safe attr format"
).split()
"""The filters that a template may use. Others can create a large value from small ones, or emit HTML."""

QUICK = frozenset("length count first last default d defined undefined none string mapping sequence iterable".split())
QUICK |= frozenset("boolean number integer float even odd true false callable sameas".split())
"""The filters and tests whose run time does not depend on the size of their operand."""

TEXT_METHODS = (
    "capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric"
    " isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition"
    " rsplit rstrip split splitlines startswith strip swapcase title upper"
).split()
"""The str methods that a template may call."""

Message = Mapping[str, str]
"""A message of a conversation: {"role": "user", "content": text}, with the roles "system", "user" and "assistant"."""


def check_messages(messages: object) -> None:
    """Raise TypeError unless ``messages`` is a non-empty sequence of messages whose values are all texts.

    A value that is not a text, such as a list of parts, could contain special tokens that `Tokenizer` does not see.
    """
    kind, wrong = "", [messages]
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)) and messages:
        kind, wrong = "the message ", [message for message in messages if not _is_message(message)]
    if wrong:
        got = f"{kind}{wrong[0]!r:.80}"
        raise TypeError(f"prompt: expected a text or messages {{'role': text, 'content': text}}, got {got}")


def _is_message(message: object) -> bool:
    return (
        isinstance(message, Mapping)
        and message.keys() >= {"role", "content"}
        and all(isinstance(value, str) for value in message.values())
    )


class LimitError(ValueError):
    """The error for a template that exceeds a limit."""


class Account:
    """The work counter of one rendering, with limits that depend on ``characters``, the length of the messages."""

    def __init__(self, characters: int) -> None:
        self._left = MAX_WORK + 1024 * characters
        self.max_characters = MAX_CHARACTERS + 4 * characters
        self.max_output = MAX_OUTPUT_CHARACTERS + 4 * characters

    def spend(self, work: int) -> None:
        """Add ``work`` to the counter. Raises LimitError if the total exceeds the limit."""
        self._left -= work
        if self._left < 0:
            raise LimitError("expected a template that ends soon, got one that exceeds the limit of work")

    def charge(self, value: Any) -> Any:
        """Add the size of a value to the counter and return the value.

        An object that a container holds several times counts several times. The elements of a generator are counted
        when they are generated. Raises LimitError if a limit is exceeded.
        """
        if isinstance(value, types.GeneratorType):
            return self.iterate(value)
        pending, characters = [value], 0
        while pending:
            item = pending.pop()
            self.spend(STEP)
            if isinstance(item, str):
                self.spend(len(item))
                characters += len(item)
                if characters > self.max_characters:
                    raise LimitError(f"expected texts of at most {self.max_characters} characters, got longer ones")
            elif isinstance(item, int) and item.bit_length() > MAX_INTEGER_BITS:
                raise LimitError(f"expected integers of at most {MAX_INTEGER_BITS} bits, got a larger one")
            elif isinstance(item, range):
                self.spend(STEP * len(item))
            elif isinstance(item, (list, tuple)):
                self.spend(STEP * len(item))
                pending.extend(item)
            elif isinstance(item, Mapping):
                self.spend(STEP * len(item))
                pending.extend(item)
                pending.extend(item.values())
            elif (attributes := getattr(item, "_Namespace__attrs", None)) is not None:
                pending.append(attributes)
        return value

    def charge_slice(self, value: Any) -> Any:
        """Add the cost of a slice to the counter and return the slice; the contents of its elements are not counted."""
        self.spend(len(value) if isinstance(value, str) else STEP * len(value))
        return value

    def iterate(self, values: Any) -> Iterator[Any]:
        """Yield the elements of an iterable, and count one `STEP` of work for each."""
        for value in values:
            self.spend(STEP)
            yield value


def render(template: str, messages: Sequence[Message], special: Mapping[str, str], where: str) -> str:
    """Return the text of a conversation up to the beginning of the assistant's answer.

    Args:
        template: the source text of the template.
        messages: the conversation.
        special: the values of the variables "bos_token" and "eos_token".
        where: the path of the file, for error messages.

    Raises:
        CheckpointError: the template is invalid, exceeds a limit, or fails for these messages.
    """
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise CheckpointError(
            f"{where}: chat template: expected at most {MAX_TEMPLATE_CHARACTERS} characters, got {len(template)}"
        )
    jinja2 = import_extra("jinja2")
    texts = sum(len(text) for message in messages for text in message.values() if isinstance(text, str))
    account = Account(texts)
    environment = _environment(jinja2, account, len(template))
    try:
        pieces = []
        characters = 0
        for piece in environment.from_string(template).generate(
            messages=[dict(message) for message in messages], add_generation_prompt=True, **special
        ):
            pieces.append(piece)
            characters += len(piece)
            if characters > account.max_output:
                raise LimitError(f"expected an output of at most {account.max_output} characters, got more")
        return "".join(pieces)
    except Exception as error:  # a template can make jinja2 and Python's functions raise almost any exception
        detail = f"{type(error).__name__}: {printable(str(error)):.300}"
        raise CheckpointError(f"{where}: chat template: expected valid jinja2, got {detail}") from None


def _environment(jinja2: Any, account: Account, source_length: int) -> Any:
    """Return the jinja2 sandbox environment for one rendering.

    ``source_length`` is the length of the template: an iteration or a macro call can output that many constant
    characters, so its work is ``STEP + source_length``.
    """
    nodes, runtime = import_extra("jinja2.nodes"), import_extra("jinja2.runtime")
    base: Any = import_extra("jinja2.sandbox").ImmutableSandboxedEnvironment
    extension: Any = import_extra("jinja2.ext").Extension
    visitor: Any = import_extra("jinja2.visitor").NodeTransformer

    def iterate(values: Any) -> Iterator[Any]:
        for value in values:
            account.spend(STEP + source_length)
            yield value

    def concatenate(values: list[Any]) -> str:
        account.charge(values)
        return "".join(map(str, values))

    class Transformer(visitor):  # type: ignore[misc]
        """A syntax tree transformer that charges loops, literals, slices, comparisons and concatenations."""

        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            node.iter = filtered(node.iter, "_iterate")
            return node

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            return filtered(nodes.List(node.nodes, lineno=node.lineno), "_concatenate")

        def visit_Compare(self, node: Any) -> Any:
            self.generic_visit(node)
            node.expr = filtered(node.expr, "_charge")
            for operand in node.ops:
                operand.expr = filtered(operand.expr, "_charge")
            return node

        def visit_List(self, node: Any) -> Any:
            self.generic_visit(node)
            return filtered(node, "_charge")

        visit_Dict = visit_List

        def visit_Tuple(self, node: Any) -> Any:
            self.generic_visit(node)
            return node if node.ctx == "store" else filtered(node, "_charge")

        def visit_Getitem(self, node: Any) -> Any:
            self.generic_visit(node)
            return filtered(node, "_slice") if isinstance(node.arg, nodes.Slice) else node

    def filtered(node: Any, name: str) -> Any:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    class Sandbox(base):  # type: ignore[misc]
        intercepted_binops = frozenset(base.default_binop_table)

        def _parse(self, source: str, name: Any, filename: Any) -> Any:
            tree = Transformer().visit(super()._parse(source, name, filename))
            tree.set_environment(self)
            return tree

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            account.charge(left)
            account.charge(right)
            _check_operands(operator, left, right)
            return account.charge(super().call_binop(context, operator, left, right))

        def wrap_str_format(self, value: Any) -> Any:
            """Reject calls such as "{:1000000000}".format(1), which jinja2 allows."""
            if getattr(value, "__name__", "") in ("format", "format_map"):
                _check_text_method("", value.__name__, ())
            return None

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            account.charge(list(args))
            account.charge(kwargs)
            account.spend(STEP + (source_length if isinstance(__obj, (runtime.Macro, runtime.BlockReference)) else 0))
            if isinstance(__obj, runtime.LoopContext):
                args = tuple(iterate(values) for values in args)
            owner = getattr(__obj, "__self__", None)
            if isinstance(owner, str):
                account.charge(owner)
                _check_text_method(owner, __obj.__name__, args)
            elif isinstance(owner, (list, tuple, dict)):
                account.charge(owner)
            return account.charge(super().call(__context, __obj, *args, **kwargs))

    class Generation(extension):  # type: ignore[misc]
        """The tag {% generation %}, which marks the text that a model is trained on. Here it only emits its body."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter or test that charges its operands and its result to the account.

        It keeps jinja2's attribute ``jinja_pass_arg``, which requests an additional argument.
        """
        checks: dict[str, Callable[..., None]] = {"replace": _check_replace, "round": _check_round}
        check = checks.get(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            account.spend(STEP)
            if name in QUICK:
                return function(*args, **kwargs)
            values = [value for value in args if not isinstance(value, (Sandbox, runtime.Context, nodes.EvalContext))]
            account.charge(values)
            account.charge(kwargs)
            if check is not None:
                check(*values, **kwargs)
            return account.charge(function(*args, **kwargs))

        if (mark := getattr(function, "jinja_pass_arg", None)) is not None:
            call.jinja_pass_arg = mark  # type: ignore[attr-defined]
        return call

    environment: Any = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=account.charge,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    known = {
        **environment.filters,
        "tojson": _to_json,
        "join": _join,
        "indent": _indent,
        "format": _format,
        "safe": lambda value: value,
    }
    environment.filters = {name: charged(name, known[name]) for name in FILTERS}
    environment.filters |= {"_iterate": iterate, "_charge": account.charge, "_slice": account.charge_slice}
    environment.filters["_concatenate"] = concatenate
    environment.tests = {name: charged(name, test) for name, test in environment.tests.items()}
    del environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    return environment


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Raise LimitError if the result of a binary operator could be much larger than its operands."""
    texts = isinstance(left, (str, list, tuple)), isinstance(right, (str, list, tuple))
    if operator == "*" and any(texts):
        sequence, count = (left, right) if texts[0] else (right, left)
        if isinstance(count, int) and len(sequence) * count > MAX_CHARACTERS:
            raise LimitError(f"expected at most {MAX_CHARACTERS} repeated elements, got {len(sequence)} x {count}")
    elif operator == "%" and texts[0]:
        if isinstance(left, str) and re.search(r"%[^a-zA-Z%]*[*\d]", left):
            raise LimitError("expected a format without widths, got one with them")
        if isinstance(left, str) and left.count("%") * (len(_text(right)) + 8) > MAX_CHARACTERS:
            raise LimitError(f"expected at most {MAX_CHARACTERS} characters of a format, got more")
    elif operator == "**" and not (isinstance(right, (int, float)) and abs(right) <= 64):
        raise LimitError("expected an exponent of at most 64")


def _text(value: Any) -> str:
    """Return ``value`` if it is a str, else its repr.

    The value is already charged, which bounds the size of the repr.
    """
    return value if isinstance(value, str) else repr(value)


def _check_text_method(text: str, name: str, args: Sequence[Any]) -> None:
    if name not in TEXT_METHODS:
        raise LimitError(f"expected one of the methods {', '.join(TEXT_METHODS)} of a text, got {name:.80}")
    if name == "replace" and len(args) >= 2:
        _check_replace(text, *args)
    if name == "join" and len(args) == 1 and isinstance(args[0], (list, tuple, dict, str)):
        _check_join(args[0], text)


def _check_replace(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    text, old, new = map(_text, (text, old, new))
    if (text.count(old) if old else len(text) + 1) * len(new) > MAX_CHARACTERS:
        raise LimitError(f"expected at most {MAX_CHARACTERS} characters of replacements, got more")


def _check_join(values: Any, separator: str) -> None:
    if len(values) * len(separator) > MAX_CHARACTERS:
        raise LimitError(f"expected at most {MAX_CHARACTERS} characters of separators, got more")


def _check_round(value: Any, precision: int = 0, method: str = "common") -> None:
    if not isinstance(precision, int) or abs(precision) > 30:
        raise LimitError(f"expected a precision of at most 30 digits, got {precision!r:.80}")


def _join(values: Any, separator: str = "", attribute: str | None = None) -> str:
    """Return all values as texts joined by ``separator``; with ``attribute``, the entry of this name of each value."""
    values = list(values)
    _check_join(values, separator)
    if attribute is not None:
        values = [value[attribute] for value in values]
    return separator.join(map(str, values))


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Return ``text`` with its lines indented by ``width``, as jinja2's filter ``indent`` does.

    The first line is indented only if ``first``, and blank lines only if ``blank``.
    """
    space = " " * min(width, MAX_CHARACTERS) if isinstance(width, int) else width
    lines = str(text).splitlines()
    if len(space) * (len(lines) + 1) > MAX_CHARACTERS:
        raise LimitError(f"expected at most {MAX_CHARACTERS} characters of indentation, got more")
    rest = "\n".join([lines[0] if lines else "", *(space + line if line or blank else line for line in lines[1:])])
    return space + rest if first else rest


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    """Return ``text % args``, or ``text % kwargs`` if there are keyword arguments."""
    values = kwargs or args
    _check_operands("%", str(text), values)
    return str(text) % values


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return the JSON text of a value, like the filter ``tojson`` of transformers."""
    if indent is not None and not (type(indent) is int and 0 <= indent <= 16):
        raise LimitError(f"expected an indent of 0 to 16, got {indent!r:.80}")
    if separators is not None and sum(map(len, separators)) > 16:
        raise LimitError("expected separators of at most 16 characters, got longer ones")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    if not re.fullmatch(r"(?:[^%]|%-?[A-Za-z%])*", form):
        raise LimitError("expected a format without widths, got one with them")
    return datetime.datetime.now().strftime(form)


def _raise(message: object = "") -> NoReturn:
    raise ValueError(message)
