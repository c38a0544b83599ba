# Sourced by quickstart.sh and test.sh: `make_venv EXTRAS` creates .venv and installs into it.
# Does nothing when the same extras are in place and setup.py has not changed since.
# HPCVFL_PYTHON names the interpreter to start from (default python3; 3.10 or newer).

make_venv() {
    local extras="$1" python="${HPCVFL_PYTHON:-python3}" stamp
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "hpcvfl needs Python 3.10 or newer; set HPCVFL_PYTHON to one" >&2
        return 1
    fi
    stamp="$extras $(cksum <setup.py)"
    if [ "$(cat .venv/installed 2>/dev/null)" = "$stamp" ]; then
        return 0
    fi
    echo "installing into .venv (torch is large: minutes on the first run)" >&2
    if [ ! -x .venv/bin/python ] && ! "$python" -m venv .venv; then
        echo "cannot create .venv; on Debian: apt-get install python3-venv" >&2
        return 1
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
    echo "$stamp" >.venv/installed
}
