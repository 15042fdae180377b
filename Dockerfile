# warmpath's image, for KubeRay (cluster/chart) and for `ray start` anywhere. On GPUs torch's wheel brings CUDA.
#   docker build -t warmpath:0.2.0 .
#   docker build -t warmpath:0.2.0-vllm --build-arg EXTRAS='[vllm]' --build-arg CONSTRAINTS=/dev/null .   # `engine: vllm`, on GPUs
#   docker run --rm -p 8000:8000 --shm-size 2g warmpath:0.2.0 warmpath serve --host 0.0.0.0
FROM python:3.11.13-slim-bookworm

# gcc: Triton, which vLLM brings on GPUs, compiles its launchers where it runs. wget: KubeRay's probes call it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home warmpath

WORKDIR /opt/warmpath
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY router router
COPY serve_app serve_app
# constraints.txt is of the install without vLLM, which has pins of its own.
ARG EXTRAS=""
ARG CONSTRAINTS=constraints.txt
RUN pip install --no-cache-dir --disable-pip-version-check -c "$CONSTRAINTS" ".$EXTRAS"

USER 10001
WORKDIR /home/warmpath
ENV HOME=/home/warmpath \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    TOKENIZERS_PARALLELISM=false
# Fetched and built once, here: containers that name no checkpoint of their own need no network.
RUN python -c "from serve_app.checkpoints.sources.resolve import resolve_model as r; r('smollm2'); r('demo')"
EXPOSE 8000
CMD ["warmpath", "serve", "--host", "0.0.0.0"]
