"""What recording costs, measured alone and in an instance."""

import os
import threading
from pathlib import Path

from benchmarks.end_to_end import recording
from benchmarks.end_to_end.recording import SwitchedServer, alone_us, cpu_ns


def test_alone_every_request_is_recorded(tmp_path: Path) -> None:
    """And in its form."""
    assert alone_us(tmp_path, 20) > 0.0
    assert (tmp_path / "alone.jsonl").read_bytes().count(b'"hash_ids"') == 20


def test_the_cpu_of_all_threads_counts() -> None:
    """Also that of one which is not the main one."""
    done, go = threading.Event(), threading.Event()

    def work() -> None:
        sum(range(2_000_000))
        done.set()
        go.wait(60)

    before = cpu_ns(os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    assert done.wait(60)
    assert cpu_ns(os.getpid()) > before + 1_000_000
    go.set()
    thread.join()


def test_lines_are_those_of_requests(tmp_path: Path) -> None:
    """Not the header, nor what tells of replicas."""
    server = SwitchedServer.__new__(SwitchedServer)
    server.file = tmp_path
    assert server.lines == 0
    server.file = tmp_path / "file"
    alone_us(tmp_path, 3)
    (tmp_path / "alone.jsonl").rename(server.file)
    assert server.lines == 3
    assert recording.ARMS == ("off", "on")
