"""Texts of others are printed as they are."""

import pytest

from serve_app.cli.console import console, fail

FOREIGN = "ray::two: [bold]x[/bold] :two: [/]"


def test_names_of_processes_and_models_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a tag nor an emoji's name is replaced, and an odd tag is no error."""
    console.print(FOREIGN, soft_wrap=True)
    with pytest.raises(SystemExit):
        fail(FOREIGN)
    assert capsys.readouterr().err.splitlines() == [FOREIGN, f"error: {FOREIGN}"]
