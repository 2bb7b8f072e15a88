"""Functions that have torch's names take torch's arguments, in torch's order."""

import inspect

import torch.distributed as torch_dist

import gradsync

MAY_LACK = {"init_process_group": ["_ranks"]}


def test_arguments_are_torchs():
    compared = 0
    for name in gradsync.__all__:
        ours, theirs = getattr(gradsync, name), getattr(torch_dist, name, None)
        if not inspect.isfunction(ours) or not inspect.isfunction(theirs):
            continue
        expected = [
            argument
            for argument in inspect.signature(theirs).parameters
            if argument not in MAY_LACK.get(name, ())
        ]
        assert list(inspect.signature(ours).parameters) == expected, name
        compared += 1
    assert compared > 40
