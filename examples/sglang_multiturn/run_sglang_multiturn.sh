#!/usr/bin/env bash
# GRPO with a calculator as a tool, in several turns, sampled by SGLang. From any folder:
#
#   examples/sglang_multiturn/run_sglang_multiturn.sh [key=value ...] [--explain]
#
# Environment, all optional:
#   GPUS     train ranks, one for each GPU; they sample, too     (8)
#   TP       GPUS of each SGLang server                          (1)
#   PROMPTS  prompts of a step                                   (64)
#   STEPS    steps                                               (100)
#   MODEL    model folder or hub id                              (Qwen/Qwen2.5-1.5B-Instruct)
#   DATA     folder with train.jsonl and test.jsonl              (openai/gsm8k from the hub)
#   OUT      parent folder of the run's folder                   (runs/)
#   SGLANG   a Python that has SGLang and meshrl, such as .venv-sglang/bin/python of scripts/install.sh --sglang
#            (the Python that runs meshrl)
#   CPU=1    everything on the CPU, for a small model: two ranks, fp32
#   MESHRL   the command                                         (meshrl)
# key=value overrides any key of the config, and these variables.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
quoted() { printf "'%s'" "${1//\'/\'\'}"; } # as YAML, so that a path with a blank or a colon remains one string
overrides=()
if [[ -n ${CPU:-} ]]; then
  export MESHRL_DEVICE=cpu SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  overrides+=(
    model.dtype=float32 rollout.max_running_requests=16 rollout.sglang.mem_fraction_static=0.1
    "rollout.sglang.args=[--device, cpu, --attention-backend, torch_native, --sampling-backend, pytorch, \
--grammar-backend, none, --max-total-tokens, '32768', --sleep-on-idle]"
  )
fi
overrides+=("cluster.num_train_ranks=${GPUS:-$([[ -n ${CPU:-} ]] && echo 2 || echo 8)}" "rollout.mesh.infer_tp=${TP:-1}")
[[ -n ${PROMPTS:-} ]] && overrides+=("loop.prompts_per_step=$PROMPTS")
[[ -n ${STEPS:-} ]] && overrides+=("loop.num_steps=$STEPS")
[[ -n ${MODEL:-} ]] && overrides+=("model.path=$(quoted "$MODEL")")
[[ -n ${OUT:-} ]] && overrides+=("run.folder=$(quoted "$OUT")")
[[ -n ${SGLANG:-} ]] && overrides+=("rollout.sglang.python=$(quoted "$SGLANG")")
if [[ -n ${DATA:-} ]]; then
  overrides+=(
    "data.path=$(quoted "$DATA/train.jsonl")" data.subset=null data.split=null
    "data.eval_path=$(quoted "$DATA/test.jsonl")" data.eval_split=null
  )
fi

exec "${MESHRL:-meshrl}" train "$here/multiturn.yaml" "${overrides[@]}" "$@"
