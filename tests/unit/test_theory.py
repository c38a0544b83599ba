"""The calculator's constants against simulated quantisers; its choices are the least that do."""

import numpy as np
import pytest

from hpcvfl import theory
from hpcvfl.cli import main
from hpcvfl.codecs import table
from hpcvfl.errors import ConfigError
from hpcvfl.kernels import lattice

SIZES = theory.Sizes(batch_size=1000, embedding_dim=16, value_range=2.0, num_steps=10_000)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_scalar_error_is_that_of_the_codec(bits):
    x = np.random.default_rng(0).uniform(-1, 1, (1000, 16)).astype(np.float32)
    codec = table.parse(f"scalar:bits={bits},range=fixed:-1:1,dither=off")
    payload_B, out = np.zeros(codec.nbytes(x.shape, 4), np.uint8), np.zeros_like(x)
    codec.encode(x, 0, payload_B)
    codec.decode(payload_B, 0, out)
    # Uniform values: half a cell at both ends is never used, hence the exact factor.
    exact = theory.scalar_error(SIZES, bits)
    assert ((out - x) ** 2).sum() == pytest.approx(exact, rel=0.03)


def test_the_lattice_error_is_that_of_the_nearest_points():
    spacing = 0.05
    x = np.random.default_rng(1).uniform(-1, 1, (8000, 2))
    near = np.empty_like(x)
    lattice.nearest_a2(x / spacing, near)
    cell = spacing**2 * np.sqrt(3) / 2
    assert ((near * spacing - x) ** 2).sum() == pytest.approx(
        theory.lattice_error(SIZES, cell), rel=0.03
    )


@pytest.mark.parametrize("steps", [100, 10_000, 1_000_000])
@pytest.mark.parametrize("value_range", [0.01, 2.0, 50.0])
def test_choices_are_the_coarsest_within_the_error(steps, value_range):
    sizes = theory.Sizes(500, 32, value_range, steps)
    bits, k = theory.scalar_bits(sizes), theory.topk_k(sizes)
    assert theory.scalar_error(sizes, bits) <= sizes.due_error
    assert bits == 1 or theory.scalar_error(sizes, bits - 1) > sizes.due_error
    assert theory.lattice_error(sizes, theory.lattice_cell(sizes)) == pytest.approx(sizes.due_error)
    assert theory.topk_error(sizes, k) <= sizes.due_error * (1 + 1e-6)
    assert k == 1 or theory.topk_error(sizes, k - 1) > sizes.due_error
    cells = value_range**2 / theory.lattice_cell(sizes)
    assert 2 ** theory.lattice_bits(sizes) >= cells
    assert theory.lattice_bits(sizes) == 1 or 2 ** (theory.lattice_bits(sizes) - 1) < cells


@pytest.mark.parametrize(("bits", "factor"), [(2, 1.78), (3, 1.31), (4, 1.14)])
def test_the_printed_scalar_bound_is_too_small_by_the_known_factor(bits, factor):
    printed = 16_000 * 4 / 12 * 4.0**-bits
    assert theory.scalar_error(SIZES, bits) / printed == pytest.approx(factor, abs=0.005)


def test_the_verb_prints_a_page(capsys):
    asked = ["--batch-size", "1000", "--embedding-dim", "16", "--range", "2", "--steps", "150000"]
    assert main(["theory", *asked]) == 0
    shown = capsys.readouterr().out
    assert "log2(B P D^2 sqrt T) = 24.6 bits" in shown  # facts of the MIMIC-III experiment


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required"),
        (["--batch-size", "0", "--embedding-dim", "1", "--range", "1", "--steps", "1"], "positive"),
        (["--batch-size", "x"], "invalid int value: 'x'"),
        (
            ["--batch-size", "1", "--embedding-dim", "1", "--range", "nan", "--steps", "1"],
            "--range nan",
        ),
    ],
)
def test_bad_sizes_are_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        theory.parse(arguments)


def test_what_no_codec_has_is_said():
    assert "more than" not in theory.page(theory.Sizes(100, 16, 0.01, 100))
    page = theory.page(theory.Sizes(10**6, 16, 1e3, 10**9))
    assert "more than the 8" in page
    assert "more than the 16" in page
    assert "k = 16 of 16, which is all of them" in page
