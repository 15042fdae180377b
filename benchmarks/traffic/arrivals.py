"""Request times of single clients of a production service during a day, from published windows."""

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

ARRIVALS = Path(__file__).parents[1] / "traces" / "tenant_arrivals.json.gz"
"""``benchmarks/traces/README.md`` names its source and licence."""
MAX_CV = 4.0
"""Some published windows reach 24: at a few requests per minute that is one burst and an empty hour."""


@dataclass(frozen=True, slots=True)
class Client:
    """One client's day, with a value for each window of ``window_s``. ``cv``: the gaps' coefficient of variation.

    ``family``: the gaps' distribution, "Gamma" or "Weibull", or "" in a window without requests.
    """

    name: str
    window_s: float
    rate_per_s: tuple[float, ...]
    cv: tuple[float, ...]
    family: tuple[str, ...]

    def requests_in(self, start_s: float, seconds: float) -> float:
        """Return the mean number of requests during ``seconds`` from ``start_s`` of the day."""
        return sum(rate * span_s for rate, _, _, span_s in self._windows(start_s, seconds))

    def arrivals(self, rng: Random, scale: float, start_s: float, seconds: float) -> Iterator[float]:
        """Yield times relative to ``start_s`` of the day, at ``scale`` times the client's rate.

        Gaps are drawn with mean 1 and scaled by the rates of their windows.
        """
        now_s, left = 0.0, None
        for rate, cv, family, span_s in self._windows(start_s, seconds):
            end_s = now_s + span_s
            if rate * scale > 0.0:
                draw = _Gaps(family, min(cv, MAX_CV))
                # The first gap began before the start.
                left = draw(rng) * rng.random() if left is None else left
                while now_s + left / (rate * scale) < end_s:
                    now_s += left / (rate * scale)
                    yield now_s
                    left = draw(rng)
                left -= (end_s - now_s) * rate * scale
            now_s = end_s

    def _windows(self, start_s: float, seconds: float) -> Iterator[tuple[float, float, str, float]]:
        """Yield rate, cv, family and length in seconds of each window, or part of a window, in a span."""
        at_s, end_s = start_s, start_s + seconds
        number = int(start_s // self.window_s)
        while at_s < end_s:
            until_s = min(end_s, (number + 1) * self.window_s)
            place = number % len(self.rate_per_s)
            yield self.rate_per_s[place], self.cv[place], self.family[place], until_s - at_s
            at_s, number = until_s, number + 1


class _Gaps:
    """Draws from a Gamma or Weibull distribution with mean 1 and a given coefficient of variation."""

    def __init__(self, family: str, cv: float) -> None:
        self._weibull = family == "Weibull"
        self._shape = _weibull_shape(cv) if self._weibull else cv**-2
        self._scale = 1.0 / math.gamma(1.0 + 1.0 / self._shape) if self._weibull else cv**2

    def __call__(self, rng: Random) -> float:
        if self._weibull:
            return rng.weibullvariate(self._scale, self._shape)
        return rng.gammavariate(self._shape, self._scale)


@lru_cache(maxsize=4096)
def _weibull_shape(cv: float) -> float:
    """Return the shape with the coefficient of variation ``cv`` (0.05 to 10); a larger shape varies less."""
    low, high = 0.2, 25.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        spread = math.gamma(1.0 + 2.0 / middle) / math.gamma(1.0 + 1.0 / middle) ** 2 - 1.0
        low, high = (middle, high) if spread > cv * cv else (low, middle)
    return low


def read_clients(path: Path = ARRIVALS) -> list[Client]:
    """Read the published clients, with "-" for "/" in names. Raises ValueError if columns differ in length."""
    day = json.loads(gzip.decompress(path.read_bytes()))
    clients = [
        Client(
            row["client"].replace("/", "-"),
            day["window_s"],
            tuple(row["rate_per_s"]),
            tuple(row["cv"]),
            tuple(row["family"]),
        )
        for row in day["tenants"]
    ]
    for client in clients:
        if not len(client.rate_per_s) == len(client.cv) == len(client.family) > 0:
            raise ValueError(f"{path}: the columns of {client.name} differ in length")
    return clients


def scale_for(clients: Sequence[Client], requests_per_s: float, start_s: float, seconds: float) -> float:
    """Return the factor for all clients' rates that gives a total mean of ``requests_per_s`` over a span."""
    return requests_per_s * seconds / sum(client.requests_in(start_s, seconds) for client in clients)
