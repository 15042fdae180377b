"""Builds the Serve application from settings, for `serve run serve_app:build_app` and config files."""

import json
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, GangSchedulingConfig, RequestRouterConfig

from serve_app.config.app import MAX_REPLICAS, AppConfig, deployment_of
from serve_app.config.live import app_config
from serve_app.ingress.broadcast import INGRESS_NAME
from serve_app.ingress.ingress import Ingress
from serve_app.ray_compat import keep_replicas
from serve_app.replica.replica import Replica

REPLICA_POLICY = "serve_app.autoscaling.controller:replica_policy"
WORKER_POLICY = "serve_app.autoscaling.controller:worker_policy"
INGRESS_POLICY = "serve_app.autoscaling.controller:ingress_policy"
"""Names instead of imports: the policies run in Serve's controller."""


def build_app(args: Mapping[str, Any] | AppConfig) -> Application:
    """Return the application; nothing starts until Serve runs it.

    ``args``: settings, or their pairs of NAME: VALUE. Raises BadSettings, because Serve's own check of a pydantic
    class would give other messages.
    """
    settings = args if isinstance(args, AppConfig) else app_config(args)
    served, ingresses = settings.served(), settings.ingress_replicas
    ingress_scale: dict[str, Any] = {"num_replicas": ingresses}
    if any(one.autoscaling is not None for one in served.values()):
        # The number is constant, but Serve collects figures only from deployments with a policy.
        ingress_scale = {"autoscaling_config": _autoscaling(INGRESS_POLICY, ingresses, ingresses)}
    return serve.deployment(
        Ingress,
        name=INGRESS_NAME,
        **ingress_scale,
        max_ongoing_requests=4096,
        ray_actor_options={"num_cpus": settings.replica_num_cpus},
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s,
        user_config={},
    ).bind(settings.to_json(), *(_replicas(one, settings) for one in served.values()))


def _replicas(settings: AppConfig, of: AppConfig) -> Application:
    """Return the deployment of one served model, of those of an application."""
    scale: dict[str, Any] = {"num_replicas": settings.first_replicas}
    if settings.data_parallel_size > 1:
        scale["gang_scheduling_config"] = GangSchedulingConfig(gang_size=settings.data_parallel_size)
    if settings.autoscaling is not None:
        # The policy obeys the settings in force; Serve's own bounds are wider.
        scale = {"autoscaling_config": _autoscaling(REPLICA_POLICY, settings.autoscaling.min_replicas, MAX_REPLICAS)}
    if settings.engine_traits.external:
        scale = {"autoscaling_config": _autoscaling(WORKER_POLICY, settings.replicas, MAX_REPLICAS)}
    own = {**settings.to_json(), "public_prompts": [], "prompts_dir": None, "aliases": {}, "fallback": None}
    made = serve.deployment(
        Replica,
        name=deployment_of(settings.model_name, of),
        **scale,
        # Engines bound their queues, and ingresses bound waiting requests by tenant; Serve's bounds ignore tenants.
        max_ongoing_requests=settings.max_num_seqs + settings.max_waiting_requests + 16,
        max_queued_requests=-1,
        ray_actor_options={"num_cpus": settings.replica_num_cpus, "num_gpus": settings.replica_num_gpus},
        health_check_period_s=5,
        health_check_timeout_s=10,  # three in a row fail: a hanging replica delays its answers by about 45 s
        graceful_shutdown_timeout_s=settings.graceful_shutdown_timeout_s,
        user_config={},  # never None: Serve would not notify replicas if a config file drops its user_config
        request_router_config=RequestRouterConfig(
            request_router_class="router.serve.request_router.CacheAwareRouter",
            request_router_kwargs=settings.routing(),
        ),
    ).bind(own)
    if of.models:
        keep_replicas(made, json.dumps(own, sort_keys=True))
    return made


def _autoscaling(policy: str, min_replicas: int, max_replicas: int) -> AutoscalingConfig:
    """Return Serve's settings for a policy with its own delays: Serve's delays restart at every small change."""
    return AutoscalingConfig(
        policy=AutoscalingPolicy(policy_function=policy),
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        metrics_interval_s=1.0,
        look_back_period_s=5.0,
    )
