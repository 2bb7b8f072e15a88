"""The public names, for type checkers; ``__init__.py`` loads them on first use."""

from gradsync.testing import faults as faults
from gradsync.testing.asserts import assert_all_ranks as assert_all_ranks
from gradsync.testing.asserts import assert_same_on_all_ranks as assert_same_on_all_ranks
from gradsync.testing.asserts import gather_for_assert as gather_for_assert
from gradsync.testing.case_verdict import TEST_ERROR_EXIT_CODE as TEST_ERROR_EXIT_CODE
from gradsync.testing.cases import DistributedTestBase as DistributedTestBase
from gradsync.testing.cases import MultiProcessTestCase as MultiProcessTestCase
from gradsync.testing.clock import VirtualClock as VirtualClock
from gradsync.testing.conformance import StoreTraits as StoreTraits
from gradsync.testing.conformance import check_backend as check_backend
from gradsync.testing.conformance import check_group as check_group
from gradsync.testing.conformance import check_store as check_store
from gradsync.testing.conformance import store_checks as store_checks
from gradsync.testing.continuous import MultiProcContinuousTest as MultiProcContinuousTest
from gradsync.testing.equality import TestCase as TestCase
from gradsync.testing.reference import SaveForwardInputsModel as SaveForwardInputsModel
from gradsync.testing.reference import SaveForwardInputsModule as SaveForwardInputsModule
from gradsync.testing.reference import captured_output as captured_output
from gradsync.testing.reference import cleanup_temp_dir as cleanup_temp_dir
from gradsync.testing.reference import create_tcp_store as create_tcp_store
from gradsync.testing.reference import find_free_port as find_free_port
from gradsync.testing.reference import init_multigpu_helper as init_multigpu_helper
from gradsync.testing.reference import initialize_temp_directories as initialize_temp_directories
from gradsync.testing.reference import retry_on_connect_failures as retry_on_connect_failures
from gradsync.testing.reference import run_subtests as run_subtests
from gradsync.testing.reference import set_rng_seed as set_rng_seed
from gradsync.testing.reference import simple_sparse_reduce_tests as simple_sparse_reduce_tests
from gradsync.testing.requires import ACCELERATOR_DIST_BACKENDS as ACCELERATOR_DIST_BACKENDS
from gradsync.testing.requires import require_world_size as require_world_size
from gradsync.testing.requires import (
    requires_accelerator_dist_backend as requires_accelerator_dist_backend,
)
from gradsync.testing.requires import requires_gloo as requires_gloo
from gradsync.testing.requires import requires_mpi as requires_mpi
from gradsync.testing.requires import requires_nccl as requires_nccl
from gradsync.testing.requires import requires_nccl_version as requires_nccl_version
from gradsync.testing.requires import requires_ucc as requires_ucc
from gradsync.testing.requires import requires_world_size as requires_world_size
from gradsync.testing.requires import requires_xccl as requires_xccl
from gradsync.testing.requires import skip_but_pass_in_sandcastle as skip_but_pass_in_sandcastle
from gradsync.testing.requires import (
    skip_but_pass_in_sandcastle_if as skip_but_pass_in_sandcastle_if,
)
from gradsync.testing.requires import (
    skip_if_rocm_ver_lessthan_multiprocess as skip_if_rocm_ver_lessthan_multiprocess,
)
from gradsync.testing.requires import skip_if_win32 as skip_if_win32
from gradsync.testing.requires import sm_is_or_higher_than as sm_is_or_higher_than
from gradsync.testing.sequencer import Sequencer as Sequencer
from gradsync.testing.skips import DEFAULT_WORLD_SIZE as DEFAULT_WORLD_SIZE
from gradsync.testing.skips import TEST_SKIPS as TEST_SKIPS
from gradsync.testing.skips import TIMEOUT_DEFAULT as TIMEOUT_DEFAULT
from gradsync.testing.skips import TIMEOUT_OVERRIDE as TIMEOUT_OVERRIDE
from gradsync.testing.skips import DistTestCases as DistTestCases
from gradsync.testing.skips import TestSkip as TestSkip
from gradsync.testing.skips import at_least_x_gpu as at_least_x_gpu
from gradsync.testing.skips import get_required_world_size as get_required_world_size
from gradsync.testing.skips import get_timeout as get_timeout
from gradsync.testing.skips import import_transformers_or_skip as import_transformers_or_skip
from gradsync.testing.skips import nccl_skip_if_lt_x_gpu as nccl_skip_if_lt_x_gpu
from gradsync.testing.skips import (
    require_n_gpus_for_nccl_backend as require_n_gpus_for_nccl_backend,
)
from gradsync.testing.skips import skip_if_lt_x_gpu as skip_if_lt_x_gpu
from gradsync.testing.skips import skip_if_no_gpu as skip_if_no_gpu
from gradsync.testing.skips import skip_if_odd_worldsize as skip_if_odd_worldsize
from gradsync.testing.skips import skip_if_rocm_arch_multiprocess as skip_if_rocm_arch_multiprocess
from gradsync.testing.skips import skip_if_rocm_multiprocess as skip_if_rocm_multiprocess
from gradsync.testing.skips import skip_if_small_worldsize as skip_if_small_worldsize
from gradsync.testing.skips import with_dist_debug_levels as with_dist_debug_levels
from gradsync.testing.skips import with_nccl_blocking_wait as with_nccl_blocking_wait
from gradsync.testing.threaded import MultiThreadedTestCase as MultiThreadedTestCase
from gradsync.testing.threaded import spawn_threads_and_init_comms as spawn_threads_and_init_comms
from gradsync.testing.threads import run_threads as run_threads
