"""The only wiring: settings -> a Serve application; `serve run serve_app:build_app` and config files end here."""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from serve_app.config.app import MAX_REPLICAS, AppConfig
from serve_app.config.live import app_config
from serve_app.ingress.broadcast import INGRESS_NAME
from serve_app.ingress.ingress import Ingress
from serve_app.replica.replica import Replica

REPLICA_POLICY = "serve_app.autoscaling.controller:replica_policy"
INGRESS_POLICY = "serve_app.autoscaling.controller:ingress_policy"
"""Named, not imported: they run in Serve's controller."""


def build_app(args: Mapping[str, Any] | AppConfig) -> Application:
    """Return the application; nothing starts until Serve runs it.

    ``args``: settings, or their pairs of NAME: VALUE. Raises BadSettings: Serve would check a pydantic class by itself,
    but in words that are not ours.
    """
    settings = args if isinstance(args, AppConfig) else app_config(args)
    config, scaling, ingresses = settings.to_json(), settings.autoscaling, settings.ingress_replicas
    scale: dict[str, Any] = {"num_replicas": settings.replicas}
    ingress_scale: dict[str, Any] = {"num_replicas": ingresses}
    if scaling is not None:
        # The policy keeps to the settings in force; Serve's own bounds are wider.
        scale = {"autoscaling_config": _autoscaling(REPLICA_POLICY, scaling.min_replicas, MAX_REPLICAS)}
        # Always as many, but Serve collects figures from what has a policy alone.
        ingress_scale = {"autoscaling_config": _autoscaling(INGRESS_POLICY, ingresses, ingresses)}
    replica = serve.deployment(
        Replica,
        name="Replica",
        **scale,
        # Engines bound their own queues, and ingresses what waits for them, by tenant; Serve's bounds know no tenants.
        max_ongoing_requests=settings.max_num_seqs + settings.max_waiting_requests + 16,
        max_queued_requests=-1,
        ray_actor_options={"num_cpus": settings.replica_num_cpus, "num_gpus": settings.replica_num_gpus},
        health_check_period_s=5,
        health_check_timeout_s=10,  # of three in a row: one that hangs holds its answers up for some 45 s
        graceful_shutdown_timeout_s=settings.graceful_shutdown_timeout_s,
        user_config={},  # never none: Serve would not tell replicas when a config file drops its user_config
        request_router_config=RequestRouterConfig(
            request_router_class="router.serve.request_router.CacheAwareRouter",
            request_router_kwargs=settings.routing(),
        ),
    ).bind({**config, "public_prompts": [], "prompts_dir": None})
    return serve.deployment(
        Ingress,
        name=INGRESS_NAME,
        **ingress_scale,
        max_ongoing_requests=4096,
        ray_actor_options={"num_cpus": settings.replica_num_cpus},
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s,
        user_config={},
    ).bind(config, replica)


def _autoscaling(policy: str, min_replicas: int, max_replicas: int) -> AutoscalingConfig:
    """Return Serve's settings for a policy that has delays of its own: Serve's restart at every tick of noise."""
    return AutoscalingConfig(
        policy=AutoscalingPolicy(policy_function=policy),
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        metrics_interval_s=1.0,
        look_back_period_s=5.0,
    )
