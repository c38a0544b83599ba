"""A run that is cut off and goes on is the run without the cut, bit for bit."""

import pytest
from support.resuming import interrupted, same_run
from support.runs import run_threads, tiny

# Four rounds an epoch: cuts fall inside an epoch and at its end.
ROUNDS = {"run__checkpoint_rounds": 1}


def resumed(config, folder="auto"):
    run = config.run.model_copy(update={"resume": str(folder)})
    return config.model_copy(update={"run": run})


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 7])
def test_a_resumed_run_is_the_run_without_the_cut(tmp_path, cut):
    whole = run_threads(tiny(tmp_path / "whole", algorithm__local_steps=3))
    config = tiny(tmp_path / "cut", algorithm__local_steps=3, **ROUNDS)
    folder = interrupted(config, cut + 1)
    summary = run_threads(resumed(config))
    assert summary["folder"] == str(folder)
    assert summary["resumed_after_rounds"] == [cut]
    assert same_run(whole, summary)
