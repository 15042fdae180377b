#!/usr/bin/env bash
# Checks that a checkout runs where it is not installed: on a GPU machine without a network, whose Python 3.12 finds the
# packages on PYTHONPATH, beside those it has itself.
#
#     .ci/bare_layout.sh PYTHON3.12 [FOLDER]
#
# FOLDER holds unpacked wheels. Without it, pip fills a temporary one with the default dependencies, but without torch
# and accelerate, which needs torch. Then every module is imported; those that lack torch or vLLM are only listed.
set -euo pipefail
test $# -ge 1 || { echo "usage: $0 PYTHON3.12 [FOLDER]" >&2; exit 2; }
root=$(realpath "$(dirname "$0")/..") python=$1 work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ $# -ge 2 ]; then
    folder=$(realpath -e "$2")
else
    folder=$work/packages
    "$python" -c '
import re, sys, tomllib
needed = tomllib.load(sys.stdin.buffer)["project"]["dependencies"]
print(*(line for line in needed if re.match(r"[\w-]+", line)[0] not in ("torch", "accelerate")), sep="\n")
' <"$root/pyproject.toml" >"$work/needed.txt"
    "$python" -m pip install -q --disable-pip-version-check --target "$folder" \
        -c "$root/constraints.txt" -r "$work/needed.txt"
fi

# A copy of the packages alone: a checkout can also hold the metadata of an installation.
mkdir "$work/checkout"
(cd "$root" && cp -r router serve_app cluster benchmarks "$work/checkout" && rm -rf "$work/checkout/router/build")
offline=()
if unshare -rn true 2>/dev/null; then offline=(unshare -rn); else echo "unshare is not permitted: the network stays"; fi

cat >"$work/check.py" <<'EOF'
import importlib.metadata, sys
from pathlib import Path

if any(importlib.metadata.distributions(name="warmpath-serve")):
    sys.exit(f"warmpath is installed for {sys.executable}: give another Python")
OPTIONAL = ("torch", "vllm", "pyarrow")  # pyarrow: of the extra ray-llm, which needs vLLM, too
root, imported, left_out, failed = Path(sys.argv[1]), 0, [], []
for file in sorted(root.rglob("*.py")):
    module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    try:
        importlib.import_module(module)
        imported += 1
    except BaseException as error:  # also SystemExit, which would end this check
        first = error
        while first.__cause__ is not None:  # Ray LLM wraps the error of a missing torch
            first = first.__cause__
        missing = (first.name or "").split(".")[0] if isinstance(first, ModuleNotFoundError) else ""
        (left_out if missing in OPTIONAL else failed).append(f"{module}: {type(error).__name__}: {error}")
print(*(f"left out: {line}" for line in left_out), *(f"FAILED: {line}" for line in failed), sep="\n")
print(f"{imported} modules imported, {len(left_out)} left out, {len(failed)} failed")
sys.exit(bool(failed))
EOF
"${offline[@]}" env -i HOME="$work" PATH="$PATH" HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH="$work/checkout:$folder" \
    sh -c 'ip link set lo up 2>/dev/null; exec "$@"' - "$python" "$work/check.py" "$work/checkout"
