"""Programs of Python, run in this process, which has imported torch and transformers already."""

import io
import logging
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock


@contextmanager
def programs_here() -> Iterator[None]:
    """Run in this process what ``subprocess.run`` would start with this Python; one test of each starts it really."""
    started = subprocess.run

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        flag = next((flag for flag in ("-c", "-m") if flag in command[1:]), None)
        if command[0] != sys.executable or flag is None or command[1:3] == ["-m", "pip"]:
            return started(command, **options)
        program, *arguments = command[command.index(flag) + 1 :]
        return _run(flag, program, [str(argument) for argument in arguments], command)

    with mock.patch.object(subprocess, "run", run):
        yield


def _run(flag: str, program: str, arguments: list[str], command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    out, error, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(error), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mock.patch.object(sys, "argv", [flag, *arguments]):
            try:
                if flag == "-m":
                    runpy.run_module(program, run_name="__main__", alter_sys=True)
                else:
                    exec(program, {"__name__": "__main__"})  # noqa: S102  # a program of ours
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except Exception:
                traceback.print_exc()
                code = 1
            finally:
                logging.disable(logging.NOTSET)
    return subprocess.CompletedProcess(command, code, out.getvalue(), error.getvalue())
