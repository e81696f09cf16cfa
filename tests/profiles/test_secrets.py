"""What of a machine a permissive sandbox gets, and what it never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.profiles.environment import MAX_BYTES, MAX_KEYS, pass_environment
from k8e.profiles.errors import ProfileError
from k8e.profiles.fallback import fall_back
from k8e.profiles.options import Context, SandboxOptions
from k8e.profiles.protection import HIDDEN, KEPT, choose_kept, find_new, is_credential_path, is_private
from k8e.profiles.sandbox_policy import build_policy, check_name
from tests.profiles.strategies import CONTEXT

STAY = """
    PATH HOME USER SHELL PWD SSH_AUTH_SOCK XDG_RUNTIME_DIR DBUS_SESSION_BUS_ADDRESS LD_PRELOAD DISPLAY KUBECONFIG
    AWS_ACCESS_KEY_ID AWS_PROFILE GITHUB_TOKEN GH_HOST ANTHROPIC_API_KEY OPENAI_BASE_URL GEMINI_API_KEY NPM_CONFIG_X
    MY_SECRET DB_PASSWORD PGPASSWORD API_KEY apikey MyToken SESSION_COOKIE STRIPE_X DATABASE_DSN K8E_RUN_DIR BASH_ENV
    GIT_SSH_COMMAND NODE_OPTIONS CLAUDECODE VAULT_ADDR DOCKER_HOST
""".split()  # noqa: SIM905
HIDE = """
    .ssh .gnupg .aws .azure .config/gcloud .kube .docker .netrc .npmrc .pypirc .git-credentials .config/gh .claude
    .codex .gemini .mozilla .config/google-chrome .config/chromium .password-store .bash_history .config/agentkernel
""".split()  # noqa: SIM905


class TestEnvironment:
    @pytest.mark.parametrize("name", STAY)
    def test_credentials_and_the_session_stay_outside(self, name: str) -> None:
        passed = pass_environment({name: "x", "EDITION": "y"})
        assert passed.given == (("EDITION", "y"),)
        assert passed.withheld == (name,)

    @pytest.mark.parametrize("name", ["LANG", "LC_ALL", "TERM", "TZ", "DEBUG", "CI", "NODE_ENV", "MONKEY", "RUST_LOG"])
    def test_the_rest_goes_in(self, name: str) -> None:
        assert pass_environment({name: "x"}).given == ((name, "x"),)

    @pytest.mark.parametrize(
        "value",
        [
            "https://ann:pw@host/",
            "ghp_abc",
            "sk-abc",
            "-----BEGIN X-----",
            "postgres://u@h/db",
            "AKIAABC",
        ],
    )
    def test_values_that_are_credentials_whatever_their_name(self, value: str) -> None:
        assert pass_environment({"HARMLESS": value}).given == ()

    @given(st.dictionaries(st.text(min_size=1, max_size=9), st.text(max_size=2000), max_size=90))
    def test_nothing_is_lost_without_a_word_and_the_limits_are_kept(self, environ: dict[str, str]) -> None:
        passed = pass_environment(environ)
        names = [name for name, _ in passed.given]
        assert sorted((*names, *passed.withheld, *passed.left_out)) == sorted(environ)
        assert len(names) < MAX_KEYS
        assert sum(len(name.encode()) + len(value.encode()) for name, value in passed.given) < MAX_BYTES

    def test_what_was_typed_goes_in_whatever_it_is(self) -> None:
        policy = build_policy(SandboxOptions(env=(("GITHUB_TOKEN", "t"),)), CONTEXT)
        assert policy.to_request()["env"] == {"GITHUB_TOKEN": "t"}


class TestHome:
    def test_is_read_only_and_without_credentials(self) -> None:
        (project, home) = build_policy(SandboxOptions(profile="permissive"), CONTEXT).mounts
        assert (home.source, home.target, home.writable) == ("/home/ann", "/home/user", False)
        assert set(HIDE) <= set(home.hidden)
        assert (project.target, project.writable) == ("/workspace", True)

    def test_names_are_relative_and_plain(self) -> None:
        assert len(set(HIDDEN)) == len(HIDDEN)
        for name in (*HIDDEN, *KEPT):
            assert not name.startswith("/")
            assert "" not in name.split("/")
            assert ".." not in name.split("/")

    def test_what_lies_below_is_hidden_too(self) -> None:
        assert is_credential_path(".ssh/id_rsa")
        assert is_credential_path(".config/gcloud")
        assert not is_credential_path(".sshx")
        assert not is_credential_path(".config")


class TestProject:
    @pytest.mark.parametrize(
        "cwd",
        [
            *("/", "/etc", "/etc/ssh", "/usr/local", "/proc/1", "/home", "/home/ann", "/home/ann/.ssh", "/tmp"),
            *("/home/ann/.config", "/home/ann/.local/share", "/home/bob", "/home/bob/.ssh", "/root/.ssh"),
            *("/home/ann/.aws/sso", "/root", "/var/lib/k8e", "/run/user/0", "", "relative"),
        ],
    )
    def test_a_folder_that_is_more_than_a_project_is_not_mounted(self, cwd: str) -> None:
        with pytest.raises(ProfileError) as caught:
            build_policy(SandboxOptions(mode="claude"), CONTEXT.but(cwd=cwd))
        assert caught.value.code in ("project_refused", "no_project")
        assert caught.value.hint

    @pytest.mark.parametrize(
        "cwd",
        ["/home/ann/work", "/srv/app", "/tmp/x", "/root/x", "/home/ann/.config/app", "/home/bob/x", "/home/anna/x"],
    )
    def test_a_project_is(self, cwd: str) -> None:
        (mount,) = build_policy(SandboxOptions(mode="claude"), CONTEXT.but(cwd=cwd)).mounts
        assert mount.source == cwd

    def test_what_runs_on_the_machine_is_kept(self) -> None:
        always = {".git", ".vscode", ".claude", ".codex", ".gemini"}
        assert set(choose_kept({"src"})) == always
        assert set(choose_kept({"src", ".envrc", "agentkernel.toml"})) == always | {".envrc", "agentkernel.toml"}
        assert find_new({"src"}, {"src", ".git", ".envrc", "x"}) == (".envrc",)

    def test_a_home_that_is_none_is_not_mounted(self) -> None:
        with pytest.raises(ProfileError, match="no_home"):
            build_policy(SandboxOptions(mount_home=True), Context(home=""))

    def test_secrets_of_a_project_are_known_by_name(self) -> None:
        for name in (".env", "a/.env.local", "id_rsa", "x.pem", ".git/config", "deploy/.npmrc"):
            assert is_private(name), name
        for name in ("env.py", "keys.md", "config/settings.json", "identity.py"):
            assert not is_private(name), name


class TestNames:
    @pytest.mark.parametrize("name", ["a", "A-b_9", "x" * 63, "_x"])
    def test_plain_ones_are_taken(self, name: str) -> None:
        assert check_name(name) == name

    @pytest.mark.parametrize("name", ["", "-a", "x" * 64, "../../x", "a b", "a\n", "a/b", "ä", "a.b", "--help", "\0"])
    def test_others_are_refused(self, name: str) -> None:
        with pytest.raises(ProfileError, match="invalid_name"):
            check_name(name)


class TestFallback:
    HAVE = frozenset({"/usr/bin/python3", "/usr/bin/sh", "/usr/local/bin/npm"})

    def test_a_detected_image_is_replaced_where_the_machine_has_the_command(self) -> None:
        policy = build_policy(SandboxOptions(), CONTEXT, ("sh", "-c", "npm test"))
        found = fall_back(policy, "no route to it", self.HAVE.__contains__)
        assert found is not None
        other, line = found
        assert (other.image, other.image_by) == ("host", "fallback")
        assert line == "node:22-alpine cannot be had (no route to it): using this machine's own tools"
        assert other.but(image="", image_by="", image_reason="") == policy.but(image="", image_by="", image_reason="")

    def test_not_where_it_does_not(self) -> None:
        assert fall_back(build_policy(SandboxOptions(), CONTEXT, ("cargo",)), "x", self.HAVE.__contains__) is None
        assert (
            fall_back(build_policy(SandboxOptions(), CONTEXT, ("/opt/x/python3",)), "x", self.HAVE.__contains__) is None
        )
        assert (
            fall_back(build_policy(SandboxOptions(), CONTEXT, ("/usr/bin/python3",)), "x", self.HAVE.__contains__)
            is not None
        )

    @pytest.mark.parametrize("asked", [SandboxOptions(image="python:3.12-alpine"), SandboxOptions(language="python")])
    def test_an_image_that_was_asked_for_is_never_replaced(self, asked: SandboxOptions) -> None:
        assert fall_back(build_policy(asked, CONTEXT, ("python3",)), "x", lambda path: True) is None

    def test_nor_twice(self) -> None:
        policy = build_policy(SandboxOptions(), CONTEXT, ("python3",))
        found = fall_back(policy, "x", lambda path: True)
        assert found is not None
        assert fall_back(found[0], "x", lambda path: True) is None
