#!/usr/bin/env bash
set -xeuo pipefail
# project=unused
export PYTHONPATH=$PYTHONPATH:a
export PYTHONPATH=$PYTHONPATH:b
project='A B'
export N_GPUS=${N_GPUS:-$((2 * (1 + 1)))}
engine="vllm" # or sglang
if [ "$engine" = sglang ]; then
    engine=sglang
    chat=True
fi
home=${HOME}/data
files="['$home/a.parquet', '${home}/b.parquet']"
length=$(((1024 * 2) + 1))
NAME=${NAME:-"${project}/$(date +%s)"}
DATA=(
    data.train_files="$files"
    data.max_prompt_length=${length}
)
ray job submit --runtime-env=env.yaml -- python3 -m verl.trainer.main_ppo --config-name='ppo_trainer' \
    "${DATA[@]}" \
    algorithm.adv_estimator=grpo \
    # data.shuffle=False \
    data.return_raw_chat=$chat \
    trainer.logger='["console","wandb"]' \
    actor_rollout_ref.rollout.name=$engine \
    +actor_rollout_ref.actor.optim.lr=1e-6 \
    ++trainer.experiment_name="$NAME" \
    actor_rollout_ref.ref.strategy='${actor_rollout_ref.actor.strategy}' \
    actor_rollout_ref.actor.strategy=fsdp2 \
    trainer.n_gpus_per_node=$N_GPUS trainer.default_local_dir=$CKPTS/x $@ 2>&1 | tee log.txt
