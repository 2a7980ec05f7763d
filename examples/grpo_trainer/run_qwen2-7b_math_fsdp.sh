#!/usr/bin/env bash
# GRPO with Qwen2-7B-Instruct on GSM8K, FSDP2 over the GPUs of one node or of several. From any folder:
#
#   examples/grpo_trainer/run_qwen2-7b_math_fsdp.sh [key=value ...] [--explain]
#
# Environment, all optional:
#   GPUS_PER_NODE  train ranks, one for each GPU            (8)
#   NNODES         machines; more than one: on a Ray cluster (1)
#   MODEL          model folder or hub id                   (Qwen/Qwen2-7B-Instruct)
#   DATA           folder with train.jsonl and test.jsonl   (openai/gsm8k from the hub)
#   OUT            parent folder of the run's folder        (runs/)
#   MESHRL         the command                              (meshrl)
# key=value overrides any key of the config, and these variables.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
nodes=${NNODES:-1}
overrides=("cluster.num_train_ranks=$((${GPUS_PER_NODE:-8} * nodes))")
[[ $nodes -gt 1 ]] && overrides+=("cluster.executor=ray" "cluster.nodes=$nodes")
# Quoted as YAML, so that a path with a blank or a colon remains one string. null unsets the keys of the hub's dataset.
quoted() { printf "'%s'" "${1//\'/\'\'}"; }
[[ -n ${MODEL:-} ]] && overrides+=("model.path=$(quoted "$MODEL")")
[[ -n ${OUT:-} ]] && overrides+=("run.folder=$(quoted "$OUT")")
if [[ -n ${DATA:-} ]]; then
  overrides+=(
    "data.path=$(quoted "$DATA/train.jsonl")" data.subset=null data.split=null
    "data.eval_path=$(quoted "$DATA/test.jsonl")" data.eval_split=null
  )
fi

exec "${MESHRL:-meshrl}" train "$here/config/qwen2-7b_gsm8k_fsdp.yaml" "${overrides[@]}" "$@"
