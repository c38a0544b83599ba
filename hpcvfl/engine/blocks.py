"""What a rank does with its own block: its message, its local step, its part of an evaluation.

Block 0 is the server (`Server`, the head), block k the party k (`Party`, its tower). The round
loop sees only the methods of `Block`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from hpcvfl import seeds
from hpcvfl.codecs import table
from hpcvfl.codecs.base import Array
from hpcvfl.config import Config
from hpcvfl.data import Shard
from hpcvfl.engine.optimizers import LocalOptimizer
from hpcvfl.errors import ConfigError, NonFiniteError

EVAL_ROWS = 2000
"""Rows per forward pass of an evaluation; bounds its memory, not its messages."""

# legend: N rows of the batch, P embedding width, M parties


class Block(ABC):
    """One block of the model on its rank: `module` (head or tower) and how it is trained.

    objective : what its local steps go down, in a word
    """

    objective = "the loss"

    def __init__(self, block: int, config: Config, shard: Shard, module: nn.Module) -> None:
        """Block number, the config of this block, its data, its module."""
        self.num_buffers = config.num_parties
        self.block, self.config, self.shard, self.module = block, config, shard, module
        self.dtype = getattr(torch, config.dtype)
        self.optimizer = LocalOptimizer(config.optimizer, module.parameters())
        self._norms = [
            layer
            for layer in module.modules()
            if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats
        ]
        self._batches: dict[int, list[torch.Tensor]] = {}
        self._targets: dict[int, list[list[Array] | None]] = {}
        self._labels_N = torch.empty(0, dtype=torch.int64)
        self._score_C: Array | None = None

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks that are trained here: this one alone, but for holder.py."""
        return (self,)

    def begin_round(self, round_index: int, rows_N: Array, *rates: float) -> None:
        """Fix the rows, the rate and the state of torch's generator for this round.

        rates : one for each of `blocks`
        """
        (lr,) = rates
        self._seed_torch(round_index)
        self.optimizer.begin_round(lr, f"block {self.block}, round {round_index}")
        self._rows = torch.from_numpy(rows_N)
        if self.shard.train_y is not None:
            self._labels_N = self.shard.train_y[self._rows]

    def _seed_torch(self, round_index: int) -> None:
        # Keyed by round, not carried over: a resumed run draws what an uninterrupted one would
        # have.
        key = seeds.key64(self.config.seed, "torch", round_index, self.block)
        torch.default_generator.manual_seed(key >> 1)

    @abstractmethod
    def message(self) -> list[Array]:
        """The tensors of this round's message, as arrays that are valid until the next call."""

    @abstractmethod
    def message_ahead(self, round_index: int, rows_N: Array) -> list[Array]:
        """The message of a later round, from the parameters as they are; the round that has begun
        goes on undisturbed. Valid until the next call.
        """

    def score(self) -> Array | None:
        """How much each column of the message matters; None where no codec asks or nobody knows.

        At a party, |column sums of dL/dh| at the last local step of the previous round: C-VFL's
        choice of columns for top-k (arXiv 2206.08330; its code takes the gradient of the last
        layer's bias, which is the same sum).
        """
        return self._score_C

    def set_score(self, score_C: Array | None) -> None:
        """What `score` is to give until the next local step: of a run that goes on."""
        self._score_C = score_C

    def targets(self, batch_size: int) -> list[list[Array] | None]:
        """Where the frame of each rank is decoded to, in rank order; None for the own frame."""
        # Views of memory that stays where it is, so they are made once per batch size.
        if batch_size not in self._targets:
            self._targets[batch_size] = self._make_targets(batch_size)
        return self._targets[batch_size]

    @abstractmethod
    def _make_targets(self, batch_size: int) -> list[list[Array] | None]: ...

    @abstractmethod
    def _loss(self, step: int) -> torch.Tensor:
        """Loss of the batch as a function of the own parameters, everything else frozen."""

    def step(self, round_index: int, step: int) -> float:
        """Local step number `step` (from 0); returns the loss before it.

        Running statistics of normalisation layers move at step 0 only, so that Q steps on one
        batch do not count it Q times.
        """
        for norm in self._norms:
            norm.track_running_stats = step == 0
        loss = self._loss(step)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteError(
                f"block {self.block}, round {round_index}, local step {step}: {self.objective} is"
                f" {value}; a smaller optimizer.lr or a finer codec may help"
            )
        self.optimizer.step(loss, f"block {self.block}, round {round_index}")
        for norm in self._norms:
            norm.track_running_stats = True
        return value

    def trial_step_s(self, rows_N: Array) -> float:
        """Seconds of a local step that is not taken, of its second try: forward and backward of the
        own module. Nothing is changed by it.
        """
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        with self._aside():
            for _ in range(2):
                since = time.monotonic()
                out = self._trial_output(rows_N)
                if parameters and out.requires_grad:
                    torch.autograd.grad(out.sum(), parameters, allow_unused=True)
                spent = time.monotonic() - since
        return spent

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A forward in here is beside the round: torch's generator is put back afterwards, and
        running statistics, which move in the local steps, stay.
        """
        state = torch.default_generator.get_state()
        for norm in self._norms:
            norm.track_running_stats = False
        try:
            yield
        finally:
            for norm in self._norms:
                norm.track_running_stats = True
            torch.default_generator.set_state(state)

    @abstractmethod
    def _trial_output(self, rows_N: Array) -> torch.Tensor: ...

    def _embeddings(self, batch_size: int) -> list[torch.Tensor]:
        """`num_buffers` tensors of shape (N, P), kept per batch size; torch aligns them."""
        if batch_size not in self._batches:
            shape = (batch_size, self.config.model.embedding_dim)
            self._batches[batch_size] = [
                torch.zeros(shape, dtype=self.dtype) for _ in range(self.num_buffers)
            ]
        return self._batches[batch_size]


class Server(Block):
    """Block 0: the head, trained on everybody's decoded embeddings."""

    _parameters: list[Array] | None = None

    def message(self) -> list[Array]:
        """The head's parameters theta_0."""
        if self._parameters is None:
            self._parameters = arrays(self.module.parameters())
        return self._parameters

    def message_ahead(self, round_index: int, rows_N: Array) -> list[Array]:
        """See Block; they are of no round."""
        return self.message()

    def _make_targets(self, batch_size: int) -> list[list[Array] | None]:
        return [None, *([e.numpy()] for e in self._embeddings(batch_size))]

    def _loss(self, step: int) -> torch.Tensor:
        batch = torch.cat(self._embeddings(len(self._rows)), dim=1)
        return F.cross_entropy(self.module(batch), self._labels_N)

    def embedding_gradients(self) -> list[Array]:
        """dL/dh_k of each party, shape (N, P), at the embeddings received and the head as it is."""
        parts = [e.detach().requires_grad_() for e in self._embeddings(len(self._rows))]
        with self._aside():
            loss = F.cross_entropy(self.module(torch.cat(parts, dim=1)), self._labels_N)
        return [g.contiguous().numpy() for g in torch.autograd.grad(loss, parts)]

    def _trial_output(self, rows_N: Array) -> torch.Tensor:
        out: torch.Tensor = self.module(torch.cat(self._embeddings(len(rows_N)), dim=1))
        return out

    def evaluate(self, embeddings: Sequence[torch.Tensor]) -> tuple[float, float]:
        """(mean loss, accuracy) of the test rows from everybody's uncompressed embeddings, in eval
        mode.
        """
        self.module.eval()
        loss, correct, labels_N = 0.0, 0, self.shard.test_y
        assert labels_N is not None
        with torch.no_grad():
            for at in range(0, len(labels_N), EVAL_ROWS):
                part = slice(at, at + EVAL_ROWS)
                logits = self.module(torch.cat([e[part] for e in embeddings], dim=1))
                loss += float(F.cross_entropy(logits, labels_N[part], reduction="sum"))
                correct += int((logits.argmax(dim=1) == labels_N[part]).sum())
        self.module.train()
        return loss / len(labels_N), correct / len(labels_N)


class Tower(Block):
    """Block k: a tower over the party's own columns, whatever its local steps go by."""

    def __init__(self, block: int, config: Config, shard: Shard, module: nn.Module) -> None:
        """See Block."""
        super().__init__(block, config, shard, module)
        self._own_NP: torch.Tensor | None = None
        self._wants_score = table.parse(config.codec).wants_score

    def begin_round(self, round_index: int, rows_N: Array, *rates: float) -> None:
        """See Block."""
        super().begin_round(round_index, rows_N, *rates)
        self._x = self._train_x()[self._rows]

    def message_ahead(self, round_index: int, rows_N: Array) -> list[Array]:
        """See Block; random numbers are those of that round, statistics do not move."""
        with self._aside(), torch.no_grad():
            self._seed_torch(round_index)
            self._ahead_NP = self._embed(self._train_x()[torch.from_numpy(rows_N)]).contiguous()
        return [self._ahead_NP.numpy()]

    def message(self) -> list[Array]:
        """The embedding h_k of the batch; its graph is kept for local step 0."""
        self._own_NP = self._embed(self._x)
        return [self._own_NP.detach().contiguous().numpy()]

    def _own(self, step: int) -> torch.Tensor:
        """h_k as a function of the tower as it is at a local step; at step 0 that of the message,
        unless that was sent a round ahead.
        """
        kept_NP, self._own_NP = self._own_NP, None
        return self._embed(self._x) if kept_NP is None else kept_NP

    def _trial_output(self, rows_N: Array) -> torch.Tensor:
        return self._embed(self._train_x()[torch.from_numpy(rows_N)])

    def test_embedding(self) -> Array:
        """Embedding of all test rows in eval mode, shape (test rows, P)."""
        assert self.shard.test_x is not None
        self.module.eval()
        with torch.no_grad():
            parts = [self._embed(x) for x in self.shard.test_x.split(EVAL_ROWS)]
        self.module.train()
        return torch.cat(parts).numpy()

    def _embed(self, x: torch.Tensor) -> torch.Tensor:
        """The tower's output, checked: a user's class may give anything at any time."""
        h = self.module(x)
        due = (len(x), self.config.model.embedding_dim)
        came = (tuple(h.shape), h.dtype) if isinstance(h, torch.Tensor) else type(h).__name__
        if came != (due, self.dtype):
            raise ConfigError(
                f"block {self.block}, model.tower = {self.config.model.tower!r}: gives {came} for"
                f" {len(x)} rows, must give {(due, self.dtype)}"
            )
        return h

    def _train_x(self) -> torch.Tensor:
        assert self.shard.train_x is not None
        return self.shard.train_x


class Party(Tower):
    """Trained through a frozen copy of the head, on labels of its own."""

    def __init__(
        self, block: int, config: Config, shard: Shard, module: nn.Module, head_copy: nn.Module
    ) -> None:
        """`head_copy` has the head's architecture; its values come with every downlink."""
        super().__init__(block, config, shard, module)
        self.head_copy = head_copy.requires_grad_(False).train()
        # A head with running statistics keeps them at the server; the copy uses those of the batch.
        for layer in head_copy.modules():
            if isinstance(layer, nn.modules.batchnorm._NormBase):
                layer.track_running_stats = False

    def _make_targets(self, batch_size: int) -> list[list[Array] | None]:
        embeddings = self._embeddings(batch_size)
        parties = [None if k == self.block else [e.numpy()] for k, e in enumerate(embeddings, 1)]
        return [arrays(self.head_copy.parameters()), *parties]

    def _loss(self, step: int) -> torch.Tensor:
        own_NP = self._own(step)
        if self._wants_score:
            own_NP.register_hook(self._keep_score)
        batch = list(self._embeddings(len(self._rows)))
        batch[self.block - 1] = own_NP  # a block never sees its own compression error
        return F.cross_entropy(self.head_copy(torch.cat(batch, dim=1)), self._labels_N)

    def _keep_score(self, gradient_NP: torch.Tensor) -> None:
        self._score_C = gradient_NP.sum(dim=0).abs().numpy()


class PrivateParty(Tower):
    """Trained down the gradient of the loss at its embedding, which the server sends."""

    objective = "the sum of embedding times gradient"

    def __init__(self, block: int, config: Config, shard: Shard, module: nn.Module) -> None:
        """See Block."""
        super().__init__(block, config, shard, module)
        self.num_buffers = 1
        self._gradient_NP = torch.empty(0)

    def gradient(self, batch_size: int) -> Array:
        """Where the server's gradient is decoded to: shape (N, P), kept per batch size."""
        self._gradient_NP = self._embeddings(batch_size)[0]
        return self._gradient_NP.numpy()

    def _make_targets(self, batch_size: int) -> list[list[Array] | None]:
        return [None] * (self.config.num_parties + 1)

    def _loss(self, step: int) -> torch.Tensor:
        """Sum of h_k times the gradient: its gradient is J^T C, and its value means nothing."""
        if self._wants_score:
            self._score_C = self._gradient_NP.sum(dim=0).abs().numpy()
        return (self._own(step) * self._gradient_NP).sum()


def arrays(parameters: Iterable[nn.Parameter]) -> list[Array]:
    """numpy views of parameters; writing to them changes the parameters."""
    return [p.detach().numpy() for p in parameters]
