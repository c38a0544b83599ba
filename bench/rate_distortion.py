"""How little error for how many bits? SNR of every codec at equal payload bits, all of it counted.

python bench/rate_distortion.py                    all sources and shapes, table, plot, verdicts
python bench/rate_distortion.py --only normal      only sources whose name matches this pattern
python bench/rate_distortion.py --messages 10      fewer than 100 messages
python bench/rate_distortion.py --smoke            one small message a codec, seconds

SNR = 10 log10(variance of the messages / mean squared error), in dB; `mean` is that of the mean
error of all messages, `worst` of the worst message. Bits are 8 x payload bytes / values, ranges,
scales and indices included. Embeddings are those of a trained fashion-mnist run (four parties,
training images, uncompressed), made once and kept in bench/cache.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcvfl import seeds
from hpcvfl.benchmarks.common import Report, run_script
from hpcvfl.cli import load_config
from hpcvfl.codecs import table
from hpcvfl.config import build, merge, nest
from hpcvfl.engine.prepare import Run
from hpcvfl.engine.run import train
from hpcvfl.errors import ConfigError
from hpcvfl.transport.threads import ThreadsWorld

HERE = Path(__file__).parent
SHAPES = ((1000, 16), (4096, 128))
BITS = (1, 2, 3, 4)

FAMILIES = {
    "scalar minmax, dither": "scalar:bits={b}",
    "scalar gauss": "scalar:bits={b},range=gauss",
    "scalar gauss, column": "scalar:bits={b},range=gauss,scope=column",
    "lattice A2": "lattice:dim=2,bits={b}",
    "lattice D4": "lattice:dim=4,bits={b}",
    "lattice E8": "lattice:dim=8,bits={b}",
    "lattice E8, column": "lattice:dim=8,bits={b},scope=column",
    "lattice-paper": "lattice-paper:bits={b}",
    "qsgd max": "qsgd:bits={b},norm=max,bucket=512",
    "top-k row, float32": "topk:k={k},per=row",
    "top-k row, 2 bits": "topk:k={k},per=row,values=(scalar:bits=2,range=gauss)",
    "top-k columns, float32": "topk:k={k}",
    "random-k columns, float32": "randomk:k={k},per=column",
    "best": "best:bits={b}",
}
"""Name -> spec. {b}: the bits asked for, where the codec has them; lattice-paper really costs 3.5
and more. {k}: the largest number kept whose payload is not longer than that."""

EXACT: dict[str, Any] = {"unit": "bits a value", "at_most": True, "any_size": True}
SLACK_BITS = 0.07
"""Side information that a codec of b bits may have beyond them: 128 bytes on 1000 x 16 values."""


def spec_at(family: str, bits: int, shape: tuple[int, int]) -> str | None:
    """The spec of a family at a rate; None where it has none."""
    pattern = FAMILIES[family]
    if "{k}" not in pattern:
        try:
            return table.parse(pattern.format(b=bits)).spec
        except ConfigError:
            return None
    specs = [pattern.format(k=k) for k in range(1, shape[1] + 1)]
    fit = [s for s in specs if table.parse(s).nbytes(shape, 4) * 8 <= bits * math.prod(shape)]
    return fit[-1] if fit else None


LLOYD_MAX = {1: 4.40, 2: 9.30, 3: 14.62, 4: 20.22}
"""dB on N(0,1), Max 1960, IRE T-IT 6(1), table I."""


def normal(rng: np.random.Generator, shape: tuple[int, int], index: int) -> np.ndarray:
    """N(0,1)."""
    return rng.standard_normal(shape).astype(np.float32)


def uniform(rng: np.random.Generator, shape: tuple[int, int], index: int) -> np.ndarray:
    """Uniform on [-1, 1]."""
    return rng.uniform(-1, 1, shape).astype(np.float32)


def tanh_normal(rng: np.random.Generator, shape: tuple[int, int], index: int) -> np.ndarray:
    """tanh of N(0,1), as an LSTM or a tanh layer gives."""
    return np.tanh(rng.standard_normal(shape)).astype(np.float32)


def embeddings(rng: np.random.Generator, shape: tuple[int, int], index: int) -> np.ndarray:
    """Rows of a trained tower's output: parties in turn, rows at random."""
    parties = trained(shape[1])
    x = parties[index % len(parties)]
    return np.ascontiguousarray(x[rng.permutation(len(x))[: shape[0]]])


SOURCES = {
    "normal": normal,
    "uniform": uniform,
    "tanh(normal)": tanh_normal,
    "embeddings": embeddings,
}


def trained(width: int) -> list[np.ndarray]:
    """Embeddings of 60,000 images by four trained towers of that width; trained if not kept."""
    path = HERE / "cache" / f"embeddings-P{width}.npz"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        np.savez(path, *train_towers(width, path.parent))
    with np.load(path) as file:
        return [file[name] for name in file.files]


def train_towers(width: int, scratch: Path) -> list[np.ndarray]:
    """Two epochs of the preset, B = 100, uncompressed; then every party's training images."""
    over = {
        "codec": "none",
        "head_codec": "none",
        "model.embedding_dim": width,
        "algorithm.epochs": 2,
        "run.folder": str(scratch),
        "run.plots": False,
    }
    config = build(merge(load_config(["fashion-mnist"]).model_dump(), nest(over)))
    found: dict[int, np.ndarray] = {}

    def keep(run: Run, result: object) -> None:
        if run.rounds == run.total_rounds and run.transport.rank:
            x = run.block.shard.train_x
            assert x is not None
            run.block.module.eval()
            with torch.no_grad():
                parts = [run.block.module(part) for part in x.split(2000)]
            run.block.module.train()
            found[run.transport.rank] = torch.cat(parts).numpy()

    ThreadsWorld(config.num_parties + 1).run(lambda t: train(config, t, after_round=keep))
    return [found[rank] for rank in sorted(found)]


def messages(source: str, shape: tuple[int, int], count: int) -> Iterator[np.ndarray]:
    """The same messages for every codec."""
    for index in range(count):
        rng = seeds.generator(0, "rate-distortion", source, index)
        yield SOURCES[source](rng, shape, index)


def measure(spec: str, source: str, shape: tuple[int, int], count: int) -> dict[str, float]:
    """Bits a value, SNR of the mean error and of the worst message."""
    codec = table.parse(spec)
    payload_B = np.zeros(codec.nbytes(shape, 4), np.uint8)
    out = np.empty(shape, np.float32)
    errors, variances = [], []
    for index, x in enumerate(messages(source, shape, count)):
        key = seeds.key64(0, "dither", index)
        codec.encode(x, key, payload_B)
        codec.decode(payload_B, key, out)
        errors.append(float(np.square(out - x, dtype=np.float64).mean()))
        variances.append(float(x.var(dtype=np.float64)))
    worst = max(e / v for e, v in zip(errors, variances, strict=True))
    return {
        "bits": 8 * payload_B.size / math.prod(shape),
        "mean_dB": decibel(sum(variances) / sum(errors)),
        "worst_dB": decibel(1 / worst),
    }


def decibel(ratio: float) -> float:
    """10 log10."""
    return 10 * math.log10(ratio)


def run_all(report: Report, count: int, only: str) -> None:
    """A row per source, shape, bits and codec, with the known bounds beside."""
    for source in SOURCES:
        if not re.search(only, source):
            continue
        for shape in SHAPES if not report.smoke else SHAPES[:1]:
            for bits in BITS:
                where: dict[str, Any] = {
                    "source": source,
                    "shape": f"{shape[0]} x {shape[1]}",
                    "at": bits,
                }
                got: dict[str, float] = {}
                over = 0.0
                for family in FAMILIES:
                    spec = spec_at(family, bits, shape)
                    if spec is None:
                        continue
                    result = measure(spec, source, shape, count)
                    got[family] = result["mean_dB"]
                    over = max(over, result["bits"] - bits) if family != "lattice-paper" else over
                    report.row(**where, codec=family, **{k: f"{v:.3f}" for k, v in result.items()})
                label = f"{source}, {where['shape']}, {bits} bits"
                report.target(f"{label}: more bits than asked for", over, SLACK_BITS, **EXACT)
                if source == "normal":
                    bounds(report, where, bits)
                    judge(report, where["shape"], bits, got)
                print(f"{source} {shape} {bits} bits done", file=sys.stderr, flush=True)


def bounds(report: Report, where: dict[str, Any], bits: int) -> None:
    """What theory says of the normal at that rate."""
    known = {"(Lloyd-Max)": LLOYD_MAX[bits], "(Shannon bound)": 20 * bits * math.log10(2)}
    if bits > 1:  # the high-rate formula, pi e / 6 from the bound, is out at 1 bit
        known["(ideal entropy-coded scalar)"] = 20 * bits * math.log10(2) - 1.53
    for name, value in known.items():
        report.row(**where, codec=name, bits=f"{bits:.3f}", mean_dB=f"{value:.3f}")


def judge(report: Report, shape: str, bits: int, got: dict[str, float]) -> None:
    """The aims on the normal."""
    due = {2: 10.8, 3: 16.8}
    if bits in due:
        report.target(f"best at {bits} bits, normal, {shape}", got["best"], due[bits], "dB")
    if bits >= 2:
        gains = [got[f"lattice {name}"] - got["scalar gauss"] for name in ("A2", "D4", "E8")]
        gains.append(got["lattice E8, column"] - got["scalar gauss, column"])
        report.target(f"worst lattice over scalar, {bits} bits, {shape}", min(gains), 0.0, "dB")
        gain = got["best"] - max(v for name, v in got.items() if name != "best")
        report.target(f"best over the next best, {bits} bits, {shape}", gain, 0.0, any_size=True)


def draw(report: Report, path: Path) -> None:
    """SNR against bits, one picture a source at 1000 x 16."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, source in zip(figure.subplots(2, 2).flat, SOURCES, strict=True):
        rows = [r for r in report.rows if (r["source"], r["shape"]) == (source, "1000 x 16")]
        for family in FAMILIES:
            points = [(float(r["bits"]), float(r["mean_dB"])) for r in rows if r["codec"] == family]
            if points:
                width = 2.0 if family == "best" else 1.0
                axes.plot(*zip(*sorted(points), strict=True), marker=".", lw=width, label=family)
        axes.axline((0, 0), slope=20 * math.log10(2), color="black", lw=0.8, label="6.02 dB a bit")
        axes.set(title=source, xlabel="payload bits a value", ylabel="SNR (dB)", xlim=(0, 6))
        axes.set_ylim(-2, 30)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="x-small")
    figure.savefig(path, dpi=110)


def main(argv: Any) -> int:
    """Measure, then report."""

    def options(parser: Any) -> None:
        parser.add_argument("--messages", type=int, default=100, metavar="N", help="of each source")
        parser.add_argument("--only", default="", metavar="PATTERN", help="sources that match")

    report = Report("rate-distortion", argv, options)
    report.command = " ".join(["python bench/rate_distortion.py", *argv])
    only = "normal|uniform" if report.smoke and not report.args.only else report.args.only
    run_all(report, 1 if report.smoke else report.args.messages, only)
    if not report.smoke and not only:
        draw(report, HERE / "results" / "rate_distortion.png")
    return report.finish()


if __name__ == "__main__":
    run_script(main)
