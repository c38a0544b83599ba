#!/usr/bin/env bash
# Run a rank's program in its network namespace:  enter.sh FOLDER PROGRAM ...
# FOLDER/rankK leads to the namespace of rank K (bench/wan/run.py makes it); started by an mpiexec or srun.
set -euo pipefail
rank="${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${SLURM_PROCID:-}}}}"
if [ -z "$rank" ]; then
    echo "enter.sh: no launcher says which rank this is (PMI_RANK, OMPI_COMM_WORLD_RANK, ..); start it under mpiexec" >&2
    exit 2
fi
folder="$1"
shift
# UCX finds its devices in /sys, which shows the namespace that it was mounted in: mount it anew, for this rank alone.
exec nsenter --net="$folder/rank$rank" -- unshare --mount -- \
    sh -c 'mount -t sysfs none /sys && exec "$@"' sh "$@"
