#!/usr/bin/env bash
# Run the CPU core's stress program under the address and undefined-behaviour sanitizers, then the thread sanitizer.
# CXX names the compiler. The exit status is that of the first run that fails.
set -euo pipefail
cd "$(dirname "$0")/.."

CXX=${CXX:-g++}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

flags_of() {
    [ "$(uname -m)" = x86_64 ] || return 0
    case $1 in
        *kernels_avx512bf16.cpp) echo -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mfma ;;
        *kernels_avx512.cpp) echo -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma ;;
        *kernels_avx2.cpp) echo -mavx2 -mfma ;;
    esac
}

run() {
    local sanitizers=$1
    for source in kernels/cpu/*.cpp tests/kernels/cpu/stress.cpp; do
        # shellcheck disable=SC2046
        "$CXX" -std=c++17 -O1 -g -fopenmp -fno-omit-frame-pointer "-fsanitize=$sanitizers" -fno-sanitize-recover=all \
            $(flags_of "$source") -c "$source" -o "$out/$(basename "$source").o"
    done
    "$CXX" -fopenmp "-fsanitize=$sanitizers" "$out"/*.o -o "$out/stress"
    echo "== $sanitizers"
    TSAN_OPTIONS=halt_on_error=1 "$out/stress"
}

run address,undefined
run thread
