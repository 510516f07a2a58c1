#!/usr/bin/env bash
# Makes a C++17 compiler (gcc 8 or newer) available for building Horovod: see --help.
#
# Nothing is done where there is one. Otherwise the system's own package is installed, and the result is verified.
set -euo pipefail

readonly MINIMUM=8
readonly DEVTOOLSET=devtoolset-8

usage() {
    cat <<'EOF'
usage: scripts/install_gcc8.sh [--dry-run] [--root DIR]

Makes a C++17 compiler (gcc 8 or newer) available for building Horovod.

Says "nothing to do" where there is one. Otherwise installs, as root:
  CentOS, RHEL and their kin, release 7   the software collection devtoolset-8
  other systems                           the distribution's package, by apt-get, dnf or yum
and without root, in an active conda environment, conda's own compilers.

  --dry-run   say what would be run and run nothing
  --root DIR  look for etc/os-release and opt/rh below DIR instead of /
EOF
}

say() { printf 'install_gcc8: %s\n' "$*"; }
fail() {
    printf 'install_gcc8: %s\n' "$*" >&2
    exit 1
}

parse_options() {
    dry_run=no
    root=
    while (($#)); do
        case $1 in
            --dry-run) dry_run=yes ;;
            --root)
                (($# > 1)) || fail "--root needs a folder; see --help"
                root=${2%/}
                shift
                ;;
            -h | --help)
                usage
                exit 0
                ;;
            *) fail "unknown option $1; see --help" ;;
        esac
        shift
    done
}

# Prints the version of the compiler $1; fails where it is no working compiler.
version_of() { "$1" -dumpfullversion -dumpversion 2>/dev/null | head -n 1 | grep -E '^[0-9]+'; }

# Sets `found` to the first g++ that is new enough, and `found_version`; fails where there is none.
find_compiler() {
    local candidate
    hash -r
    for candidate in "${CXX:-}" g++ g++-{8..16} "${CONDA_PREFIX:-/nonexistent}/bin/x86_64-conda-linux-gnu-g++"; do
        [[ -n $candidate ]] || continue
        found_version=$(version_of "$candidate") || continue
        if ((${found_version%%.*} >= MINIMUM)); then
            found=$candidate
            return 0
        fi
    done
    return 1
}

devtoolset_compiler() { echo "$root/opt/rh/$DEVTOOLSET/root/usr/bin/g++"; }

# Tells how to use a compiler that a plain `g++` does not reach.
tell_how_to_use() {
    case $found in
        g++ | "${CXX:-}") ;;
        *) say "to build with it: CXX=$found scripts/build_horovod.sh" ;;
    esac
}

tell_how_to_enter() {
    say "enter it with 'scl enable $DEVTOOLSET bash', or for one command:"
    say "  scl enable $DEVTOOLSET scripts/build_horovod.sh"
}

read_system() {
    local file=$root/etc/os-release
    [[ -r $file ]] || fail "cannot tell which system this is: $file cannot be read; install g++ $MINIMUM or newer by hand"
    system=$(os_release ID)
    system_version=$(os_release VERSION_ID)
    system_name=$(os_release PRETTY_NAME)
    system_like=$(os_release ID_LIKE)
    system=${system:-unknown}
    system_name=${system_name:-$system}
}

# Prints the value of the name $1 in os-release, without its quotes.
os_release() { sed -n "s/^$1=[\"']\{0,1\}\([^\"']*\)[\"']\{0,1\}\$/\1/p" "$root/etc/os-release" | head -n 1; }

is_enterprise_linux_7() {
    [[ ${system_version%%.*} == 7 && " $system $system_like " =~ \ (centos|rhel|ol|scientific)\  ]]
}

has() { command -v "$1" >/dev/null; }

# Fills `plan` with the commands to run, each a line.
make_plan() {
    local installer=dnf package=g++
    plan=()
    if is_enterprise_linux_7; then
        has yum || fail "$system_name needs yum for the software collection $DEVTOOLSET, and yum is not on PATH"
        # CentOS gets its software collections from this package; elsewhere they are a repository to be switched on.
        [[ $system != centos ]] || plan+=("yum install -y centos-release-scl")
        plan+=("yum install -y $DEVTOOLSET-gcc-c++ make")
    elif has apt-get; then
        # Its plain g++ is version 7.
        [[ "$system $system_version" != "ubuntu 18.04" ]] || package=g++-8
        plan+=("apt-get update" "env DEBIAN_FRONTEND=noninteractive apt-get install -y $package make")
    elif has dnf || has yum; then
        has dnf || installer=yum
        plan+=("$installer install -y gcc-c++ make")
    elif has conda && [[ -n ${CONDA_PREFIX:-} ]]; then
        plan_conda
    else
        fail "no package manager that is known here (apt-get, dnf, yum, or conda in an active environment) on" \
            "$system_name: install g++ $MINIMUM or newer by hand"
    fi
}

plan_conda() { plan=("conda install -y -c conda-forge gxx_linux-64>=$MINIMUM make"); }

# The system's managers need root; conda does not, and is the way out for who is not root.
require_rights() {
    [[ ${plan[0]} != conda* ]] || return 0
    [[ $(id -u) == 0 ]] && return 0
    if has conda && [[ -n ${CONDA_PREFIX:-} ]]; then
        say "not root: using conda in $CONDA_PREFIX"
        plan_conda
        return 0
    fi
    [[ $dry_run == no ]] || {
        say "this needs root: without --dry-run it is refused here"
        return 0
    }
    fail "installing packages needs root: run it with sudo, or in an active conda environment; --dry-run shows the commands"
}

carry_out() {
    local command
    for command in "${plan[@]}"; do
        say "running: $command"
        # shellcheck disable=SC2086 # the words of a command
        $command </dev/null || fail "'$command' failed with exit code $?: see above; nothing after it was run"
    done
}

verify() {
    local version
    if is_enterprise_linux_7; then
        version=$(version_of "$(devtoolset_compiler)") ||
            fail "the packages are installed but $(devtoolset_compiler) does not run: see the output above"
        say "installed: g++ $version in the software collection $DEVTOOLSET"
        tell_how_to_enter
        return
    fi
    find_compiler || fail "the packages are installed, but no g++ $MINIMUM or newer is among them:" \
        "the g++ here is $(version_of g++ || echo absent); $system_name is too old, install a newer compiler by hand"
    say "installed: $found $found_version"
    tell_how_to_use
}

main() {
    local command version
    parse_options "$@"
    if find_compiler; then
        say "nothing to do: $found is version $found_version ($MINIMUM or newer is needed)"
        tell_how_to_use
        return
    fi
    read_system
    if is_enterprise_linux_7 && version=$(version_of "$(devtoolset_compiler)"); then
        say "nothing to do: the software collection $DEVTOOLSET is installed, its g++ is version $version"
        tell_how_to_enter
        return
    fi
    make_plan
    require_rights
    if [[ $dry_run == yes ]]; then
        for command in "${plan[@]}"; do say "would run: $command"; done
        return
    fi
    carry_out
    verify
}

main "$@"
