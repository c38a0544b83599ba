"""What a run must be equal to, bit for bit where nothing but order or transport differs."""

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import run_threads, same_bits, tiny, weights
from torch.nn import functional as F

from hpcvfl.codecs.frame import HEADER_NBYTES
from hpcvfl.data import Batches
from hpcvfl.engine.blocks import Party
from hpcvfl.engine.prepare import prepare
from hpcvfl.engine.run import one_round, train
from hpcvfl.engine.start import build_block
from hpcvfl.transport.threads import ThreadsWorld


def joint_sgd(config, num_rounds, local_steps=1):
    """Oracle: the same blocks trained as one network, or blockwise on a frozen snapshot (C-VFL,
    Alg. 1).
    """
    blocks = [build_block(config.for_block(k), k) for k in range(config.num_parties + 1)]
    batches = Batches(blocks[0].shard.num_rows, config.data.batch_size, config.seed)
    for r in range(num_rounds):
        rows = torch.from_numpy(batches.rows(r))
        labels = blocks[0].shard.train_y[rows]
        frozen = [b.module(b.shard.train_x[rows]).detach() for b in blocks[1:]]
        head = [p.detach().clone() for p in blocks[0].module.parameters()]
        new = []
        for k, b in enumerate(blocks):
            parameters = [p.detach().clone().requires_grad_() for p in b.module.parameters()]
            for _ in range(local_steps):
                named = dict(
                    zip((n for n, _ in b.module.named_parameters()), parameters, strict=True)
                )
                parts = list(frozen)
                if k:
                    parts[k - 1] = torch.func.functional_call(
                        b.module, named, (b.shard.train_x[rows],)
                    )
                weight, bias = parameters if k == 0 else head
                loss = F.cross_entropy(torch.cat(parts, 1) @ weight.T + bias, labels)
                gradients = torch.autograd.grad(loss, parameters)
                parameters = [
                    (p - config.optimizer.lr * g).detach().requires_grad_()
                    for p, g in zip(parameters, gradients, strict=True)
                ]
            new.append(parameters)
        for b, parameters in zip(blocks, new, strict=True):
            for p, q in zip(b.module.parameters(), parameters, strict=True):
                p.data.copy_(q.data)
    return {
        f"rank{k}.{name}": p.detach().numpy()
        for k, b in enumerate(blocks)
        for name, p in b.module.named_parameters()
    }


EXACT = {"codec": "none", "head_codec": "none", "dtype": "float64"}


@pytest.mark.parametrize("local_steps", [1, 4])
def test_uncompressed_run_equals_the_algorithm_written_out(tmp_path, local_steps):
    config = tiny(tmp_path, **EXACT, algorithm__rounds=6, algorithm__local_steps=local_steps)
    got, due = weights(run_threads(config)), joint_sgd(config, 6, local_steps)
    assert got.keys() == due.keys()
    for name in due:
        assert np.abs(got[name] - due[name]).max() <= 1e-12, name


def test_e3_one_local_step_uncompressed_equals_one_sgd_step_of_the_joint_network(tmp_path):
    config = tiny(tmp_path, **EXACT, algorithm__rounds=1)
    blocks = [build_block(config.for_block(k), k) for k in range(4)]
    parameters = [p for b in blocks for p in b.module.parameters()]
    rows = torch.from_numpy(Batches(blocks[0].shard.num_rows, 30, 0).rows(0))
    parts = [b.module(b.shard.train_x[rows]) for b in blocks[1:]]
    loss = F.cross_entropy(blocks[0].module(torch.cat(parts, 1)), blocks[0].shard.train_y[rows])
    loss.backward()
    torch.optim.SGD(parameters, lr=config.optimizer.lr).step()
    got = weights(run_threads(config))
    for k, b in enumerate(blocks):
        for name, p in b.module.named_parameters():
            assert np.abs(got[f"rank{k}.{name}"] - p.detach().numpy()).max() <= 1e-12


@pytest.mark.parametrize("tower", ["mlp", "support.modules:DropoutTower"])
def test_the_order_in_which_blocks_run_changes_nothing(tmp_path, tower):
    config = tiny(tmp_path, model__tower=tower, algorithm__local_steps=3, num_parties=2)
    results = [weights(run_threads(config, order)) for order in permutations(range(3))]
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("tower", ["mlp", "support.modules:DropoutTower"])
def test_hub_and_allgather_give_the_same_bits(tmp_path, tower):
    hub = run_threads(tiny(tmp_path, model__tower=tower))
    spread = run_threads(tiny(tmp_path, model__tower=tower, transport__pattern="allgather"))
    assert same_bits(weights(hub), weights(spread))
    assert hub["metrics"] == spread["metrics"]
    assert hub["wire_bytes"] > spread["wire_bytes"]


def test_a_seed_changes_the_run_and_repeats_it(tmp_path):
    first, again, other = (weights(run_threads(tiny(tmp_path, seed=s))) for s in (5, 5, 6))
    assert same_bits(first, again)
    assert not same_bits(first, other)


def test_e2_a_message_decoded_far_away_equals_the_one_decoded_at_home(tmp_path):
    config = tiny(tmp_path, codec="scalar:bits=2,scope=column", algorithm__rounds=3)
    seen = {}

    def look(run, result):
        rank, size = run.transport.rank, len(run.batches.rows(run.rounds - 1))
        layouts, slots = run.exchange.layout(size)
        for k in range(run.transport.size):
            key = run.exchange.dither_key(run.rounds - 1, k)
            shapes = layouts[k].shapes
            out = [np.zeros(s, np.float32) for s in shapes]
            layouts[k].decode(slots[k][HEADER_NBYTES:], key, out)
            seen[run.rounds, rank, k] = b"".join(o.tobytes() for o in out)
            target = run.block.targets(size)[k]
            if target is not None and k:  # the head moves on at the server, the copy does not
                assert target[0].tobytes() == out[0].tobytes()

    run_threads(config, after_round=look)
    for r in (1, 2, 3):
        for k in range(4):
            assert len({seen[r, rank, k] for rank in range(4)}) == 1


def test_a_block_changes_only_its_own_parameters(tmp_path):
    config = tiny(tmp_path, codec="none", head_codec="none", algorithm__rounds=2)

    def work(transport):
        run = prepare(config, transport)
        copies = []
        for r in range(2):
            sent = [a.copy() for a in run.block.message()] if transport.rank == 0 else None
            one_round(run, r)
            if isinstance(run.block, Party):
                assert all(p.grad is None for p in run.block.head_copy.parameters())
                copies.append([p.detach().numpy().copy() for p in run.block.head_copy.parameters()])
            else:
                copies.append(sent)
        run.meter.close()
        return copies

    by_rank = ThreadsWorld(4).run(work)
    for r in range(2):
        for rank in (1, 2, 3):  # after its local steps a party's copy is still what the server sent
            for sent, copy in zip(by_rank[0][r], by_rank[rank][r], strict=True):
                assert sent.tobytes() == copy.tobytes()


def test_p3_running_statistics_move_once_a_round_whatever_q(tmp_path):
    over = {
        "model__tower": "support.modules:BatchNormTower",
        "algorithm__rounds": 3,
        "codec": "none",
    }
    one, many = (
        weights(run_threads(tiny(tmp_path, **over, algorithm__local_steps=q))) for q in (1, 7)
    )
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert one[f"rank2.{name}"].tobytes() == many[f"rank2.{name}"].tobytes()
    assert one["rank2.norm.num_batches_tracked"] == 3
    assert not same_bits(one, many)


def test_c1_bytes_of_the_ledger_are_header_and_payload_of_every_frame(tmp_path):
    config = tiny(tmp_path, num_parties=3, algorithm__epochs=1)
    summary = run_threads(config)
    batches = Batches(
        104, 30, 0
    )  # 130 samples, 80 % of them for training; the last batch has 14 rows
    assert [len(batches.rows(r)) for r in range(4)] == [30, 30, 30, 14]
    head = 64 + (8 + 3 * 12) + (8 + 3)  # 8 bits: (3, 12) and (3,) with a range each
    wire = raw = 0
    for rows in (30, 30, 30, 14):
        embed = 64 + 8 + rows * 4 * 4 // 8
        wire += 3 * embed + 3 * (head + 3 * embed)
        raw += 4 * (3 * rows * 4 + 3 * (39 + 3 * rows * 4))
    assert (summary["wire_bytes"], summary["raw_bytes"]) == (wire, raw)
    folder = Path(summary["folder"])
    booked = 0
    for rank in range(4):
        for line in (folder / f"ledger.rank{rank}.jsonl").read_text().splitlines():
            booked += sum(n for key, n in json.loads(line).items() if key.startswith("in."))
    assert booked == wire


def test_both_ends_of_every_message_book_the_same_bytes(tmp_path):
    tables = {}

    def keep(run, result):
        tables[run.transport.rank] = run.meter.table()

    for pattern in ("hub", "allgather"):
        run_threads(tiny(tmp_path, transport__pattern=pattern), after_round=keep)
        sent, received = ({}, {})
        for rank, rows in tables.items():
            for row in rows:
                if row["direction"] == "out":
                    pair, book = (rank, row["peer"]), sent
                else:
                    pair, book = (row["peer"], rank), received
                key = (*pair, row["phase"], row["kind"])
                book[key] = (row["wire_bytes"], row["raw_bytes"], row["messages"])
        assert sent == received
        assert {k[2] for k in sent} >= {"train", "setup", "eval"}


def test_headers_carry_tau_and_seconds_of_the_previous_round(tmp_path):
    taus = []

    def look(run, result):
        if run.transport.rank == 2:
            header = run.exchange.headers_R[1]
            taus.append((header.tau, header.seconds > 0))

    run_threads(tiny(tmp_path, algorithm__rounds=3, algorithm__local_steps=4), after_round=look)
    assert taus == [(0, False), (4, True), (4, True)]


def test_payload_checksum_changes_no_number(tmp_path):
    plain, summed = (run_threads(tiny(tmp_path, wire__checksum=c)) for c in ("header", "payload"))
    assert same_bits(weights(plain), weights(summed))
    assert plain["wire_bytes"] == summed["wire_bytes"]


def test_parties_may_have_codecs_and_rates_of_their_own(tmp_path):
    party = {2: {"codec": "none", "optimizer.lr": 0.01}}
    summary = run_threads(tiny(tmp_path, party=party))
    assert summary["codec"] == ["scalar:bits=8", "scalar:bits=4", "none", "scalar:bits=4"]
    other = run_threads(tiny(tmp_path))
    assert not same_bits(weights(summary), weights(other))


def test_a_run_learns(tmp_path):
    config = tiny(
        tmp_path,
        data__num_samples=1000,
        algorithm__epochs=8,
        optimizer__lr=0.3,
        codec="scalar:bits=3",
    )
    summary = run_threads(config)
    lines = [json.loads(x) for x in (Path(summary["folder"]) / "metrics.jsonl").open()]
    assert lines[-1]["test_loss"] < 0.7 * lines[0]["test_loss"]
    assert summary["metrics"]["accuracy"] > 0.6


def test_target_accuracy_stops_all_ranks_at_the_same_evaluation(tmp_path):
    config = tiny(tmp_path, algorithm__epochs=50, algorithm__target_accuracy=0.01)
    summary = run_threads(config)
    assert summary["rounds"] == 4


def test_train_can_be_called_for_one_rank_of_any_transport(tmp_path):
    config = tiny(tmp_path, num_parties=1)
    summaries = ThreadsWorld(2).run(lambda t: train(config, t))
    assert summaries[0] == summaries[1]


def test_a_head_that_lies_column_by_column_reaches_the_parties(tmp_path):
    copies = {}

    def look(run, result):
        module = run.block.head_copy if run.transport.rank else run.block.module
        copies[run.transport.rank] = [p.detach().numpy().copy() for p in module.parameters()]

    config = tiny(
        tmp_path,
        model__head="support.modules:TransposedHead",
        head_codec="none",
        algorithm__rounds=1,
    )
    first = [p.detach().numpy().copy() for p in build_block(config, 0).module.parameters()]
    run_threads(config, after_round=look)
    assert all((a == b).all() for a, b in zip(copies[1], first, strict=True))
    run_threads(tiny(tmp_path, model__head="support.modules:TransposedHead"), after_round=look)
    assert not (copies[1][0] == first[0]).all()


def test_a_normalisation_without_running_statistics_is_left_alone(tmp_path):
    summary = run_threads(tiny(tmp_path, model__tower="support.modules:InstanceNormTower"))
    assert summary["rounds"] == 8
