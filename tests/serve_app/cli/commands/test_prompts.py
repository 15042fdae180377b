"""`warmpath prompts`: versions are locked, and found changed."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from serve_app.cli.main import app


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prompts", *map(str, arguments)])
    return result.exit_code, result.output


def test_versions_are_locked_and_checked(tmp_path: Path) -> None:
    """Each command's answer and status; a changed byte is found."""
    shelf, text = tmp_path / "prompts", tmp_path / "text"
    text.write_bytes(b"You are the clerk.\nBe brief.\n")
    assert run("add", "clerk@1", text, "--dir", shelf)[0] == 0
    text.write_bytes(b"You are the clerk.\nBe kind.\n")
    status, said = run("add", "clerk@2", text, "--dir", shelf)
    assert status == 0 and said.startswith("clerk@2  sha256:") and "public" in said
    assert "private to acme" in run("add", "pilot@1", text, "--tenant", "acme", "--dir", shelf)[1]
    assert run("verify", "--dir", shelf) == (0, f"{shelf}: 3 prompts, all as they were locked\n")
    (shelf / "clerk/2.txt").write_bytes(b"You are the clerk.\nBe kind.\r\n")
    status, said = run("verify", "--dir", shelf)
    assert status == 1 and said.count("sha256:") == 2 and "the first differing byte is 27" in said
    assert run("add", "clerk", text, "--dir", shelf)[0] == 2
