#!/usr/bin/env bash
# Start N ranks (parties + 1) of any verb:  launch/mpirun.sh 5 train digits --codec scalar:bits=2
# HPCVFL_MPIEXEC and HPCVFL_PYTHON name another launcher and interpreter; they must belong to the same MPI.
# HPCVFL_MPIEXEC_OPTIONS: more options for the launcher, in its own words, e.g. "--hostfile hosts" (Open MPI)
# or "-f hosts" (MPICH). Ends with the status of the run: 75 says that it stopped with a checkpoint.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

if [[ $# -lt 2 || ! "$1" =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch/mpirun.sh N VERB ...     N = parties + 1; e.g. launch/mpirun.sh 5 train digits" >&2
    exit 2
fi
ranks="$1"
shift

# The first that exists: what the caller names, the repository's .venv, the PATH.
first_of() {
    local choice
    for choice in "$@"; do
        if [ -n "$choice" ] && command -v "$choice" >/dev/null; then
            command -v "$choice"
            return 0
        fi
    done
    return 1
}
# What the caller names must exist: another one would start quietly in its place.
for named in HPCVFL_PYTHON HPCVFL_MPIEXEC; do
    if [ -n "${!named:-}" ] && ! command -v "${!named}" >/dev/null; then
        echo "mpirun.sh: $named=${!named} is no command" >&2
        exit 2
    fi
done
python="$(first_of "${HPCVFL_PYTHON:-}" "$here/../.venv/bin/python" python3)" || {
    echo "no Python found; run launch/quickstart.sh once or set HPCVFL_PYTHON" >&2
    exit 2
}
mpiexec="$(first_of "${HPCVFL_MPIEXEC:-}" "$here/../.venv/bin/mpiexec" mpiexec mpirun)" || {
    echo "no mpiexec found; pip install 'hpcvfl[mpich]', load the cluster's MPI, or set HPCVFL_MPIEXEC" >&2
    exit 2
}
source "$here/env.sh"

# Ranks are not pinned (a rank's threads would share one core), and there may be more of them than cores.
case "$("$mpiexec" --version 2>&1 || true)" in
    *"Open MPI"* | *OpenRTE* | *PRRTE* | *prte*)
        flavour="Open MPI" options=(--bind-to none --oversubscribe)
        # Without a resource manager it hands no variables to other hosts.
        for name in OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMBA_NUM_THREADS PYTHONPATH; do
            if [ -n "${!name+set}" ]; then options+=(-x "$name"); fi
        done
        ;;
    *HYDRA*) flavour="MPICH" options=(-bind-to none) ;;
    *Intel*) flavour="Intel MPI" options=(-genv I_MPI_PIN 0) ;;
    *) flavour="unknown MPI" options=() ;;
esac
read -r -a more <<<"${HPCVFL_MPIEXEC_OPTIONS:-}" || true
options+=(${more[@]+"${more[@]}"})

# Not set here: Open MPI asks for two steps on purpose, since a fault of a job run as root can harm the host.
if [ "$flavour" = "Open MPI" ] && [ "$(id -u)" = 0 ] && [[ " ${options[*]-} " != *" --allow-run-as-root "* ]] &&
    [[ "${OMPI_ALLOW_RUN_AS_ROOT:-}${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-}" != 11 ]]; then
    echo "mpirun.sh: Open MPI does not start as root; as another user it does. In a container that is yours alone:" \
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" >&2
    exit 2
fi

echo "mpirun.sh: $mpiexec ($flavour), $ranks ranks of $python" >&2
exec "$mpiexec" ${options[@]+"${options[@]}"} -n "$ranks" "$python" -m mpi4py -m hpcvfl "$@"
