"""Runs a page of the documents from top to bottom, in an empty folder, against a cluster.

What a block prints is compared as far as the page shows it: the lines below a command with `$`, and
the remark behind a `print`. A command ends with status 0, unless the page's stand-in has it in
`REFUSED`, with a part of the error that it gets here. `keylane spark` shares the Spark of the page's
session of Python. A command with the remark `# in another terminal` runs until the end of the page.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any, Self

from support.page_session import ANSWERS
from support.page_steps import REASONS, SERVES, Step, all_commands, steps_of
from support.pages import Command, RunningProgram, match_line
from support.server_process import ForkedProcess, run_keylane

SESSION = Path(__file__).with_name("page_session.py")
STEP_LIMIT_S = 150.0
LOG_CHARS = 6000
PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
"""A `print`, and what it prints."""
SHELL = re.compile(r"[|<>$]|&&")
"""What only a shell understands."""
FOLLOWS = re.compile(r" --follow\b")
"""A command that serves until Ctrl-C."""
FOLLOWED_S = 2
ELSEWHERE = re.compile(r" +# in another terminal\b")
"""A command that serves beside the others."""
DIFFERS = 2
"""The status of `keylane spark reprocess --compare` if rows differ."""
SUBJECT = re.compile(r"--subject (\S+)")


class PythonSession:
    """The session of Python of a page, in a process of its own."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._printed = (folder / "printed.txt").open("w+", encoding="utf-8")
        self._log = (folder / "log.txt").open("w+", encoding="utf-8")
        steps, self._steps = os.pipe()
        self._answers, answers = os.pipe()
        files = {0: steps, 1: self._printed.fileno(), 2: self._log.fileno(), ANSWERS: answers}
        self._process = ForkedProcess(str(SESSION), [], environment, files, partial(chdir, folder))
        os.close(steps)
        os.close(answers)
        self._read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._steps)
        os.close(self._answers)
        self._printed.close()
        self._log.close()

    def take(self, **step: object) -> Any:
        """Take a step, and return its answer."""
        os.write(self._steps, json.dumps(step).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([self._answers], [], [], STEP_LIMIT_S)
            part = os.read(self._answers, 65536) if readable else b""
            assert part, f"no answer: {step}\n{self._end_of_log()}"
            line += part
        answer = json.loads(line)
        assert answer["error"] is None, f"{answer['error']}\n{self._end_of_log()}"
        return answer["answer"]

    def printed(self) -> list[str]:
        """Return the lines that were printed since the last call."""
        self._printed.seek(self._read)
        text = self._printed.read()
        self._read = self._printed.tell()
        return text.splitlines()

    def _end_of_log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-LOG_CHARS:]


class PageRun:
    """A run of a page; `replaced` has texts of the page and what stands for them here."""

    def __init__(
        self, page: Path, folder: Path, environment: Mapping[str, str], replaced: Mapping[str, str]
    ) -> None:
        self._page = page
        self._folder = folder
        self._replaced = replaced
        venv = Path(sys.executable).parents[1]
        (folder / ".venv").symlink_to(venv)
        kept = {name: value for name, value in os.environ.items() if "KEYLANE" not in name}
        self._environment = kept | {
            "HOME": str(folder),
            "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "200",
            **environment,
        }
        (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
        self._refused: dict[str, str] = {}
        self._serving: list[RunningProgram] = []

    def follow(self, stand_in: Path | None) -> None:
        """Run every step of the page."""
        try:
            self._follow(stand_in)
        finally:
            for program in self._serving:
                program.close()

    def _follow(self, stand_in: Path | None) -> None:
        with PythonSession(self._folder, self._environment) as session:
            if stand_in is not None:
                self._refused = session.take(stand_in=str(stand_in))
                session.take(hook="prepare", text="")
            for step in steps_of(self._page):
                assert step.mark in {"", *REASONS}, f"line {step.block.line}: {step.mark}"
                if step.kind == "commands" and not step.mark:
                    self._make_subjects(step)
                if step.runs:
                    (self._commands if step.kind == "commands" else self._python)(session, step)
            session.take(hook="at_end", text="")
            assert not self._refused, f"not on the page: {list(self._refused)}"

    def _python(self, session: PythonSession, step: Step) -> None:
        text = self._here(step.block.text)
        if step.kind == "sql":
            text = "".join(f"spark.sql({each!r}).show()\n" for each in statements_of(text))
        if step.block.title:
            (self._folder / step.block.title).write_text(text)
            return
        session.take(hook="before_block", text=text)
        session.printed()
        session.take(block=text, page=str(self._page), line=step.block.line)
        printed = session.printed()
        for expected in PRINTED.findall(step.block.text):
            assert expected in printed, f"line {step.block.line}: {printed}"
        session.take(hook="after_block", text=text)

    def _make_subjects(self, step: Step) -> None:
        """Make the subjects that a cluster begins with, but for `orders`, which there is."""
        for each in all_commands(step.block):
            if SERVES.match(each.command):
                for subject in set(SUBJECT.findall(each.command)) - {"orders"}:
                    self._run(f"keylane subject create {subject}")

    def _commands(self, session: PythonSession, step: Step) -> None:
        for each in step.commands:
            command = self._here(each.command)
            command = session.take(hook="before_command", text=command) or command
            if ELSEWHERE.search(command):
                program = RunningProgram(
                    ELSEWHERE.split(command)[0], self._folder, self._environment
                )
                self._serving.append(program)
                continue
            if command.startswith("keylane spark "):  # a Java process of its own takes 20 s
                words = shlex.split(command, comments=True)[1:]
                expected = {0, DIFFERS} if "--compare" in words else {0}
                status = session.take(keylane=words)
                assert status in expected, f"line {step.block.line}: {command}"
                continue
            self._command(step, Command(command, [self._here(line) for line in each.output]))

    def _command(self, step: Step, each: Command) -> None:
        if each.command.startswith("export "):
            for assigned in shlex.split(each.command)[1:]:
                name, _, value = assigned.partition("=")
                self._environment[name] = value
            return
        done = self._run(each.command)
        shown = f"line {step.block.line}: $ {each.command}\n{done.stdout}{done.stderr}"
        plain = re.sub(r" +# .*", "", each.command)
        if plain in self._refused:
            assert done.returncode != 0, f"not refused: {shown}"
            assert self._refused.pop(plain) in done.stderr, shown
            return
        interrupted = FOLLOWS.search(each.command) and done.returncode == 128 + signal.SIGINT
        assert done.returncode == 0 or interrupted, shown
        if each.output:
            printed = done.stdout.splitlines()
            assert len(printed) == len(each.output), shown
            for expected, line in zip(each.output, printed, strict=True):
                assert match_line(expected, line) is not None, f"expected {expected!r}: {shown}"

    def _run(self, command: str) -> subprocess.CompletedProcess[str]:
        if FOLLOWS.search(command):
            command = f"timeout --preserve-status --signal INT {FOLLOWED_S} {command}"
        if command.startswith("keylane ") and not SHELL.search(command.partition(" # ")[0]):
            words = shlex.split(command, comments=True)[1:]
            return run_keylane(
                *words,
                text="y\n",
                environment=self._environment,
                terminal=True,
                place=partial(chdir, self._folder),
            )
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=STEP_LIMIT_S,
        )

    def _here(self, text: str) -> str:
        for theirs, ours in self._replaced.items():
            text = text.replace(theirs, ours)
        return text


def statements_of(sql: str) -> list[str]:
    """Return the statements of SQL text; none of them has a semicolon inside."""
    return [each.strip() for each in sql.split(";") if each.strip()]
