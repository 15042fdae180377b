"""A file of whole lines: rotated, cut nowhere, of its user alone."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.traffic.log_file import LogFile

HEADER = b'{"warmpath_traffic":1}\n'


def line(number: int, width: int = 10) -> bytes:
    return b'{"input_length":%0*d}\n' % (width, number)


def log_file(path: Path, max_bytes: int = 1000, keep: int = 2) -> LogFile:
    return LogFile(path, max_bytes, keep, lambda: HEADER)


def contents(path: Path) -> list[list[bytes]]:
    """Return the lines of all files, the oldest file first."""
    files = sorted(
        path.parent.glob(f"{path.name}*"), key=lambda file: -int(file.name.rpartition(".")[2].replace("log", "0"))
    )
    return [file.read_bytes().splitlines(keepends=True) for file in files]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(0, 3))
def test_rotated_files_hold_the_last_lines_whole(widths: list[int], keep: int) -> None:
    """Each has a header, none but one with a single write is too large, and the files hold what was written last."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        file = log_file(path, 150, keep)
        written = [line(number, width) for number, width in enumerate(widths)]
        for one in written:
            file.write(one)
        file.close()
        found = contents(path)
        assert len(found) <= keep + 1
        assert all(lines[0] == HEADER for lines in found)
        assert all(len(b"".join(lines)) <= 150 for lines in found if len(lines) > 2)
        held = [one for lines in found for one in lines[1:]]
        assert held and held == written[-len(held) :]
        assert len(held) == len(written) or len(found) == keep + 1


def test_only_its_user_reads_it(tmp_path: Path) -> None:
    """Whatever the umask, or an earlier file, says."""
    path = tmp_path / "new" / "log"
    path.parent.mkdir()
    path.write_text("")
    path.chmod(0o644)
    file = log_file(path)
    file.write(line(1))
    assert path.stat().st_mode & 0o777 == 0o600
    file.close()


def test_an_earlier_file_is_kept_and_an_empty_one_is_not(tmp_path: Path) -> None:
    """A restart keeps recorded requests; what has none is replaced, so that restarts push nothing out."""
    path = tmp_path / "log"
    for number in range(3):
        file = log_file(path)
        file.open()
        if number == 0:
            file.write(line(0))
        file.close()
    assert contents(path) == [[HEADER, line(0)], [HEADER]]


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    """An operator takes it while it is written; nothing goes to the taken one."""
    path = tmp_path / "log"
    file = log_file(path)
    file.write(line(1))
    path.rename(tmp_path / "taken")
    file.write(line(2))
    path.unlink()
    file.write(line(3))
    file.close()
    assert (tmp_path / "taken").read_bytes() == HEADER + line(1)
    assert path.read_bytes() == HEADER + line(3)


def test_two_writers_push_out_none_of_each_others_lines(tmp_path: Path) -> None:
    """In a rolling update two ingresses have one path: the later one writes beside it until it begins another file."""
    path, beside = tmp_path / "log", tmp_path / "log.new"
    old, new = log_file(path), LogFile(path, 150, 2, lambda: HEADER, beside=beside)
    for number in range(3):
        old.write(line(number))
        new.write(line(number + 100))
    assert path.read_bytes() == HEADER + b"".join(map(line, range(3)))
    assert beside.read_bytes() == HEADER + line(100) + line(101) + line(102)
    assert new.path == beside
    old.close()
    new.write(line(103, 90))
    assert new.path == path and path.read_bytes() == HEADER + line(103, 90)
    assert (tmp_path / "log.1").read_bytes() == HEADER + b"".join(map(line, range(3)))
    with pytest.raises(OSError, match="another process writes it"):
        log_file(path).open()
    new.close()


@pytest.mark.parametrize("text", ["model: mine\n", "{", '{"input_length": 1}\n'])
def test_a_file_of_others_is_left_alone(tmp_path: Path, text: str) -> None:
    """A path given by mistake costs no file; what a crash left of a header is no file of others."""
    path = tmp_path / "log"
    path.write_text(text)
    if HEADER.startswith(text.encode()):
        log_file(path).open()
        assert path.read_bytes() == HEADER
    else:
        with pytest.raises(OSError, match="something else than recorded traffic"):
            log_file(path).write(line(1))
        assert path.read_text() == text


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A pipe without a reader, one with a reader, a folder and a link: an error at once, and nobody waits."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "elsewhere")
    for path in (pipe, link, tmp_path):
        with pytest.raises(OSError):
            log_file(path).write(line(1))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="no regular file"):
        log_file(pipe).write(line(1))
    os.close(reader)
    assert not (tmp_path / "elsewhere").exists()


FULL = """
import resource, signal, sys
from pathlib import Path
from tests.serve_app.traffic.test_log_file import HEADER, line, log_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
file, lost = log_file(Path(sys.argv[1])), 0
for number in range(20):
    try:
        file.write(line(number))
    except OSError:
        lost += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.write(line(99))
print(lost)
"""


def test_a_full_disk_cuts_no_line(tmp_path: Path) -> None:
    """What does not fit is not in the file at all, and later lines are whole again."""
    path = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], check=True, capture_output=True, text=True)
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[0] == HEADER and lines[-1] == line(99)
    assert len(lines) - 2 + int(done.stdout) == 20 and int(done.stdout) > 10


KILLED = """
import os, sys
from pathlib import Path
from tests.serve_app.traffic.test_log_file import line, log_file
file, number = log_file(Path(sys.argv[1]), 1 << 20, 3), 0
while True:
    file.write(b"".join(line(number + one, 200) for one in range(50)))
    number += 50
    print(number, flush=True)
"""


def test_a_sigkill_leaves_whole_lines(tmp_path: Path) -> None:
    """All lines of the writes that had returned are there, in order; a part of one more is at most at the end."""
    path = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        told = 0
        while told < 10_000:
            told = int(writer.stdout.readline())
        writer.kill()
        told = max(
            [told, *(int(more) for more in writer.stdout.read().splitlines(keepends=True) if more.endswith(b"\n"))]
        )
    lines = [one for found in contents(path) for one in found[1:]]
    if not lines[-1].endswith(b"\n"):
        lines.pop()
    numbers = [int(one[17:-2]) for one in lines]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert numbers[-1] >= told - 1
