#!/usr/bin/env bash
# Start N ranks (parties + 1) of any verb under torchrun, without MPI:  launch/torchrun.sh 5 train digits
# torchrun returns 1 for a run that failed AND for one that stopped early with a checkpoint (75 under MPI):
# look at the last line of rank 0, or just start again with --resume auto.
# HPCVFL_TORCHRUN_ARGS: torchrun's own arguments instead of --standalone, for several nodes; N is then the
# ranks of this node:  HPCVFL_TORCHRUN_ARGS="--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29400"
# HPCVFL_PYTHON names another interpreter.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

if [[ $# -lt 2 || ! "$1" =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch/torchrun.sh N VERB ...     N = parties + 1; e.g. launch/torchrun.sh 5 train digits" >&2
    exit 2
fi
ranks="$1"
shift

python="${HPCVFL_PYTHON:-}"
if [ -z "$python" ]; then
    python="$here/../.venv/bin/python"
    [ -x "$python" ] || python=python3
fi
if ! command -v "$python" >/dev/null; then
    echo "no Python found; run launch/quickstart.sh once or set HPCVFL_PYTHON" >&2
    exit 2
fi
# Batch systems also send SIGUSR1; torchrun is to hand it on as it does SIGTERM, and not to die of it.
export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
read -r -a options <<<"${HPCVFL_TORCHRUN_ARGS:---standalone}"
echo "torchrun.sh: $ranks ranks of $python (torchrun ${options[*]})" >&2
source "$here/env.sh"

# As a module, not the script on the PATH: that one may belong to another Python.
exec "$python" -m torch.distributed.run "${options[@]}" --nproc-per-node "$ranks" -m hpcvfl "$@"
