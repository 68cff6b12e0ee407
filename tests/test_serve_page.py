# SPDX-License-Identifier: Apache-2.0
"""The page at / in headless Chromium, driven by DevTools commands through two pipes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cupy_awq.llm import Engine, load
from tests import llm_models
from tests.serving import Running

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

SEND = """
document.getElementById("text").value = "Hello";
document.getElementById("form").requestSubmit();
"""
SHOWN = "[...document.querySelectorAll('#log div')].map((block) => [block.className, block.textContent])"


class Page:
    """A page in a browser of its own, which ends with the context."""

    def __init__(self, url: str, folder: Path) -> None:
        commands, self._commands = os.pipe()
        self._replies, replies = os.pipe()

        def place() -> None:
            """Make the pipes the file descriptors 3 and 4, where Chromium expects them."""
            copies = os.dup(commands), os.dup(replies)
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={folder}"]
        command = [str(CHROMIUM), *options, "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(command, close_fds=False, preexec_fn=place, stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(replies)
        self._held, self._count, self._session = b"", 0, {}
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._replies)

    def call(self, method: str, **params: Any) -> Any:
        """Send a command and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                self._held += os.read(self._replies, 1 << 16)
            text, _, self._held = self._held.partition(b"\0")
            reply = json.loads(text)
            if reply.get("id") == self._count:
                return reply["result"]

    def run(self, script: str) -> Any:
        """Run a script in the page and return its value."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until a script returns true."""
        end = time.monotonic() + 60
        while not self.run(script):
            assert time.monotonic() < end, self.run("document.body.innerText")
            time.sleep(0.05)


def test_the_page_shows_the_answer_of_the_server(tmp_path: Path) -> None:
    model = load(llm_models.folder(tmp_path / "model", llm_models.LLAMA), device="cpu")
    with Engine(model) as engine, Running(engine) as server:
        _, wanted = server.chat(max_tokens=12)
        with Page(f"http://127.0.0.1:{server.port}/", tmp_path / "profile") as page:
            page.wait_for("document.readyState === 'complete' && document.title === 'Chat'")
            page.run(
                "const ask = fetch; fetch = (path, options) => ask(path, options.body ? { ...options, body: "
                "JSON.stringify({ ...JSON.parse(options.body), temperature: 0, max_tokens: 12 }) } : options)"
            )
            page.run(SEND)
            page.wait_for("!document.getElementById('send').disabled")
            answer = wanted["choices"][0]["message"]["content"]
            assert page.run(SHOWN) == [["user", "Hello"], ["assistant", answer]]
            page.run("document.getElementById('clear').click()")
            assert page.run(SHOWN) == []
