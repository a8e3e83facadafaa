"""Who may send control requests: by the token, or, where there is none, from loopback and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from residency.errors import SettingsError
from residency.http_guard import Guard
from residency.settings import control_token

TOKEN = "0123456789abcdef"
LOCAL: dict[str, Any] = {"server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 50000)}


def scope(*headers: tuple[str, str], host: str | None = "localhost:8000", **fields: Any) -> dict[str, Any]:
    given = [*headers, *([("host", host)] if host is not None else [])]
    return {**LOCAL, "headers": [(name.encode(), value.encode("latin-1")) for name, value in given], **fields}


def status(guard: Guard, asked: dict[str, Any]) -> int | None:
    problem = guard.check(asked)
    return None if problem is None else problem.status


@pytest.mark.parametrize("server", [("127.0.0.1", 8000), ("127.8.0.3", 1), ("::1", 8000), ("::ffff:127.0.0.1", 8000)])
@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000"])
def test_without_a_token_loopback_is_served(server: tuple[str, int], host: str) -> None:
    assert status(Guard(None), scope(host=host, server=server, client=(server[0], 5))) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"server": ("10.0.0.7", 8000)},
        {"server": ("0.0.0.0", 8000)},
        {"server": ("::", 8000)},
        {"server": ("localhost.example", 8000)},
        {"server": ("", 8000)},
        {"server": None},
        {"server": ("/run/worker.sock", None)},
        {"client": ("10.0.0.9", 50000)},
        {"client": ("::ffff:10.0.0.9", 50000)},
    ],
    ids=str,
)
def test_without_a_token_nothing_else_is(fields: dict[str, Any]) -> None:
    problem = Guard(None).check(scope(**fields))

    assert problem is not None and problem.status == 403
    assert "RESIDENCY_CONTROL_TOKEN" in problem.remedy


@pytest.mark.parametrize(
    "header",
    [
        ("x-forwarded-for", "127.0.0.1"),
        ("X-Forwarded-Proto", "https"),
        ("Forwarded", "for=127.0.0.1"),
        ("via", "1.1 proxy"),
        ("x-real-ip", "127.0.0.1"),
        ("x-envoy-external-address", "1.2.3.4"),
        ("cf-connecting-ip", "127.0.0.1"),
        ("True-Client-IP", "127.0.0.1"),
        ("x-original-for", "127.0.0.1"),
        ("origin", "http://localhost:8000"),
    ],
    ids=lambda header: header[0],
)
def test_what_came_through_a_proxy_or_from_a_page_is_not_local(header: tuple[str, str]) -> None:
    assert status(Guard(None), scope(header)) == 403


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "", "127.0.0.1.nip.io"),
        *("[::1].evil.example", "localhost:80.evil.example", "[::1", "::1", "localhost:80:80"),
    ],
)
def test_a_name_that_may_be_pointed_at_us_is_not_local(host: str) -> None:
    assert status(Guard(None), scope(host=host)) == 403


def test_the_right_token_is_served_from_everywhere() -> None:
    asked = scope(("authorization", f"bearer {TOKEN}"), host="worker", server=("10.0.0.7", 1), client=("10.0.0.9", 1))

    assert status(Guard(TOKEN), asked) is None


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer wrong"),),
        (("authorization", TOKEN),),
        (("authorization", f"Basic {TOKEN}"),),
        (("authorization", f"Bearer {TOKEN}x"),),
        (("authorization", f"Bearer {TOKEN[:-1]}"),),
        (("authorization", "Bearer t\u00f6ken-t\u00f6ken-t\u00f6ken"),),
        (("authorization", "Bearer " + "x" * 100_000),),
        (("x-forwarded-for", "127.0.0.1"),),
    ],
    ids=lambda headers: str(headers)[:40],
)
def test_with_a_token_nothing_else_is_served_not_even_loopback(headers: tuple[tuple[str, str], ...]) -> None:
    problem = Guard(TOKEN).check(scope(*headers))

    assert problem is not None and problem.status == 401
    assert problem.headers == {"www-authenticate": "Bearer"}
    assert TOKEN not in str(problem.body) and "wrong'" not in str(problem.body)


@pytest.mark.parametrize("name", ["authorization", "host", "content-type"])
def test_a_header_that_comes_twice_is_refused(name: str) -> None:
    header = (name, f"Bearer {TOKEN}")

    assert status(Guard(TOKEN), scope(header, header, host=None)) == 400


def test_a_token_comes_from_the_program_then_its_file_then_the_variables(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "token", tmp_path / "other"
    file.write_text("token-of-the-file\n")
    other.write_text("token-of-the-other-file")
    assert control_token() is None
    monkeypatch.setenv("RESIDENCY_CONTROL_TOKEN_FILE", str(other))
    assert control_token() == "token-of-the-other-file"
    monkeypatch.setenv("RESIDENCY_CONTROL_TOKEN", "token-of-the-variable")
    assert control_token() == "token-of-the-variable"
    assert control_token(file=file) == "token-of-the-file"
    assert control_token("token-of-the-program", file=file) == "token-of-the-program"


@pytest.mark.parametrize(
    "text", ["", "short", "fifteen letters", "with a space in it", "sch\u00f6ner-langer-token", "x" * 16 + "\n"]
)
def test_a_token_that_cannot_be_used_is_an_error_that_does_not_tell_it(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("RESIDENCY_CONTROL_TOKEN", text)
    with pytest.raises(SettingsError, match="RESIDENCY_CONTROL_TOKEN has .* characters; it needs") as caught:
        control_token()
    assert not text or text not in str(caught.value)
    with pytest.raises(SettingsError):
        Guard(control_token(text))
    (tmp_path / "file").write_text(text, encoding="utf-8")
    if text.strip() != "x" * 16:
        with pytest.raises(SettingsError, match="token file"):
            control_token(file=tmp_path / "file")


@pytest.mark.parametrize("content", [None, b"\xff" * 20, b"x" * 5000])
def test_a_token_file_that_cannot_be_used_is_named(content: bytes | None, tmp_path: Any) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)

    with pytest.raises(SettingsError, match=r"token file '.*token' .*; (name|write)"):
        control_token(file=tmp_path / "token")
