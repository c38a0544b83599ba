# Source this before mpiexec or srun: threads per rank, and MPI settings for more ranks than cores.
# HPCVFL_THREADS: intra-op threads of each rank (default 1); set `threads` of the run to the same number.
# What the caller has set already is kept. Prints what it sets to stderr.

_hpcvfl_said=""
_hpcvfl_set() {
    if [ -z "${!1+set}" ]; then
        export "$1=$2"
        _hpcvfl_said="$_hpcvfl_said $1=$2"
    fi
}

# One thread a rank: five ranks with a pool each for every core slow each other down.
for _hpcvfl_name in OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMBA_NUM_THREADS; do
    _hpcvfl_set "$_hpcvfl_name" "${HPCVFL_THREADS:-1}"
done

# Open MPI 4: allow more ranks than cores, do not pin several ranks to one core, yield inside MPI calls.
_hpcvfl_set OMPI_MCA_rmaps_base_oversubscribe 1
_hpcvfl_set OMPI_MCA_hwloc_base_binding_policy none
_hpcvfl_set OMPI_MCA_mpi_yield_when_idle 1
# Open MPI 5 reads the first two through PRRTE.
_hpcvfl_set PRTE_MCA_rmaps_default_mapping_policy :oversubscribe
_hpcvfl_set PRTE_MCA_hwloc_default_binding_policy none
# MPICH (Hydra): ranks are not pinned; that is its default, said here against a site's setting.
_hpcvfl_set HYDRA_BINDING none

echo "env.sh:${_hpcvfl_said:- nothing to set, all was set before}" >&2
unset -f _hpcvfl_set
unset _hpcvfl_name _hpcvfl_said
