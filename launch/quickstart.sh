#!/usr/bin/env bash
# From a fresh clone to a trained model: installs into .venv, then one server and four parties under MPI.
# Arguments are passed on:  launch/quickstart.sh --codec scalar:bits=2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source launch/venv.sh
make_venv mpich,plot
source launch/env.sh

exec "$venv/bin/mpiexec" -n 5 "$venv/bin/python" -m mpi4py -m hpcvfl train digits "$@"
