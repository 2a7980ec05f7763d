"""All faults that the tests must catch. A file of faults is named after the packages whose code its faults change."""

import agent_data_reward_faults
import algo_faults
import cluster_process_faults
import config_core_faults
import loops_faults
import mesh_faults
import rollout_faults
import run_monitor_tools_faults
import sync_faults
import train_model_parallel_faults

FAULTS = [
    *algo_faults.FAULTS,
    *agent_data_reward_faults.FAULTS,
    *train_model_parallel_faults.FAULTS,
    *mesh_faults.FAULTS,
    *rollout_faults.FAULTS,
    *sync_faults.FAULTS,
    *loops_faults.FAULTS,
    *run_monitor_tools_faults.FAULTS,
    *cluster_process_faults.FAULTS,
    *config_core_faults.FAULTS,
]
