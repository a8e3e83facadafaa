"""A PostgreSQL server of the tests' own: real, on a loopback port, in a temporary folder, with fsync on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psycopg

from residency.journal.pg_location import ServerLocation

PASSWORD = "adm1n-s3cret"

# Who runs it where the tests run as root, which the server refuses to.
_USER = "postgres"


class NoServer(Exception):
    """Raised where no server can be had; says why."""


def binaries() -> Path:
    """Return the folder of the newest server that is installed."""
    found = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: float(folder.parent.name))
    if found is not None:
        folders.insert(0, Path(found).resolve().parent)
    for folder in reversed(folders):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise NoServer("PostgreSQL is not installed")


class Server:
    """One server. `start()` and `stop()` as often as needed; `close()` removes it."""

    def __init__(self) -> None:
        self._binaries = binaries()
        self._user = self._other_user()
        self.folder = Path(tempfile.mkdtemp(prefix="residency-test-pg-"))
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        password = self.folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        made = ("--username=postgres", "--auth=scram-sha-256", f"--pwfile={password}", "--encoding=UTF8", "--locale=C")
        done = self._run("initdb", "-D", str(self.folder / "data"), "--no-sync", *made)
        if done.returncode:
            shutil.rmtree(self.folder)
            raise NoServer(f"initdb failed: {done.stderr.decode().strip()}")

    @property
    def address(self) -> str:
        """Host, port and database of its URLs."""
        return f"127.0.0.1:{self.port}/postgres"

    def url(self, user: str = "postgres", password: str = PASSWORD) -> str:
        """Return the URL of its database for a role."""
        return f"postgresql+psycopg://{user}:{password}@{self.address}"

    def start(self, **changed: str) -> None:
        """Start it, with some settings changed, and wait until it answers."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
            "fsync": "on",
            "shared_buffers": "16MB",
            "max_connections": "40",
            "synchronous_commit": "off",  # a default that the journal must not rely on
            "lc_messages": "C",
            **changed,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        deadline = time.monotonic() + 30
        with open(self.folder / "log", "ab") as log:
            while True:
                if self._process is None or self._process.poll() is not None:
                    # A killed server's shared memory may be in use for a moment yet.
                    self._process = self._popen(
                        "postgres", "-D", str(self.folder / "data"), *options, stdout=log, stderr=log
                    )
                with contextlib.suppress(psycopg.OperationalError):
                    self.admin().close()
                    return
                if time.monotonic() > deadline:
                    raise NoServer(f"the server does not start: {(self.folder / 'log').read_text()[-2000:]}")
                time.sleep(0.05)

    def stop(self) -> None:
        """End it in an orderly way; its sessions are ended. A second call is a no-op."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End it as a power loss would: SIGKILL to the first process, which the others do not survive."""
        self._end(signal.SIGKILL)

    def admin(self) -> psycopg.Connection[Any]:
        """Return a connection of the superuser, in autocommit mode."""
        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user="postgres",
            password=PASSWORD,
            dbname="postgres",
            autocommit=True,
            connect_timeout=5,
        )

    def close(self) -> None:
        """End it and remove its folder."""
        self._end(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, signum: int) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signum)
            process.wait(timeout=60)

    def _other_user(self) -> pwd.struct_passwd | None:
        if os.geteuid() != 0:
            return None
        try:
            return pwd.getpwnam(_USER)
        except KeyError:
            raise NoServer(f"PostgreSQL refuses to run as root, and there is no user {_USER}") from None

    def _popen(self, name: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        if self._user is not None:
            options |= {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        if sys.platform == "linux":
            options["preexec_fn"] = _end_with_parent
        # Not of the terminal's group: Ctrl-C ends the tests, and they end it.
        started: subprocess.Popen[Any] = subprocess.Popen(
            [str(self._binaries / name), *arguments], cwd=self.folder, start_new_session=True, **options
        )
        return started

    def _run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        process = self._popen(name, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output, errors = process.communicate(timeout=120)
        return subprocess.CompletedProcess(name, process.returncode, output, errors)


class Database:
    """A database for one run of tests, owned by a role that is no superuser. A journal is a schema in it."""

    # What the driver raises for a statement that a trigger or a constraint refuses.
    refusals = psycopg.IntegrityError

    def __init__(self, admin_url: str) -> None:
        self._server = ServerLocation.parse(admin_url)
        self.host, self.port = self._server.host or "127.0.0.1", self._server.port or 5432
        self.name = self.role = f"residency_test_{uuid.uuid4().hex[:12]}"
        with self._connect(self._server.database) as admin:
            admin.execute(f"CREATE ROLE {self.role} LOGIN PASSWORD '{PASSWORD}'".encode())
            admin.execute(f"CREATE DATABASE {self.name} OWNER {self.role} ENCODING 'UTF8' TEMPLATE template0".encode())
        self._admin = self._connect(self.name)

    @property
    def admin(self) -> psycopg.Connection[Any]:
        """A superuser's connection, in autocommit mode; made anew if the server has ended it."""
        try:
            self._admin.execute("SELECT 1")
        except psycopg.OperationalError:
            self._admin.close()
            self._admin = self._connect(self.name)
        return self._admin

    def new_schema(self) -> str:
        """Return a name that no schema has yet."""
        return f"t_{uuid.uuid4().hex[:12]}"

    def url(
        self,
        schema: str,
        *,
        user: str | None = None,
        password: str = PASSWORD,
        database: str | None = None,
        port: int | None = None,
    ) -> str:
        """Return the URL of a journal in it, for the role that owns it or another one, and through another port."""
        where = f"?host={self.host}&port={port or self.port}&schema={schema}"
        return f"postgresql+psycopg://{user or self.role}:{password}@/{database or self.name}{where}"

    def connect(self, schema: str) -> psycopg.Connection[Any]:
        """Return a superuser's connection that finds a journal's tables, in autocommit mode."""
        connection = self._connect(self.name)
        connection.execute(f"SET search_path = {schema}".encode())
        return connection

    def run(self, schema: str, sql: str) -> list[tuple[Any, ...]]:
        """Run statements as a superuser, in a schema; return the rows of the last one."""
        with self.connect(schema) as connection:
            done = connection.execute(sql.encode())
            return done.fetchall() if done.description is not None else []

    def end_sessions(self, role: str | None = None) -> int:
        """End every session of a role, and wait until they are gone; returns how many there were."""
        role = role or self.role
        found = self.admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s", (role,)
        )
        return len(found.fetchall())

    def drop_schema(self, schema: str) -> None:
        """End every session of the role, and drop a journal with all that is in it."""
        self.end_sessions()
        self.admin.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE".encode())

    def close(self) -> None:
        """Drop the database and the role."""
        self._admin.close()
        with self._connect(self._server.database) as admin:
            admin.execute(f"DROP DATABASE {self.name} WITH (FORCE)".encode())
            admin.execute(f"DROP ROLE {self.role}".encode())

    def _connect(self, database: str) -> psycopg.Connection[Any]:
        given: dict[str, Any] = {**self._server.parameters(), "dbname": database}
        return psycopg.connect(autocommit=True, connect_timeout=10, **given)


def _end_with_parent() -> None:
    """Have a server end if the tests are killed, or the thread that started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Proxy:
    """Stands between a journal and its server, and cuts the connection at a commit.

    cut: None to pass everything; `before` to swallow the commit; `after` to swallow the server's answer to it;
    `silent` to swallow everything from now on, and close nothing.
    """

    def __init__(self, host: str, port: int) -> None:
        self.cut: str | None = None
        self.num_cuts = 0
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Cut every connection, and take no new one."""
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._open += [client, server]
                threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()
                threading.Thread(target=self._to_client, args=(client, server), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self.cut == "silent":
                    continue
                if b"COMMIT" in data and self.cut == "before":
                    self._hang_up(client, server)
                    return
                server.sendall(data)
        self._hang_up(client, server, is_cut=False)

    def _to_client(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if self.cut == "silent":
                    continue
                # The server's answer to it: a command complete.
                if b"COMMIT\x00" in data and self.cut == "after":
                    self._hang_up(client, server)
                    return
                client.sendall(data)
        self._hang_up(client, server, is_cut=False)

    def _hang_up(self, client: socket.socket, server: socket.socket, *, is_cut: bool = True) -> None:
        if is_cut:
            self.cut = None
            self.num_cuts += 1
        for one in (client, server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
