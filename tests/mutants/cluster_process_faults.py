"""Faults of ranks and their processes: devices, restarts, forks, and which processes may connect."""

from __future__ import annotations

from fault import Fault

_OPEN_PORTS = "tests/e2e/test_open_ports.py::"
_IN_FLIGHT = "tests/unit/cluster/test_in_flight.py::"
_LAUNCHED_BY_TORCHRUN = "tests/unit/cluster/test_launched_by_torchrun.py::"
_ROLES = "tests/unit/cluster/test_roles.py::"
_LOST_TRAINERS = "tests/unit/cluster/test_lost_trainers.py::"
_REMOTE_EXECUTOR = "tests/unit/cluster/test_remote_executor.py::"
_FORK_SERVER = "tests/unit/process/test_fork_server.py::"
_RUN_TOKEN = "tests/unit/process/test_run_token.py::"

FAULTS = [
    Fault(
        "a long answer ends the run although its sampler computes tokens",
        "meshrl/cluster/processes.py::ProcessExecutor._silent",
        "phase in _WITH_PROGRESS => False",
        "tests/unit/cluster/test_process_executor.py::test_the_deadline_of_an_answer_begins_again_with_each_token",
    ),
    Fault(
        "a rank whose micro-batches end misses its deadline",
        "meshrl/cluster/processes.py::ProcessExecutor._silent",
        'phase in _WITH_PROGRESS => phase in ("rollout", "eval")',
        "tests/unit/cluster/test_process_executor.py::test_the_loss_of_a_rank_that_only_samples_ends_no_other_rank[sleep]",
    ),
    Fault(
        "a sampler that stands still reports progress",
        "meshrl/cluster/worker.py::_Server.report_progress",
        "(tokens := self.worker.computed_tokens) > self.reported_tokens => (tokens := self.worker.computed_tokens) > 0",
        "tests/unit/cluster/test_process_executor.py::test_the_deadline_of_an_answer_begins_again_with_each_token",
    ),
    Fault(
        "under Ray a rank sees the device of one rank",
        "meshrl/cluster/ray.py::RayExecutor._devices_in",
        "count * self.specs[0].num_local_ranks => count",
        "tests/unit/cluster/test_ray_devices.py::test_each_rank_sees_the_devices_of_all_ranks_of_its_machine",
    ),
    Fault(
        "changes are searched although all weights stay in shared memory",
        "meshrl/plan/decisions.py::fastest_sync",
        'return "full" => return rollout.sync_mode',
        "tests/unit/cluster/test_sync_mode.py::"
        "test_changes_are_not_searched_where_all_weights_go_through_shared_memory[1-auto-False-full]",
    ),
    Fault(
        "a rank that only trains builds a sampler",
        "meshrl/cluster/actors.py::RankWorker.start",
        "spec.samples and spec.rollout is not None => spec.rollout is not None",
        _LOST_TRAINERS + "test_a_sampler_that_dies_while_it_is_idle_is_replaced_at_once",
    ),
    Fault(
        "several ranks get one device",
        "meshrl/cluster/launch.py::check_devices",
        "len(users) <= devices => devices > 0",
        "tests/unit/cluster/test_local_devices.py::test_several_ranks_on_one_device_are_refused",
    ),
    Fault(
        "a replaced sampler waits for a sync that waits for its answers",
        "meshrl/cluster/sampler_group.py::Replacement._replace",
        "self.needs_sync.set() => pass",
        "tests/faults/test_schedules.py::test_the_run_continues_and_trains_each_prompt_once",
    ),
    Fault(
        "a new sampler gets new weights under the old version",
        "meshrl/cluster/train_group.py::TrainGroup.optim_step",
        "self.is_synced = False => pass",
        _LOST_TRAINERS + "test_a_new_sampler_waits_for_the_sync_while_the_trainer_is_between_two_versions",
    ),
    Fault(
        "an optimizer step of any role makes a sync necessary",
        "meshrl/cluster/train_group.py::TrainGroup.optim_step",
        "role == POLICY.name => True",
        _ROLES + "test_training_another_role_neither_changes_the_policy_nor_compares_with_the_sampler",
    ),
    Fault(
        "the logprobs of every role are compared with the sampler's",
        "meshrl/cluster/actors.py::RankWorker.forward_backward",
        "role == POLICY.name => True",
        _ROLES + "test_training_another_role_neither_changes_the_policy_nor_compares_with_the_sampler",
    ),
    Fault(
        "an exception in a sampler is announced as a replacement",
        "meshrl/cluster/sampler_group.py::Replacement.is_possible",
        'failure.kind != "raised" => True',
        _LOST_TRAINERS + "test_an_exception_in_a_sampler_ends_the_run_and_nothing_is_replaced",
    ),
    Fault(
        "samplers are replaced without a limit",
        "meshrl/cluster/sampler_group.py::Replacement.restart",
        "self.num_restarts >= self.max_restarts => self.num_restarts > self.max_restarts + 9",
        _LOST_TRAINERS + "test_a_sampler_that_dies_while_it_is_idle_is_replaced_at_once",
    ),
    Fault(
        "in_flight=restart continues a turn from tokens of old weights",
        "meshrl/cluster/sampler_group.py::RolloutGroup._generate",
        'self.in_flight == "restart" => self.in_flight == "never"',
        _IN_FLIGHT + "test_running_turns_are_kept_aborted_or_restarted_at_a_sync[restart]",
    ),
    Fault(
        "an inline run can be reached from other machines",
        "meshrl/cluster/inline.py::InlineExecutor.start",
        "os.environ.setdefault(name, interface_of(LOOPBACK) or 'lo') => is_set = True",
        _OPEN_PORTS + "test_what_listens_is_what_the_page_about_security_lists[inline]",
    ),
    Fault(
        "samplers continue requests from before a restart of the train ranks",
        "meshrl/cluster/launch.py::Groups.restart_trainers",
        "await self.rollouts.invalidate() => pass",
        _LOST_TRAINERS + "test_a_train_rank_that_dies_while_it_is_idle_ends_the_wait_and_is_replaced",
    ),
    Fault(
        "samplers refuse a lower version after a restart of the train ranks",
        "meshrl/cluster/launch.py::Groups.restart_trainers",
        "await self.rollouts.reconcile(layout) => pass",
        _LOST_TRAINERS + "test_after_a_sync_that_a_lost_rank_interrupted_the_next_full_sync_makes_samplers_usable",
    ),
    Fault(
        "samplers are restarted together with the train ranks",
        "meshrl/cluster/processes.py::ProcessExecutor._handle",
        "self._partners(culprit.rank) => [*self._ranks.values()]",
        _LOST_TRAINERS + "test_a_train_rank_that_dies_while_it_is_idle_ends_the_wait_and_is_replaced",
    ),
    Fault(
        "every replica sends its shard",
        "meshrl/cluster/rank_sync.py::RankSync.__init__",
        "self._colocated or not self._replica => True",
        "tests/dist/test_shards_out.py::test_every_sharding_strategy_sends_each_shard_once[NO_SHARD-sockets]",
    ),
    Fault(
        "the base of an adapter is sent each time",
        "meshrl/cluster/rank_sync.py::RankSync.__init__",
        "trainer.frozen() if self._takes_adapters else frozenset() => frozenset[str]()",
        "tests/e2e/test_lora_run.py::test_only_adapters_are_sent_and_the_sampler_equals_the_trainer[one process]",
    ),
    Fault(
        "the secret of the environment is sent over connections without encryption",
        "meshrl/cluster/remote.py::RemoteExecutor._spawn",
        "name.startswith(PASSED) and name not in _NOT_PASSED => name.startswith(PASSED)",
        _REMOTE_EXECUTOR + "test_a_rank_has_its_environment_and_a_sampler_that_died_is_replaced_by_its_node_agent",
    ),
    Fault(
        "the token stays in run.folder while the run trains",
        "meshrl/cluster/remote.py::TorchrunExecutor.await_agents",
        "self._run_token.remove() => pass",
        _OPEN_PORTS + "test_another_user_can_read_the_store_of_torchrun_but_can_not_run_code_in_the_run",
    ),
    Fault(
        "the version does not rise",
        "meshrl/cluster/weight_sync.py::sync_weights",
        "trainer.version, trainer.is_synced = version, True => trainer.is_synced = True",
        _IN_FLIGHT + "test_running_turns_are_kept_aborted_or_restarted_at_a_sync[keep]",
    ),
    Fault(
        "every process that connects is accepted as a rank",
        "meshrl/process/connect.py::Listener._authenticate",
        'not hmac.compare_digest(proof, _prove(self._token, b"rank", nonce + theirs)) => False',
        "tests/unit/process/test_connect.py::test_a_pickle_from_a_process_without_the_token_is_not_read",
    ),
    Fault(
        "all ranks draw the same random numbers",
        "meshrl/cluster/actors.py::RankWorker.start",
        "seed_generators(spec.seed, spec.rank) => seed_generators(spec.seed, 0)",
        _FORK_SERVER + "test_forked_ranks_draw_different_random_numbers",
    ),
    Fault(
        "a forked rank does not get its environment variables",
        "meshrl/process/fork_server.py::_RequestServer.run_child",
        "os.environ.update(environment) => pass",
        _FORK_SERVER + "test_a_variable_that_an_import_sets_reaches_the_children_of_the_same_fork_server",
    ),
    Fault(
        "a forked rank has the working folder of the run that started its fork server",
        "meshrl/process/fork_server.py::_RequestServer.run_child",
        "os.chdir(folder) => pass",
        _FORK_SERVER + "test_children_of_one_fork_server_have_their_own_working_folder_and_pythonpath",
    ),
    Fault(
        "a forked rank finds modules of the run that started its fork server",
        "meshrl/process/fork_server.py::_search_in",
        "path not in former or path.startswith((sys.prefix, sys.base_prefix)) => True",
        _FORK_SERVER + "test_children_of_one_fork_server_have_their_own_working_folder_and_pythonpath",
    ),
    Fault(
        "a fork server with several threads forks",
        "meshrl/process/fork_server.py::_can_fork",
        "len([name for name in threads if name not in _HARMLESS_THREADS]) == 1 => True",
        _FORK_SERVER + "test_a_process_with_other_threads_or_an_open_device_must_not_fork[thread]",
    ),
    Fault(
        "a fork server that has initialised a device forks",
        "meshrl/process/fork_server.py::_can_fork",
        "not _open_devices() => True",
        _FORK_SERVER + "test_a_process_with_other_threads_or_an_open_device_must_not_fork[device]",
    ),
    Fault(
        "a server's workers outlive a parent that is killed",
        "meshrl/process/guard.py::_end_with_starter",
        "kill_descendants(os.getpid()) => pass",
        "tests/unit/rollout/test_rollout_server.py::test_no_process_or_folder_outlives_a_killed_parent[SIGKILL]",
    ),
    Fault(
        "the run's token is in torchrun's store",
        "meshrl/process/run_token.py::RunToken.announcement",
        "_proof(self.key, name, *address, self._file_id)"
        ' => f"{self.key.hex()} {_proof(self.key, name, *address, self._file_id)}"',
        _RUN_TOKEN + "test_a_follower_gets_address_and_key_by_a_file_that_only_this_user_can_read",
    ),
    Fault(
        "a follower connects to an address that another process has written",
        "meshrl/process/run_token.py::read_announcement",
        "not hmac.compare_digest(proof, _proof(key, name, host, port, file_id))"
        " => hmac.compare_digest(proof[:0], _proof(key, name, host, port, file_id))",
        _LAUNCHED_BY_TORCHRUN + "test_a_follower_does_not_connect_to_an_address_that_another_process_has_written",
    ),
    Fault(
        "a token file of another user is accepted",
        "meshrl/process/run_token.py::_read",
        "status.st_uid != os.geteuid() => status.st_uid < 0",
        _RUN_TOKEN + "test_a_file_of_another_user_is_refused_although_its_proof_is_right",
    ),
    Fault(
        "a forked rank outlives its fork server",
        "meshrl/process/spawn.py::inherited_channel",
        "end_with_parent(parent) => pass",
        _FORK_SERVER + "test_a_killed_fork_server_ends_its_ranks_and_a_restart_starts_another",
    ),
    Fault(
        "ranks are forked by a fork server with another environment",
        "meshrl/process/spawn.py::_server_with",
        "_server.inherited != inherited => False",
        _FORK_SERVER + "test_a_variable_that_an_import_sets_reaches_the_children_of_the_same_fork_server",
    ),
]
