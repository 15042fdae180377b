"""vLLM's log with `--enable-log-requests`: a line a request. Newer ones tell its prompt at DEBUG alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from serve_app.errors import InvalidRequest
from serve_app.request_files import TraceError, numbered_lines
from serve_app.traffic.importers.source import ImportOptions, SourceRequest

MARK = b"Received request "
_HEAD = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_RECEIVED = re.compile(r"Received request (\S+?): (?=prompt: |params: )")
_DETAILS = re.compile(r"Request (\S+?) details: (?=prompt: )")
_PROMPT = re.compile(r"""prompt: (None|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", re.S)
_IDS = re.compile(r"prompt_token_ids: (\[[\d, ]*\])")
_MAX_TOKENS = re.compile(r"\bmax_tokens=(\d+)")
_CHOICES = re.compile(r"\(n=(\d+)")
_ADAPTER = re.compile(r"lora_name='([^']*)'")


class VllmLog:
    """A log, with other lines between those of requests."""

    def __init__(self, path: Path, options: ImportOptions, now: datetime | None = None) -> None:
        self._path, self._options = path, options
        self._reader = options.text_reader(path)
        self._now = now or datetime.now(UTC)
        self.block_tokens = self._reader.block_tokens

    def requests(self) -> Iterator[SourceRequest]:
        """Yield the requests whose prompt is told. Raises TraceError if none is."""
        details: dict[str, str] = {}
        silent = told = 0
        for _, raw in numbered_lines(self._path):
            self._options.on_line(len(raw))
            line = raw.decode("utf-8", "replace")
            named = _DETAILS.search(line)
            if named:
                details[named[1]] = line[named.end() :]
                continue
            received = _RECEIVED.search(line)
            if received is None:
                continue
            rest = line[received.end() :]
            text = rest if rest.startswith("prompt: ") else details.pop(received[1], "")
            request = self._request(received[1], line[: received.start()], rest, text)
            if request is None:
                silent += 1
                continue
            told += 1
            yield request
        if not told:
            raise TraceError(
                f"{self._path}: {silent} requests are logged without their prompts: run vLLM with "
                "--enable-log-requests, without --max-log-len, and newer ones with VLLM_LOGGING_LEVEL=DEBUG; or log "
                "the bodies at a proxy, for --format openai"
            )
        if silent:
            self._options.notes["requests are logged without their prompts, and left out"] += silent

    def _request(self, name: str, head: str, rest: str, text: str) -> SourceRequest | None:
        adapter = found[1] if (found := _ADAPTER.search(rest)) else ""
        ids, prompt = _IDS.search(text), _PROMPT.match(text)
        try:
            if ids and ids[1] != "[]":
                tokens, hashes = self._reader.of_ids([int(each) for each in ids[1][1:-1].split(",")], "", "", adapter)
            elif prompt and prompt[1] != "None":
                # A chat's prompt has been through the template, which writes special tokens as text.
                chat = name.startswith("chatcmpl")
                tokens, hashes = self._reader.prompt(ast.literal_eval(prompt[1]), "", "", adapter, special=not chat)
            else:
                return None
        except (InvalidRequest, SyntaxError, ValueError, OverflowError):
            return None
        most = _MAX_TOKENS.search(rest)
        choices = max(1, int(found[1]) if (found := _CHOICES.search(rest)) else 1)
        self._options.notes["answers are taken as long as max_tokens, because the log does not tell their tokens"] += 1
        output = int(most[1]) if most else self._options.output_tokens
        return SourceRequest(
            at_s=self._at_s(head), tokens=tokens, output_tokens=output * choices, hashes=hashes, adapter=adapter,
            choices=choices,
        )  # fmt: skip

    def _at_s(self, head: str) -> float:
        """Return the time at a line's beginning. vLLM's has no year: it is the latest that is not in the future."""
        found = _HEAD.search(head)
        if found is None:
            raise TraceError(f"{self._path}: a request begins without its time, MM-DD HH:MM:SS: {head[:60]!r}")
        year, *parts, fraction = found.groups()
        month, day, hour, minute, second = map(int, parts)
        micros = int((fraction or "0").ljust(6, "0"))
        latest = self._now + timedelta(days=1)
        for tried in [int(year)] if year else range(latest.year, latest.year - 5, -1):
            try:
                at = datetime(tried, month, day, hour, minute, second, micros, UTC)
            except ValueError:  # the 29th of February
                continue
            if year or at <= latest:
                return at.timestamp()
        raise TraceError(f"{self._path}: {found[0]} is no time")
