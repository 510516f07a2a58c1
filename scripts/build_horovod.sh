#!/usr/bin/env bash
# Builds Horovod 0.28.1 from its source release against the TensorFlow and the MPI of one Python environment.
#
# The result is checked with an allreduce of two ranks, by MPI and by Gloo. Nothing is done when that very build is
# already there; a build is kept in a cache, so that the next environment of the same kind does not compile.
set -euo pipefail

readonly HOROVOD_VERSION=0.28.1
readonly HOROVOD_SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
readonly MINIMUM_GCC=8
readonly MINIMUM_CMAKE=3.13
readonly CHECK_SECONDS=180
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE

usage() {
    cat <<'EOF'
usage: scripts/build_horovod.sh [--python PYTHON] [--jobs N] [--no-cache] [--check-only | --dry-run]

Builds Horovod 0.28.1 (TensorFlow only; MPI, Gloo, and NCCL where CUDA is there) and installs it.

  --python PYTHON  the environment to build for and install into (default: `python` of the active environment)
  --jobs N         compile N files at a time (default: one for each core)
  --no-cache       compile even when the cache has this build, and do not keep the result
  --check-only     build nothing; say whether this very build is installed and works (exit code 0 or 1)
  --dry-run        say what would be done and do nothing
EOF
}

say() { printf 'build_horovod: %s\n' "$*"; }
fail() {
    printf 'build_horovod: %s\n' "$*" >&2
    exit 1
}

parse_options() {
    python=python
    jobs=$(nproc 2>/dev/null || echo 2)
    use_cache=yes
    mode=build
    while (($#)); do
        case $1 in
            --python | --jobs)
                (($# > 1)) || fail "$1 needs a value; see --help"
                if [[ $1 == --python ]]; then python=$2; else jobs=$2; fi
                shift
                ;;
            --no-cache) use_cache=no ;;
            --check-only) mode=check ;;
            --dry-run) mode=dry-run ;;
            -h | --help)
                usage
                exit 0
                ;;
            *) fail "unknown option $1; see --help" ;;
        esac
        shift
    done
    [[ $jobs =~ ^[1-9][0-9]*$ ]] || fail "--jobs needs a number above 0, not '$jobs'"
    command -v "$python" >/dev/null || fail "there is no Python at '$python': activate an environment or use --python"
    python=$(command -v "$python")
    # The build runs in another folder. Links stay as they are: an environment's Python is known by its own path.
    [[ $python == /* ]] || python=$PWD/$python
}

# Reads what the environment's own Python says of itself into the array `fact`.
probe() {
    local output name value
    output=$("$python" "$HERE/horovod_probe.py") || fail "cannot build for $python; the reason is in the line above"
    declare -gA fact=()
    while IFS='=' read -r name value; do fact[$name]=$value; done <<<"$output"
    [[ -n ${fact[tensorflow]:-} && -n ${fact[mpi]:-} ]] || fail "$python answered the probe with: $output"
}

# Returns 0 when version $1 is at least $2.
at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

choose_compiler() {
    local version
    CXX=${CXX:-g++}
    version=$("$CXX" -dumpfullversion -dumpversion 2>/dev/null | head -n 1) || version=none
    if [[ -z $version || $version == none ]] || ! at_least "$version" "$MINIMUM_GCC"; then
        fail "a C++17 compiler is needed, g++ $MINIMUM_GCC or newer, and '$CXX' is version ${version:-none}:" \
            "run scripts/install_gcc8.sh, or name another one with CXX="
    fi
    command -v make >/dev/null || fail "make is needed to build Horovod: install the package 'make'"
    compiler="$CXX $version"
    export CXX
}

choose_cmake() {
    local version
    version=$(cmake --version 2>/dev/null | sed -n 's/^cmake version \([0-9.]*\).*/\1/p') || version=
    if [[ -n $version ]] && at_least "$version" "$MINIMUM_CMAKE"; then
        cmake="$(command -v cmake) $version"
    else
        cmake=wheel
    fi
}

# Prints the CUDA toolkit to build with: the folder that has both the compiler and the headers.
find_cuda() {
    local home
    for home in "${HOROVOD_CUDA_HOME:-}" "${CUDA_HOME:-}" /usr/local/cuda "$(dirname "$(command -v nvcc || echo /none/bin)")/.."; do
        if [[ -e $home/include/cuda_runtime.h ]] && "$home/bin/nvcc" --version >/dev/null 2>&1; then
            (cd "$home" && pwd)
            return
        fi
    done
    return 1
}

has_nccl_library() {
    compgen -G "$1/lib*/libnccl*" >/dev/null || compgen -G "$1/lib/*-linux-gnu/libnccl*" >/dev/null
}

# NCCL is built in when TensorFlow has CUDA, a CUDA toolkit is there, and header and library of NCCL are found.
choose_gpu() {
    local home
    gpu=none nccl_home='' cuda_home=''
    if [[ ${fact[tensorflow_cuda]} == none ]]; then
        gpu_reason="this TensorFlow has no CUDA"
        return
    fi
    if ! cuda_home=$(find_cuda); then
        gpu_reason="no CUDA toolkit; HOROVOD_CUDA_HOME names the folder above bin/nvcc and include/"
        return
    fi
    for home in "${HOROVOD_NCCL_HOME:-}" "$cuda_home" /usr/local /usr "${fact[site_packages]}/nvidia/nccl"; do
        if [[ -e $home/include/nccl.h ]] && has_nccl_library "$home"; then
            nccl_home=$home
            gpu="NCCL $(sed -n 's/^#define NCCL_VERSION_CODE *\([0-9]*\).*/\1/p' "$home/include/nccl.h")"
            gpu+=", CUDA $("$cuda_home/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
            gpu_reason="NCCL of $home, CUDA of $cuda_home"
            return
        fi
    done
    gpu_reason="no nccl.h with its library; HOROVOD_NCCL_HOME names the folder above include/ and lib/"
}

# Everything on which the binary depends, one line each: the stamp in the package and the key of the cache.
build_key() {
    cat <<EOF
horovod=$HOROVOD_VERSION
tensorflow=${fact[tensorflow]}
tensorflow_flags=${fact[tensorflow_flags]}
tensorflow_cuda=${fact[tensorflow_cuda]}
python_abi=${fact[python_abi]}
libc=${fact[libc]}
mpi=${fact[mpi]}
mpi_rpath=${fact[mpi_rpath]}
gpu=$gpu
cpu_flags=${fact[cpu_flags]}
cxxflags=${CXXFLAGS:-}
script=$(cat "$HERE/build_horovod.sh" "$HERE/horovod_compile.sh" "$HERE/horovod_probe.py" | sha256sum | cut -c 1-16)
EOF
}

installed_key() { cat "${fact[site_packages]}/horovod/hvdx_build.txt" 2>/dev/null || true; }

imports() {
    TF_CPP_MIN_LOG_LEVEL=3 "$python" -c "
import horovod.tensorflow as hvd
assert hvd.mpi_built() and hvd.gloo_built()" >>"$log" 2>&1
}

# Two ranks by MPI, then two by Gloo; what they print goes to the log.
check_ranks() {
    local -a launch
    case ${fact[mpi]} in
        openmpi*) launch=("${fact[mpirun]}" --allow-run-as-root --map-by :OVERSUBSCRIBE --bind-to none -np 2) ;;
        *) launch=("${fact[mpirun]}" -n 2) ;;
    esac
    say "checking an allreduce of two ranks by MPI and by Gloo"
    if ! timeout "$CHECK_SECONDS" "${launch[@]}" "$python" "$HERE/horovod_check.py" mpi </dev/null >>"$log" 2>&1; then
        say "the check with two ranks by MPI failed" >&2
        return 1
    fi
    if ! timeout "$CHECK_SECONDS" "$python" -m horovod.runner.launch --gloo -np 2 -H localhost:2 \
        "$python" "$HERE/horovod_check.py" gloo </dev/null >>"$log" 2>&1; then
        say "the check with two ranks by Gloo failed" >&2
        return 1
    fi
}

# Prints the end of the log before the reason, so that the reason is what is read last; a compiler's error may be far above the end.
fail_with_log() {
    tail -n 40 "$log" >&2
    grep -n -m 5 -E '(^| )(CMake Error|fatal error|error:)' "$log" >&2 || true
    fail "$* (the lines above end the log $log)"
}

# shellcheck source=scripts/horovod_compile.sh
source "$HERE/horovod_compile.sh"

install_wheel() {
    "$python" -m pip install -qq --disable-pip-version-check cloudpickle psutil pyyaml packaging >>"$log" 2>&1 &&
        "$python" -m pip install -qq --disable-pip-version-check --no-deps --force-reinstall "$1" >>"$log" 2>&1
}

# The wheel is put in the cache only after it has passed the check, and in one step.
keep_in_cache() {
    local beside
    beside=$(mktemp -d "$cache/.new.XXXXXX") || return 0
    chmod 755 "$beside"
    cp "$wheel" "$beside/" && printf '%s\n' "$key" >"$beside/key.txt"
    rm -rf "$cached"
    mv "$beside" "$cached" || rm -rf "$beside"
}

install_from_cache() {
    wheel=$(compgen -G "$cached/horovod-*.whl" | head -n 1) || wheel=
    [[ $use_cache == yes && -n $wheel && $(cat "$cached/key.txt" 2>/dev/null) == "$key" ]] || return 1
    say "installing the build kept in $cached"
    if install_wheel "$wheel" && check_ranks; then return 0; fi
    say "the kept build does not work and is removed; compiling" >&2
    rm -rf "$cached"
    return 1
}

describe() {
    say "Horovod $HOROVOD_VERSION for TensorFlow ${fact[tensorflow]} in ${fact[prefix]}"
    say "MPI: ${fact[mpi]} (${fact[mpicxx]}); Gloo: yes; GPU: $gpu ($gpu_reason)"
}

dry_run() {
    choose_compiler
    choose_cmake
    say "compiler: $compiler; cmake: $cmake; jobs: $jobs"
    at_least "${fact[tensorflow]}" 2.16 && say "TensorFlow 2.16 or newer: xla_mpi_ops.cc is left out"
    if [[ $(installed_key) == "$key" ]]; then
        say "nothing to do if it imports: this very build is installed"
    elif [[ $use_cache == yes && $(cat "$cached/key.txt" 2>/dev/null) == "$key" ]]; then
        say "would install the build kept in $cached"
    else
        say "would compile, install, and check with two ranks by MPI and by Gloo"
    fi
}

main() {
    parse_options "$@"
    probe
    choose_gpu
    key=$(build_key)
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/hvdx
    cached=$cache/horovod-$HOROVOD_VERSION-$(printf '%s' "$key" | sha256sum | cut -c 1-16)
    describe
    if [[ $mode == dry-run ]]; then
        dry_run
        return
    fi
    mkdir -p "$cache" || fail "cannot write to $cache: name another folder with XDG_CACHE_HOME"
    # One log for each environment: several may be built at the same time.
    log=$cache/build_horovod-$(printf '%s' "${fact[prefix]}" | sha256sum | cut -c 1-8).log
    : >"$log"
    if [[ $mode == check ]]; then
        [[ $(installed_key) == "$key" ]] || fail "this build is not installed in ${fact[prefix]}: run without --check-only"
        check_ranks || fail_with_log "the installed Horovod does not work"
        say "installed and working"
        return
    fi
    if [[ $(installed_key) == "$key" ]] && imports; then
        say "nothing to do: this very build is installed and imports"
        return
    fi
    if install_from_cache; then
        say "done: installed and checked"
        return
    fi
    choose_compiler
    choose_cmake
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    compile
    install_wheel "$wheel" || fail_with_log "pip could not install $wheel"
    check_ranks || fail_with_log "Horovod is compiled and installed but does not work"
    [[ $use_cache == no ]] || keep_in_cache
    say "done: compiled, installed and checked; log: $log"
}

main "$@"
