# Sourced by scripts/test and scripts/quickstart, which run from the repository's root.

# The interpreter: $PYTHON if set, else python3.11 (what nvfp4prep is tested on), else python3.
find_python() {
    local python=${PYTHON:-}
    [ -n "$python" ] || python=$(command -v python3.11 || command -v python3 || true)
    [ -n "$python" ] || { echo "no python3.11 or python3 found" >&2; return 1; }
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || {
        echo "$python is $("$python" -V 2>&1): Python 3.11, 3.12 or 3.13 is needed; set PYTHON" >&2
        return 1
    }
    printf '%s\n' "$python"
}

# ensure_venv DIR SPEC: a virtual environment DIR with SPEC (".", ".[dev]") installed in editable mode under
# constraints.txt. Installs again only when what it depends on has changed.
#
# On Linux x86_64, PyPI's torch is a CUDA build of several GB. A CPU build suffices, and satisfies the same pin:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu scripts/test
# PIP_INDEX_URL names a mirror of PyPI, should you need one.
ensure_venv() {
    local dir=$1 spec=$2 python stamp quiet=()
    python=$(find_python)
    stamp=$({ printf '%s\n' "$PWD" "$spec" "$("$python" -VV)"; cat pyproject.toml constraints.txt nvfp4prep/__init__.py; } \
        | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    if [ -x "$dir/bin/python" ] && [ "$(cat "$dir/.nvfp4prep-stamp" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    if [ -n "$(ls -A "$dir" 2>/dev/null)" ] && [ ! -f "$dir/pyvenv.cfg" ]; then
        echo "$dir is not empty and not a virtual environment: leaving it alone" >&2
        return 1
    fi
    rm -f "$dir/.nvfp4prep-stamp"
    echo "installing $spec into $dir with $("$python" -V)"
    "$python" -m venv "$dir"
    [ -t 1 ] || quiet=(-qq) # a log needs errors only; on a terminal pip shows its progress
    "$dir/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check -c constraints.txt -e "$spec"
    printf '%s\n' "$stamp" >"$dir/.nvfp4prep-stamp"
}
