#!/usr/bin/env bash
# Start N ranks (parties + 1) of any verb:  launch/mpirun.sh 5 train digits --codec scalar:bits=2
# HPCVFL_MPIEXEC and HPCVFL_PYTHON name another launcher and interpreter; they must belong to the same MPI.
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
python="$(first_of "${HPCVFL_PYTHON:-}" "$here/../.venv/bin/python" python3)" || {
    echo "no Python found; run launch/quickstart.sh once or set HPCVFL_PYTHON" >&2
    exit 2
}
mpiexec="$(first_of "${HPCVFL_MPIEXEC:-}" "$here/../.venv/bin/mpiexec" mpiexec mpirun)" || {
    echo "no mpiexec found; pip install 'hpcvfl[mpich]', load the cluster's MPI, or set HPCVFL_MPIEXEC" >&2
    exit 2
}

case "$("$mpiexec" --version 2>&1)" in
    *"Open MPI"* | *OpenRTE* | *PRRTE* | *prte*) flavour="Open MPI" options=(--bind-to none --oversubscribe) ;;
    *HYDRA*) flavour="MPICH" options=(-bind-to none) ;;
    *Intel*) flavour="Intel MPI" options=(-genv I_MPI_PIN 0) ;;
    *) flavour="unknown MPI" options=() ;;
esac
echo "mpirun.sh: $mpiexec ($flavour), $ranks ranks of $python" >&2
source "$here/env.sh"

exec "$mpiexec" "${options[@]}" -n "$ranks" "$python" -m mpi4py -m hpcvfl "$@"
