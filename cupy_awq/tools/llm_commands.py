# SPDX-License-Identifier: Apache-2.0
"""The commands for language models: ``generate``, ``chat`` and ``score``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupy_awq.check import HOST
from cupy_awq.checkpoint.model_path import locate
from cupy_awq.runtime import device
from cupy_awq.tools.operation_arguments import parse_count
from cupy_awq.tools.progress import erase_bar, show_bar

if TYPE_CHECKING:
    from cupy_awq.llm import Chat, Completion, LanguageModel, Sampling

MODEL = "a Hugging Face folder, a .gguf or .ak48 file, or the name smollm2"

CHAT = """

Each line is a message. /reset begins a new conversation, /help lists the commands; /quit, an
empty line or Ctrl-D ends, Ctrl-C stops an answer. From a pipe, lines are read without a prompt."""

HELP = """/help   print this list
/reset  begin a new conversation
/quit   end, as an empty line and Ctrl-D do
Ctrl-C  stop the answer; the printed part stays in the conversation"""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands by ``command``: it makes a parser of (name, function to run, summary, help text, examples)."""
    question = 'smollm2 "What is the capital of France?"'
    examples = [question, f"{question} --temperature 0.7 --seed 1", "smollm2 - < question.txt"]
    generate = command("generate", _generate, "complete prompts", "", examples)
    generate.add_argument("model", metavar="MODEL", help=MODEL)
    generate.add_argument(
        "prompts",
        metavar="PROMPT",
        nargs="*",
        type=_text,
        help="a user's message, or - for all of standard input; several run as one batch",
    )
    generate.add_argument(
        "--file",
        metavar="FILE",
        action="append",
        default=[],
        help="a file in UTF-8 with a user's message, after those of PROMPT; repeatable",
    )
    generate.add_argument(
        "--input",
        metavar="FILE",
        type=Path,
        help='prompts instead: lines of JSON {"id": ..., "prompt": text or messages}',
    )
    generate.add_argument(
        "--output", metavar="FILE", type=Path, help="the answers to --input; a second run answers what is missing"
    )
    generate.add_argument(
        "--ray", metavar="ADDRESS", help="answer --input on a Ray cluster: its address, auto, or local to start one"
    )
    generate.add_argument(
        "--actors",
        metavar="N",
        type=parse_count,
        help="--ray: copies of the model (default: one per GPU of the cluster)",
    )
    generate.add_argument("--raw", action="store_true", help="continue the text as it is, without a chat template")
    generate.add_argument(
        "--special-tokens",
        action=argparse.BooleanOptionalAction,
        help="recognize special tokens such as <|im_end|> in prompts (default: with --raw only)",
    )
    _add_choices(generate, 256)
    chat = command("chat", _chat, "talk to a model", CHAT, ["smollm2"])
    chat.add_argument("model", metavar="MODEL", help=MODEL)
    chat.add_argument(
        "--system", metavar="TEXT", type=_text, help="the system message (default: that of the chat template)"
    )
    chat.add_argument(
        "--context",
        metavar="N",
        type=int,
        help="the largest number of tokens of the conversation (default: 8192, or the model's context)",
    )
    chat.add_argument(
        "--drop-oldest", action="store_true", help="drop the oldest turns of a full conversation without asking"
    )
    _add_choices(chat, 1024)
    scored = ["smollm2 text.txt", "SmolLM2-135M/ SmolLM2-135M-AWQ/ text.txt"]
    score = command("score", _score, "print the perplexity of a text", "", scored)
    score.add_argument("models", metavar="MODEL", nargs="+", help=f"{MODEL}; several are compared in a table")
    score.add_argument("text", metavar="FILE", help="a text file in UTF-8, or - for standard input")
    score.add_argument("--json", action="store_true", help="print a list of objects instead of text")
    add_device(score)


def _text(argument: str) -> str:
    """Return a text argument. Bytes that the locale cannot decode are decoded as UTF-8; invalid ones become U+FFFD."""
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError:
        return os.fsencode(argument).decode("utf-8", "replace")
    return argument


def _template_arg(argument: str) -> tuple[str, Any]:
    """Parse the argument NAME=VALUE. A value that is neither JSON nor Python's True, False or None is a text."""
    name, sign, value = _text(argument).partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {argument!r:.80}")
    try:
        return name, json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except (ValueError, RecursionError):
        return name, value


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option --device of all commands that run a model."""
    parser.add_argument(
        "--device",
        metavar="cpu|cuda|cuda:N",
        help="the CPU, the first GPU, or GPU N (default: the current GPU, or the CPU if there is none)",
    )


def _add_choices(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    def number(name: str, kind: type, default: Any, text: str) -> None:
        parser.add_argument(name, metavar="X", type=kind, default=default, help=f"{text} (default: {default})")

    number("--max-tokens", int, max_tokens, "the largest number of tokens per answer")
    number("--temperature", float, 0.0, "the divisor of the logits; 0: always take the most likely token")
    number("--top-k", int, 0, "keep the X most likely tokens; 0 keeps all")
    number("--top-p", float, 1.0, "keep the most likely tokens whose total probability reaches X")
    number("--min-p", float, 0.0, "keep tokens at least X times as likely as the most likely one")
    number("--repetition-penalty", float, 1.0, "above 1: make tokens that are already in the text less likely")
    number("--seed", int, 0, "the seed of the random numbers")
    parser.add_argument(
        "--stop", metavar="TEXT", type=_text, action="append", default=[], help="a text that ends an answer; repeatable"
    )
    parser.add_argument(
        "--template-arg",
        metavar="NAME=VALUE",
        type=_template_arg,
        action="append",
        default=[],
        help="set a variable of the chat template, such as enable_thinking=false; VALUE is JSON or text; repeatable",
    )
    parser.add_argument("--stats", action="store_true", help="print tokens per second to stderr")
    add_device(parser)


def _generate(args: argparse.Namespace) -> int:
    sampling = _check_choices(args)
    if (args.input is None) != (args.output is None) or (args.input and (args.prompts or args.file)):
        raise ValueError("generate: expected prompts, or --input and --output")
    if (args.ray is not None and args.input is None) or (args.actors is not None and args.ray is None):
        raise ValueError("generate: expected --ray with --input, and --actors with --ray")
    if args.input is not None:
        return _generate_file(args, sampling)
    prompts = _read_prompts(args)
    model = _load(args.model, args.device)
    alone = len(prompts) == 1
    options = {
        "raw": args.raw,
        "special_tokens": args.special_tokens,
        "template_args": dict(args.template_arg),
        "max_tokens": args.max_tokens,
        "sampling": sampling,
        "stop": args.stop,
    }
    completions = model.generate(prompts, **options, on_text=(lambda _, text: _write(text)) if alone else None)
    for prompt, completion in zip(prompts, completions, strict=True):
        _write("\n" if alone else f"{prompt}\n{completion.text}\n")
        _explain_end(completion, args.max_tokens, "context")
        if not alone:
            _write("\n")
    if args.stats:
        _print_stats(model)
    return 0


def _generate_file(args: argparse.Namespace, sampling: Any) -> int:
    from cupy_awq.tools import generate_file

    options = {"raw": args.raw, "max_tokens": args.max_tokens, "sampling": sampling, "stop": tuple(args.stop)}
    options |= {"special_tokens": args.special_tokens, "template_args": dict(args.template_arg)}
    files = args.input, args.output, options
    if args.ray is None:
        failed = generate_file.run(lambda: _load(args.model, args.device), *files)
    else:
        failed = generate_file.run_on_ray(args.ray, args.actors, args.model, args.device, *files)
    if failed:
        what = "1 prompt has" if failed == 1 else f"{failed} prompts have"
        print(f"generate: {what} an error instead of an answer", file=sys.stderr)
    return int(failed > 0)


def _chat(args: argparse.Namespace) -> int:
    from cupy_awq.llm import ContextFullError

    sampling = _check_choices(args)
    model = _load(args.model, args.device)
    chat = model.chat(capacity=args.context, system=args.system, template_args=dict(args.template_arg))
    while True:
        text = _read_line("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
        if text in ("", "/quit"):
            return 0
        if text == "/help":
            print(HELP)
            continue
        if text == "/reset":
            chat.reset()
            continue
        try:
            _answer(chat, text, args, sampling, args.drop_oldest)
        except ContextFullError as error:
            can_drop = not args.drop_oldest and any(message["role"] == "user" for message in chat.messages)
            if not can_drop or not sys.stdin.isatty():
                hint = " (--drop-oldest makes room)" if can_drop else ""
                print(f"cupy_awq: error: {error}{hint}", file=sys.stderr)
                continue
            if _read_line(f"{error}. Drop the oldest turns? [Y/n] ").strip().lower() not in ("", "y", "yes"):
                continue
            try:
                _answer(chat, text, args, sampling, True)
            except ContextFullError as again:
                print(f"cupy_awq: error: {again}", file=sys.stderr)
                continue
        if args.stats:
            _print_stats(model)


def _read_line(question: str) -> str:
    """Print ``question`` and return the next line of standard input, or "" at its end."""
    try:
        return input(question)
    except EOFError:
        return ""


def _answer(chat: Chat, text: str, args: argparse.Namespace, sampling: Sampling, drop_oldest: bool) -> None:
    """Print the answer to a message while it is generated. Ctrl-C stops the answer; the printed part is kept."""
    options = {"max_tokens": args.max_tokens, "sampling": sampling, "stop": args.stop, "drop_oldest": drop_oldest}
    try:
        for piece in chat.say(text, **options):
            _write(piece)
    except KeyboardInterrupt:
        pass  # the answer printed so far stays in the conversation
    print()
    if chat.last is not None:
        _explain_end(chat.last, args.max_tokens, "conversation")


def _explain_end(completion: Completion, max_tokens: int, full: str) -> None:
    """Print to stderr why a completion is incomplete, if it is; ``full`` names what has no room left."""
    if completion.reason == "length":
        reason = "ended by --max-tokens" if len(completion.tokens) == max_tokens else f"the {full} is full"
        print(f"({reason})", file=sys.stderr)


def _score(args: argparse.Namespace) -> int:
    text = _read_text(args.text)
    for name in args.models:
        locate(name)
    width = max(map(len, args.models))
    is_table = len(args.models) > 1 and not args.json
    if is_table:
        print(f"{'model':{width}}  tokens  perplexity  nats/token    loss")
    rows: list[dict[str, Any]] = []
    for name in args.models:
        score = _load(name, args.device).score(text)
        row = {"model": name, "tokens": score.tokens, "log_likelihood": score.log_likelihood}
        rows.append({**row, "perplexity": score.perplexity})
        if is_table:  # the last column is the loss per token minus the first model's
            mean, first = (-row["log_likelihood"] / row["tokens"] for row in (rows[-1], rows[0]))
            numbers = f"{score.tokens:6}  {score.perplexity:10.4f}  {mean:10.5f}  {mean - first:+.4f}"
            print(f"{name:{width}}  {numbers}", flush=True)
    if args.json:
        print(json.dumps(rows, indent=2))
    elif not is_table:
        print(f"tokens          {score.tokens}")
        print(f"log-likelihood  {score.log_likelihood:.3f} nats")
        print(f"perplexity      {score.perplexity:.4f}")
    return 0


def _read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts of `generate`. Raises ValueError if there is none, or standard input is named twice."""
    if not args.prompts and not args.file:
        raise ValueError("PROMPT: expected a text, - for standard input, or --file, got none")
    if args.prompts.count("-") > 1:
        raise ValueError("PROMPT: expected - once, got it several times")
    texts = [_read_text(prompt).removesuffix("\n") if prompt == "-" else prompt for prompt in args.prompts]
    return texts + [_read_text(file).removesuffix("\n") for file in args.file]


def _read_text(file: str) -> str:
    """Return the text of a file in UTF-8, or of standard input for "-"; of a text that is too long, only a part.

    Raises OSError if the file cannot be read, and ValueError if it is not UTF-8.
    """
    from cupy_awq.llm.text.chat_template import MAX_CHARACTERS

    if file == "-":
        return sys.stdin.read(MAX_CHARACTERS + 1)
    try:
        with open(file, encoding="utf-8") as opened:
            return opened.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected text in UTF-8, got {error}") from None


def _check_choices(args: argparse.Namespace) -> Sampling:
    """Return the sampling parameters. Raises ValueError for an option that `generate` would refuse later."""
    from cupy_awq.llm import Sampling
    from cupy_awq.llm.generate_arguments import check_max_tokens, check_stop

    check_max_tokens(args.max_tokens)
    check_stop(args.stop)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return Sampling(**{name: getattr(args, name) for name in names})


def _load(path: str, place: Any) -> LanguageModel:
    from cupy_awq import llm

    has_bar = sys.stderr.isatty()
    try:
        return llm.load(path, device=place, progress=show_bar if has_bar else None)
    except BaseException:
        if has_bar:
            erase_bar()  # the error starts on a line of its own, not after the bar
        raise


def _write(text: str) -> None:
    if sys.stdout.isatty():  # escape control characters that a model generates, except for line ends and tabs
        text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: ascii(match[0])[1:-1], text)
    print(text, end="", flush=True)


def _print_stats(model: LanguageModel) -> None:
    stats, read = model.stats, model.model.weight_bytes
    lines = [f"prompt  {stats.prompt_tokens} tokens"]
    if stats.prompt_seconds > 0:  # the time is 0 if Ctrl-C stopped the prefill
        lines[0] += f", {stats.prompt_tokens / stats.prompt_seconds:.1f} tokens/s"
    if stats.seconds > 0:
        speed = stats.tokens / stats.seconds
        index = model.model.ops.device_index
        rate = stats.steps / stats.seconds * read / 1e9
        share = f", {rate / device.of(index).read_gbs:.0%} of the memory bandwidth" if index != HOST else ""
        text = f"decode  {stats.tokens} tokens, {speed:.1f} tokens/s, {read / 1e6:.1f} MB of weights per step{share}"
        lines.append(text)
    print("\n".join(lines), file=sys.stderr)
