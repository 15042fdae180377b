"""Sizes and durations are numbers in any notation."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from serve_app.config.app import AppConfig
from serve_app.config.live import BadSettings, app_config
from serve_app.config.quantities import Bytes, Seconds, shown_bytes, shown_seconds
from serve_app.config.reference import ENTRIES

UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "G": 10**9, "KiB": 2**10, "Mi": 2**20, "GiB": 2**30, "TiB": 2**40}
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


class Both(BaseModel):
    size_bytes: Bytes = 0
    time_s: Seconds = 0.0


@given(st.decimals(0, 10**6, places=2), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_size_is_its_number_times_its_unit(number: Decimal, unit: str, between: str) -> None:
    """It is in whole bytes; MB is a million, MiB 1024 * 1024, in upper or lower case."""
    number = number if unit else Decimal(int(number))
    for text in (f"{number}{between}{unit}", f"{number}{between}{unit}".lower()):
        assert Both(size_bytes=text).size_bytes == int(number * UNITS[unit])  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 999), st.sampled_from(sorted(SECONDS))), min_size=1, max_size=4))
def test_a_duration_is_the_sum_of_its_parts(parts: list[tuple[int, str]]) -> None:
    expected = sum(number * SECONDS[unit] for number, unit in parts)
    for between in ("", " "):
        text = between.join(f"{number}{unit}" for number, unit in parts)
        assert Both(time_s=text).time_s == pytest.approx(expected)  # type: ignore[arg-type]


@given(st.integers(0, 2**50), st.integers(0, 10**6))
def test_displayed_quantities_can_be_parsed(size: int, seconds: int) -> None:
    assert Both(size_bytes=shown_bytes(size)).size_bytes == size  # type: ignore[arg-type]
    assert Both(time_s=shown_seconds(seconds)).time_s == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "said", "texts"),
    [
        ("kv_cache_bytes", "size such as 64MiB", ["", "MiB", "1XB", "-1MiB", "1..5MiB", "1 2MiB", "9" * 40 + "MiBMiB"]),
        ("save_ttl_s", "duration such as 500ms", ["", "m", "5 parsecs", "-5m", "1h30", "5mm"]),
    ],
)
def test_other_text_is_refused(name: str, said: str, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(BadSettings, match=f"{name}: must be a number of .*, or a {said}"):
            app_config({name: text})


@pytest.mark.parametrize("model", [AppConfig, *ENTRIES.values()])
def test_every_setting_in_bytes_or_seconds_takes_a_unit(model: type[BaseModel]) -> None:
    """The name's suffix gives the unit, so no new setting with a unit is forgotten."""

    def told(name: str) -> str:
        with pytest.raises(ValueError) as caught:
            model.model_validate({name: "x"})
        return str(caught.value)

    durations = {name for name in model.model_fields if name.endswith("_s") and not name.endswith("_per_s")}
    sizes = {name for name in model.model_fields if name.endswith("_bytes")}
    assert {name for name in durations if "a duration such as" not in told(name)} == set()
    assert {name for name in sizes if "a size such as" not in told(name)} == set()
