# warmpath's image, for KubeRay (cluster/chart) and for `ray start` anywhere. Torch's wheel includes CUDA for GPUs.
#   docker build -t warmpath:0.2.0 .
#   docker build -t warmpath:0.2.0-vllm --build-arg EXTRAS='[vllm]' --build-arg CONSTRAINTS=constraints-vllm.txt .   # `engine: vllm`, on GPUs
#   docker run --rm --network host --shm-size 2g warmpath:0.2.0   # for this machine alone
#   docker run --rm -p 8000:8000 --shm-size 2g -v $PWD/tenants.yaml:/tenants.yaml:ro warmpath:0.2.0 warmpath serve --host 0.0.0.0 --config /tenants.yaml
# NOTICE lists what the image holds and its licences.

# To pin the base byte by byte, append your registry's digest: --build-arg BASE=python:3.11.13-slim-bookworm@sha256:...
ARG BASE=python:3.11.13-slim-bookworm
# hadolint ignore=DL3006
FROM $BASE

# gcc: on GPUs vLLM uses Triton, which compiles its launchers at run time. wget: KubeRay's probes call it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home warmpath

WORKDIR /opt/warmpath
COPY pyproject.toml constraints.txt constraints-vllm.txt README.md LICENSE NOTICE ./
COPY router router
COPY serve_app serve_app
# constraints.txt is for the install without vLLM, constraints-vllm.txt for the one with it.
ARG EXTRAS=""
ARG CONSTRAINTS=constraints.txt
RUN pip install --no-cache-dir --disable-pip-version-check -c "$CONSTRAINTS" ".$EXTRAS"

USER 10001
WORKDIR /home/warmpath
# hadolint ignore=DL3064  # TOKENIZERS is no token
ENV HOME=/home/warmpath \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    TOKENIZERS_PARALLELISM=false
# Fetch and build these models here, so that containers without their own checkpoint need no network.
RUN python -c "from serve_app.checkpoints.sources import resolve_model as r; r('smollm2'); r('demo')"
EXPOSE 8000
# On Kubernetes KubeRay's own probes apply.
HEALTHCHECK --interval=15s --timeout=5s --start-period=300s CMD ["wget", "-q", "-O", "/dev/null", "http://127.0.0.1:8000/health"]
# Loopback: without tenants' keys nothing listens to the network unless the command says so.
CMD ["warmpath", "serve"]
