"""The kit for testing distributed code: ranks in milliseconds, faults as data, reports per rank.

Importing it imports neither torch nor pytest: names are loaded when they are first used.
"""

from __future__ import annotations

from gradsync.base.lazy import lazy_names

_HOMES = {
    "asserts": ("assert_all_ranks", "assert_same_on_all_ranks", "gather_for_assert"),
    "case_verdict": ("TEST_ERROR_EXIT_CODE",),
    "cases": ("DistributedTestBase", "MultiProcessTestCase"),
    "clock": ("VirtualClock",),
    "conformance": ("StoreTraits", "check_backend", "check_group", "check_store", "store_checks"),
    "continuous": ("MultiProcContinuousTest",),
    "equality": ("TestCase",),
    "reference": (
        "SaveForwardInputsModel",
        "SaveForwardInputsModule",
        "captured_output",
        "cleanup_temp_dir",
        "create_tcp_store",
        "find_free_port",
        "init_multigpu_helper",
        "initialize_temp_directories",
        "retry_on_connect_failures",
        "run_subtests",
        "set_rng_seed",
        "simple_sparse_reduce_tests",
    ),
    "requires": (
        "ACCELERATOR_DIST_BACKENDS",
        "require_world_size",
        "requires_accelerator_dist_backend",
        "requires_gloo",
        "requires_mpi",
        "requires_nccl",
        "requires_nccl_version",
        "requires_ucc",
        "requires_world_size",
        "requires_xccl",
        "skip_but_pass_in_sandcastle",
        "skip_but_pass_in_sandcastle_if",
        "skip_if_rocm_ver_lessthan_multiprocess",
        "skip_if_win32",
        "sm_is_or_higher_than",
    ),
    "sequencer": ("Sequencer",),
    "skips": (
        "DEFAULT_WORLD_SIZE",
        "TEST_SKIPS",
        "TIMEOUT_DEFAULT",
        "TIMEOUT_OVERRIDE",
        "DistTestCases",
        "TestSkip",
        "at_least_x_gpu",
        "get_required_world_size",
        "get_timeout",
        "import_transformers_or_skip",
        "nccl_skip_if_lt_x_gpu",
        "require_n_gpus_for_nccl_backend",
        "skip_if_lt_x_gpu",
        "skip_if_no_gpu",
        "skip_if_odd_worldsize",
        "skip_if_rocm_arch_multiprocess",
        "skip_if_rocm_multiprocess",
        "skip_if_small_worldsize",
        "with_dist_debug_levels",
        "with_nccl_blocking_wait",
    ),
    "threaded": ("MultiThreadedTestCase", "spawn_threads_and_init_comms"),
    "threads": ("run_threads",),
}
"""Where each public name lives, by module of this package."""

__all__, __getattr__ = lazy_names(__name__, _HOMES, ("faults",))


def __dir__() -> list[str]:
    return sorted(__all__)
