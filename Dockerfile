# warmpath's image, for KubeRay (cluster/chart) and for `ray start` anywhere. Torch's wheel includes CUDA for GPUs.
#   docker build -t warmpath:0.2.0 .
#   docker build -t warmpath:0.2.0-vllm --build-arg EXTRAS='[vllm]' --build-arg CONSTRAINTS=/dev/null .   # `engine: vllm`, on GPUs
#   docker run --rm -p 8000:8000 --shm-size 2g warmpath:0.2.0 warmpath serve --host 0.0.0.0
FROM python:3.11.13-slim-bookworm

# gcc: on GPUs vLLM uses Triton, which compiles its launchers at run time. wget: KubeRay's probes call it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home warmpath

WORKDIR /opt/warmpath
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY router router
COPY serve_app serve_app
# constraints.txt is for the install without vLLM, which has its own pins.
ARG EXTRAS=""
ARG CONSTRAINTS=constraints.txt
RUN pip install --no-cache-dir --disable-pip-version-check -c "$CONSTRAINTS" ".$EXTRAS"

USER 10001
WORKDIR /home/warmpath
ENV HOME=/home/warmpath \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    TOKENIZERS_PARALLELISM=false
# Fetch and build these models here, so that containers without their own checkpoint need no network.
RUN python -c "from serve_app.checkpoints.sources.resolve import resolve_model as r; r('smollm2'); r('demo')"
EXPOSE 8000
CMD ["warmpath", "serve", "--host", "0.0.0.0"]
