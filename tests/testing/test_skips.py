"""Skip codes, decorators and predicates, and that they are torch's."""

import os
import subprocess
import sys
import unittest
from unittest import mock

import pytest
import torch_kit

import gradsync.testing as kit
from gradsync.testing import skips


def code_of(function):
    """Return the exit code with which a decorated function leaves."""
    with pytest.raises(SystemExit) as caught:
        function()
    return caught.value.code


@pytest.fixture
def environ():
    with mock.patch.dict(os.environ):
        yield os.environ


def never():
    raise AssertionError("it was not to run")


def test_codes_are_torchs():
    ours = {key: skip.exit_code for key, skip in kit.TEST_SKIPS.items()}
    theirs = {key: skip.exit_code for key, skip in torch_kit.load().TEST_SKIPS.items()}
    assert ours == theirs


def test_tables_and_limits_are_torchs():
    assert kit.DistTestCases.skip_collective == torch_kit.load().DistTestCases.skip_collective
    theirs = torch_kit.load().DistTestCases.backend_feature
    assert {k: kit.DistTestCases.backend_feature[k] for k in theirs} == theirs
    assert kit.DEFAULT_WORLD_SIZE == torch_kit.load().DEFAULT_WORLD_SIZE
    assert kit.TIMEOUT_DEFAULT == torch_kit.load().TIMEOUT_DEFAULT
    assert torch_kit.load().ACCELERATOR_DIST_BACKENDS == kit.ACCELERATOR_DIST_BACKENDS
    for name in ("a.b.test_ddp_uneven_inputs", "a.b.test_other"):
        assert kit.get_timeout(name) == torch_kit.load().get_timeout(name)


def test_default_limit_comes_from_the_environment():
    code = "import gradsync.testing; print(gradsync.testing.get_timeout('x.y'))"
    env = {**os.environ, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "7.0"


def test_test_skip_has_the_fields_of_the_contract():
    skip = kit.TestSkip(86, "why")
    assert (skip.exit_code, skip.message) == (86, "why")
    assert tuple(skip) == (86, "why")


def test_torchs_own_decorators_work_with_ours():
    decorated = torch_kit.load().skip_if_lt_x_gpu(4)(lambda case: never())
    assert code_of(lambda: decorated(unittest.TestCase())) == 81
    assert skips.skip_reason_of(81) == "needs at least 4 GPUs"


@pytest.mark.parametrize(("x", "code"), [(1, 75), (2, 77), (5, 82), (8, 85), (64, 85)])
def test_skip_if_lt_x_gpu(x, code):
    assert code_of(kit.skip_if_lt_x_gpu(x)(never)) == code


def test_skip_if_lt_x_gpu_allows_cpu_and_asks_the_test():
    assert kit.skip_if_lt_x_gpu(4, allow_cpu=True)(lambda: "ran")() == "ran"

    class Case:
        def _handle_test_skip(self, message):
            return message

        @kit.skip_if_lt_x_gpu(3)
        def test(self):
            never()

        @kit.require_n_gpus_for_nccl_backend(3, "nccl")
        def test_by_code(self):
            never()

    assert Case().test() == "needs at least 3 GPUs"
    assert code_of(Case().test_by_code) == 80


def test_with_enough_devices_everything_runs():
    with mock.patch.object(skips, "device_counts", return_value={"cuda": 4}):
        assert kit.skip_if_lt_x_gpu(4)(lambda: "ran")() == "ran"
        assert kit.skip_if_no_gpu(lambda: "ran")() == "ran"
        assert code_of(kit.skip_if_lt_x_gpu(5, allow_cpu=True)(never)) == 82
        assert kit.at_least_x_gpu(4)
        assert not kit.at_least_x_gpu(5)


def test_nccl_only():
    assert kit.nccl_skip_if_lt_x_gpu("gloo", 2)(lambda: "ran")() == "ran"
    assert code_of(kit.nccl_skip_if_lt_x_gpu("nccl", 2)(never)) == 77
    assert kit.require_n_gpus_for_nccl_backend(2, "gloo")(lambda: "ran")() == "ran"


def test_skip_if_no_gpu(environ):
    environ["WORLD_SIZE"] = "4"
    assert code_of(kit.skip_if_no_gpu(never)) == 74
    with mock.patch.object(skips, "device_counts", return_value={"cuda": 2}):
        assert code_of(kit.skip_if_no_gpu(never)) == 81


def test_world_sizes(environ):
    environ.update(BACKEND="gloo", WORLD_SIZE="7")
    assert code_of(kit.skip_if_small_worldsize(never)) == 73
    assert code_of(kit.skip_if_odd_worldsize(never)) == 87
    environ["WORLD_SIZE"] = "8"
    assert kit.skip_if_small_worldsize(lambda: "ran")() == "ran"
    assert kit.skip_if_odd_worldsize(lambda: "ran")() == "ran"
    environ.update(BACKEND="mpi", WORLD_SIZE="1")
    assert kit.skip_if_small_worldsize(lambda: "ran")() == "ran"


def test_required_world_size():
    assert kit.require_world_size is kit.requires_world_size

    class Case(unittest.TestCase):
        @kit.requires_world_size(3)
        def test(self):
            never()

        def test_plain(self):
            pass

    assert kit.get_required_world_size(Case("test"), 2) == 3
    assert kit.get_required_world_size(Case("test_plain"), 2) == 2
    result = unittest.TestResult()
    Case("test").run(result)
    assert result.skipped[0][1] == "needs 3 devices"


def is_skipped(decorator):
    return getattr(decorator(lambda: None), "__unittest_skip__", False)


@pytest.mark.parametrize("name", ["gloo", "nccl", "ucc", "mpi", "xccl"])
def test_requires_a_backend_of_torch(name):
    import torch.distributed as c10d

    ask = getattr(c10d, f"is_{name}_available")
    assert is_skipped(getattr(kit, f"requires_{name}")()) == (not ask())


def test_other_requirements():
    assert not is_skipped(kit.requires_nccl_version((99, 0), "no CUDA, no opinion"))
    assert is_skipped(kit.requires_accelerator_dist_backend(["no such"]))
    assert is_skipped(kit.requires_accelerator_dist_backend()) == (
        not torch_kit.load().c10d.is_nccl_available()
    )
    assert not is_skipped(kit.skip_if_win32())
    assert not is_skipped(kit.skip_if_rocm_ver_lessthan_multiprocess((5, 0)))
    assert is_skipped(kit.skip_but_pass_in_sandcastle("why"))
    assert not is_skipped(kit.skip_but_pass_in_sandcastle_if(False, "why"))
    assert not kit.sm_is_or_higher_than("cpu", 8, 0)


def test_missing_package():
    with mock.patch.dict(sys.modules, {"transformers": None}):
        assert code_of(kit.import_transformers_or_skip()(never)) == 88
    with mock.patch.dict(sys.modules, {"transformers": sys}):
        assert kit.import_transformers_or_skip()(lambda: "ran")() == "ran"


def test_rocm():
    assert kit.skip_if_rocm_multiprocess(lambda: "ran")() == "ran"
    assert kit.skip_if_rocm_arch_multiprocess(("gfx90a",))(lambda: "ran")() == "ran"
    with mock.patch.object(skips, "rocm_version", return_value="6.2"):
        assert code_of(kit.skip_if_rocm_multiprocess(never)) == 78


def test_blocking_wait_is_restored(environ):
    environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    environ.pop("TORCH_NCCL_BLOCKING_WAIT", None)
    names = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    seen = kit.with_nccl_blocking_wait(lambda: [environ.get(name) for name in names])()
    assert seen == ["1", None]
    assert [environ.get(name) for name in names] == [None, "1"]


def test_debug_levels(environ):
    import torch.distributed as c10d

    environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
    seen = []

    @kit.with_dist_debug_levels(["OFF", "INFO", "DETAIL"])
    def body():
        seen.append((environ["TORCH_DISTRIBUTED_DEBUG"], c10d.get_debug_level().name))
        return len(seen)

    assert body() == 3
    assert seen == [("OFF", "OFF"), ("INFO", "INFO"), ("DETAIL", "DETAIL")]
    assert "TORCH_DISTRIBUTED_DEBUG" not in environ
    assert c10d.get_debug_level().name == "OFF"


def test_debug_levels_keep_ranks_in_step():
    counts = []

    @kit.with_dist_debug_levels(["OFF", "INFO"])
    def body(group):
        group.hooks.add_before(lambda call: counts.append(call.op.name))

    kit.run_threads(2, lambda me: body(me.group))
    assert counts.count("barrier") == 2 + 4  # the second run adds a second hook to each rank
