"""Which image a command gets."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.profiles.detection import WRAPPERS, detect
from k8e.profiles.languages import DEFAULT_IMAGE, IMAGES, LANGUAGES

# The table of the seed, as it stands there.
SEED = {
    "python:3.12-alpine": "python python3 pip poetry uv pytest",
    "node:22-alpine": "node npm npx yarn pnpm bun",
    "rust:1.85-alpine": "cargo rustc",
    "golang:1.23-alpine": "go gofmt",
    "ruby:3.3-alpine": "ruby bundle rails rake",
    "eclipse-temurin:21-alpine": "java javac mvn gradle",
    "php:8.3-alpine": "php composer",
    "gcc:14-bookworm": "gcc g++ make cmake",
    "mcr.microsoft.com/dotnet/sdk:8.0": "dotnet",
    "hashicorp/terraform:1.10": "terraform",
    "nickblah/lua:5.4-alpine": "lua luajit",
    "alpine:3.20": "bash sh zsh",
}


@pytest.mark.parametrize(("image", "commands"), SEED.items())
def test_the_table_of_the_seed(image: str, commands: str) -> None:
    for command in commands.split():
        found = detect([command, "x"])
        assert (found.image, found.by) == (image, "command"), command


def test_a_name_belongs_to_one_language() -> None:
    for kind in ("commands", "files", "endings"):
        names = Counter(name for language in LANGUAGES for name in getattr(language, kind))
        assert [name for name, count in names.items() if count > 1] == []
    assert Counter(language.name for language in LANGUAGES).most_common(1)[0][1] == 1


@pytest.mark.parametrize(
    ("line", "image"),
    [
        ("pip3 install x", "python:3.12-alpine"),
        ("python3.12 -c 1", "python:3.12-alpine"),
        ("/usr/bin/python3 -c 1", "python:3.12-alpine"),
        ("gcc-14 -v", "gcc:14-bookworm"),
        ("g++-13 -v", "gcc:14-bookworm"),
        ("ruby3.3 x.rb", "ruby:3.3-alpine"),
        ("./gradlew test", "eclipse-temurin:21-alpine"),
        ("mix test", "elixir:1.17-alpine"),
        ("sh -c 'npm install && npm test'", "node:22-alpine"),
        ("bash -ec 'cd app; FOO=1 go test ./...'", "golang:1.23-alpine"),
        ("sh -c 'if true; then cargo build; fi'", "rust:1.85-alpine"),
        ("sh -c 'cat x | python3'", "python:3.12-alpine"),
        ("sh -c 'echo \"npm\"'", "alpine:3.20"),
        ("sh -c 'echo hello\nnode x.js'", "node:22-alpine"),
        ("sh -c \"sh -c 'php -v'\"", "php:8.3-alpine"),
        ('sh -c "it isn\'t closed"', "alpine:3.20"),
        ("sh script.sh", "alpine:3.20"),
        ("env -i A=b CI=1 npm test", "node:22-alpine"),
        ("env -u HOME python3 x.py", "python:3.12-alpine"),
        ("time -f %e make", "gcc:14-bookworm"),
        ("timeout -k 5 30 go test", "golang:1.23-alpine"),
        ("nice -n 5 nohup cargo test", "rust:1.85-alpine"),
        ("./tool.py --fast", "python:3.12-alpine"),
        ("bin/serve.mjs", "node:22-alpine"),
        ("./deploy", "alpine:3.20"),
        ("curl example.com", "alpine:3.20"),
        ("env", "alpine:3.20"),
        ("true", "alpine:3.20"),
    ],
)
def test_commands_as_they_are_typed(line: str, image: str) -> None:
    assert detect(shlex.split(line)).image == image


@pytest.mark.parametrize(
    ("names", "image"),
    [
        (["requirements.txt"], "python:3.12-alpine"),
        (["package.json", "Makefile"], "node:22-alpine"),
        (["Cargo.toml"], "rust:1.85-alpine"),
        (["go.mod"], "golang:1.23-alpine"),
        (["Gemfile"], "ruby:3.3-alpine"),
        (["build.gradle.kts"], "eclipse-temurin:21-alpine"),
        (["composer.json"], "php:8.3-alpine"),
        (["CMakeLists.txt"], "gcc:14-bookworm"),
        (["App.csproj"], "mcr.microsoft.com/dotnet/sdk:8.0"),
        (["main.tf"], "hashicorp/terraform:1.10"),
        (["mix.exs"], "elixir:1.17-alpine"),
        (["README.md"], "alpine:3.20"),
    ],
)
def test_the_folder_decides_where_the_command_does_not(names: list[str], image: str) -> None:
    assert detect(["true"], names).image == image
    assert detect(["lua", "x.lua"], names).image == "nickblah/lua:5.4-alpine"


def test_the_first_line_of_a_script_decides_as_it_does_for_the_kernel() -> None:
    found = detect(["./tool"], ["go.mod"], lambda path: b"#!/usr/bin/env python3\nimport os\n")
    assert (found.language, found.needs) == ("python", ("./tool",))
    assert detect(["./tool"], [], lambda path: b"\x7fELF").by == "default"
    assert detect(["./tool"], [], lambda path: b"#!").by == "default"


def test_what_must_be_there_is_known() -> None:
    assert detect(["sh", "-c", "npm test"]).needs == ("sh", "npm")
    assert detect(["npm", "test"]).needs == ("npm",)
    assert detect(["true"], ["go.mod"]).needs == ("true",)


words = st.text(max_size=12) | st.sampled_from([*WRAPPERS, "sh", "bash", "-c", "--", "-n", "npm", "A=b", "&&", "'"])


@given(st.lists(words, max_size=8), st.lists(st.text(max_size=10), max_size=4), st.binary(max_size=40))
def test_no_command_is_too_odd(command: list[str], names: list[str], start: bytes) -> None:
    found = detect(command, names, lambda path: start)
    assert found.image in IMAGES
    assert (found.by == "default") <= (found.image == DEFAULT_IMAGE)
    assert set(found.needs[:1]) <= {command[0] if command else ""}


def test_the_table_in_the_documentation_is_this_one() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "agentkernel.md").read_text()
    for language in LANGUAGES:
        assert f"| {language.title} | `{language.image}` |" in page
