"""Scenario 3: write a file, run it, read what it made. As the document has it, and with files that are awkward."""

from __future__ import annotations

import json

from tests.scenarios.user import User


def test_as_the_document_has_it(user: User) -> None:
    script = r"""
        SID=$(k8e sandbox create | get session_id)
        k8e sandbox write $SID /workspace/analyze.py <<'PYEOF'
import csv, json
text = open('/workspace/data.csv').read().replace('\\n', '\n')   # echo of some shells leaves it as it is
rows = list(csv.DictReader(text.splitlines()))
json.dump({"count": len(rows), "sum": sum(int(row["value"]) for row in rows)}, open('/workspace/result.json', 'w'))
print(f"{len(rows)} rows")
PYEOF
        echo "name,value\na,1\nb,2" | k8e sandbox write $SID /workspace/data.csv
        k8e sandbox run "python3 /workspace/analyze.py" --session-id $SID
        k8e sandbox read $SID /workspace/result.json --raw; echo
        k8e sandbox read $SID /workspace/result.json
        k8e sandbox list $SID
        k8e sandbox destroy $SID
        k8e sandbox destroy $SID; echo $?
    """
    written, data, ran, raw, read, listed, destroyed, refused, code = user.lines(script)
    assert (json.loads(written)["ok"], json.loads(data)["path"]) == (True, "/workspace/data.csv")
    assert (json.loads(ran)["stdout"], json.loads(ran)["exit_code"]) == ("2 rows\n", 0)
    assert json.loads(raw) == {"count": 2, "sum": 3}
    assert json.loads(read) == {"content": raw, "path": "/workspace/result.json", "encoding": "utf-8"}
    files = {entry["path"]: entry for entry in json.loads(listed)["files"]}
    assert set(files) == {"/workspace/analyze.py", "/workspace/data.csv", "/workspace/result.json"}
    assert files["/workspace/result.json"]["size"] == len(raw)
    assert json.loads(destroyed) == {"ok": True}
    assert (json.loads(refused)["code"], code) == ("session_not_found", "1")


def test_bytes_and_modes_and_appending(user: User) -> None:
    content = bytes(range(256)) * 4000
    (user.home / "in").write_bytes(content)
    script = """
        SID=$(k8e sandbox create | get session_id)
        k8e sandbox write $SID blob < in | get bytes; echo
        k8e sandbox read $SID blob --raw | cmp - in && echo same
        k8e sandbox read $SID blob | get encoding; echo
        k8e sandbox write $SID blob --mode a < in | get bytes; echo
        k8e sandbox run 'sha256sum < blob' --session-id $SID --raw
        cat in in | sha256sum
        printf '' | k8e sandbox write $SID empty > /dev/null
        k8e sandbox read $SID empty --raw | wc -c
    """
    first, same, encoding, second, inside, outside, empty = user.lines(script)
    assert (first, same, encoding, second) == (str(len(content)), "same", "base64", str(len(content)))
    assert inside == outside
    assert empty == "0"


def test_names_that_shells_trip_over(user: User) -> None:
    script = r"""
        SID=$(k8e sandbox create | get session_id)
        for name in 'with space' '$HOME' '-rf' "it's" 'back\slash' 'é漢字' '*' $'new\nline' 'a;b' '"' ; do
            printf '%s' "$name" | k8e sandbox write $SID "/workspace/dir/$name" > /dev/null || echo "not written: $name"
            [ "$(k8e sandbox read $SID "/workspace/dir/$name" --raw)" = "$name" ] || echo "not read: $name"
        done
        k8e sandbox run 'ls dir | wc -l; cd dir; for f in *; do [ "$(cat -- "$f")" = "$f" ] || echo "not $f"; done' \
            --session-id $SID --raw
        k8e sandbox list $SID --path /workspace/dir | python3 -c '
import json, sys
print(sorted(entry["path"].rpartition("dir/")[2] for entry in json.load(sys.stdin)["files"]) ==
      sorted(["with space", "$HOME", "-rf", "it\x27s", "back\\slash", "é漢字", "*", "new\nline", "a;b", "\""]))'
    """
    assert user.lines(script) == ["11", "True"], "one of the names is two lines long"


def test_ways_out_lead_nowhere(user: User) -> None:
    script = f"""
        SID=$(k8e sandbox create | get session_id)
        echo mine > {user.home}/outside
        k8e sandbox run 'ln -s {user.home}/outside link; ln -s / root; mkfifo pipe' --session-id $SID --raw
        for path in link ../../../..{user.home}/outside root{user.home}/outside pipe /proc/1/environ /absent; do
            k8e sandbox read $SID $path | get code; echo
        done
        echo theirs | k8e sandbox write $SID link | get code; echo
        cat {user.home}/outside
    """
    *codes, written, content = user.lines(script)
    assert codes[0] == codes[1] == codes[2] == codes[5] == "file_not_found"
    assert codes[3] == "not_a_regular_file"
    assert codes[4] in ("permission_denied", "file_not_found")
    assert written in ("file_not_found", "permission_denied")
    assert content == "mine"


def test_what_changed_since(user: User) -> None:
    script = """
        SID=$(k8e sandbox create | get session_id)
        k8e sandbox run 'touch -d @1000000000 old; touch new' --session-id $SID --raw
        k8e sandbox list $SID --since 1500000000 | python3 -c '
import json, sys
for entry in json.load(sys.stdin)["files"]: print(entry["path"], entry["type"])'
    """
    assert user.lines(script) == ["/workspace/new file"]
