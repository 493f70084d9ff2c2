#!/usr/bin/env bash
# Make or update .venv with this project installed in it (editable).   scripts/setup_env.sh [dev]
# Called by the Makefile. Versions come from constraints.txt; PYTHON chooses the interpreter (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null # the prompt piped into `make chat` is not for us

python=${PYTHON:-python3}
venv=.venv
say() { printf '\n== %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2 && exit 2; }

check_machine() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        die "Python 3.11 or newer is needed as '$python' (PYTHON=/path/to/python3 make … names another)."
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "Python's venv module is missing; on Debian and Ubuntu: sudo apt install python3-venv"
    command -v c++ >/dev/null || command -v g++ >/dev/null ||
        die "A C++ compiler is missing; on Debian and Ubuntu: sudo apt install build-essential"
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        die "Python's headers are missing; on Debian and Ubuntu: sudo apt install python3-dev"
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

has_nvidia_gpu() {
    [ -e /proc/driver/nvidia ] || [ -e /dev/dxg ] || nvidia-smi >/dev/null 2>&1
}

# On Linux, torch's default wheel brings gigabytes of CUDA. Without an NVIDIA GPU we want the CPU build: where pip
# already knows one (a mirror, a wheel directory) take it there, else from PyTorch's index, else the default after all.
install_torch() {
    local torch
    torch="torch==$(pinned torch)"
    if [ "$(uname -s)" != Linux ] || has_nvidia_gpu; then
        pip install "$torch"
    else
        pip install "$torch+cpu" 2>/dev/null ||
            pip install "$torch+cpu" --extra-index-url https://download.pytorch.org/whl/cpu ||
            pip install "$torch"
    fi
}

# Is this version (of whatever build) installed?
installed() {
    "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('$1').split('+')[0] != '$2')" 2>/dev/null
}

# On CPUs with AMX, llama.cpp dies of an illegal instruction: compilers take the stores of its tile configuration for
# dead and drop them (llama.cpp's pull request 26954). Without AMX it uses AVX-512.
has_amx() { grep -qw amx_int8 /proc/cpuinfo 2>/dev/null; }

built_with_amx() {
    "$venv/bin/python" -c 'import llama_cpp as l, sys; sys.exit(b"AMX_INT8 = 1" not in l.llama_print_system_info())'
}

install_llama() {
    local llama flags
    llama="llama-cpp-python==$(pinned llama_cpp_python)"
    if has_amx; then
        flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
        export CFLAGS="${CFLAGS:-} $flags" CXXFLAGS="${CXXFLAGS:-} $flags"
    fi
    pip install "$llama"
    if has_amx && built_with_amx; then # it was there, or pip had kept a wheel
        pip install --no-cache-dir --no-deps --force-reinstall "$llama"
    fi
}

pinned() { sed -n "s/^$1==//p" constraints.txt; }

install_project() { pip install -e "$1" | { grep -v '^Requirement already satisfied' || true; }; }

check_machine
export PIP_CONSTRAINT=constraints.txt # by environment, because it then holds for the tools of builds too
if [ ! -x "$venv/bin/python" ]; then
    say "Creating $venv"
    "$python" -m venv "$venv"
fi
if ! installed torch "$(pinned torch)"; then
    say "Installing PyTorch"
    install_torch
fi
if ! installed llama-cpp-python "$(pinned llama_cpp_python)" || { has_amx && built_with_amx; }; then
    say "Compiling llama.cpp: 5 to 15 minutes, once"
    (install_llama)
fi
if [ "${1:-}" = dev ]; then
    say "Installing this project and its development tools"
    install_project '.[dev]'
else
    say "Installing this project"
    install_project .
fi
