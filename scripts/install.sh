#!/usr/bin/env bash
# Make .venv hold exactly what requirements/cpu.lock says, PyTorch and this checkout. Run it as often as you like.
# - .venv/forebay-complete is written last; without it the environment is not trusted and is built anew.
# - A changed lock or pyproject.toml updates the environment; another Python, or a moved checkout, rebuilds it.
# - pip's own settings (index, proxy, find-links, cache, time-outs) hold. Exit code 2: the machine lacks something.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
complete=$venv/forebay-complete
partial=$venv/forebay-partial
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

fail() {
  echo "forebay: $*" >&2
  exit 2
}

# Prints the version of a Python that will do; otherwise a reason on stderr.
probe() {
  "$1" -I -c '
import sys
version = ".".join(map(str, sys.version_info[:3]))
if sys.version_info < (3, 11):
    sys.exit("is Python %s, and 3.11 or newer is needed" % version)
try:
    import ensurepip, venv
except ImportError:
    sys.exit("is Python %s without the venv module (on Debian: apt install python3-venv)" % version)
print(version)'
}

# Sets `python` and `version`: $PYTHON if given, else the first on PATH that will do.
choose_python() {
  local candidates=(python3.11 python3.12 python3.13 python3) name reason reasons=""
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for name in "${candidates[@]}"; do
    if ! command -v "$name" > /dev/null; then
      reasons+="; $name is not found"
    elif version=$(probe "$name" 2> /dev/null); then
      python=$name
      return
    else
      reason=$(probe "$name" 2>&1 > /dev/null | head -n 1) || true
      reasons+="; $name ${reason:-does not start}"
    fi
  done
  fail "no fitting Python${reasons/;/:}. Install Python 3.11 or newer, or name one: make install PYTHON=/path/to/python"
}

# Whether .venv is complete, was made here and still has the Python that it was made with (which $PYTHON, if given, is too).
current() {
  [ -e "$complete" ] && version=$(probe "$venv/bin/python" 2> /dev/null) &&
    [ "$(head -n 1 "$complete")" = "python $version at $PWD" ] &&
    { [ -z "${PYTHON:-}" ] || [ "$(probe "$PYTHON" 2> /dev/null)" = "$version" ]; }
}

digest() {
  cat requirements/cpu.lock pyproject.toml scripts/install.sh scripts/install_torch.py |
    "$python" -I -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

make_venv() {
  if [ -e "$venv" ] && [ ! -e "$partial" ] && [ ! -e "$complete" ] && [ -n "$(ls -A "$venv")" ]; then
    fail "$PWD/$venv exists and was not made by 'make install': move it away or delete it"
  fi
  rm -rf "$venv"
  mkdir "$venv"
  touch "$partial"
  "$python" -m venv "$venv" || fail "$python could not make a virtual environment in $PWD/$venv (see above)"
}

# One at a time: a pip that outlived its interrupted set-up still holds this lock (on the checkout's folder, which leaves
# no file behind), and must not write into the environment that the next one builds.
if command -v flock > /dev/null; then
  exec 9< .
  if ! flock --nonblock 9; then
    echo "forebay: another 'make install' is at work here; waiting up to 15 minutes for it"
    flock --timeout 900 9 || fail "another 'make install' is still at work in $PWD: end it first"
  fi
fi

if current; then
  python=$venv/bin/python
  if [ "$(tail -n 1 "$complete")" = "$(digest)" ]; then
    exit 0
  fi
  echo "forebay: the lock or pyproject.toml has changed, updating $venv"
  mv "$complete" "$partial"
else
  choose_python
  echo "forebay: making $venv with $python ($version)"
  make_venv
fi

started=$SECONDS
echo "forebay: installing $(grep -c '==' requirements/cpu.lock) packages of requirements/cpu.lock (some minutes the first time)"
# pip itself first: one that can look at a package's metadata without fetching the package (scripts/install_torch.py looks).
"$venv/bin/python" -m pip install -qq "$(grep '^pip==' requirements/cpu.lock)" || fail "pip could not update itself (see above)"
"$venv/bin/python" -m pip install -qq --no-deps --requirement requirements/cpu.lock ||
  fail "pip could not install requirements/cpu.lock (see above); put that right and run 'make install' again"
"$venv/bin/python" scripts/install_torch.py
"$venv/bin/python" -m pip install -qq --no-deps --no-build-isolation --editable . ||
  fail "pip could not install this checkout (see above)"
printf 'python %s at %s\n%s\n' "$version" "$PWD" "$(digest)" > "$partial"
mv "$partial" "$complete"
echo "forebay: ready in $((SECONDS - started)) s; try: make quickstart"
