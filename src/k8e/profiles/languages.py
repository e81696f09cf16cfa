"""A table of languages: their commands, their files, their image.

A command belongs to one language (tests check it). `*.x` is any file with that ending. When several languages match a
directory the first one counts; C comes late because many projects have a Makefile.
"""

from __future__ import annotations

from k8e.profiles.record import Record

DEFAULT_IMAGE = "alpine:3.20"


class Language(Record):
    name: str  # as `runtime` in agentkernel.toml spells it
    title: str
    image: str
    commands: tuple[str, ...]
    files: tuple[str, ...]
    endings: tuple[str, ...]  # of scripts that are started by their own name


LANGUAGES = (
    Language(
        "python",
        "Python",
        "python:3.12-alpine",
        (
            *("python", "pip", "pipx", "pipenv", "poetry", "uv", "uvx", "pdm", "hatch", "pytest", "tox", "nox"),
            *("ipython", "jupyter", "ruff", "black", "isort", "flake8", "pylint", "mypy", "pyright", "coverage"),
            *("flask", "django-admin", "uvicorn", "gunicorn", "celery", "virtualenv", "pydoc"),
        ),
        (
            *("pyproject.toml", "requirements.txt", "setup.py", "setup.cfg", "Pipfile", "poetry.lock", "uv.lock"),
            *("tox.ini", "manage.py"),
        ),
        (".py",),
    ),
    Language(
        "node",
        "Node.js",
        "node:22-alpine",
        (
            *("node", "nodejs", "npm", "npx", "yarn", "yarnpkg", "pnpm", "pnpx", "bun", "bunx", "corepack", "tsx"),
            *("ts-node", "tsc", "jest", "vitest", "mocha", "eslint", "prettier", "vite", "webpack", "next"),
        ),
        ("package.json", "package-lock.json", "yarn.lock", "pnpm-lock.yaml", "bun.lockb", "bun.lock", "tsconfig.json"),
        (".js", ".mjs", ".cjs", ".ts", ".mts"),
    ),
    Language(
        "rust",
        "Rust",
        "rust:1.85-alpine",
        ("cargo", "rustc", "rustup", "rustfmt", "rustdoc", "clippy-driver"),
        ("Cargo.toml", "Cargo.lock"),
        (".rs",),
    ),
    Language("go", "Go", "golang:1.23-alpine", ("go", "gofmt"), ("go.mod", "go.sum", "go.work"), (".go",)),
    Language(
        "ruby",
        "Ruby",
        "ruby:3.3-alpine",
        ("ruby", "irb", "gem", "bundle", "bundler", "rails", "rake", "rspec", "rubocop", "erb"),
        ("Gemfile", "Gemfile.lock", "Rakefile", "*.gemspec"),
        (".rb",),
    ),
    Language(
        "java",
        "Java",
        "eclipse-temurin:21-alpine",
        ("java", "javac", "jar", "jshell", "javadoc", "mvn", "mvnw", "gradle", "gradlew"),
        ("pom.xml", "build.gradle", "build.gradle.kts", "settings.gradle", "settings.gradle.kts", "mvnw", "gradlew"),
        (".java",),
    ),
    Language(
        "php",
        "PHP",
        "php:8.3-alpine",
        ("php", "composer", "phpunit", "phpstan", "artisan"),
        ("composer.json", "composer.lock"),
        (".php",),
    ),
    Language(
        "dotnet",
        ".NET",
        "mcr.microsoft.com/dotnet/sdk:8.0",
        ("dotnet", "csc", "fsi"),
        ("*.csproj", "*.fsproj", "*.vbproj", "*.sln", "global.json"),
        (".csx", ".fsx"),
    ),
    Language(
        "terraform",
        "Terraform",
        "hashicorp/terraform:1.10",
        ("terraform",),
        ("*.tf", ".terraform.lock.hcl"),
        (),
    ),
    Language("elixir", "Elixir", "elixir:1.17-alpine", ("elixir", "elixirc", "mix", "iex"), ("mix.exs",), (".exs",)),
    Language(
        "lua",
        "Lua",
        "nickblah/lua:5.4-alpine",
        ("lua", "luac", "luajit", "luarocks"),
        ("*.rockspec", ".luarc.json"),
        (".lua",),
    ),
    Language(
        "c",
        "C/C++",
        "gcc:14-bookworm",
        ("gcc", "g++", "cc", "c++", "cpp", "clang", "clang++", "make", "gmake", "cmake", "ctest", "ninja", "meson"),
        ("CMakeLists.txt", "meson.build", "configure.ac", "Makefile", "makefile", "GNUmakefile"),
        (".c", ".cc", ".cpp"),
    ),
    Language("shell", "Shell", DEFAULT_IMAGE, ("sh", "bash", "zsh", "ash", "dash", "busybox"), (), (".sh", ".bash")),
)

BY_NAME = {language.name: language for language in LANGUAGES}
BY_COMMAND = {command: language for language in LANGUAGES for command in language.commands}
IMAGES = frozenset(language.image for language in LANGUAGES)  # what detection alone can choose


def find_by_command(word: str) -> Language | None:
    """`python3.12`, `/usr/bin/gcc-14` and the like are the command without its directory and version."""
    name = word.rpartition("/")[2]
    return BY_COMMAND.get(name) or BY_COMMAND.get(name.rstrip("0123456789.").removesuffix("-"))


def find_by_ending(word: str) -> Language | None:
    for language in LANGUAGES:
        if word.endswith(language.endings):
            return language
    return None


def find_by_files(names: frozenset[str]) -> tuple[Language, str] | None:
    """Returns the language and the file that decided."""
    for language in LANGUAGES:
        for pattern in language.files:
            if pattern in names:
                return language, pattern
            if pattern.startswith("*"):
                fitting = sorted(name for name in names if name.endswith(pattern[1:]))
                if fitting:
                    return language, fitting[0]
    return None
