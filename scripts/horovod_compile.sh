#!/usr/bin/env bash
# Downloads, patches and compiles Horovod: the part of build_horovod.sh that works in the build folder; sourced by it.
#
# It reads the caller's work, log, python, fact, jobs, cmake, gpu, nccl_home, cuda_home and key, and sets wheel.
# shellcheck disable=SC2154,SC2034 # those variables are the caller's

fetch_tools() {
    local -a tools=('setuptools>=65,<81' wheel packaging)
    [[ $cmake == wheel ]] && tools+=('cmake>=3.18,<4')
    # The environment's constraints are for the environment: these tools live in the build folder only.
    PIP_CONSTRAINT='' "$python" -m pip install -qq --disable-pip-version-check --target "$work/tools" "${tools[@]}" \
        >>"$log" 2>&1 || fail_with_log "pip could not install ${tools[*]}"
}

fetch_source() {
    printf 'horovod==%s --hash=sha256:%s\n' "$HOROVOD_VERSION" "$HOROVOD_SHA256" >"$work/source.txt"
    PIP_CONSTRAINT='' PYTHONPATH=$work/tools "$python" -m pip download -qq --disable-pip-version-check --no-deps \
        --no-binary horovod --no-build-isolation --dest "$work" -r "$work/source.txt" >>"$log" 2>&1 ||
        fail_with_log "pip could not download the source of Horovod $HOROVOD_VERSION"
    tar -xzf "$work/horovod-$HOROVOD_VERSION.tar.gz" -C "$work"
    tree=$work/horovod-$HOROVOD_VERSION
}

# What the source release needs for the TensorFlow of today; each change is verified, so that none is lost silently.
patch_source() {
    local list=$tree/horovod/tensorflow/CMakeLists.txt
    if at_least "${fact[tensorflow]}" 2.16; then
        # Its ops for XLA include headers of XLA that the wheels ship no longer; hvdx does not use them.
        sed -i '/xla_mpi_ops\.cc/d' "$list"
        ! grep -q 'xla_mpi_ops' "$list" || fail "cannot take xla_mpi_ops.cc out of $list"
    fi
    patch_gpu_streams
    # TensorFlow is C++17 and links a second copy of Gloo built as C++17: the first one need not be built.
    sed -i 's|add_subdirectory(third_party/gloo)|add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)|' "$tree/CMakeLists.txt"
    grep -q 'third_party/gloo EXCLUDE_FROM_ALL' "$tree/CMakeLists.txt" || fail "cannot change $tree/CMakeLists.txt"
    # The stamp becomes a file of the package, so that it goes when Horovod is uninstalled. Without setup_requires,
    # setuptools does not fetch packages on its own.
    sed -i "s|packages=find_packages(),|packages=find_packages(), package_data={'horovod': ['hvdx_build.txt']},|
        s|setup_requires=require_list if is_build_action() else \[\],|setup_requires=[],|" "$tree/setup.py"
    [[ $(grep -c 'hvdx_build.txt\|setup_requires=\[\]' "$tree/setup.py") == 2 ]] || fail "cannot change $tree/setup.py"
    printf '%s\n' "$key" >"$tree/horovod/hvdx_build.txt"
}

# Horovod declares a function of TensorFlow's library that gives the CUDA stream behind a stream of TensorFlow. Newer
# libraries have it no longer (2.21 has not), which shows only when the result is loaded; the stream itself tells it.
patch_gpu_streams() {
    local file=$tree/horovod/tensorflow/mpi_ops.cc anchor='#endif // TENSORFLOW_VERSION >= 2011000000'
    local body='{ return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream); }'
    at_least "${fact[tensorflow]}" 2.16 || return 0
    sed -i "s|^$anchor\$|&\nnamespace stream_executor::gpu {\nGpuStreamHandle AsGpuStreamValue(Stream* stream) $body\n}|" "$file"
    [[ $(grep -cF "$body" "$file") == 1 ]] || fail "cannot change $file"
}

# Horovod's setup.py calls $HOROVOD_CMAKE with fixed arguments: this wrapper adds ours.
write_cmake_wrapper() {
    local program=cmake rpath="${fact[mpi_rpath]};\$ORIGIN/../../tensorflow"
    # Gloo asks for MPI by its C compiler; without it the library would lack symbols, and say so only when loaded.
    local -a options=(-DMPI_CXX_COMPILER="${fact[mpicxx]}" -DMPI_C_COMPILER="${fact[mpicxx]%mpicxx}mpicc"
        -DCMAKE_POLICY_VERSION_MINIMUM=3.5 '-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O3 -DNDEBUG' -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON)
    [[ $cmake == wheel ]] && program=$work/tools/bin/cmake
    if [[ $gpu == none ]]; then
        # An nvcc on PATH would be tried although nothing here is for a GPU, and an unsuitable one stops the build.
        options+=(-DCMAKE_CUDA_COMPILER=NOTFOUND -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=TRUE)
    else
        options+=("-DCUDAToolkit_ROOT=$cuda_home")
    fi
    if [[ $gpu != none && $nccl_home == "${fact[site_packages]}"/* ]]; then
        rpath+=";\$ORIGIN/../../nvidia/nccl/lib"
    fi
    options+=("-DCMAKE_INSTALL_RPATH=$rpath")
    {
        printf '#!/bin/sh\nPYTHONPATH=%q; export PYTHONPATH\n' "$work/tools"
        # shellcheck disable=SC2016 # "$1" and "$@" are the wrapper's own
        printf 'case "$1" in --build) exec %q "$@" ;; esac\nexec %q "$@"' "$program" "$program"
        printf ' %q' "${options[@]}"
        printf '\n'
    } >"$work/cmake.sh"
    chmod +x "$work/cmake.sh"
}

gpu_settings() {
    local lib
    [[ $gpu != none ]] || { echo HOROVOD_WITHOUT_NVTX=1 && return; }
    echo "HOROVOD_GPU_OPERATIONS=NCCL"
    echo "HOROVOD_CUDA_HOME=$cuda_home"
    echo "HOROVOD_NCCL_HOME=$nccl_home"
    echo "HOROVOD_NCCL_INCLUDE=$nccl_home/include"
    # NVIDIA's wheel has libnccl.so.2 without the plain name by which a linker looks for it.
    lib=$(compgen -G "$nccl_home/lib/libnccl.so.*" | head -n 1) || lib=
    if [[ -n $lib && ! -e $nccl_home/lib/libnccl.so ]]; then
        mkdir -p "$work/nccl"
        ln -sf "$lib" "$work/nccl/libnccl.so"
        printf 'HOROVOD_NCCL_LINK=SHARED\nHOROVOD_NCCL_LIB=%s\n' "$work/nccl"
    fi
}

compile() {
    local -a gpu_env
    fetch_tools
    fetch_source
    patch_source
    write_cmake_wrapper
    mapfile -t gpu_env < <(gpu_settings)
    say "compiling Horovod $HOROVOD_VERSION with $jobs job(s); some minutes"
    (
        cd "$tree"
        # MAKEFLAGS of a make around this script names a job server that is not ours.
        env PYTHONPATH="$work/tools" TF_CPP_MIN_LOG_LEVEL=3 MAKEFLAGS="-j$jobs" HOROVOD_CMAKE="$work/cmake.sh" \
            HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
            HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_BUILD_ARCH_FLAGS="${fact[cpu_flags]}" "${gpu_env[@]}" \
            "$python" setup.py bdist_wheel --dist-dir "$work/wheel" </dev/null >>"$log" 2>&1
    ) || fail_with_log "Horovod does not compile"
    wheel=$(compgen -G "$work/wheel/horovod-*.whl") || fail_with_log "the build made no wheel"
}
