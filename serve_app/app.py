"""The only wiring: settings -> a Serve application of one ingress deployment and one deployment of replicas.

`serve run serve_app.app:build_app model=PATH` and a Serve config file's ``args:`` both end here.
"""

# No `from __future__ import annotations` here: Serve looks for a pydantic class in build_app's own annotation.
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from serve_app.config.app import AppConfig
from serve_app.ingress.broadcast import INGRESS_NAME
from serve_app.ingress.ingress import Ingress
from serve_app.replica.replica import Replica

REPLICA_NAME = "Replica"


def build_app(args: AppConfig) -> Application:
    """Return the application; nothing starts until Serve runs it."""
    config = args.to_json()
    replica = serve.deployment(
        Replica,
        name=REPLICA_NAME,
        num_replicas=args.replicas,
        # Engines bound their own queues, and ingresses what waits for them, by tenant; Serve's bounds know no tenants.
        max_ongoing_requests=args.max_num_seqs + args.max_waiting_requests + 16,
        max_queued_requests=-1,
        ray_actor_options={"num_cpus": args.replica_num_cpus, "num_gpus": args.replica_num_gpus},
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=20,
        request_router_config=RequestRouterConfig(
            request_router_class="router.serve.request_router.CacheAwareRouter",
            request_router_kwargs=args.routing(),
        ),
    ).bind({**config, "public_prompts": []})
    return serve.deployment(
        Ingress,
        name=INGRESS_NAME,
        num_replicas=args.ingress_replicas,
        max_ongoing_requests=4096,
        ray_actor_options={"num_cpus": args.replica_num_cpus},
        graceful_shutdown_timeout_s=20,
    ).bind(config, replica)
