"""Switches the recording of traffic on and off, agrees on its key with the other ingresses, and tells of replicas."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from router.background import run_in_background
from router.core import RoutingCore
from router.protocol.events import StatsReport
from serve_app.config.app import AppConfig
from serve_app.config.engine import SIMULATED_DECODE_EACH_S
from serve_app.config.traffic import TrafficLogConfig
from serve_app.ingress.observe.traffic import TrafficObserver
from serve_app.traffic.record import RecordedModel, ReplicaChange
from serve_app.traffic.recorder import Recording
from serve_app.traffic.recording_key import KeyOffer, RecordingKey

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often replicas are looked at."""
AGREE_S = 5.0
"""The longest wait for the other ingresses' keys."""
AGAIN_S = 30.0
"""After this time keys are compared again: an ingress may have been unreachable."""
START_S, FACTS_S = 600.0, 30.0
"""Lines wait at most so long for the first replica, and then for the others: the header tells of them."""
CLOSE_S = 5.0
MAX_ENDED = 256

SETTINGS = (
    *("block_size", "enable_prefix_caching", "num_blocks", "kv_cache_bytes", "host_cache_bytes", "disk_cache_bytes"),
    *("max_num_batched_tokens", "max_num_seqs", "max_waiting_requests", "max_queued_requests", "max_itl_ms"),
    *("max_model_len", "default_max_tokens", "session_wait_s", "kv_pull", "min_pull_tokens", "max_holders"),
    *("replicas", "autoscaling", "handover", "prewarm", "ingress_replicas", "data_parallel_size"),
    *("directory_max_blocks", "load_report_interval_s", "no_replica_wait_s", "request_timeout_s", "policy"),
    *("shadow_policy", "tier_load_ratio", "pin_budget", "num_speculative_tokens"),
)
"""What the header tells of the settings: nothing that names people, keys or places."""

Ingresses = Callable[..., Awaitable[list[Any]]]


class ModelInLog(Protocol):
    """What is told of a model."""

    config: AppConfig
    core: RoutingCore


class TrafficLog:
    """The recording of one ingress. ``name``: of this; ``ingresses``: calls a method of all of them.

    ``models``: those that are served here, by name.
    """

    def __init__(
        self, name: str, observer: TrafficObserver, models: Mapping[str, ModelInLog], ingresses: Ingresses
    ) -> None:
        self._writer = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:12]
        self._observer, self._models, self._ingresses = observer, models, ingresses
        self._settings: TrafficLogConfig | None = None
        self._several = 1
        self._offer: KeyOffer | None = None
        self._used: bytes | None = None
        self._ended: dict[str, None] = {}
        """The recordings that were switched off here, whose keys another ingress may still offer."""
        self._replicas: dict[str, tuple[Any, ...]] = {}
        self._task: asyncio.Task[None] | None = None

    def configure(self, config: AppConfig) -> None:
        """Record as these settings say from now on. Never fails; settings that changed begin another file."""
        settings = config.traffic_log
        self._observer.left_out = frozenset() if settings is None else frozenset(settings.leave_out)
        if _but_tenants(settings) == _but_tenants(self._settings):
            self._settings = settings
            return
        self._end()
        self._settings, self._several = settings, config.ingress_replicas
        if settings is None:
            return
        sizes = {name: model.config.block_size for name, model in self._models.items()}
        path = settings.path.expanduser()
        if config.ingress_replicas > 1:
            path = path.with_name(f"{path.stem}.{self._writer}{path.suffix}")
        self._offer = KeyOffer.new(str(settings.path))
        self._observer.use(Recording(settings, path, self._writer, sizes, self._observer.counts))
        self._task = run_in_background(self._follow)

    async def close(self) -> None:
        """End the recording, and wait until its lines are written."""
        recording = self._observer.recording
        self._end()
        self._settings = None
        if recording is not None:
            await asyncio.to_thread(recording.join, CLOSE_S)

    def _end(self) -> None:
        recording = self._observer.recording
        self._observer.use(None)
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if recording is not None and self._offer is not None:
            self._use(recording, self._offer)
            recording.stop()
            self._ended[self._offer.public] = None
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
        self._offer = self._used = None
        self._replicas = {}

    # The key.

    def exchange(self, offer: KeyOffer) -> KeyOffer | None:
        """Compare another ingress' key with this one's; return the one that counts, None while this records nothing."""
        if self._offer is None:
            return None
        self._take(offer)
        return self._offer

    def _take(self, offer: KeyOffer) -> None:
        """Use another ingress' key if it comes before this one's, and its recording goes on here."""
        own = self._offer
        if own is None or offer.path != own.path or offer.public in self._ended or offer >= own:
            return
        self._offer = offer
        if self._used is not None:
            self._begin()

    def _use(self, recording: Recording, offer: KeyOffer) -> None:
        if offer.key != self._used:
            self._used = offer.key
            self._replicas = {}  # told again, in the file of this key
            recording.facts = {name: facts_of(model) for name, model in self._models.items()}
            recording.use(RecordingKey(offer))

    async def _agree(self) -> bool:
        """Ask the others for their keys; return whether all of them answered."""
        if self._offer is None or self._several == 1:
            return True
        try:
            answers = await self._ingresses("exchange_recording_key", self._offer, timeout_s=AGREE_S)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.info("an ingress does not tell its recording's key yet: %s", type(error).__name__)
            return False
        for offer in answers:
            if offer is not None:
                self._take(offer)
        return len(answers) >= self._several

    # The loop.

    async def _follow(self) -> None:
        agreed = await self._agree()
        compared_s = time.monotonic()
        until_s = compared_s + START_S
        while True:
            if any(model.core.replica_ids for model in self._models.values()):
                until_s = min(until_s, time.monotonic() + FACTS_S)
            if self._used is None and (self._knows_replicas() or time.monotonic() > until_s):
                self._begin()
            if self._used is not None:
                self._look()
            await asyncio.sleep(LOOK_S if self._used is not None else LOOK_S / 10)
            if time.monotonic() - compared_s > (AGAIN_S if agreed else LOOK_S):
                agreed, compared_s = await self._agree(), time.monotonic()

    def _knows_replicas(self) -> bool:
        return all(map(_is_known, self._models.values()))

    def _begin(self) -> None:
        if self._observer.recording is not None and self._offer is not None:
            self._use(self._observer.recording, self._offer)

    def _look(self) -> None:
        """Tell of replicas that came or went, and of what became known of them."""
        recording = self._observer.recording
        if recording is None:
            return
        for name, model in self._models.items():
            facts, replicas = facts_of(model), sorted(model.core.replica_ids)
            state = (replicas, facts.pool_tokens, facts.prefill_tokens_per_s > 0.0)
            if state != self._replicas.get(name):
                self._replicas[name] = state
                recording.facts = {**recording.facts, name: facts}
                recording.add(
                    ReplicaChange(
                        timestamp=recording.ms_of(time.perf_counter()),
                        replicas=replicas,
                        model=name,
                        prefill_tokens_per_s=facts.prefill_tokens_per_s,
                        pool_tokens=facts.pool_tokens,
                    )
                )


def _but_tenants(settings: TrafficLogConfig | None) -> TrafficLogConfig | None:
    return None if settings is None else settings.model_copy(update={"leave_out": []})


def _is_known(model: ModelInLog) -> bool:
    """Return whether as many replicas as there are at the start have told what the header has of them."""
    replicas, told = model.core.replica_ids, model.core.stats()
    return len(replicas) >= model.config.first_replicas and all(replica in told for replica in replicas)


def facts_of(model: ModelInLog) -> RecordedModel:
    """Return what is known of a model's replicas now: of simulated ones their exact cost, of others as measured."""
    config, core = model.config, model.core
    values = config.model_dump(mode="json", include=set(SETTINGS))
    simulated = config.engine_traits.simulated
    step_s = config.simulated_decode_step_s + SIMULATED_DECODE_EACH_S
    rate = config.simulated_prefill_tokens_per_s if simulated else core.loads.prefill_tokens_per_s
    return RecordedModel(
        engine=config.engine,
        policy=config.policy,
        replicas=len(core.replica_ids),
        pool_tokens=int(max(_sums(core.stats(), "warmpath_kv_cache_blocks"), default=0.0)) * config.block_size,
        prefill_tokens_per_s=round(rate, 3),
        decode_step_s=step_s if simulated else 0.0,
        decode_each_s=SIMULATED_DECODE_EACH_S if simulated else 0.0,
        max_num_seqs=config.max_num_seqs,
        pull_tokens_per_s=max(_sums(core.stats(), "warmpath_kv_pull_tokens_per_second"), default=0.0),
        settings={name: value for name, value in values.items() if value is not None},
    )


def _sums(reports: Mapping[str, StatsReport], name: str) -> list[float]:
    """Return the sum of a metric's samples in each report."""
    return [sum(value for each, _, value in report.samples if each == name) for report in reports.values()]
