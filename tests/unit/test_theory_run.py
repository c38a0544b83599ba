"""`hpcvfl theory CONFIG|RUN`: the estimate of L against exact ones, the numbers of the page against
plain loops, bad input.
"""

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import run_threads, tiny
from torch import nn
from torch.nn import functional as F

from hpcvfl.cli import main
from hpcvfl.engine import theory_of_run as numbers
from hpcvfl.engine.smoothness import JointModel, Smoothness, curvature, estimate, gradient_variance
from hpcvfl.engine.theory_page import page, rule
from hpcvfl.engine.weights import weights_of
from hpcvfl.errors import ConfigError, DataError
from hpcvfl.sections import OptimizerConfig

MIXED = {
    "optimizer__momentum": 0.9,
    "steps__policy": "virtual",
    "steps__speeds": [4, 2, 3, 1],
    "party": {
        1: {"optimizer": {"schedule": "adaptive", "lr": 0.05}},
        2: {"optimizer": {"schedule": "adaptive-sum", "proximal": 0.5}},
        3: {"optimizer": {"schedule": "cosine", "nesterov": True}},
    },
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(config, folder, rates of every round and block as they were used) of a run of unlike
    optimizers.
    """
    config, used = tiny(tmp_path_factory.mktemp("runs"), **MIXED), {}

    def note(run, result):
        used[run.rounds - 1, run.block.block] = run.block.optimizer._lr

    summary = run_threads(config, after_round=note)
    rounds = summary["rounds"]
    rate_RB = np.array([[used[r, k] for k in range(4)] for r in range(rounds)])
    return config, Path(summary["folder"]), rate_RB


def dense_hessian(loss_of, parameters, step=1e-5):
    """The Hessian by differences of gradients, one coordinate at a time, float64."""

    def gradient():
        got = torch.autograd.grad(loss_of(), parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([g.reshape(-1) for g in got]).numpy()

    columns = []
    for parameter in parameters:
        flat = parameter.detach().view(-1)
        for i in range(flat.numel()):
            before = float(flat[i])
            flat[i] = before + step
            up = gradient()
            flat[i] = before - step
            columns.append((up - gradient()) / (2 * step))
            flat[i] = before
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("size", [1, 2, 7, 60])
@pytest.mark.parametrize("seed", range(6))
def test_the_estimate_on_a_quadratic_is_never_above_its_largest_curvature_and_near(size, seed):
    draw = np.random.default_rng(seed)
    a = draw.normal(size=(size, size)) * np.exp(draw.uniform(-3, 3, size))
    h = torch.from_numpy(a + a.T)  # of either sign
    first, rest = nn.Parameter(torch.zeros(1).double()), nn.Parameter(torch.ones(size - 1).double())
    theta = torch.cat([first, rest])
    came = curvature(theta @ h @ theta / 2, [first, rest], draw)
    due = np.linalg.norm(h.numpy(), 2)
    assert 0.8 * due <= came <= due * (1 + 1e-9)


def test_the_estimate_on_least_squares_is_the_largest_eigenvalue_of_the_data():
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(50, 9)))
    layer = nn.Linear(9, 1, bias=False).double()
    came = curvature(layer(x).square().mean() / 2, list(layer.parameters()), draw)
    due = np.linalg.norm(x.numpy(), 2) ** 2 / 50
    assert 0.8 * due <= came <= due * (1 + 1e-9)


def test_a_loss_that_does_not_bend_has_no_curvature():
    parameter, draw = nn.Parameter(torch.ones(3)), np.random.default_rng(0)
    assert curvature(parameter.sum() * 2, [parameter], draw) == 0
    assert curvature(parameter.sum(), [], draw) == 0


def test_the_estimate_of_a_model_is_that_of_its_hessian(tmp_path):
    model = JointModel(tiny(tmp_path, dtype="float64"))
    rows_N = model.batches.rows(0)
    parameters = [list(m.parameters()) for m in model.modules]
    every = [p for own in parameters for p in own]
    before = [p.detach().clone() for p in every]
    found = estimate(model)
    assert all(torch.equal(p, b) for p, b in zip(every, before, strict=True))
    hessian = dense_hessian(lambda: model.forward(rows_N, model.modules, torch.float64)[0], every)
    due = np.linalg.norm(hessian, 2)
    assert 0.8 * due <= found.joint <= due * (1 + 1e-5)
    ends = np.cumsum([0, *(sum(p.numel() for p in own) for own in parameters)])
    for k, (a, b) in enumerate(itertools.pairwise(ends)):
        due = np.linalg.norm(hessian[a:b, a:b], 2)
        assert 0.8 * due <= found.of_block_B[k] <= due * (1 + 1e-5)


def test_the_joint_loss_is_that_of_the_first_round(tmp_path):
    config = tiny(tmp_path, codec="none", head_codec="none")
    losses = []
    run_threads(config, after_round=lambda run, result: losses.append(result.loss))
    model = JointModel(config)
    assert model.loss_of(model.batches.rows(0)) == pytest.approx(losses[0], rel=1e-6)


def test_with_private_labels_a_linear_tower_steps_down_a_straight_line(tmp_path):
    over = {"labels__holder": "server", "model__tower": "support.modules:LinearTower"}
    found = estimate(JointModel(tiny(tmp_path, **over)))
    assert found.of_block_B[1:] == (0, 0, 0)
    assert found.of_block_B[0] > 0
    shared = estimate(JointModel(tiny(tmp_path, model__tower="support.modules:LinearTower")))
    assert all(value > 0 for value in shared.of_block_B)
    assert shared.joint == found.joint


def test_the_variance_of_the_gradients_is_that_of_the_batches(tmp_path):
    model = JointModel(tiny(tmp_path, dtype="float64"))
    own = list(model.modules[0].parameters())
    gradients = []
    for r in range(model.batches.rounds_per_epoch):
        loss, _ = model.forward(model.batches.rows(r), model.modules, torch.float64)
        gradients.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, own)]))
    due = torch.stack(gradients).var(dim=0).sum()
    assert gradient_variance(model)[0] == pytest.approx(float(due), rel=1e-9)
    whole = JointModel(tiny(tmp_path, data__batch_size=104))
    assert gradient_variance(whole) == (0, 0, 0, 0)


def test_rates_of_a_run_are_those_it_used(done):
    config, path, rate_RB = done
    blocks = numbers.recorded(config, path, 4)
    assert np.array_equal(np.stack([b.rate_R for b in blocks], axis=1), rate_RB)
    planned = numbers.planned(config, 4)
    assert all(np.array_equal(p.rate_R, b.rate_R) for p, b in zip(planned, blocks, strict=True))


def test_terms_of_a_run_are_those_of_plain_loops(done):
    config, path, rate_RB = done
    found = Smoothness(2.0, (1.0, 3.0, 0.5, 2.0), "given")
    messages = [json.loads(line) for line in (path / "messages.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    descent, noise, third = 0.0, [0.0] * 4, [0.0] * 4
    for r, (message, step) in enumerate(zip(messages, steps, strict=True)):
        for k in range(4):
            eta = rate_RB[r, k]
            config_k = config.for_block(k).optimizer
            moved = eta * weights_of(config_k, eta, step["tau"][k]).total
            descent += moved
            noise[k] += max(2.0, found.of_block_B[k]) * moved**2
            third[k] += moved * sum(e for j, e in enumerate(message["squared_error"]) if j != k)
    blocks = numbers.recorded(config, path, 4)
    error_RB = numbers.read_errors(path, len(steps), 4)
    terms = numbers.terms_of(blocks, found, error_RB)
    # Momentum of 0.9 makes weights grow although block 2 has a proximal term: W^ is W.
    assert terms.stretch == pytest.approx(1)
    assert terms.descent == pytest.approx(descent)
    assert terms.per_descent == pytest.approx(3 / descent)
    assert terms.noise_B == pytest.approx(6.5 / descent * np.array(noise))
    assert terms.compression_B == pytest.approx(3.5 / descent * np.array(third))
    errors = [np.mean([m["squared_error"][k] for m in messages]) for k in range(4)]
    assert terms.error_B == pytest.approx(errors)


def test_terms_hold_the_stretch_of_a_proximal_term(done):
    optimizer, tau_R = OptimizerConfig(lr=0.1, proximal=2.0), np.array([1, 5])
    block = numbers.rounds_of_block(optimizer, tau_R, 1, 4, 2)
    total = (1 - 0.8**5) / 0.2
    assert block.prefix_R == pytest.approx([1, 5])
    assert block.total_R == pytest.approx([1, total])
    terms = numbers.terms_of([block], Smoothness(1, (1,), "given"), np.zeros((2, 1)))
    assert terms.stretch == pytest.approx(5 / total)
    assert terms.per_descent == pytest.approx(3 * (5 / total) / (0.1 + 0.1 * total))


@pytest.mark.parametrize("schedule", ["adaptive", "adaptive-sum"])
@pytest.mark.parametrize("seed", range(5))
def test_a_at_its_bound_keeps_the_limit_in_every_round_and_is_the_largest(schedule, seed):
    tau_R = np.random.default_rng(seed).integers(1, 20, 200)
    base = OptimizerConfig(lr=1.0, momentum=0.9, schedule=schedule)
    bound = numbers.rounds_of_block(base, tau_R, 7, 10, 200).largest_a(3.0)
    block = numbers.rounds_of_block(base.model_copy(update={"lr": bound}), tau_R, 7, 10, 200)
    excess = block.excess(3.0)
    assert excess[0 if schedule == "adaptive" else 1] == pytest.approx(1)


def test_the_page_of_a_preset_is_short_and_has_its_limits(capsys):
    assert main(["theory", "digits", "--smoothness", "2"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert len(lines) < 40
    assert "theory of digits: 5 blocks, 225 rounds" in lines[0]
    assert "L = L_k = 2 [given]" in shown
    row = re.findall(r"^0 .*0\.3  .*$", shown, re.MULTILINE)[0].split()
    assert row[2:4] == ["0.00625", "0.00625"]  # 1 / (16 * 2 * 5)
    assert "neither; 48 x (14), 48 x W" in shown
    for words in ("[quoted", "[derived", "more local steps never beat a larger rate"):
        assert words in shown


def test_a_preset_needs_no_given_smoothness(capsys):
    assert main(["theory", "digits", "--algorithm.local-steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^L = [\d.]+ \[estimated, a lower bound", shown, re.MULTILINE)
    assert len(shown.splitlines()) < 40


def test_a_rate_between_the_two_limits_keeps_ours_alone(tmp_path):
    config = tiny(tmp_path, optimizer__momentum=0.9, algorithm__local_steps=5)
    w = weights_of(config.optimizer, 0.1, 5)
    constant = 1 / (16 * 0.1 * w.total) * 0.99
    assert "W alone; 1.54 x (14)" in page(config, None, constant)
    assert "(14) and W" in page(config, None, constant / 2)


def test_the_page_of_a_run_has_its_measured_terms(done, capsys):
    config, path, _ = done
    assert main(["theory", str(path), "--smoothness=0.01"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 40
    blocks = numbers.recorded(config, path, 4)
    descent = sum(float((b.rate_R * b.total_R).sum()) for b in blocks)
    assert f"S = sum of eta W = {descent:.4g} [measured" in shown
    model = JointModel(config)
    rows_N = np.concatenate([model.batches.rows(r) for r in range(4)])
    start = model.loss_of(rows_N)
    assert re.search(rf"dF = {start:.4g} - [\d.]+ \[measured on 104 training rows\]", shown)
    assert "[estimated at the start]" in shown
    assert "Limit W is kept, so it holds for this L." in shown
    assert main(["theory", str(path), "--smoothness", "100"]) == 0
    assert "It is not proven for this run" in capsys.readouterr().out


def test_the_end_of_a_run_is_that_of_its_final_weights(done):
    config, path, _ = done
    model = JointModel(config)
    end = numbers.measure(model, path).end
    rows = torch.from_numpy(np.sort(np.concatenate([model.batches.rows(r) for r in range(4)])))
    embeddings = [b.module(b.shard.train_x[rows]) for b in model.blocks[1:]]
    loss = F.cross_entropy(model.modules[0](torch.cat(embeddings, dim=1)),
                           model.blocks[0].shard.train_y[rows])  # fmt: skip
    assert end == pytest.approx(float(loss.detach()), rel=1e-5)


def test_a_run_without_final_weights_keeps_symbols(done, tmp_path):
    config, path, _ = done
    copy = tmp_path / "unfinished"
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("checkpoints"))
    shown = page(config, copy, 1.0)
    assert "dF unknown: the run left no final weights" in shown
    assert "sum of noise sigma_k^2" in shown


def test_private_labels_have_no_third_term(tmp_path):
    config = tiny(tmp_path, labels__holder="server")
    shown = page(config, Path(run_threads(config)["folder"]), 1.0)
    assert "with private labels the gradients are what is compressed" in shown
    assert "It is not proven for this run: with private labels it is for codecs" in shown
    exact = {"codec": "none", "labels__gradient_codec": "none", "optimizer__lr": 1e-3}
    config = tiny(tmp_path, labels__holder="server", **exact)
    assert "so it holds" in page(config, Path(run_threads(config)["folder"]), 1.0)


def test_weights_below_0_are_not_covered(tmp_path):
    pulled = {"optimizer__momentum": 0.9, "optimizer__proximal": 1.0, "optimizer__lr": 0.1}
    config = tiny(tmp_path, algorithm__local_steps=20, **pulled)
    path = Path(run_threads(config)["folder"])
    shown = page(config, path, 1e-4)
    assert "block 0, 1, 2, 3 has weights below 0" in shown
    assert "so it holds" not in shown
    config = tiny(tmp_path, algorithm__local_steps=5, **pulled)
    assert "so it holds" in page(config, Path(run_threads(config)["folder"]), 1e-4)


def test_wall_clock_says_that_its_steps_are_unknown_and_takes_them_from_a_run(tmp_path, done):
    _, path, _ = done
    config = tiny(tmp_path, steps__policy="wall-clock", steps__timeout_s=1.0)
    shown = page(config, None, 2.0)
    assert "are not known before it" in shown
    assert "0.0312" in shown  # 1 / (16 * 2)
    blocks = numbers.recorded(config, path, 4)
    assert [b.tau_R[0] for b in blocks] == [4, 2, 3, 1]
    assert "tau [measured]" in page(config, path, 2.0)


def test_an_optimizer_outside_the_theory_is_said_to_be(tmp_path):
    shown = page(tiny(tmp_path, party={2: {"optimizer": {"name": "Adam"}}}), None, 1e-3)
    assert shown.count("outside the theory") == 1
    assert shown.count("(14) and W") == 3
    config = tiny(tmp_path, optimizer__name="Adam", algorithm__epochs=1)
    shown = page(config, Path(run_threads(config)["folder"]), 1.0)
    assert "It does not hold for this run: block 0, 1, 2, 3 outside the theory." in shown


def test_weight_decay_says_which_loss_is_bounded(tmp_path):
    said = "F + weight_decay |theta|^2 / 2"
    assert said in page(tiny(tmp_path, optimizer__weight_decay=0.1), None, 1.0)
    assert said not in page(tiny(tmp_path), None, 1.0)


def test_rules_are_named_in_a_few_words():
    assert rule(OptimizerConfig()) == "sgd"
    assert rule(OptimizerConfig(lr=0.1, momentum=0.9, nesterov=True)) == "nesterov 0.9"
    several = OptimizerConfig(lr=0.1, momentum=0.5, proximal=0.1, step_rates=(1.0, 0.5))
    assert rule(several) == "momentum 0.5 proximal 0.1 step_rates"
    assert rule(OptimizerConfig(name="Adam", weight_decay=0.1)) == "Adam"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no/such/folder"], "no such preset"),
        (["digits", "--smoothness", "0"], "--smoothness 0; due is a positive number"),
        (["digits", "--smoothness=nan"], "--smoothness nan; due is a positive number"),
        (["digits", "--smoothness", "-1"], "--smoothness -1; due"),
        (["digits", "--smoothness", "inf"], "--smoothness inf; due"),
        (["digits", "--smoothness", "wide"], "--smoothness wide; due"),
        (["digits", "--smoothness"], "--smoothness nothing; due"),
        (["digits", "--optimiser.lr", "1"], "optimiser"),
        (["--smoothness", "1"], "theory: "),
    ],
)
def test_bad_input_is_one_line(arguments, words, capsys):
    assert main(["theory", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert words in told


def test_a_smoothness_that_is_no_positive_number_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--smoothness nan"):
        page(tiny(tmp_path), None, float("nan"))


def test_a_run_takes_no_overrides_and_its_books_are_checked(done, tmp_path, capsys):
    config, path, _ = done
    assert main(["theory", str(path), "--optimizer.lr", "1"]) == 2
    assert "a run is what it was" in capsys.readouterr().err
    copy = tmp_path / "broken"
    shutil.copytree(path, copy)
    (copy / "messages.jsonl").write_text('{"round": 0, "squared_error": [1, 2]}\n')
    with pytest.raises(DataError, match="due is squared_error, a number for each of 4 blocks"):
        page(config, copy, 1.0)
    (copy / "messages.jsonl").unlink()
    with pytest.raises(DataError, match=r"no messages\.jsonl"):
        page(config, copy, 1.0)
    (copy / "steps.jsonl").unlink()
    assert main(["theory", str(copy), "--smoothness", "1"]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_a_model_that_cannot_be_estimated_asks_for_a_given_one(tmp_path):
    config = tiny(tmp_path, model__tower="support.modules:OnceTower")
    with pytest.raises(ConfigError, match="give it with --smoothness"):
        estimate(JointModel(config))
    assert "given" in page(config, None, 1.0)
