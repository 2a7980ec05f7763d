#!/usr/bin/env bash
# All GPU checks of meshrl in one command of at most 17 minutes: the tests of tests/gpu, training, sampling, GRPO steps,
# weight sync; then a table of figures with their predictions (gpu_predict.py), and a last line of JSON. Weights are
# random: nothing is downloaded.
#
#   benchmarks/h200.sh [--smoke] [--results FOLDER] [--peak-tflops 989]
#
#   --smoke        tiny sizes on the CPU, without the GPU tests, to test that the command runs
#   --results      folder for the record h200_<date>.json (default benchmarks/results)
#   --peak-tflops  dense bf16 TFLOP/s that MFU is a share of (default: of the device's data sheet, or an H200's)
#
# PYTHON names the interpreter (default .venv/bin/python if it exists, otherwise python3). It needs torch >= 2.11,
# transformers, numpy, psutil, pydantic, pytest and pytest-timeout; meshrl itself need not be installed.
# A part that takes too long is ended. After a failed or ended part, the others still run, and the exit code is 1.
set -uo pipefail

smoke=() results=() peak=() limit_factor=1
while [ $# -gt 0 ]; do
  case "$1" in
    --smoke) smoke=(--smoke --threads 1) limit_factor=5; shift ;;
    --results) mkdir -p "$2" && results=(--results "$(cd "$2" && pwd)"); shift 2 ;;
    --peak-tflops) peak=(--peak-tflops "$2"); shift 2 ;;
    *) sed -n '2,11p' "$0" >&2; exit 2 ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}" # one machine
[ ${#smoke[@]} -eq 0 ] || export MESHRL_DEVICE=cpu
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT

# run SECONDS COMMAND...: run the command; after SECONDS terminate it, and kill it if it does not end
run() {
  local limit=$(($1 * limit_factor)) began=$SECONDS
  shift
  printf '\n== %s\n' "${*: 1:3}"
  timeout --kill-after=5 "$limit" "$@" || printf '== ended with %s\n' $?
  printf '== %s s of %s\n' $((SECONDS - began)) "$limit"
}

train=(--shapes 1.5B --rows row --checkpointing off --compile both --only steps) rollout=(--requests 256 --rounds 1)
[ ${#smoke[@]} -eq 0 ] || train=() rollout=()
run 700 "$python" -m pytest tests/gpu -m gpu -vv -p no:cacheprovider --junitxml="$parts/tests.xml"
run 90 "$python" benchmarks/gpu_train.py --results "$parts" "${train[@]}" "${smoke[@]}" "${peak[@]}"
run 130 "$python" benchmarks/gpu_rollout.py --results "$parts" "${rollout[@]}" "${smoke[@]}"
run 65 "$python" benchmarks/gpu_step.py --results "$parts" "${smoke[@]}"
"$python" benchmarks/gpu_table.py --parts "$parts" --tests "$parts/tests.xml" "${results[@]}" "${smoke[@]}"
