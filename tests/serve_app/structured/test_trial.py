"""Grammars that take llguidance hours, or end its process: each is a refusal, and nobody else's trouble."""

import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.fairness.work import AbandonedError, ThreadJob, set_job
from serve_app.structured.compiler import GrammarError
from serve_app.structured.grammar import Grammar
from serve_app.structured.trial import GrammarTrials

OBJECT = Grammar.json_schema({"type": "object"}, "f")
ENDLESS = Grammar.regex("a?" * 4000 + "a" * 4000, "f")


def trials_of_demo(path: Path, clock: Callable[[], float] = time.monotonic) -> GrammarTrials:
    info = load_checkpoint_info(path)
    return GrammarTrials(info.path, info.vocab_size, info.eos_token_ids, clock, max_cpu_s=1)


@pytest.fixture(scope="module")
def trials(demo_model_path: Path) -> Iterator[GrammarTrials]:
    made = trials_of_demo(demo_model_path)
    yield made
    made.close()


def test_a_check_says_what_the_compiler_says(trials: GrammarTrials, compiler: Any) -> None:
    """Forms, what they leave out, and errors; one process does all of them."""
    loose = Grammar.json_schema({"type": "string", "format": "password"}, "f")
    assert [trials.checked(one) for one in (OBJECT, loose)] == [compiler.checked(one) for one in (OBJECT, loose)]
    (process,) = trials.idle_pids()
    with pytest.raises(GrammarError, match="look-ahead"):
        trials.checked(Grammar.regex("(?=a)", "f"))
    assert trials.idle_pids() == [process]


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGSEGV])
def test_a_grammar_that_ends_its_process_is_refused(trials: GrammarTrials, number: int) -> None:
    """Of its time by the kernel, or of its stack by llguidance; the next grammar gets another process."""
    if number == signal.SIGXCPU:
        with pytest.raises(GrammarError, match="too much work"):
            trials.checked(ENDLESS)
    else:
        trials.checked(OBJECT)
        (process,) = trials.idle_pids()
        os.kill(process, number)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        with pytest.raises(GrammarError, match="too much work"):
            trials.checked(OBJECT)
    assert trials.idle_pids() == []
    assert trials.checked(OBJECT)[1] == ()


def test_a_process_that_was_idle_for_too_long_is_followed_by_another(trials: GrammarTrials) -> None:
    """It is no refusal; and one that fails otherwise is an error of ours, which nobody remembers as a refusal."""
    trials.checked(OBJECT)
    (process,) = trials._idle
    process._in.close()
    assert process._popen.wait() == 0
    process._in = io.BytesIO()
    assert trials.checked(OBJECT)[1] == ()
    trials._idle[0]._unsent = b"no setup"
    with pytest.raises(RuntimeError, match="ended with code 1"):
        trials.checked(OBJECT)


def test_a_check_ends_with_its_client(trials: GrammarTrials, demo_model_path: Path) -> None:
    """Its process is killed, and its place is free at once."""
    trials.checked(OBJECT)
    (process,) = trials.idle_pids()
    job, ended = ThreadJob(), threading.Event()

    def check() -> None:
        set_job(job)
        try:
            trials.checked(ENDLESS)
        except AbandonedError:
            ended.set()
        finally:
            set_job(None)

    thread = threading.Thread(target=check)
    thread.start()
    job.abandoned = True
    assert ended.wait(30)
    thread.join()
    assert trials.idle_pids() == []
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    late = trials_of_demo(demo_model_path, iter([0.0, 1000.0]).__next__)
    with pytest.raises(GrammarError, match="too much work"):
        late.checked(ENDLESS)
    assert late.idle_pids() == []
