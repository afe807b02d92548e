"""The code blocks of a page, and its commands run as their reader runs them.

A block that is called `title="shop.py"` is a file. In a `console` block a line with `$` is a command,
and the lines below are its output. A block that is called `title="terminal 2"` belongs to a further
terminal, whose program keeps running; without a `$` it shows what that program has printed since,
and `^C` ends it. What is called `title="once"` prepares the machine, and is not run.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = re.compile(r'^( *)```(\w*)(?: title="([^"]*)")?\n(.*?)^ *```$', re.DOTALL | re.MULTILINE)
VOLATILE = re.compile(
    r"(?P<pid>(?<=[\w-]:)\d{2,7}\b(?! s))"
    r"|(?P<host>\bvm(?=:\d))"
    r"|(?P<time>\d{4}-\d\d-\d\dT[\d:.]+(?:Z|\+00:00)?)"
    r"|(?P<token>\b\d+(?=\s+\d\.\d s\b))"
    r"|(?P<seconds>\b\d+(?:\.\d+)?(?= ?(?:ms|s)\b))"
    r"|(?P<rule>─+)"
    r"|(?P<gap>\s+)"
)
"""What differs from run to run: process ids and hosts in names such as `vm:4711`, times, durations,
fencing tokens in front of them (a rebalance grants in any order), and the width of columns.
"""
ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
"""Colours of a terminal."""
SCREEN = (40, 100)
"""Rows and columns of the terminal."""
OUTPUT_LIMIT_S = 40.0


@dataclass(frozen=True)
class Block:
    """A code block; `line` is the number of its first line in the page."""

    language: str
    title: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """Return the code blocks of a page, without their indentation."""
    text = page.read_text()
    return [
        Block(
            found[2],
            found[3] or "",
            re.sub(rf"(?m)^{found[1]}", "", found[4]),
            text[: found.start()].count("\n") + 1,
        )
        for found in BLOCK.finditer(text)
    ]


@dataclass(frozen=True)
class Command:
    """A command, and the lines that it prints; no command for what a program prints later."""

    command: str
    output: list[str]


def commands_of(block: Block) -> Iterator[Command]:
    """Yield the commands of a `console` block with their output."""
    command, output = "", []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            if command or output:
                yield Command(command, output)
            command, output = line[2:], []
        else:
            output.append(line)
    yield Command(command, output)


class RunningProgram:
    """A program of a further terminal, and what it prints."""

    def __init__(self, command: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._file = (folder / f"terminal-{time.monotonic_ns()}.txt").open("w+")
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=folder,
            env=dict(environment),
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._found: set[int] = set()
        """The printed lines that were expected."""

    def printed(self) -> list[str]:
        return Path(self._file.name).read_text().splitlines()

    def expect(self, line: str, matches: Callable[[str, str], bool]) -> None:
        """Wait until a line is printed once more than it was expected before; lines of different
        keys may come in another order than on the page.
        """
        deadline = time.monotonic() + OUTPUT_LIMIT_S
        while True:
            printed = self.printed()
            for number in range(len(printed)):
                if number not in self._found and matches(line, printed[number]):
                    self._found.add(number)
                    return
            assert time.monotonic() < deadline, f"not printed: {line!r}\n" + "\n".join(printed)
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Press Ctrl-C, and wait for the end."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(OUTPUT_LIMIT_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._file.close()


def run_on_terminal(command: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a command to its end, and return what its terminal shows."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *SCREEN, 0, 0))
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=dict(environment),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
    finally:
        os.close(theirs)
    shown = b""
    with process, os.fdopen(ours, "rb", buffering=0) as screen:
        try:
            while part := screen.read(65536):
                shown += part
        except OSError:  # the last writer has closed it
            pass
        process.wait(OUTPUT_LIMIT_S)
    return ESCAPE.sub("", shown.decode()).replace("\r\n", "\n")


@dataclass
class Walk:
    """Follows a page in an empty folder, with texts of the page replaced, such as its ports."""

    folder: Path
    replaced: Mapping[str, str]
    environment: dict[str, str] = field(init=False)
    terminals: dict[str, RunningProgram] = field(init=False, default_factory=dict)
    seen: dict[str, str] = field(init=False, default_factory=dict)
    """Process ids of the page, and those that were printed in their place."""

    def __post_init__(self) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        sized = ("COLUMNS", "LINES")  # a worker of pytest-xdist sets them
        kept = {
            name: value
            for name, value in os.environ.items()
            if "KEYLANE" not in name and name not in sized
        }
        self.environment = kept | {"PATH": path, "TERM": "xterm"}
        # of our own environment; a reader's pytest has no plugin for asyncio
        self.environment["PYTEST_ADDOPTS"] = "-p no:asyncio"

    def follow(self, page: Path) -> None:
        """Save the files, run the commands, and compare what they print."""
        for block in blocks_of(page):
            text = re.sub(
                rf"\b(?:{'|'.join(self.replaced)})\b",
                lambda found: self.replaced[found[0]],
                block.text,
            )
            mine = Block(block.language, block.title, text, block.line)
            if block.language == "console" and block.title != "once":
                self._run(mine)
            elif re.fullmatch(r"\w+\.\w+", block.title):
                (self.folder / block.title).write_text(text)

    def close(self) -> None:
        for terminal in self.terminals.values():
            terminal.close()

    def _run(self, block: Block) -> None:
        for each in commands_of(block):
            if not block.title:
                self._run_to_end(each)
                continue
            if each.command:
                self.terminals[f"{block.title} {block.line}"] = RunningProgram(
                    self._with_seen(each.command), self.folder, self.environment
                )
            terminal = [
                terminal
                for name, terminal in self.terminals.items()
                if name.rpartition(" ")[0] == block.title
            ][-1]
            for line in each.output:
                if line == "^C":
                    terminal.interrupt()
                elif line.strip():
                    terminal.expect(line, self._matches)

    def _run_to_end(self, each: Command) -> None:
        if each.command.startswith("export "):
            name, _, value = each.command.removeprefix("export ").partition("=")
            self.environment[name] = value
            return
        output = run_on_terminal(self._with_seen(each.command), self.folder, self.environment)
        printed = [line for line in output.splitlines() if line.strip()]
        expected = [line for line in each.output if line.strip()]
        assert len(printed) == len(expected), f"$ {each.command}\n{output}"
        for want, got in zip(expected, printed, strict=True):
            assert self._matches(want, got), f"$ {each.command}\nexpected {want!r}\n{output}"

    def _with_seen(self, command: str) -> str:
        """Return the command with the process ids of this run in place of those of the page."""
        if not command.startswith("kill "):
            return command
        return re.sub(r"\b\d{2,7}\b", lambda number: self.seen[number[0]], command)

    def _matches(self, expected: str, printed: str) -> bool:
        """True if the lines match; notes process ids."""
        ids = match_line(expected, printed)
        if ids is None:
            return False
        self.seen |= ids
        return True


def match_line(expected: str, printed: str) -> dict[str, str] | None:
    """Return the process ids of an expected line, and those that were printed in their place; None
    if the lines differ by more than what differs from run to run.
    """
    pattern, ids, at = "", [], 0
    for volatile in VOLATILE.finditer(expected.strip()):
        pattern += re.escape(expected.strip()[at : volatile.start()])
        pattern += {
            "pid": r"(\d+)",
            "host": r"[\w.-]+",
            "time": r"\S+",
            "token": r"\d+",
            "seconds": r"[\d.]+",
            "rule": "─+",
            "gap": r"\s+",
        }[volatile.lastgroup or ""]
        if volatile.lastgroup == "pid":
            ids.append(volatile[0])
        at = volatile.end()
    pattern += re.escape(expected.strip()[at:])
    found = re.fullmatch(pattern.replace("…", ".*"), printed.strip())
    return None if found is None else dict(zip(ids, found.groups(), strict=True))
